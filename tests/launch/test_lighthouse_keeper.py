# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A lighthouse that is restarted at its address: its port, its start, and its crash loops."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from titan_ft.config import ConfigError
from titan_ft.launch import lighthouse_keeper
from titan_ft.launch.group.children import Children
from titan_ft.launch.lighthouse import LISTENER_VARIABLE
from titan_ft.launch.lighthouse_keeper import HOST, LighthouseKeeper
from titan_ft.run.lighthouse import LighthouseAddress, answers
from titan_ft.run.log import EventLog
from titan_ft.system.threads import call_aside, call_for_each
from titan_ft.system.token import TOKEN_ENV

TOKEN = "0123456789abcdef"
LISTENER = (
    f"import os, socket; s = socket.socket(fileno=int(os.environ['{LISTENER_VARIABLE}'])); "
    "print('listening', flush=True); "
)
ANSWER = "c, _ = s.accept(); c.recv(4096); c.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 1\\r\\n\\r\\n1'); c.close(); "
LISTEN = LISTENER + ANSWER
"""Answers the keeper once, and dies."""

MakeKeeper = Callable[..., LighthouseKeeper]


@pytest.fixture
def make_keeper(tmp_path: Path) -> Iterator[MakeKeeper]:
    children, events = (
        Children({TOKEN_ENV: TOKEN}),
        EventLog(tmp_path / "events" / "launcher-1.jsonl"),
    )
    made: list[LighthouseKeeper] = []

    def make(code: str, port: int = 0) -> LighthouseKeeper:
        def command(port: int) -> list[str]:
            return [sys.executable, "-c", code, str(port)]

        made.append(
            LighthouseKeeper(command, port, tmp_path / "lighthouse.log", children, TOKEN, events)
        )
        return made[-1]

    yield make
    children.stop(5.0)
    events.close()
    for keeper in made:
        keeper.close()


def poll_until(
    keeper: LighthouseKeeper, condition: Callable[[], object], seconds: float = 60.0
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        keeper.poll()
        time.sleep(0.01)


def test_port_is_held_while_nobody_listens(make_keeper: MakeKeeper) -> None:
    """While the lighthouse is away, no other process gets the port, even with SO_REUSEADDR. `close`
    releases the port.
    """
    keeper = make_keeper("")
    assert keeper.address == f"http://{HOST}:{keeper.port}"
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind((HOST, keeper.port))
    with pytest.raises(OSError, match="in use"):
        socket.create_server((HOST, keeper.port))  # sets the option
    keeper.close()
    with socket.socket() as other:
        other.bind((HOST, keeper.port))


def test_taken_port_is_a_mistake_in_the_command(make_keeper: MakeKeeper) -> None:
    """A --lighthouse-port at which another process listens is refused before anything is
    started.
    """
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError,
            match=rf"--lighthouse-port must be a free port, got {port} .*choose another",
        ):
            make_keeper("", port)


def test_lighthouse_that_cannot_start_is_not_started_again(
    make_keeper: MakeKeeper, tmp_path: Path
) -> None:
    """A lighthouse that ends without ever listening has wrong settings, which the keeper reports at
    once.
    """
    keeper = make_keeper("print('started'); raise SystemExit(2)")
    poll_until(keeper, lambda: keeper.failure)
    assert keeper.failure == "the lighthouse ended (exit status 2)"
    assert (tmp_path / "lighthouse.log").read_text() == "started\n"


