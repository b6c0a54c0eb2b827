# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The groups that leave after a round, and the one of them that saves the state.

Without a process, a thread or a clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import pytest

from titan_ft.config import FaultTolerance
from titan_ft.engine import step
from titan_ft.engine.step import ReplicaDimension
from titan_ft.protocol.decision import LastToLeave, find_last_to_leave, may_leave
from titan_ft.protocol.member import Member, Quorum
from titan_ft.protocol.position import Position
from titan_ft.protocol.round import Round
from titan_ft.protocol.row import Row, Standing
from titan_ft.protocol.verdict import judge

STEP = 7


class Told(Enum):
    """The time of a rank's leave request."""

    NOT = auto()
    BEFORE = auto()  # before it sends its row
    AFTER = auto()  # after its row, and before the vote


def ready(slot: int, leaving: bool = False, **facts: Any) -> Row:
    """Return the row of a group that trains."""
    return Row(slot, Standing.READY, STEP, valid_tokens=10, training=1, leaving=leaving, **facts)


def made_of(rows: Sequence[Row], rank: int = 0) -> Round:
    """Return the round of these rows, as the member `rank` sees it."""
    members = tuple(Member(row.slot, 0.0, f"u{row.slot}", "c") for row in rows)
    return Round(
        Quorum("1/q", rank, members, STEP), rows, judge(rows, [[row.slot] for row in rows]), []
    )


class Group:
    """One group in a round: the rows that its ranks read, and the group's decision."""

    def __init__(self, slot: int, columns: Sequence[Sequence[Row]], told: Sequence[Told]) -> None:
        self.slot = slot
        made = [made_of(rows, rank=slot) for rows in columns]
        announced = [
            when is not Told.NOT and may_leave(round_)
            for when, round_ in zip(told, made, strict=True)
        ]
        self.leaves = any(announced)
        positions = [Position(step=STEP, training=True, leaving=self.leaves) for _ in made]
        for position, round_ in zip(positions, made, strict=True):
            position.observe(round_)
        left = set().union(*(position.left for position in positions))
        self.last = (
            {find_last_to_leave(position, left, slot) for position in positions}
            if self.leaves
            else {None}
        )


def play(told: Sequence[Sequence[Told]]) -> list[Group]:
    """Let groups make a round.

    Args:
        told: times of the leave requests, by group and by rank.
    """
    columns = [
        [ready(slot, ranks[number] is Told.BEFORE) for slot, ranks in enumerate(told)]
        for number in range(len(told[0]))
    ]
    return [Group(slot, columns, ranks) for slot, ranks in enumerate(told)]


