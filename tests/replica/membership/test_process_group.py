# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Gloo is broken off.

Ranks are processes, and one of them is stopped. Only Gloo's sockets are shut down.

This file is also the ranks' program. It forks a rank for each line on stdin, so only the first
process imports.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp, TCPStore  # type: ignore[attr-defined]  # it is one of its exports
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions

from titan_ft.membership.process_group import BreakableGloo, _GlooConnection, _GlooOperation
from titan_ft.system.process import borrowed_socket, own_sockets

DEADLINE = 20.0  # seconds; only a bug reaches it
TIMEOUT = timedelta(seconds=90)  # timeout of the process groups, well above the deadline
# Number of float32. Gloo cuts the sum of three ranks into six parts, each larger than a socket's
# buffer.
SEGMENTS_OF_1_MIB = 6 << 18
TCP_INFO_BYTES_RECEIVED = 128  # offset in tcp_info, of linux/tcp.h
TWO_NOTICES = 96  # bytes: Gloo announces two segments before it waits


class Opened:
    """Sockets that other code opens while a process group is built."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.client = socket.create_connection(self.listener.getsockname())
        self.connection, _ = self.listener.accept()
        self.pair = socket.socketpair()
        self.datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.datagrams.bind(("127.0.0.1", 0))
        for each in (self.client, self.connection, *self.pair, self.datagrams):
            each.settimeout(DEADLINE)

    def living(self) -> list[str]:
        """Return the sockets that still work."""
        ways: dict[str, Callable[[], bytes]] = {
            "listener": lambda: self._pass(
                socket.create_connection(self.listener.getsockname()), self.listener.accept()[0]
            ),
            "connection": lambda: self._pass(self.client, self.connection),
            "pair": lambda: self._pass(*self.pair),
            "datagrams": self._pass_datagram,
        }
        return [name for name, way in ways.items() if self._works(way)]

    @staticmethod
    def _works(way: Callable[[], bytes]) -> bool:
        try:
            return way() == b"x"
        except OSError:
            return False

    @staticmethod
    def _pass(one: socket.socket, other: socket.socket) -> bytes:
        one.sendall(b"x")
        return other.recv(1)

    def _pass_datagram(self) -> bytes:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
            peer.bind(("127.0.0.1", 0))
            peer.settimeout(DEADLINE)
            self.datagrams.sendto(b"x", peer.getsockname())
            octets, _ = peer.recvfrom(1)
            peer.sendto(octets, self.datagrams.getsockname())
            return self.datagrams.recv(1)


def open_meanwhile() -> list[Opened]:
    """Open sockets during the set-up of every process group. Return the list that receives them."""
    opened: list[Opened] = []
    make = BreakableGloo._connect

    def open_and_make(self: BreakableGloo, *args: Any) -> Any:
        opened.append(Opened())
        return make(self, *args)

    BreakableGloo._connect = open_and_make  # type: ignore[method-assign]
    return opened


def listening() -> set[int]:
    """Return the inodes of this process's listening sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(os.fstat(each.fileno()).st_ino)
        except OSError:  # not a socket, or this folder
            continue
    return found


def all_reduce(group: BreakableGloo, elements: int = 1) -> str:
    """Sum numbers over the ranks. Return the result or the error."""
    options = AllreduceOptions()
    options.reduceOp = ReduceOp.SUM  # the stub knows only the enum's inner type
    options.timeout = TIMEOUT
    numbers = torch.ones(elements)
    try:
        group.allreduce([numbers], options).wait()
    except RuntimeError:
        return "broke"
    return f"sum {numbers[0].item():g}"


def all_gather(group: BreakableGloo, elements: int = 1) -> str:
    """Gather numbers of all ranks, as bytes like the exchange. Return the result or the error."""
    options = AllgatherOptions()
    options.timeout = TIMEOUT
    own = torch.ones(elements).view(torch.uint8)
    gathered = torch.zeros((group.current_group.size(), own.numel()), dtype=torch.uint8)
    try:
        group.allgather([list(gathered)], [own], options).wait()
    except RuntimeError:
        return "broke"
    return f"sum {gathered.view(torch.float32)[:, -1].sum().item():g}"


COLLECTIVES = {"all-reduce": all_reduce, "all-gather": all_gather}


def shrink_send_buffers() -> None:
    """Keep the kernel from buffering much that the other end does not read."""
    for descriptor, inode in own_sockets():
        with contextlib.suppress(OSError), borrowed_socket(descriptor, inode) as each:
            assert each is not None
            # The system rounds it up to its minimum.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)


