# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The rounds of a run with a semi-synchronous method: the steps that each group made for them, what came of those."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titan_ft.history.checks.judgement import count
from titan_ft.history.record import Healed, RunRecord, view
from titan_ft.history.trajectory import State
from titan_ft.history.unit import STEP, Unit
from titan_ft.run.events import StepCommitted


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
class Rounds:
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
def find_rounds(record: RunRecord) -> Rounds | None:
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
    return Rounds(unit, len(record.chain), tuple(sorted(made.items())), tuple(short))


@dataclass(frozen=True)
class Partial:
    """What a group made for a round that is in the updates of some fragments only: it began anew before the others'."""

    group: int
    state: State
    """The round's."""
    has: int
    """Fragments whose updates have it."""
    of: int
    """Fragments that the group's model had."""


def find_partial(record: RunRecord, chain: Sequence[State]) -> list[Partial]:
    """Return what groups trained and lost again for some fragments of the model, by the trajectory `chain`.

    Between two exchanges of a fragment its change is a group's own. It is lost where the group dies, leaves, heals or
    goes on from a checkpoint, and where finite data ends the run before the fragment's turn.
    """
    if not record.unit.method:
        return []
    last, partial = record.unit.last, []
    for group in record.groups:
        for life in _lives(record, group, chain):
            end = life.rounds[-1].step
            if life.is_over and not (last and record.unit.step_after(end) == last):  # the last round exchanges all
                late = [state for state in life.rounds if state.step + life.fragments - 1 > end]
                partial += [Partial(group, state, end - state.step + 1, life.fragments) for state in late]
    return partial


@dataclass(frozen=True)
class _Life:
    """The rounds in a row that a group contributed to with the same weights, and whether it has lost those."""

    rounds: Sequence[State]
    fragments: int
    is_over: bool


def _lives(record: RunRecord, group: int, chain: Sequence[State]) -> Iterator[_Life]:
    """Yield those of a group along a trajectory."""
    life_of: dict[str, int] = {}  # by the lineage of a round that it tells of
    fragments = [1]  # of each
    ended = False
    for process in (one for one in record.processes if (one.replica, one.rank) == (group, 0)):
        ended = process.exit is not None or process.ended_in_order
        fragments.append(Unit.of(process.config).fragments)
        for event in process.events:
            if isinstance(event, Healed):
                fragments.append(fragments[-1])
            elif isinstance(event, StepCommitted) and event.contributed:
                life_of[event.lineage] = len(fragments) - 1
    rounds: list[State] = []
    known = 0  # the life of the last round that the group tells of
    for state, following in zip(chain, [*chain[1:], None], strict=True):
        if group not in state.participants:
            continue
        rounds.append(state)
        life = life_of.get(state.lineage)  # none if it died behind the exchange
        known = known if life is None else life
        if following is None:
            is_over = life != len(fragments) - 1 or ended
        else:
            is_over = life is None or group not in following.participants
            is_over = is_over or life_of.get(following.lineage, life) != life
        if is_over or following is None:
            yield _Life(rounds, fragments[known], is_over)
            rounds = []
