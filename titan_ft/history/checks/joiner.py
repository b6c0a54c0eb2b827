# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Promise 5: a group that comes back catches up while the others train on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from titan_ft.history.attempts import seconds_of
from titan_ft.history.checks.foundation import clock_jumps, object_to_absence
from titan_ft.history.checks.judgement import Judgement, count
from titan_ft.history.record import ProcessHistory, RunRecord
from titan_ft.run import events as ev

LONG_STEPS = 4
"""Usual steps that a heal must last to show anything; what a shorter one could stall is no more than that. In a round
of several steps, those that others may wait."""
LEAST_RATE = 0.5
"""Share of the usual rate of commits that the others must keep, over all heals together."""
LEAST_RATE_OF_ONE = 0.25
"""The same for one heal by itself, of `TELLING_STEPS` usual steps or more."""
TELLING_STEPS = 10
DISTURBANCES: tuple[type[ev.Event], ...] = (
    ev.ExchangeFailed,
    ev.WorkerExited,
    ev.AgentEnded,
    ev.FaultInjected,
    ev.LighthouseRestarted,
    ev.Hung,
    ev.Drained,
)
"""They have costs of their own, which are not the joiner's."""


@dataclass(frozen=True)
class _Heal:
    """One heal of a group, and what the others did meanwhile.

    `around` are the commits of the group that made most of them, with the last before and the first after;
    `disturbances` are from when to when other failures fell into it.
    """

    event: ev.HealStarted
    start: float
    end: float
    around: Sequence[ev.StepCommitted]
    disturbances: Sequence[tuple[float, float]]

    @property
    def commits(self) -> Sequence[ev.StepCommitted]:
        return self.around[1:-1]

    def calm(self, usual: float) -> tuple[float, int]:
        """Return the seconds in which nothing else had failed, and the commits in them.

        Another failure has its own cost, up to the next commit, for which `TELLING_STEPS` usual steps are enough.
        """
        seconds, commits, done = 0.0, 0, self.start
        for begin, end in (*sorted(self.disturbances), (self.end, self.end)):
            if begin > done:
                seconds += begin - done
                commits += sum(done < commit.time <= begin for commit in self.commits)
            behind = next((commit.time for commit in self.around if commit.time >= end), self.end)
            done = min(max(done, behind if behind - end <= TELLING_STEPS * usual else end), self.end)
        return seconds, commits


def check_joiner(record: RunRecord, found: Judgement) -> None:
    """Check that the others committed while groups healed, at no less than half of their usual rate.

    The usual time of a step is `RunRecord.usual_step_us`, longer by as much as the computing of each step's slowest
    group took longer during the heals: a joiner on the same machine takes its share of it, as others that start do, and
    that is no wait. A group that asks
    the others to wait says so (`catch_up_waiting`). Of rounds of several steps see `_check_rounds`.
    """
    if any(process.config is not None and process.config.catch_up == "wait" for process in record.processes):
        found.asked = False
        found.statement = 'not asked: the others wait for a joiner, as fault_tolerance.catch_up = "wait" says'
        return
    _check_waits(record, found)
    heals, usual = list(_find_heals(record)), record.usual_step_seconds
    if clock_jumps(record):
        found.unknown.append("the wall clock jumped")
        return
    if not heals or usual is None:
        found.statement = "no group had to catch up while others trained"
        return
    if record.unit.steps > 1:
        _check_rounds(heals, record, found)
        return
    longest = max(after.time - before.time for heal in heals for before, after in pairwise(heal.around))
    spans = [_span(heal, usual * slowdown) for heal, slowdown in zip(heals, _slowdowns(heals, record), strict=True)]
    long = [span for span in spans if span.expected >= LONG_STEPS]
    if not long:
        found.statement = (
            f"{count(len(heals), 'heal')} beside a group that trained on throughout, none longer than {LONG_STEPS} "
            "steps without another failure: nobody could wait for long"
        )
        return
    clean = [span for span in long if not span.heal.disturbances]
    rate = _rate(long)
    share = f"{rate:.0%} of their usual rate during {count(len(long), 'heal')}"
    found.statement = f"others committed at {share}, longest step {longest:.2f} s (usual {usual:.2f} s)"
    for span in clean:
        if span.expected >= TELLING_STEPS and span.commits < LEAST_RATE_OF_ONE * span.expected:
            text = f"others committed {count(span.commits, 'step')} during its heal, "
            text = f"{text}{span.expected:.0f} are usual in that time"
            object_to_absence(record, found, text, span.heal.event)
    if found.offences or rate >= LEAST_RATE:
        return
    if sum(span.expected for span in clean) >= 2 * LONG_STEPS and _rate(clean) < LEAST_RATE:
        object_to_absence(record, found, f"others committed at {share}", clean[0].heal.event)
    else:
        found.unknown.append("other failures during the heals hide what the joiners cost")