def host_of(rank: int) -> str:
    """Return a rank's own address of this host."""
    return f"127.0.0.{2 + rank}"


def find_hosts(links: list[tuple[int, int]]) -> list[str]:
    """Return the addresses of both ends of connections of this process."""
    hosts = set()
    for descriptor, inode in links:
        with borrowed_socket(descriptor, inode) as each:
            assert each is not None
            hosts |= {each.getsockname()[0], each.getpeername()[0]}
    return sorted(hosts)


def wait_received(octets: int) -> None:
    """Wait until a connection of this process has received this many bytes."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        for descriptor, inode in own_sockets():
            with contextlib.suppress(OSError), borrowed_socket(descriptor, inode) as each:
                assert each is not None
                facts = each.getsockopt(
                    socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES_RECEIVED + 8
                )
                (received,) = struct.unpack_from("Q", facts, TCP_INFO_BYTES_RECEIVED)
                if received >= octets:
                    return
        time.sleep(0.01)
    raise AssertionError("the other rank's segments have not come")


def be_rank(order: dict[str, Any]) -> None:
    """Act as one rank. Orders come through the store, and reports go there."""
    rank, name = order["rank"], order["name"]
    # A client that waits at a store can report nothing meanwhile. So there are two.
    waits, tells = (
        TCPStore(
            "127.0.0.1", order["port"], is_master=False, timeout=TIMEOUT, wait_for_workers=False
        )
        for _ in range(2)
    )

    def tell(what: str, value: object = None) -> None:
        tells.set(f"{name}/{rank}/{what}", json.dumps(value))

    def wait(what: str) -> None:
        waits.wait([f"{name}/{rank}/{what}"], TIMEOUT)

    opened, collective = open_meanwhile(), COLLECTIVES[order["collective"]]
    group = BreakableGloo(TIMEOUT, host_of(rank))
    group.configure(f"127.0.0.1:{order['port']}/{name}", rank, order["ranks"])
    tell("first", collective(group))
    if rank == order["sender"]:
        shrink_send_buffers()
    wait("again")
    tell("links", len(group._connections))
    tell("hosts", find_hosts(group._connections))
    kept = group._pg  # otherwise its listener is closed, as it should be
    listeners = listening()
    reducing = threading.Thread(
        target=lambda: tell("second", collective(group, order["elements"])), daemon=True
    )
    if order["reduces"]:
        reducing.start()
    if rank == order["sender"]:
        wait_received(2 << 20)
        tell("received")
    wait("abort")
    began = time.monotonic()
    group.abort(errored=order["errored"])
    tell("aborted", time.monotonic() - began)
    if order["reduces"]:
        reducing.join()
    tell("living", opened[0].living())
    tell("spared", listeners <= listening())
    tell(
        "alone",
        [group.configure(f"127.0.0.1:{order['port']}/{name}{rank}", 0, 1), all_reduce(group)][1],
    )
    del kept
    os._exit(0)


def main() -> None:
    """Fork a rank for each order on stdin, and print its pid."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for them
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            be_rank(json.loads(line))
        print(pid, flush=True)


