# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Sockets of the control tree: the connections of one rank to its parent and its children.

`titan_ft.protocol.control.node` decides. This module carries out its actions, and reports to it
when a connection begins, ends or brings a frame. One thread waits for all sockets, and no socket
ever blocks. Other threads give the node their events directly, and so send without waiting for that
thread.

A frame stands between its length in 4 bytes, big-endian, and its seal. Each connection begins with
the handshake of `control_handshake.py`, which the seals depend on.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import selectors
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from titan_ft.membership.control_handshake import (
    ANSWER_BYTES,
    HELLO_BYTES,
    REPLY_BYTES,
    SEAL_BYTES,
    ChildHandshake,
    FrameSeal,
    HandshakeError,
    Identity,
    ParentHandshake,
    Secret,
)
from titan_ft.membership.control_pings import Pings, listen
from titan_ft.protocol.control.message import MAX_BYTES
from titan_ft.protocol.control.node import Action, Close, Connect, Node, Send
from titan_ft.protocol.errors import first_line
from titan_ft.system.address import split_address
from titan_ft.system.process import Process

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
"""A stranger's connection that has not proved the token by then is closed."""

CONNECT_SECONDS = 3.0
"""The parent's host accepts a connection by then, also if the network loses the first packet: TCP sends
it again after a second. A host that has vanished does not."""

DIAL_SECONDS = 10.0
"""A parent whose host has accepted the connection proves the token by then. It may be frozen, or hold
Python's lock, for seconds."""

MAX_UNPROVED = 64
"""Connections without a proof. The next one costs another one its place. A stranger with many silent
connections does not keep a child out."""

_END_SECONDS = 1.0
"""The thread may hang in a listener, or in a log that nobody reads. The process ends all the same."""

_ACCEPTED_AT_ONCE = 16  # between them the handshakes under way go on
_BACKLOG = 1024
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC}
_EXHAUSTED_PAUSE_SECONDS = 0.1
_READ_BYTES = 1 << 16

_LOOK_SECONDS = 0.02
"""From one look at the process of a neighbour without a connection until the next one. A process
closes its connections a moment before it is gone."""
_LENGTH_BYTES = 4

_GONE_SECONDS = 30
"""A host that vanished closes no connection. The kernel does so after this time without a sign of
the host. A process that is frozen is none the less there."""

_TCP_OPTIONS = {
    "TCP_NODELAY": 1,  # a small frame does not wait for an acknowledgement of the one before
    "TCP_KEEPIDLE": 5,  # seconds
    "TCP_KEEPINTVL": 5,
    "TCP_USER_TIMEOUT": _GONE_SECONDS * 1000,  # counts for both: tcp(7)
}


