# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A heal, round by round. The fetched, queued and replayed state must equal the holders' state."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titan_ft.config import FaultTolerance
from titan_ft.engine import heal
from titan_ft.engine.catch_up import CatchUp, FetchStatus
from titan_ft.engine.heal import Heal
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.protocol.decision import SIGN_TIMEOUT_SECONDS
from titan_ft.protocol.errors import JobLostError, Leaving
from titan_ft.protocol.healing import NO_OFFER, Healing, Offer, Phase
from titan_ft.protocol.ledger import Entry, Ledger
from titan_ft.protocol.member import Member, Quorum
from titan_ft.protocol.position import Position
from titan_ft.protocol.round import Broken, Round, Update
from titan_ft.protocol.row import Row, Standing, fold48
from titan_ft.protocol.verdict import judge
from titan_ft.run.events import Event
from titan_ft.run.log import EventLog
from titan_ft.transfer.reach import Peer
from titan_ft.transfer.snapshot import Snapshot
from titan_ft.transfer.wire import TransferError

TOKENS = 100
MOST_ROUNDS = 200  # seconds; only a bug reaches it
GROUPS = 3  # 0 and 1 hold the state, 2 heals


def value_after(step: int, base: int = 1) -> int:
    """Return the holders' state after `step` updates.

    It shows the order of any two updates, and that each came once.
    """
    for number in range(1, step + 1):
        base = apply(base, gradient_of(number))
    return base


class Total:
    """Stands in for a copy of the sums: one number."""

    is_copy = True

    def __init__(self, value: int) -> None:
        self.value = value

    def copy(self) -> Total:
        raise AssertionError("these sums are kept already")

    def write(self, scale: float | None = None) -> None:
        raise AssertionError("the test applies them")


def gradient_of(step: int) -> int:
    """Return the sum of the gradients of an update."""
    return 1000 + step


def apply(value: int, gradient: int) -> int:
    """Apply an update to a state."""
    return (31 * value + gradient) % 1_000_003