@pytest.mark.parametrize(("groups", "ranks"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_a_state_stays_or_is_saved(groups: int, ranks: int) -> None:
    """In any order of requests, a group trains on, or the leaving groups agree on the one that
    saves.
    """
    for flat in itertools.product(Told, repeat=groups * ranks):
        told = [flat[slot * ranks : (slot + 1) * ranks] for slot in range(groups)]
        played = play(told)
        assert all(len(group.last) == 1 for group in played), "the ranks of a group part"
        last = {group.slot: group.last.copy().pop() for group in played}
        savers = [
            slot for slot, found in last.items() if found is not None and found.slots[0] == slot
        ]
        stays = any(not group.leaves for group in played)
        assert len(savers) == (not stays), (told, last)
        for found in last.values():
            assert found is None or (found.agreed and not stays)
        # A group that has shown its request leaves. A group without a request stays.
        for group in played:
            if Told.BEFORE in told[group.slot]:
                assert group.leaves
            assert group.leaves <= (set(told[group.slot]) != {Told.NOT})


def test_a_group_whose_request_the_others_have_not_read_makes_another_round() -> None:
    """Both requests came after the rows.

    If both groups left, each would believe that the other trains on.
    """
    assert [group.leaves for group in play([[Told.AFTER], [Told.AFTER]])] == [False, False]
    assert [group.leaves for group in play([[Told.AFTER], [Told.BEFORE]])] == [True, True]
    assert [group.leaves for group in play([[Told.AFTER]])] == [True]


def position_after(*rows: Row, rank: int = 0, **changes: Any) -> Position:
    """Return the position of a group that leaves after a round of these rows."""
    position = Position(step=STEP, training=True, leaving=True)
    position.observe(made_of(rows, rank))
    return replace(position, **changes)


def find(position: Position, own: int = 0) -> LastToLeave | None:
    return find_last_to_leave(position, position.left, own)


def test_a_joiner_is_no_heir() -> None:
    """A joiner trains on only after it has the state.

    The only holder saves, and stays visible meanwhile.
    """
    joiner = Row(1, Standing.CATCHING_UP, 0)
    # The group has loaded a checkpoint. It has yet to begin, and misses the update.
    loaded = Row(1, Standing.READY, STEP)
    for row in (joiner, loaded):
        assert find(position_after(ready(0, leaving=True), row)) == LastToLeave((0,), agreed=True)
    assert may_leave(made_of([ready(0), joiner]))
    assert find(position_after(ready(0), joiner)) == LastToLeave((0,), agreed=True)


def test_a_group_with_another_state_saves_nothing() -> None:
    """Its state is behind, ahead, or has other bytes. So it is not the job's."""
    others = [ready(1, True, digest=5), ready(2, True, digest=5)]
    for own in (
        ready(0, True, digest=6),
        ready(0, True, lineage=3),
        Row(0, Standing.BEHIND, 0, leaving=True),
    ):
        assert find(position_after(own, *others)) is None
        assert find(position_after(own, *others, rank=1), 1) == LastToLeave((1, 2), agreed=True)
    sound = position_after(ready(0, True), ready(1, True))
    assert find(sound) is not None
    assert find(replace(sound, corrupt=True)) is None
    assert find(replace(sound, standing=Standing.BEHIND)) is None


@pytest.mark.parametrize("own", [0, 1, 2])
def test_others_may_train_on_if_they_have_not_read_the_leave_request(own: int) -> None:
    """The last round did not show it: the round broke, or came before a round of several steps."""
    position = position_after(ready(0), ready(1), ready(2), rank=own)
    assert find(position, own) == LastToLeave((0, 1, 2), agreed=False)


def test_a_group_that_has_left_before_is_not_waited_for() -> None:
    """The next group in order takes its place."""
    position = position_after(ready(0, True), ready(1), ready(2), rank=1)
    assert find(position, 1) == LastToLeave((1, 2), agreed=False)


def test_holders_of_the_final_state_count() -> None:
    """Groups that have finished stay for those that lack it, and save it if its writer was lost."""
    finished = [
        Row(slot, Standing.FINISHED, STEP, training=1, leaving=slot == 0) for slot in (0, 1)
    ]
    assert find(position_after(*finished, standing=Standing.FINISHED)) is None


# The turn to save


class Turns:
    """Group 2 of three that leave together, at one look after the other.

    Args:
        living: the groups that live, by look; the last entry is for all later looks.
        saved: the look at which the state is saved first.
        hurry: the look at which this group may wait for others no longer.
        begun: the look at which another group writes the state.
    """

    def __init__(
        self, *living: Collection[int], saved: int = 99, hurry: int = 99, begun: int = 99
    ) -> None:
        self._living, self._saved, self._hurry, self._begun = living, saved, hurry, begun
        self.look, self.has_askers = 0, list[set[int]]()
        rounds: Any = self
        nothing: Any = None
        self.dimension = ReplicaDimension(
            FaultTolerance(replica_id=2, group_size=3),
            position=Position(leaving=True),
            rounds=rounds,
            heal=nothing,
            ledger=nothing,
            group=nothing,
            events=nothing,
            nominal_tokens=1,
            pauses_after=lambda step: True,
        )

    @property
    def must_hurry(self) -> bool:
        return self.look >= self._hurry

    def find_living(self, slots: Collection[int]) -> set[int]:
        self.has_askers.append(set(slots))
        return set(slots).intersection(self._living[min(self.look, len(self._living) - 1)])

    def _pause(self, seconds: float) -> None:
        self.look += 1
        assert self.look < 50, "the wait has no end"

    def wait(self, *slots: int) -> bool:
        last = LastToLeave(slots, agreed=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step.time, "sleep", self._pause)
            return self.dimension.await_turn_to_save(
                last, lambda: self.look >= self._saved, lambda: self.look >= self._begun
            )


def test_the_first_one_saves_at_once() -> None:
    """The first group looks for no other group.

    It saves nothing if a group that left before has saved the state.
    """
    assert (turns := Turns([])).wait(2, 3)
    assert turns.has_askers == []
    assert not Turns([], saved=0).wait(2)


def test_the_others_stay_until_the_state_is_saved() -> None:
    """A living group may be in its save."""
    turns = Turns([0, 1], saved=3)
    assert not turns.wait(0, 1, 2)
    assert turns.look == 3


def test_the_next_one_saves_if_those_before_it_die() -> None:
    """They die one after the other. A group that is gone does not come back for its turn."""
    turns = Turns([0, 1], [1], [0, 1], [0])
    assert turns.wait(0, 1, 2)
    assert turns.has_askers == [{0, 1}, {0, 1}, {1}, {1}]


def test_a_group_that_has_saved_and_left_is_not_taken_for_dead() -> None:
    """The group saved and left right after this group's first look."""
    turns, looks = Turns([0]), list[str]()

    def find_living(slots: Collection[int]) -> set[int]:
        looks.append("who lives")
        return set(slots) if len(looks) == 1 else set()

    def is_saved() -> bool:
        looks.append("the checkpoint")
        return len(looks) > 1

    turns.find_living = find_living  # type: ignore[method-assign]
    assert not turns.dimension.await_turn_to_save(
        LastToLeave((0, 2), agreed=True), is_saved, lambda: False
    )


def test_the_others_wait_no_longer_than_they_may() -> None:
    """The group that saves still lives then."""
    turns = Turns([0], hurry=2, begun=1)
    assert not turns.wait(0, 2)
    assert turns.look == 2


@pytest.mark.parametrize(("before", "look"), [((0,), 4), ((0, 1), 6)])
def test_a_group_saves_if_those_before_it_hang(before: tuple[int, ...], look: int) -> None:
    """They live and have not begun to save. Each of them gets some time for it."""
    turns = Turns(before, hurry=2)
    assert turns.wait(*before, 2)
    assert turns.look == look


def test_a_group_leaves_the_save_to_the_one_that_took_the_turn() -> None:
    """The first group hangs and the second saves. Further writers would only slow it down."""
    turns = Turns([0, 1], hurry=2, begun=4)
    assert not turns.wait(0, 1, 2)
    assert turns.look == 4


def test_a_group_that_is_outside_saves_nothing() -> None:
    """The group left without a round that agreed to it.

    The groups that went on without it have the job's state.
    """
    dimension = Turns([]).dimension
    dimension._position = Position(keepers=(2,))
    assert dimension.find_last_to_leave() is None
    dimension._position = Position(keepers=(2,), leaving=True)
    dimension._group = SimpleNamespace(union=set)  # type: ignore[assignment]  # of one rank
    assert dimension.find_last_to_leave() == LastToLeave((2,), agreed=True)
