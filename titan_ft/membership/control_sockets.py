# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Sockets of the control tree: one rank's connections to its parent and its children.

`Node` (protocol/control/node.py) is the protocol of the tree as pure code: each of its methods is
an event, and returns actions such as `Send` or `Connect`. This module calls these methods when a
connection begins, ends or brings a *frame* (one message on the wire), and carries out the actions.

A child connects to its parent, which it calls *dialing*. A connection goes through three stages:

1. Connected. It is *unproved*: the process at the other end may be a *stranger*, which does not
   belong to the group.
2. The handshake (control_handshake.py) proves that both ends know the run's token: the child sends
   HELLO, the parent REPLY, the child ANSWER. Unproved connections are limited in number and time.
3. The connection is that of a *neighbour*, and carries frames. If it ends, the child dials again.

One thread waits for all sockets with a selector. Each time it wakes up, it takes a *turn*: it
serves all sockets that are ready, and does everything whose time has come. No socket ever blocks.
Other threads call the node's methods through `give_event`, under the tree's lock. So they can send
frames without waiting for the tree's thread.

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
"""Time that a child has for the handshake after its parent has accepted the connection."""

DIAL_SECONDS = 3.0
"""Time for a connection to the parent's host. The network may lose the first packet, and TCP sends
it again only after a second."""

PARENT_HANDSHAKE_SECONDS = 10.0
"""Time that a parent has for the handshake after its host has accepted the connection. It is long,
because the parent may be frozen, or one of its threads may hold Python's lock, for seconds."""

MAX_UNPROVED = 64
"""Limit of the number of unproved connections. For one more, an unproved connection is closed.
Otherwise a stranger with many silent connections could keep a child out."""

_JOIN_SECONDS = 1.0
"""Time that `close` waits for the end of the thread. The thread may hang in a listener, or in a
write to a log that nobody reads. The process must be able to end nevertheless."""

_MAX_ACCEPTS_IN_A_ROW = 16
"""After so many accepted connections, the thread serves the other sockets first."""
_BACKLOG = 1024  # connections that the kernel keeps until they are accepted
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC}
"""Errors of `accept` after which an immediate second attempt would fail as well."""
_ACCEPT_PAUSE_SECONDS = 0.1  # pause after one of these errors
_READ_BYTES = 1 << 16
_MAX_WAIT_SECONDS = 86_400.0  # epoll fails with waits of more than some weeks

_PROCESS_CHECK_SECONDS = 0.02
"""Pause between two checks whether a disconnected neighbour's process has ended. A process closes
its connections a moment before it is gone, so the first check may come too early."""