class Search:
    """A search that finds the holders' offer at once."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.least_steps: list[int] = []
        self.first_after: int | None = None  # slot after which the first search begins
        self.pauses: list[float] = []  # in seconds

    def restart(self, after_seconds: float = 0.0) -> None:
        self.pauses.append(after_seconds)

    def end_pause(self) -> None:
        pass  # this search never pauses after a search without an offer

    def wait_for_answers(self, seconds: float) -> bool:
        return False  # no search takes any time

    def poll(self, least_step: int, after: int) -> Offer:
        self.least_steps.append(least_step)
        self.first_after = after if self.first_after is None else self.first_after
        offer = self.world.find_offer()
        return offer if offer.slots and offer.step >= least_step else NO_OFFER


class World:
    """The world around the heal of group 2.

    The holders make an update in each round. A fetch ends when the test releases it.

    Attributes:
        step: committed updates in the holders' state.
        offers: the holders offer this state.
        fetches: (donor's slot, step) of each fetch.
        donors: slots of all donors of each fetch.
        named_donors: the donor that the group's row names in each round; -1 = none.
        lose: the donors that a fetch loses while the others go on, by place, and the reason.
        fetched: decides the result of a fetch: the state, or an error.
        corrupt: donors whose state has other bytes than they show.
        applied: the replayed steps.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        monkeypatch.setattr(heal, "PAUSE_SECONDS", 0.0)
        monkeypatch.setattr(heal, "fetch", self._fetch)
        self.free: int | None = 2**50  # bytes of the host's memory
        monkeypatch.setattr(heal, "free_bytes", lambda: self.free)
        self.step, self.lineage = 5, 55
        self.lineages = {5: 55}  # by step
        self.holders: tuple[int, ...] = (0, 1)
        self.offers = True
        # The holders' exchange expects this group's former process. So a search may find an offer
        # before the quorum.
        self.is_expected = False
        self.has_met = False  # the group has a quorum
        self.offered: Offer | None = None  # replaces the offer of the holders' state
        self.milliseconds = 0  # duration of the holders' last step, as their offer has it
        self.step_lasts = False  # the step lasts longer than a look at the attempt
        self.idle = False  # the holders make no update
        self.broken: set[int] = set()  # numbers of rounds that break
        self.made = 0
        self.on_round: Callable[[int], None] = lambda number: None
        self.on_pause: Callable[[int], None] = lambda number: None
        self.fetches: list[tuple[int, int]] = []
        self.donors: list[list[int]] = []
        self.lose: dict[int, str] = {}
        # function of the latest fetch
        self.report_share: Callable[[float], None] = lambda share: None
        self.named_donors: list[int] = []
        self.fail: set[int] = set()  # numbers of fetches
        self.corrupt: set[int] = set()
        self.release = threading.Event()  # lets fetches end
        self.applied: list[int] = []
        # The states at the moments when the rounding errors were dropped.
        self.dropped: list[int] = []
        self.seconds = 0.0  # time of the group's clock
        self.step_seconds = 0.0  # duration of the holders' steps
        # Values of other ranks of the group in the next gather.
        self.others_see: list[int] = []
        self.retracted = 0
        # For each time when memory was taken: the number of rounds before, and whether the others
        # waited.
        self.rooms: list[tuple[int, bool]] = []
        # For each fetch, the groups of which the first quorum must include one.
        self.expected: list[tuple[int, ...]] = []
        # For each `mark_busy`, the number of rounds before.
        self.begun: list[int] = []
        self.events: list[Event] = []
        self.value = 0  # the joiner's state
        self.position = Position()
        self.ledger = Ledger(GROUPS)
        log = EventLog(None)
        log.emit = self.events.append  # type: ignore[method-assign]
        this: Any = self
        self.heal = Heal(
            FaultTolerance(enable=True, group_size=GROUPS, replica_id=2, **config),
            position=self.position,
            rounds=this,
            exchange=this,
            state=this,
            ledger=self.ledger,
            group=this,
            events=log,
            nominal_tokens=GROUPS * TOKENS,
            token="token",
            ranks_on_host=2,
            apply=self._apply,
        )

        self.semi = bool(config.get("semi_sync_method"))
        self.search = Search(self)
        self.heal._search = self.search  # type: ignore[assignment]  # has all that a heal calls

    def find_offer(self) -> Offer:
        """Return the holders' offer.

        With rounds of several steps they have compared its digest.
        """
        if not (self.has_met or self.is_expected or self.semi):
            return NO_OFFER
        if self.offered is not None:
            return self.offered
        digest = self._digest(value_after(self.step)) if self.semi else 0
        return Offer(
            self.holders if self.offers else (), self.step, self.lineage, digest, self.milliseconds
        )

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]

    # The rounds

    def launch_without_gradients(self) -> None:
        pass

    def get_quorum(self) -> Quorum:
        self.has_met = True
        members = tuple(
            Member(slot, 0.0, f"process {slot}", "c0ffee") for slot in (*self.holders, 2)
        )
        return Quorum("quorum 1", len(members) - 1, members, self.step)

    def request_quorum(self) -> None:
        pass

    leads = True  # rank 0 of the group leads
    last_round: Round | None = None  # the group has made no round yet
    quorum_ready = True  # the requested quorum is ready
    leave_requested = False
    pauses = 0
    is_waiting = False  # True inside `waiting`, which pauses the watchdog

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False

    def wait_for_quorum(self, seconds: float) -> None:
        self.pauses += 1
        self.on_pause(self.pauses)
        if self.release.is_set() and self.heal._attempt is not None:
            concurrent.futures.wait([self.heal._attempt._fetch], 20)

    def mark_busy(self) -> None:
        self.begun.append(self.made)

    def find_holders(self) -> dict[int, Peer]:
        return {}

    def remember_donors(self, slots: Sequence[int]) -> None:
        self.expected.append(tuple(slots))

    def find_addresses(self, slots: Sequence[int]) -> list[str]:
        return [str(slot) for slot in slots]

    def find_outsiders(self, made: Round) -> list[int]:
        return []

    def compute_digest(self) -> str:
        self.position.set_digest(self._digest(self.value))
        return ""

    def make(self) -> Round | Broken:
        self.made += 1
        assert self.made < MOST_ROUNDS, f"it never ends: {self.events[-5:]}"
        self.on_round(self.made)
        if self.release.is_set() and self.heal._attempt is not None:
            # Otherwise the rounds could be faster than the fetch's thread.
            concurrent.futures.wait([self.heal._attempt._fetch], 20)
        if self.made in self.broken:
            self.position.count_broken_round()
            return Broken("a peer is gone")
        members = tuple(
            Member(slot, 0.0, f"process {slot}", "c0ffee") for slot in (*self.holders, 2)
        )
        quorum = Quorum(f"quorum {self.made}", len(members) - 1, members, self.step)
        given = 0 if self.idle else TOKENS
        rows = [
            Row(
                slot,
                Standing.READY,
                self.step,
                seen_step=self.step,
                lineage=self.lineage,
                digest=self._digest(value_after(self.step)),
                valid_tokens=given,
                tokens=given,
                seconds=self.step_seconds,
                training=1,
            )
            for slot in self.holders
        ]
        position = self.position
        self.named_donors.append(position.donor)
        rows.append(
            Row(
                2,
                position.standing,
                position.claimed_step,
                seen_step=max(position.seen_step, position.claimed_step),
                donor=position.donor,
                from_step=position.from_step,
                others_wait=int(position.others_wait),
            )
        )
        entries = [] if self.idle else [Entry(slot, self.step, 1, b"") for slot in self.holders]
        made = Round(quorum, rows, judge(rows), entries, self)
        position.observe(made)
        self.last_round = made
        if self.holders and not self.idle and not made.verdict.awaited_joiners:
            self.step += 1
            self.lineage = self.lineages[self.step] = made.update(GROUPS * TOKENS).lineage
        return made

    # The exchange, the group, the state

    num_bytes = 2**20
    is_copy = False

    @property
    def waits_for_members(self) -> bool:
        phase = self.heal._healing.phase
        return (self.offers and phase is Phase.ASKING) or (
            self.step_lasts and phase is Phase.FETCHING
        )

    def keep_on_device(self) -> int:
        return 0

    @property
    def copy_memory(self) -> Any:
        return self

    def prepare(self) -> None:
        self.rooms.append((self.made, self.quorum_ready))

    def drop(self) -> None:
        pass

    def copy(self) -> Total:
        return Total(gradient_of(self.step))

    def write(self, scale: float | None = None) -> None:
        raise AssertionError("these sums are kept")

    def drop_residuals(self) -> None:
        self.dropped.append(self.value)

    def gather(self, value: int) -> list[int]:
        others, self.others_see = self.others_see, []
        return [value, *others]

    union = GroupCollectives.union

    def clock(self) -> float:
        return self.seconds

    load_seconds = 0.0

    def retract_offer(self) -> None:
        self.retracted += 1

    def load(self, snapshot: Snapshot) -> None:
        self.value = int(snapshot.header)

    def _apply(self, update: Update) -> None:
        assert isinstance(update.sums, Total)
        self.value = apply(self.value, update.sums.value)
        self.applied.append(update.step)

    def _fetch(
        self,
        addresses: list[str],
        token: str,
        step: int,
        *,
        report_lost: Callable[[int, str], None],
        report_share: Callable[[float], None],
        **_rest: Any,
    ) -> Snapshot:
        self.fetches.append((int(addresses[0]), step))
        self.donors.append([int(address) for address in addresses])
        for place, reason in self.lose.items():
            report_lost(place, reason)
        self.report_share = report_share
        number = len(self.fetches)
        assert self.release.wait(20)
        if number in self.fail:
            raise TransferError("the donor is gone")
        wrong = 0 if self.corrupt.isdisjoint(self.donors[-1]) else 1
        return Snapshot(
            step,
            self.lineages[step],
            str(value_after(step) + wrong).encode(),
            torch.zeros(8, dtype=torch.uint8),
        )

    @staticmethod
    def _digest(value: int) -> int:
        return fold48(str(value))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Provide worlds."""
    return lambda **config: World(monkeypatch, **config)


def healed(world: World) -> bool:
    """Return True if group 2 claims the holders' state, and holds it."""
    position = world.position
    return (
        position.standing is Standing.READY
        and position.step == world.step
        and position.lineage == world.lineage
        and world.value == value_after(world.step)
    )


