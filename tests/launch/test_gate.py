# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The gate before a real lighthouse: members pass, strangers neither pass nor keep members
waiting.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from titan_ft.launch.gate import Gate
from titan_ft.launch.lighthouse import ANNOUNCEMENT
from titan_ft.membership.follow import LighthouseFollower
from titan_ft.membership.pulse import StatusPage
from titan_ft.run.events import StrangerRefused
from titan_ft.run.lighthouse import Announcement, LighthouseAddress, answers
from titan_ft.run.tail import EventTail
from titan_ft.system.namespace import allow_namespaces
from titan_ft.system.refusal import Refusal
from titan_ft.system.seal import lighthouse_secret
from titan_ft.system.threads import call_aside

TOKEN = "0123456789abcdef" * 2
SECRET = lighthouse_secret(TOKEN)
DEADLINE = 30.0  # seconds; only ever reached by a bug
LONG = timedelta(seconds=DEADLINE)


class Lighthouse:
    """A process of `titan-ft lighthouse`."""

    def __init__(self, folder: Path, *options: str, **environ: str) -> None:
        self.folder = folder
        command = [
            sys.executable,
            "-m",
            "titan_ft",
            "lighthouse",
            "--bind",
            "127.0.0.1:0",
            *options,
        ]
        command += ["--run-dir", str(folder)]
        self.log = folder / "lighthouse.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TITAN_FT_TOKEN": TOKEN, **environ},
            )
        # Pieces of torchft's log may stand before each line.
        pattern = re.compile(ANNOUNCEMENT + r"(\S+)\n(?:.*\n)*?.*(only .* reach it.*)\n")
        found = wait_for(lambda: pattern.search(self.log.read_text()), "the lighthouse")
        self.address, self.access = LighthouseAddress(found[1], TOKEN), found[2]
        self.port = int(str(self.address).rsplit(":", 1)[1])

    def client(self, token: str = TOKEN) -> Any:
        from torchft.coordination import LighthouseClient

        address = LighthouseAddress(str(self.address), token)
        return LighthouseClient(address.url_for_client(str(address)), connect_timeout=LONG)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), DEADLINE)

    def heartbeats(self) -> dict[str, float]:
        status = StatusPage(self.address).read(DEADLINE)
        assert status is not None
        return status.heartbeats

    def refusals(self) -> list[StrangerRefused]:
        events = EventTail(self.folder / "events", from_start=True).poll()
        return [event for event in events if isinstance(event, StrangerRefused)]

    def count_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + DEADLINE
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return value


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Lighthouse]]:
    """Start a lighthouse."""
    os.environ.setdefault("RUST_LOG", "error")  # read when torchft is loaded
    started: list[Lighthouse] = []

    def start(*options: str, **environ: str) -> Lighthouse:
        started.append(Lighthouse(tmp_path, *options, **environ))
        return started[-1]

    yield start
    for lighthouse in started:
        lighthouse.process.kill()
        lighthouse.process.wait()


def is_closed(connection: socket.socket) -> bool:
    """Wait for the end of a connection; it brings nothing before."""
    connection.settimeout(DEADLINE)
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_members_pass_and_strangers_do_not(start: Callable[..., Lighthouse]) -> None:
    """With torchft's own client: heartbeats and quorums. The page needs the secret too, and HTTP
    kills no group.
    """
    lighthouse = start()
    member = lighthouse.client()
    member.heartbeat("member", LONG)
    assert member.quorum("member", LONG).quorum_id == 1
    for token in ("", "another token"):
        with pytest.raises(RuntimeError, match="transport error"):
            lighthouse.client(token).heartbeat("stranger", LONG)
    assert [*lighthouse.heartbeats()] == ["member"]
    assert answers(str(lighthouse.address), TOKEN, DEADLINE)
    assert not answers(str(lighthouse.address), "", DEADLINE)
    for token in ("", "another token"):
        assert LighthouseAddress(str(lighthouse.address), token).refuses(DEADLINE)
    assert not lighthouse.address.refuses(DEADLINE)
    kill = urllib.request.Request(
        f"{lighthouse.address}/replica/member/kill", headers=lighthouse.address.headers
    )
    kill.method = "POST"
    with pytest.raises((OSError, urllib.error.URLError)):
        urllib.request.urlopen(kill, timeout=DEADLINE)
    member.heartbeat("member", LONG)


