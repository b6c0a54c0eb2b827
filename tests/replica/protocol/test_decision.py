# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The decision of a group after a round: the whole policy, without a process, a thread or a
clock.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import titan_ft
from titan_ft.config import FaultTolerance
from titan_ft.protocol.decision import (
    SIGN_TIMEOUT_SECONDS,
    Commit,
    DiscardGradients,
    Done,
    ExcludeGradients,
    ForceGradients,
    GiveUp,
    Leave,
    Repeat,
    RollBack,
    StartHeal,
    StartTraining,
    TakeOverSlots,
    Wait,
    decide,
    find_first_donors,
    find_uncovered,
    is_update,
)
from titan_ft.protocol.errors import DivergedError, GaveUpError, JobLostError, NonFiniteError
from titan_ft.protocol.ledger import Entry
from titan_ft.protocol.member import Member, Quorum
from titan_ft.protocol.position import Position
from titan_ft.protocol.round import Broken, Round
from titan_ft.protocol.row import Row, Standing
from titan_ft.protocol.verdict import find_sum_spoilers, judge

STEP = 7
PACKAGE = Path(titan_ft.__file__).parent


def ready(slot: int, **facts: Any) -> Row:
    """Return the row of a group that trains.

    It has the gradients of one batch, and has shown its bytes.
    """
    usual = {
        "standing": Standing.READY,
        "step": STEP,
        "valid_tokens": 10,
        "tokens": 10,
        "digest": 9,
        "training": 1,
    }
    return Row(**{"slot": slot, **usual, **facts})


def behind(slot: int, **facts: Any) -> Row:
    """Return the row of a group that asks for a donor."""
    return Row(**{"slot": slot, "standing": Standing.BEHIND, "step": 0, **facts})


def made_of(
    rows: Sequence[Row], rank: int = 0, read: dict[int, Sequence[int]] | None = None
) -> Round:
    """Return the round of these rows, as the member `rank` sees it.

    Args:
        read: slots whose data each member's gradients are made of; None = each member with
            gradients has read its own slot.
    """
    members = tuple(Member(row.slot, 0.0, f"u{row.slot}", "c") for row in rows)
    if read is None:
        read = {row.slot: [row.slot] for row in rows if row.valid_tokens}
    slots = [list(read.get(row.slot, ())) for row in rows]
    verdict = judge(rows, slots)
    entries = [Entry(slot, 0, 1, b"") for place in verdict.ready for slot in slots[place]]
    return Round(Quorum("1/q", rank, members, STEP), rows, verdict, entries)


def config(slot: int = 0, size: int = 3, **changes: Any) -> FaultTolerance:
    """Return the config of a group."""
    return FaultTolerance(enable=True, replica_id=slot, group_size=size, **changes)


def trains(**changes: Any) -> Position:
    """Return the position of a group that trains."""
    return Position(step=STEP, training=True, **changes)


# A group that trains


def test_a_round_of_all_groups_is_an_update() -> None:
    """All groups give gradients, so nothing is missing."""
    assert decide(trains(), made_of([ready(0), ready(1), ready(2)]), config()) == Commit()


def test_an_update_descends_from_the_state_before_it() -> None:
    """The same exchange on another state makes another state. The lineage tells the two apart."""
    lineages = {
        made_of([ready(0, lineage=before), ready(1, lineage=before)]).update(20).lineage
        for before in (5, 6)
    }
    assert len(lineages) == 2


def test_a_round_with_strays_is_no_update() -> None:
    """The gradients of a stray are in the sum. So the round is repeated without the stray."""
    made = made_of([ready(0), ready(1), ready(2, lineage=5)])
    assert decide(trains(), made, config()) == Repeat()
    assert not is_update(made, config())
    assert decide(trains(), made_of(made.rows, rank=2), config(2)) == StartHeal()


def test_the_group_that_is_ahead_of_most_heals() -> None:
    """Five groups keep their gradients and repeat.

    The group whose exchange was complete goes back.
    """
    rows = [ready(0, step=STEP + 1), *[ready(slot) for slot in range(1, 6)]]
    for rank in range(6):
        expected = StartHeal() if rank == 0 else Repeat()
        position = Position(step=rows[rank].step, training=True)
        assert decide(position, made_of(rows, rank), config(rank, size=6)) == expected


