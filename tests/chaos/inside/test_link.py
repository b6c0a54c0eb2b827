# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A dead link between two of three processes on one host."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from titan_ft.chaos.inside import blackhole
from titan_ft.chaos.inside.blackhole import Connection
from titan_ft.chaos.inside.link import Location, PeerConnections

pytestmark = pytest.mark.skipif(not blackhole.supported(), reason="socket filters are Linux's")

A, B, C = 0, 1, 2
DEADLINE = 20.0  # seconds; only ever reached by a bug
SILENCE_SECONDS = 0.3  # of waiting for an answer that must not come


class Group:
    """One of the processes. Its methods are those of `member.Member`."""

    def __init__(self, folder: Path, replica: int, address: str) -> None:
        command = [
            sys.executable,
            str(Path(__file__).with_name("member.py")),
            str(folder),
            str(replica),
            address,
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, *command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def do(self, *command: object) -> Any:
        self.begin(*command)
        return self.result()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Groups:
    """All processes, each connected to every other one."""

    def __init__(self, folder: Path, address: str) -> None:
        self.each = [Group(folder, replica, address) for replica in (A, B, C)]
        self._ports = [group.do("port") for group in self.each]
        self._names = itertools.count()

    def open(self, one: int, other: int, alive: bool = True) -> str:
        """Connect one to the other; return the connection's name, or "" without an answer.

        Args:
            alive: whether an answer is expected. Then the wait is long enough for a busy machine.
        """
        name = f"{one} to {other}, {next(self._names)}"
        return (
            name if self.each[one].do("connect", name, self._ports[other], patience(alive)) else ""
        )

    def ask(self, one: int, name: str, alive: bool = True) -> bool:
        """Say whether the other end sends back "old"."""
        return bool(self.each[one].do("ask", name, "old", patience(alive)))

    def falls_silent(self, one: int, other: int) -> bool:
        """Say whether a new connection is silent for good as soon as it has been looked at."""
        name = self.open(one, other, alive=False)
        deadline = time.monotonic() + DEADLINE
        unanswered = 0 if name else 2
        while unanswered < 2 and time.monotonic() < deadline:  # one answer may be late
            unanswered = (
                0 if self.each[one].do("ask", name, "new", SILENCE_SECONDS) else unanswered + 1
            )
        return unanswered == 2

    def start_anew(self, replica: int, folder: Path, address: str) -> None:
        self.each[replica].close()
        self.each[replica] = Group(folder, replica, address)
        self._ports[replica] = self.each[replica].do("port")


def patience(alive: bool) -> float:
    return DEADLINE if alive else SILENCE_SECONDS


PAIRS = list(itertools.permutations((A, B, C), 2))


@pytest.fixture(params=["127.0.0.1", "::1"])
def address(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_groups(tmp_path: Path) -> Iterator[Callable[[str], Groups]]:
    made: list[Groups] = []

    def make(address: str) -> Groups:
        made.append(Groups(tmp_path, address))
        return made[-1]

    yield make
    for groups in made:
        for group in groups.each:
            group.close()


def cut(groups: Groups) -> None:
    assert groups.each[A].do("cut", B) == ""
    assert groups.each[B].do("cut", A) == ""


def mend(groups: Groups) -> None:
    groups.each[A].do("mend")
    groups.each[B].do("mend")


def test_only_the_link_is_dead_and_only_as_long_as_it_is(
    make_groups: Callable[[str], Groups], address: str
) -> None:
    """A and B lose each other and both reach C, on old and new connections; afterwards all reach
    each other.
    """
    groups = make_groups(address)
    old = {pair: groups.open(*pair) for pair in PAIRS}
    assert all(old.values())
    cut(groups)
    for (one, other), name in old.items():
        assert groups.ask(one, name, alive=C in (one, other)) == (C in (one, other)), name
    for pair in PAIRS:
        assert bool(groups.open(*pair, alive=C in pair)) == (C in pair), pair
    mend(groups)
    assert (
        groups.each[A].do("receive", old[A, B], 3)
        == groups.each[B].do("receive", old[B, A], 3)
        == "old"
    )
    assert all(groups.open(*pair) for pair in PAIRS)


@pytest.mark.parametrize("cutter", [A, B])
def test_one_end_is_enough(make_groups: Callable[[str], Groups], cutter: int) -> None:
    """When the other end's agent is not there any more, no connection works either, old or new."""
    groups = make_groups("127.0.0.1")
    old = {pair: groups.open(*pair) for pair in ((A, B), (B, A))}
    groups.each[cutter].do("cut", A + B - cutter)
    for (one, other), name in old.items():
        assert not groups.ask(one, name, alive=False)
        assert groups.falls_silent(one, other)
    assert groups.open(cutter, C)
    assert groups.open(C, cutter)


def test_what_both_ends_have_in_common_is_left_alone(make_groups: Callable[[str], Groups]) -> None:
    """Connections to a process that serves both groups, such as their stores' host, stay alive."""
    groups = make_groups("127.0.0.1")

    def echo() -> None:
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(100):
                connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=echo, daemon=True).start()
        assert groups.each[A].do("connect", "store", listener.getsockname()[1], DEADLINE)
        cut(groups)
        assert groups.ask(A, "store")


def test_a_peer_that_is_started_again_is_the_same_peer(
    make_groups: Callable[[str], Groups], tmp_path: Path
) -> None:
    """A restarted peer's new process is cut off too."""
    groups = make_groups("127.0.0.1")
    cut(groups)
    groups.start_anew(B, tmp_path, "127.0.0.1")
    assert groups.falls_silent(A, B)
    assert groups.open(B, C)


def connection(local: str, peer: str, inode: int) -> Connection:
    return Connection((ip_address(local), 1000), (ip_address(peer), 2000), 1, inode)


def test_a_peer_on_another_host_is_told_by_its_address(tmp_path: Path) -> None:
    """On another host the peer's connections are all those to its address, and no others."""
    here = Location.own(A, 0, "10.0.0.1", os.getppid())
    here.publish(tmp_path)
    for rank, address in enumerate(("10.0.0.2", "fd00::2")):
        replace(here, replica=B, rank=rank, host="another", address=address).publish(tmp_path)
    replace(here, replica=C, host="a third", address="10.0.0.3").publish(tmp_path)
    link = PeerConnections(tmp_path, B)
    assert link.obstacle() == ""
    connections = [
        connection("10.0.0.1", "10.0.0.2", 7),
        connection("10.0.0.1", "10.0.0.3", 8),
        connection("fd00::1", "fd00::2", 9),
        connection("10.0.0.1", "10.0.0.1", 10),
    ]
    assert link.choose(connections) == {7, 9}


def test_what_cannot_be_told_apart_is_refused(tmp_path: Path) -> None:
    """An unknown group, and two groups at one address of another host, are refused."""
    assert PeerConnections(tmp_path, B).obstacle() == "no worker of group 1 has told where it is"
    here = Location.own(A, 0, "10.0.0.1", os.getppid())
    afar = replace(here, replica=B, host="another", address="10.0.0.2")
    for worker in (here, afar, replace(afar, replica=C)):
        worker.publish(tmp_path)
    assert (
        PeerConnections(tmp_path, B).obstacle()
        == "group 1 shares 10.0.0.2 with group 2, which is not here"
    )
