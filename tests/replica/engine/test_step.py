# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Steps of several groups, which are threads.

Rounds and ledgers are real. The exchange is in memory, and the quorums are scripted.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from tests.replica.conftest import RecordedEvents
from titan_ft.config import FaultTolerance
from titan_ft.engine import heal, step
from titan_ft.engine.heal import Heal
from titan_ft.engine.offer import OfferSearch
from titan_ft.engine.round import Rounds, Sign
from titan_ft.engine.step import Committed, ReplicaDimension
from titan_ft.gradients.exchange import ExchangeResult
from titan_ft.gradients.flight import ExchangeError, OwnFacts
from titan_ft.protocol import decision as decisions
from titan_ft.protocol.errors import NonFiniteError
from titan_ft.protocol.healing import NO_OFFER, Healing, Offer, Phase
from titan_ft.protocol.ledger import Entry, Ledger
from titan_ft.protocol.member import GroupProcess, Member, Quorum
from titan_ft.protocol.position import Position
from titan_ft.protocol.report import NOTHING, Contribution
from titan_ft.protocol.round import Round
from titan_ft.protocol.row import fold48
from titan_ft.transfer.snapshot import Snapshot

DEADLINE = 20.0  # seconds; only a bug reaches it
TOKENS = 100  # nominal tokens of a batch
NAN = float("nan")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no group pause. A round ends when all of its members are in it."""
    monkeypatch.setattr(step, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(heal, "PAUSE_SECONDS", 0.0)


def readers(*slots: int) -> tuple[GroupProcess, ...]:
    """Return the first processes of groups."""
    return tuple((slot, 0.0) for slot in slots)


class Hub:
    """The place where the groups meet.

    Quorum number n has the slots `quorums[n]`. After the last one they stay the same.
    """

    def __init__(
        self,
        *quorums: Sequence[int],
        broken: Sequence[int] = (),
        restarted: dict[int, int] | None = None,
    ) -> None:
        self._quorums = quorums
        self.broken = broken  # numbers of the quorums whose exchange breaks for all members
        # For each slot, the number of the first quorum with its next process.
        self._restarted = restarted or {}
        self._told: dict[tuple[int, int], Any] = {}
        self._changed = threading.Condition()

    def slots(self, number: int) -> Sequence[int]:
        """Return the members of a quorum."""
        return self._quorums[min(number, len(self._quorums) - 1)]

    def member(self, number: int, slot: int) -> Member:
        """Return a group's process in a quorum."""
        started = float(number >= self._restarted.get(slot, number + 1))
        return Member(slot, started, f"{slot}-{started:g}", "c0ffee")

    def gather(self, number: int, slot: int, value: object) -> list[Any]:
        """Return the values of all members of a quorum, in their order."""
        keys = [(number, member) for member in self.slots(number)]
        with self._changed:
            self._told[number, slot] = value
            self._changed.notify_all()
            met = self._changed.wait_for(lambda: all(key in self._told for key in keys), DEADLINE)
            assert met, f"only {[key for key in keys if key in self._told]} of {keys} came"
            return [self._told[key] for key in keys]