def test_as_many_groups_ahead_as_behind_heal_the_groups_behind() -> None:
    """The later state counts. An update that half of the groups hold is not given up."""
    assert judge([ready(0, step=STEP + 1), ready(1)]).step == STEP + 1
    assert judge([ready(0, step=STEP + 1), ready(1), ready(2)]).step == STEP


def test_gradients_that_are_not_finite_spoil_the_sum() -> None:
    """The sum is used only if all groups with gradients have agreed to force theirs."""
    assert find_sum_spoilers([ready(0), ready(1)]) == []
    assert find_sum_spoilers([ready(0), ready(1, nonfinite=True)]) == [1]
    assert find_sum_spoilers([ready(0), ready(1, nonfinite=True, forced=1)]) == [1]
    assert find_sum_spoilers([ready(0, forced=1), ready(1, nonfinite=True, forced=1)]) == []


def test_no_group_goes_back_from_the_last_step() -> None:
    """The group ahead has finished training and would leave, while the others wait for it.

    So the others heal from it.
    """
    rows = [Row(slot=0, standing=Standing.FINISHED, step=STEP + 1, digest=9), ready(1), ready(2)]
    assert judge(rows).step == STEP + 1
    assert decide(trains(), made_of(rows, 1), config(1)) == StartHeal()


def test_groups_with_steps_left_do_not_outvote_one_that_is_ahead() -> None:
    """The unfinished groups loaded a state that was offered during the update, or gave gradients to
    it.
    """
    rows = [ready(0, step=STEP + 1), ready(1, unfinished=1), ready(2, unfinished=1)]
    assert judge(rows).step == STEP + 1
    assert decide(trains(), made_of(rows, 1), config(1)) == StartHeal()
    assert judge([rows[0], ready(1), ready(2), ready(3, unfinished=1)]).step == STEP


def test_groups_that_have_not_started_do_not_outvote_a_group_ahead() -> None:
    """They have no gradients to lose. A checkpoint is no reason to give up a later live state."""
    waiting = {"valid_tokens": 0, "training": 0}
    assert (
        judge([ready(0, step=STEP + 1), ready(1, **waiting), ready(2, **waiting)]).step == STEP + 1
    )


def test_a_checkpoint_is_no_second_witness_for_the_group_that_wrote_it() -> None:
    """A bit flips in group 0, which then saves.

    Group 2 loads this checkpoint, and must not outvote group 1.
    """
    loaded = ready(2, digest=8, valid_tokens=0, training=0)
    assert judge([ready(0, digest=8), ready(1), loaded]).tie
    verdict = judge([ready(0, digest=8), ready(1), loaded, ready(3)])
    assert (verdict.holders, verdict.corrupt) == ((1, 3), (0, 2))
    assert judge([ready(1), loaded]).tie, (
        "its writer is gone, so nobody can tell which bytes are right"
    )
    assert judge([ready(0), ready(1), loaded, dataclasses.replace(loaded, slot=3)]).corrupt == (
        2,
        3,
    )
    assert judge(
        [ready(0, training=0), ready(1, training=0), ready(2, training=0, digest=8)]
    ).corrupt == (2,)


def test_a_group_that_has_not_started_does_not_count() -> None:
    """The group heals in the same round. One group alone would make the step."""
    rows = [ready(0), ready(1, valid_tokens=0, training=0)]
    assert isinstance(decide(trains(), made_of(rows), config(min_replica_size=2)), Wait)


def test_too_few_groups_wait() -> None:
    """Below min_replica_size nothing is committed.

    Groups without gradients of their own count as well.
    """
    least = config(size=3, min_replica_size=2)
    assert isinstance(decide(trains(), made_of([ready(0)]), least), Wait)
    assert decide(trains(), made_of([ready(0), ready(1, valid_tokens=0)]), least) == Commit()


def test_no_update_is_made_in_an_opening_round() -> None:
    """Groups that have just made an update could not apply another one."""
    made = made_of([ready(0), ready(1, opening=1, valid_tokens=0, tokens=0)])
    assert made.verdict.may_update
    assert decide(trains(), made, config()) == Repeat()
    assert not is_update(made, config())