class Ranks:
    """The ranks of one test."""

    def __init__(self, nursery: subprocess.Popen[str], store: TCPStore, name: str) -> None:
        self._nursery, self._store, self._name = nursery, store, name
        self.pids: list[int] = []

    def start(
        self,
        ranks: int,
        errored: bool = True,
        reduces: bool = True,
        elements: int = 1,
        sender: int | None = None,
        collective: str = "all-reduce",
    ) -> None:
        """Start all ranks. Return when they have summed once.

        Args:
            errored: argument of `abort`.
            reduces: the ranks sum again.
            elements: number of elements in that sum.
            sender: rank that sends little ahead, and reports when it has received two segments of 1
                MiB.
            collective: the collective, a key of COLLECTIVES.
        """
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        order = {
            "port": self._store.port,
            "name": self._name,
            "ranks": ranks,
            "errored": errored,
            "reduces": reduces,
        }
        order |= {"elements": elements, "sender": sender, "collective": collective}
        for rank in range(ranks):
            print(json.dumps(order | {"rank": rank}), file=self._nursery.stdin, flush=True)
            self.pids.append(int(self._nursery.stdout.readline()))
        assert [self.hear(rank, "first") for rank in range(ranks)] == [f"sum {ranks}"] * ranks

    def tell(self, rank: int, what: str) -> None:
        """Let a rank go on."""
        self._store.set(f"{self._name}/{rank}/{what}", "")

    def hear(self, rank: int, what: str) -> Any:
        """Wait for a rank's report."""
        return json.loads(self._store.get(f"{self._name}/{rank}/{what}"))

    def stop(self, rank: int) -> None:
        """Stop a rank. Return when all its threads have stopped.

        On a busy machine, a thread that stops late could still read arriving bytes.
        """
        os.kill(self.pids[rank], signal.SIGSTOP)
        deadline = time.monotonic() + DEADLINE
        while any(_state(task) != "T" for task in Path(f"/proc/{self.pids[rank]}/task").iterdir()):
            assert time.monotonic() < deadline, "the rank does not stop"
            time.sleep(0.01)

    def wait_unread(self, pid: int, octets: int = 1) -> None:
        """Wait until this many bytes lie unread in each busy connection of a stopped process.

        By then the other ranks wait in their operation.
        """
        self._wait_queued(pid, lambda _, unread: unread >= octets)

    def wait_unsent(self, pid: int) -> None:
        """Wait until a process has bytes to send that the other end does not take."""
        self._wait_queued(pid, lambda unsent, _: unsent > 0)

    def _wait_queued(self, pid: int, condition: Callable[[int, int], bool]) -> None:
        """Wait until a connection of a process has these numbers of bytes in its queues."""
        sockets = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
        deadline = time.monotonic() + DEADLINE
        while True:
            tables = [
                Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
                for name in ("tcp", "tcp6")
            ]
            lines = [line.split() for table in tables for line in table]
            # State, then bytes to send and to read, in hex; the inode.
            mine = [line for line in lines if line[3] == "01" and f"socket:[{line[9]}]" in sockets]
            if any(condition(int(line[4][:8], 16), int(line[4][9:], 16)) for line in mine):
                return
            assert time.monotonic() < deadline, f"queues of {pid}: {[line[4] for line in mine]}"
            time.sleep(0.01)


def _state(task: Path) -> str:
    """Return the state of a thread, as `ps` shows it; "T" is stopped."""
    return (task / "stat").read_text().rpartition(") ")[2][0]


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """Provide the process that forks ranks."""
    command = [sys.executable, __file__]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()  # ends the process


