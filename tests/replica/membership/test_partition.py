# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Groups that cannot reach each other: some go on, the others wait outside.

The lighthouse is real.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest

from tests.replica.conftest import FakeProbe
from titan_ft.membership import partition
from titan_ft.membership.membership import Membership
from titan_ft.protocol.errors import Leaving
from titan_ft.protocol.member import Quorum
from titan_ft.transfer.reach import Peer

DEADLINE = 20.0  # seconds; only a bug reaches it


class Network:
    """The links between the ranks of groups. A dead link breaks each exchange between its ends."""

    def __init__(self, seats: Any) -> None:
        self._seats = seats
        # (slot, slot of the other, group rank); one direction each.
        self._dead: set[tuple[int, int, int]] = set()
        self.slow = threading.Event()  # the next exchange takes long, and works
        self.silent = False  # an exchange over a dead link waits until it is broken off
        self.groups: list[NoProcessGroup] = []
        self._lock = threading.Lock()
        # number of exchanges of a seat in a quorum
        self._made: Counter[tuple[Membership, str]] = Counter()
        self._worked: dict[tuple[str, int, int], bool] = {}

    def cut(self, one: int, other: int, rank: int = 0) -> None:
        """Drop all packets between rank `rank` of two groups, in both directions."""
        self._dead |= {(one, other, rank), (other, one, rank)}

    def mend(self) -> None:
        """Let all packets through again."""
        self._dead.clear()

    def works(self, slots: Sequence[int], rank: int) -> bool:
        """True if the ranks `rank` of these groups can exchange."""
        return not any(
            one in slots and other in slots and rank == where for one, other, where in self._dead
        )

    def exchange(self, seat: Membership, quorum: Quorum, rank: int) -> bool:
        """Make an exchange with the quorum's members.

        Returns:
            True if it worked. All members get the same result.
        """
        with self._lock:
            self._made[seat, quorum.key] += 1
            exchange = quorum.key, rank, self._made[seat, quorum.key]
            worked = self._worked.setdefault(exchange, self.works(quorum.slots, rank))
        if self.slow.is_set():
            with seat.watch_exchange():
                assert not seat.process_group.aborted.wait(1.0), "a slow exchange was broken off"
            self.slow.clear()
        if worked:
            return True
        if self.silent:
            with seat.watch_exchange():
                assert seat.process_group.aborted.wait(DEADLINE), "an exchange hangs"
        return False

    def probe(self, slot: int, rank: int) -> FakeProbe:
        """Return the result of a rank's probe of its peers."""

        def is_lost(peer: Peer) -> bool:
            slots = {
                f"127.0.0.1:{store.port}": number for number, store in self._seats.stores.items()
            }
            return (slot, slots[peer.store], rank) in self._dead

        return FakeProbe(is_lost)


class NoProcessGroup:
    """Stands in for a process group. `Network.exchange` decides the results of its exchanges."""

    def __init__(self, network: Network) -> None:
        self._groups = network.groups
        self._groups.append(self)
        self.aborted = threading.Event()

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def configure(self, *_: object) -> None:
        self.aborted.clear()

    def abort(self, errored: bool = True) -> None:
        """Break off. The other members see closed connections."""
        for group in self._groups if errored else ():
            group.aborted.set()