def _check_rounds(heals: Sequence[_Heal], record: RunRecord, found: Judgement) -> None:
    """Check that nobody waited for a joiner by more than `LONG_STEPS` of torchtitan's steps.

    A heal is short beside a round, so that the rate of commits tells nothing. What does is the time from the end of a
    group's own steps to the commit: it waits then for those that come to the exchange later. In a round with a heal it
    may be longer than the usual one by a few steps, as the joiner ends the step that it is in. What they waited before
    the joiner was there, while a fault lasted, or beside it while it waited too, they did not wait for it.
    """
    usual = median(commit.exchange_seconds for commit in record.commits)
    step = median(commit.compute_seconds / (commit.inner_steps or record.unit.steps) for commit in record.commits)
    disturbed, longest = list(_disturbances(record)), 0.0
    waits = {(commit.replica, commit.lineage): commit.exchange_seconds for commit in record.commits if not commit.rank}
    for heal in heals:
        begin, end = heal.start, heal.around[-1].time
        clean = not any(since <= end and until >= begin for since, until in disturbed)
        for after in heal.around[1:]:
            own = after.compute_seconds / (after.inner_steps or record.unit.steps)
            first = max(after.time - after.exchange_seconds, begin)
            there = after.time - waits.get((heal.event.replica, after.lineage), 0.0)
            waited = _undisturbed_seconds(first, there, disturbed)
            longest = max(longest, waited)
            if waited <= usual + LONG_STEPS * max(step, own):
                continue
            text = f"others waited {waited:.2f} s for it at the end of round {after.step}, {usual:.2f} s are usual"
            if clean:
                object_to_absence(record, found, text, heal.event)
            else:
                found.unknown.append(f"{text}: other failures during the heal hide what the joiner cost")
    found.statement = (
        f"others waited {longest:.2f} s at most for a joiner, at the end of rounds with {count(len(heals), 'heal')} "
        f"(usual {usual:.2f} s, a step takes {step:.2f} s)"
    )


def _undisturbed_seconds(first: float, last: float, disturbed: Sequence[tuple[float, float]]) -> float:
    """Return how much of a time is in none of the `disturbed` ones."""
    seconds = 0.0
    for since, until in sorted(disturbed):
        if until > first:
            seconds += max(min(since, last) - first, 0.0)
            first = until
    return seconds + max(last - first, 0.0)


@dataclass(frozen=True)
class _Span:
    """The part of a heal in which nothing else had failed: commits in it, and those that are usual in that time."""

    heal: _Heal
    commits: int
    expected: float


def _span(heal: _Heal, usual: float) -> _Span:
    seconds, commits = heal.calm(usual)
    return _Span(heal, commits, seconds / usual)


def _rate(spans: Sequence[_Span]) -> float:
    """Return commits during heals / those that are usual in that time; what other failures cost is left out."""
    return sum(span.commits for span in spans) / sum(span.expected for span in spans)


def _slowdowns(heals: Sequence[_Heal], record: RunRecord) -> Iterator[float]:
    """Yield for each heal how much longer computing took, that of each step's slowest group, for which all wait."""
    slowest: dict[str, float] = {}
    for commit in record.commits:
        slowest[commit.lineage] = max(slowest.get(commit.lineage, 0.0), commit.compute_seconds)
    usual = median(slowest.values())
    for heal in heals:
        seconds = median(slowest[commit.lineage] for commit in heal.around[1:])
        yield max(1.0, seconds / usual) if usual else 1.0


def _find_heals(record: RunRecord) -> Iterator[_Heal]:
    """Yield the heals of groups, at least one other group training on from before to after."""
    commits = {id(process): list(process.commits()) for process in record.processes if process.rank == 0}
    disturbed = list(_disturbances(record))
    for process in record.processes:
        others = [commits[id(each)] for each in record.processes if each.rank == 0 and each.replica != process.replica]
        for event, start, end in _spans(process) if process.rank == 0 else ():
            lived = [around for made in others if (around := _around(made, start, end))]
            if lived:
                inside = [(begin, until) for begin, until in disturbed if begin < end and until >= start]
                yield _Heal(event, start, end, max(lived, key=len), inside)


def _spans(process: ProcessHistory) -> Iterator[tuple[ev.HealStarted, float, float]]:
    """Yield each heal of a process, and from when to when the others may have waited for it."""
    begun: ev.HealStarted | None = None
    joined: float | None = None  # until its first commit the others may wait for it since then
    for event in process.events:
        if isinstance(event, ev.Joined) and joined is None:
            joined = event.time
        elif isinstance(event, ev.HealStarted):
            begun = event
        elif isinstance(event, ev.HealFinished | ev.HealFailed | ev.CatchUpRenewed) and begun is not None:
            yield begun, min(joined or begun.time, begun.time), event.time
            begun, joined = None, event.time
        elif isinstance(event, ev.StepCommitted):
            joined = event.time


def _around(commits: Sequence[ev.StepCommitted], start: float, end: float) -> Sequence[ev.StepCommitted]:
    """Return the commits of a time, and those before and after it; none of a group that did not live through it."""
    first, last = (bisect_right(commits, moment, key=lambda commit: commit.time) for moment in (start, end))
    return commits[first - 1 : last + 1] if first > 0 and last < len(commits) else ()


def _disturbances(record: RunRecord) -> Iterator[tuple[float, float]]:
    """Yield from when to when something else may have cost time."""
    for event in record.of(*DISTURBANCES):
        yield event.time, event.time + (seconds_of(event) if isinstance(event, ev.FaultInjected) else 0.0)
    for event in record.of(ev.Waiting):
        if not _waits_for_joiner(event):
            yield event.time, event.time


def _waits_for_joiner(event: ev.Waiting) -> bool:
    return "fetch the state" in event.reason


def _check_waits(record: RunRecord, found: Judgement) -> None:
    """Object to a wait for a joiner that did not ask for it. Counts all such events, whenever they were."""
    asked = {event.replica for event in record.of(ev.CatchUpWaiting)}
    waits = [event for event in record.of(ev.Waiting) if _waits_for_joiner(event)]
    for event in waits if not asked else []:
        object_to_absence(record, found, f"waited for a joiner that did not ask for it: {event.reason}", event)
    if asked:
        steps = len({event.step for event in waits})
        found.notes.append(f"groups {sorted(map(str, asked))} asked the others to wait, for {count(steps, 'step')}")