def test_crash_loop_is_given_up(
    make_keeper: MakeKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deaths in a row count if each lighthouse lived for a short time, or never listened. A long
    life begins a new row.
    """
    monkeypatch.setattr("titan_ft.launch.lighthouse_keeper.backoff_seconds", lambda streak: 0.0)
    flag, log = tmp_path / "once", tmp_path / "lighthouse.log"
    first_only = f"import os; os.path.exists({str(flag)!r}) and exit(1); open({str(flag)!r}, 'w'); "
    keeper = make_keeper(first_only + LISTEN)
    poll_until(keeper, lambda: keeper.failure)
    assert (
        keeper.failure
        == "the lighthouse ended (exit status 1), 5 times in a row within moments of its start"
    )
    assert log.read_text().count("listening") == 1

    monkeypatch.setattr("titan_ft.launch.lighthouse_keeper.HEALTHY_SECONDS", 0.0)
    log.unlink()
    healthy = make_keeper(LISTEN)
    poll_until(healthy, lambda: log.exists() and log.read_text().count("listening") > 5)
    assert not healthy.failure


def test_a_lighthouse_that_answers_no_more_is_started_again(
    make_keeper: MakeKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a free descriptor torchft's lighthouse stops accepting for good, but its process
    lives on.
    """
    monkeypatch.setattr("titan_ft.launch.lighthouse_keeper._PROBE_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr("titan_ft.launch.lighthouse_keeper._PROBE_PAUSE_SECONDS", 0.0)
    flag, log = tmp_path / "once", tmp_path / "lighthouse.log"
    answer = f"[exec({ANSWER!r}) for _ in iter(int, 1)]"
    code = f"{LISTENER}import os, time; again = os.path.exists({str(flag)!r}); open({str(flag)!r}, 'w'); {ANSWER}"
    keeper = make_keeper(f"{code}time.sleep(600 * (not again)); {answer}")
    poll_until(keeper, lambda: keeper.listens)
    first = keeper.pid
    poll_until(keeper, lambda: keeper.listens and keeper.pid not in (None, first))
    assert log.read_text().count("listening") == 2
    (event,) = (
        json.loads(line)
        for line in (tmp_path / "events" / "launcher-1.jsonl").read_text().splitlines()[2:]
    )
    assert event["event"] == "lighthouse_restarted"
    assert event["reason"] == "the lighthouse was killed: it did not answer 3 times, 0.2 s each"


LIGHTHOUSE = """
import sys
from titan_ft.cli.main import main
sys.argv = ["titan-ft", "lighthouse", "--bind", f"127.0.0.1:{sys.argv[1]}"]
sys.argv += ["--min-replicas", "30"]  # else the first quorum leaves out the last groups
sys.exit(main())
"""
GROUPS, QUESTIONS = 30, 20


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Run twice as many processes as there are cores."""
    command = [sys.executable, "-c", "while True: pass"]
    spinning = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@contextlib.contextmanager
def training_groups(address: str) -> Iterator[list[int]]:
    """Let `GROUPS` clients heartbeat and ask for quorums; yields the numbers of the quorums."""
    from torchft.coordination import LighthouseClient

    url = LighthouseAddress(address, TOKEN).url_for_client(address)
    limit = timedelta(seconds=60)
    clients = [LighthouseClient(url, limit) for _ in range(GROUPS)]
    stop = threading.Event()
    quorums: list[int] = []

    def beat() -> None:
        while not stop.wait(0.1):
            for slot, client in enumerate(clients):
                client.heartbeat(f"group {slot}", limit)

    def ask() -> None:
        while not stop.is_set():
            found = call_for_each(
                lambda slot: clients[slot].quorum(f"group {slot}", limit).quorum_id,
                range(GROUPS),
                "ask",
                GROUPS,
            )
            quorums.append(found[0])

    ended = [call_aside(beat, "beat"), call_aside(ask, "ask")]
    try:
        yield quorums
    finally:
        stop.set()
        for each in ended:
            each.result(60.0)


@pytest.mark.slow
def test_thirty_groups_on_busy_cores_restart_no_lighthouse(
    make_keeper: MakeKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lighthouse that is slow, because others have the cores, answers in time and stays."""
    answered: list[bool] = []

    def record_answer(*arguments: Any) -> bool:
        answered.append(answers(*arguments))
        return answered[-1]

    monkeypatch.setattr(lighthouse_keeper, "answers", record_answer)
    keeper = make_keeper(LIGHTHOUSE)
    poll_until(keeper, lambda: keeper.listens)
    process, answered[:] = keeper.pid, []
    with busy_cores(), training_groups(keeper.address) as quorums:
        poll_until(keeper, lambda: len(answered) >= QUESTIONS, 180.0)
    assert keeper.pid == process
    assert len(quorums) > 1
    assert "lighthouse_restarted" not in (tmp_path / "events" / "launcher-1.jsonl").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_lighthouse_whose_log_is_full(make_keeper: MakeKeeper, tmp_path: Path) -> None:
    """The keeper notices without the log that the lighthouse listens, so a full disk does not
    prevent a restart.
    """
    (tmp_path / "lighthouse.log").symlink_to("/dev/full")
    keeper = make_keeper("import sys; from titan_ft.cli.main import main; main()")
    keeper._command = [
        sys.executable, "-m", "titan_ft", "lighthouse", "--bind", f"{HOST}:{keeper.port}"
    ]  # fmt: skip
    poll_until(keeper, lambda: keeper.listens)
    assert keeper.pid is not None
    os.kill(keeper.pid, signal.SIGKILL)
    poll_until(keeper, lambda: not keeper.listens)
    poll_until(keeper, lambda: keeper.listens)
    assert not keeper.failure


def test_native_module_comes_without_torch() -> None:
    """The lighthouse loads torchft's native module alone, so a restart does not wait for torch's
    imports.
    """
    code = (
        "import sys; from titan_ft.launch.lighthouse import _native_torchft; "
        "assert _native_torchft().LighthouseServer.__name__ == 'LighthouseServer'; "
        "sys.exit('torch' in sys.modules or 'torchft' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
