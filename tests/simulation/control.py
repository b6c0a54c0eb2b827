# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Simulated connections of the control tree.

The node (`protocol/control/node.py`) and `ControlTree` above them are the real ones.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.simulation import standins
from tests.simulation.kernel import Task
from titan_ft.protocol.control.heartbeat import HeartbeatWatch
from titan_ft.protocol.control.node import Action, Close, Connect, Node, Send
from titan_ft.system.address import split_address

if TYPE_CHECKING:
    from tests.simulation.world import World

FAN_OUT = 2
"""Children of a rank: with the product's sixteen no simulated tree would be deeper than one."""

_NEXT_MOMENT = 1e-6  # time between two frames on one connection, which keep their order


class Wire:
    """One connection of a child to its parent.

    A connection that ends in order delivers everything sent before. A reset loses the frames in
    flight.
    """

    def __init__(self, child: SimulatedSockets, parent: SimulatedSockets) -> None:
        self._ends = child, parent
        self._last_arrival = {child: 0.0, parent: 0.0}  # by receiver
        self.is_reset = False

    def send(self, source: SimulatedSockets, frame: bytes) -> None:
        """Send a frame to the other end."""
        target = self._other(source)
        self._deliver(source, target, partial(target.receive, self, frame))

    def answer(self, take: Callable[[], None]) -> None:
        """Let the child accept the connection before any frame. A later reset reaches the child
        later.
        """
        child, parent = self._ends
        arrival = self._note_arrival(parent, child)
        child.kernel.after(
            arrival - child.kernel.now, partial(parent.when_usable, child, partial(child.add, take))
        )

    def end(self, source: SimulatedSockets) -> None:
        """End the connection at one end. The other end notices the end of the stream."""
        target = self._other(source)
        self._deliver(source, target, partial(target.lose, self))

    def reset(self) -> None:
        """Break the connection at both ends, each at a time of its own."""
        self.is_reset = True
        for source, target in (self._ends, self._ends[::-1]):
            target.kernel.after(
                source.delay(target), partial(target.add, partial(target.lose, self))
            )

    def peer_of(self, end: SimulatedSockets) -> int:
        """Return the rank at the other end."""
        return self._other(end).rank

    def has_ended_at_peer(self, end: SimulatedSockets) -> bool:
        """True if the process at the other end has ended: the ranks of a simulated group share a
        host.
        """
        return self._other(end).has_ended

    def answers_pings(self, end: SimulatedSockets) -> bool:
        """True if the process at the other end answers at once."""
        return self._other(end).answers(end)

    def _other(self, end: SimulatedSockets) -> SimulatedSockets:
        child, parent = self._ends
        return parent if end is child else child

    def _deliver(
        self, source: SimulatedSockets, target: SimulatedSockets, event: Callable[[], None]
    ) -> None:
        def arrive() -> None:
            if not self.is_reset:
                target.add(event)

        arrival = self._note_arrival(source, target)
        source.kernel.after(
            arrival - source.kernel.now, partial(source.when_usable, target, arrive)
        )

    def _note_arrival(self, source: SimulatedSockets, target: SimulatedSockets) -> float:
        """Return the arrival time of a frame that is sent now: after all earlier frames."""
        earliest = source.kernel.now + source.delay(target)
        self._last_arrival[target] = max(earliest, self._last_arrival[target] + _NEXT_MOMENT)
        return self._last_arrival[target]


class SimulatedEcho:
    """`titan_ft.membership.control_pings.EchoServer`: each process answers as long as it runs."""

    def __init__(self, host: str) -> None:
        self.address = host

    def close(self) -> None:
        """See `EchoServer`."""


