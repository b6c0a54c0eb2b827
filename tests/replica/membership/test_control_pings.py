# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A parent finds a child whose process does not run.

A process that runs is never lost, whatever its Python code does.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.replica.membership.control_group import (
    DEADLINE,
    HOST,
    ControlGroup,
    make_tree,
    wait_until,
)
from titan_ft.membership.control_pings import EchoServer, Pings
from titan_ft.system.address import join_address

ROOT = Path(__file__).parents[3]
PATIENCE = 1.0
"""Seconds. A native thread on a busy machine answers far sooner."""

# Processes


class PingedGroup:
    """See `pinged_group.py`.

    With a fan-out of two, rank 1 has the children 3 and 4, and rank 2 has 5 and 6.
    """

    num_ranks = 7

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        command = [sys.executable, "-m", "tests.replica.membership.pinged_group"]
        numbers = [str(self.num_ranks), "2", str(PATIENCE)]
        self._process = subprocess.Popen(
            [*command, str(folder), *numbers], cwd=ROOT, start_new_session=True
        )
        wait_until(
            lambda: all(self.read(rank) for rank in range(self.num_ranks)), "all ranks are ready"
        )
        self._pids = [int(self.read(rank)[0].split()[1]) for rank in range(self.num_ranks)]

    def read(self, rank: int) -> list[str]:
        """Return the lines that a rank has written."""
        path = self._folder / f"rank-{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def losses(self, *ranks: int) -> list[list[str]]:
        """Return the losses that some ranks have reported."""
        return [[line for line in self.read(rank) if line.startswith("lost")] for rank in ranks]

    def send(self, number: int, *ranks: int) -> None:
        """Send a signal to some ranks, or to all."""
        for rank in ranks or range(self.num_ranks):
            os.kill(self._pids[rank], number)

    def wait_for(self, line: str, *ranks: int) -> None:
        """Wait until some ranks, or all, have written a line."""
        for rank in ranks or range(self.num_ranks):
            wait_until(lambda rank=rank: line in self.read(rank), f"rank {rank}: {line}")

    def check_agreement(self) -> None:
        """Let all ranks agree, and check that no rank is lost."""
        self.send(signal.SIGUSR2)
        self.wait_for("agreed")
        assert self.losses(*range(self.num_ranks)) == [[]] * self.num_ranks

    def close(self) -> None:
        """End all processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture
def pinged(tmp_path: Path) -> Iterator[PingedGroup]:
    group = PingedGroup(tmp_path)
    yield group
    group.close()


def test_a_long_call_is_no_silence_and_a_stopped_inner_rank_is(pinged: PingedGroup) -> None:
    """Rank 1 keeps Python's lock for ten heartbeat timeouts.

    When it is stopped, it alone is reported.
    """
    pinged.send(signal.SIGUSR1, 1)
    pinged.wait_for("held", 1)
    pinged.check_agreement()
    pinged.send(signal.SIGSTOP, 1)
    pinged.wait_for("lost 1 node-1 silent", 0, 2, 5, 6)
    assert pinged.losses(0, 2, 5, 6) == [["lost 1 node-1 silent"]] * 4
    # these ranks hear nothing, because their parent is stopped
    assert pinged.losses(3, 4) == [[], []]


def test_a_killed_rank_is_gone_and_not_silent(pinged: PingedGroup) -> None:
    """Both of its connections to its parent end in the same moment."""
    pinged.send(signal.SIGKILL, 1)
    pinged.wait_for("lost 1 node-1 gone", 0, 2, 3, 4, 5, 6)
    pinged.send(signal.SIGKILL, 2)
    pinged.wait_for("lost 2 node-2 gone", 0, 5, 6)
    assert pinged.losses(0) == [["lost 1 node-1 gone", "lost 2 node-2 gone"]]


def test_all_ranks_in_long_calls(pinged: PingedGroup) -> None:
    """The parents look late, and so know nothing about their children."""
    pinged.send(signal.SIGUSR1)
    pinged.wait_for("held")
    pinged.check_agreement()


def test_a_rank_that_has_left_may_be_silent(pinged: PingedGroup) -> None:
    """Only the rank that is stopped later is reported."""
    pinged.send(signal.SIGTERM, 6)
    pinged.wait_for("left", 6)
    pinged.send(signal.SIGSTOP, 5)
    pinged.wait_for("lost 5 node-5 silent", 0, 1, 2, 3, 4)
    assert pinged.losses(0, 1, 2, 3, 4) == [["lost 5 node-5 silent"]] * 5


def test_a_group_that_is_frozen_as_a_whole(pinged: PingedGroup) -> None:
    """The group thaws rank by rank, and every rank gets the whole time again."""
    pinged.send(signal.SIGSTOP)
    until = time.monotonic() + 2 * PATIENCE
    wait_until(lambda: time.monotonic() > until, "it was frozen for twice the patience")
    for rank in range(pinged.num_ranks):
        pinged.send(signal.SIGCONT, rank)
        until = time.monotonic() + PATIENCE / 10
        wait_until(lambda: time.monotonic() > until, "the next one thaws a moment later")  # noqa: B023  # at once
    pinged.check_agreement()
    pinged.send(signal.SIGSTOP, 2)
    pinged.wait_for("lost 2 node-2 silent", 0)


# Connections


def test_a_connection_that_is_closed_while_its_answer_waits() -> None:
    """The selector finds the socket ready before the close."""
    echo, selected = EchoServer(HOST), Selected()
    pings = Pings(PATIENCE, selected.selector)
    pings.add(1, echo.address)
    selected.serve_until(lambda: pings._pingers[1]._num_answered > 0, pings)
    pings._pingers[1].ping()
    ready: list[selectors.SelectorKey] = []
    wait_until(
        lambda: ready.extend(key for key, _ in selected.selector.select(0)) or ready,
        "the answer is there",
    )
    pings.remove(1)
    for key in ready:
        key.data(selectors.EVENT_READ)
    assert pings.look(time.monotonic()) == {}


def test_a_broken_connection_for_pings_is_made_again() -> None:
    """A reset costs one ping."""
    with ControlGroup(2, patience=PATIENCE) as group:
        group.check_agreements(1)
        sockets = group.trees[0]._sockets
        assert sockets is not None
        pinger = sockets._pings._pingers[1]
        for _ in range(3):
            wait_until(lambda: pinger._num_answered > 1, "pings are answered")
            with group.trees[0]._condition:
                broken = pinger._socket
                assert broken is not None
                broken.shutdown(socket.SHUT_RDWR)
            wait_until(lambda: pinger._socket not in (None, broken), "there is a new connection")  # noqa: B023
        wait_until(lambda: pinger._num_answered > 1, "pings are answered")
        group.check_agreements(1)
        assert group.losses == [[], []]


def test_a_rank_that_stops_answering_is_lost() -> None:
    """All ranks hear of the loss once."""
    with ControlGroup(4, patience=PATIENCE, fan_out=2) as group:
        group.check_agreements(1)
        sockets, echo = group.trees[1]._sockets, group.trees[3]._echo
        assert sockets is not None
        assert echo is not None
        wait_until(lambda: sockets._pings._pingers[3]._num_answered > 0, "rank 3 answers")
        echo.close()
        wait_until(lambda: all(group.losses[:3]), "all ranks hear of it")
        assert group.losses[:3] == [[3]] * 3
        (loss,) = group.trees[0].losses
        assert (loss.rank, loss.host) == (3, "node-3")
        assert loss.silent_seconds > PATIENCE


def test_ranks_that_nobody_watches_run_no_server() -> None:
    """Rank 0 runs no echo server, and without a patience no rank does."""
    with ControlGroup(2) as group:
        assert [tree._echo for tree in group.trees] == [None, None]
    with ControlGroup(2, patience=PATIENCE) as group:
        assert group.trees[0]._echo is None
    tree = make_tree(0, 1, None, patience=PATIENCE)
    assert tree._echo is None
    tree.close()


class Selected:
    """A selector with its thread, as `ControlSockets` has one."""

    def __init__(self) -> None:
        self.selector = selectors.EpollSelector()

    def serve_until(self, holds: Callable[[], object], pings: Pings) -> dict[int, float]:
        """Serve and look until a condition holds. Return the silent children of the last look."""
        end, silent = time.monotonic() + DEADLINE, {}
        while not holds():
            assert time.monotonic() < end
            for key, events in self.selector.select(max(0.0, pings.next_look - time.monotonic())):
                key.data(events)
            if time.monotonic() >= pings.next_look:
                silent = pings.look(time.monotonic())
        return silent


def test_another_server_at_the_address_is_no_answer() -> None:
    """The other server's bytes are not the numbers of the pings."""
    stranger = socket.create_server((HOST, 0))
    asked: list[bytes] = []

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                with stranger.accept()[0] as connection:
                    asked.append(connection.recv(64))
                    connection.sendall(struct.pack("=I", 77))
                    connection.recv(64)

    threading.Thread(target=answer, daemon=True).start()
    selected = Selected()
    pings = Pings(0.1, selected.selector)
    answers: list[int] = []
    pings._watch.note_answer = lambda child, now: answers.append(child)  # type: ignore[method-assign]
    pings.add(1, join_address(HOST, stranger.getsockname()[1]))
    selected.serve_until(lambda: len(asked) > 3, pings)
    assert not answers
    stranger.close()
    pings.remove(1)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_echo_server_listens_at_one_address(host: str) -> None:
    """torch's store listens at all addresses unless it is given a socket."""
    try:
        echo = EchoServer(host)
    except OSError:
        pytest.skip(f"this host has no {host}")
    port = int(echo.address.rpartition(":")[2])
    with socket.create_connection((host, port)):
        pass
    elsewhere = "127.0.0.2" if host == "127.0.0.1" else "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((elsewhere, port), timeout=1.0)
    echo.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=1.0)
