# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The rules that every schedule must keep.

The events of the ranks and the network, and the nodes' actions, show whether a rule is kept. This
module never looks into a node.
"""

from __future__ import annotations

import math
from collections import defaultdict

from tests.replica.protocol.control.schedule import Freeze, Kill, Schedule, Slow, find_neighbours
from titan_ft.protocol.control.link import ACKNOWLEDGE_EVERY, RETRY_SECONDS
from titan_ft.protocol.control.tree import find_depth

GRACE_SECONDS = 1.0
"""As the promise has it, not as the code has it."""

START_SECONDS = 10.0
"""The same before the first connection."""

MIN_RETRY_SECONDS = 0.03

_LATE_SECONDS = 0.02  # additional time for the hosts' ticks and acts


class Rules:
    """Judges one schedule while it runs."""

    def __init__(self, schedule: Schedule) -> None:
        self.problems: list[str] = []
        self.answers = self.heard = self.losses = 0
        self._schedule = schedule
        ranks = range(schedule.num_ranks)
        tree = schedule.num_ranks, schedule.fan_out
        self._neighbours = [find_neighbours(rank, *tree) for rank in ranks]
        # Words, by agreement and rank.
        self._joined: dict[int, dict[int, set[str]]] = defaultdict(dict)
        self._decided: dict[int, str] = {}
        self._answered = [0 for _ in ranks]
        self._said: dict[str, set[str]] = defaultdict(set)  # texts, by topic
        # For each agreement, topics that its sender said before it joined.
        self._before: dict[int, set[str]] = defaultdict(set)
        # For each note that needs all ranks, the ranks that have said it.
        self._shared: dict[str, set[int]] = defaultdict(set)
        self._said_by: list[set[str]] = [set() for _ in ranks]
        self._heard: list[dict[str, str]] = [{} for _ in ranks]
        self._lost: list[set[int]] = [set() for _ in ranks]
        self._killed: set[int] = set()
        self._left: set[int] = set()
        self._leaves: dict[int, float] = {}  # time of the end, by rank
        self._connected: set[tuple[int, int]] = set()  # rank and peer
        self._ended: set[int] = set()
        self._silent: set[tuple[int, int]] = set()  # a rank, and its neighbour without a heartbeat
        self._unexcused: set[tuple[int, int]] = set()  # those of them that were not leaving
        self._impaired: dict[int, list[tuple[float, float]]] = defaultdict(list)  # by child
        self._last_loss = 0.0
        self._dialed: dict[int, float] = {}  # time of the last attempt, by rank
        # A link without a fault works after this time: a dial, its proof, and the first frame.
        self._repair_seconds = RETRY_SECONDS + 5 * schedule.delay + 3 * _LATE_SECONDS
        self._calm = 0.0  # time of the last fault's end

    def report(self, text: str) -> None:
        """Report a broken rule."""
        self.problems.append(text)

    # Acts of the ranks, and faults

    def on_join(self, rank: int, number: int, words: set[str]) -> None:
        """A rank joins an agreement."""
        self._joined[number][rank] = words
        self._before[number] |= self._said_by[rank]

    def on_decide(self, number: int, answer: str) -> None:
        """Rank 0 has decided."""
        self._decided[number] = answer

    def on_announce(self, number: int, answer: str) -> None:
        """Rank 0 decides an agreement that needs no words."""
        self._decided[number] = answer
        self._before[number] |= self._said_by[0]

    def on_say(self, rank: int, topic: str, text: str) -> None:
        """A rank says something."""
        self._said[topic].add(text)
        self._said_by[rank].add(topic)

    def on_share(self, rank: int, topic: str) -> None:
        """A rank says a note that needs all ranks."""
        self._said[topic].add("")
        self._shared[topic].add(rank)

    def on_leave(self, now: float, rank: int) -> None:
        """A rank announces its end."""
        self._leaves[rank] = now

    def on_end(self, now: float, rank: int) -> None:
        """A process ends in order, or because its neighbours take too long to leave."""
        waits = any(self._may_wait(now, rank, peer) for peer in self._neighbours[rank])
        if rank not in self._left and not waits:
            self.report(f"rank {rank} cannot leave")
        self._ended.add(rank)

    def on_kill(self, now: float, rank: int, late: float) -> None:
        """A process dies."""
        self._killed.add(rank)
        self.on_fault(now + late)

    def on_impaired(self, child: int, begin: float, end: float) -> None:
        """The link of a rank to its parent cannot work for some time."""
        self._impaired[child].append((begin, end))

    def on_fault(self, end: float) -> None:
        """A fault lasts until this time.

        By then both ends of the link can see its end.
        """
        self._calm = max(self._calm, end)

    def on_frozen(self, rank: int, begin: float, end: float) -> None:
        """A rank does nothing for some time."""
        for child in self._neighbours[rank]:
            self.on_impaired(max(child, rank), begin, end)
        self.on_fault(end)

    def on_silent(self, rank: int, peer: int) -> None:
        """A rank finds that a neighbour has no heartbeat."""
        self._silent.add((rank, peer))
        if rank not in self._leaves and peer not in self._leaves:
            self._unexcused.add((rank, peer))

    def on_dial(self, now: float, rank: int) -> None:
        """A rank tries to connect. It must not do so too often."""
        if now - self._dialed.get(rank, -math.inf) < MIN_RETRY_SECONDS:
            self.report(f"rank {rank} dials again after {now - self._dialed[rank]:.3f} s")
        self._dialed[rank] = now

    def on_failure(self, child: int, parent: int, end: float) -> None:
        """An attempt to connect to a dead parent fails. The grace runs from the first failure."""
        if (child, parent) not in self._connected:
            self._connected.add((child, parent))
            self.on_fault(end + START_SECONDS)

    def on_connected(self, now: float, rank: int, peer: int) -> None:
        """An end of a connection can send.

        At the first one, a rank gets the earlier notes.
        """
        if (rank, peer) not in self._connected:
            self._connected.add((rank, peer))
            self.on_fault(now)

    # Actions of the nodes

    def on_union(self, rank: int, number: int, words: frozenset[str]) -> None:
        """Rank 0 must decide. It must have exactly the words of all ranks."""
        joined = self._joined[number]
        if rank != 0 or len(joined) != self._schedule.num_ranks:
            self.report(f"rank {rank} decides on agreement {number} of {len(joined)} ranks")
        if words != set().union(*joined.values()):
            self.report(f"agreement {number} has the words {sorted(words)}: not the ranks' words")

    def on_answer(self, rank: int, number: int, text: str) -> None:
        """A rank has an answer: once each, in the order of agreements, as rank 0 has decided."""
        self.answers += 1
        has_part = self._schedule.is_announced(number) or rank in self._joined[number]
        if number != self._answered[rank] + 1 or not has_part:
            self.report(f"rank {rank} has answer {number} after answer {self._answered[rank]}")
        self._answered[rank] = number
        if text != self._decided.get(number):
            self.report(f"rank {rank} has another answer of agreement {number} than rank 0")
        missing = self._before[number] - self._heard[rank].keys()
        if missing:
            self.report(f"rank {rank} has answer {number} before it has heard topic {min(missing)}")

    def on_hear(self, rank: int, topic: str, text: str) -> None:
        """A rank hears a note: once, in the text that all ranks hear."""
        self.heard += 1
        if topic in self._heard[rank]:
            self.report(f"rank {rank} hears topic {topic} again")
        if text not in self._said[topic]:
            self.report(f"rank {rank} hears of topic {topic} what nobody said")
        self._heard[rank][topic] = text
        if topic in self._shared and len(self._shared[topic]) < self._schedule.num_ranks:
            self.report(f"rank {rank} hears topic {topic}, and not all ranks have said it")
        if self._heard[0].get(topic) != text:
            self.report(f"rank {rank} hears another text of topic {topic} than rank 0 took")

    def on_left(self, now: float, rank: int) -> None:
        """A node reports that its rank may end.

        The rank ends at once, even if a neighbour did not wait for it.
        """
        waited = set(self._neighbours[rank]) - self._leaves.keys() - self._lost[rank]
        if rank not in self._leaves or waited:
            self.report(f"rank {rank} may end, while ranks {sorted(waited)} have not left")
        is_calm = all(isinstance(fault, Freeze) for fault in self._schedule.faults)
        neighbours = self._neighbours[rank]
        if (
            is_calm
            and neighbours
            and all(self._could_leave(now, rank, peer) for peer in neighbours)
        ):
            self.report(f"rank {rank} may end, and could have ended before")
        self._left.add(rank)

    def on_lose(self, now: float, rank: int, lost: int, host: str, is_silent: bool) -> None:
        """A rank loses another one: once, and for a reason."""
        self.losses += 1
        self._last_loss = now
        if lost in self._lost[rank] or lost == rank:
            self.report(f"rank {rank} loses rank {lost} again, or itself")
        self._lost[rank].add(lost)
        if host not in (f"host {lost}", ""):
            self.report(f"rank {rank} loses rank {lost} on {host}")
        reporters = [peer for peer in self._neighbours[lost] if lost in self._lost[peer]]
        if not any(is_silent == ((peer, lost) in self._silent) for peer in reporters):
            self.report(
                f"rank {rank} loses rank {lost}, and no neighbour of it did so for that reason"
            )
        is_neighbour = lost in self._neighbours[rank]
        if is_neighbour and not self._may_lose(now, rank, lost):
            self.report(f"rank {rank} loses rank {lost}, which is alive and had its chance")

    def _may_lose(self, now: float, rank: int, lost: int) -> bool:
        """Return True if the neighbour is dead, has given this rank up, or has no working link."""
        if lost in self._killed or rank in self._lost[lost] or (rank, lost) in self._silent:
            return True
        if lost in self._ended and lost not in self._left:
            return True
        return not self._could_work(max(rank, lost), now - GRACE_SECONDS, now)

    def _may_wait(self, now: float, rank: int, peer: int) -> bool:
        """Return True if a rank that leaves may still wait for this neighbour."""
        if peer in self._lost[rank]:
            return False
        if peer in self._killed | self._ended:
            return True
        both_left = max(self._leaves[rank], self._leaves.get(peer, math.inf))
        return not self._could_work(max(rank, peer), both_left, now)

    def _could_leave(self, now: float, rank: int, peer: int) -> bool:
        """Return True if a leaving rank has not needed this neighbour for some time."""
        both_left = max(self._leaves[rank], self._leaves.get(peer, math.inf))
        return peer not in self._lost[rank] and self._could_work(max(rank, peer), both_left, now)

    def _could_work(self, child: int, begin: float, end: float) -> bool:
        """Return True if a link had enough time without a fault between two times."""
        at = begin
        for fault_begin, fault_end in [*sorted(self._impaired[child]), (end, math.inf)]:
            if min(fault_begin, end) - at >= self._repair_seconds:
                return True
            at = max(at, fault_end)
        return False

    # The end: no event is left

    def finish(self, kept: list[int | None]) -> None:
        """Judge missing events.

        Args:
            kept: number of messages that each node keeps; None = the rank is gone.
        """
        for rank, number in enumerate(kept):
            neighbours = self._neighbours[rank]
            met = all((rank, peer) in self._connected for peer in neighbours)
            if met and number is not None and number > ACKNOWLEDGE_EVERY * len(neighbours):
                self.report(f"rank {rank} keeps {number} messages for ever")
        for rank, peer in self._unexcused:
            if peer not in self._lost[rank]:
                self.report(f"rank {rank} does not lose rank {peer}, which has no heartbeat")
        if self.losses:
            self._finish_losses()
        else:
            self._finish_whole()

    def _finish_whole(self) -> None:
        """No rank was lost: each rank has all answers and notes, and has left."""
        for rank in range(self._schedule.num_ranks):
            if not self._killed:
                self._finish_rank(rank)
            elif rank not in self._killed | self._ended:
                self._check_dead_neighbours(rank)

    def _check_dead_neighbours(self, rank: int) -> None:
        """A dead neighbour is lost, unless it is a child that has never connected.

        The agent that starts the ranks sees to such a child.
        """
        for peer in self._neighbours[rank]:
            knew_it = (rank, peer) in self._connected or peer < rank
            is_known = peer in self._lost[rank] or peer in self._leaves
            if peer in self._killed and knew_it and not is_known:
                self.report(f"rank {rank} never loses rank {peer}, which is dead")

    def _finish_rank(self, rank: int) -> None:
        if self._answered[rank] != self._schedule.agreements:
            self.report(f"rank {rank} waits for answer {self._answered[rank] + 1} for ever")
        incomplete = {
            topic for topic, ranks in self._shared.items() if len(ranks) < self._schedule.num_ranks
        }
        unheard = self._said.keys() - self._heard[rank].keys() - incomplete
        if unheard and not self._ended:
            self.report(f"rank {rank} never hears topic {min(unheard)}")

    def _finish_losses(self) -> None:
        """Survivors that are still connected know the same losses, and know them in time."""
        gone = self._killed | self._ended
        for rank in set(range(self._schedule.num_ranks)) - gone:
            self._check_dead_neighbours(rank)
            for peer in self._neighbours[rank]:
                if peer in gone:
                    continue
                if peer in self._lost[rank] or rank in self._lost[peer]:
                    self._check_both_ends(rank, peer)
                    continue
                unknown = self._lost[peer] - self._lost[rank]
                if unknown:
                    self.report(f"rank {rank} is never told of the loss of rank {min(unknown)}")
        self._check_times()

    def _check_both_ends(self, rank: int, peer: int) -> None:
        """A neighbour that is given up gives up as well, unless the two ends never met."""
        met = (rank, peer) in self._connected
        if met and peer not in self._lost[rank] and peer not in self._leaves:
            self.report(f"rank {rank} goes on with rank {peer}, which has given it up")

    def _check_times(self) -> None:
        """A neighbour is lost within the grace; at once if its process is seen to have ended.

        An end whose neighbour closes each connection may begin to count when the other end gives
        up: after two graces.
        """
        graces = 2
        if all(isinstance(fault, Kill) for fault in self._schedule.faults):
            graces = 0 if self._schedule.one_host else 1
        delays = [fault.delay for fault in self._schedule.faults if isinstance(fault, Slow)]
        hops = 2 * find_depth(self._schedule.num_ranks, self._schedule.fan_out)
        travels = hops * max([self._schedule.delay, *delays]) + self._repair_seconds
        late = self._last_loss - self._calm - graces * GRACE_SECONDS - travels
        if late > 0:
            self.report(f"a loss is reported {late:.1f} s too late")