class Seat:
    """Stands in for a Membership of a group of one rank."""

    max_step = 0  # the largest step that the members report

    def __init__(self, hub: Hub, slot: int) -> None:
        self.hub, self.slot, self.number, self.quorum_requested = hub, slot, -1, False

    def request_quorum(self, step: int, *, may_grow: bool = False) -> None:
        """Take the next quorum that this group is in."""
        self.number += 1
        while self.slot not in self.hub.slots(self.number):
            self.number += 1
        self.quorum_requested = True

    quorum_ready = True

    def need_quorum(self) -> None:
        """Do nothing: the quorum is ready."""

    @property
    def member(self) -> Member:
        """The group's process."""
        return self.hub.member(self.number, self.slot)

    def await_quorum_for(self, seconds: float) -> None:
        """Do nothing: the quorum is ready."""

    def await_quorum(self) -> Quorum:
        slots = self.hub.slots(self.number)
        members = tuple(self.hub.member(self.number, slot) for slot in slots)
        return Quorum(f"quorum {self.number}", slots.index(self.slot), members, self.max_step)

    def vote(self, step: int, ok: bool) -> bool:
        """Return this rank's vote: it is alone."""
        self.quorum_requested = False
        return ok

    def find_addresses(self, slots: Sequence[int]) -> list[str]:
        """Return made-up addresses."""
        return [f"slot {slot}" for slot in slots]

    def find_holders(self) -> dict[int, Any]:
        """Find no holder."""
        return {}

    def remember_donors(self, slots: Sequence[int]) -> None:
        """Do nothing: each quorum has all living groups."""

    def find_outsiders(self, quorum: Quorum, step: int) -> list[int]:
        """Find no outsider."""
        return []


class Total:
    """Stands in for the sums: one number."""

    is_copy = False

    def __init__(self, value: float) -> None:
        self.value = value

    def copy(self) -> Total:
        """Return this object: a number needs no copy."""
        return self

    def write(self, scale: float | None = None) -> None:
        """Do nothing: the test applies the sum."""


class Room:
    """Stands in for the memory of copied sums."""

    num_bytes = 4

    def keep_on_device(self) -> int:
        """Return False: there is no device."""
        return 0

    def prepare(self) -> None:
        """Do nothing: a number needs no memory."""

    def drop(self) -> None:
        """Do nothing: a number needs no memory."""


class Exchange:
    """Stands in for a GradientExchange: the gradient is one number."""

    def __init__(self, seat: Seat, gradient: Callable[[], float]) -> None:
        self._seat, self._gradient = seat, gradient
        self._armed: bool | None = None
        self.copy_memory, self.drop_residuals = Room(), lambda: None
        self.contributed, self.sum = False, 0.0
        self.waits_for_members = False

    @property
    def is_launched(self) -> bool:
        """True if an exchange is launched."""
        return self._armed is not None

    def launch_for_backward(self, newest_step: int) -> None:
        """Decide now whether the gradients count. The flight does so when its quorum comes."""
        self.launch(newest_step)

    def launch(self, newest_step: int | None = None, *, may_update: bool = True) -> None:
        """Launch an exchange, without gradients if there is no such step."""
        self._armed = newest_step is not None and self._seat.await_quorum().max_step <= newest_step

    def finish(self, facts: OwnFacts) -> ExchangeResult:
        """Sum over the quorum."""
        quorum = self._seat.await_quorum()
        assert self._armed is not None
        self.contributed, self._armed = self._armed, None
        if self._seat.number in self._seat.hub.broken:
            raise ExchangeError("a peer is gone")
        gradient = self._gradient() if self.contributed else 0.0
        row, message = facts.complete(quorum, self.contributed, 0.0)
        own = (gradient, list(row), message, not math.isfinite(gradient))
        told = self._seat.hub.gather(self._seat.number, self._seat.slot, own)
        gradients, rows, messages, spoiled = zip(*told, strict=True)
        self.sum = sum(gradients)
        sums: Any = Total(self.sum)
        return ExchangeResult(
            quorum, [list(row) for row in rows], list(messages), list(spoiled), sums
        )


class Idle:
    """Stands in for parts that these tests do not use: drain, watchdog, state server, state."""

    requested = False
    snapshot = None
    offered_step = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None

    def after_vote(self) -> bool:
        """Return False: the group never leaves."""
        return False

    def wait_for_others(self, *_: Callable[[], object]) -> bool:
        """Return True: the group never leaves."""
        return True

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()


class State(Idle):
    """Stands in for a TrainState. Its bytes are a text."""

    bytes = "good"
    digests = 0  # number of digests that were taken
    load_seconds = 0.0

    def digest(self) -> str:
        """Return the bytes."""
        self.digests += 1
        return self.bytes