class Group:
    """A group that trains, with one thread for each rank.

    A step is its number, and a heal takes no time.

    Attributes:
        commits: (step, slots of the members) of each committed step.
        sigterm: the ranks with a leave request.
        left: the ranks that have left in order.
    """

    def __init__(
        self,
        seats: Any,
        network: Network,
        slot: int,
        world_size: int = 1,
        step: int = 0,
        **config: Any,
    ) -> None:
        self._network = network
        self.slot, self.step = slot, step
        self.commits: list[tuple[int, list[int]]] = []
        self.broken = 0
        self.sigterm: set[int] = set()
        self.left: set[int] = set()
        self._told = threading.Condition()
        self._stop = False
        self.ranks: list[Membership] = seats.take_group(
            slot,
            world_size,
            lambda rank: {
                "process_group": NoProcessGroup(network),
                "probe": network.probe(slot, rank),
                "leave_requested": lambda: rank in self.sigterm,
            },
            config=seats.config(slot, group_size=3, **config),
        )
        self.threads = [
            threading.Thread(target=self._train, args=(rank,), daemon=True)
            for rank in range(world_size)
        ]
        for thread in self.threads:
            thread.start()

    def _train(self, rank: int) -> None:
        try:
            self._make_steps(rank)
        except Leaving:
            self.ranks[rank].close()
            self.left.add(rank)
        except Exception:
            if not self._stop:
                raise

    def _make_steps(self, rank: int) -> None:
        seat, step = self.ranks[rank], self.step
        while not self._stop:
            seat.request_quorum(step)
            quorum = seat.await_quorum()
            if seat.vote(step, quorum.error is None and self._network.exchange(seat, quorum, rank)):
                step = max(step, quorum.max_step) + 1
            if rank == 0:
                self._note(step, quorum, seat)
            time.sleep(0.005)

    def _note(self, step: int, quorum: Quorum, seat: Membership) -> None:
        with self._told:
            if seat._failures:
                self.broken += 1
            else:
                self.commits.append((step, quorum.slots))
            self._told.notify_all()

    def wait_for(self, slots: list[int], steps: int = 3) -> None:
        """Wait until the group has committed this many further steps with exactly these groups."""
        with self._told:
            begun = len(self.commits)
            met = self._told.wait_for(
                lambda: [made for _, made in self.commits[begun:]].count(slots) >= steps, DEADLINE
            )
            assert met, (
                f"group {self.slot} committed with {[made for _, made in self.commits[begun:]][-5:]}"
            )

    def named(self, event: str) -> list[dict[str, Any]]:
        return [told for rank in self.ranks for told in rank._events.named(event)]

    def wait_for_event(self, event: str, count: int = 1) -> None:
        self.ranks[0]._events.wait_for(event, count)

    def die(self) -> None:
        """End like a killed process: without further heartbeats."""
        self._stop = True
        for seat in self.ranks:
            seat.close()


