# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group's state and knowledge, and the change of both by each event."""

from __future__ import annotations

from typing import Any

from titan_ft.protocol.healing import Healing, Offer
from titan_ft.protocol.member import Member, Quorum
from titan_ft.protocol.position import Position
from titan_ft.protocol.round import Round, Update
from titan_ft.protocol.row import Row, Standing
from titan_ft.protocol.verdict import judge


def made_of(*rows: Row, rank: int = 0) -> Round:
    """Return the round of these rows as the member `rank` sees it."""
    members = tuple(Member(row.slot, 0.0, f"u{row.slot}", "c") for row in rows)
    return Round(Quorum("1/q", rank, members, 0), rows, judge(rows), [])


def ready(slot: int, **facts: Any) -> Row:
    """Return the row of a group that trains and has shown its bytes."""
    return Row(**{"slot": slot, "standing": Standing.READY, "step": 7, "digest": 9, **facts})


def update(step: int) -> Update:
    """Return a committed update."""
    return Update(step=step, tokens=1, lineage=100 + step, scale=1.0, entries=[], readers=[])


def test_an_update_makes_another_state() -> None:
    """The new state has its own step and lineage. The digest of the earlier state is void."""
    position = Position(step=7, lineage=5, seen_step=7)
    position.set_digest(9)
    position.advance(update(8))
    assert (position.step, position.lineage, position.digest, position.seen_step) == (8, 108, 0, 8)
    assert position.training
    position.set_digest(9)
    position.adopt_state(3, 50)
    assert (position.step, position.lineage, position.digest, position.seen_step) == (3, 50, 0, 8)


def test_the_claimed_step_is_that_of_the_state_after_the_replay() -> None:
    """A corrupt state counts as 0. A fetched state counts with its queue, before the replay."""
    position = Position(step=7)
    assert position.claimed_step == 7
    position.mark_corrupt()
    assert position.claimed_step == 0
    position.start_heal()
    healing = Healing(max_queued=4).start_fetch(Offer((1,), 8, 1, 5), 1).queue_update(9, 1, 2)
    position.show_heal(healing)
    assert position.claimed_step == 0
    healing = healing.finish_fetch()
    position.show_heal(healing)
    assert position.claimed_step == 9
    position.adopt_state(8, 1)
    position.advance(update(9))
    position.show_heal(healing.mark_loaded().mark_replayed().finish())
    assert (position.claimed_step, position.standing, position.donor) == (9, Standing.READY, -1)


def test_a_round_shows_steps_checkpoints_and_leaving_groups() -> None:
    """The largest values count. A group that is present again has not left."""
    position = Position(step=7, seen_step=7, left={2}, broken_rounds=4)
    position.observe(
        made_of(
            ready(0, seen_step=7, saved_step=5),
            ready(1, seen_step=9, saved_step=6, leaving=1),
            ready(2),
        ),
    )
    assert (position.seen_step, position.saved_step, position.left, position.broken_rounds) == (
        9,
        6,
        {1},
        0,
    )
    assert position.peers == (0, 1, 2)


def test_bytes_that_all_have_shown_are_agreed_on() -> None:
    """They are not if one holder has taken no digest, or at a tie."""
    position = Position(agreed_step=3)
    position.observe(made_of(ready(0), ready(1, digest=0)))
    assert position.agreed_step == 3
    position.observe(made_of(ready(0), ready(1, digest=8)))
    assert position.agreed_step == 3
    position.observe(made_of(ready(0), ready(1)))
    assert position.agreed_step == 7


def test_a_corrupt_group_withdraws_its_checkpoints() -> None:
    """All groups count only the checkpoints up to the last agreement.

    Only the corrupt group withdraws its own.
    """
    rows = (ready(0, digest=8, saved_step=6), ready(1, saved_step=6), ready(2, saved_step=6))
    for rank in (0, 1):
        position = Position(step=7, agreed_step=5)
        position.observe(made_of(*rows, rank=rank))
        assert position.saved_step == 5
        assert (position.corrupt, position.saved_corrupt) == (rank == 0, rank == 0)
    corrupt = Position(step=7, agreed_step=5, corrupt=True, saved_corrupt=True, saved_step=6)
    corrupt.withdraw_saved()
    assert (corrupt.saved_step, corrupt.saved_corrupt, corrupt.claimed_step) == (5, False, 0)


def test_a_checkpoint_of_an_update_that_the_job_goes_back_from_does_not_count() -> None:
    """Another group saves that step. Its writer withdraws it, and no earlier one."""
    rows = [
        ready(0, step=8, saved_step=8, training=1),
        *[ready(slot, training=1, saved_step=5) for slot in (1, 2)],
    ]
    for rank in range(3):
        position = Position(step=rows[rank].step, agreed_step=4, saved_step=rows[rank].saved_step)
        position.observe(made_of(*rows, rank=rank))
        assert (position.saved_step, position.saved_corrupt, position.corrupt) == (
            7,
            rank == 0,
            False,
        )
    position = Position(step=8, agreed_step=4, saved_step=8)
    position.observe(made_of(*rows))
    position.withdraw_saved()
    assert (position.agreed_step, position.saved_step, position.claimed_step) == (7, 7, 8)


def test_a_group_of_another_history_is_not_corrupt() -> None:
    """The job went through its state. If all other groups are lost, this state counts."""
    position = Position(step=7)
    position.observe(made_of(ready(0, lineage=6), ready(1, lineage=5), ready(2, lineage=5)))
    assert not position.corrupt
    assert position.claimed_step == 7


def test_the_others_see_where_a_heal_is() -> None:
    """Once all ranks have the fetched state, the group claims the step after its replay."""
    position = Position(step=7)
    position.start_heal()
    assert (position.standing, position.donor, position.claimed_step) == (Standing.BEHIND, -1, 7)
    healing = Healing(max_queued=4).start_fetch(Offer((1,), 9, 99, 5), 1).let_others_wait()
    position.show_heal(healing)
    assert (position.standing, position.donor, position.from_step) == (Standing.CATCHING_UP, 1, 9)
    assert (position.others_wait, position.claimed_step) == (True, 7)
    healing = healing.queue_update(10, 99, 100).finish_fetch()
    position.show_heal(healing)
    assert (position.others_wait, position.claimed_step) == (False, 10)
    position.show_heal(healing.drop_failed())
    assert (position.standing, position.donor, position.target) == (Standing.BEHIND, -1, 0)
    position.show_heal(healing.mark_loaded().mark_replayed().finish())
    assert (position.standing, position.donor, position.target) == (Standing.READY, -1, 0)


def test_going_back_forgets_what_was_lost() -> None:
    """Otherwise the group would look for a later state that no group has."""
    position = Position(step=5, seen_step=9, standing=Standing.BEHIND)
    position.roll_back()
    assert (position.seen_step, position.standing) == (5, Standing.READY)


def test_exclusions_are_counted_in_a_row() -> None:
    """A step with the group's gradients resets the count."""
    position = Position()
    for slots, count in (([1], 1), ([0, 1], 2), ([0], 0), ([1], 1)):
        position.count_exclusion(slots, own=1)
        assert position.exclusions == count


def test_broken_rounds_are_counted_in_a_row() -> None:
    """A round that works resets the count."""
    position = Position(step=7)
    position.count_broken_round()
    position.count_broken_round()
    assert position.broken_rounds == 2
    position.observe(made_of(ready(0)))
    assert position.broken_rounds == 0