class Alone:
    """Stands in for a Group of one rank."""

    leads = True

    def clock(self) -> float:
        """Return a constant time."""
        return 0.0

    def gather(self, value: int) -> list[int]:
        return [value]


class Groups:
    """All groups of a job.

    The gradient of a batch is its slot's number + 1. The applied number is the mean over the
    groups.

    Args:
        gradient: makes another gradient of it, from the group and the slots that it has read.
    """

    def __init__(
        self,
        size: int,
        hub: Hub,
        gradient: Callable[[OneGroup, float], float] = lambda group, usual: usual,
        **config: Any,
    ) -> None:
        self.all = [OneGroup(hub, slot, size, gradient, config) for slot in range(size)]

    def run(self, *lives: Callable[[OneGroup], Any]) -> list[Any]:
        """Let each group run its function. The last one of `lives` is for all further groups.

        Returns:
            The functions' results.
        """
        futures: list[Future[Any]] = [Future() for _ in self.all]

        def live(group: OneGroup, future: Future[Any]) -> None:
            try:
                future.set_result(lives[min(group.slot, len(lives) - 1)](group))
            except BaseException as error:  # noqa: BLE001  # handed to the test
                future.set_exception(error)

        for group, future in zip(self.all, futures, strict=True):
            threading.Thread(target=live, args=(group, future), daemon=True).start()
        return [future.result(2 * DEADLINE) for future in futures]


class OneGroup:
    """A group of one rank."""

    def __init__(
        self,
        hub: Hub,
        slot: int,
        size: int,
        gradient: Callable[[OneGroup, float], float],
        config: dict[str, Any],
    ) -> None:
        self.slot, self.read, self.events = slot, list[int](), RecordedEvents()
        self.applied: list[float] = []
        self._share = 1 / size  # tokens of a batch in the nominal tokens
        self.config = FaultTolerance(enable=True, group_size=size, replica_id=slot, **config)
        self.seat, idle = Seat(hub, slot), Idle()
        seat = self.seat
        self.exchange = Exchange(
            seat, lambda: gradient(self, sum(each + 1 for each in self.read)) * self._share
        )
        self.ledger = Ledger(size)
        self.ledger.readers = readers(*range(size))
        self.position, self.state = Position(training=True), State()
        self.shared: dict[str, Any] = {
            "position": self.position,
            "group": Alone(),
            "events": self.events,
        }
        stand_ins: dict[str, Any] = {"membership": seat, "exchange": self.exchange}
        idle_ones: dict[str, Any] = {
            "donor": idle,
            "drain": idle,
            "watchdog": idle,
            "state": self.state,
        }
        self.rounds = Rounds(self.config, **stand_ins, **idle_ones, **self.shared)
        nobody: Any = None
        self.dimension = ReplicaDimension(
            self.config,
            rounds=self.rounds,
            heal=nobody,
            ledger=self.ledger,
            nominal_tokens=TOKENS * size,
            pauses_after=lambda step: True,
            **self.shared,
        )

    def train(self, slots: list[int]) -> Contribution:
        """Read a batch of each slot."""
        self.read += slots
        tokens = TOKENS * len(slots)
        entries = tuple(
            Entry(slot, self.ledger.count_committed(slot), 1, b"state") for slot in slots
        )
        return (
            Contribution(tokens, tokens, self._share * len(slots), 1.0, 0.1, entries)
            if slots
            else NOTHING
        )

    def step(self, arm: bool = False) -> Committed | None:
        """Make one step as the trainer does. Return None if the group must heal."""
        self.read = []
        contribution = self.train(self.dimension.slots_to_read())
        if arm:
            self.dimension.arm()
        committed = self.dimension.commit(contribution, self.train, self.read.clear)
        if committed is not None:
            self.applied.append(self.exchange.sum * committed.update.scale)
            self.ledger.advance(committed.update.entries, committed.update.readers)
        return committed

    def steps(self, count: int) -> list[Committed]:
        """Make steps that need no heal."""
        made = [self.step() for _ in range(count)]
        return [committed for committed in made if committed is not None]

    def heal(self) -> None:
        """Heal, replaying updates as the trainer does."""

        def apply(update: Any) -> None:
            self.applied.append(update.sums.value * update.scale)
            self.ledger.advance(update.entries, update.readers)

        idle: Any = self.state
        Heal(
            self.config,
            rounds=self.rounds,
            exchange=self.exchange,  # type: ignore[arg-type]  # stands in for it
            state=idle,
            ledger=self.ledger,
            nominal_tokens=TOKENS * self.config.group_size,
            token="token",
            ranks_on_host=1,
            apply=apply,
            **self.shared,
        ).run()