def test_held_back_gradients_are_sent_when_the_step_can_be_committed() -> None:
    """These gradients are not in this round's sum, so the next round is the update."""
    rows = [ready(0, holding_back=1), ready(1, holding_back=1), ready(2)]
    assert decide(trains(), made_of(rows), config()) == Repeat()
    assert not is_update(made_of(rows), config())
    assert isinstance(decide(trains(), made_of(rows[:1]), config(min_replica_size=2)), Wait)


def test_a_joiner_that_is_awaited_is_waited_for() -> None:
    """The others wait as long as the joiner fetches. A joiner that did not ask for it costs
    nothing.
    """
    joiner = Row(slot=1, standing=Standing.CATCHING_UP, step=0, donor=0, others_wait=1)
    assert isinstance(decide(trains(), made_of([ready(0), joiner]), config()), Wait)
    assert (
        decide(trains(), made_of([ready(0), dataclasses.replace(joiner, others_wait=0)]), config())
        == Commit()
    )


def test_a_missing_share_is_taken_over() -> None:
    """With batch_policy "constant", a group may leave within the step.

    The remaining groups train its batches.
    """
    rows = [ready(0), ready(1)]
    for rank, share in enumerate(([2], [])):
        assert decide(
            trains(), made_of(rows, rank), config(rank, batch_policy="constant")
        ) == TakeOverSlots(share)
    assert decide(trains(), made_of(rows), config(batch_policy="shrink")) == Commit()


def test_a_group_that_is_back_takes_its_own_slot_over() -> None:
    """Group 2 reads nothing in its first step, because groups 0 and 1 are the readers.

    Then group 0 dies. The two ready groups take over the missing slots and commit. Otherwise they
    would wait for ever for a second group with gradients.
    """
    rows = [ready(1), ready(2, valid_tokens=0)]
    shares = {}
    for rank, slot in enumerate((1, 2)):
        act = decide(
            trains(), made_of(rows, rank), config(slot, batch_policy="constant", min_replica_size=2)
        )
        assert isinstance(act, TakeOverSlots)
        shares[slot] = act.slots
    assert 2 in shares[2]
    assert sorted(shares[1] + shares[2]) == [0, 2]


def test_groups_without_any_gradient_take_over() -> None:
    """This holds even if no group is left that has read data for this step."""
    made = made_of([ready(2, valid_tokens=0)])
    assert decide(trains(), made, config(2, batch_policy="constant")) == TakeOverSlots([2, 0, 1])


def test_a_gradient_that_is_not_finite_is_left_out() -> None:
    """The group's ranks agree on it after the broken round.

    If no group has a finite one, it is forced.
    """
    assert decide(trains(), Broken("nan", gave_nonfinite=True), config()) == ExcludeGradients()
    assert decide(trains(), Broken("closed"), config()) == Repeat()
    nobody = [ready(0, valid_tokens=0, excluded=1), ready(1, valid_tokens=0, excluded=1)]
    assert decide(trains(), made_of(nobody), config()) == ForceGradients()
    one = [ready(0, valid_tokens=0, excluded=1), ready(1)]
    assert decide(trains(), made_of(one), config()) == Commit()


def test_exclusions_in_a_row_end_the_group() -> None:
    """The group then gets the others' state.

    Earlier exclusions do not count, and the other groups commit.
    """
    made = made_of([ready(0, valid_tokens=0, excluded=1), ready(1)])
    assert decide(trains(exclusions=1), made, config()) == Commit()
    act = decide(trains(exclusions=2), made, config())
    assert isinstance(act, GiveUp)
    assert isinstance(act.error, NonFiniteError)
    assert decide(trains(exclusions=2), made_of(made.rows, 1), config(1)) == Commit()


