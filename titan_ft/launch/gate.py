# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The gate before the lighthouse: only connections that show the run's secret pass.

torchft's lighthouse trusts every connection. One request can end all groups, every quorum waits for
strangers that only send heartbeats, and a thousand idle connections end its accept loop for good.
So the gate owns the socket that other hosts reach, and the lighthouse listens where only the gate
reaches it. A connection takes these steps:

1. The gate accepts the connection. Its remote side counts as a *stranger*.
2. `greeting.py` judges the first bytes that arrive. If they show the secret, the remote side is a
   *member* from now on: a group, a reader of the status page, or the launcher. A stranger that does
   not show the secret within `PATIENCE_SECONDS` is refused.
3. The gate connects to the lighthouse for the member, and forwards bytes in both directions. It
   does not connect for a member that only watches whether the lighthouse is there: that connection
   is *held*.
4. When the member or the lighthouse closes its connection, the gate sends the last bytes to the
   other one, and closes both connections.

One thread serves all connections, by `epoll`. That is fast enough: a heartbeat costs four system
calls, and no training step waits for one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import socket
import time
from collections.abc import Callable

from titan_ft.launch.greeting import MAX_BYTES, Greeting, Reception
from titan_ft.system.refusal import Refusal, RefusalKind, Refusals

MAX_STRANGERS = 512
"""Strangers that may be connected at once. At one more, the oldest is refused.

If the process may have few descriptors, the limit is lower, because members need descriptors too.
"""
PATIENCE_SECONDS = 2.0
"""A stranger that has not shown the secret this long after its connection is refused."""
BACKLOG = 1024
"""Connections that the kernel keeps until the gate accepts them."""
FORBIDDEN = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
"""Answer to an HTTP/1 request without the secret.

Without an answer, a group with another token would believe that the lighthouse restarts.
"""
_MAX_ACCEPTS_IN_A_ROW = 64
"""After so many accepted connections, the gate serves the members again."""
_BLOCK_BYTES = 65536
_NO_DESCRIPTOR_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of an accept while the process or the host has no descriptor or no memory left."""
_PAUSE_SECONDS = 0.01
"""Pause before the next accept after such an error."""
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 60),  # seconds of silence before the first probe
    (socket.TCP_KEEPINTVL, 10),  # seconds between probes
    (socket.TCP_KEEPCNT, 3),  # lost probes that end the connection
)
"""Options of members' sockets. Without them, connections of vanished hosts would stay for ever."""
_LIGHTHOUSE_GONE = "the lighthouse behind the gate listens no more"
"""The error that ends the process after the accept loop of torchft's lighthouse has ended.

Otherwise the port of the gate would stay open, and all groups would wait for ever. The launcher or
the scheduler starts another lighthouse.
"""


class _End:
    """The gate's socket of a connection to a stranger, a member or the lighthouse.

    The ends of a member's connection and of the connection to the lighthouse that was made for the
    member are *partners*: the bytes that arrive at one are sent at the other.

    Attributes:
        source: numeric address of a member or a stranger; empty for the lighthouse.
        deadline: when a stranger must have shown the secret, in monotonic seconds.
        received: all bytes of a stranger until now, which are judged together.
        partner: None for a stranger, and for a held connection (`greeting.HOLD`).
        unsent: bytes to send at this end, which the kernel has not accepted yet.
        has_closed: the remote side sends nothing more. Both ends close once `partner` has sent its
            unsent bytes.
        events: events for which `epoll` watches the socket.
    """

    # Keeps the objects small: a run may have thousands of connections.
    __slots__ = (
        "deadline",
        "events",
        "has_closed",
        "partner",
        "received",
        "socket",
        "source",
        "unsent",
    )

    def __init__(self, connection: socket.socket, source: str, deadline: float) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.source = source
        self.deadline = deadline
        self.partner: _End | None = None
        self.received = b""
        self.unsent = b""
        self.has_closed = False
        self.events = 0


