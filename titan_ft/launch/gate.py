# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The gate in front of the lighthouse: it lets connections through that show the run's secret.

torchft's lighthouse believes everybody. One request can end all groups, strangers that only send
heartbeats stop every quorum, and a thousand idle connections end its listening socket for good. So
the gate owns the socket that others reach. It looks at the first bytes of a connection
(`greeting.py`), and then hands bytes on in both directions.

One thread serves all connections. A heartbeat costs it four system calls, and no step waits for it.
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
"""Connections that have not shown the secret; fewer where the process may have few descriptors,
which members need too. For one more, the oldest is closed."""
PATIENCE_SECONDS = 2.0
"""A connection that has not shown the secret by then is closed."""
BACKLOG = 1024
FORBIDDEN = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
"""A group with another token would else take the closed connection for a lighthouse that is
starting again.
"""
_ACCEPTS_AT_ONCE = 64  # then members get their turn
_BLOCK_BYTES = 65536
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECONDS = 0.01  # of a process without descriptors

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""Seconds, seconds, probes. The connections of hosts that vanished would stay for ever."""


_GONE = "the lighthouse behind the gate listens no more"
"""torchft's accept loop ends for good when it has no descriptor. The port of the gate would stay
open, and all groups would wait for ever: the process ends instead, and is started again."""


class _End:
    """One end of a connection: the socket of a member, of a stranger or of the lighthouse.

    Attributes:
        other: end that gets the bytes of this one; None if its owner has not shown the secret, or
            is a group that only watches whether the lighthouse is there (`greeting.HOLD`).
        unsent: bytes for this end that the kernel has not accepted yet.
        is_over: this end sends nothing more.
        events: events for which `epoll` watches it.
    """

    __slots__ = ("deadline", "events", "is_over", "other", "received", "socket", "unsent", "who")

    def __init__(self, connection: socket.socket, who: str, deadline: float) -> None:
        connection.setblocking(False)
        self.socket, self.who, self.deadline = connection, who, deadline
        self.other: _End | None = None
        self.received = b""
        self.unsent = b""
        self.is_over = False
        self.events = 0


class Gate:
    """Serves the connections at a listening socket, on one thread (`run`). See docs/security.md.

    `GuardedLighthouse` starts it. A gate whose lighthouse is gone ends with an error.

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
        self._listener, self._inner = listener, inner
        self._greeting = Greeting(secret)
        self._max_unknown = min(MAX_UNKNOWN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self._poll = select.epoll()
        self._ends: dict[int, _End] = {}  # by descriptor
        self._unknown: dict[_End, None] = {}  # the oldest first
        self._refusals = Refusals(PATIENCE_SECONDS, report)
        self._wakeup, self._wakes = os.pipe()
        listener.setblocking(False)
        self._poll.register(listener, select.EPOLLIN)
        self._poll.register(self._wakeup, select.EPOLLIN)

    def close(self) -> None:
        """Let `run` return; any thread, once."""
        os.close(self._wakes)

    def run(self) -> None:
        """Serve until `close` is called, and then close all connections.

        Raises:
            RuntimeError: the lighthouse behind the gate no longer listens.
        """
        accepts, wakeup = self._listener.fileno(), self._wakeup
        while True:
            for descriptor, events in self._poll.poll(self._find_pause()):
                end = self._ends.get(descriptor)
                if end is not None:
                    self._serve(end, events)
                elif descriptor == accepts:
                    self._accept()
                elif descriptor == wakeup:
                    self._end_all()
                    return
            self._close_late()

    def _find_pause(self) -> float:
        """Return the seconds until the next connection is late; negative = there is none."""
        for oldest in self._unknown:
            return max(0.0, oldest.deadline - time.monotonic())
        return -1

    # Strangers, until they show the secret

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._make_room()
                    return
                continue  # it was reset before it was accepted
            if len(self._unknown) >= self._max_unknown:
                self._refuse_oldest("crowd")
            end = _End(connection, address[0], time.monotonic() + PATIENCE_SECONDS)
            self._unknown[end] = None
            self._watch(end, select.EPOLLIN)

    def _make_room(self) -> None:
        """Close the oldest unknown connection, because this process or the host has no descriptor
        left.
        """
        if self._unknown:
            self._refuse_oldest("no_descriptors")
        else:
            # The listener stays ready: without a pause this thread would use a core.
            time.sleep(_PAUSE_SECONDS)

    def _close_late(self) -> None:
        if not self._unknown:
            return
        now = time.monotonic()
        while self._unknown and next(iter(self._unknown)).deadline <= now:
            self._refuse_oldest("silent")

    def _refuse_oldest(self, kind: RefusalKind) -> None:
        self._refuse(next(iter(self._unknown)), kind)

    def _refuse(self, end: _End, kind: RefusalKind) -> None:
        """Close a connection of a stranger, and count it."""
        self._refusals.add(kind, end.who)
        self._drop(end)

    def _greet(self, end: _End) -> None:
        """Read the first bytes of a connection."""
        try:
            # No more than is judged: what follows waits in the kernel.
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
                with contextlib.suppress(OSError):  # it is closed in any case
                    end.socket.send(FORBIDDEN)
            self._refuse(end, "no_secret")
        elif reception is not Reception.MORE:
            self._welcome(end, holds=reception is Reception.HOLD)

    def _welcome(self, end: _End, *, holds: bool) -> None:
        del self._unknown[end]
        with contextlib.suppress(OSError):  # it has ended: the next read finds that
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
        try:
            block = end.socket.recv(_BLOCK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._drop(end)
            return
        other = end.other
        if other is None:  # of a connection that is only held
            if not block:
                self._drop(end)
            return
        if not block:
            if other.unsent and not end.is_over:
                self._watch(end, 0)
                end.is_over = True
            else:
                self._drop(end)
            return
        try:
            sent = 0 if other.unsent else other.socket.send(block)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(end)
            return
        if sent < len(block):
            # Its reader is slow: nothing more is read for it, so that it costs no more memory than
            # one block.
            other.unsent += block[sent:]
            self._watch(other, other.events | select.EPOLLOUT)
            self._watch(end, end.events & ~select.EPOLLIN)

    def _send_rest(self, end: _End) -> bool:
        """Send an end's unsent bytes; return False if the end was closed."""
        source = end.other
        if source is None:
            return True
        try:
            end.unsent = end.unsent[end.socket.send(end.unsent) :] if end.unsent else b""
        except BlockingIOError:
            return True
        except ConnectionRefusedError as error:  # of an end towards the lighthouse
            raise RuntimeError(_GONE) from error
        except OSError:
            self._drop(end)
            return False
        if end.unsent:
            return True
        if source.is_over:
            self._drop(end)
            return False
        self._watch(end, end.events & ~select.EPOLLOUT)
        self._watch(source, source.events | select.EPOLLIN)
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
        for one in (end, end.other):
            if one is None or self._ends.pop(one.socket.fileno(), None) is None:
                continue
            one.other = None
            one.socket.close()  # epoll forgets it

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
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
