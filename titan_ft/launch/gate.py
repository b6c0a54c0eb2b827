# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The gate before the lighthouse: only connections that show the run's secret pass.

torchft's lighthouse trusts every connection. One request can end all groups, strangers that only
send heartbeats stop every quorum, and a thousand idle connections end its accept loop for good. So
the gate owns the socket that other hosts reach. `greeting.py` judges the first bytes of each
connection. Then the gate forwards bytes in both directions.

One thread serves all connections. A heartbeat costs four system calls, and no step waits for a
heartbeat.
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

MAX_UNKNOWN = 512
"""Connections that may be open before they have shown the secret. At one more, the oldest is
closed.

If the process may have few descriptors, the limit is lower, because members need descriptors too.
"""
PATIENCE_SECONDS = 2.0
"""A connection that has not shown the secret this long after its start is closed."""
BACKLOG = 1024
FORBIDDEN = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
"""Answer to an HTTP/1 request without the secret.

Without an answer, a group with another token would believe that the lighthouse restarts.
"""
_ACCEPTS_AT_ONCE = 64
"""After so many accepted connections in a row, the gate serves the members again."""
_BLOCK_BYTES = 65536
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECONDS = 0.01
"""Pause before the next accept if the process has no descriptor for a connection."""

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""In seconds, seconds, probes. Without them, connections of vanished hosts would stay for ever."""


_GONE = "the lighthouse behind the gate listens no more"
"""The error that ends the process after the accept loop of torchft's lighthouse has ended.