def test_the_secret_is_shown_to_nobody(start: Callable[..., Lighthouse]) -> None:
    """Not in the list of processes, nor in the log, at the most talkative level of torchft's."""
    lighthouse = start(RUST_LOG="trace")
    lighthouse.client().heartbeat("member", LONG)
    lighthouse.heartbeats()
    with contextlib.suppress(RuntimeError):
        lighthouse.client("another").heartbeat("stranger", LONG)
    lighthouse.process.terminate()
    assert lighthouse.process.wait(DEADLINE) == 143
    shown = lighthouse.log.read_text()
    assert SECRET not in shown
    assert TOKEN not in shown


@pytest.mark.skipif(bool(allow_namespaces()), reason="this system allows no network namespaces")
def test_no_other_way_leads_to_the_lighthouse(start: Callable[..., Lighthouse]) -> None:
    """torchft's server listens in a namespace of its own: of its process, the host sees the gate's
    port alone.
    """
    lighthouse = start()
    assert lighthouse.access == "only processes with this run's TITAN_FT_TOKEN reach it"
    own = {
        os.stat(f"/proc/{lighthouse.process.pid}/fd/{fd}").st_ino
        for fd in _descriptors(lighthouse.process.pid)
    }
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[9]) in own
    ]
    assert [int(address.rsplit(":", 1)[1], 16) for address in listening] == [lighthouse.port]


def _descriptors(pid: int) -> list[str]:
    return [
        name for name in os.listdir(f"/proc/{pid}/fd") if os.path.exists(f"/proc/{pid}/fd/{name}")
    ]


def test_a_lighthouse_that_listens_no_more_ends_the_gate() -> None:
    """The open port of the gate would hide that, and all groups would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        inner = gone.getsockname()
    listener = socket.create_server(("127.0.0.1", 0))
    secret = lighthouse_secret(TOKEN)
    gate = Gate(listener, inner, secret, lambda refusal: None)
    ran = call_aside(gate.run, "gate")
    with socket.create_connection(listener.getsockname()) as member:
        request = f"GET / HTTP/1.1\r\nConnection: close\r\nAuthorization: Bearer {secret}\r\n\r\n"
        member.sendall(request.encode())
        with pytest.raises(RuntimeError, match="listens no more"):
            ran.result(DEADLINE)
    listener.close()


def test_half_open_connections_keep_nobody_waiting(start: Callable[..., Lighthouse]) -> None:
    """1,030 were the end of torchft's listener for good. They are closed after two seconds, the
    oldest earlier.
    """
    lighthouse = start()
    before = lighthouse.count_descriptors()
    idle = [lighthouse.connect() for _ in range(1100)]
    for connection in idle[::2]:
        with contextlib.suppress(OSError):  # closed, because so many others came
            connection.sendall(b"PRI * HTTP/2.0\r\n")
    lighthouse.client().heartbeat("member", LONG)
    assert all(is_closed(connection) for connection in idle)
    wait_for(lambda: lighthouse.count_descriptors() <= before + 8, "the descriptors are free again")
    kinds = ("silent", "crowd")
    refused = wait_for(
        lambda: len(found := lighthouse.refusals()) == len(kinds) and found, "the events"
    )
    assert sorted(event.kind for event in refused) == sorted(kinds), "one event for each kind"
    assert {event.source for event in refused} == {"127.0.0.1"}
    log = lighthouse.log.read_text()
    assert log.count("said once") == len(kinds)
    assert "too many connections at once" in log
    for connection in idle:
        connection.close()


@pytest.mark.parametrize("number_of_strangers", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_garbage_is_refused_while_a_member_beats(
    start: Callable[..., Lighthouse], number_of_strangers: int
) -> None:
    """Whatever comes at the port, in any pieces: the member goes on, and the process stays."""
    lighthouse = start()
    member = lighthouse.client()
    chance = random.Random(4)
    for number in range(number_of_strangers):
        with lighthouse.connect() as stranger, contextlib.suppress(OSError):
            stranger.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if number % 2 else b"")
            stranger.sendall(chance.randbytes(chance.randrange(200)))
        member.heartbeat("member", LONG)
    assert [*lighthouse.heartbeats()] == ["member"]


def test_a_held_connection_shows_the_lighthouses_end(
    start: Callable[..., Lighthouse], tmp_path: Path
) -> None:
    """A group follows a lighthouse by a connection that says nothing. The gate keeps it longer than
    a stranger's.
    """
    lighthouse = start()
    Announcement(str(lighthouse.address)).write(tmp_path / "announced")
    address = LighthouseAddress(f"file:{tmp_path / 'announced'}", TOKEN)
    address.wait(DEADLINE)
    follower = LighthouseFollower(address, 0, lambda place: False)
    try:
        wait_for(lambda: follower._connection is not None, "the connection")
        connection = follower._connection
        with lighthouse.connect() as stranger:
            assert is_closed(stranger)  # after its two seconds
        assert follower._connection is connection
        lighthouse.process.send_signal(signal.SIGKILL)
        wait_for(lambda: follower._connection is not connection, "the follower sees it")
    finally:
        # Left running, its thread fails the simulations of this process: they replace `os`.
        follower.close()


def test_without_a_token(tmp_path: Path) -> None:
    """On loopback there is no gate, as the second line says; at an address for other hosts that is
    a mistake.
    """
    environ = {name: value for name, value in os.environ.items() if name != "TITAN_FT_TOKEN"}
    command = [sys.executable, "-m", "titan_ft", "lighthouse", "--bind"]
    refused = subprocess.run(
        [*command, "[::]:0"], env=environ, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert (
        "TITAN_FT_TOKEN must be set to the same secret for the lighthouse and all groups"
        in refused.stderr
    )
    with subprocess.Popen(
        [*command, "127.0.0.1:0"], env=environ, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(ANNOUNCEMENT)
        assert "every process of this host can change and end the run" in process.stdout.readline()
        process.kill()


# The gate by itself, with an end behind it that the test holds


class Passage:
    """A gate on a thread, and the server behind it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.inner = socket.create_server(("127.0.0.1", 0))
        self.refusals: list[Refusal] = []
        self.gate = Gate(self.listener, self.inner.getsockname(), SECRET, self.refusals.append)
        self.port = self.listener.getsockname()[1]
        self.ended = call_aside(self.gate.run, "gate")

    def join(self) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a member's connection."""
        outside = socket.create_connection(("127.0.0.1", self.port), DEADLINE)
        hello = f"GET /status HTTP/1.1\r\nConnection: close\r\nAuthorization: Bearer {SECRET}\r\n\r\n".encode()
        outside.sendall(hello)
        inside, _ = self.inner.accept()
        assert inside.recv(len(hello), socket.MSG_WAITALL) == hello
        return outside, inside