@pytest.fixture
def network(
    seats: Any, start_lighthouse: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Network:
    # The lighthouse waits for a group that is still looking at its links, as with the default.
    seats.lighthouse = start_lighthouse(join_timeout_ms=10_000)
    monkeypatch.setattr(partition, "_PROBE_PAUSE_SECONDS", 0.05)
    return Network(seats)


@pytest.fixture
def start(seats: Any, network: Network) -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def start_group(slot: int, **options: Any) -> Group:
        groups.append(Group(seats, network, slot, **options))
        return groups[-1]

    yield start_group
    for group in groups:
        group.die()


def test_the_largest_clique_goes_on_and_the_others_come_back(
    network: Network, start: Callable[..., Group]
) -> None:
    """Groups 0 and 2 lose each other.

    Groups 0 and 1 go on; group 2 waits outside until the link works.
    """
    groups = [start(slot) for slot in range(3)]
    for group in groups:
        group.wait_for([0, 1, 2])
    network.cut(0, 2)
    for group in groups[:2]:
        group.wait_for([0, 1], steps=20)
    groups[2].wait_for_event("outside")
    assert [group.named("link_dead") for group in groups] == [
        [{"event": "link_dead", "slots": [2]}],
        [],
        [{"event": "link_dead", "slots": [0]}],
    ]
    assert groups[2].named("outside") == [{"event": "outside", "members": [0, 1], "unreached": [0]}]
    assert groups[2].named("link_back") == []
    assert [made for _, made in groups[2].commits if made != [0, 1, 2]] == []
    assert all(group.broken <= 3 for group in groups)
    network.mend()
    for group in groups:
        group.wait_for([0, 1, 2], steps=10)
    assert groups[2].named("link_back") == [{"event": "link_back", "slots": [0]}]
    assert [group.named("outside") for group in groups[:2]] == [[], []]


def test_an_exchange_over_a_silent_link_is_broken_off(
    network: Network, start: Callable[..., Group]
) -> None:
    """No connection is closed. Both ends probe their links, and report after one failed vote.

    Only the ranks 1 have lost each other. Both ranks of each group still act together.
    """
    groups = [start(slot, world_size=2) for slot in range(3)]
    for group in groups:
        group.wait_for([0, 1, 2])
    network.silent = True
    network.cut(0, 2, rank=1)
    for group in groups[:2]:
        group.wait_for([0, 1], steps=20)
        # the other end may be quicker: then this end reports after the next vote
        assert group.broken <= 2
    groups[2].wait_for_event("outside")
    network.mend()
    for group in groups:
        group.wait_for([0, 1, 2], steps=10)
    assert len(groups[2].named("outside")) == len(groups[2].named("link_back")) == 1
    assert [rank.member for rank in groups[2].ranks] == [groups[2].ranks[0].member] * 2


def test_a_link_that_one_rank_has_lost_is_known_to_its_group_after_the_vote(seats: Any) -> None:
    """All ranks probe their links after that vote, and not only after the next failed one."""
    ranks = seats.take_group(0)
    seats.meet(*ranks)
    ranks[1]._partition._dead_links = partition._DeadLinks(ranks[1]._rendezvous.prefix, [])
    seats.together(lambda: ranks[0].vote(0, True), lambda: ranks[1].vote(0, False))
    assert [rank._partition.must_report(1) for rank in ranks] == [True, True]


def test_a_rank_that_looks_late_does_not_hear_of_the_next_vote(seats: Any) -> None:
    """A sibling may report a dead link before its next vote.

    A late rank must not take the report for one of this vote.
    """
    ranks = seats.take_group(0)
    seats.meet(*ranks)
    seats.together(lambda: ranks[0].vote(0, True), lambda: ranks[1].vote(0, False))
    ranks[1]._partition._dead_links = partition._DeadLinks(ranks[1]._rendezvous.prefix, [])
    ranks[1]._partition.before_vote(ok=False)
    ranks[1]._control.propose("said", "it")  # all earlier notes are known as well
    assert not ranks[0]._partition.must_report(1)


def test_a_link_that_flickers(
    network: Network, start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link passes each probe and fails each exchange.

    Its group comes back less and less often.
    """
    groups = [start(slot) for slot in range(3)]
    for group in groups:
        group.wait_for([0, 1, 2])
    network.cut(0, 2)
    groups[2].wait_for_event("outside")
    looks = []
    for times in (2, 3):
        groups[2].wait_for_event("outside", times - 1)
        looks.append(groups[2].ranks[0]._partition._required_good_probes)
        network.mend()
        groups[2].wait_for_event("link_back", times - 1)
        network.cut(0, 2)
        groups[2].wait_for_event("outside", times)
    assert looks == [2, 4]
    groups[0].wait_for([0, 1])


def test_a_process_that_ended_is_no_dead_link(
    network: Network, start: Callable[..., Group]
) -> None:
    """The process is unreachable and sends no heartbeats, so it is gone. No dead link is
    reported.
    """
    groups = [start(slot) for slot in range(3)]
    for group in groups:
        group.wait_for([0, 1, 2])
    network.cut(0, 2)
    network.cut(1, 2)
    groups[2].die()
    for group in groups[:2]:
        group.wait_for([0, 1], steps=10)
        assert group.named("link_dead") == []


def test_a_slow_exchange_is_not_broken_off(network: Network, start: Callable[..., Group]) -> None:
    """Peers that answer probes may take as long as they need."""
    groups = [start(slot, heartbeat_timeout_ms=200) for slot in range(2)]
    asked = 0
    ask = network.probe(0, 0)

    def count(peers: Sequence[Peer]) -> dict[str, str]:
        nonlocal asked
        asked += 1
        return ask(peers)

    groups[0].ranks[0]._partition._probe = count
    for group in groups:
        group.wait_for([0, 1])
    network.slow.set()
    for group in groups:
        group.wait_for([0, 1])
    assert asked > 0, "no rank looked, so this test shows nothing"
    assert [group.broken for group in groups] == [0, 0]


def test_the_lighthouse_goes_while_a_group_is_outside(
    network: Network,
    seats: Any,
    mortal_lighthouse: Any,
    start: Callable[..., Group],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The group waits for the lighthouse as well, and comes back when both are there again."""
    seats.lighthouse = mortal_lighthouse.address
    monkeypatch.setattr("titan_ft.membership.seat.CONNECT_SECONDS", 0.2)
    stays, leaves = (start(slot) for slot in range(2))
    stays.wait_for([0, 1])
    network.cut(0, 1)
    leaves.wait_for_event("outside")
    mortal_lighthouse.kill()
    network.mend()
    for _ in range(3):  # looks that find the link good, without a lighthouse for the report
        wait_for_a_look(leaves)
    mortal_lighthouse.start()
    for group in (stays, leaves):
        group.wait_for([0, 1])
    assert len(leaves.named("link_back")) == 1


def wait_for_a_look(group: Group) -> None:
    """Wait until a group outside has made one more agreement about its links."""
    seat, deadline = group.ranks[0], time.monotonic() + DEADLINE
    looks = seat._control.num_agreements
    while seat._control.num_agreements == looks:
        assert time.monotonic() < deadline, "the group looks no more"
        time.sleep(0.005)


def test_a_group_that_ends_outside(network: Network, start: Callable[..., Group]) -> None:
    """The group ends at once, and writes nothing afterwards."""
    stays, leaves = start(0), start(1)
    stays.wait_for([0, 1])
    network.cut(0, 1)
    leaves.wait_for_event("outside")
    began = time.monotonic()
    leaves.die()
    for thread in leaves.threads:
        thread.join(DEADLINE)
    assert time.monotonic() - began < 5.0
    network.mend()
    stays.wait_for([0], steps=20)


def test_a_group_that_is_told_to_leave_outside(
    network: Network, start: Callable[..., Group]
) -> None:
    """The others need nothing of this group. Both ranks leave at once, although one got the
    signal.
    """
    stays, leaves = start(0, world_size=2), start(1, world_size=2)
    stays.wait_for([0, 1])
    network.cut(0, 1)
    leaves.wait_for_event("outside")
    leaves.sigterm.add(1)
    for thread in leaves.threads:
        thread.join(DEADLINE)
    assert leaves.left == {0, 1}
    assert leaves.named("link_back") == []
    network.mend()
    stays.wait_for([0], steps=20)


@pytest.mark.parametrize("told", [0, 1])
def test_leaving_outside_waits_for_no_look(
    network: Network, start: Callable[..., Group], told: int
) -> None:
    """A probe of dead links may take longer than drain_timeout_seconds. No rank waits for its
    end.
    """
    stays, leaves = start(0, world_size=2), start(1, world_size=2)
    stays.wait_for([0, 1])
    network.cut(0, 1)
    leaves.wait_for_event("outside")
    looks, over = threading.Semaphore(0), threading.Event()

    def never_answered(peers: Sequence[Peer]) -> dict[str, str]:
        looks.release()
        over.wait(DEADLINE)
        return {}

    for seat in leaves.ranks:
        seat._partition._probe = never_answered
    for _ in leaves.ranks:
        assert looks.acquire(timeout=DEADLINE)
    leaves.sigterm.add(told)
    for thread in leaves.threads:
        thread.join(DEADLINE / 2)
    assert leaves.left == {0, 1}
    over.set()


def test_a_group_that_is_told_to_leave_with_the_others(
    network: Network, start: Callable[..., Group]
) -> None:
    """A member leaves after a step. The quorum does not end it earlier."""
    groups = [start(0), start(1)]
    groups[1].sigterm.add(0)
    for group in groups:
        group.wait_for([0, 1])
    assert groups[1].left == set()