class ControlSockets:
    """Connections of one rank in its control tree, and the thread that serves them.

    `changed` guards the node and everything here. The caller of a method holds it, except for
    `close`. The callbacks hold it as well, except for `on_turn` and `on_failure`.

    Args:
        node: decides.
        changed: reentrant; is notified when a neighbour is connected.
        secret: of the tree.
        host: numeric address to listen on.
        own: where this rank runs.
        patience: see `HeartbeatWatch`.
        on_action: carries out the node's actions that concern no connection; must not block.
        on_turn: called without the lock after each turn of the thread; may take a moment.
        on_failure: called with an unexpected error that ends the thread.

    Attributes:
        address: host and port that the children connect to; None = this rank has no children.
        last_error: why the last connection or attempt ended, for people; empty = none has ended.
    """

    def __init__(
        self,
        node: Node,
        changed: threading.Condition,
        *,
        rank: int,
        children: range,
        secret: Secret,
        host: str,
        own: Identity,
        patience: float,
        on_action: Callable[[Action], None],
        on_turn: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._node, self._changed, self._secret = node, changed, secret
        self._rank, self._children, self._own = rank, children, own
        self._on_action, self._on_turn, self._on_failure = on_action, on_turn, on_failure
        self._neighbours: dict[int, _Connection] = {}
        self._known: set[int] = set()  # neighbours that were connected
        self._unproved: dict[_Connection, float] = {}  # oldest first; when it is closed
        self._absent: dict[int, Process] = {}  # neighbours whose connection has ended
        self._next_look = math.inf  # at their processes
        self._parent_address = ("", 0)
        self._parent = Identity("", "")
        self._accepts_again = math.inf  # when all descriptors were in use
        self._wakes_at = -math.inf  # when the thread's wait ends, or ended
        self._closed = False
        self._warnings: deque[str] = deque()  # to be logged without the lock
        self.last_error = ""
        # epoll, because it heeds what another thread registers while this one waits.
        self._selector = selectors.EpollSelector()
        self._pings = Pings(patience, self._selector)
        self._wake_end, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_end, selectors.EVENT_READ, self._drain_wakes)
        self._listener: socket.socket | None = None
        self.address: tuple[str, int] | None = None
        if children:
            self._listener = listen(host, _BACKLOG)
            self._listener.setblocking(False)
            self.address = self._listener.getsockname()[:2]
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._thread = threading.Thread(target=self._run, name="titan_ft_control", daemon=True)
        _open.add(self)

    def start_below(self, address: str, parent: Identity) -> None:
        """Begin to connect to the parent, and to serve.

        Args:
            address: host:port of the parent.
            parent: where it runs.
        """
        self._parent_address, self._parent = split_address(address), parent
        self.start()

    def start(self) -> None:
        """Begin to serve."""
        self.call(self._node.start)
        self._thread.start()

    def call(self, event: Callable[[float], Iterable[Action]]) -> None:
        """Give the node an event, and carry out its actions; any thread that holds the lock."""
        if self._closed:
            return
        self._perform(event(time.monotonic()))
        # Not while the thread takes a turn: it looks at the next tick afterwards.
        if self._wakes_at > -math.inf and self._node.next_tick < self._wakes_at:
            self.wake()

    def is_connected(self, peer: int) -> bool:
        """True if the connection to a neighbour has proved the token, and has not ended."""
        return peer in self._neighbours

    def wake(self) -> None:
        """Let the thread take a turn soon."""
        if self._closed:
            return  # the pipe's numbers may be another file's by now
        with contextlib.suppress(BlockingIOError):  # a pipe that is full wakes the thread as well
            os.write(self._waker, b"w")

    def close(self) -> None:
        """Close all connections, and end the thread. A second call does nothing."""
        with self._changed:
            if self._closed:
                return
            self.wake()
            self._closed = True
        if self._thread.ident is None:
            self._release()
        elif self._thread is not threading.current_thread():
            self._thread.join(_END_SECONDS)

    # The thread

    def _run(self) -> None:
        try:
            while not self._closed:
                self._take_turn()
        except Exception as error:
            # Without this report the rank would wait for an answer for ever. The log may block.
            self._on_failure(error)
            logger.exception("the control tree has failed on this rank")
        finally:
            with self._changed:
                self._closed = True
                self._release()

    def _take_turn(self) -> None:
        """Wait, serve the sockets that are ready, and do what is due."""
        # epoll cannot count longer waits than some weeks. A time that is over is no wait.
        rest = min(max(0.0, self._wakes_at - time.monotonic()), 86_400.0)
        ready = self._selector.select(rest)
        with self._changed:
            self._wakes_at = -math.inf  # nobody needs to wake this thread now
            for key, events in ready:
                key.data(events)
            self._do_due(time.monotonic())
            self._wakes_at = self._find_next_time()
        while self._warnings:
            # A log that nobody reads blocks. With the lock, the training thread would wait for it.
            logger.warning("%s", self._warnings.popleft())
        self._on_turn()

    def _do_due(self, now: float) -> None:
        self._close_late(now)
        self._accept_again(now)
        if now >= self._next_look:
            self._look_at_absent(now)
        if now >= self._pings.next_look:
            for child, seconds in self._pings.look(now).items():
                self.call(partial(self._node.fall_silent, child, seconds))
        if now >= self._node.next_tick:
            self.call(self._node.tick)

    def _find_next_time(self) -> float:
        """Return when the thread has something to do even if no socket is ready."""
        first_late = min(self._unproved.values(), default=math.inf)
        next_looks = min(self._next_look, self._pings.next_look)
        return min(self._node.next_tick, first_late, self._accepts_again, next_looks)

    def _drain_wakes(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_end, _READ_BYTES)

    # Actions of the node

    def _perform(self, actions: Iterable[Action]) -> None:
        rest = deque(actions)
        written: dict[int, _Connection] = {}
        while rest:
            action = rest.popleft()
            match action:
                case Send(peer, frame):
                    if (connection := self._neighbours.get(peer)) is not None:
                        connection.write_frame(frame)
                        written[peer] = connection
                case Close(peer):
                    self._close(peer)
                case Connect(peer):
                    if not self._dial(peer):
                        rest.extend(self._node.disconnected(peer, time.monotonic()))
                case _:
                    self._on_action(action)
        for connection in written.values():
            self._flush(connection)

    def _close(self, peer: int) -> None:
        """Close the connection to a neighbour, and the attempt to make one."""
        self._absent.pop(peer, None)
        connections = [c for c in self._unproved if c.dialed == peer]
        if peer in self._neighbours:
            connections.append(self._neighbours.pop(peer))
        for connection in connections:
            self._shut(connection)

    def _dial(self, parent: int) -> bool:
        """Begin to connect to the parent. Returns False if that failed at once."""
        family = socket.AF_INET6 if ":" in self._parent_address[0] else socket.AF_INET
        connection: socket.socket | None = None
        try:
            connection = socket.socket(family, socket.SOCK_STREAM)
            connection.setblocking(False)
            status = connection.connect_ex(self._parent_address)
            if status not in (0, errno.EINPROGRESS):
                raise OSError(status, os.strerror(status))
            added = self._add(connection, self._parent_address[0], dialed=parent)
        except OSError as error:  # nobody listens, no route leads there, no descriptor is left
            self.last_error = first_line(error)
            if connection is not None:
                connection.close()
            return False
        handshake = ChildHandshake(self._secret, self._rank, parent, self._own)
        added.expect(REPLY_BYTES, partial(self._take_reply, added, handshake))
        added.unsent += handshake.hello
        self._watch(added)  # is writable once the connection is there
        return True

    # Connections without a proof

    def _accept(self, _: int) -> None:
        assert self._listener is not None
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, source = self._listener.accept()
                added = self._add(accepted, source[0])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause_accepting(error)
                    return
                continue  # this stranger went away before
            added.expect(HELLO_BYTES, partial(self._take_hello, added))
            self._drop_stranger()

    def _pause_accepting(self, error: OSError) -> None:
        """Leave the children in the kernel's queue until a descriptor is free.

        The listening socket stays readable as long as they wait: without the pause this thread
        would turn as fast as it can.
        """
        assert self._listener is not None
        self._warnings.append(f"no child of this rank can connect now: {first_line(error)}")
        self._selector.unregister(self._listener)
        self._accepts_again = time.monotonic() + _EXHAUSTED_PAUSE_SECONDS

    def _accept_again(self, now: float) -> None:
        if self._listener is not None and now >= self._accepts_again:
            self._accepts_again = math.inf
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _drop_stranger(self) -> None:
        """Close the oldest connection of the host that has most of them, if there are too many.

        The oldest one of all may be a child's, whose handshake takes some trips to another host.
        """
        strangers = [connection for connection in self._unproved if connection.dialed is None]
        if len(strangers) > MAX_UNPROVED:
            numbers = Counter(connection.source for connection in strangers)
            self._shut(max(strangers, key=lambda connection: numbers[connection.source]))

    def _close_late(self, now: float) -> None:
        late = [connection for connection, latest in self._unproved.items() if now >= latest]
        for connection in late:
            self._end(connection, "the other end has not proved the run's token in time")

    def _take_hello(self, connection: _Connection, hello: bytes) -> None:
        handshake = ParentHandshake(self._secret, self._rank, self._children, hello)
        connection.unsent += handshake.reply
        connection.expect(ANSWER_BYTES, partial(self._take_answer, connection, handshake))
        self._flush(connection)

    def _take_answer(self, connection: _Connection, end: ParentHandshake, answer: bytes) -> None:
        identity = end.check(answer)
        connection.own_seal, connection.others_seal = end.seals()
        self._join(connection, end.child, identity)

    def _take_reply(self, connection: _Connection, end: ChildHandshake, reply: bytes) -> None:
        connection.unsent += end.answer(reply)
        connection.own_seal, connection.others_seal = end.seals()
        assert connection.dialed is not None
        self._join(connection, connection.dialed, self._parent)
        self._flush(connection)

    def _join(self, connection: _Connection, peer: int, identity: Identity) -> None:
        """Make a connection that has proved the token the one of a neighbour.

        The child may have seen the end of its earlier connection before this rank does. The newer
        connection counts.
        """
        del self._unproved[connection]
        if (earlier := self._neighbours.pop(peer, None)) is not None:
            self._shut(earlier)
        if peer in self._known:
            reason = self.last_error or "it made a new connection"
            self._warnings.append(f"rank {peer} (on {identity.host}) is connected again: {reason}")
        self._known.add(peer)
        self._neighbours[peer] = connection
        self._absent.pop(peer, None)
        connection.peer, connection.process = peer, _read_process(identity)
        if peer in self._children:
            self._pings.add(peer, identity.echo)
        self._changed.notify_all()
        self.call(lambda now: self._node.connected(peer, now, identity.host))

    def _take_frames(self, connection: _Connection, peer: int) -> None:
        """Give the node the frames that have come as a whole."""
        received = connection.received
        while len(received) >= _LENGTH_BYTES and not connection.closed:
            length = int.from_bytes(received[:_LENGTH_BYTES], "big")
            if length > MAX_BYTES:
                self._end(connection, f"a frame of {length} bytes; the longest has {MAX_BYTES}")
                return
            end = _LENGTH_BYTES + length
            if len(received) < end + SEAL_BYTES:
                return
            frame, found = bytes(received[_LENGTH_BYTES:end]), bytes(received[end : end + SEAL_BYTES])
            del received[: end + SEAL_BYTES]
            assert connection.others_seal is not None, "a neighbour has proved the token"
            if not connection.others_seal.is_seal(found, frame):
                self._end(connection, "a frame is not what the other end has sent")
                return
            self.call(partial(self._node.receive, peer, frame))

    # Reading and writing

    def _add(self, connection: socket.socket, source: str, dialed: int | None = None) -> _Connection:
        """Take a socket into the care of this thread.

        Args:
            source: address of the other end's host.

        Raises:
            OSError: the other end has reset it, or the system has no room for it.
        """
        connection.setblocking(False)
        _set_options(connection)
        added = _Connection(connection, source, dialed)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._serve, added))
        patience = HANDSHAKE_SECONDS if dialed is None else CONNECT_SECONDS
        self._unproved[added] = time.monotonic() + patience
        return added

    def _serve(self, connection: _Connection, events: int) -> None:
        if events & selectors.EVENT_READ:
            self._read(connection)  # first: it learns why a connection could not be made
        if events & selectors.EVENT_WRITE:
            self._note_accepted(connection)
            self._flush(connection)

    def _read(self, connection: _Connection) -> None:
        # Before the proof no more than the next message of the handshake is taken in.
        size = _READ_BYTES if connection.peer is not None else connection.num_missing
        try:
            data = connection.socket.recv(size)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(connection, first_line(error))
            return
        if not data:
            self._end(connection, "the other end closed the connection")
            return
        connection.received += data
        if connection.peer is not None:
            self._take_frames(connection, connection.peer)
        elif connection.num_missing == 0:
            try:
                connection.take_message()
            except HandshakeError as error:
                self._end(connection, first_line(error))

    def _flush(self, connection: _Connection) -> None:
        """Send as much as the kernel takes. The rest follows when the socket is writable."""
        if connection.closed:
            return
        try:
            while connection.unsent:
                sent = connection.socket.send(connection.unsent)
                del connection.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            # The connection is broken. It is readable now, and reading ends it: there may be
            # frames that came before the end.
            connection.unsent.clear()
        self._watch(connection)

    def _note_accepted(self, connection: _Connection) -> None:
        """Give the parent, whose host has accepted the connection, time to answer."""
        if connection.dialed is not None and connection in self._unproved and not connection.is_accepted:
            connection.is_accepted = True
            self._unproved[connection] = time.monotonic() + DIAL_SECONDS

    def _watch(self, connection: _Connection) -> None:
        """Wait for the socket to be writable as long as there is something to send."""
        is_waiting = bool(connection.unsent)
        if connection.waits_to_write != is_waiting:
            connection.waits_to_write = is_waiting
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_waiting else 0)
            key = self._selector.get_key(connection.socket)
            self._selector.modify(connection.socket, events, key.data)

    def _end(self, connection: _Connection, reason: str) -> None:
        """Close a connection that is broken, and report the end to the node if it concerns it."""
        if connection.closed:
            return
        self._shut(connection)
        peer = connection.dialed if connection.peer is None else connection.peer
        if peer is None:  # a stranger's
            return
        self.last_error = reason
        if self._neighbours.get(peer) is connection:
            del self._neighbours[peer]
        if connection.process is not None:
            self._absent[peer] = connection.process
        self.call(lambda now: self._node.disconnected(peer, now))
        self._look_at_absent(time.monotonic())

    def _look_at_absent(self, now: float) -> None:
        """Report each neighbour without a connection whose process has ended on this host.

        It will not come back, and the group need not wait for the grace to end.
        """
        ended = [peer for peer, process in self._absent.items() if process.is_gone()]
        for peer in ended:
            self._absent.pop(peer, None)
            self.call(partial(self._node.disconnected, peer, has_ended=True))
        self._next_look = now + _LOOK_SECONDS if self._absent else math.inf

    def _shut(self, connection: _Connection) -> None:
        connection.closed = True
        self._unproved.pop(connection, None)
        if connection.peer is not None:
            self._pings.remove(connection.peer)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _release(self) -> None:
        """Close everything."""
        for connection in [*self._neighbours.values(), *self._unproved]:
            self._shut(connection)
        self._neighbours.clear()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        os.close(self._wake_end)
        os.close(self._waker)
        _open.discard(self)

    def close_in_child(self) -> None:
        """Close the descriptors that a forked process has inherited.

        A loader's worker outlives its rank by seconds, and the rank's connections with it: the
        neighbours would not notice that the rank was killed. The epoll descriptor is shared with
        the parent process, so nothing is unregistered.
        """
        for connection in [*self._neighbours.values(), *self._unproved]:
            connection.socket.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()