@pytest.fixture
def passage() -> Iterator[Passage]:
    made = Passage()
    yield made
    made.gate.close()
    made.ended.result(DEADLINE)
    made.inner.close()


@pytest.mark.parametrize("inwards", [True, False])
def test_a_reader_that_is_slow_gets_everything(passage: Passage, inwards: bool) -> None:
    """More than all buffers take; other members go on meanwhile, and the end comes after the last
    byte.
    """
    slow, quick = passage.join(), passage.join()
    (writes, reads), data = (slow if inwards else slow[::-1]), random.Random(1).randbytes(24 << 20)

    def write() -> None:
        writes.sendall(data)
        writes.close()

    writer = call_aside(write, "writer")
    for _ in range(100):
        quick[0].sendall(b"heartbeat")
        assert quick[1].recv(9, socket.MSG_WAITALL) == b"heartbeat"
    received = b"".join(iter(lambda: reads.recv(1 << 20), b""))
    assert received == data
    writer.result(DEADLINE)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("reset", [True, False])
def test_an_end_that_goes_takes_the_other_along(passage: Passage, which: int, reset: bool) -> None:
    """By a reset as well; nothing of the connection stays in the gate."""
    ends = passage.join()
    if reset:
        ends[which].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    ends[which].close()
    assert is_closed(ends[1 - which])
    wait_for(lambda: not passage.gate._ends, "all is closed")


def test_a_lighthouse_may_have_all_descriptors_that_the_system_allows(
    start: Callable[..., Lighthouse],
) -> None:
    """Systems give a process 1,024 at first, and each group takes two."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = before[1]
    # This process, of other tests too, must be able to start another one.
    few = len(os.listdir("/proc/self/fd")) + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
    try:
        lighthouse = start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert resource.prlimit(lighthouse.process.pid, resource.RLIMIT_NOFILE) == (most, most)


def test_a_process_without_descriptors(passage: Passage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest stranger makes room for the next connection; without strangers the gate waits."""
    idle = socket.create_connection(("127.0.0.1", passage.port), DEADLINE)
    wait_for(lambda: passage.gate._strangers, "it is there")
    fails = [OSError(24, "Too many open files")] * 3

    class Listener(socket.socket):
        def accept(self) -> Any:
            if fails:
                raise fails.pop()
            return super().accept()

    monkeypatch.setattr(
        passage.gate, "_listener", Listener(fileno=os.dup(passage.listener.fileno()))
    )
    outside, inside = passage.join()
    assert is_closed(idle)
    assert not fails
    inside.sendall(b"answer")
    assert outside.recv(6, socket.MSG_WAITALL) == b"answer"