def test_groups_give_up_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group with the highest slot is the first, and the one with the lowest never gives up.

    If all gave up at once, the job's state would be lost.
    """
    monkeypatch.setattr("titan_ft.protocol.decision.MAX_EXCHANGE_RETRIES", 3)
    peers = (0, 1, 2)
    for slot, failures in ((2, 4), (1, 7)):
        few, many = [trains(peers=peers, broken_rounds=failures + more) for more in (-1, 0)]
        broken, own = Broken("closed"), config(slot)
        assert decide(few, broken, own) == Repeat()
        act = decide(many, broken, own)
        assert isinstance(act, GiveUp)
        assert isinstance(act.error, GaveUpError)
    assert decide(trains(peers=peers, broken_rounds=10**6), broken, config(0)) == Repeat()
    assert decide(trains(peers=(2,), broken_rounds=10**6), broken, config(2)) == Repeat()


def test_bytes_that_differ_without_a_majority_end_the_run() -> None:
    """Nothing shows which bytes are right. Joiners end as well."""
    rows = [ready(0, digest=1), ready(1, digest=2), behind(2)]
    for rank, position in enumerate((trains(), trains(), Position(standing=Standing.BEHIND))):
        act = decide(position, made_of(rows, rank), config(rank))
        assert isinstance(act, GiveUp)
        assert isinstance(act.error, DivergedError)


def test_a_group_that_leaves_finishes_its_step() -> None:
    """The leaving group applies an update, and waits for nothing else."""
    assert decide(trains(leaving=True), made_of([ready(0), ready(1)]), config()) == Commit()
    assert decide(trains(leaving=True), made_of([ready(0)]), config(min_replica_size=2)) == Leave()
    assert decide(trains(leaving=True), Broken("closed"), config()) == Leave()


@pytest.mark.parametrize(
    ("first", "second", "loser"), [([0], [0, 1], 0), ([0, 1], [1], 1), ([1], [1], 1)]
)
def test_of_two_that_read_one_slot_one_drops_its_gradients(
    first: list[int], second: list[int], loser: int
) -> None:
    """A group is back in a step in which its slot was taken over.

    The group that has read more keeps its gradients. The other one still holds the state. As a
    stray it would heal, read its slot again, and so on without end.
    """
    rows, read = [ready(0), ready(1), ready(2)], {0: first, 1: second, 2: [2]}
    verdict = made_of(rows, 0, read).verdict
    assert (verdict.holders, verdict.strays, verdict.duplicates) == ((0, 1, 2), (), (loser,))
    assert loser not in verdict.contributors
    for rank in range(3):
        made = made_of(rows, rank, read)
        assert decide(trains(), made, config(rank)) == (
            DiscardGradients() if rank == loser else Repeat()
        )
        assert not is_update(made, config(rank))


# Start and end


def test_the_first_step_waits_for_all_groups_up_to_a_time() -> None:
    """All ranks of all groups read the same waits, so they stop waiting in the same round."""
    waits = {"step": 0, "valid_tokens": 0, "training": 0}
    rows = [ready(0, waited_seconds=4.0, **waits), ready(1, waited_seconds=5.5, **waits)]
    for rank in (0, 1):
        made = made_of(rows, rank)
        assert isinstance(decide(Position(), made, config(rank, start_timeout_seconds=6.0)), Wait)
        for seconds in (5.0, 5.5):
            assert decide(
                Position(), made, config(rank, start_timeout_seconds=seconds)
            ) == StartTraining(num_missing=1)
        assert decide(Position(), made, config(rank, size=2)) == StartTraining(num_missing=0)
        act = decide(Position(), made, config(rank, start_timeout_seconds=5.0, min_replica_size=3))
        assert isinstance(act, GiveUp)
        assert "min_replica_size" in str(act.error)


def test_a_group_that_comes_to_others_that_wait_in_their_first_step_waits_with_them() -> None:
    """The wait has no limit: two groups that came by turns gave up by turns, and the job never
    started.
    """
    rows = [
        ready(0, step=0, valid_tokens=8, waited_seconds=5.5, training=True),
        ready(1, step=0, valid_tokens=0, training=0),
    ]
    act = decide(
        Position(), made_of(rows, 1), config(1, start_timeout_seconds=5.0, min_replica_size=3)
    )
    assert act == StartTraining(num_missing=1)


def test_a_group_in_start_heals_if_the_round_is_an_update() -> None:
    """A group that waits for the start has no part in the others' update."""
    rows = [ready(0, step=0), ready(1, step=0), ready(2, step=0, valid_tokens=0)]
    assert decide(Position(), made_of(rows, 2), config(2)) == StartHeal()
    assert decide(Position(training=True), made_of(rows), config()) == Commit()


