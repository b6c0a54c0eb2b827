# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The rounds of a run with a semi-synchronous method: how many steps each group made for them, and who made fewer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from titan_ft.history.checks.judgement import count
from titan_ft.history.record import RunRecord, view
from titan_ft.history.unit import STEP, Unit


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