def test_the_first_step_waits_for_groups_that_live_outside_of_the_quorum(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The group waits beyond `start_timeout_seconds`, until these groups have been silent for a
    while.

    Each set of groups is reported once.
    """
    group = Groups(3, Hub([0]), start_timeout_seconds=8.0).all[0]
    group.position.training = False
    now, looks = [100.0], list[float]()

    def find_outsiders(quorum: Quorum, step: int) -> list[int]:
        looks.append(now[0])
        return [2] if now[0] < 120.0 and now[0] != 110.0 else []  # silent for a moment

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(group.seat, "find_outsiders", find_outsiders)
    monkeypatch.setattr(group.shared["group"], "clock", clock)
    assert group.dimension.start(0)
    assert now[0] == 119.0 + decisions.SIGN_TIMEOUT_SECONDS
    assert looks[0] == 101.0 + 8.0 - decisions.SIGN_TIMEOUT_SECONDS, (
        "the page is not read while there is time left"
    )
    said = [text for text in caplog.messages if text.startswith("groups [2] live")]
    assert len(said) == 2, "and once more when the group is back"


def test_the_ranks_of_a_group_finish_in_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may know first that all groups hold the final state.

    It makes rounds until its sibling knows it as well.
    """
    group = Groups(1, Hub([0])).all[0]
    group.position.adopt_state(10, 5)
    sibling_has_heard = [0, 0, 1]  # by round
    monkeypatch.setattr(
        group.shared["group"],
        "gather",
        lambda value: (
            [value, sibling_has_heard[group.seat.number]] if group.seat.number >= 0 else [value]
        ),
    )
    assert group.dimension.finish() is not None
    assert group.seat.number == 3, "one more round is made, so that others see it as well"


def told(committed: Committed) -> tuple[list[int], list[int]]:
    """Return the groups whose gradients a step has, and the slots of its batches."""
    return committed.participants, committed.update.slots


@pytest.mark.parametrize(
    ("quorums", "least"),
    [([[0], [0], [0], [0], [0, 1]], 2), ([[0, 1], [0], [0, 1]], 1)],
    ids=["alone and too few", "alone for one quorum"],
)
def test_a_group_that_forces_its_gradient_alone_spoils_no_sum(
    quorums: list[list[int]], least: int
) -> None:
    """A group forces its gradients, because no group seems to have finite ones.

    When a group with finite ones comes, it leaves its own out.
    """
    groups = Groups(
        2,
        Hub(*quorums),
        lambda group, usual: NAN if group.slot == 0 else usual,
        min_replica_size=least,
    )
    for committed in groups.run(OneGroup.step):
        assert told(committed) == ([1], [1])
    assert [group.applied for group in groups.all] == [[2.0], [2.0]]
    for group in groups.all:
        assert group.events.named("gradient_excluded") == [
            {"event": "gradient_excluded", "step": 1, "slots": [0]}
        ]


def test_a_batch_that_makes_nans_is_not_dealt_out() -> None:
    """With batch_policy "constant", too, a step is made without the slot of an excluded group."""
    groups = Groups(
        3,
        Hub([0, 1, 2]),
        lambda group, usual: NAN if 0 in group.read else usual,
        batch_policy="constant",
    )
    for committed in groups.run(OneGroup.step):
        assert told(committed) == ([1, 2], [1, 2])
        assert committed.num_exchanges == 2
    for group in groups.all:
        assert group.applied == [2.5]
        assert group.ledger.readers == readers(0, 1, 2), "the group reads its slot again"
        assert group.ledger.count_committed(0) == 0


@pytest.mark.parametrize(
    ("hub", "exchanges", "reads"),
    [
        (Hub([1, 2, 3], [2, 3], broken=[0]), 2, {2: [2, 4, 0], 3: [3, 1]}),
        (Hub([1, 2, 3], [2, 3], [2], broken=[0, 1]), 3, {2: [2, 4, 0, 1, 3]}),
        (Hub([1, 2, 3], [1, 2, 3], [2, 3], broken=[0, 1]), 3, {2: [2, 4, 0], 3: [3, 1]}),
        (Hub([2, 3], [2, 3], [2], [2], broken=[1]), 4, {2: [2, 4, 0, 1, 3]}),
    ],
    ids=[
        "one dies in the exchange",
        "and one that took over",
        "nobody, then one",
        "one before it, then another",
    ],
)
def test_a_quorum_shows_which_shares_are_gone(
    hub: Hub, exchanges: int, reads: dict[int, list[int]]
) -> None:
    """With batch_policy "constant", the others take over these shares and repeat the exchange.

    No round is made only to find them. After a round that worked, its rows show which group reads
    which slot. At first group 1 trains slot 0 as well, and group 2 slot 4.
    """

    def live(group: OneGroup) -> Committed | None:
        if group.slot in reads:
            return group.step()
        if 0 not in hub.broken and group.slot in hub.slots(0):
            group.rounds.make(group.train(group.dimension.slots_to_read()))  # its only exchange
        return None

    groups = Groups(5, hub, batch_policy="constant")
    for group in groups.all:
        group.ledger.readers = readers(1, 2, 3)
    made = [committed for committed in groups.run(live) if committed is not None]
    assert [committed.num_exchanges for committed in made] == [exchanges] * len(reads)
    assert {slot: groups.all[slot].read for slot in reads} == reads
    assert {slot: groups.all[slot].applied for slot in reads} == {slot: [3.0] for slot in reads}, (
        "all five are in it"
    )


def test_a_group_that_is_back_at_once_is_another_process() -> None:
    """The others take its share over in its first round.

    The new process trains nothing in this step.
    """
    hub = Hub([0, 1, 2], broken=[0], restarted={1: 1})
    groups = Groups(3, hub, batch_policy="constant")
    back = groups.all[1]
    back.seat.number = 0
    back.position.start_heal()

    def live(group: OneGroup) -> Committed | None:
        if group is not back:
            return group.step()
        group.rounds.make()
        return None

    for committed in groups.run(live):
        assert committed is None or (told(committed), committed.num_exchanges) == (
            ([0, 2], [0, 1, 2]),
            2,
        )
    assert [group.read for group in groups.all] == [[0, 1], [], [2]]
    assert back.dimension.slots_to_read() == [], "it heals to the others' step"


def test_nothing_is_taken_over_for_a_step_that_has_to_wait() -> None:
    """Too few groups are left.

    The missing ones may be back before the commit, and train their own slots.
    """
    hub = Hub([0, 1, 2], [0], [0, 1], broken=[0])
    groups = Groups(3, hub, batch_policy="constant", min_replica_size=2)
    back = groups.all[1]

    def live(group: OneGroup) -> Committed | None:
        if group is back:
            group.ledger.readers = readers(0, 2)  # as after a heal on a later update
        return group.step() if group.slot < 2 else None

    first, second, _ = groups.run(live)
    assert first is not None
    assert second is not None
    assert groups.all[0].read == [0, 2]
    assert back.read == [1]
    assert groups.all[0].applied == back.applied == [2.0]


def test_a_group_that_was_excluded_contributes_after_a_heal() -> None:
    """An agreement for a step that was never committed does not count for the step after the heal.

    No group commits meanwhile, because all three are needed.
    """
    healed = threading.Event()
    groups = Groups(
        3,
        Hub([0, 1, 2]),
        lambda group, usual: NAN if group.slot == 0 and not healed.is_set() else usual,
        min_replica_size=3,
    )
    for group in groups.all:
        group.position.adopt_state(10, 5)
        group.state.bytes = "corrupt" if group.slot == 0 else "good"

    def stray(group: OneGroup) -> Committed | None:
        assert group.step() is None
        healed.set()
        group.position.adopt_state(10, 5)  # as `Heal` leaves it
        group.position.set_digest(fold48(str([fold48("good")])))
        group.position.show_heal(Healing(Phase.READY))
        return group.step(arm=True)

    for committed in groups.run(stray, OneGroup.step):
        assert told(committed) == ([0, 1, 2], [0, 1, 2])
        assert committed.valid_tokens == 3 * TOKENS
    assert [group.applied for group in groups.all] == [[2.0]] * 3


def test_a_forced_gradient_is_forced_again_when_the_exchange_breaks() -> None:
    """No group has a finite gradient then either.

    It would cost one more exchange to leave the gradient out again.
    """
    groups = Groups(2, Hub([0, 1], broken=(2,)), lambda group, usual: NAN)
    for committed in groups.run(OneGroup.step):
        assert told(committed) == ([0, 1], [0, 1])
        assert committed.num_exchanges == 4, "with it, without it, forced, and forced again"
    for group in groups.all:
        assert math.isnan(group.applied[0])
        assert not group.events.named("gradient_excluded")


def test_three_exclusions_in_a_row_end_the_group() -> None:
    """A step with the group's gradients resets the count. The other groups go on."""
    steps_with_nan = {0, 1, 3, 4, 5}
    groups = Groups(
        2,
        Hub([0, 1]),
        lambda group, usual: (
            NAN if group.slot == 0 and group.position.step in steps_with_nan else usual
        ),
    )

    def suffer(group: OneGroup) -> list[Committed]:
        made = group.steps(5)
        with pytest.raises(NonFiniteError, match="3 steps in a row"):
            group.step()
        return made

    suffered, made = groups.run(suffer, lambda group: group.steps(6))
    assert [committed.participants for committed in suffered] == [[1], [1], [0, 1], [1], [1]]
    assert [committed.participants for committed in made] == [[1], [1], [0, 1], [1], [1], [1]]


def test_a_joiner_queues_no_update_that_lacks_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """With batch_policy "constant", the others repeat an exchange that lacks a batch.

    No joiner replays that exchange.
    """
    groups = Groups(3, Hub([0, 1, 2]), batch_policy="constant")
    for group in groups.all:
        group.ledger.readers = readers(0, 1)
    joiner = groups.all[2]
    donated = Snapshot(0, 0, b"{}", torch.zeros(1))
    monkeypatch.setattr(heal, "fetch", lambda *_, **__: donated)
    take = Heal._start_attempt

    def take_and_fetch(self: Heal, offer: Offer) -> None:
        take(self, offer)
        assert self._attempt is not None
        assert self._attempt._fetch.result(DEADLINE) is donated

    offers = iter([Offer((0, 1), 0, 0, 0)])
    monkeypatch.setattr(Heal, "_start_attempt", take_and_fetch)
    monkeypatch.setattr(OfferSearch, "poll", lambda *_: next(offers, NO_OFFER))

    def go_on(group: OneGroup) -> list[Committed]:
        made = group.steps(1)
        # As if the group that was to read slot 2 had died in the next step.
        group.ledger.readers = readers(0, 1, 2)
        return made + group.steps(2)

    def join(group: OneGroup) -> list[Committed]:
        group.heal()
        assert group.position.step == 1
        return group.steps(2)

    first, second, joined = groups.run(go_on, go_on, join)
    for made in (first, second):
        assert [told(committed) for committed in made[:2]] == [([0, 1], [0, 1, 2])] * 2
        assert [committed.num_exchanges for committed in made[:2]] == [1, 2]
        assert told(made[2]) == ([0, 1, 2], [0, 1, 2])
    assert [committed.update.lineage for committed in joined] == [
        committed.update.lineage for committed in first[1:]
    ]
    assert joiner.applied == groups.all[0].applied == [2.0, 2.0, 2.0]
    assert not any(group.events.named("digest_mismatch") for group in groups.all)


def test_a_group_that_is_behind_adds_nothing() -> None:
    """Its gradients of an old state are in no sum.

    It makes no difference whether the exchange was launched during backward.
    """
    for arm in (False, True):
        groups = Groups(2, Hub([0, 1]))
        late, other = groups.all
        other.position.adopt_state(5, 50)
        late.position.adopt_state(3, 30)
        late.seat.max_step = 5

        def step(group: OneGroup, arm: bool = arm) -> Committed | None:
            return group.step(arm=arm)

        missed, committed = groups.run(step)
        assert missed is None
        assert told(committed) == ([1], [1])
        assert other.applied == [2.0], "the gradient of slot 1 alone"


def test_digests_are_shown_when_a_newcomer_comes() -> None:
    """Only the first round with the newcomer has a digest. A digest of a large state takes long."""
    groups = Groups(2, Hub([0], [0], [0, 1], [0, 1], [0, 1]))
    second = groups.all[1]
    digests = []

    def go_on(group: OneGroup) -> None:
        for _ in range(4):
            group.step()
            digests.append(group.state.digests)

    def come(group: OneGroup) -> None:
        group.position.start_heal()
        group.position.show_heal(Healing().start_fetch(Offer((0,), 0, 0, 0), 1))  # asks for nothing
        for _ in range(2):
            group.rounds.make()

    groups.run(go_on, come)
    assert digests == [1, 1, 2, 2]
    assert second.state.digests == 0, "the group has no state to show"


def test_a_quorum_requested_at_the_commit_claims_the_new_step() -> None:
    """With the old step, the other groups would seem to be ahead of this group."""
    groups = Groups(1, Hub([0]))
    (group,) = groups.all
    group.dimension._pauses_after = lambda step: False
    claims: list[int] = []
    request_quorum = group.seat.request_quorum

    def note(step: int, *, may_grow: bool) -> None:
        claims.append(step)
        request_quorum(step, may_grow=may_grow)

    group.seat.request_quorum = note  # type: ignore[method-assign]
    groups.run(lambda group: group.steps(2))
    assert claims == [0, 1, 2]


# Rounds of a semi-synchronous method


def in_rounds(size: int, hub: Hub, **config: Any) -> Groups:
    """Return groups that train rounds of 4 steps; each of them has `made` steps of its own."""
    return Groups(size, hub, semi_sync_method="diloco", sync_steps=4, **config)


def open_and_train(group: OneGroup, made: int = 4) -> Committed | None:
    """Open a round, as a group does after an update, and make this many steps of it.

    Make the rest if the decision is to train on.
    """
    group.read = []
    opening = group.dimension.make_opening_rounds()
    return commit(group, made if opening is step.AfterOpening.TRAIN else 0)


def commit(group: OneGroup, made: int) -> Committed | None:
    """Meet the others with this many of four steps.

    Make the rest if no group is at the end of its round.
    """
    group.read = [group.slot] * made

    def contribute() -> Contribution:
        tokens = TOKENS * len(group.read)
        entries = (
            (
                Entry(
                    group.slot, group.ledger.count_committed(group.slot), len(group.read), b"state"
                ),
            )
            if group.read
            else ()
        )
        return Contribution(tokens, tokens, 1.0, 1.0, 0.1, entries, unfinished=len(group.read) < 4)

    def train(slots: list[int]) -> Contribution:
        group.read = [group.slot] * 4
        return contribute()

    return group.dimension.commit(contribute(), train, group.read.clear)


def steps_of(committed: Committed | None) -> dict[int, int]:
    """Return the number of each group's steps in an update."""
    assert committed is not None
    return {entry.slot: entry.num_batches for entry in committed.update.entries}


def test_a_group_that_meets_others_at_the_begin_of_their_round_trains_on() -> None:
    """The group has healed while the others make an opening round.

    No update may be made of its first step alone.
    """
    groups = in_rounds(3, Hub([0, 1, 2]))
    for committed in groups.run(lambda group: commit(group, 1), open_and_train):
        assert steps_of(committed) == {0: 4, 1: 4, 2: 4}


def test_all_ranks_of_a_group_get_the_signs_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank may see another sign between two steps.

    All act on all signs after the same step, or on none.
    """
    group = in_rounds(2, Hub([0, 1])).all[0]
    monkeypatch.setattr(Rounds, "signs", Sign.LEAVE_REQUESTED)
    monkeypatch.setattr(
        group.dimension._group, "gather", lambda own: [int(own), int(Sign.STATE_WANTED)]
    )
    assert group.dimension.gather_signs() == Sign.LEAVE_REQUESTED | Sign.STATE_WANTED
    assert (
        group.dimension.gather_signs(overdue=True)
        == Sign.LEAVE_REQUESTED | Sign.STATE_WANTED | Sign.OVERDUE
    )


@pytest.mark.parametrize("made", [0, 1])
def test_a_group_that_is_left_alone_in_mid_round_trains_on(made: int) -> None:
    """It exchanged early for others, which have died since. One step is no round's update."""
    groups = in_rounds(2, Hub([0]))
    assert steps_of(commit(groups.all[0], made)) == {0: 4}


def test_a_group_that_others_wait_for_gives_the_steps_that_it_has() -> None:
    """The others have made all of their steps."""
    groups = in_rounds(2, Hub([0, 1]))
    for committed in groups.run(lambda group: commit(group, 1), lambda group: commit(group, 4)):
        assert steps_of(committed) == {0: 1, 1: 4}


def test_a_group_that_opens_a_round_at_whose_end_the_others_are_makes_its_update() -> None:
    """It gives nothing. Later, no other group would be there to meet."""
    groups = in_rounds(2, Hub([0, 1]))
    for committed in groups.run(open_and_train, lambda group: commit(group, 4)):
        assert steps_of(committed) == {1: 4}
    assert [group.exchange.contributed for group in groups.all] == [False, True], (
        "its gradients are the last sums"
    )


def test_a_group_does_not_wait_for_others_that_train_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others' opening round was complete, and the group's own one broke.

    It trains like them, with its request pending.
    """
    monkeypatch.setattr(step, "_OPENING_SECONDS", 0.0)
    groups = in_rounds(2, Hub([0, 1]))
    for group in groups.all:
        group.seat.quorum_ready = False
    assert (
        groups.run(lambda group: group.dimension.make_opening_rounds())
        == [step.AfterOpening.TRAIN] * 2
    )
    assert all(group.dimension.quorum_requested for group in groups.all)
    assert not any(group.seat.number > 0 for group in groups.all)


def test_a_group_that_meets_others_early_shows_its_bytes_to_a_joiner() -> None:
    """The round makes no update. Without the digest, no joiner's state would be confirmed."""
    groups = in_rounds(2, Hub([0], [0, 1]))
    for group in groups.all:
        group.position.adopt_state(3, 7)
    groups.all[0].rounds.make()  # alone; the other group comes after it
    groups.all[0].position.set_digest(0)

    def give_early(group: OneGroup) -> None:
        group.read = [group.slot]
        group.rounds.make(Contribution(TOKENS, TOKENS, 1.0, 1.0, 0.1, unfinished=True))

    def join(group: OneGroup) -> bool:
        group.position.start_heal()
        group.seat.number = 0
        made = group.rounds.make()
        assert isinstance(made, Round)
        return made.verdict.verified

    assert groups.run(give_early, join) == [None, True]
