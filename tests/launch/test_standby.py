# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Standbys of one group, with fake workers, real processes and real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from titan_ft.launch.standby import MAX_FAILURES

sys.path.insert(0, str(Path(__file__).parent))

from supervised import Supervised


def start(run: Any, *options: str, ranks: int = 1) -> subprocess.Popen[str]:
    """Start a supervisor as a process of its own, whose stdin is open; a spare one if options say so."""
    command = [sys.executable, "-m", "titan_ft.launch.supervisor", f"--run-dir={run.paths.root}", f"--ranks={ranks}"]
    command += ["--module=fake_worker", "--lighthouse=http://127.0.0.1:1", *options]
    command += ["--", f"--job.dump_folder={run.paths.root}"]
    command += [] if "--spare" in options else ["--fault_tolerance.replica_id=0"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, env=run.env, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    run.processes.append(process)
    return process


def standbys(run: Any, count: int, known: list[int] | None = None) -> list[int]:
    """Wait for `count` standbys beyond the known ones; return the process id of each, by rank."""

    def found() -> list[int]:
        names = [path.stem.split("-") for path in run.orders.glob("*.standby")]
        new = sorted((int(rank), int(pid)) for rank, pid in names if int(pid) not in (known or []))
        return [pid for _, pid in new] if len(new) >= count else []

    return run.wait_until(found, what=f"{count} standbys")


def wait_asleep(run: Any, pids: list[int]) -> None:
    """Wait until standbys have done their imports, which end with the thread that does them."""
    for pid in pids:
        # The main thread, and the one that watches the parent.
        run.wait_until(lambda pid=pid: len(os.listdir(f"/proc/{pid}/task")) == 2, what=f"standby {pid} is ready")


def train(run: Any, attempt: int, ranks: int = 1) -> list[dict[str, Any]]:
    """Wait for the workers of an attempt, and let it commit a step, so that a standby is due."""
    workers = [run.worker(0, rank, attempt) for rank in range(ranks)]
    run.order(0, 0, attempt, "step 1")
    run.wait_obeyed(0, 0, attempt)
    return workers


def finish(run: Any, supervised: Supervised) -> None:
    run.order(0, "any", "any", "exit 0")
    assert supervised.wait() == 0


def test_standby_becomes_the_next_attempt(run: Any) -> None:
    """A group that committed gets a standby, which leaves no trace until the group dies, and then takes its place."""
    with Supervised(run, 2) as supervised:
        first = train(run, 0, ranks=2)
        waiting = standbys(run, 2)
        wait_asleep(run, waiting)
        assert len(list(run.paths.events.glob("replica-*"))) == 2
        assert not run.paths.logs(0, 1, 0).parent.exists()

        os.kill(first[1]["pid"], signal.SIGKILL)
        second = train(run, 1, ranks=2)
        errors = [worker["env"]["TORCHELASTIC_ERROR_FILE"] for worker in (*first, *second)]
        logs = [run.paths.logs(0, attempt, rank) for attempt in (0, 1) for rank in (0, 1)]
        assert errors == [str(log.with_name(f"{log.stem}.error.json")) for log in logs]
        assert [worker["pid"] for worker in second] == waiting
        assert not any(run.is_alive(worker["pid"]) for worker in first)
        assert second[1]["argv"] == first[1]["argv"]
        before, after = first[1]["env"], second[1]["env"]
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        told = {"TITAN_FT_ATTEMPT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE"}
        assert changed == {"MASTER_PORT", *told}
        assert run.paths.logs(0, 1, 1).read_text().splitlines() == ["out 0-1-1", "err 0-1-1"]
        restart = run.events("replica_restarted")[0]
        assert (restart["attempt"], restart["standby"]) == (1, True)
        started = [event for event in run.events("worker_started") if event["attempt"] == 1]
        assert all(event["time"] >= restart["time"] for event in started)

        wait_asleep(run, standbys(run, 2, known=waiting))
        finish(run, supervised)
    assert not any(run.is_alive(pid) for pid in standbys(run, 4))


def test_no_standby_before_the_group_trains(run: Any) -> None:
    """Nothing is started beside a group that has not committed yet."""
    with Supervised(run) as supervised:
        os.kill(run.worker(0, 0, 0)["pid"], signal.SIGKILL)
        run.worker(0, 0, 1)
        finish(run, supervised)
    assert run.events("replica_restarted")[0]["standby"] is False
    assert not list(run.orders.glob("*.standby"))


def test_standby_is_due_after_a_long_wait(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that waits for others for long gets a standby though it has not committed."""
    monkeypatch.setattr("titan_ft.launch.supervisor.STANDBY_AFTER_SECONDS", 0.1)
    with Supervised(run) as supervised:
        run.worker(0, 0, 0)
        standbys(run, 1)
        finish(run, supervised)


@pytest.mark.slow
def test_standby_can_be_turned_off(run: Any) -> None:
    """With --no-standby a group that trains has none; it is started anew when it dies."""
    supervisor = start(run, "--replica=0", "--no-standby")
    os.kill(train(run, 0)[0]["pid"], signal.SIGKILL)
    train(run, 1)
    run.order(0, "any", "any", "exit 0")
    assert supervisor.wait(20) == 0
    assert run.events("replica_restarted")[0]["standby"] is False
    assert not list(run.orders.glob("*.standby"))


def test_no_standby_without_a_restart_left(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that will not be restarted needs none, however long it runs."""
    monkeypatch.setattr("titan_ft.launch.supervisor.STANDBY_AFTER_SECONDS", 0.0)
    with Supervised(run, max_restarts=0) as supervised:
        train(run, 0)
        began = time.monotonic()
        run.wait_until(lambda: time.monotonic() - began > 2.5, what="time in which it would be due twice")
        finish(run, supervised)
    assert not list(run.orders.glob("*.standby"))


def test_group_dies_while_its_standby_imports(run: Any) -> None:
    """A standby that still imports takes over as soon as it is ready: it is ahead of workers started now."""
    with Supervised(run) as supervised:
        (run.orders / "slow-imports").touch()
        first = train(run, 0)
        waiting = standbys(run, 1)
        os.kill(first[0]["pid"], signal.SIGKILL)
        run.wait_until(lambda: run.events("replica_restarted"), what="restart")
        (run.orders / "slow-imports").unlink()
        assert run.worker(0, 0, 1)["pid"] == waiting[0]
        finish(run, supervised)
    assert run.events("replica_restarted")[0]["standby"] is True


@pytest.mark.slow
def test_dead_standby_is_replaced(run: Any) -> None:
    """A standby of which a rank dies is replaced as a whole, and does not touch the group that trains."""
    with Supervised(run, 2) as supervised:
        first = train(run, 0, ranks=2)
        waiting = standbys(run, 2)
        wait_asleep(run, waiting)
        os.kill(waiting[1], signal.SIGKILL)
        others = standbys(run, 2, known=waiting)
        wait_asleep(run, others)
        assert not run.is_alive(waiting[0])
        assert all(run.is_alive(worker["pid"]) for worker in first)
        os.kill(first[0]["pid"], signal.SIGKILL)
        assert [run.worker(0, rank, 1)["pid"] for rank in (0, 1)] == others
        finish(run, supervised)
    assert len(run.events("replica_restarted")) == 1


@pytest.mark.slow
def test_standby_that_cannot_import_is_given_up(run: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """After a few that failed no standby is started any more; a restart does without; the reason is printed."""
    with Supervised(run) as supervised:
        (run.orders / "bad-imports").touch()
        first = train(run, 0)
        tried = standbys(run, MAX_FAILURES)
        run.wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in tried), what="all collected")
        (run.orders / "bad-imports").unlink()
        os.kill(first[0]["pid"], signal.SIGKILL)
        assert run.worker(0, 0, 1)["pid"] not in tried
        finish(run, supervised)
    assert run.events("replica_restarted")[0]["standby"] is False
    assert len(list(run.orders.glob("*.standby"))) == MAX_FAILURES
    printed = "".join(capfd.readouterr())
    assert printed.count("ImportError: told to fail") == MAX_FAILURES
    assert "no other follows" in printed


@pytest.mark.slow
def test_standby_dies_as_it_should_begin(run: Any) -> None:
    """Group and standby die together: the group is started anew, as the same attempt."""
    supervisor = start(run, "--replica=0", ranks=2)
    first = train(run, 0, ranks=2)
    waiting = standbys(run, 2)
    wait_asleep(run, waiting)
    os.kill(supervisor.pid, signal.SIGSTOP)  # so that it sees both at the same look
    os.kill(waiting[1], signal.SIGKILL)
    os.kill(first[1]["pid"], signal.SIGKILL)
    os.kill(supervisor.pid, signal.SIGCONT)
    second = [run.worker(0, rank, 1) for rank in (0, 1)]
    assert not {worker["pid"] for worker in second} & set(waiting)
    assert not any(run.is_alive(pid) for pid in waiting)
    run.order(0, "any", "any", "exit 0")
    assert supervisor.wait(20) == 0
    assert len(run.events("replica_restarted")) == 1


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_standby_ends_with_its_supervisor(run: Any, signum: signal.Signals) -> None:
    """Whether the supervisor is asked to end or killed, no standby is left."""
    supervisor = start(run, "--replica=0", ranks=2)
    train(run, 0, ranks=2)
    waiting = standbys(run, 2)
    wait_asleep(run, waiting)
    os.kill(supervisor.pid, signum)
    supervisor.wait(20)
    run.wait_until(lambda: not any(run.is_alive(pid) for pid in waiting) and run.all_gone(), what="all gone")
    assert supervisor.communicate() == ("", "")
    assert not run.paths.logs(0, 1, 0).parent.exists()


def test_spare_takes_over_a_replica(run: Any) -> None:
    """A spare has a standby ready, and is the supervisor of the replica that it is told from that attempt on."""
    spare = start(run, "--spare", "--max-restarts=1", ranks=2)
    waiting = standbys(run, 2)
    wait_asleep(run, waiting)
    assert not list(run.paths.root.glob("*"))
    assert spare.stdin is not None
    spare.stdin.write(json.dumps({"replica": 3, "attempt": 5}) + "\n")
    spare.stdin.flush()
    workers = [run.worker(3, rank, 5) for rank in (0, 1)]
    assert [worker["pid"] for worker in workers] == waiting
    env = workers[1]["env"]
    assert workers[1]["argv"][-1] == "--fault_tolerance.replica_id=3"
    assert (env["TORCHFT_LIGHTHOUSE"], env["TITAN_FT_ATTEMPT"]) == ("http://127.0.0.1:1", "5")
    assert "out 3-1-5" in run.paths.logs(3, 5, 1).read_text()
    os.kill(waiting[0], signal.SIGKILL)
    assert run.worker(3, 0, 6)["argv"][-1] == "--fault_tolerance.replica_id=3"
    run.order(3, "any", "any", "exit 0")
    assert spare.wait(20) == 0
    story = [(event["replica"], event["attempt"], event["standby"]) for event in run.events("replica_restarted")]
    assert story == [(3, 5, True), (3, 6, False)]


@pytest.mark.parametrize("how", ["eof", "sigterm"])
def test_spare_that_is_not_needed_leaves_quietly(run: Any, how: str) -> None:
    """End of stdin, or SIGTERM, ends a spare that waits, with status 0, its standby, and no word."""
    spare = start(run, "--spare")
    waiting = standbys(run, 1)
    assert spare.stdin is not None
    if how == "eof":
        spare.stdin.close()
        spare.stdin = None  # or `communicate` would flush it
    else:
        spare.terminate()
    assert spare.wait(20) == 0
    assert not run.is_alive(waiting[0])
    assert spare.communicate() == ("", "")
    assert not list(run.paths.root.glob("*"))
