# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Sockets of the control tree: one rank's connections to its parent and its children.

The *node* (`titan_ft.protocol.control.node`) has the protocol of the tree as pure code: it gets
events and returns actions. This module carries out the actions. It gives the node an event when a
connection begins, ends or brings a *frame*, which is one message on the wire.

One thread waits for all sockets, and no socket ever blocks. Other threads give the node their
events directly, so they can send without waiting for that thread.

See docs/membership.md, "Control tree".
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
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from titan_ft.membership.control_connection import (
    ControlConnection,
    FrameError,
    listen,
    set_tcp_options,
    start_connecting,
)
from titan_ft.membership.control_handshake import (
    ANSWER_BYTES,
    HELLO_BYTES,
    REPLY_BYTES,
    ChildHandshake,
    HandshakeError,
    Identity,
    ParentHandshake,
    Secret,
)
from titan_ft.membership.control_pings import Pings
from titan_ft.protocol.control.node import Action, Close, Connect, Node, Send
from titan_ft.protocol.errors import first_line
from titan_ft.system.address import split_address
from titan_ft.system.process import Process
from titan_ft.system.refusal import Refusal, RefusalKind, Refusals, find_crowded

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
"""Limit of the handshake of an accepted connection. The other end must prove by then that it knows
the token; until then the connection is *unproved*."""

CONNECT_SECONDS = 3.0
"""Limit of a connection to the parent's host. It is enough even if the network loses the first
packet, which TCP sends again after a second."""

DIAL_SECONDS = 10.0
"""Limit of the handshake with the parent, after its host has accepted the connection. The parent
may be frozen, or hold Python's lock, for seconds."""

MAX_UNPROVED = 64
"""Number of unproved connections. With the next connection, one of them is closed: a stranger with
many silent connections must not keep a child out."""

_JOIN_SECONDS = 1.0
"""Limit of the wait of `close` for the thread. The thread may hang in a listener, or in a log that
nobody reads, and the process must end nevertheless."""

_ACCEPTED_AT_ONCE = 16
"""Connections that are accepted in a row. Then the handshakes under way get their turn."""
_BACKLOG = 1024
_NO_DESCRIPTOR_LEFT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC}
_ACCEPT_PAUSE_SECONDS = 0.1  # after one of these errors
_READ_BYTES = 1 << 16
_MAX_WAIT_SECONDS = 86_400.0  # epoll cannot count waits of more than some weeks

_PROCESS_CHECK_SECONDS = 0.02
"""Pause between two checks whether a disconnected neighbour's process has ended. A process closes
its connections a moment before it is gone, so the first check may come too early."""