def run(world: World) -> None:
    """Let group 2 heal. It must come to hold the holders' state."""
    world.heal.run()
    assert healed(world)


def test_the_queue_is_replayed_in_order(make: Callable[..., World]) -> None:
    """The donor serves the state of step 6. Each later update is applied once."""
    world = make()
    world.on_round = lambda number: world.release.set() if number == 5 else None
    run(world)
    (from_step,) = {step for _, step in world.fetches}
    assert from_step == 5
    assert world.dropped == [value_after(5)], "with this group's former state, before any replay"
    assert world.applied == list(range(6, world.step + 1))
    assert len(world.applied) >= 4
    assert [event.name for event in world.events] == ["heal_started", "heal_finished"]
    assert world.retracted == 1, "what this group offered is not the job's state"


def test_a_holder_that_has_made_no_update_is_a_donor(make: Callable[..., World]) -> None:
    """A group whose initial state differs heals from the state of step 0."""
    world = make()
    world.step, world.lineages = 0, {0: world.lineage}
    world.release.set()
    run(world)
    assert [step for _, step in world.fetches] == [0]
    assert world.applied == list(range(1, world.step + 1))


@pytest.mark.parametrize("config", [{}, {"semi_sync_method": "diloco", "sync_steps": 4}])
def test_attempts_are_spaced_further_and_further_apart(
    make: Callable[..., World], config: dict[str, Any]
) -> None:
    """Each attempt costs another holder a copy.

    The pauses are seconds, even if a round lasts long.
    """
    world = make(**config)
    world.release.set()
    world.fail = {1, 2, 3, 4, 5}
    run(world)
    assert len(world.fetches) == 6
    assert {donor for donor, _ in world.fetches} == {0, 1}
    assert len(world.named("heal_failed")) == 5
    assert world.applied == list(range(world.fetches[-1][1] + 1, world.step + 1))
    assert world.search.pauses == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0], (
        "the first repetition begins at once"
    )


def test_an_update_that_was_missed_is_not_replayed_over(make: Callable[..., World]) -> None:
    """A missed update makes the queue void. The attempt is abandoned with that reason.

    The exchange worked for this group and broke for the others, who made the update again without
    it. The state arrives in the round that shows this.
    """
    world = make()
    world.broken = {2}
    plain = world.copy
    world.copy = lambda: Total(9999) if world.made == 1 else plain()  # type: ignore[method-assign]

    def on_round(number: int) -> None:
        if number == 2:
            world.lineage = world.lineages[world.step] = 99
        if number == 3:
            world.release.set()

    world.on_round = on_round
    run(world)
    (failed,) = world.named("heal_failed")
    assert failed.error == "missed an update before update 7"  # type: ignore[attr-defined]  # a HealFailed
    assert [step for _, step in world.fetches] == [5, 8], (
        "the group asks after a round that has shown the state"
    )
    assert world.applied == list(range(9, world.step + 1)), "no update of the first attempt"


def hear_sibling(
    world: World, monkeypatch: pytest.MonkeyPatch, say: Callable[[], FetchStatus]
) -> None:
    """Let another rank of the group report its progress whenever this rank gathers its own."""
    fetched = CatchUp.fetch_status.fget
    assert fetched is not None

    def look(attempt: CatchUp) -> FetchStatus:
        world.others_see = [say()]
        return FetchStatus(fetched(attempt))

    monkeypatch.setattr(CatchUp, "fetch_status", property(look))


