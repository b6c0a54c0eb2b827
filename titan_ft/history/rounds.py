# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The rounds of a run with a semi-synchronous method: the steps that each group made for them, what came of those."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from titan_ft.history.fold.unit import STEP, Unit
from titan_ft.history.judgement import count
from titan_ft.history.record.run_record import RunRecord, view
from titan_ft.history.record.trajectory import JobState
from titan_ft.run.events import CheckpointLoaded, GradientExcluded, HealFinished, StartedAnew, StepCommitted


@dataclass(frozen=True)
class ShortRound:
    """A round for which not all groups made all of its steps."""

    number: int
    step: int
    """torchtitan's behind it."""
    time: float
    """Unix seconds of its first commit."""
    length: int
    """Steps that a group makes for it."""
    fewer: dict[int, int | None]
    """How many steps each group made that count, of those that made fewer: none where it was away, healed or was left
    out; None where it died behind its exchange, so that no event tells."""

    def describe(self) -> str:
        """Say who made how many."""
        made = (f"group {group}: {'unknown' if steps is None else steps}" for group, steps in self.fewer.items())
        return f"{', '.join(made)} of {self.length}"


@dataclass(frozen=True)
class RecordedRounds:
    """The rounds of a job's trajectory."""

    unit: Unit = STEP
    committed: int = 0
    steps: tuple[tuple[int, int], ...] = ()
    """(group, its own steps that are in the job's state)."""
    short: tuple[ShortRound, ...] = ()

    def describe(self) -> str:
        """Say in a line how many there were, and how many steps of the groups are in them."""
        made = [steps for _, steps in self.steps]
        whole = f"{self.committed:,}, of {count(self.unit.steps, 'step')} each ({self.unit.method})"
        if not made or not self.short:
            return whole
        short = self.unit.count(len(self.short))
        return f"{whole}; {min(made):,} to {max(made):,} steps of a group; not all of them in {short}"


@view
def find_rounds(record: RunRecord) -> RecordedRounds | None:
    """Return the rounds of a run; None where the groups met at each step."""
    unit = record.unit
    if not unit.method:
        return None
    made: Counter[int] = Counter(dict.fromkeys(record.groups, 0))
    short = []
    for state in record.chain:
        length = unit.step_after(state.step) - unit.step_after(state.step - 1)
        events = [event for event in record.commits_of[state.lineage] if event.rank == 0]
        told = {event.replica: event.inner_steps for event in events if event.contributed}
        unknown = dict.fromkeys(state.participants)
        own = {group: {**unknown, **told}.get(group, 0) for group in record.groups}
        made.update({group: steps for group, steps in own.items() if steps})
        fewer = {group: steps for group, steps in own.items() if steps is None or steps < length}
        if fewer:
            short.append(ShortRound(state.step, unit.step_after(state.step), state.time, length, fewer))
    return RecordedRounds(unit, len(record.chain), tuple(sorted(made.items())), tuple(short))


@dataclass(frozen=True)
class PartialRound:
    """What a group made for a round that is in the updates of some fragments only: it began anew before the others'."""

    group: int
    state: JobState
    """The round's."""
    has: int
    """Fragments whose updates have it."""
    of: int
    """Fragments that the group's model had."""


def find_partial(record: RunRecord, chain: Sequence[JobState]) -> list[PartialRound]:
    """Return what groups trained and lost again for some fragments of the model, by the trajectory `chain`.

    Between two exchanges of a fragment its change is a group's own. It is lost where the group dies, leaves, heals or
    goes on from a checkpoint, and where finite data ends the run before the fragment's turn.
    """
    if not record.unit.method:
        return []
    partial = []
    for group in record.groups:
        for life in _lives(record, group, chain):
            unit, end = life.unit, life.end
            if life.is_over and not (unit.last and unit.step_after(end) == unit.last):  # the last round exchanges all
                late = [state for state in life.rounds if state.step + unit.fragments - 1 > end]
                partial += [PartialRound(group, state, end - state.step + 1, unit.fragments) for state in late]
    return partial


@dataclass
class _WeightsSpan:
    """What a group made of the same weights.

    Attributes:
        unit: as its config had it.
        begun: Unix seconds.
        rounds: those that it contributed to.
        end: the last one that has its change; it may have had none but of former rounds.
        is_over: whether it has lost the weights.
    """

    unit: Unit
    begun: float
    rounds: list[JobState] = field(default_factory=list)
    end: int = 0
    is_over: bool = True


def _lives(record: RunRecord, group: int, chain: Sequence[JobState]) -> list[_WeightsSpan]:
    """Return those of a group along a trajectory."""
    lives: list[_WeightsSpan] = []
    able: list[_WeightsSpan] = []  # to contribute: a process that is started again heals first
    life_of: dict[str, _WeightsSpan] = {}  # by the lineage of a round that it tells of
    ended = True
    for process in (one for one in record.processes if (one.replica, one.rank) == (group, 0)):
        ended = process.exit is not None or process.ended_in_order
        lives.append(_WeightsSpan(Unit.of(process.config), process.events[0].time))
        if len(lives) == 1:
            able.append(lives[-1])
        for event in process.events:
            if isinstance(event, HealFinished | CheckpointLoaded | StartedAnew):  # who rolls back keeps its weights
                lives.append(_WeightsSpan(lives[-1].unit, event.time))
                able.append(lives[-1])
            elif isinstance(event, StepCommitted):
                life_of[event.lineage] = lives[-1]
    if lives:
        lives[-1].is_over = ended
    excluded = {(event.step, slot) for event in record.of(GradientExcluded) for slot in event.slots}
    for state in chain:
        life = life_of.get(state.lineage)
        if group in state.participants:
            if life is None:  # it died behind the exchange, or has yet to tell
                life = next((life for life in reversed(able) if life.begun <= state.time), None)
            if life is not None:
                life.rounds.append(state)
        if life is not None and (state.step, group) not in excluded:
            life.end = state.step
    return lives