class ControlSockets:
    """Connections of one rank in its control tree, and the thread that serves them.

    `ControlTree` owns it. `changed` guards the node and all fields of this class.

    Threads: any thread that holds `changed` may call the public methods. `close` is called without
    it. The methods below "The thread" run on the thread `titan_ft_control`, which holds `changed`.
    If that thread fails, it reports the error to `on_failure`, closes all connections, and ends.

    Args:
        node: decides.
        changed: reentrant; is notified when a neighbour is connected.
        secret: the token and key of this tree.
        host: numeric address to listen on.
        own: where this rank runs.
        patience: seconds without a heartbeat after which a child is silent; see `HeartbeatWatch`.
        on_action: carries out the node's actions that concern no connection. Called with `changed`
            held; must not block.
        on_turn: called after each turn of the thread, without the lock; may take a moment.
        on_failure: called without the lock with an unexpected error that ends the thread.
        on_refusal: takes the first refused stranger of each kind, without the lock; must not block.

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
        on_refusal: Callable[[Refusal], None] | None = None,
    ) -> None:
        self._node = node
        self._changed = changed
        self._rank = rank
        self._children = children
        self._secret = secret
        self._own = own
        self._on_action = on_action
        self._on_turn = on_turn
        self._on_failure = on_failure
        self._neighbours: dict[int, ControlConnection] = {}
        self._known: set[int] = set()  # neighbours that have been connected at least once
        # Connections without a proof, the oldest first, and when each of them is closed.
        self._unproved: dict[ControlConnection, float] = {}
        self._absent: dict[int, Process] = {}  # processes of the disconnected neighbours
        self._next_process_check = math.inf  # of `_absent`
        self._parent_address = ("", 0)
        self._parent = Identity("", "")
        self._accepts_again_at = math.inf  # finite while no descriptor is left
        self._wakes_at = -math.inf  # when the thread's wait ends; -inf during a turn
        self._closed = False
        self._warnings: deque[str] = deque()  # logged after the turn, without the lock
        self._refused: deque[tuple[RefusalKind, str]] = deque()  # counted after the turn, likewise
        self._refusals = Refusals(HANDSHAKE_SECONDS, on_refusal)
        self.last_error = ""
        # epoll, because it heeds a socket that another thread registers during the wait.
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
        """Start to connect to the parent, and start the thread.

        Args:
            address: host:port of the parent.
            parent: where the parent runs.
        """
        self._parent_address = split_address(address)
        self._parent = parent
        self.start()

    def start(self) -> None:
        """Start the thread. Rank 0 calls this, because it has no parent."""
        self.call(self._node.start)
        self._thread.start()

    def call(self, event: Callable[[float], Iterable[Action]]) -> None:
        """Give the node an event, and carry out its actions; any thread that holds the lock."""
        if self._closed:
            return
        self._carry_out(event(time.monotonic()))
        # Another thread's event may bring the next tick closer than the thread's wait. During its
        # own turn the thread looks at the next tick afterwards.
        is_waiting = self._wakes_at > -math.inf
        if is_waiting and self._node.next_tick < self._wakes_at:
            self.wake()

    def is_connected(self, peer: int) -> bool:
        """True if the connection to a neighbour has proved the token, and has not ended."""
        return peer in self._neighbours

    def wake(self) -> None:
        """Let the thread take a turn soon."""
        if self._closed:
            return  # the pipe's descriptors may be another file's by now
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes the thread as well
            os.write(self._waker, b"w")

    def close(self) -> None:
        """Close all connections, and end the thread. A second call does nothing."""
        with self._changed:
            if self._closed:
                return
            self.wake()
            self._closed = True
        if self._thread.ident is None:  # the thread never started, so it releases nothing
            self._release()
        elif self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    # The thread

    def _run(self) -> None:
        try:
            while not self._closed:
                self._run_turn()
        except Exception as error:
            # First the report: without it the rank waits for an answer for ever. The log may block.
            self._on_failure(error)
            logger.exception("the control tree has failed on this rank")
        finally:
            with self._changed:
                self._closed = True
                self._release()

    def _run_turn(self) -> None:
        """Wait, serve the sockets that are ready, and do what is due."""
        wait_seconds = max(0.0, self._wakes_at - time.monotonic())
        ready = self._selector.select(min(wait_seconds, _MAX_WAIT_SECONDS))
        with self._changed:
            self._wakes_at = -math.inf  # nobody needs to wake this thread during its turn
            for key, events in ready:
                key.data(events)
            self._do_due(time.monotonic())
            self._wakes_at = self._find_next_time()
        while self._warnings:
            # Without the lock: a log that nobody reads blocks, and the training thread would wait.
            logger.warning("%s", self._warnings.popleft())
        while self._refused:
            self._refusals.add(*self._refused.popleft())
        self._on_turn()

    def _do_due(self, now: float) -> None:
        self._close_late(now)
        self._resume_accepting(now)
        if now >= self._next_process_check:
            self._check_absent_processes(now)
        if now >= self._pings.next_look:
            for child, seconds in self._pings.look(now).items():
                self.call(partial(self._node.fall_silent, child, seconds))
        if now >= self._node.next_tick:
            self.call(self._node.tick)

    def _find_next_time(self) -> float:
        """Return when the thread has something to do even if no socket is ready."""
        return min(
            self._node.next_tick,
            min(self._unproved.values(), default=math.inf),
            self._accepts_again_at,
            self._next_process_check,
            self._pings.next_look,
        )

    def _drain_wakes(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_end, _READ_BYTES)

    # Actions of the node

    def _carry_out(self, actions: Iterable[Action]) -> None:
        pending = deque(actions)
        written: dict[int, ControlConnection] = {}
        while pending:
            action = pending.popleft()
            match action:
                case Send(peer, frame):
                    connection = self._neighbours.get(peer)
                    if connection is not None:
                        connection.write_frame(frame)
                        written[peer] = connection
                case Close(peer):
                    self._close(peer)
                case Connect(peer):
                    if not self._dial(peer):
                        pending.extend(self._node.disconnected(peer, time.monotonic()))
                case _:
                    self._on_action(action)
        for connection in written.values():  # once for all frames of a neighbour
            self._flush(connection)

    def _close(self, peer: int) -> None:
        """Close the connection to a neighbour, and the attempts to make one."""
        self._absent.pop(peer, None)
        connections = [c for c in self._unproved if c.dialed == peer]
        if peer in self._neighbours:
            connections.append(self._neighbours.pop(peer))
        for connection in connections:
            self._shut(connection)

    def _dial(self, parent: int) -> bool:
        """Start to connect to the parent. Returns False if that failed at once."""
        dialing: socket.socket | None = None
        try:
            dialing = start_connecting(self._parent_address)
            connection = self._add(dialing, self._parent_address[0], dialed=parent)
        except OSError as error:
            self.last_error = first_line(error)
            if dialing is not None:
                dialing.close()
            return False
        handshake = ChildHandshake(self._secret, self._rank, parent, self._own)
        connection.expect_message(REPLY_BYTES, partial(self._handle_reply, connection, handshake))
        connection.unsent += handshake.hello
        self._watch_writes(connection)  # the socket is writable once it is connected
        return True

    # Connections without a proof

    def _accept(self, _: int) -> None:
        assert self._listener is not None
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, source = self._listener.accept()
                connection = self._add(accepted, source[0])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR_LEFT:
                    self._pause_accepting(error)
                    return
                continue  # the other end has already gone away
            connection.expect_message(HELLO_BYTES, partial(self._handle_hello, connection))
            self._limit_strangers()

    def _pause_accepting(self, error: OSError) -> None:
        """Leave the children in the kernel's queue until a descriptor is free.

        The listening socket stays readable while they wait. Without the pause this thread would
        turn as fast as it can.
        """
        assert self._listener is not None
        self._warnings.append(f"no child of this rank can connect now: {first_line(error)}")
        strangers = self._list_strangers()
        if strangers:
            self._refuse_one(strangers, "no_descriptors")
        self._selector.unregister(self._listener)
        self._accepts_again_at = time.monotonic() + _ACCEPT_PAUSE_SECONDS

    def _resume_accepting(self, now: float) -> None:
        if self._listener is not None and now >= self._accepts_again_at:
            self._accepts_again_at = math.inf
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _limit_strangers(self) -> None:
        strangers = self._list_strangers()
        if len(strangers) > MAX_UNPROVED:
            self._refuse_one(strangers, "crowd")

    def _list_strangers(self) -> list[ControlConnection]:
        """Return the connections from outside without a proof, the oldest first."""
        return [connection for connection in self._unproved if connection.dialed is None]

    def _refuse_one(self, strangers: list[ControlConnection], kind: RefusalKind) -> None:
        refused = find_crowded(strangers, lambda connection: connection.source)
        self._refused.append((kind, refused.source))
        self._shut(refused)

    def _close_late(self, now: float) -> None:
        late = [connection for connection, deadline in self._unproved.items() if now >= deadline]
        for connection in late:
            if connection.dialed is None:
                self._refused.append(("silent", connection.source))
            self._end_connection(connection, "the other end has not proved the run's token in time")

    def _handle_hello(self, connection: ControlConnection, hello: bytes) -> None:
        handshake = ParentHandshake(self._secret, self._rank, self._children, hello)
        connection.unsent += handshake.reply
        connection.expect_message(ANSWER_BYTES, partial(self._handle_answer, connection, handshake))
        self._flush(connection)

    def _handle_answer(
        self,
        connection: ControlConnection,
        handshake: ParentHandshake,
        answer: bytes,
    ) -> None:
        identity = handshake.check(answer)
        connection.own_seal, connection.others_seal = handshake.seals()
        self._join(connection, handshake.child, identity)

    def _handle_reply(
        self,
        connection: ControlConnection,
        handshake: ChildHandshake,
        reply: bytes,
    ) -> None:
        connection.unsent += handshake.answer(reply)
        connection.own_seal, connection.others_seal = handshake.seals()
        assert connection.dialed is not None
        self._join(connection, connection.dialed, self._parent)
        self._flush(connection)

    def _join(self, connection: ControlConnection, peer: int, identity: Identity) -> None:
        """Make a connection that has proved the token the connection of a neighbour.

        A child may notice the end of its earlier connection before this rank does. So the newer
        connection replaces an earlier one.
        """
        del self._unproved[connection]
        earlier = self._neighbours.pop(peer, None)
        if earlier is not None:
            self._shut(earlier)
        if peer in self._known:
            reason = self.last_error or "it made a new connection"
            self._warnings.append(f"rank {peer} (on {identity.host}) is connected again: {reason}")
        self._known.add(peer)
        self._neighbours[peer] = connection
        self._absent.pop(peer, None)
        connection.peer = peer
        connection.process = _parse_process(identity)
        if peer in self._children:
            self._pings.add(peer, identity.echo)
        self._changed.notify_all()
        self.call(lambda now: self._node.connected(peer, now, identity.host))

    # Reading and writing

    def _add(
        self,
        accepted: socket.socket,
        source: str,
        dialed: int | None = None,
    ) -> ControlConnection:
        """Register a socket that has not proved the token yet.

        Args:
            source: address of the other end's host.
            dialed: rank that this end connects to; None = the other end made the connection.

        Raises:
            OSError: the other end has reset the connection, or the system has no room for it.
        """
        accepted.setblocking(False)
        set_tcp_options(accepted)
        connection = ControlConnection(accepted, source, dialed)
        self._selector.register(accepted, selectors.EVENT_READ, partial(self._serve, connection))
        limit_seconds = HANDSHAKE_SECONDS if dialed is None else CONNECT_SECONDS
        self._unproved[connection] = time.monotonic() + limit_seconds
        return connection

    def _serve(self, connection: ControlConnection, events: int) -> None:
        if events & selectors.EVENT_READ:
            self._read(connection)  # first: reading shows why a connection could not be made
        if events & selectors.EVENT_WRITE:
            self._extend_handshake(connection)
            self._flush(connection)

    def _read(self, connection: ControlConnection) -> None:
        size = _READ_BYTES
        if connection.peer is None:
            # Before the proof take in no more than the next message: a stranger fills no memory.
            size = connection.num_missing
        try:
            data = connection.socket.recv(size)
        except BlockingIOError:
            return
        except OSError as error:
            self._end_connection(connection, first_line(error))
            return
        if not data:
            self._end_connection(connection, "the other end closed the connection")
            return
        connection.received += data
        try:
            if connection.peer is not None:
                self._handle_frames(connection, connection.peer)
            elif connection.num_missing == 0:
                connection.handle_message()
        except (HandshakeError, FrameError) as error:
            if connection.peer is None and connection.dialed is None:
                self._refused.append(("no_secret", connection.source))
            self._end_connection(connection, first_line(error))

    def _handle_frames(self, connection: ControlConnection, peer: int) -> None:
        """Give the node each frame that has arrived completely.

        Raises:
            FrameError: the other end sends something else.
        """
        while not connection.closed:  # the node may close the connection because of a frame
            frame = connection.pop_frame()
            if frame is None:
                return
            self.call(partial(self._node.receive, peer, frame))

    def _flush(self, connection: ControlConnection) -> None:
        """Send as much as the kernel takes. The rest follows when the socket is writable."""
        if connection.closed:
            return
        connection.send_unsent()
        self._watch_writes(connection)

    def _extend_handshake(self, connection: ControlConnection) -> None:
        """Give a parent more time to answer after its host has accepted the connection."""
        is_dial = connection.dialed is not None and connection in self._unproved
        if is_dial and not connection.is_accepted:
            connection.is_accepted = True
            self._unproved[connection] = time.monotonic() + DIAL_SECONDS

    def _watch_writes(self, connection: ControlConnection) -> None:
        """Have the selector report a writable socket while bytes are unsent, and only then."""
        waits_to_write = bool(connection.unsent)
        if connection.waits_to_write == waits_to_write:
            return
        connection.waits_to_write = waits_to_write
        events = selectors.EVENT_READ
        if waits_to_write:
            events |= selectors.EVENT_WRITE
        key = self._selector.get_key(connection.socket)
        self._selector.modify(connection.socket, events, key.data)

    def _end_connection(self, connection: ControlConnection, reason: str) -> None:
        """Close a broken connection, and report the end to the node unless a stranger made it."""
        if connection.closed:
            return
        self._shut(connection)
        peer = connection.dialed if connection.peer is None else connection.peer
        if peer is None:
            return  # a stranger's connection
        self.last_error = reason
        if self._neighbours.get(peer) is connection:
            del self._neighbours[peer]
        if connection.process is not None:
            self._absent[peer] = connection.process
        self.call(lambda now: self._node.disconnected(peer, now))
        self._check_absent_processes(time.monotonic())

    def _check_absent_processes(self, now: float) -> None:
        """Report each disconnected neighbour whose process on this host has ended.

        Such a neighbour does not come back, so the group need not wait for the grace to end.
        """
        ended = [peer for peer, process in self._absent.items() if process.is_gone()]
        for peer in ended:
            self._absent.pop(peer, None)
            self.call(partial(self._node.disconnected, peer, has_ended=True))
        self._next_process_check = math.inf
        if self._absent:
            self._next_process_check = now + _PROCESS_CHECK_SECONDS

    def _shut(self, connection: ControlConnection) -> None:
        connection.closed = True
        self._unproved.pop(connection, None)
        if connection.peer is not None:
            self._pings.remove(connection.peer)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _release(self) -> None:
        """Close all sockets and the selector."""
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
        """Close the descriptors that a forked process has inherited; runs in that process.

        A data loader's worker outlives its rank by seconds. With the rank's connections open, the
        neighbours would not notice that the rank was killed. The epoll descriptor is shared with
        the rank's process, so nothing is unregistered.
        """
        for connection in [*self._neighbours.values(), *self._unproved]:
            connection.socket.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()


def _parse_process(identity: Identity) -> Process | None:
    try:
        return Process.parse(identity.process)
    except ValueError:
        return None


_open: weakref.WeakSet[ControlSockets] = weakref.WeakSet()  # what a forked process must close


def _close_in_child() -> None:
    for sockets in list(_open):
        sockets.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