def test_a_state_counts_when_all_ranks_of_the_group_have_it(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has its part queues updates until its sibling has its own part.

    Both load in the same round.
    """
    world = make()
    world.release.set()
    hear_sibling(
        world, monkeypatch, lambda: FetchStatus.DONE if world.made >= 6 else FetchStatus.PENDING
    )
    loads, load = [], world.load

    def note(snapshot: Snapshot) -> None:
        loads.append(world.made)
        load(snapshot)

    monkeypatch.setattr(world, "load", note)
    run(world)
    assert loads == [6]
    assert world.applied == list(range(6, world.step + 1))


def test_a_fetch_that_fails_on_one_rank_is_given_up_by_all(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has its part asks the next donor together with its sibling.

    It reports the reason.
    """
    world = make()
    world.release.set()
    hear_sibling(
        world,
        monkeypatch,
        lambda: FetchStatus.DONE if world.named("heal_failed") else FetchStatus.FAILED,
    )
    run(world)
    (failed,) = world.named("heal_failed")
    assert failed.error == "the fetch failed on another rank of this group"  # type: ignore[attr-defined]  # a HealFailed
    assert len(world.fetches) == 2
    assert world.applied == list(range(world.fetches[-1][1] + 1, world.step + 1))


def test_bytes_that_nobody_agreed_on_are_not_kept(make: Callable[..., World]) -> None:
    """After wrong bytes, the next attempt has one donor only. So a bad donor can be avoided."""
    world = make()
    world.release.set()
    world.corrupt = {0}
    run(world)
    assert world.donors == [[0, 1], [1]]
    assert world.position.corrupt is False


def test_a_lost_donor_is_reported(make: Callable[..., World]) -> None:
    """The heal goes on with the other donors."""
    world = make()
    world.release.set()
    world.lose = {1: "it is gone"}
    run(world)
    (started,), (lost,) = world.named("heal_started"), world.named("donor_lost")
    assert (started.donor, started.donors) == (0, [0, 1])
    assert (lost.donor, lost.from_step, lost.error) == (1, started.from_step, "it is gone")
    assert world.named("heal_failed") == []


def test_a_donor_that_still_serves_is_named(make: Callable[..., World]) -> None:
    """Later joiners avoid the named donor.

    Otherwise they could replace the copy that this group fetches.
    """
    world = make()
    world.lose = {0: "it is gone"}
    world.on_round = lambda number: world.release.set() if number == 20 else None
    run(world)
    assert world.named_donors[-1] == 1
    assert set(world.named_donors) <= {-1, 0, 1}
    assert world.named_donors.count(0) <= 2, "until the loss is seen"


@pytest.mark.parametrize(
    ("free", "other", "config", "most"),
    [
        (None, 9, {"catch_up_max_gb": 3.5 / 2**10}, 3),
        (
            2**50,
            2,
            {"catch_up_max_gb": 3.5 / 2**10},
            2,
        ),  # another rank of the group has room for this many updates
        (2**50, 9, {"catch_up_max_gb": 4.5 / 2**10}, 4),
        (2 * 2 * 3 * 2**20, 9, {}, 3),  # half of the memory, for two ranks, in updates of 1 MiB
        (2 * 2 * 3 * 2**20, 1, {}, 1),
        (0, 9, {}, 1),
        (0, 9, {"catch_up_max_gb": 0.5 / 2**10}, 1),  # less than one update
    ],
)
def test_the_queue_is_bounded_in_bytes(
    make: Callable[..., World], free: int | None, other: int, config: dict[str, float], most: int
) -> None:
    """The setting or the free memory limits the queue. The rank with the least memory decides."""
    world = make(**config)
    world.free, world.others_see = free, [other]
    world.on_round = lambda number: world.release.set() if number == 20 else None
    run(world)
    (waiting,) = world.named("catch_up_waiting")
    assert waiting.step == 5 + most  # type: ignore[attr-defined]  # a CatchUpWaiting
    assert world.fetches == [(0, 5)]
    assert f"{most} updates ({most:,}.0 MiB on this rank) are queued" in waiting.reason  # type: ignore[attr-defined]


def test_without_knowledge_of_memory_nothing_is_bounded(make: Callable[..., World]) -> None:
    """A machine that reports no free memory queues without limit."""
    world = make()
    world.free = None
    world.on_round = lambda number: world.release.set() if number == 30 else None
    run(world)
    assert world.applied == list(range(6, world.step + 1))
    assert [event.name for event in world.events] == ["heal_started", "heal_finished"]


def hurry(world: World, number: int, late: float) -> None:
    """Let transfers bring nothing while the first two updates are queued.

    In the third and fourth update they bring `late`.
    """
    queued = len(world.heal._healing.queued)
    world.report_share(0.0 if queued < 3 else late)


def test_a_newer_state_is_fetched_once_if_it_would_be_in_time(make: Callable[..., World]) -> None:
    """The reason for the slow start is over, so a newer state is fetched.

    When the queue is full again, the others wait.
    """
    world = make(catch_up_max_gb=4.5 / 2**10)

    def go(number: int) -> None:
        hurry(world, number, late=0.6)
        if number == 30:
            world.release.set()

    world.on_round = go
    run(world)
    names = [event.name for event in world.events]
    assert names == [
        "heal_started",
        "catch_up_renewed",
        "heal_started",
        "catch_up_waiting",
        "heal_finished",
    ]
    (_, first), (_, second) = world.fetches
    assert (first, second >= first + 4) == (5, True)
    assert world.donors == [[0, 1], [1, 0]], "it is no retry, so all donors serve"
    assert world.applied == list(range(second + 1, world.step + 1))
    (renewed,) = world.named("catch_up_renewed")
    assert "fault_tolerance.catch_up_max_gb" in renewed.reason  # type: ignore[attr-defined]  # a CatchUpRenewed


@pytest.mark.parametrize(("late", "other"), [(0.4, 1), (0.6, 0)])
def test_a_newer_state_that_would_be_late_is_not_fetched(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch, late: float, other: int
) -> None:
    """At the latest pace, the queue of one rank would be full too early.

    So the others wait at once.
    """
    world = make(catch_up_max_gb=4.5 / 2**10)

    def go(number: int) -> None:
        hurry(world, number, late)
        if world.named("catch_up_waiting") and number > 20:
            world.release.set()

    world.on_round = go
    found = CatchUp.newer_would_be_in_time.fget
    assert found is not None

    def look(attempt: CatchUp) -> bool:
        world.others_see = [other]
        return bool(found(attempt))

    monkeypatch.setattr(CatchUp, "newer_would_be_in_time", property(look))
    run(world)
    assert len(world.named("catch_up_waiting")) == 1
    assert len(world.fetches) == 1
    assert not world.named("catch_up_renewed")


def test_a_state_that_is_there_is_kept(make: Callable[..., World]) -> None:
    """The state arrives in the round that fills the queue. It may be the last state that is
    left.
    """
    world = make(catch_up_max_gb=4.5 / 2**10)

    def go(number: int) -> None:
        hurry(world, number, late=1.0)
        attempt = world.heal._attempt
        if attempt is not None and len(world.heal._healing.queued) == 3:
            world.release.set()

    world.on_round = go
    run(world)
    assert [event.name for event in world.events] == ["heal_started", "heal_finished"]
    assert world.applied[:4] == [6, 7, 8, 9]


@pytest.mark.parametrize(
    ("replay", "steps_of_round", "slow"),
    [(1.5, 1, True), (0.9, 1, False), (4.5, 4, True), (3.6, 4, False)],
)
def test_a_slow_replay_lets_the_others_wait(
    make: Callable[..., World],
    monkeypatch: pytest.MonkeyPatch,
    replay: float,
    steps_of_round: int,
    slow: bool,
) -> None:
    """Replays take longer than updates.

    Otherwise the others would wait for two replays in each step, without a report.
    """
    world = make(
        **(
            {"semi_sync_method": "diloco", "sync_steps": steps_of_round}
            if steps_of_round > 1
            else {}
        )
    )
    world.quorum_ready, world.step_seconds = True, 1.0
    now, steps, plain = [0.0], [], world._apply
    monkeypatch.setattr(
        heal, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    )

    def apply_slowly(update: Update) -> None:
        plain(update)
        now[0] += replay

    def go(number: int) -> None:
        now[0] += steps_of_round * world.step_seconds
        if number == 20:
            world.release.set()
        if world.named("catch_up_waiting"):
            steps.append(world.step)

    world.on_round, world.heal._apply = go, apply_slowly
    run(world)
    assert world.applied == list(range(6, world.step + 1))
    if not slow:
        assert not world.named("catch_up_waiting")
        return
    (waiting,) = world.named("catch_up_waiting")
    assert "to replay" in waiting.reason  # type: ignore[attr-defined]  # a CatchUpWaiting
    assert len(steps) > 3
    assert max(steps) - min(steps) <= 2, "they commit the update that they held back, at the end"


def test_the_last_holder_dies(make: Callable[..., World]) -> None:
    """The queue is replayed nevertheless. Then this group holds the job's latest state."""
    world = make()

    def die(number: int) -> None:
        if number == 6:
            world.holders = ()
            world.release.set()

    world.on_round = die
    run(world)
    assert world.applied == list(range(6, world.step + 1))
    assert len(world.applied) >= 4
    assert world.named("rolled_back") == []


def test_an_older_state_is_what_is_left(make: Callable[..., World]) -> None:
    """The holders die before the fetch ends.

    After a while this group goes on from its own state.
    """
    world = make()
    world.ledger.readers = ((0, 1.0), (1, 1.0))
    world.fail = {1}
    world.release.set()
    world.position.step, world.position.lineage, world.value = 4, 44, value_after(4)

    def die(number: int) -> None:
        world.holders = () if number > 1 else world.holders
        world.seconds += SIGN_TIMEOUT_SECONDS / 4

    world.on_round = die
    world.heal.run()
    position = world.position
    assert (position.standing, position.step, position.lineage) == (Standing.READY, 4, 44)
    assert world.value == value_after(4)
    assert (world.applied, world.dropped) == ([], [])
    assert world.made >= 5
    (event,) = world.named("rolled_back")
    assert (event.step, event.lost) == (4, 1)  # type: ignore[attr-defined]  # a RolledBack
    assert world.ledger.readers == (), "each group reads its own slot"


def test_without_any_state_the_job_is_lost(make: Callable[..., World]) -> None:
    """The only holders die before the fetch ends, and this group has no state of its own."""
    world = make()
    world.fail = {1}

    def die(number: int) -> None:
        world.holders = () if number > 1 else world.holders
        world.release.set()
        world.seconds += SIGN_TIMEOUT_SECONDS / 4

    world.on_round = die
    with pytest.raises(JobLostError, match="step 5"):
        world.heal.run()


def test_a_leave_request_ends_the_heal(make: Callable[..., World]) -> None:
    """The others need nothing from this group."""
    world = make()
    world.on_round = lambda number: world.position.mark_leaving() if number == 3 else None
    with pytest.raises(Leaving):
        world.heal.run()
    world.release.set()


def rounds(make: Callable[..., World]) -> World:
    """Return a world in which the others have just opened a round.

    They make no update until they are at its end.
    """
    world = make(semi_sync_method="diloco", sync_steps=4)
    world.idle = world.quorum_ready = True
    world.on_round = lambda number: setattr(world, "quorum_ready", False)
    return world


def test_the_state_comes_while_the_others_train_their_round(make: Callable[..., World]) -> None:
    """The group trains at once. It makes no further round without training."""
    world = rounds(make)
    world.on_pause = lambda number: world.release.set() if number == 3 else None
    run(world)
    assert world.made == 1
    assert not world.heal.ended_on_update


@pytest.mark.parametrize(("lost", "named"), [((), 0), ((0,), 1), ((1,), 0), ((0, 1), 0)])
def test_the_name_stays_if_each_donor_is_lost_to_some_rank(
    make: Callable[..., World], lost: tuple[int, ...], named: int
) -> None:
    """Otherwise the named donor would change again and again.

    Later joiners choose by this name.
    """
    world = make()
    world.heal._set_healing(Healing().start_fetch(Offer((0, 1), 5, 1, 0), 2))
    first = [world.heal._healing.donor]
    for _ in range(3):
        # This rank has lost the first donor, and its sibling the others.
        world.heal._lost_donors = set(lost[:1])
        seen = [max(lost[1:], default=-1), sum(1 << slot for slot in lost[1:])]
        world.gather = lambda value, seen=seen: [value, seen.pop(0)]  # type: ignore[method-assign,misc]
        world.heal._name_serving_donor()
        first.append(world.heal._healing.donor)
    assert first == [0, named, named, named]


def mid_round(make: Callable[..., World]) -> World:
    """Return a world in which the others are in the middle of a round."""
    world = rounds(make)
    world.quorum_ready = False
    return world


def test_a_newcomer_during_a_round_gets_the_state_at_once(make: Callable[..., World]) -> None:
    """The newcomer makes no exchange for its state, because no other group is at one."""
    world = mid_round(make)
    assert world.heal.await_offer(4)
    assert world.search.first_after == 2, "otherwise newcomers would all ask the lowest slots"
    assert world.position.seen_step == 5, (
        "if its holder dies now, the state is lost, and the job does not start anew"
    )
    world.release.set()
    run(world)
    assert (world.made, world.fetches) == (0, [(0, 5)])
    assert world.donors == [[0]], (
        "a state has the moments of one group: the parts of two do not fit together"
    )
    assert (world.position.step, world.position.lineage) == (5, 55)
    assert not world.heal.ended_on_update


def test_no_offer_is_waited_for_when_the_others_are_there(make: Callable[..., World]) -> None:
    """A group without an offer gets the others' step, and its donor, from the quorum."""
    world = mid_round(make)
    world.offers = False
    world.on_pause = lambda number: setattr(world, "quorum_ready", number == 3)
    assert not world.heal.await_offer(0)
    assert world.pauses == 3
    world.on_round = lambda number: setattr(world, "offers", True)
    world.release.set()
    run(world)
    assert world.made == 3, (
        "in the first round they compare their bytes, in the others they wait for the state"
    )


def test_an_offer_that_comes_late_is_followed_by_a_replay(make: Callable[..., World]) -> None:
    """The others finish their round before the state arrives. Their update is queued."""
    world = mid_round(make)

    def come(number: int) -> None:
        world.quorum_ready, world.idle = True, False

    def go_on(number: int) -> None:
        if number == 2:
            world.idle, world.quorum_ready = True, False
            world.on_pause = lambda _: world.release.set()

    world.on_pause, world.on_round = come, go_on
    run(world)
    assert (world.made, world.applied, world.fetches) == (2, [6], [(0, 5)])


def test_an_offer_of_other_bytes_is_not_kept(make: Callable[..., World]) -> None:
    """A bit has flipped since the holders compared their bytes.

    The group fetches the state of another holder.
    """
    world = mid_round(make)
    world.corrupt = {0}
    world.release.set()
    run(world)
    assert world.fetches == [(0, 5), (1, 5)]


def test_an_offer_of_a_group_that_is_gone_is_followed_by_another(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offering group died between the search and the fetch."""
    world = mid_round(make)
    world.release.set()

    def find_addresses(slots: Sequence[int]) -> list[str]:
        if 0 in slots:
            raise ConnectionError("none of them lives and can be reached")
        return [str(slot) for slot in slots]

    monkeypatch.setattr(world, "find_addresses", find_addresses)
    run(world)
    assert world.fetches == [(1, 5)]
    assert len(world.named("heal_failed")) == 1


# A newcomer that asks during the step in which it arrived


def test_a_newcomer_is_back_with_the_first_update(make: Callable[..., World]) -> None:
    """The newcomer has the state before its first round, and the update of that round."""
    world = make()
    world.milliseconds, world.step_lasts = 40_000, True
    world.release.set()
    run(world)
    assert (world.made, world.applied) == (1, [6])
    assert (world.donors, world.named_donors) == ([[0, 1]], [0])
    assert set(world.begun) == {0, 1}, (
        "after a leave request, it stays for the round that the others make with it"
    )
    assert world.search.least_steps[-1] == 5, "no state older than the one of their quorum"
    assert [event.name for event in world.events] == ["heal_started", "heal_finished"]


def before_a_quorum(make: Callable[..., World], **config: Any) -> World:
    """Return a world whose newcomer replaces a process that the holders' exchange counts on."""
    world = make(**config)
    world.quorum_ready, world.is_expected = False, True
    return world


def test_a_newcomer_has_the_state_before_there_is_a_quorum(make: Callable[..., World]) -> None:
    """The others' exchange breaks, and is repeated from the same state.

    The newcomer takes part in its update.
    """
    world = before_a_quorum(make)
    assert world.heal.await_offer(0)
    assert world.position.seen_step == 5, (
        "if its holders die now, the state is lost, and the job does not start anew"
    )
    world.on_pause = lambda number: (
        world.release.set() if number < 3 else setattr(world, "quorum_ready", True)
    )
    run(world)
    assert (world.made, world.applied, world.donors) == (1, [6], [[0, 1]])
    assert world.expected == [(0, 1)], (
        "its first quorum must include a group that offered the state"
    )
    assert world.pauses == 3, "it waits for the quorum, without looking again and again"
    assert world.rooms == [(0, False)], "memory for updates is taken while no group waits"
    assert world.begun == [0, 1], (
        "after a leave request, it stays for the round that the others make with it"
    )


def test_a_state_that_takes_longer_than_the_quorum_holds_nobody_up(
    make: Callable[..., World],
) -> None:
    """The others are at their exchange.

    Its update is queued, and so are later ones, until the state arrives.
    """
    world = before_a_quorum(make)
    world.on_pause = lambda number: setattr(world, "quorum_ready", number > 2)
    world.on_round = lambda number: world.release.set() if number == 3 else None
    run(world)
    assert world.fetches == [(0, 5)]
    assert world.applied == list(range(6, world.step + 1))


def test_a_state_that_the_others_went_on_from_without_it_is_given_up(
    make: Callable[..., World],
) -> None:
    """The exchange had the gradients of the former process, so the others made the update.

    The newcomer lacks this update.
    """
    world = before_a_quorum(make)

    def go_on(number: int) -> None:
        world.step, world.lineage, world.quorum_ready = 6, 66, True
        world.lineages[6] = 66
        world.release.set()

    world.on_pause = go_on
    run(world)
    assert [step for _, step in world.fetches] == [5, 6], (
        "the second attempt begins with the first round"
    )
    assert [len(donors) for donors in world.donors] == [2, 2], "no donor is at fault"
    assert world.named_donors[0] >= 0
    assert world.applied == list(range(7, world.step + 1))


def test_the_step_of_the_others_began_before_the_quorum(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone group admits a joiner during a step.

    The joiner must load before the end of that step.
    """
    pace = make().heal._pace
    monkeypatch.setattr("titan_ft.engine.heal.time", SimpleNamespace(monotonic=lambda: 100.0))
    pace.start_step()
    pace.adopt_times(Offer((0,), 5, 1, 0, step_milliseconds=40_000, elapsed_milliseconds=30_000))
    assert pace.find_load_deadline(load_seconds=0.0) == 90.0
    assert pace.find_load_deadline(load_seconds=1.0) == 106.0


@pytest.mark.parametrize(("load_seconds", "at_once"), [(0.0, False), (0.2, True), (0.3, False)])
def test_a_state_that_comes_with_the_quorum_is_loaded_before_the_exchange_if_that_is_worth_it(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch, load_seconds: float, at_once: bool
) -> None:
    """Two others wait during the load.

    The joiner loads now only if they lose less than one group's step.
    """
    world = before_a_quorum(make)
    world.milliseconds = 1000
    world.load_seconds = load_seconds
    loads, load = [], world.load

    def come(number: int) -> None:
        world.quorum_ready = True
        world.release.set()

    def note(snapshot: Snapshot) -> None:
        loads.append(world.made)
        load(snapshot)

    world.on_pause = come
    monkeypatch.setattr(world, "load", note)
    run(world)
    assert (loads, world.applied) == (([0], [6]) if at_once else ([1], [6, 7]))
    assert world.fetches == [(0, 5)]


def test_a_quorum_of_those_that_hold_less_says_nothing_of_the_state(
    make: Callable[..., World],
) -> None:
    """The donor died, so it is outside of the quorum. Its state is the latest one that is left."""
    world = before_a_quorum(make)

    def come(number: int) -> None:
        world.holders = ()
        world.release.set() if number < 3 else setattr(world, "quorum_ready", True)

    def on_round(number: int) -> None:
        world.seconds += SIGN_TIMEOUT_SECONDS / 4

    world.on_pause, world.on_round = come, on_round
    members = (Member(2, 0.0, "process 2", "c0ffee"),)
    world.get_quorum = lambda: Quorum("quorum 1", 0, members, 0)  # type: ignore[method-assign]
    world.heal.run()
    assert [event.name for event in world.events] == ["heal_started", "rolled_back"]
    assert (world.position.step, world.position.lineage, world.value) == (5, 55, value_after(5))


def test_a_newcomer_whose_donors_are_lost_before_the_quorum_asks_again(
    make: Callable[..., World],
) -> None:
    """After a failure, one donor serves the whole state."""
    world = before_a_quorum(make)
    world.fail = {1}
    world.on_pause = lambda number: (
        world.release.set() if number < 3 else setattr(world, "quorum_ready", True)
    )
    run(world)
    assert (world.donors, world.made) == ([[0, 1], [1]], 1)


def without_offer(make: Callable[..., World]) -> World:
    """Return a world in which the others are in the middle of a round and offer nothing."""
    world = mid_round(make)
    world.offers = False
    return world


@pytest.mark.parametrize("surround", [rounds, without_offer, before_a_quorum])
def test_a_joiner_with_a_leave_request_leaves(
    make: Callable[..., World], surround: Callable[[Callable[..., World]], World]
) -> None:
    """The joiner has nothing to finish while it fetches, waits for an offer, or waits for a
    quorum.
    """
    world = surround(make)
    world.on_pause = lambda number: setattr(world, "leave_requested", True)
    with pytest.raises(Leaving):
        world.heal.run()
    assert world.position.leaving
    world.release.set()


def test_a_newcomer_whose_state_takes_longer_queues_updates(make: Callable[..., World]) -> None:
    """The bytes are compared with the digest of the first round that works."""
    world = make()
    world.broken = {1}
    world.on_round = lambda number: world.release.set() if number == 5 else None
    run(world)
    assert world.fetches == [(0, 5)]
    assert world.applied == list(range(6, world.step + 1))
    assert len(world.applied) >= 3
    assert [event.name for event in world.events] == ["heal_started", "heal_finished"]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_state_of_another_lineage_is_not_kept(make: Callable[..., World], at_once: bool) -> None:
    """The groups that offered the state go back from it.

    The round shows the job's state and its holders.
    """
    world = make()
    world.lineages[5] = 99
    world.offered = Offer((0, 1), 5, 99, 0)
    world.milliseconds, world.step_lasts = 40_000 if at_once else 0, at_once

    def on_round(number: int) -> None:
        world.lineages[5], world.offered = 55, None
        if at_once or number == 5:
            world.release.set()

    world.on_round = on_round
    world.release.set() if at_once else None
    run(world)
    assert world.position.corrupt is False
    assert [len(donors) for donors in world.donors] == [2, 2]
    assert [event.name for event in world.events] == [
        "heal_started",
        "heal_failed",
        "heal_started",
        "heal_finished",
    ]


@pytest.mark.parametrize("at_once", [True, False])
def test_bytes_that_the_first_round_does_not_show_are_not_kept(
    make: Callable[..., World], at_once: bool
) -> None:
    """The bytes changed after the offer. An unconfirmed state gives no claim to the job's state."""
    world = make()
    world.milliseconds, world.step_lasts = 40_000 if at_once else 0, at_once
    world.corrupt = {1}
    claims: list[int] = []

    def on_round(number: int) -> None:
        claims.append(world.position.claimed_step)
        if world.named("heal_failed"):
            world.corrupt = set()
        if at_once or number == 3:
            world.release.set()

    world.on_round = on_round
    world.release.set() if at_once else None
    run(world)
    assert world.position.corrupt is False
    assert len(world.named("heal_failed")) == 1
    assert [len(donors) for donors in world.donors] == [2, 1]
    assert 0 in claims, "no claim that the others could compare with theirs"


@pytest.mark.parametrize("leads", [True, False])
def test_a_newcomer_pauses_between_searches_in_a_step(
    make: Callable[..., World], monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    """The quorum is ready, so a wait for it would return at once and keep a core busy."""
    world = make()
    world.leads = leads
    seconds: list[float] = []
    poll = world.search.poll

    def sleep(duration: float) -> None:
        assert world.heal._healing.phase is Phase.ASKING
        assert world.is_waiting, (
            "the watchdog would take a long step of the others for a hang of this group"
        )
        seconds.append(duration)
        # Then this rank gets the offer, as from rank 0.
        world.leads = leads or len(seconds) == 3

    def poll_in_vain(least_step: int, after: int) -> Offer:
        assert len(world.search.least_steps) <= 1 + len(seconds), "it searches without a pause"
        offer = poll(least_step, after)
        return offer if len(seconds) == 3 else NO_OFFER

    monkeypatch.setattr(heal.time, "sleep", sleep)
    world.on_pause = lambda number: pytest.fail("a wait for a quorum that is there takes no time")
    world.search.poll = poll_in_vain  # type: ignore[method-assign]
    world.release.set()
    run(world)
    assert seconds == [0.05] * 3


def test_ranks_of_a_newcomer_ask_together_or_not_at_all(make: Callable[..., World]) -> None:
    """One rank could not reach the others, so the exchange will break."""
    world = make()
    meet = world.get_quorum

    def meet_with_error() -> Quorum:
        return dataclasses.replace(meet(), error="no process group" if world.made == 0 else None)

    world.get_quorum = meet_with_error  # type: ignore[method-assign]
    world.release.set()
    run(world)
    assert world.named_donors[0] == -1


def test_the_last_holders_state_is_kept_though_no_round_confirms_it(
    make: Callable[..., World],
) -> None:
    """The holders die before they show a digest. The fetched state is the latest one left."""
    world = make()
    world.milliseconds, world.step_lasts = 40_000, True
    world.release.set()

    def on_round(number: int) -> None:
        world.holders = ()
        world.seconds += SIGN_TIMEOUT_SECONDS / 4

    world.on_round = on_round
    world.heal.run()
    assert [event.name for event in world.events] == ["heal_started", "rolled_back"]
    assert (world.position.step, world.position.lineage, world.value) == (5, 55, value_after(5))


def test_a_group_that_the_others_know_asks_only_after_its_row_has_asked(
    make: Callable[..., World],
) -> None:
    """The others show digests only after a row asks. A state that is fetched earlier would be
    void.
    """
    world = make()
    world.release.set()
    world.heal.run()
    first = world.step
    world.made = 0
    world.named_donors.clear()
    run(world)
    assert world.named_donors[0] == -1
    assert world.named_donors[1] >= 0
    assert [step for _, step in world.fetches] == [5, first + 1]