class Gate:
    """Serves the connections at a listening socket, on one thread. See docs/security.md.

    `GuardedLighthouse` makes the gate on that thread and calls `run` there. Any thread may call
    `close`. If the lighthouse behind the gate is gone, `run` raises, and the process must end.

    Args:
        listener: socket that other hosts reach.
        lighthouse_address: host and port of the lighthouse.
        secret: secret that members show.
        report: called with the first refusal of each kind.
    """

    def __init__(
        self,
        listener: socket.socket,
        lighthouse_address: tuple[str, int],
        secret: str,
        report: Callable[[Refusal], None],
    ) -> None:
        self._listener = listener
        self._lighthouse_address = lighthouse_address
        self._greeting = Greeting(secret)
        max_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Seven of eight descriptors are left for members, which take two each.
        self._max_strangers = min(MAX_STRANGERS, max_descriptors // 8)
        self._poll = select.epoll()
        self._ends: dict[int, _End] = {}
        """All ends by descriptor."""
        self._strangers: dict[_End, None] = {}
        """The ends of strangers, the oldest first: a set that keeps its order."""
        self._refusals = Refusals(PATIENCE_SECONDS, report)
        # `close` closes the writing end of this pipe, and `epoll` then wakes `run`.
        self._stop_reader, self._stop_writer = os.pipe()
        listener.setblocking(False)
        self._poll.register(listener, select.EPOLLIN)
        self._poll.register(self._stop_reader, select.EPOLLIN)

    def close(self) -> None:
        """Let `run` return. Any thread may call this. Call it once only."""
        os.close(self._stop_writer)

    def run(self) -> None:
        """Serve until `close` is called, and then close all connections.

        Raises:
            RuntimeError: the lighthouse behind the gate no longer listens.
        """
        listener = self._listener.fileno()
        while True:
            for descriptor, events in self._poll.poll(self._seconds_until_deadline()):
                end = self._ends.get(descriptor)
                if end is not None:
                    self._serve(end, events)
                elif descriptor == listener:
                    self._accept()
                elif descriptor == self._stop_reader:
                    self._end_all()
                    return
                # Otherwise an earlier event of this poll has closed the end of the descriptor.
            self._refuse_late()

    def _oldest_stranger(self) -> _End | None:
        return next(iter(self._strangers), None)

    def _seconds_until_deadline(self) -> float:
        """Return the seconds until the oldest stranger is late; negative: wait without limit."""
        oldest = self._oldest_stranger()
        if oldest is None:
            return -1
        return max(0.0, oldest.deadline - time.monotonic())

    # Strangers, until they show the secret

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTS_IN_A_ROW):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR_ERRNOS:
                    self._make_room()
                    return
                # The remote side reset the connection before the gate accepted it.
                continue
            if len(self._strangers) >= self._max_strangers:
                self._refuse_oldest("crowd")
            end = _End(connection, address[0], time.monotonic() + PATIENCE_SECONDS)
            self._strangers[end] = None
            self._watch(end, select.EPOLLIN)

    def _make_room(self) -> None:
        """Free a descriptor for a new connection, or wait until one may be free."""
        if self._strangers:
            self._refuse_oldest("no_descriptors")
        else:
            # `epoll` reports the waiting connection again at once. Without a pause, this thread
            # would use a whole core.
            time.sleep(_PAUSE_SECONDS)

    def _refuse_late(self) -> None:
        """Refuse the strangers whose deadline has passed."""
        if not self._strangers:
            return
        now = time.monotonic()
        oldest = self._oldest_stranger()
        while oldest is not None and oldest.deadline <= now:
            self._refuse(oldest, "silent")
            oldest = self._oldest_stranger()

    def _refuse_oldest(self, kind: RefusalKind) -> None:
        self._refuse(next(iter(self._strangers)), kind)

    def _refuse(self, end: _End, kind: RefusalKind) -> None:
        """Close a connection of a stranger, and count it."""
        self._refusals.add(kind, end.source)
        self._drop(end)

    def _greet(self, end: _End) -> None:
        """Read and judge the first bytes of a stranger."""
        try:
            # Only the bytes that the judgement needs. Further bytes wait in the kernel.
            block = end.socket.recv(MAX_BYTES - len(end.received))
        except BlockingIOError:
            return
        except OSError:
            self._drop(end)
            return
        if not block:  # the remote side has closed the connection
            self._drop(end)
            return
        end.received += block
        reception = self._greeting.judge(end.received)
        if reception is Reception.REFUSE:
            if end.received.startswith(b"GET "):
                with contextlib.suppress(OSError):  # the connection is closed in any case
                    end.socket.send(FORBIDDEN)
            self._refuse(end, "no_secret")
        elif reception is Reception.HOLD:
            self._make_member(end)
            end.received = b""
        elif reception is Reception.PASS:
            self._make_member(end)
            self._connect(end)

    def _make_member(self, end: _End) -> None:
        """Treat a stranger as a member from now on."""
        del self._strangers[end]
        with contextlib.suppress(OSError):  # the connection has ended: the next read finds out
            _send_without_delay(end.socket)
            end.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, number in _KEEPALIVE:
                end.socket.setsockopt(socket.IPPROTO_TCP, option, number)

    def _connect(self, member: _End) -> None:
        """Connect a member to the lighthouse, which gets the bytes that were judged first."""
        try:
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            self._drop(member)
            return
        lighthouse = _End(connection, source="", deadline=0.0)
        code = connection.connect_ex(self._lighthouse_address)
        if code == errno.ECONNREFUSED:
            raise RuntimeError(_LIGHTHOUSE_GONE)
        is_under_way = code in (0, errno.EINPROGRESS)
        if not is_under_way:
            connection.close()
            self._drop(member)
            return
        _send_without_delay(connection)
        member.partner = lighthouse
        lighthouse.partner = member
        lighthouse.unsent = member.received
        member.received = b""
        # Nothing is read from the member before the lighthouse has its first bytes.
        self._watch(lighthouse, select.EPOLLIN | select.EPOLLOUT)
        self._watch(member, 0)

    # Members

    def _serve(self, end: _End, events: int) -> None:
        """Read from an end, or send to it, as `epoll` reported."""
        if end in self._strangers:
            self._greet(end)
            return
        if events & select.EPOLLOUT:
            is_open = self._send_unsent(end)
            if not is_open:
                return
        if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            self._forward(end)

    def _forward(self, end: _End) -> None:
        """Read a block at an end, and send it at the end's partner."""
        try:
            block = end.socket.recv(_BLOCK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._drop(end)
            return
        partner = end.partner
        is_closed = not block
        if partner is None:  # a held connection: its bytes mean nothing
            if is_closed:
                self._drop(end)
            return
        if is_closed:
            if partner.unsent and not end.has_closed:
                # The partner sends its unsent bytes first. Then `_send_unsent` closes both ends.
                self._watch(end, 0)
                end.has_closed = True
            else:
                self._drop(end)
            return
        num_sent = 0
        if not partner.unsent:
            try:
                num_sent = partner.socket.send(block)
            except BlockingIOError:
                pass
            except OSError:
                self._drop(end)
                return
        if num_sent < len(block):
            # The partner's remote side reads slowly. Until it has these bytes, nothing more is read
            # at this end. So the gate keeps at most one block for each end.
            partner.unsent += block[num_sent:]
            self._watch(partner, partner.events | select.EPOLLOUT)
            self._watch(end, end.events & ~select.EPOLLIN)

    def _send_unsent(self, end: _End) -> bool:
        """Send the unsent bytes of an end, and then read at its partner again.

        Returns:
            False if the end was closed.
        """
        partner = end.partner
        if partner is None:
            return True
        try:
            if end.unsent:
                num_sent = end.socket.send(end.unsent)
                end.unsent = end.unsent[num_sent:]
        except BlockingIOError:
            return True
        except ConnectionRefusedError as error:  # only at the lighthouse's end
            raise RuntimeError(_LIGHTHOUSE_GONE) from error
        except OSError:
            self._drop(end)
            return False
        if end.unsent:
            return True
        if partner.has_closed:
            self._drop(end)
            return False
        self._watch(end, end.events & ~select.EPOLLOUT)
        self._watch(partner, partner.events | select.EPOLLIN)
        return True

    # All connections

    def _watch(self, end: _End, events: int) -> None:
        """Let `epoll` report these events of an end; with 0, only errors and a hangup."""
        descriptor = end.socket.fileno()
        if descriptor not in self._ends:
            self._ends[descriptor] = end
            self._poll.register(descriptor, events)
        elif events != end.events:
            self._poll.modify(descriptor, events)
        end.events = events

    def _drop(self, end: _End) -> None:
        """Close an end and its partner."""
        self._strangers.pop(end, None)
        for each in (end, end.partner):
            if each is None:
                continue
            was_open = self._ends.pop(each.socket.fileno(), None) is not None
            if was_open:
                each.partner = None
                each.socket.close()  # `epoll` forgets the descriptor

    def _end_all(self) -> None:
        for end in list(self._ends.values()):
            self._drop(end)
        self._listener.close()
        self._poll.close()
        os.close(self._stop_reader)


def _send_without_delay(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as the system allows: each member takes two."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
