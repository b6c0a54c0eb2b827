# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The connection between two agents accepts messages of an agent of the same group and run only."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from titan_ft.launch.group.agent_connection import (
    AgentConnection,
    EndOrder,
    GroupOver,
    Hello,
    Message,
    Ping,
    WorkersState,
)
from titan_ft.launch.group.worker_exit import WorkerExit
from titan_ft.run.error_file import WorkerError

Sockets = tuple[socket.socket, socket.socket]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """Provide both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with one, other:
        yield one, other


def take(line: AgentConnection, *others: AgentConnection, number: int = 1) -> list[Message]:
    """Return so many messages of a line, while other lines exchange theirs."""
    messages: list[Message] = []
    deadline = time.monotonic() + 10.0
    while len(messages) < number:
        assert time.monotonic() < deadline, messages
        for other in others:
            other.poll()
        messages += line.poll()
    return messages


def test_messages_arrive_in_order(sockets: Sockets) -> None:
    """Messages of each kind, in both directions, also those sent before the other end existed."""
    leader, follower = (
        AgentConnection(end, "secret", 3, leads=leads)
        for end, leads in zip(sockets, (True, False), strict=True)
    )
    exit = WorkerExit(2, 77, 1, WorkerError("KeyError: x", transient=False, time=1.5), host="n1")
    state = WorkersState(4, {2: 77}, [exit], [], all_reaped=True, last_ping=0)
    follower.send(Hello("n1", 2))
    follower.send(state)
    leader.send(EndOrder(3.0))
    leader.send(GroupOver(2, "given up"))
    assert take(leader, follower, number=2) == [Hello("n1", 2), state]
    assert take(follower, number=2) == [EndOrder(3.0), GroupOver(2, "given up")]
    assert leader.own_address == "127.0.0.1"


def test_the_last_messages_of_a_closed_line_arrive(sockets: Sockets) -> None:
    """A follower that ends reports how its workers ended before; afterwards the end is noticed."""
    leader, follower = (
        AgentConnection(end, "secret", 3, leads=leads)
        for end, leads in zip(sockets, (True, False), strict=True)
    )
    leader.send(EndOrder(0.0))
    take(follower, leader)
    follower.send(Hello("n1", 2))
    follower.close()
    assert take(leader) == [Hello("n1", 2)]
    with pytest.raises(ConnectionError):
        take(leader)


def test_the_last_messages_arrive_although_the_other_end_takes_none(sockets: Sockets) -> None:
    """A leader asks a follower, and ends its workers, just after the follower reported their ends
    and ended.
    """
    leader, follower = (
        AgentConnection(end, "secret", 3, leads=leads)
        for end, leads in zip(sockets, (True, False), strict=True)
    )
    leader.send(EndOrder(0.0))
    take(follower, leader)
    follower.send(Hello("n1", 2))
    follower.close()
    for number in range(3):  # the first is answered by a reset
        leader.send(Ping(number))
        time.sleep(0.1)
    assert leader.poll() == [Hello("n1", 2)]
    with pytest.raises(ConnectionError):
        leader.poll()


@pytest.mark.parametrize(
    ("token", "slot"), [("guess", 3), ("", 3), ("secret", 4)], ids=["other", "none", "group"]
)
def test_an_agent_of_another_run_or_group_is_refused(
    sockets: Sockets, token: str, slot: int
) -> None:
    """No message of that agent is read, in either direction."""
    leader, follower = (
        AgentConnection(sockets[0], "secret", 3, leads=True),
        AgentConnection(sockets[1], token, slot, leads=False),
    )
    follower.send(Hello("n1", 2))
    with pytest.raises(
        ConnectionError, match="does not know this run's token, or is of another group"
    ):
        take(leader, follower)


def replayed(sent: bytes) -> bytes:
    nonce, hello, _ = sent.split(b"\n")
    return b"\n".join((nonce, hello, hello, b""))


def changed(sent: bytes) -> bytes:
    return sent.replace(b'"num_ranks":2', b'"num_ranks":9')


def read_until_broken(
    line: AgentConnection, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Poll a line until that raises; nothing may be read but what was sent once."""
    deadline = time.monotonic() + 10.0
    taken: list[Message] = []
    while True:
        assert time.monotonic() < deadline
        meanwhile()
        taken += line.poll()
        assert taken in ([], [Hello("n1", 2)])


@pytest.mark.parametrize("tamper", [replayed, changed])
def test_a_message_that_was_sent_before_or_changed_is_refused(
    sockets: Sockets, tamper: Callable[[bytes], bytes]
) -> None:
    """An attacker between the hosts can break the connection, and nothing more."""
    follower = AgentConnection(sockets[1], "secret", 3, leads=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        between = socket.create_connection(listener.getsockname(), timeout=10.0)
        accepted, _ = listener.accept()
    sockets[0].settimeout(10.0)
    with between, accepted:
        leader = AgentConnection(accepted, "secret", 3, leads=True)
        leader.poll()
        sockets[0].sendall(between.recv(4096))
        follower.send(Hello("n1", 2))
        sent = b""
        while sent.count(b"\n") < 2:
            follower.poll()
            sent += sockets[0].recv(4096)
        between.sendall(tamper(sent))
        with pytest.raises(ConnectionError, match="does not know"):
            read_until_broken(leader)


def test_what_echoes_an_end_is_not_the_other_end(sockets: Sockets) -> None:
    """Each direction has messages of its own: those of the leader are none of a follower."""
    leader, mirror = AgentConnection(sockets[0], "secret", 3, leads=True), sockets[1]
    leader.send(GroupOver(0, ""))
    mirror.setblocking(False)

    def echo() -> None:
        with contextlib.suppress(BlockingIOError):
            mirror.sendall(mirror.recv(4096))

    with pytest.raises(ConnectionError, match="does not know"):
        read_until_broken(leader, echo)


HELLO = b' {"type": "Hello", "host": "n1", "num_ranks": 2}\n'


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"x" * 3 * 2**20, "is no agent"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "is no agent"),
        (b"\n\n\n", "is no agent"),
        (b"0" * 32 + b"\n" + b"0" * 64 + HELLO, "does not know this run's token"),
        (b"0" * 32 + b"\n" + HELLO, "does not know this run's token"),
    ],
    ids=["endless", "http", "empty lines", "forged", "unsealed"],
)
def test_a_stranger_is_refused(sockets: Sockets, sent: bytes, reason: str) -> None:
    """Whatever it sends, and however much of it: no message of it is taken."""
    leader, stranger = AgentConnection(sockets[0], "secret", 3, leads=True), sockets[1]
    stranger.setblocking(False)
    rest = bytearray(sent)

    def send() -> None:
        with contextlib.suppress(BlockingIOError):
            del rest[: stranger.send(rest)]

    with pytest.raises(ConnectionError, match=reason):
        read_until_broken(leader, send)
