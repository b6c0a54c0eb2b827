# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Rework: committed steps that were thrown away and made again, and the reasons.

At a *setback* training goes on from an earlier step than it had reached: a group loads a
checkpoint, or the latest state is lost with its groups. A failure of all groups at once may cause a
setback. Setback after setback without progress breaks promise 4 (`titan_ft.history.checks.work`).

A step is also made twice if its exchange broke for some groups and not for all (`Rework.parted`).

`find_rework` reads the commits and the events of going back in order of time. Each group reports a
setback, so several events may announce the same one (`_SetbackDraft.takes_report`). The report, the
checker of promise 4 and the summary call it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from titan_ft.history.fold.attempt import Attempt
from titan_ft.history.fold.unit import STEP, Unit
from titan_ft.history.record.run_record import RunRecord, once_per_record
from titan_ft.run.events import (
    CheckpointLoaded,
    LaunchStarted,
    RolledBack,
    StartedAnew,
    StepCommitted,
)

MAX_REPETITIONS = 3
"""It is an offence to make a step so often, or to have so many setbacks in a row without progress.
"""
MAX_CLOCK_DIFFERENCE_SECONDS = 1.0
"""The clocks of two hosts may differ by this much."""
_GoesBack = CheckpointLoaded | RolledBack | StartedAnew


@dataclass(frozen=True)
class Setback:
    """A time at which training went back to an earlier step."""

    time: float
    """Unix seconds of the first event that announces it."""
    step: int
    """The step after which training went on."""
    reached: int
    """The step that training had reached."""
    again: tuple[int, ...]
    """The lost steps that were committed again before the next setback."""
    cause: str
    """The ends of the groups, in words."""
    explained: bool
    """True if somebody asked for it: by a new launch, by a request to leave, by an injected
    fault.
    """

    @property
    def num_lost(self) -> int:
        return self.reached - self.step


@dataclass(frozen=True)
class Rework:
    """The committed steps of a run that were thrown away, and the number that was made again."""

    setbacks: tuple[Setback, ...] = ()
    parted: tuple[int, ...] = ()
    """Steps that only some groups had committed; the other groups made them without these."""
    unit: Unit = STEP
    """The unit of all these numbers: steps, or rounds."""
    offences: tuple[tuple[Setback, str], ...] = field(default=(), repr=False)
    """The setbacks at which unexplained rework became too much, with the text of the offence."""

    @property
    def num_lost(self) -> int:
        """Number of committed steps that setbacks threw away."""
        return sum(setback.num_lost for setback in self.setbacks)

    @property
    def num_again(self) -> int:
        """Number of lost steps that were made again; a step that was made three times counts
        twice.
        """
        return sum(len(setback.again) for setback in self.setbacks)

    def describe(self) -> str:
        """Return a line about the rework and its reason; empty if there was none."""
        parts = []
        if self.setbacks:
            parts.append(self._describe_setbacks())
        if self.parted:
            steps = self._count_were(len(self.parted))
            parts.append(f"{steps} made again that only some groups had committed")
        return "; ".join(parts)

    def _describe_setbacks(self) -> str:
        first = self.setbacks[0]
        steps = self._count_were(self.num_lost)
        if self.num_again == self.num_lost:
            text = f"{steps} made again"
        else:
            text = f"{steps} thrown away, {self.num_again} made again"
        times = ""
        if len(self.setbacks) > 1:
            times = f" {len(self.setbacks)} times, first"
        where = f"from {self.unit.noun} {first.reached} to {first.step}"
        return f"{text}: training went back{times} {where} ({first.cause})"

    def _count_were(self, number: int) -> str:
        verb = "were"
        if number == 1:
            verb = "was"
        return f"{self.unit.count(number)} {verb}"

    def to_dict(self) -> dict[str, Any]:
        """Return the rework as plain values for JSON."""
        figures = asdict(self)
        figures["num_lost"] = self.num_lost
        figures["num_again"] = self.num_again
        figures["text"] = self.describe()
        figures["unit"] = self.unit.noun
        figures["offences"] = [text for _, text in self.offences]
        return figures


@once_per_record
def find_rework(record: RunRecord) -> Rework:
    """Return the rework of a run."""
    setbacks = _find_setbacks(record)
    lost_by_setbacks: set[str] = set()
    for setback in setbacks:
        for state in record.states.values():
            is_undone = setback.step < state.step <= setback.reached
            if is_undone and state.time <= setback.time:
                lost_by_setbacks.add(state.lineage)
    parted: set[int] = set()
    if record.states:
        for lineage in record.void_lineages - lost_by_setbacks:
            parted.add(record.states[lineage].step)
    offences = _find_offences(setbacks, record.unit.noun)
    return Rework(tuple(setbacks), tuple(sorted(parted)), record.unit, tuple(offences))


@dataclass
class _SetbackDraft:
    """A setback whose consequences are not known yet."""

    time: float
    step: int
    reached: int
    last_commit: float
    """Time of the last commit before the setback."""
    reported_by: set[int]
    """The groups that announced the setback."""
    made: dict[int, float] = field(default_factory=dict)
    """Time of the first new commit of each step since the setback."""

    def takes_report(self, event: _GoesBack, step: int) -> bool:
        """Return whether an event of another group announces this setback; if so, note the group.

        A group reports a setback once. A report long after the first new commit is about another
        setback: only clocks that differ explain a short delay.
        """
        if step != self.step or event.replica in self.reported_by:
            return False
        first_commit = min(self.made.values(), default=event.time)
        if event.time - first_commit > MAX_CLOCK_DIFFERENCE_SECONDS:
            return False
        self.reported_by.add(event.replica)
        return True