class _Connection:
    """One socket, the bytes that it has yet to send, and the beginning of what it receives.

    Attributes:
        source: address of the other end's host.
        dialed: rank that this end connected to; None = the other end connected.
        peer: rank at the other end, once it has proved the token.
        process: at the other end; None = not known.
        own_seal: of the frames of this end, once both ends have proved the token.
        others_seal: of the frames of the other end.
        is_accepted: the host of the parent has accepted the connection.
        unsent: bytes.
        received: bytes that are not taken yet.
    """

    def __init__(self, connection: socket.socket, source: str, dialed: int | None) -> None:
        self.socket, self.source, self.dialed = connection, source, dialed
        self.peer: int | None = None
        self.process: Process | None = None
        self.own_seal: FrameSeal | None = None
        self.others_seal: FrameSeal | None = None
        self.unsent, self.received = bytearray(), bytearray()
        self.waits_to_write = self.is_accepted = self.closed = False
        self._length = 0
        self._take: Callable[[bytes], None] = _refuse

    @property
    def num_missing(self) -> int:
        """Bytes that the next message of the handshake lacks."""
        return self._length - len(self.received)

    def expect(self, length: int, take: Callable[[bytes], None]) -> None:
        """Call `take` with the next message of the handshake, which has `length` bytes."""
        self._length, self._take = length, take

    def take_message(self) -> None:
        """Take the message of the handshake that has come."""
        message = bytes(self.received)
        self.received.clear()
        self._take(message)

    def write_frame(self, frame: bytes) -> None:
        """Add a frame to the unsent bytes."""
        assert self.own_seal is not None, "a neighbour has proved the token"
        self.unsent += len(frame).to_bytes(_LENGTH_BYTES, "big")
        self.unsent += frame
        self.unsent += self.own_seal.make(frame)


def _refuse(_: bytes) -> None:
    raise HandshakeError("nothing is expected")


def _read_process(identity: Identity) -> Process | None:
    try:
        return Process.parse(identity.process)
    except ValueError:
        return None


def _set_options(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP_OPTIONS.items():
        if hasattr(socket, name):  # not all systems have all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_open: weakref.WeakSet[Any] = weakref.WeakSet()


def _close_in_child() -> None:
    for sockets in list(_open):
        sockets.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
