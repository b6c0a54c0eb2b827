# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The connection between the agents of two hosts of one group: messages, and their protection.

`hosts` describes which messages follow each other. On the wire:

1. Each end first sends a *nonce*, a random line.
2. Each message is a line of JSON after a MAC, which is keyed by the run's token. The MAC covers the
   nonces of both ends, the direction, and the number of the message. So nobody without the token
   can send, repeat, drop or reorder messages. Nothing is unpickled, as in torchrun's rendezvous.

An agent has no threads, because it forks its workers. So nothing here blocks: `poll` reads the
bytes that have arrived.

The kernel notices the end of the other side: an agent that dies closes its connections, and a
vanished host does not answer keep-alives (`GONE_SECONDS`). There are no heartbeats between agents,
because an agent that waits for a file server would seem to be gone.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from typing import TypeAlias

import msgspec

from titan_ft.launch.group.worker_exit import WorkerExit
from titan_ft.system.refusal import StrangerError
from titan_ft.system.seal import authenticate

GONE_SECONDS = 10
"""A host that has answered nothing for this long is gone."""
_MAX_LINE_BYTES = 2**20
"""Limit of a message. Without a limit, the other end could fill the memory of this process.

A report of the ends of all ranks of a host takes far less.
"""
_MAX_STRANGER_BYTES = 4096
"""Limit of the bytes from an end that has not shown the token.

With `_MAX_LINE_BYTES`, 256 strangers could fill 256 MiB.
"""
_NONCE_BYTES = 16
_KEEPALIVE = (
    ("TCP_KEEPIDLE", 2),  # seconds of silence before the first probe
    ("TCP_KEEPINTVL", 2),  # seconds between probes
    ("TCP_KEEPCNT", 4),  # lost probes that end the connection
)
"""Options of the socket. 2 + 4 x 2 seconds are `GONE_SECONDS`."""
_NO_AGENT = "the other end is no agent"
"""Reason for a refusal."""
_LEADER = b"leader"
_FOLLOWER = b"follower"


class Hello(msgspec.Struct, tag=True):
    """First message of a follower: its host, and the number of ranks there."""

    host: str
    num_ranks: int


class StartOrder(msgspec.Struct, tag=True):
    """Orders a follower to start the workers of an attempt.

    `Share` describes the fields on hosts and ranks.
    """

    attempt: int
    host_index: int
    num_hosts: int
    first_rank: int
    world_size: int
    store_host: str
    store_port: int


class LeaveOrder(msgspec.Struct, tag=True):
    """Orders a follower to ask its workers to leave in order."""


class EndOrder(msgspec.Struct, tag=True):
    """Orders a follower to end its workers."""

    grace_seconds: float
    """0 kills them at once."""


class Ping(msgspec.Struct, tag=True):
    """Asks a follower for an answer, which shows that its host still runs."""

    number: int


class GroupOver(msgspec.Struct, tag=True):
    """Tells a follower that the group is not restarted, and that it must end."""

    status: int
    """Exit status for the follower."""
    reason: str
    """Line for the follower to print; empty if the group finished."""


class WorkersState(msgspec.Struct, tag=True):
    """A follower's report of its workers' processes and ends, sent at each change."""

    attempt: int
    pids: dict[int, int]
    """Process ids by rank."""
    exits: list[WorkerExit]
    raised_ranks: list[int]
    """Ranks that still run although an exception has ended their training."""
    all_reaped: bool
    """Whether all workers have ended and were reaped."""
    last_ping: int
    """Number of the last `Ping` that the follower received; 0 before the first of an attempt."""


Message: TypeAlias = Hello | StartOrder | LeaveOrder | EndOrder | Ping | GroupOver | WorkersState
_decoder = msgspec.json.Decoder(Message)


