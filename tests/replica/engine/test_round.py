# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One round of one group: its row, its vote, and its use of the others' rows."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from titan_ft.config import FaultTolerance
from titan_ft.engine.round import Rounds, Sign
from titan_ft.gradients.exchange import ExchangeResult
from titan_ft.gradients.flight import ExchangeError, OwnFacts
from titan_ft.protocol.errors import Leaving
from titan_ft.protocol.ledger import Entry, encode
from titan_ft.protocol.member import Member, Quorum
from titan_ft.protocol.position import Position
from titan_ft.protocol.report import NOTHING, Contribution, GradientUse
from titan_ft.protocol.round import Broken, Round
from titan_ft.protocol.row import Row, Standing, fold48
from titan_ft.run.log import EventLog

GIVEN = Contribution(90, 100, 0.5, 0.7, 1.5, (Entry(0, 4, 1, b"state"),))
OTHER = Row(1, Standing.READY, 7, lineage=5, digest=3, valid_tokens=60, tokens=64, training=1)


class World:
    """The world around the rounds of group 0, which has one rank.

    Group 1 is a row.
    """

    def __init__(self, **config: Any) -> None:
        self.position = Position(step=7, lineage=5, digest=3, training=True)
        self.other, self.max_step = OTHER, 7
        self.slots = (0, 1)
        self.error: ExchangeError | None = None
        self.finite, self.is_launched = True, False
        self.sums: Any = object()
        self.sibling_agrees = True
        # Records of the rounds.
        self.row: Row | None = None
        self.message = b""
        self.asked_with: list[int] = []
        self.votes: list[bool] = []
        self.served: list[Round] = []
        self.offered: list[int] = []  # digests; 0 = the next exchange confirms the bytes
        self.copied = 0  # number of copies that were made before a request
        self.digests = 0
        # For the exchange and the membership.
        self.quorum_requested = self.contributed = self.may_update = self.has_waiting_joiner = (
            self.requested
        ) = self.leaves = False
        self.may_leave: bool | None = None
        self.living = [0, 1]
        self.quorum_ready, self.is_urgent, self.waits = True, False, 0
        self.urgent_after = 1000  # number of waits
        self.siblings: list[bool] = []  # values of another rank of the group in each gather
        this: Any = self
        self.rounds = Rounds(
            FaultTolerance(enable=True, group_size=2, replica_id=0, **config),
            this,
            this,
            position=self.position,
            state=this,
            donor=this,
            group=this,
            events=EventLog(None),
            drain=this,
            watchdog=this,
        )

    @property
    def quorum(self) -> Quorum:
        members = tuple(Member(slot, 0.0, f"process {slot}", "c0ffee") for slot in self.slots)
        return Quorum("quorum", 0, members, self.max_step)

    # The membership

    def request_quorum(self, step: int, *, may_grow: bool = False) -> None:
        self.quorum_requested = True
        self.asked_with.append(step)
        self.needed = not may_grow

    def need_quorum(self) -> None:
        self.needed = True

    def await_quorum(self) -> Quorum:
        return self.quorum

    def await_quorum_for(self, seconds: float) -> None:
        self.waits += 1
        assert self.waits < 100, "the wait has no end"

    def vote(self, step: int, ok: bool) -> bool:
        self.quorum_requested = False
        self.votes.append(ok)
        return ok and self.sibling_agrees

    def find_living(self, members: Sequence[Member]) -> set[int]:
        return {member.slot for member in members if member.slot in self.living}

    # The exchange

    def launch(self, newest_step: int | None = None, *, may_update: bool = True) -> None:
        self.contributed = newest_step is not None and self.max_step <= newest_step
        self.may_update = may_update

    def launch_for_backward(self, newest_step: int) -> None:
        pass

    def finish(self, facts: OwnFacts) -> ExchangeResult:
        values, self.message = facts.complete(self.quorum, self.contributed, 0.0)
        self.row = Row.decode(list(values), nonfinite=False)
        if self.error is not None:
            raise self.error
        rows = [list(values), *([self.other.encode()] if 1 in self.slots else [])]
        entries = encode([Entry(1, 3, 1, b"theirs")])
        number = len(rows)
        spoiled = [not self.finite, bool(self.other.nonfinite)][:number]
        return ExchangeResult(
            self.quorum, rows, [self.message, entries][:number], spoiled, self.sums
        )

    # Group, state, donor, drain, watchdog

    leads = True

    def union(self, numbers: Collection[int]) -> set[int]:
        return set(numbers)

    def gather(self, value: int) -> list[int]:
        return [value, self.siblings.pop(0)] if self.siblings else [value]

    def digest(self) -> str:
        self.digests += 1
        return "bytes"

    offered_step: int | None = None  # step of the offered state

    def copy_after_round(self, made: Round, position: Position, *, is_update: bool) -> None:
        self.served.append(made)

    def offer(self, position: Position) -> None:
        self.offered_step = position.step
        self.offered.append(0)

    def offer_compared(self, position: Position, digest: int) -> None:
        self.offered_step = position.step
        self.offered.append(digest)

    def copy_ahead(self, position: Position) -> None:
        self.copied += 1

    def end_offer(self) -> None:
        self.offered_step = None

    retract = end_offer

    def wait_for_others(self, is_answered: Callable[[], bool], pause: Callable[[], object]) -> bool:
        while not is_answered():
            if self.waits >= self.urgent_after:
                return False
            pause()
        return True

    def before_vote(self, may_leave: Callable[[], bool]) -> None:
        self.may_leave = may_leave()

    def after_vote(self) -> bool:
        return self.leaves

    def paused(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@pytest.fixture
def world() -> World:
    """Provide a world that has made its first round.

    In that round the members are newcomers to each other.
    """
    world = World()
    world.rounds.make()
    world.position.digest, world.digests = 3, 0
    world.votes.clear()
    world.served.clear()
    return world


@pytest.mark.parametrize("config", [{}, {"semi_sync_method": "diloco", "digest_every": 0}])
@pytest.mark.parametrize("meets", [False, True])
def test_a_group_that_leaves_waits_for_others_for_a_part_of_its_time(
    config: dict[str, Any],
    meets: bool,
) -> None:
    """Another group hangs, or is in a long round, so no group gets a quorum.

    The group leaves without a vote.
    """
    world = World(**config)
    world.quorum_ready, world.urgent_after = False, 3
    with pytest.raises(Leaving):
        world.rounds.get_quorum() if meets else world.rounds.make(GIVEN)
    assert world.waits == 3
    assert world.position.leaving
    assert not world.votes


def test_a_group_that_leaves_takes_a_quorum_that_is_ready() -> None:
    """The others rely on this group."""
    world = World()
    world.urgent_after = 0
    assert isinstance(world.rounds.make(GIVEN), Round)
    assert not world.position.leaving


@pytest.mark.parametrize(
    ("made", "use", "due"),
    [
        (GIVEN, GradientUse.GIVE, True),
        (
            dataclasses.replace(GIVEN, unfinished=True),
            GradientUse.GIVE,
            False,
        ),  # the group has steps of its round left
        (GIVEN, GradientUse.EXCLUDE, True),  # the update has the others' gradients
        (NOTHING, GradientUse.OPEN, False),
        (NOTHING, GradientUse.GIVE, True),  # the group waits, or heals, and does not know
    ],
)
def test_the_exchange_knows_whether_an_update_may_follow(
    made: Contribution,
    use: GradientUse,
    due: bool,
) -> None:
    """Sums that no group would use do not travel."""
    world = World(semi_sync_method="diloco", digest_every=0)
    world.rounds.make(made, use)
    assert world.may_update is due


@pytest.mark.parametrize(
    ("requested", "others_leave", "error", "urgent", "standing", "may_leave"),
    [
        (True, False, None, False, Standing.READY, True),  # the other group reads the request
        (
            False,
            False,
            None,
            False,
            Standing.READY,
            False,
        ),  # the request came too late for the row
        (False, True, None, False, Standing.READY, True),  # no group stays to read it
        (
            True,
            False,
            ExchangeError("broke"),
            False,
            Standing.READY,
            False,
        ),  # perhaps no group has read it
        (
            True,
            False,
            ExchangeError("broke"),
            True,
            Standing.READY,
            True,
        ),  # the time of the group is nearly over
        (
            True,
            False,
            ExchangeError("broke"),
            False,
            Standing.BEHIND,
            True,
        ),  # the group has no state that others lack
    ],
)
def test_a_group_leaves_when_the_others_have_read_that_it_does(
    world: World,
    requested: bool,
    others_leave: bool,
    error: ExchangeError | None,
    urgent: bool,
    standing: Standing,
    may_leave: bool,
) -> None:
    """Before each vote, the rank reports whether it may leave.

    A later request counts at the next vote.
    """
    world.requested, world.error, world.is_urgent = requested, error, urgent
    world.other = dataclasses.replace(OTHER, leaving=others_leave)
    world.position.standing = standing
    world.rounds.make(GIVEN)
    assert world.may_leave is may_leave


def test_find_living_asks_for_members_of_the_last_round(world: World) -> None:
    """A new process that has the slot of a former member does not count."""
    assert world.rounds.find_living([0, 1, 2]) == {0, 1}
    assert world.rounds.find_living([1]) == {1}
    world.living = [0]
    assert world.rounds.find_living([0, 1]) == {0}
    world.leads = False  # rank 0 looks for all ranks
    assert world.rounds.find_living([0, 1]) == set()


def test_signs_of_a_rank() -> None:
    """A joiner waits, the others wait, or the group must leave."""
    world = World(semi_sync_method="diloco", digest_every=0)
    world.quorum_ready, world.has_waiting_joiner, world.requested = False, False, False
    assert world.rounds.signs == Sign(0)
    signs = {
        "has_waiting_joiner": Sign.STATE_WANTED,
        "quorum_ready": Sign.OTHERS_WAIT,
        "requested": Sign.LEAVE_REQUESTED,
    }
    for name, sign in signs.items():
        setattr(world, name, True)
        assert sign in world.rounds.signs
        setattr(world, name, False)
        assert sign not in world.rounds.signs


@pytest.mark.parametrize(
    ("contribution", "use", "config", "digests"),
    [
        (GIVEN, GradientUse.GIVE, {}, 1),
        (GIVEN, GradientUse.EXCLUDE, {}, 1),  # no change to compare, but a vote for the majority
        (dataclasses.replace(GIVEN, unfinished=True), GradientUse.GIVE, {}, 1),
        (Contribution(unfinished=True), GradientUse.GIVE, {}, 1),
        (NOTHING, GradientUse.OPEN, {}, 0),  # no step since the last comparison
        (NOTHING, GradientUse.GIVE, {}, 0),
        (GIVEN, GradientUse.GIVE, {"digest_every": 0}, 0),
        (
            GIVEN,
            GradientUse.GIVE,
            {"semi_sync_method": None},
            0,
        ),  # gradients are no changes of weights
    ],
)
def test_digests_are_shown_at_the_end_of_a_round_of_several_steps(
    contribution: Contribution,
    use: GradientUse,
    config: dict[str, Any],
    digests: int,
) -> None:
    """A flipped bit of an anchor would be in the change, and so in every group's update."""
    world = World(**{"semi_sync_method": "diloco", **config})
    world.rounds.make(use=GradientUse.OPEN)  # the members meet for the first time
    world.position.digest, world.digests = 3, 0
    world.rounds.make(contribution, use)
    assert world.digests == digests
    assert world.row is not None
    assert world.row.digest == (fold48(str([fold48("bytes")])) if digests else 3)


@pytest.mark.parametrize("early", [True, False])
def test_digests_for_a_newcomer_are_taken_where_no_update_follows(early: bool) -> None:
    """At the end of a round there is no digest. The next round has one.

    Otherwise the newcomer would replay this update.
    """
    world = World(semi_sync_method="diloco", digest_every=0)
    world.rounds.make(dataclasses.replace(GIVEN, unfinished=early))
    assert world.digests == early


@pytest.mark.parametrize(("method", "unit"), [(None, "step"), ("diloco", "round")])
def test_lines_of_the_log_name_what_the_groups_count(
    method: str | None,
    unit: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a semi-synchronous method, torchtitan's step of the same number is another one."""
    world = World(semi_sync_method=method)
    world.error = ExchangeError("a peer died")
    world.rounds.make(GIVEN)
    world.error, world.other = None, dataclasses.replace(OTHER, lineage=6)
    world.rounds.make(GIVEN)
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        f"the exchange after {unit} 7 broke: a peer died",
        f"the groups' states differ after {unit} 7",
    ]


def test_contributions_add_up() -> None:
    """Microbatches of another slot are added to the sums. The larger loss and all entries count."""
    more = Contribution(10, 20, 0.25, 0.9, 0.5, (Entry(1, 0, 1, b""),))
    assert GIVEN.plus(more) == Contribution(
        100,
        120,
        0.75,
        0.9,
        2.0,
        (*GIVEN.entries, *more.entries),
    )


@pytest.mark.parametrize(
    ("use", "sends", "facts"),
    [
        (GradientUse.GIVE, True, {}),
        (GradientUse.FORCE, True, {"forced": 1}),
        (GradientUse.HOLD_BACK, False, {"holding_back": 1}),
        (
            GradientUse.EXCLUDE,
            False,
            {"excluded": 1, "valid_tokens": 0, "tokens": 0, "loss": 0, "max_loss": 0, "seconds": 0},
        ),
    ],
)
def test_the_row_says_what_is_done_with_the_gradients(
    world: World,
    use: GradientUse,
    sends: bool,
    facts: dict[str, Any],
) -> None:
    """A group that holds its gradients back shows their weight.

    A group that leaves them out weighs nothing.
    """
    made = world.rounds.make(GIVEN, use)
    usual = Row(
        0,
        Standing.READY,
        7,
        seen_step=7,
        lineage=5,
        digest=3,
        valid_tokens=90,
        tokens=100,
        loss=0.5,
        max_loss=0.7,
        seconds=1.5,
        training=1,
    )
    assert world.contributed is sends
    assert world.row == dataclasses.replace(usual, **facts)
    assert isinstance(made, Round)
    assert made.rows == [world.row, OTHER]
    assert {entry.slot for entry in made.entries} == ({1} if use is GradientUse.EXCLUDE else {0, 1})
    assert world.votes == [True]


@pytest.mark.parametrize("use", [GradientUse.GIVE, GradientUse.HOLD_BACK])
@pytest.mark.parametrize(
    "nothing",
    [NOTHING, NOTHING.plus(NOTHING)],
    ids=["none", "a share without batches"],
)
def test_without_a_contribution_nothing_is_given(
    world: World,
    nothing: Contribution,
    use: GradientUse,
) -> None:
    """A group that heals, waits or has an empty share gives no gradient and no entries."""
    world.rounds.make(nothing, use)
    assert world.contributed is False
    assert world.row is not None
    assert world.row.valid_tokens == world.row.holding_back == 0
    assert world.message == b""


@pytest.mark.parametrize(
    ("training", "max_step", "behind"),
    [(True, 8, False), (True, 9, True), (False, 8, True)],
)
def test_a_group_that_is_behind_adds_nothing(
    world: World,
    training: bool,
    max_step: int,
    behind: bool,
) -> None:
    """One update more may be that of a broken exchange.

    The claim is void after two more, and before the start after any.
    """
    world.position.training, world.max_step = training, max_step
    world.rounds.make(GIVEN)
    assert world.contributed is not behind
    assert world.row is not None
    assert world.row.standing is (Standing.BEHIND if behind else Standing.READY)
    assert world.row.training == (training and not behind)
    assert (world.row.valid_tokens == 0) is behind


def test_a_broken_exchange_is_voted_down(world: World) -> None:
    """All ranks of the group repeat the exchange.

    Its rows do not count, and no joiner is served after it.
    """
    world.error = ExchangeError("a peer is gone")
    assert world.rounds.make(GIVEN) == Broken("a peer is gone", gave_nonfinite=False)
    assert world.votes == [False]
    assert world.position.broken_rounds == 1
    assert world.served == []


def test_a_sibling_s_no_counts(world: World) -> None:
    """The exchange worked here and broke on another rank of the group.

    So it is broken for all of them.
    """
    world.sibling_agrees = False
    assert world.rounds.make(GIVEN) == Broken(
        "broke on another rank of this group",
        gave_nonfinite=False,
    )
    assert world.votes == [True]
    assert (world.position.broken_rounds, world.position.seen_step, world.served) == (1, 7, [])


def test_gradients_that_are_not_finite_are_voted_down(world: World) -> None:
    """The rank that gave them votes no, and so do the ranks that only read the rows."""
    world.finite = False
    assert world.rounds.make(GIVEN) == Broken(
        "the gradients of groups [0] are not finite",
        gave_nonfinite=True,
    )
    world.finite, world.other = True, dataclasses.replace(OTHER, nonfinite=True)
    assert world.rounds.make(GIVEN) == Broken(
        "the gradients of groups [1] are not finite",
        gave_nonfinite=False,
    )
    assert world.votes == [False, False]
    world.other = OTHER
    assert isinstance(world.rounds.make(GIVEN), Round)
    assert world.position.broken_rounds == 0


def test_the_quorum_is_requested_once_with_the_own_step(world: World) -> None:
    """Each round has one request, made at the commit or later. A group that leaves makes none."""
    world.asked_with.clear()
    world.rounds.request_quorum()
    world.rounds.make(GIVEN)
    world.position.step = 8
    world.rounds.make(GIVEN)
    assert world.asked_with == [7, 8]
    world.leaves = True
    world.rounds.make(GIVEN)
    assert world.position.leaving
    world.rounds.request_quorum()
    assert world.asked_with == [7, 8, 8]


def test_a_quorum_requested_ahead_is_needed_after_the_step() -> None:
    """The quorum of a lone group may grow while it computes.

    In a round of several steps, a joiner would wait too long.
    """
    for config, needed in (({}, False), ({"semi_sync_method": "diloco"}, True)):
        world = World(**config)
        world.rounds.request_quorum(ahead=True)
        assert world.needed is needed
        world.rounds.arm()
        assert world.needed is needed, "the step's backward is yet to come"
        world.rounds.request_quorum()
        assert world.needed
    assert world.asked_with == [7]


def test_the_digest_is_taken_when_a_joiner_may_fetch_the_state(world: World) -> None:
    """For a newcomer, and for a member that asks for the state. Other rounds cost no digest."""
    world.rounds.make(GIVEN)
    assert world.digests == 0
    world.other = Row(1, Standing.BEHIND, 0)
    world.rounds.make(GIVEN)  # the joiner asks
    assert world.digests == 0
    made = world.rounds.make(GIVEN)
    assert world.digests == 1
    assert world.row is not None
    assert world.row.digest == fold48(str([fold48("bytes")]))
    assert isinstance(made, Round)
    assert made.verdict.verified
    assert world.served[-1] is made
    world.other = dataclasses.replace(OTHER, standing=Standing.CATCHING_UP, donor=0)
    world.rounds.make(GIVEN)
    world.rounds.make(GIVEN)
    assert world.digests == 2  # once more after the round in which it asked
    world.slots = (0, 2)
    world.rounds.make(GIVEN)
    assert world.digests == 3


# The offer to joiners


def test_a_state_is_offered_while_no_update_is_made(world: World) -> None:
    """The first such round starts the offer, also before the job's first step.

    The offer is made once.
    """
    world.other = dataclasses.replace(OTHER, valid_tokens=0)
    for _ in range(2):
        world.rounds.make()
    assert (world.offered_step, world.offered) == (7, [0])


def test_an_update_is_followed_by_the_offer_of_its_state(world: World) -> None:
    """The new state is offered after the update is applied, and not before."""
    world.rounds.make(GIVEN)
    assert world.offered == []


def test_a_group_that_may_not_offer_its_state_takes_it_back(world: World) -> None:
    """Other groups have started and this one has not, or they have another state."""
    world.other = dataclasses.replace(OTHER, valid_tokens=0)
    world.rounds.make()
    assert world.offered_step == 7
    world.position.training = False
    world.rounds.make()
    assert (world.offered_step, world.offered) == (None, [0])


@pytest.mark.parametrize(
    ("other", "use", "offers", "copies"),
    [
        ({"opening": 1}, GradientUse.OPEN, True, False),
        ({"unfinished": 1}, GradientUse.OPEN, True, False),
        ({"standing": Standing.BEHIND, "step": 0}, GradientUse.OPEN, True, True),
        ({"standing": Standing.CATCHING_UP, "step": 0, "donor": 0}, GradientUse.OPEN, True, False),
        ({"opening": 1, "digest": 0}, GradientUse.OPEN, False, False),  # the bytes are not compared
        (
            {},
            GradientUse.OPEN,
            False,
            False,
        ),  # the other group is at the end of its round: an update is next
        ({}, GradientUse.GIVE, False, False),
    ],
)
def test_in_a_round_of_several_steps_compared_bytes_are_offered(
    other: dict[str, Any],
    use: GradientUse,
    offers: bool,
    copies: bool,
) -> None:
    """The agreed state stays unchanged while the groups make local steps.

    For a member that asks, the state is copied at once. The next chance comes only after a step.
    """
    world, digest = World(semi_sync_method="diloco", digest_every=1), fold48(str([fold48("bytes")]))
    world.position.set_digest(digest)
    world.other = dataclasses.replace(OTHER, **{"digest": digest, **other})
    world.rounds.make(use=use)
    assert (world.offered, world.copied) == ([digest] if offers else [], int(copies))


def test_a_group_that_waits_for_others_offers_what_it_has_compared() -> None:
    """No group makes an update before the missing groups are back.

    These groups must be able to get the state.
    """
    world, digest = (
        World(semi_sync_method="diloco", digest_every=1, min_replica_size=3),
        fold48(str([fold48("bytes")])),
    )
    world.other = dataclasses.replace(OTHER, digest=digest)
    world.rounds.make(GIVEN, GradientUse.HOLD_BACK)
    assert world.offered == [digest]