def test_a_group_that_has_finished_stays_for_those_that_need_it() -> None:
    """It stays until all groups hold the final state and none is missing.

    Groups that left in order are not waited for.
    """
    done = Row(slot=0, standing=Standing.FINISHED, step=STEP, digest=9)
    other = dataclasses.replace(done, slot=1)
    position = Position(standing=Standing.FINISHED, step=STEP, training=True)
    assert decide(position, made_of([done, other]), config(size=2)) == Done()
    assert isinstance(decide(position, made_of([done, other]), config(size=3)), Wait)
    assert (
        decide(dataclasses.replace(position, left={2}), made_of([done, other]), config(size=3))
        == Done()
    )
    assert isinstance(decide(position, made_of([done, behind(1)]), config(size=2)), Wait)
    others = [dataclasses.replace(done, slot=slot, lineage=5) for slot in (1, 2)]
    assert decide(position, made_of([done, *others]), config(size=3)) == StartHeal()


# A group that heals


def test_a_group_that_heals_makes_round_after_round() -> None:
    """The group repeats, whether it asks or fetches."""
    position = Position(standing=Standing.BEHIND)
    assert decide(position, made_of([behind(0), ready(1), ready(2)]), config()) == Repeat()
    fetching = Position(standing=Standing.CATCHING_UP, donor=2)
    rows = [Row(slot=0, standing=Standing.CATCHING_UP, step=0, donor=2), ready(1), ready(2)]
    assert decide(fetching, made_of(rows), config()) == Repeat()


@pytest.mark.parametrize(
    ("joiners", "first"),
    [
        ([], set()),
        ([behind(0)], {1}),
        ([behind(2), behind(0)], {3, 1}),
        ([behind(5)], {1}),
        ([behind(0, standing=Standing.CATCHING_UP, donor=3)], set()),  # the group has a donor
    ],
)
def test_a_group_asks_the_holder_with_the_next_slot_first(
    joiners: list[Row], first: set[int]
) -> None:
    """As `Healing.choose_donors` does."""
    assert find_first_donors(made_of([ready(1), ready(3), ready(4), *joiners])) == first
    assert find_first_donors(made_of([behind(6), *joiners])) == set(), "no group holds the state"


def test_without_a_holder_the_latest_state_that_is_left_counts() -> None:
    """It counts only after a while, because holders may be late.

    A group with an older state waits for the later one.
    """
    rows = [behind(0, step=5, seen_step=9), behind(1, step=4, seen_step=9)]
    alone = {"standing": Standing.BEHIND, "no_holder_seconds": SIGN_TIMEOUT_SECONDS}
    wait = decide(Position(standing=Standing.BEHIND, step=5), made_of(rows), config())
    assert wait == Wait("no holder of the state is in the quorum")
    assert decide(Position(**alone, step=5), made_of(rows), config()) == RollBack()
    assert isinstance(decide(Position(**alone, step=4), made_of(rows, 1), config(1)), Wait)
    assert isinstance(
        decide(Position(**alone, step=5, corrupt=True), made_of(rows), config()), Wait
    )
    for seen in (1, 9):
        lost = [behind(0, seen_step=seen), behind(1, seen_step=seen)]
        act = decide(Position(**alone), made_of(lost), config())
        assert isinstance(act, GiveUp)
        assert isinstance(act.error, JobLostError)
    assert decide(Position(**alone), made_of([behind(0), behind(1)]), config()) == RollBack()


def test_a_replay_is_finished_before_an_older_state_counts() -> None:
    """A joiner's row shows the step after its replay. So no group goes back to an earlier step."""
    joiner = Position(
        standing=Standing.CATCHING_UP, step=20, target=35, no_holder_seconds=SIGN_TIMEOUT_SECONDS
    )
    assert joiner.claimed_step == 35
    rows = [
        Row(slot=0, standing=Standing.CATCHING_UP, step=joiner.claimed_step, seen_step=35),
        behind(1, step=30, seen_step=35),
    ]
    assert isinstance(decide(joiner, made_of(rows), config()), Wait)
    other = Position(standing=Standing.BEHIND, step=30, no_holder_seconds=SIGN_TIMEOUT_SECONDS)
    assert isinstance(decide(other, made_of(rows, 1), config(1)), Wait)


# Rules for all rows