class ControlSockets:
    """Connections of one rank in its control tree, and the thread that serves them.

    `ControlTree` creates it and calls the public methods. `condition` is the lock of the node and
    of all fields of this class.

    Threads: any thread that holds the lock may call the public methods, except `close`, which is
    called without the lock. The methods below "The thread" run on the thread `titan_ft_control`,
    which holds the lock. If that thread fails, it reports the error to `on_failure`, closes all
    connections, and ends.

    Args:
        node: the protocol; gets the events.
        condition: a reentrant lock. It is notified when a neighbour is connected.
        secret: the token and the key of this tree, for the handshake.
        host: numeric address to listen on.
        own: where this rank runs; sent to the parent in the handshake.
        patience: seconds after which a child that does not answer pings is silent
            (`HeartbeatWatch`).
        on_action: carries out the node's actions that concern no connection. Called with the lock
            held, so it must not block.
        on_turn: called after each turn of the thread, without the lock.
        on_failure: called without the lock if an unexpected error ends the thread.
        on_refusal: takes a report of the first refused connection of each kind (`RefusalKind`).
            Called without the lock; must not block.

    Attributes:
        address: host and port to which the children connect; None = this rank has no children.
        last_error: why the last connection or attempt ended, for people; empty = none has ended.
    """

    def __init__(
        self,
        node: Node,
        condition: threading.Condition,
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
        self._condition = condition
        self._rank = rank
        self._children = children
        self._secret = secret
        self._own = own
        self._on_action = on_action
        self._on_turn = on_turn
        self._on_failure = on_failure
        self._neighbours: dict[int, ControlConnection] = {}
        self._met_neighbours: set[int] = set()  # those that have been connected at least once
        # Unproved connections, the oldest first, and the time at which each of them expires.
        self._unproved: dict[ControlConnection, float] = {}
        # Processes of the neighbours that are disconnected now.
        self._disconnected_processes: dict[int, Process] = {}
        self._next_process_check = math.inf  # whether one of these processes has ended
        self._parent_address = ("", 0)
        self._parent = Identity("", "")
        self._accepts_again_at = math.inf  # finite during a pause after `_OUT_OF_RESOURCES`
        self._wait_ends_at = -math.inf  # when the thread's wait ends by itself; -inf during a turn
        self._closed = False
        # Warnings, and kinds and sources of refused connections. The thread logs and counts them
        # after its turn, without the lock.
        self._warnings: deque[str] = deque()
        self._refused: deque[tuple[RefusalKind, str]] = deque()
        self._refusals = Refusals(HANDSHAKE_SECONDS, on_refusal)
        self.last_error = ""
        # epoll, because other threads register sockets while this class's thread waits, and epoll
        # includes these sockets in the wait.
        self._selector = selectors.EpollSelector()
        self._pings = Pings(patience, self._selector)
        self._wake_pipe_reader, self._wake_pipe_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_pipe_reader, selectors.EVENT_READ, self._empty_wake_pipe)
        self._listener: socket.socket | None = None
        self.address: tuple[str, int] | None = None
        if children:
            self._listener = listen(host, _BACKLOG)
            self._listener.setblocking(False)
            self.address = self._listener.getsockname()[:2]
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._thread = threading.Thread(target=self._run, name="titan_ft_control", daemon=True)
        _open.add(self)

    def connect_to_parent(self, address: str, parent: Identity) -> None:
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
        self.give_event(self._node.start)
        self._thread.start()

    def give_event(self, event: Callable[[float], Iterable[Action]]) -> None:
        """Call a method of the node, and carry out the actions that it returns.

        Args:
            event: the method, with all arguments except the last one, which is the time.
        """
        if self._closed:
            return
        self._carry_out(event(time.monotonic()))
        # The node may now need a tick before the thread's wait ends. Then wake the thread. During a
        # turn this is not necessary: the thread reads the time of the next tick after its turn.
        is_waiting = self._wait_ends_at > -math.inf
        if is_waiting and self._node.next_tick < self._wait_ends_at:
            self.wake()

    def is_connected(self, peer: int) -> bool:
        """True if there is a connection to this neighbour that has completed the handshake."""
        return peer in self._neighbours

    def wake(self) -> None:
        """Let the thread take a turn soon."""
        if self._closed:
            return  # The numbers of the pipe's descriptors may belong to other files now.
        with contextlib.suppress(
            BlockingIOError
        ):  # If the pipe is full, the thread wakes up anyway.
            os.write(self._wake_pipe_writer, b"w")

    def close(self) -> None:
        """Close all connections, and end the thread. A second call does nothing."""
        with self._condition:
            if self._closed:
                return
            self.wake()
            self._closed = True
        if self._thread.ident is None:  # The thread never started, so it cannot close anything.
            self._close_all()
        elif self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    # The thread

    def _run(self) -> None:
        try:
            while not self._closed:
                self._run_turn()
        except Exception as error:
            # Report before logging, because writing to the log may block. Without the report, the
            # threads of this rank would wait for an agreement for ever.
            self._on_failure(error)
            logger.exception("the control tree has failed on this rank")
        finally:
            with self._condition:
                self._closed = True
                self._close_all()

    def _run_turn(self) -> None:
        """Wait until a socket is ready or a time has come, and take one turn."""
        wait_seconds = max(0.0, self._wait_ends_at - time.monotonic())
        ready = self._selector.select(min(wait_seconds, _MAX_WAIT_SECONDS))
        with self._condition:
            self._wait_ends_at = -math.inf
            for key, events in ready:
                serve = key.data  # the function that was registered with the socket
                serve(events)
            self._act_on_time(time.monotonic())
            self._wait_ends_at = self._find_wake_time()
        while self._warnings:
            # Without the lock: writing to a log that nobody reads blocks. If this thread held the
            # lock meanwhile, the training thread would wait for it.
            logger.warning("%s", self._warnings.popleft())
        while self._refused:
            self._refusals.add(*self._refused.popleft())
        self._on_turn()

    def _act_on_time(self, now: float) -> None:
        """Do everything whose time has come."""
        self._close_expired(now)
        self._resume_accepting(now)
        if now >= self._next_process_check:
            self._check_disconnected_processes(now)
        if now >= self._pings.next_look:
            for child, seconds in self._pings.look(now).items():
                self.give_event(partial(self._node.report_silence, child, seconds))
        if now >= self._node.next_tick:
            self.give_event(self._node.tick)

    def _find_wake_time(self) -> float:
        """Return the earliest time at which the thread must wake up even if no socket is ready."""
        return min(
            self._node.next_tick,
            min(self._unproved.values(), default=math.inf),
            self._accepts_again_at,
            self._next_process_check,
            self._pings.next_look,
        )

    def _empty_wake_pipe(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_pipe_reader, _READ_BYTES)

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
                    self._close_neighbour(peer)
                case Connect(peer):
                    if not self._dial(peer):
                        # Report the failure. The node may return further actions.
                        pending.extend(self._node.disconnected(peer, time.monotonic()))
                case _:
                    self._on_action(action)
        for connection in written.values():  # One system call for all frames of a neighbour.
            self._flush(connection)

    def _close_neighbour(self, peer: int) -> None:
        """Close the connection to a neighbour, or the attempt to make one, without an event."""
        self._disconnected_processes.pop(peer, None)
        connections = [connection for connection in self._unproved if connection.dialed == peer]
        if peer in self._neighbours:
            connections.append(self._neighbours.pop(peer))
        for connection in connections:
            self._close_socket(connection)

    def _dial(self, parent: int) -> bool:
        """Start to connect to the parent. Returns False if that failed at once."""
        dialing: socket.socket | None = None
        try:
            dialing = start_connecting(self._parent_address)
            connection = self._register(dialing, self._parent_address[0], dialed=parent)
        except OSError as error:
            self.last_error = first_line(error)
            if dialing is not None:
                dialing.close()
            return False
        handshake = ChildHandshake(self._secret, self._rank, parent, self._own)
        connection.expect_message(REPLY_BYTES, partial(self._handle_reply, connection, handshake))
        connection.unsent += handshake.hello
        self._watch_writes(connection)  # The socket becomes writable when it is connected.
        return True

    # Unproved connections

    def _accept(self, _events: int) -> None:
        assert self._listener is not None
        for _ in range(_MAX_ACCEPTS_IN_A_ROW):
            try:
                accepted, source_address = self._listener.accept()
                connection = self._register(accepted, source_address[0])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._pause_accepting(error)
                    return
                continue  # The other end has closed this connection already.
            connection.expect_message(HELLO_BYTES, partial(self._handle_hello, connection))
            self._limit_unproved()

    def _pause_accepting(self, error: OSError) -> None:
        """Accept no connections for a moment, because the process or the host lacks resources.

        The children wait in the kernel's queue meanwhile. The listening socket stays readable all
        this time, so without the pause this thread would spin.
        """
        assert self._listener is not None
        self._warnings.append(f"no child of this rank can connect now: {first_line(error)}")
        accepted_unproved = self._list_accepted_unproved()
        if accepted_unproved:
            self._refuse(accepted_unproved, "no_descriptors")
        self._selector.unregister(self._listener)
        self._accepts_again_at = time.monotonic() + _ACCEPT_PAUSE_SECONDS

    def _resume_accepting(self, now: float) -> None:
        if self._listener is not None and now >= self._accepts_again_at:
            self._accepts_again_at = math.inf
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _limit_unproved(self) -> None:
        """Close a connection if there are more than `MAX_UNPROVED` unproved ones."""
        accepted_unproved = self._list_accepted_unproved()
        if len(accepted_unproved) > MAX_UNPROVED:
            self._refuse(accepted_unproved, "crowd")

    def _list_accepted_unproved(self) -> list[ControlConnection]:
        """Return the unproved connections that this rank has accepted, the oldest first."""
        return [connection for connection in self._unproved if connection.dialed is None]

    def _refuse(self, accepted_unproved: list[ControlConnection], kind: RefusalKind) -> None:
        """Close the oldest unproved connection of the host that has most of them."""
        refused = find_crowded(accepted_unproved, lambda connection: connection.source)
        self._refused.append((kind, refused.source))
        self._close_socket(refused)

    def _close_expired(self, now: float) -> None:
        """Close the unproved connections whose time for the handshake is over."""
        expired = [connection for connection, deadline in self._unproved.items() if now >= deadline]
        for connection in expired:
            if connection.dialed is None:
                self._refused.append(("silent", connection.source))
            self._end_connection(connection, "the other end has not proved the run's token in time")

    def _handle_hello(self, connection: ControlConnection, hello: bytes) -> None:
        """On the parent: the first message of the handshake has arrived."""
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
        """On the parent: the last message of the handshake has arrived."""
        identity = handshake.check(answer)
        connection.own_seal, connection.others_seal = handshake.seals()
        self._promote(connection, handshake.child, identity)

    def _handle_reply(
        self,
        connection: ControlConnection,
        handshake: ChildHandshake,
        reply: bytes,
    ) -> None:
        """On the child: the parent's message of the handshake has arrived."""
        connection.unsent += handshake.answer(reply)
        connection.own_seal, connection.others_seal = handshake.seals()
        assert connection.dialed is not None
        self._promote(connection, connection.dialed, self._parent)
        self._flush(connection)

    def _promote(self, connection: ControlConnection, peer: int, identity: Identity) -> None:
        """Use a connection for the frames of a neighbour, because the handshake is complete.

        If there is an earlier connection, replace it: a child may notice the end of a connection,
        and dial again, before this rank notices that end.
        """
        del self._unproved[connection]
        earlier = self._neighbours.pop(peer, None)
        if earlier is not None:
            self._close_socket(earlier)
        if peer in self._met_neighbours:
            reason = self.last_error or "it made a new connection"
            self._warnings.append(f"rank {peer} (on {identity.host}) is connected again: {reason}")
        self._met_neighbours.add(peer)
        self._neighbours[peer] = connection
        self._disconnected_processes.pop(peer, None)
        connection.peer = peer
        connection.process = _parse_process(identity)
        if peer in self._children:
            self._pings.add(peer, identity.echo)
        self._condition.notify_all()
        self.give_event(lambda now: self._node.connected(peer, now, identity.host))

    # Reading and writing

    def _register(
        self,
        new_socket: socket.socket,
        source: str,
        dialed: int | None = None,
    ) -> ControlConnection:
        """Register the socket of a new connection, which is unproved.

        Args:
            source: address of the other end's host.
            dialed: rank to which this end connects; None = the other end made the connection.

        Raises:
            OSError: the other end has reset the connection, or the system has no room for it.
        """
        new_socket.setblocking(False)
        set_tcp_options(new_socket)
        connection = ControlConnection(new_socket, source, dialed)
        self._selector.register(new_socket, selectors.EVENT_READ, partial(self._serve, connection))
        limit_seconds = HANDSHAKE_SECONDS
        if dialed is not None:
            limit_seconds = DIAL_SECONDS
        self._unproved[connection] = time.monotonic() + limit_seconds
        return connection

    def _serve(self, connection: ControlConnection, events: int) -> None:
        """Read from and write to a socket that the selector reports as ready."""
        if events & selectors.EVENT_READ:
            # First, because reading raises the error of a connection that could not be made.
            self._read(connection)
        if events & selectors.EVENT_WRITE:
            self._extend_handshake(connection)
            self._flush(connection)

    def _read(self, connection: ControlConnection) -> None:
        is_proved = connection.peer is not None
        size = _READ_BYTES
        if not is_proved:
            # Read no more than the next message of the handshake, so that a stranger cannot fill
            # this process's memory.
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
            is_from_stranger = connection.peer is None and connection.dialed is None
            if is_from_stranger:
                self._refused.append(("no_secret", connection.source))
            self._end_connection(connection, first_line(error))

    def _handle_frames(self, connection: ControlConnection, peer: int) -> None:
        """Give the node each frame that has arrived completely.

        Raises:
            FrameError: the other end has sent something that is not a frame.
        """
        while not connection.closed:  # The node may close the connection because of a frame.
            frame = connection.pop_frame()
            if frame is None:
                return
            self.give_event(partial(self._node.receive, peer, frame))

    def _flush(self, connection: ControlConnection) -> None:
        """Send as many unsent bytes as the kernel takes now.

        The selector reports when the socket takes more.
        """
        if connection.closed:
            return
        connection.send_unsent()
        self._watch_writes(connection)

    def _extend_handshake(self, connection: ControlConnection) -> None:
        """Extend the time for the handshake with the parent: its host has accepted the
        connection."""
        is_dial = connection.dialed is not None and connection in self._unproved
        if is_dial and not connection.is_accepted:
            connection.is_accepted = True
            self._unproved[connection] = time.monotonic() + PARENT_HANDSHAKE_SECONDS

    def _watch_writes(self, connection: ControlConnection) -> None:
        """Let the selector report that the socket is writable, but only while there are unsent
        bytes."""
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
        """Close a broken connection. Report its end to the node, unless it is a stranger's."""
        if connection.closed:
            return
        self._close_socket(connection)
        peer = connection.peer
        if peer is None:
            peer = connection.dialed  # this rank dialed, and the handshake is not complete
        if peer is None:
            return  # a stranger's connection
        self.last_error = reason
        if self._neighbours.get(peer) is connection:
            del self._neighbours[peer]
        if connection.process is not None:
            self._disconnected_processes[peer] = connection.process
        self.give_event(lambda now: self._node.disconnected(peer, now))
        self._check_disconnected_processes(time.monotonic())

    def _check_disconnected_processes(self, now: float) -> None:
        """Report each disconnected neighbour whose process on this host has ended.

        Such a neighbour cannot connect again, so the group need not wait for `GRACE_SECONDS`.
        """
        ended = []
        for peer, process in self._disconnected_processes.items():
            if process.is_gone():
                ended.append(peer)
        for peer in ended:
            self._disconnected_processes.pop(peer, None)
            self.give_event(partial(self._node.disconnected, peer, has_ended=True))
        self._next_process_check = math.inf
        if self._disconnected_processes:
            self._next_process_check = now + _PROCESS_CHECK_SECONDS

    def _close_socket(self, connection: ControlConnection) -> None:
        connection.closed = True
        self._unproved.pop(connection, None)
        if connection.peer is not None:
            self._pings.remove(connection.peer)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _close_all(self) -> None:
        """Close all sockets, the selector and the pipe."""
        for connection in [*self._neighbours.values(), *self._unproved]:
            self._close_socket(connection)
        self._neighbours.clear()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        os.close(self._wake_pipe_reader)
        os.close(self._wake_pipe_writer)
        _open.discard(self)

    def close_in_child(self) -> None:
        """Close the sockets that a forked process has inherited; called in the forked process.

        A data loader's worker may live some seconds longer than its rank. If it kept the rank's
        connections open, the neighbours would not notice that the rank was killed. Do not
        unregister the sockets: the selector's epoll instance is shared with the rank's process.
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


_open: weakref.WeakSet[ControlSockets] = weakref.WeakSet()
"""The objects whose sockets a forked process must close."""


def _close_in_child() -> None:
    for sockets in list(_open):
        sockets.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
