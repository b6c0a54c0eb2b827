# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Rework: committed steps that were thrown away and made again, and why.

A *setback* is a time at which training said that it goes on from an earlier step than the one that it had reached: a
checkpoint is loaded, or the latest state is lost with its groups. A failure of all groups at once may cost that, but
not again and again. Besides, a step is made twice where its exchange broke for some groups and not for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from titan_ft.history.fold.attempt import Attempt
from titan_ft.history.fold.unit import STEP, Unit
from titan_ft.history.record.run_record import RunRecord, view
from titan_ft.run.events import CheckpointLoaded, LaunchStarted, RolledBack, StartedAnew, StepCommitted

AGAIN_AND_AGAIN = 3
"""A step that is made so often, and so many setbacks in a row that lead nowhere, are no accident any more."""
CLOCK_SECONDS = 1.0
"""By which the clocks of hosts may differ."""


@dataclass(frozen=True)
class Setback:
    """A time at which training went back to an earlier step."""

    time: float
    """Unix seconds of the first event that says so."""
    step: int
    """That training went on from."""
    reached: int
    """That it had reached."""
    again: tuple[int, ...]
    """Steps from there that were committed again since then, up to the next setback."""
    cause: str
    """What had ended the groups, in words."""
    explained: bool
    """Whether it was asked for or injected: by a new launch, by leaving in order, by a fault of a campaign."""

    @property
    def num_lost(self) -> int:
        return self.reached - self.step


@dataclass(frozen=True)
class Rework:
    """The committed steps of a run that were thrown away, and how many of them were made again."""

    setbacks: tuple[Setback, ...] = ()
    parted: tuple[int, ...] = ()
    """Steps that only a part of the groups had committed, so that the others made them without it."""
    unit: Unit = STEP
    """What all of these count: steps, or rounds."""
    offences: tuple[tuple[Setback, str], ...] = field(default=(), repr=False)
    """What was made again and again for no reason that is known, and the setback at which it was too much."""

    @property
    def num_lost(self) -> int:
        """Return how many committed steps setbacks threw away."""
        return sum(setback.num_lost for setback in self.setbacks)

    @property
    def num_again(self) -> int:
        """Return how many of them were made again; a step that was made three times counts twice."""
        return sum(len(setback.again) for setback in self.setbacks)

    def describe(self) -> str:
        """Say in a line how much was done again, and why; empty if nothing was."""
        parts = []
        if self.setbacks:
            first, lost, again = self.setbacks[0], self.num_lost, self.num_again
            times = "" if len(self.setbacks) == 1 else f" {len(self.setbacks)} times, first"
            what = self._were(lost)
            what = f"{what} made again" if again == lost else f"{what} thrown away, {again} made again"
            where = f"from {self.unit.noun} {first.reached} to {first.step}"
            parts.append(f"{what}: training went back{times} {where} ({first.cause})")
        if self.parted:
            parts.append(f"{self._were(len(self.parted))} made again that only some groups had committed")
        return "; ".join(parts)

    def _were(self, number: int) -> str:
        return f"{self.unit.count(number)} {'was' if number == 1 else 'were'}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        counts = {"num_lost": self.num_lost, "num_again": self.num_again, "text": self.describe()}
        figures = asdict(self) | counts | {"unit": self.unit.noun}
        figures["offences"] = [text for _, text in self.offences]
        return figures


@view
def find_rework(record: RunRecord) -> Rework:
    """Return what a run did again."""
    setbacks = list(_find_setbacks(record))
    covered = {
        state.lineage
        for setback in setbacks
        for state in record.states.values()
        if state.time <= setback.time and setback.step < state.step <= setback.reached
    }
    parted = sorted({record.states[lineage].step for lineage in record.void - covered} if record.states else ())
    return Rework(tuple(setbacks), tuple(parted), record.unit, tuple(_find_offences(setbacks, record.unit.noun)))


