# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Promise 5: a group that comes back catches up while the others train on."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median

from titan_ft.history.attempts import seconds_of
from titan_ft.history.checks.foundation import clock_jumped
from titan_ft.history.checks.judgement import Judgement, count
from titan_ft.history.record import Process, RunRecord
from titan_ft.run.events import (
    CatchUpWaiting,
    Drained,
    Event,
    ExchangeFailed,
    FaultInjected,
    HealFailed,
    HealFinished,
    HealStarted,
    Hung,
    Joined,
    LighthouseRestarted,
    StepCommitted,
    Waiting,
    WorkerExited,
)

LONG_STEPS = 4
"""Usual steps that a heal must last to show anything; what a shorter one could stall is no more than that."""
LEAST_RATE = 0.5
"""Share of the usual rate of commits that the others must keep, over all heals together."""
LEAST_RATE_OF_ONE = 0.25
"""The same for one heal by itself, of `TELLING_STEPS` usual steps or more."""
TELLING_STEPS = 10
DISTURBANCES: tuple[type[Event], ...] = (
    ExchangeFailed,
    WorkerExited,
    FaultInjected,
    LighthouseRestarted,
    Hung,
    Drained,
)
"""They have costs of their own, which are not the joiner's."""


@dataclass(frozen=True)
class _Heal:
    """One heal of a group, and what the others did meanwhile.

    `commits` of the group that made most of them, `longest` seconds between two of them. `clean` if nothing else
    happened.
    """

    event: Event
    start: float
    end: float
    commits: int
    longest: float
    compute: tuple[float, ...]
    clean: bool


def check_joiner(record: RunRecord, found: Judgement) -> None:
    """Check that the others committed while groups healed, at no less than half of their usual rate.

    The usual time of a step is `RunRecord.usual_step_us`, longer by as much as the steps' computing took
    longer during the heals: a joiner on the same machine takes its share of it, and that is no wait. A group that asks
    the others to wait says so (`catch_up_waiting`).
    """
    if any(process.config is not None and process.config.catch_up == "wait" for process in record.processes):
        found.asked = False
        found.statement = 'not asked: the others wait for a joiner, as fault_tolerance.catch_up = "wait" says'
        return
    _check_waits(record, found)
    stage, usual = _Stage(record), record.usual_step_seconds
    heals = [heal for process in record.processes if process.rank == 0 for heal in stage.heals(process)]
    if clock_jumped(record):
        found.unknown.append("the wall clock jumped")
        return
    if not heals or usual is None:
        found.statement = "no group had to catch up while others trained"
        return
    longest = max(heal.longest for heal in heals)
    scale = usual * _slowdown(heals, stage.compute)
    long = [heal for heal in heals if heal.end - heal.start >= LONG_STEPS * scale]
    if not long:
        found.statement = (
            f"{count(len(heals), 'heal')}, none longer than {LONG_STEPS} steps: nobody could wait for long"
        )
        return
    clean = [heal for heal in long if heal.clean]
    rate = _rate(long, scale)
    share = f"{rate:.0%} of their usual rate during {count(len(long), 'heal')}"
    found.statement = f"others committed at {share}, longest step {longest:.2f} s (usual {usual:.2f} s)"
    for heal in clean:
        expected = (heal.end - heal.start) / scale
        if expected >= TELLING_STEPS and heal.commits < LEAST_RATE_OF_ONE * expected:
            text = (
                f"others committed {count(heal.commits, 'step')} during its heal, {expected:.0f} are usual in that time"
            )
            found.object_to(text, heal.event)
    if found.offences or rate >= LEAST_RATE:
        return
    if sum(heal.end - heal.start for heal in clean) >= 2 * LONG_STEPS * scale and _rate(clean, scale) < LEAST_RATE:
        found.object_to(f"others committed at {share}", clean[0].event)
    else:
        found.unknown.append("other failures during the heals hide what the joiners cost")


def _rate(heals: Sequence[_Heal], scale: float) -> float:
    """Return commits during heals / those that are usual in that time."""
    return sum(heal.commits for heal in heals) / (sum(heal.end - heal.start for heal in heals) / scale)


def _slowdown(heals: Sequence[_Heal], usual: float | None) -> float:
    """Return how much longer the others' own computing took during heals; 1 if unknown."""
    seconds = [value for heal in heals for value in heal.compute]
    return max(1.0, median(seconds) / usual) if seconds and usual else 1.0


class _Stage:
    """Who committed when, and what happened beside it."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._commits = {id(process): list(process.commits()) for process in record.processes if process.rank == 0}
        self._times = {key: [event.time for event in events] for key, events in self._commits.items()}
        self._spans = sorted(self._disturbed())

    @cached_property
    def compute(self) -> float | None:
        """Return the median time that a step's own computing took, or None without any."""
        seconds = [event.compute_seconds for commits in self._commits.values() for event in commits]
        return median(seconds) if seconds else None

    def heals(self, process: Process) -> Iterator[_Heal]:
        """Yield the heals of a process, at least one other group training on from before to after."""
        begun: HealStarted | None = None
        joined: float | None = None  # until its first commit the others may wait for it since then
        for event in process.events:
            if isinstance(event, Joined) and joined is None:
                joined = event.time
            elif isinstance(event, HealStarted):
                begun = event
            elif isinstance(event, HealFinished | HealFailed) and begun is not None:
                heal = self._heal(process, begun, joined or begun.time, event.time)
                begun, joined = None, event.time
                if heal is not None:
                    yield heal
            elif isinstance(event, StepCommitted):
                joined = event.time

    def _heal(self, process: Process, event: Event, since: float, end: float) -> _Heal | None:
        start = min(since, event.time)
        best: _Heal | None = None
        for other in self._record.processes:
            times = self._times.get(id(other), [])
            first, last = bisect_right(times, start), bisect_right(times, end)
            if other.replica == process.replica or first == 0 or last == len(times):
                continue  # it did not live through it
            around = times[first - 1 : last + 1]
            longest = max(after - before for before, after in pairwise(around))
            if best is None or last - first > best.commits:
                made = self._commits[id(other)][first:last]
                compute = tuple(commit.compute_seconds for commit in made)
                best = _Heal(event, start, end, last - first, longest, compute, not self._hits(start, end))
        return best

    def _hits(self, start: float, end: float) -> bool:
        upto = bisect_left(self._spans, (end, end))
        return any(until >= start for _, until in self._spans[:upto])

    def _disturbed(self) -> Iterator[tuple[float, float]]:
        """Yield from when to when something else may have cost time."""
        for event in self._record.of(*DISTURBANCES):
            yield event.time, event.time + (seconds_of(event) if isinstance(event, FaultInjected) else 0.0)
        for event in self._record.of(Waiting):
            if not _waits_for_joiner(event):
                yield event.time, event.time


def _waits_for_joiner(event: Waiting) -> bool:
    return "fetch the state" in event.reason


def _check_waits(record: RunRecord, found: Judgement) -> None:
    """Object to a wait for a joiner that did not ask for it. Counts all such events, whenever they were."""
    asked = {event.replica for event in record.of(CatchUpWaiting)}
    waits = [event for event in record.of(Waiting) if _waits_for_joiner(event)]
    for event in waits if not asked else []:
        found.object_to(f"waited for a joiner that did not ask for it: {event.reason}", event)
    if asked:
        steps = len({event.step for event in waits})
        found.notes.append(f"groups {sorted(map(str, asked))} asked the others to wait, for {count(steps, 'step')}")