@pytest.fixture
def ranks(nursery: subprocess.Popen[str], request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Provide the ranks of a test, and end them with the test."""
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=DEADLINE), wait_for_workers=False
    )
    ranks = Ranks(nursery, store, request.node.name)
    yield ranks
    for pid in ranks.pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def test_connections_are_between_the_addresses_that_the_groups_name(ranks: Ranks) -> None:
    """The host's own name often resolves to a loopback address, which no other host reaches."""
    ranks.start(3)
    for rank in range(3):
        ranks.tell(rank, "again")
    hosts = {host for rank in range(3) for host in ranks.hear(rank, "hosts")}
    assert hosts >= {host_of(0), host_of(1)}  # both listen; the last one connects to them


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_operation_that_waits_for_a_stopped_rank_ends_at_once(
    ranks: Ranks, num_ranks: int, collective: str
) -> None:
    """An abort ends the operation long before its timeout.

    The process can then be in another process group.
    """
    ranks.start(num_ranks, collective=collective)
    *live, stopped = range(num_ranks)
    ranks.stop(stopped)
    for rank in live:
        ranks.tell(rank, "again")
    ranks.wait_unread(ranks.pids[stopped])
    for rank in live:
        ranks.tell(rank, "abort")
    for rank in live:
        assert ranks.hear(rank, "second") == "broke"
        assert ranks.hear(rank, "alone") == "sum 1"


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("aborts", [False, True])
def test_an_operation_in_the_middle_of_a_send_to_a_rank_that_dies_ends(
    ranks: Ranks, collective: str, aborts: bool
) -> None:
    """Gloo does not report the lost connection to a sender.

    The sender notices it by itself, or an abort ends it.
    """
    # Of a ring: the sender sends to the victim, and receives from the third rank.
    victim, sender, third = (0, 1, 2) if collective == "all-reduce" else (0, 2, 1)
    ranks.start(3, elements=SEGMENTS_OF_1_MIB, sender=sender, collective=collective)
    for rank in (sender, third):
        ranks.stop(rank)
    ranks.tell(victim, "again")
    for rank in (sender, third):
        # The bytes that the victim is ready to receive and to send.
        ranks.wait_unread(ranks.pids[rank], TWO_NOTICES)
    ranks.stop(victim)
    for rank in (sender, third):
        os.kill(ranks.pids[rank], signal.SIGCONT)
        ranks.tell(rank, "again")
    ranks.hear(sender, "received")  # the sender waits for this
    ranks.wait_unsent(ranks.pids[sender])
    os.kill(ranks.pids[victim], signal.SIGKILL)
    if not aborts:
        assert ranks.hear(sender, "second") == "broke"
    for rank in (sender, third):
        ranks.tell(rank, "abort")
    for rank in (sender, third):
        assert ranks.hear(rank, "second") == "broke"
        assert ranks.hear(rank, "alone") == "sum 1"


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_operation_that_waits_for_a_rank_that_dies_breaks_by_itself(
    ranks: Ranks, num_ranks: int, collective: str
) -> None:
    """No abort is needed.

    The end of the connections reaches the ranks that send to the dead one or receive from it.
    """
    ranks.start(num_ranks, elements=SEGMENTS_OF_1_MIB, collective=collective)
    *live, dying = range(num_ranks)
    ranks.stop(dying)
    for rank in live:
        ranks.tell(rank, "again")
    ranks.wait_unread(ranks.pids[dying])
    os.kill(ranks.pids[dying], signal.SIGKILL)
    for rank in live:
        assert ranks.hear(rank, "second") == "broke"


class Work:
    """Stands in for an operation of Gloo that is complete after some checks.

    Until `busy_until`, some bytes arrive at each check.
    """

    def __init__(self, complete_at: float, peer: socket.socket, busy_until: int = 0) -> None:
        self.looks, self._complete_at, self._peer, self._busy_until = (
            0,
            complete_at,
            peer,
            busy_until,
        )

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.looks += 1
        if self.looks <= self._busy_until:
            self._peer.sendall(b"x")
            time.sleep(0.02)  # the system holds packets back until earlier ones are acknowledged
        if self.looks < self._complete_at:
            raise RuntimeError("timed out")
        return True

    def is_completed(self) -> bool:
        return self.looks >= self._complete_at


def test_an_operation_of_an_aborted_process_group_is_waited_for_no_longer() -> None:
    """The state of the connections makes no difference: Gloo may not have noticed the shutdown."""

    class Work:
        looks = 0

        def is_completed(self) -> bool:
            return False

        def wait(self, timeout: timedelta) -> bool:
            self.looks += 1
            assert self.looks == 1, "a second wait began"
            raise RuntimeError("timed out")

    with socket.socketpair()[0] as connection:
        aborted, descriptor = threading.Event(), connection.fileno()
        aborted.set()
        with pytest.raises(RuntimeError, match="broken off"):
            _GlooOperation(
                Work(), aborted, [_GlooConnection(descriptor, os.fstat(descriptor).st_ino)]
            ).wait()


def test_what_a_member_sent_before_it_closed_its_connections_still_comes() -> None:
    """A leaving group has done its part, which others pass on slowly.

    Only an idle operation is lost.
    """
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as peer,
        listener.accept()[0] as own,
    ):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _GlooConnection(own.fileno(), os.fstat(own.fileno()).st_ino)
        # the descriptor belongs to another file by now
        closed = _GlooConnection(link.descriptor, link.inode + 1)
        assert _GlooOperation(Work(50, peer), threading.Event(), [link]).wait(), "the file is open"
        assert _GlooOperation(Work(50, peer, 50), threading.Event(), [link, closed]).wait()
        work = Work(50, peer, 10)
        with pytest.raises(RuntimeError, match="a connection to another member is closed"):
            _GlooOperation(work, threading.Event(), [link, closed]).wait()
        assert 10 < work.looks < 20
    with pytest.raises(RuntimeError, match="is closed"):
        _GlooOperation(Work(50, peer), threading.Event(), [link]).wait()


@pytest.mark.parametrize("errored", [True, False])
def test_only_connections_of_gloo_are_shut_down(ranks: Ranks, errored: bool) -> None:
    """Sockets of other code and listening sockets are spared.

    With nothing under way, all are spared.
    """
    ranks.start(3, errored, reduces=False)
    for rank in range(3):
        ranks.tell(rank, "again")
        assert ranks.hear(rank, "links") == 2, "one connection to each other rank"
    ranks.tell(0, "abort")
    assert ranks.hear(0, "living") == ["listener", "connection", "pair", "datagrams"]
    assert ranks.hear(0, "spared") is True
    assert ranks.hear(0, "alone") == "sum 1"


if __name__ == "__main__":
    main()