class SimulatedSockets:
    """`titan_ft.membership.control_sockets.ControlSockets` on the simulated network."""

    _ports = itertools.count(40_000)

    def __init__(
        self,
        node: Node,
        changed: threading.Condition,
        *,
        rank: int,
        children: range,
        host: str,
        patience: float,
        on_action: Callable[[Action], None],
        on_turn: Callable[[], None],
        **of_real_sockets: Any,
    ) -> None:
        self._world: World = standins.world()  # there is one implementation
        self.kernel = self._world.kernel
        self.rank = rank
        self._node, self._changed = node, changed
        self._on_action, self._on_turn = on_action, on_turn
        self._process = self.kernel.process
        self._place = self._world.ranks[self._process].node
        self._wires: dict[int, Wire] = {}
        self._watch = HeartbeatWatch(patience)
        self._events: deque[Callable[[], None]] = deque()
        self._dial: object = None  # identifies the connection attempt under way
        self._parent: SimulatedSockets | None = None
        self._task: Task | None = None
        self._closed = False
        self.last_error = ""
        self.address: tuple[str, int] | None = None
        if children:
            self.address = (host, next(self._ports))
            self._world.trees[self.address] = self
        self._process.on_end.append(self._end_wires)
        self._world.network.on_reset.setdefault(self._place, []).append(self._reset_wires)

    # Calls of the control tree

    def connect_to_parent(self, address: str, parent: object) -> None:
        """See `ControlSockets`."""
        self._parent = self._world.trees[split_address(address)]
        self.start()

    def start(self) -> None:
        """See `ControlSockets`."""
        self.give_event(self._node.start)
        self._task = self.kernel.spawn(self._run, "titan_ft_control")

    def give_event(self, event: Callable[[float], Iterable[Action]]) -> None:
        """See `ControlSockets`."""
        if self._closed:
            return
        rest = deque(event(standins.TIME.monotonic()))
        while rest:
            match rest.popleft():
                case Send(peer, frame):
                    if (wire := self._wires.get(peer)) is not None:
                        wire.send(self, frame)
                case Close(peer):
                    self._dial = None
                    if (wire := self._wires.pop(peer, None)) is not None:
                        wire.end(self)
                        self._watch.remove(peer)
                case Connect():
                    self._connect()
                case other:
                    self._on_action(other)
        self.wake()

    def is_connected(self, peer: int) -> bool:
        """See `ControlSockets`."""
        return peer in self._wires

    @property
    def has_ended(self) -> bool:
        """True if the rank's process has ended."""
        return self._process.dead

    def answers(self, peer: SimulatedSockets) -> bool:
        """True if this rank's process runs, and the link to the peer works."""
        return self._process.runs and self._world.network.usable(self._place, peer._place)

    def wake(self) -> None:
        """See `ControlSockets`."""
        if self._task is not None:
            self.kernel.wake(self._task)

    def close(self) -> None:
        """See `ControlSockets`."""
        self._closed = True
        self._end_wires()
        self.wake()

    # The thread of the sockets

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                while self._events:
                    self._events.popleft()()
                now = standins.TIME.monotonic()
                if now >= self._node.next_tick:
                    self.give_event(self._node.tick)
                if now >= self._watch.next_look:
                    self._ping(now)
                rest = min(self._node.next_tick, self._watch.next_look) - now
            self._on_turn()
            if not self._events and not self._closed:
                self.kernel.block(min(max(rest, 0.0), 3600.0))

    def _ping(self, now: float) -> None:
        """Find out which children answer pings.

        The children answer on native threads, whatever their Python code does.
        """
        for child, wire in self._wires.items():
            if wire.answers_pings(self):
                self._watch.note_answer(child, now)
        for child, seconds in self._watch.look(now).items():
            self.give_event(partial(self._node.report_silence, child, seconds))

    def add(self, event: Callable[[], None]) -> None:
        """Give the thread an event. The world's code calls this."""
        self._events.append(event)
        self.wake()

    def receive(self, wire: Wire, frame: bytes) -> None:
        """Take a frame; on the thread."""
        peer = wire.peer_of(self)
        if self._wires.get(peer) is wire:
            self.give_event(lambda now: self._node.receive(peer, frame, now))

    def lose(self, wire: Wire) -> None:
        """Take the end of a connection; on the thread."""
        peer = wire.peer_of(self)
        if self._wires.get(peer) is wire:
            del self._wires[peer]
            self._watch.remove(peer)
            self.give_event(
                partial(self._node.disconnected, peer, has_ended=wire.has_ended_at_peer(self))
            )

    # Connections

    def delay(self, target: SimulatedSockets) -> float:
        """Return the seconds that a message to another rank takes."""
        return self._world.network.delay(self._place, target._place)

    def when_usable(self, target: SimulatedSockets, act: Callable[[], None]) -> None:
        """Call `act` now, or as soon as the link to another rank works."""
        self._world.network.when_usable(self._place, target._place, act)

    def _connect(self) -> None:
        """Start to connect to the parent, whose thread answers."""
        parent = self._parent
        assert parent is not None, "rank 0 has no parent"
        dial = self._dial = object()

        def arrive() -> None:
            if parent._process.dead or parent._closed:
                self.add(partial(self._fail, dial))
                return
            parent.add(partial(parent._accept, self, dial))

        self.kernel.after(self.delay(parent), partial(self.when_usable, parent, arrive))

    def _fail(self, dial: object) -> None:
        if self._dial is dial and self._parent is not None:
            self._dial, self.last_error = None, "connection refused"
            peer = self._parent.rank
            self.give_event(lambda now: self._node.disconnected(peer, now))

    def _accept(self, child: SimulatedSockets, dial: object) -> None:
        if child._process.dead or child._dial is not dial:
            return
        wire = Wire(child, self)
        wire.answer(partial(child._take, wire, dial))
        self._join(wire)

    def _take(self, wire: Wire, dial: object) -> None:
        if wire.is_reset:
            self._fail(dial)
        elif self._dial is dial:
            self._dial = None
            self._join(wire)
        else:
            wire.end(self)

    def _join(self, wire: Wire) -> None:
        peer = wire.peer_of(self)
        if (former := self._wires.pop(peer, None)) is not None:
            former.end(self)
        self._wires[peer] = wire
        if peer > self.rank:  # a child, because its number is higher
            self._watch.add(peer, standins.TIME.monotonic())
        self._changed.notify_all()
        self.give_event(lambda now: self._node.connected(peer, now))

    def _end_wires(self) -> None:
        for wire in self._wires.values():
            wire.end(self)
        self._wires.clear()

    def _reset_wires(self) -> None:
        if not self._process.dead:
            for wire in self._wires.values():
                wire.reset()