Otherwise the port of the gate would stay open, and all groups would wait for ever. The launcher or
the scheduler starts another lighthouse.
"""


class _End:
    """One end of a connection: the socket of a member, of a stranger or of the lighthouse.

    Attributes:
        source: numeric address of a member or a stranger; empty for the lighthouse.
        deadline: when a stranger must have shown the secret, by the monotonic clock.
        received: bytes of a stranger until now.
        other: end that gets the bytes of this end. None for a stranger, and for a group that only
            watches whether the lighthouse is there (`greeting.HOLD`).
        unsent: bytes for this end that the kernel has not accepted yet.
        is_over: this end sends nothing more.
        events: events for which `epoll` watches the socket.
    """

    __slots__ = ("deadline", "events", "is_over", "other", "received", "socket", "source", "unsent")

    def __init__(self, connection: socket.socket, source: str, deadline: float) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.source = source
        self.deadline = deadline
        self.other: _End | None = None
        self.received = b""
        self.unsent = b""
        self.is_over = False
        self.events = 0


class Gate:
    """Serves the connections at a listening socket, on one thread. See docs/security.md.

    `GuardedLighthouse` makes the gate on that thread and calls `run` there. Any thread may call
    `close`. If the lighthouse behind the gate is gone, `run` raises, and the process must end.

    Args:
        listener: socket that other hosts reach.
        inner: host and port of the lighthouse.
        secret: secret that members show.
        report: called with the first refusal of each kind.
    """

    def __init__(
        self,
        listener: socket.socket,
        inner: tuple[str, int],
        secret: str,
        report: Callable[[Refusal], None],
    ) -> None:
        self._listener = listener
        self._inner = inner
        self._greeting = Greeting(secret)
        max_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_unknown = min(MAX_UNKNOWN, max_descriptors // 8)
        self._poll = select.epoll()
        self._ends: dict[int, _End] = {}
        """All ends by descriptor."""
        self._unknown: dict[_End, None] = {}
        """The ends of strangers, the oldest first; the values mean nothing."""
        self._refusals = Refusals(PATIENCE_SECONDS, report)
        # `close` closes the second end of this pipe, which wakes `run`.
        self._wakeup, self._wakes = os.pipe()
        listener.setblocking(False)
        self._poll.register(listener, select.EPOLLIN)
        self._poll.register(self._wakeup, select.EPOLLIN)

    def close(self) -> None:
        """Let `run` return; any thread may call this, once."""
        os.close(self._wakes)

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
                elif descriptor == self._wakeup:
                    self._end_all()
                    return
            self._close_late()

    def _oldest_unknown(self) -> _End | None:
        return next(iter(self._unknown), None)

    def _seconds_until_deadline(self) -> float:
        """Return the seconds until the oldest stranger is late; negative: wait without limit."""
        oldest = self._oldest_unknown()
        if oldest is None:
            return -1
        return max(0.0, oldest.deadline - time.monotonic())

    # Strangers, until they show the secret

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR:
                    self._make_room()
                    return
                # Its peer reset the connection before the gate accepted it.
                continue
            if len(self._unknown) >= self._max_unknown:
                self._refuse_oldest("crowd")
            end = _End(connection, address[0], time.monotonic() + PATIENCE_SECONDS)
            self._unknown[end] = None
            self._watch(end, select.EPOLLIN)

    def _make_room(self) -> None:
        """Close the oldest stranger's connection: this process or the host has no descriptor."""
        if self._unknown:
            self._refuse_oldest("no_descriptors")
        else:
            # The listener stays ready: without a pause this thread would use a core.
            time.sleep(_PAUSE_SECONDS)

    def _close_late(self) -> None:
        if not self._unknown:
            return
        now = time.monotonic()
        oldest = self._oldest_unknown()
        while oldest is not None and oldest.deadline <= now:
            self._refuse(oldest, "silent")
            oldest = self._oldest_unknown()

    def _refuse_oldest(self, kind: RefusalKind) -> None:
        self._refuse(next(iter(self._unknown)), kind)

    def _refuse(self, end: _End, kind: RefusalKind) -> None:
        """Close a connection of a stranger, and count it."""
        self._refusals.add(kind, end.source)
        self._drop(end)

    def _greet(self, end: _End) -> None:
        """Read and judge the first bytes of a connection."""
        try:
            # Only the bytes that the judgement needs. Further bytes wait in the kernel.
            block = end.socket.recv(MAX_BYTES - len(end.received))
        except BlockingIOError:
            return
        except OSError:
            block = b""
        if not block:
            self._drop(end)
            return
        end.received += block
        reception = self._greeting.judge(end.received)
        if reception is Reception.REFUSE:
            if end.received.startswith(b"GET "):
                with contextlib.suppress(OSError):  # the connection is closed in any case
                    end.socket.send(FORBIDDEN)
            self._refuse(end, "no_secret")
        elif reception is not Reception.MORE:
            self._welcome(end, holds=reception is Reception.HOLD)

    def _welcome(self, end: _End, *, holds: bool) -> None:
        """Treat an end as a member's from now on, and connect it unless it is only held."""
        del self._unknown[end]
        with contextlib.suppress(OSError):  # the connection has ended: the next read finds out
            _prepare(end.socket)
            end.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, number in _KEEPALIVE:
                end.socket.setsockopt(socket.IPPROTO_TCP, option, number)
        if not holds:
            self._connect(end)
        end.received = b""

    def _connect(self, end: _End) -> None:
        """Connect a member's end to the lighthouse. The bytes received so far are sent first."""
        try:
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            self._drop(end)
            return
        inner = _End(connection, "", 0.0)
        code = connection.connect_ex(self._inner)
        if code == errno.ECONNREFUSED:
            raise RuntimeError(_GONE)
        if code not in (0, errno.EINPROGRESS):
            connection.close()
            self._drop(end)
            return
        _prepare(connection)
        end.other, inner.other = inner, end
        inner.unsent = end.received
        self._watch(inner, select.EPOLLIN | select.EPOLLOUT)
        self._watch(end, 0)

    # Members

    def _serve(self, end: _End, events: int) -> None:
        """Move the bytes of one end that `epoll` reported."""
        if end in self._unknown:
            self._greet(end)
            return
        if events & select.EPOLLOUT and not self._send_rest(end):
            return
        if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            self._forward(end)

    def _forward(self, end: _End) -> None:
        """Read a block from an end, and send it to the other end."""
        try:
            block = end.socket.recv(_BLOCK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._drop(end)
            return
        other = end.other
        if other is None:  # a connection that is only held
            if not block:
                self._drop(end)
            return
        if not block:
            if other.unsent and not end.is_over:
                # The other end gets its last bytes first; `_send_rest` closes the connection then.
                self._watch(end, 0)
                end.is_over = True
            else:
                self._drop(end)
            return
        num_sent = 0
        if not other.unsent:
            try:
                num_sent = other.socket.send(block)
            except BlockingIOError:
                pass
            except OSError:
                self._drop(end)
                return
        if num_sent < len(block):
            # The other end reads slowly. Nothing more is read for it until it has these bytes, so
            # that it takes no more memory than one block.
            other.unsent += block[num_sent:]
            self._watch(other, other.events | select.EPOLLOUT)
            self._watch(end, end.events & ~select.EPOLLIN)

    def _send_rest(self, end: _End) -> bool:
        """Send an end's unsent bytes; return False if the end was closed."""
        sender = end.other
        if sender is None:
            return True
        try:
            if end.unsent:
                num_sent = end.socket.send(end.unsent)
                end.unsent = end.unsent[num_sent:]
        except BlockingIOError:
            return True
        except ConnectionRefusedError as error:  # only at the lighthouse's end
            raise RuntimeError(_GONE) from error
        except OSError:
            self._drop(end)
            return False
        if end.unsent:
            return True
        if sender.is_over:
            self._drop(end)
            return False
        self._watch(end, end.events & ~select.EPOLLOUT)
        self._watch(sender, sender.events | select.EPOLLIN)
        return True

    # All connections

    def _watch(self, end: _End, events: int) -> None:
        descriptor = end.socket.fileno()
        if descriptor not in self._ends:
            self._ends[descriptor] = end
            self._poll.register(descriptor, events)
        elif events != end.events:
            self._poll.modify(descriptor, events)
        end.events = events

    def _drop(self, end: _End) -> None:
        """Close a connection at both of its ends."""
        self._unknown.pop(end, None)
        for each in (end, end.other):
            if each is None or self._ends.pop(each.socket.fileno(), None) is None:
                continue
            each.other = None
            each.socket.close()  # epoll forgets the descriptor

    def _end_all(self) -> None:
        for end in list(self._ends.values()):
            self._drop(end)
        self._listener.close()
        self._poll.close()
        os.close(self._wakeup)


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as the system allows: each connection takes two."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
