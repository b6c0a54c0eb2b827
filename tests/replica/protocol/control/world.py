# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group of real nodes over an adversarial network, in virtual time.

Frames of one connection keep their order. All other events may happen in any order, and each host
has a clock of its own.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

from tests.replica.protocol.control.rules import Rules
from tests.replica.protocol.control.schedule import (
    Block,
    Cut,
    Freeze,
    Garbage,
    Kill,
    Schedule,
    Slow,
)
from titan_ft.protocol.control import node as nodes
from titan_ft.protocol.control.node import Action, Node
from titan_ft.protocol.control.tree import find_parent

LEAVE_SECONDS = 2.0
"""A rank that has announced its end waits at most so long for its neighbours."""

DIAL_SECONDS = 1.0
"""An attempt to connect to a host that does not answer fails after this time."""

SEE_SECONDS = 0.02
"""A rank may see the end of a process on its host so much later than the end of its connection."""

_ROUNDING_SECONDS = 1e-6  # from a host's clock to the world's

SILENT_SECONDS = 0.7
"""A rank that is frozen for this time has no heartbeat, if it is watched."""

MAX_LATE_SECONDS = 0.01
"""A host ticks and acts up to so much later than it should."""

MAX_EVENTS = 100_000
"""More events than any schedule needs. Beyond, the nodes send or dial without end."""


class Connection:
    """A connection of a rank to its parent, or an attempt to make one."""

    def __init__(self, child: int, parent: int) -> None:
        self.child, self.parent = child, parent
        self.broken = False
        self.flight: dict[int, deque[bytes]] = {child: deque(), parent: deque()}  # by receiver
        self.last = {child: 0.0, parent: 0.0}  # arrival of the latest frame, by receiver


class Host:
    """One rank: its node, its training thread, and its ends of connections."""

    def __init__(self, rank: int, schedule: Schedule, clock: float) -> None:
        self.rank, self.clock = rank, clock
        self.node = Node(rank, schedule.num_ranks, schedule.fan_out)
        self.alive = True
        self.vanished = False
        self.frozen_until = -1.0
        self.inbox: deque[Callable[[], None]] = deque()
        self.current: dict[int, Connection] = {}
        self.tick_at = math.inf
        self.stopped = False