def _find_setbacks(record: RunRecord) -> list[Setback]:
    """Return the setbacks in order of time."""
    found = []
    time_before = 0.0
    for draft in _draft_setbacks(record):
        made_again = [step for step in draft.made if draft.step < step <= draft.reached]
        cause, explained = _explain(record, time_before, draft.last_commit, draft.time)
        setback = Setback(
            time=draft.time,
            step=draft.step,
            reached=draft.reached,
            again=tuple(sorted(made_again)),
            cause=cause,
            explained=explained,
        )
        found.append(setback)
        time_before = draft.time
    return found


def _draft_setbacks(record: RunRecord) -> list[_SetbackDraft]:
    """Return the setbacks in order of time, without their causes."""
    going_back = record.of(CheckpointLoaded, RolledBack, StartedAnew)
    if not going_back:
        return []
    # Training may go back over steps that were not usual, and make them again as usual steps: the
    # first commits of usual steps belong to the sequence.
    events: list[Any] = [*going_back, *record.commits, *record.usual_commits]
    events.sort(key=lambda event: event.time)
    drafts: list[_SetbackDraft] = []
    reached = 0
    last_commit = record.begin
    known_lineages: set[str] = set()
    for event in events:
        if isinstance(event, StepCommitted):
            last_commit = event.time
            if event.lineage not in known_lineages:
                known_lineages.add(event.lineage)
                reached = max(reached, event.step)
                if drafts:
                    drafts[-1].made.setdefault(event.step, event.time)
            continue
        if event.rank != 0:
            continue
        step = _find_step_to_go_on(event, record.unit)
        if step >= reached:
            continue  # no step was lost
        if drafts and drafts[-1].takes_report(event, step):
            continue
        drafts.append(_SetbackDraft(event.time, step, reached, last_commit, {event.replica}))
        reached = step
    return drafts


def _find_step_to_go_on(event: _GoesBack, unit: Unit) -> int:
    """Return the step (or round) after which training goes on.

    The step of a checkpoint is always torchtitan's, also if the job counts rounds.
    """
    if isinstance(event, CheckpointLoaded):
        return unit.commits_after(event.step)
    return event.step


def _explain(
    record: RunRecord, time_before: float, last_commit: float, time: float
) -> tuple[str, bool]:
    """Return why training went back at `time`, and whether that was requested.

    Args:
        time_before: time of the setback before; earlier ends explain that setback.
        last_commit: time of the last commit before this setback.
    """
    for launch in record.of(LaunchStarted):
        if last_commit < launch.time <= time:
            return "a new launch", True
    ended: dict[int, Attempt] = {}
    for slot, attempts in record.attempts.items():
        for attempt in attempts:
            if time_before < _find_end(attempt, attempts, time) <= time:
                ended[slot] = attempt
    groups_of: dict[str, list[int]] = {}
    is_explained = False
    for slot, attempt in ended.items():
        was_asked = attempt.drained_us is not None
        if was_asked or attempt.fault is not None:
            is_explained = True
        if attempt.why_ended:
            why = attempt.why_ended
        elif was_asked:
            why = "left"
        else:
            why = "ended"
        groups_of.setdefault(why, []).append(slot)
    if not groups_of:
        return "no event tells why", is_explained
    texts = [f"{_name_groups(groups)}: {why}" for why, groups in groups_of.items()]
    return ", ".join(texts), is_explained


def _find_end(attempt: Attempt, attempts: Sequence[Attempt], time: float) -> float:
    """Return when an attempt ended, in Unix seconds; infinite if it had not ended by `time`."""
    if attempt.exit_us is not None:
        return attempt.exit_us / 1e6
    for later in attempts:
        # No event reports the end; the next attempt of the group proves it.
        if later.number > attempt.number and later.begin_us <= time * 1e6:
            return attempt.last_us / 1e6
    return float("inf")


def _find_offences(setbacks: Iterable[Setback], noun: str) -> Iterator[tuple[Setback, str]]:
    """Yield the unexplained setbacks at which rework became too much; each kind of offence once."""
    num_makings = Counter[int]()
    in_a_row = 0
    furthest = 0
    has_gone_back = False
    has_made_again = False
    for setback in setbacks:
        if setback.reached > furthest:
            # Training had made progress since the setback before.
            in_a_row = 1
            furthest = setback.reached
        else:
            in_a_row += 1
        if setback.explained:
            in_a_row = 0
            continue
        num_makings.update(setback.again)
        if in_a_row >= MAX_REPETITIONS and not has_gone_back:
            has_gone_back = True
            text = f"training went back {in_a_row} times in a row without getting beyond"
            yield setback, f"{text} {noun} {furthest} ({setback.cause})"
        # `num_makings` does not have the first time that a step was made.
        often = [step for step, number in num_makings.items() if number + 1 >= MAX_REPETITIONS]
        if often and not has_made_again:
            has_made_again = True
            steps = f"{noun} {often[0]} was"
            if len(often) > 1:
                steps = f"{noun}s {min(often)} to {max(often)} were"
            yield setback, f"{steps} made {MAX_REPETITIONS} times: {setback.cause}"


def _name_groups(slots: Sequence[int]) -> str:
    noun = "group" if len(slots) == 1 else "groups"
    return f"{noun} {', '.join(map(str, slots))}"