def rows_of_a_job() -> st.SearchStrategy[list[Row]]:
    """Draw the rows of a quorum: any mixture of standings, steps, histories and bytes."""

    def build(drawn: list[tuple[Any, ...]]) -> list[Row]:
        rows = []
        for slot, (standing, back, lineage, digest, tokens, extra) in enumerate(drawn):
            facts: dict[str, Any] = {"valid_tokens": tokens if standing is Standing.READY else 0}
            facts["training"] = int(standing.has_state)
            if standing is Standing.READY and extra in ("excluded", "holding_back"):
                facts[extra] = 1
                facts["valid_tokens"] = 0 if extra == "excluded" else tokens
            if standing is Standing.CATCHING_UP:
                facts["donor"] = (slot + 1) % len(drawn) if extra == "fetches" else -1
                facts["others_wait"] = int(back == 1)
            rows.append(
                Row(
                    slot=slot,
                    standing=standing,
                    step=STEP - back,
                    lineage=lineage,
                    digest=digest,
                    seen_step=STEP,
                    **facts,
                )
            )
        return rows

    row = st.tuples(
        st.sampled_from(Standing),
        st.sampled_from([0, 0, 0, 1, 3]),
        st.sampled_from([1, 1, 1, 2]),
        st.sampled_from([0, 5, 5, 6]),
        st.sampled_from([0, 10]),
        st.sampled_from(["", "", "excluded", "holding_back", "fetches"]),
    )
    return st.lists(row, min_size=1, max_size=6).map(build)


def configs(size: int) -> st.SearchStrategy[dict[str, Any]]:
    """Draw the settings that all groups of a job have in common."""
    return st.fixed_dictionaries(
        {
            "size": st.just(size),
            "batch_policy": st.sampled_from(["shrink", "constant"]),
            "min_replica_size": st.integers(1, size),
        }
    )


def position_of(row: Row) -> Position:
    """Return the position of the group with this row."""
    return Position(step=row.step, standing=row.standing, training=True, donor=row.donor)


@settings(max_examples=400, deadline=None)
@given(rows_of_a_job())
def test_the_verdict_is_about_one_state(rows: list[Row]) -> None:
    """Holders share step, lineage and bytes.

    All other claims are strays, and only holders offer.
    """
    verdict = judge(rows, [[row.slot] if row.valid_tokens else [] for row in rows])
    claims = {rank for rank, row in enumerate(rows) if row.has_state}
    assert set(verdict.holders) | set(verdict.strays) == claims
    assert not set(verdict.holders) & set(verdict.strays)
    assert len({(rows[rank].step, rows[rank].lineage) for rank in verdict.holders}) <= 1
    assert {rows[rank].digest for rank in verdict.holders} <= {0, verdict.digest}
    assert set(verdict.contributors) <= set(verdict.ready) <= set(verdict.holders)
    assert set(verdict.offering) <= set(verdict.holders)
    assert set(verdict.corrupt) <= set(verdict.strays)
    assert bool(verdict.holders) or verdict.tie or not claims
    assert verdict.valid_tokens == sum(rows[rank].valid_tokens for rank in verdict.contributors)


@settings(max_examples=600, deadline=None)
@given(st.data(), rows_of_a_job())
def test_all_groups_decide_alike(data: st.DataObject, rows: list[Row]) -> None:
    """All training groups commit a round or none does. Joiners queue it in the same case.

    A second call gives the same decision.
    """
    shared = data.draw(configs(len(rows) + data.draw(st.integers(0, 2))))
    acts = []
    for rank, row in enumerate(rows):
        made, own = made_of(rows, rank), config(row.slot, **shared)
        acts.append(decide(position_of(row), made, own))
        assert decide(position_of(row), made, own) == acts[-1] or isinstance(acts[-1], GiveUp)
    made = made_of(rows)
    update = is_update(made, config(0, **shared))
    for rank, row in enumerate(rows):
        trains_on = rank in made.verdict.ready
        assert (acts[rank] == Commit()) == (update and trains_on)
        assert isinstance(acts[rank], StartHeal) == (
            row.has_state and rank not in made.verdict.holders and not made.verdict.tie
        )
        assert isinstance(acts[rank], GiveUp) == made.verdict.tie