def _find_setbacks(record: RunRecord) -> Iterator[Setback]:
    """Yield the setbacks in order of time."""
    restarts = record.of(CheckpointLoaded, RolledBack, StartedAnew)
    if not restarts:
        return
    # Training may go back over steps that were not usual, and make them again as usual.
    commits = [*record.commits, *record.firsts]
    events: list[Any] = sorted([*restarts, *commits], key=lambda event: event.time)
    opened: list[_SetbackDraft] = []
    step, last_commit = 0, record.begin
    known: set[str] = set()
    for event in events:
        if isinstance(event, StepCommitted):
            last_commit = event.time
            if event.lineage not in known:
                known.add(event.lineage)
                step = max(step, event.step)
                for one in opened[-1:]:
                    one.made.setdefault(event.step, event.time)
            continue
        after = _goes_on_from(event, record.unit)
        if after < step and not event.rank and not (opened and opened[-1].is_told_by(event, after)):
            opened.append(_SetbackDraft(event.time, after, step, last_commit, {event.replica}))
            step = after
    before = 0.0
    for one in opened:
        again = tuple(sorted(step for step in one.made if one.step < step <= one.reached))
        yield Setback(one.time, one.step, one.reached, again, *_explain(record, before, one.last_commit, one.time))
        before = one.time


def _goes_on_from(event: CheckpointLoaded | RolledBack | StartedAnew, unit: Unit) -> int:
    """Return the step, or round, after which training goes on. A checkpoint's step is torchtitan's in any case."""
    return unit.commits_after(event.step) if isinstance(event, CheckpointLoaded) else event.step


@dataclass
class _SetbackDraft:
    """A setback of which it is still to be seen what followed."""

    time: float
    step: int
    reached: int
    last_commit: float
    """Time of the last commit before."""
    told_by: set[int]
    made: dict[int, float] = field(default_factory=dict)
    """When each step was committed anew since then, first."""

    def is_told_by(self, event: Any, step: int) -> bool:
        """Take in an event about it by another group, whose clock may be late; says whether it is one."""
        late = event.time - min(self.made.values(), default=event.time) > CLOCK_SECONDS
        if step != self.step or event.replica in self.told_by or late:
            return False
        self.told_by.add(event.replica)
        return True


def _explain(record: RunRecord, before: float, last_commit: float, time: float) -> tuple[str, bool]:
    """Return what had ended the groups when training went back at `time`, and whether that was asked for or injected.

    Args:
        before: time of the setback before; what ended groups earlier explains that one.
        last_commit: time of the last commit before this one.
    """
    if any(last_commit < event.time <= time for event in record.of(LaunchStarted)):
        return "a new launch", True
    ended = {}
    for replica, attempts in record.attempts.items():
        over = [each for each in attempts if before < _end(each, attempts, time) <= time]
        if over:
            ended[replica] = over[-1]
    causes: dict[str, list[int]] = {}
    for replica, attempt in ended.items():
        causes.setdefault(attempt.cause or ("left" if attempt.drained_us else "ended"), []).append(replica)
    text = ", ".join(f"{_groups(replicas)}: {cause}" for cause, replicas in causes.items())
    asked = any(attempt.fault is not None or attempt.drained_us is not None for attempt in ended.values())
    return text or "no event tells why", asked


def _end(attempt: Attempt, attempts: Sequence[Attempt], time: float) -> float:
    """Return when an attempt ended, Unix seconds; infinite if it had not by `time`."""
    if attempt.exit_us is not None:
        return attempt.exit_us / 1e6
    replaced = any(each.number > attempt.number and each.begin_us <= time * 1e6 for each in attempts)
    return attempt.last_us / 1e6 if replaced else float("inf")


def _find_offences(setbacks: Iterable[Setback], noun: str) -> Iterator[tuple[Setback, str]]:
    """Yield what was made again and again, of setbacks for which nobody asked."""
    times = Counter[int]()
    in_a_row, furthest = 0, 0
    told = set[str]()
    for setback in setbacks:
        in_a_row = 1 if setback.reached > furthest else in_a_row + 1
        furthest = max(furthest, setback.reached)
        if setback.explained:
            in_a_row = 0
            continue
        times.update(setback.again)
        if in_a_row >= AGAIN_AND_AGAIN and "back" not in told:
            told.add("back")
            text = f"training went back {in_a_row} times in a row without getting beyond {noun} {furthest}"
            yield setback, f"{text} ({setback.cause})"
        often = [step for step, number in times.items() if number + 1 >= AGAIN_AND_AGAIN]
        if often and "made" not in told:
            told.add("made")
            which = f"{noun}s {min(often)} to {max(often)} were" if len(often) > 1 else f"{noun} {often[0]} was"
            yield setback, f"{which} made {AGAIN_AND_AGAIN} times: {setback.cause}"


def _groups(replicas: Sequence[int]) -> str:
    return ("group " if len(replicas) == 1 else "groups ") + ", ".join(map(str, replicas))