class AgentConnection:
    """One end of a connection between two agents.

    `Followers` owns the ends of the leader, and `Follower` owns the other ends. Each calls all
    methods on its agent's only thread. After a ConnectionError the owner must close the connection.

    Args:
        connection: socket; closed with this object.
        token: the run's secret.
        slot: slot of the group. Agents of different groups do not understand each other.
        leads: whether this end is the leader's.
    """

    def __init__(self, connection: socket.socket, token: str, slot: int, *, leads: bool) -> None:
        self._socket = connection
        self._token = token.encode()
        self._slot = b"%d" % slot
        self._own_role = _LEADER if leads else _FOLLOWER
        self._other_role = _FOLLOWER if leads else _LEADER
        self._nonce = secrets.token_hex(_NONCE_BYTES).encode()
        self._other_nonce = b""
        self._num_sent = 0
        self._num_received = 0
        self._outgoing = self._nonce + b"\n"
        self._waiting: list[Message] = []
        """Messages that wait for the other end's nonce."""
        self._incoming = b""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_a_vanished_host(connection)

    @property
    def descriptor(self) -> int:
        return self._socket.fileno()

    @property
    def has_answered(self) -> bool:
        """Whether the other end has sent its nonce; an agent sends it at once."""
        return bool(self._other_nonce)

    @property
    def own_address(self) -> str:
        """Numeric address of this host at which the other end's host reaches it."""
        return str(self._socket.getsockname()[0]).removeprefix("::ffff:").partition("%")[0]

    def send(self, message: Message) -> None:
        """Send a message as soon as the socket takes it, at the earliest now. Never raises.

        If the connection is broken, the next `poll` raises the error.
        """
        self._waiting.append(message)
        self._try_flush()

    def poll(self) -> list[Message]:
        """Return the messages that have arrived.

        Raises:
            StrangerError: the other end lacks the token, or is no agent.
            ConnectionError: the other end closed the connection, or its host is gone.
        """
        problem = self._try_flush()
        while len(self._incoming) <= self._max_bytes:
            try:
                block = self._socket.recv(self._max_bytes + 1 - len(self._incoming))
            except BlockingIOError:
                break
            except OSError as error:  # a timeout of keep-alive is a TimeoutError
                problem = ConnectionError(str(error))
                break
            if not block:
                problem = ConnectionError("the other end has closed the connection")
                break
            self._incoming += block
        messages = self._take_messages()
        flush_problem = self._try_flush()  # the nonce may just have arrived
        problem = flush_problem or problem
        # Messages from before the end of the connection are returned first, because they may report
        # the ends of the other host's workers. The next `poll` raises.
        if problem is not None and not messages:
            raise problem
        return messages

    def close(self) -> None:
        self._socket.close()

    @property
    def _max_bytes(self) -> int:
        """Limit of the bytes of a line, and of all lines that are not decoded yet."""
        return _MAX_LINE_BYTES if self._num_received else _MAX_STRANGER_BYTES

    def _take_messages(self) -> list[Message]:
        messages = []
        while b"\n" in self._incoming:
            line, _, self._incoming = self._incoming.partition(b"\n")
            is_nonce = not self._other_nonce
            if is_nonce:
                if len(line) != len(self._nonce):
                    raise StrangerError(_NO_AGENT)
                self._other_nonce = line
                continue
            mac, _, text = line.partition(b" ")
            expected = self._mac(self._other_role, self._num_received, text)
            if not hmac.compare_digest(expected, mac):
                raise StrangerError(
                    "the other end does not know this run's token, or is of another group"
                )
            self._num_received += 1
            try:
                messages.append(_decoder.decode(text))
            except ValueError as error:
                raise ConnectionError(
                    f"the other end has another version of titan-ft ({error})"
                ) from error
        if len(self._incoming) > self._max_bytes:
            raise StrangerError(_NO_AGENT)
        return messages

    def _try_flush(self) -> ConnectionError | None:
        """Send the waiting bytes; return the error that prevents it, or None."""
        try:
            self._flush()
        except ConnectionError as error:
            return error
        return None

    def _flush(self) -> None:
        if self._other_nonce:
            for message in self._waiting:
                text = msgspec.json.encode(message)
                mac = self._mac(self._own_role, self._num_sent, text)
                self._outgoing += mac + b" " + text + b"\n"
                self._num_sent += 1
            self._waiting = []
        try:
            while self._outgoing:
                sent = self._socket.send(self._outgoing)
                self._outgoing = self._outgoing[sent:]
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionError(str(error)) from error

    def _mac(self, role: bytes, number: int, text: bytes) -> bytes:
        """Return the MAC of a message.

        Args:
            role: the sender's.
            number: messages that the sender sent before.
        """
        leader_nonce = self._other_nonce
        follower_nonce = self._nonce
        if self._own_role == _LEADER:
            leader_nonce = self._nonce
            follower_nonce = self._other_nonce
        covered = (self._slot, role, leader_nonce, follower_nonce, b"%d" % number, text)
        return authenticate(self._token, "agents", *covered).hex().encode()


def _notice_a_vanished_host(connection: socket.socket) -> None:
    """Let the kernel break the connection after `GONE_SECONDS` without an answer of the host."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*_KEEPALIVE, ("TCP_USER_TIMEOUT", GONE_SECONDS * 1000)):
        if hasattr(socket, name):  # macOS lacks some of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