def test_what_is_missing_is_taken_over_once() -> None:
    """The shares of all groups together are the missing slots, each of them once."""
    takes = []

    @settings(max_examples=400, deadline=None)
    @given(st.data(), rows_of_a_job())
    def all_is_dealt(data: st.DataObject, rows: list[Row]) -> None:
        shared = {
            **data.draw(configs(len(rows) + data.draw(st.integers(0, 2)))),
            "batch_policy": "constant",
        }
        acts = [
            decide(position_of(row), made_of(rows, rank), config(row.slot, **shared))
            for rank, row in enumerate(rows)
        ]
        ranks = {rank for rank, act in enumerate(acts) if isinstance(act, TakeOverSlots)}
        takes.append(bool(ranks))
        shares = [slot for act in acts if isinstance(act, TakeOverSlots) for slot in act.slots]
        assert sorted(shares) == (
            find_uncovered(made_of(rows), config(0, **shared)) if ranks else []
        )
        assert ranks in (set(), set(made_of(rows).verdict.ready))

    all_is_dealt()
    assert any(takes), "none of these rounds lacks a slot"


# Checks of the source


def test_only_its_own_methods_write_a_position() -> None:
    """No other code assigns to a field of the position."""
    fields = {field.name for field in dataclasses.fields(Position)}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            for target in [
                each
                for one in targets
                for each in (one.elts if isinstance(one, ast.Tuple) else [one])
            ]:
                if isinstance(target, ast.Attribute) and target.attr in fields:
                    owner = ast.unparse(target.value)
                    assert not owner.endswith("position"), (
                        f"{path.name}:{target.lineno} writes {ast.unparse(target)}"
                    )


@pytest.mark.parametrize("name", ["engine/round.py", "engine/step.py", "engine/heal.py"])
def test_the_policy_reads_no_clock_of_its_own(name: str) -> None:
    """Ranks of a group would decide differently by their own clocks.

    They decide by `GroupCollectives.clock`. A duration that is only reported, or agreed on by
    `gather`, may be measured.
    """
    started = {"started = time.monotonic()", "time.monotonic() - started"}
    began = {"_step_began = time.monotonic()"}
    until = {
        "time.monotonic() >= deadline",
        "time.monotonic() < deadline",
        "deadline - time.monotonic()",
    }
    allowed = {"engine/round.py": started, "engine/heal.py": started | began | until}.get(
        name, set()
    )
    source = (PACKAGE / name).read_text()
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    clocks = {"time.monotonic", "time.time", "time.perf_counter"}
    lines = source.splitlines()
    for call in calls:
        if ast.unparse(call.func) in clocks:
            line = lines[call.lineno - 1]
            assert any(text in line for text in allowed), f"{name}:{call.lineno}: {line.strip()}"


def test_a_clock_that_decides_is_gathered() -> None:
    """In a heal, a rank compares its clock only inside `gather`.

    So its siblings know the result.
    """
    tree = ast.parse((PACKAGE / "engine" / "heal.py").read_text())
    gathered = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".gather")
    ]
    inside = {child for call in gathered for child in ast.walk(call)}
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "measure_lateness"
    ]
    inside |= {child for function in functions for child in ast.walk(function)}
    compared = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and "time.monotonic" in ast.unparse(node)
    ]
    asked = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and "measure_lateness" in ast.unparse(node.func)
    ]
    assert len(compared) == 2
    assert len(asked) == 1
    for node in [*compared, *asked]:
        assert node in inside, f"heal.py:{node.lineno}: {ast.unparse(node)}"


def test_updates_of_other_gradients_are_other_states() -> None:
    """They differ even in quorums of the same number: a restarted lighthouse counts from the
    beginning.

    One group committed the step with all gradients. For the others it broke, and they make it
    without that group.
    """
    all_of_them = made_of([ready(slot, valid_tokens=10) for slot in range(3)])
    without_one = made_of([ready(0, valid_tokens=10), behind(1), ready(2, valid_tokens=10)])
    less_data = made_of(
        [ready(slot, valid_tokens=10) for slot in range(3)], read={0: [0], 1: [], 2: [2]}
    )
    rounds = (all_of_them, without_one, less_data)
    assert len({made.quorum.key for made in rounds}) == 1
    assert len({made.update(30).lineage for made in rounds}) == 3
    assert made_of([ready(slot, valid_tokens=10) for slot in range(3)]).update(
        30
    ) == all_of_them.update(30)