class World:
    """Runs one schedule. `problems` has the broken rules.

    Args:
        traces: keep a line for each action.
    """

    def __init__(self, schedule: Schedule, traces: bool = False) -> None:
        self.schedule, self.traces = schedule, traces
        self.now = 0.0
        self.events = 0
        self._planned = 0
        self.trace: list[tuple[float, str]] = []
        self._dice = random.Random(schedule.seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        ranks = range(schedule.num_ranks)
        self._hosts = [Host(rank, schedule, self._dice.uniform(-50, 1000)) for rank in ranks]
        self._blocks: dict[int, Block] = {}
        self._slow: dict[int, Slow] = {}
        self._frames: Counter[int] = Counter()  # frames sent on a link, by its child
        self.rules = Rules(schedule)
        cuts = [fault for fault in schedule.faults if isinstance(fault, Cut) and fault.frame]
        bad = [fault for fault in schedule.faults if isinstance(fault, Garbage)]
        self._cuts = {(cut.child, cut.frame): cut for cut in cuts}
        self._garbage = {(fault.child, fault.frame): fault for fault in bad}

    @property
    def problems(self) -> list[str]:
        """The broken rules, in the order of time."""
        return self.rules.problems

    def run(self) -> World:
        """Run until no event is left, or until a rule is broken."""
        for fault in self.schedule.faults:
            self._plan_fault(fault)
        self._plan_starts()
        for note in self.schedule.notes:
            if not note.before:
                self._post(
                    note.at,
                    self._hosts[note.rank],
                    partial(self._say, note.rank, note.topic),
                )
        for ordinal in range(self.schedule.shared):
            for host in self._hosts:
                at = self._dice.uniform(0, 0.1 + self.schedule.agreements * self.schedule.pause)
                self._post(at, host, partial(self._share, host, f"shared {ordinal}"))
        while self._heap and not self.problems:
            self.now, _, act = heapq.heappop(self._heap)
            act()
            self.events += 1
            if self.events > MAX_EVENTS:
                self.rules.report("the nodes send or dial without end")
        if not self.problems:
            self.rules.finish([host.node.num_kept if host.alive else None for host in self._hosts])
        return self

    # Time

    def _at(self, time: float, act: Callable[[], None]) -> None:
        self._planned += 1
        heapq.heappush(self._heap, (max(time, self.now), self._planned, act))

    def _post(self, time: float, host: Host, act: Callable[[], None]) -> None:
        """Let a host act as soon as it is not frozen."""

        def do() -> None:
            if self.now < host.frozen_until or host.inbox:
                host.inbox.append(act)
            elif host.alive:
                act()

        self._at(time, do)

    def _late(self) -> float:
        return self.now + self._dice.choice((0.0, self._dice.uniform(0, MAX_LATE_SECONDS)))

    def _delay(self, child: int) -> float:
        slow = self._slow.get(child)
        if slow is not None and self.now < slow.at + slow.seconds:
            return slow.delay
        return self._dice.uniform(0, self.schedule.delay)

    # Ranks

    def _plan_starts(self) -> None:
        """A rank starts after its parent.

        First it reads the parent's address from the store.
        """
        starts: list[float] = []
        for host in self._hosts:
            parent = find_parent(host.rank, self.schedule.fan_out)
            earliest = 0.0 if parent is None else starts[parent]
            starts.append(earliest + self._dice.choice((0.0, self._dice.uniform(0, 0.1))))
            self._post(
                starts[-1],
                host,
                partial(self._start, host),
            )
            self._plan_join(host, 1, starts[-1])

    def _start(self, host: Host) -> None:
        self._act(host, host.node.start(self._clock(host)))

    def _clock(self, host: Host) -> float:
        return self.now + host.clock

    def _plan_join(self, host: Host, number: int, earliest: float) -> None:
        pause = self._dice.choice((0.0, self._dice.uniform(0, self.schedule.pause)))
        step = self._join if number <= self.schedule.agreements else self._leave
        self._post(earliest + pause, host, partial(step, host, number))

    def _join(self, host: Host, number: int) -> None:
        for note in self.schedule.notes:
            if note.before == number and note.rank == host.rank:
                self._say(host.rank, note.topic)
        if host.stopped:
            return
        if self.schedule.is_announced(number):
            if host.rank == 0:
                self._announce(number)
            return
        words = {f"{number}:{self._dice.randrange(5)}" for _ in range(self._dice.randrange(3))}
        self.rules.on_join(host.rank, number, words)
        self._act(host, host.node.join(number, words, self._clock(host)))

    def _say(self, rank: int, topic: str) -> None:
        host = self._hosts[rank]
        if not host.stopped:
            self.rules.on_say(rank, topic, str(rank))
            self._act(host, host.node.send_note(topic, str(rank), self._clock(host)))

    def _share(self, host: Host, topic: str) -> None:
        if not host.stopped:
            self.rules.on_share(host.rank, topic)
            self._act(host, host.node.send_note_with_all(topic, self._clock(host)))

    def _decide(self, number: int) -> None:
        host = self._hosts[0]
        self.rules.on_decide(number, f"answer {number}")
        self._act(host, host.node.decide(number, f"answer {number}", self._clock(host)))

    def _announce(self, number: int) -> None:
        host = self._hosts[0]
        self.rules.on_announce(number, f"announcement {number}")
        self._act(host, host.node.announce(number, f"announcement {number}", self._clock(host)))

    def _leave(self, host: Host, _: int) -> None:
        if not self.schedule.leaves or host.stopped:
            return
        self.rules.on_leave(self.now, host.rank)
        self._post(self.now + LEAVE_SECONDS, host, partial(self._end, host))
        self._act(host, host.node.leave(self._clock(host)))

    def _end(self, host: Host) -> None:
        """End a process in order. Its sent frames arrive."""
        if not host.alive:
            return
        self._act(host, host.node.end(self._clock(host)))
        self.rules.on_end(self.now, host.rank)
        host.alive = False
        # A frozen host may have accepted an attempt to connect that it has not looked at. The end
        # of its process resets that attempt.
        for peer in self._hosts:
            attempt = peer.current.get(host.rank)
            if attempt is None or attempt.broken:
                continue
            if host.current.get(peer.rank) is not attempt:
                self._refuse(attempt)
        for peer in list(host.current):
            self._close(host, peer, loses=False)

    # Actions

    def _act(self, host: Host, actions: list[Action]) -> None:
        for action in actions:
            if self.traces:
                self.trace.append((self.now, f"rank {host.rank}: {action}"))
            match action:
                case nodes.Connect(peer):
                    self._dial(host, peer)
                case nodes.Send(peer, frame):
                    self._send(host, peer, frame)
                case nodes.Close(peer):
                    self._close(host, peer, loses=True)
                case nodes.Decide(number, words):
                    self.rules.on_union(host.rank, number, words)
                    self._post(
                        self.now + self._dice.choice((0.0, 0.05)),
                        host,
                        partial(self._decide, number),
                    )
                case nodes.Answer(number, text):
                    self.rules.on_answer(host.rank, number, text)
                    self._plan_join(host, number + 1, self.now)
                case nodes.HeardNote(topic, text):
                    self.rules.on_hear(host.rank, topic, text)
                case nodes.LostRank(rank, _, name, silent_seconds):
                    host.stopped = True
                    self.rules.on_lose(self.now, host.rank, rank, name, silent_seconds > 0)
                case nodes.MayExit():
                    self.rules.on_left(self.now, host.rank)
                    self._post(self.now, host, partial(self._end, host))
        self._plan_tick(host)

    def _plan_tick(self, host: Host) -> None:
        due = host.node.next_tick - host.clock + _ROUNDING_SECONDS
        if due == host.tick_at or due == math.inf:
            return
        host.tick_at = due
        self._post(max(due, self._late()), host, partial(self._tick, host))

    def _tick(self, host: Host) -> None:
        host.tick_at = math.inf
        if self._clock(host) < host.node.next_tick:
            self._plan_tick(host)
            return
        self._act(host, host.node.tick(self._clock(host)))

    # The network

    def _dial(self, host: Host, parent: int) -> None:
        self.rules.on_dial(self.now, host.rank)
        if parent in host.current:
            self.rules.report(f"rank {host.rank} dials, and has a connection")
        connection = host.current[parent] = Connection(host.rank, parent)
        self._at(self.now + self._delay(host.rank), partial(self._knock, connection))

    def _knock(self, connection: Connection) -> None:
        """An attempt to connect reaches the parent's host."""
        child, parent = connection.child, self._hosts[connection.parent]
        block = self._blocks.get(child)
        if block is not None and self.now < block.at + block.seconds:
            if block.refuses:
                self._refuse(connection)
            else:
                self._at(block.at + block.seconds, partial(self._knock, connection))
        elif parent.alive:
            self._post(self.now, parent, partial(self._prove, connection))
        else:
            time = self.now + DIAL_SECONDS * parent.vanished
            self.rules.on_failure(child, parent.rank, time + self.schedule.delay)
            self._at(time, partial(self._refuse, connection))

    def _refuse(self, connection: Connection) -> None:
        """Let an attempt to connect fail."""
        connection.broken = True
        child, parent = connection.child, connection.parent
        self._plan_end(connection, child, parent, self.now + self._delay(child))

    def _prove(self, connection: Connection) -> None:
        """The two ends have proved the token. One of them knows it first."""
        child, parent = self._hosts[connection.child], self._hosts[connection.parent]
        first = self.now + self._delay(child.rank)
        second = first + self._delay(child.rank)
        ends = [child, parent]
        self._dice.shuffle(ends)
        for host, time in zip(ends, (first, second), strict=True):
            connection.last[host.rank] = time
            self._post(time, host, partial(self._connect, host, connection))

    def _connect(self, host: Host, connection: Connection) -> None:
        is_stale = connection.broken
        if is_stale and (host.rank == connection.child or self._dice.random() < 0.5):
            return
        peer = connection.child if host.rank == connection.parent else connection.parent
        former = host.current.get(peer)
        if former is not connection and former is not None:
            self._close(host, peer, loses=True)
        host.current[peer] = connection
        self.rules.on_connected(self.now, host.rank, peer)
        self._act(host, host.node.connected(peer, self._clock(host), f"host {peer}"))
        # The host ended before it knew of this connection.
        if not self._hosts[peer].alive and not connection.broken:
            self._break(connection, self._delay(connection.child), 0.0)
        if is_stale:  # the child has given up, and the parent sees that later
            end = self.now + self._dice.uniform(0, 0.4)
            self.rules.on_fault(end)
            self._plan_end(connection, host.rank, peer, end)

    def _send(self, host: Host, peer: int, frame: bytes) -> None:
        connection = host.current.get(peer)
        if connection is None:
            self.rules.report(f"rank {host.rank} sends to rank {peer} without a connection")
            return
        child = connection.child
        self._frames[child] += 1
        ordinal = (child, self._frames[child])
        garbage = self._garbage.get(ordinal)
        if garbage is not None:
            self._carry(connection, peer, garbage.make(frame))
        self._carry(connection, peer, frame)
        cut = self._cuts.get(ordinal)
        if cut is not None:
            self._break(connection, cut.child_late, cut.parent_late)

    def _carry(self, connection: Connection, peer: int, frame: bytes) -> None:
        if connection.broken:
            return
        time = max(connection.last[peer], self.now + self._delay(connection.child))
        connection.last[peer] = time
        connection.flight[peer].append(frame)
        self._post(time, self._hosts[peer], partial(self._arrive, connection, peer))

    def _arrive(self, connection: Connection, rank: int) -> None:
        flight, host = connection.flight[rank], self._hosts[rank]
        peer = connection.child if rank == connection.parent else connection.parent
        if not flight:
            return
        frame = flight.popleft()
        if host.current.get(peer) is connection:
            self._act(host, host.node.receive(peer, frame, self._clock(host)))

    def _break(self, connection: Connection, child_late: float, parent_late: float) -> None:
        """Break a connection. Of the frames under way, the first ones still arrive."""
        if connection.broken:
            return
        connection.broken = True
        self.rules.on_impaired(connection.child, self.now, self.now + child_late)
        self.rules.on_fault(self.now + max(child_late, parent_late))
        for rank, peer, late in (
            (connection.child, connection.parent, child_late),
            (connection.parent, connection.child, parent_late),
        ):
            self._lose_frames(connection, rank)
            self._plan_end(connection, rank, peer, self.now + late)

    def _lose_frames(self, connection: Connection, rank: int) -> None:
        flight = connection.flight[rank]
        keep = self._dice.randint(0, len(flight))
        while len(flight) > keep:
            flight.pop()

    def _plan_end(self, connection: Connection, rank: int, peer: int, time: float) -> None:
        host = self._hosts[rank]

        def end() -> None:
            if host.current.get(peer) is connection:
                del host.current[peer]
                sees_it = self._dice.random() < 0.5
                self._disconnect(host, peer, has_ended=sees_it and self._can_see_end(peer))
                if self._can_see_end(peer) and not sees_it:
                    see = partial(self._disconnect, host, peer, has_ended=True)
                    self._post(self.now + SEE_SECONDS, host, see)

        self._post(max(connection.last[rank], time), host, end)

    def _can_see_end(self, peer: int) -> bool:
        return self.schedule.one_host and not self._hosts[peer].alive

    def _disconnect(self, host: Host, peer: int, has_ended: bool) -> None:
        self._act(host, host.node.disconnected(peer, self._clock(host), has_ended))

    def _close(self, host: Host, peer: int, loses: bool) -> None:
        """A host closes its end.

        Args:
            loses: frames that are under way may be lost.
        """
        connection = host.current.pop(peer, None)
        if connection is None or connection.broken:
            return
        connection.broken = True
        connection.flight[host.rank].clear()
        if loses:
            self._lose_frames(connection, peer)
        time = self.now + self._delay(connection.child)
        self.rules.on_impaired(connection.child, self.now, max(time, connection.last[peer]))
        self._plan_end(connection, peer, host.rank, time)

    # Faults

    def _plan_fault(self, fault: object) -> None:
        match fault:
            case Kill():
                self._at(fault.at, partial(self._kill, fault))
            case Freeze():
                end = fault.at + fault.seconds + MAX_LATE_SECONDS
                self.rules.on_frozen(fault.rank, fault.at, end)
                self._at(fault.at, partial(self._freeze, fault))
            case Cut() if not fault.frame:
                cut = partial(self._cut, fault.child, fault.child_late, fault.parent_late)
                self._at(fault.at, cut)
            case Block():
                self.rules.on_impaired(fault.child, fault.at, fault.at + fault.seconds)
                self.rules.on_fault(fault.at + fault.seconds)
                self._at(fault.at, partial(self._block, fault))
            case Slow():
                end = fault.at + fault.seconds + 4 * fault.delay
                self.rules.on_impaired(fault.child, fault.at, end)
                self.rules.on_fault(end)
                self._at(fault.at, partial(self._slow.update, {fault.child: fault}))

    def _cut(self, child: int, child_late: float, parent_late: float) -> None:
        parent = find_parent(child, self.schedule.fan_out)
        assert parent is not None
        connections = [
            self._hosts[child].current.get(parent),
            self._hosts[parent].current.get(child),
        ]
        for connection in connections:
            if connection is not None:
                self._break(connection, child_late, parent_late)

    def _block(self, fault: Block) -> None:
        self._blocks[fault.child] = fault
        self._cut(fault.child, 0.0, 0.0)

    def _kill(self, fault: Kill) -> None:
        host = self._hosts[fault.rank]
        if not host.alive:
            return
        self.rules.on_kill(self.now, host.rank, fault.late)
        host.alive, host.vanished = False, fault.late > 0
        # The other ends may still use an earlier connection that is broken, or a newer one.
        connections = [
            *host.current.values(),
            *(peer.current.get(host.rank) for peer in self._hosts),
        ]
        for connection in connections:
            if connection is not None:
                self._break(connection, fault.late, fault.late)

    def _freeze(self, fault: Freeze) -> None:
        host = self._hosts[fault.rank]
        host.frozen_until = max(host.frozen_until, fault.at + fault.seconds)
        self._at(host.frozen_until, partial(self._thaw, host))
        if self.schedule.watched:
            self._at(self.now + SILENT_SECONDS, partial(self._find_silent, host))

    def _find_silent(self, host: Host) -> None:
        """Let the parent of a rank that is still frozen report it. A frozen parent sees nothing."""
        number = find_parent(host.rank, self.schedule.fan_out)
        if number is None or self.now >= host.frozen_until or not host.alive:
            return
        parent = self._hosts[number]
        if parent.alive and self.now >= parent.frozen_until and host.rank in parent.current:
            self.rules.on_silent(parent.rank, host.rank)
            silence = parent.node.report_silence(host.rank, SILENT_SECONDS, self._clock(parent))
            self._act(parent, silence)

    def _thaw(self, host: Host) -> None:
        """Let a host do its delayed acts, with its clock's tick first or last."""
        if self.now < host.frozen_until:
            return
        missed, host.inbox = host.inbox, deque()
        if self._dice.random() < 0.5:
            missed.appendleft(partial(self._tick, host))
        for act in missed:
            if host.alive:
                act()
