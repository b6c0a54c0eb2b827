# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Fold the fine states of a run's timeline into the few states of the report: `style.STATES`.

| state | fine states |
| --- | --- |
| training | productive, overhead, wasted, and an exchange of usual length |
| waiting | an exchange that is longer, detection, quorum, rebuild, wait_for_groups |
| recovering | heal, replay |
| starting | start, and restart from the first event of the new process on |
| lost | restart before that event, hung, given up, unknown at the end of a lost group |
| ended | idle: finished, left, stopped |
| unknown | unknown |
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from titan_ft.history.outcomes.notes import name_groups
from titan_ft.history.outcomes.outcome import find_outcome
from titan_ft.history.record.run_record import RunRecord, view
from titan_ft.history.report.style import DETAILS
from titan_ft.history.timing.incidents import Incident, find_incidents
from titan_ft.history.timing.intervals import Interval
from titan_ft.history.timing.timeline import timeline
from titan_ft.history.timing.waits import REASONS

_STATE_OF = {
    "productive": "training",
    "overhead": "training",
    "wasted": "training",
    "exchange_wait": "training",
    "detection": "waiting",
    "quorum": "waiting",
    "rebuild": "waiting",
    "wait_for_groups": "waiting",
    "heal": "recovering",
    "replay": "recovering",
    "start": "starting",
    "restart": "starting",
    "hung": "lost",
    "idle": "ended",
    "unknown": "unknown",
}


@dataclass(frozen=True, slots=True)
class StateSpan:
    """A stretch of a group's time in one state; times in Unix microseconds."""

    start_us: int
    end_us: int
    state: str
    """One of `style.STATES`."""
    fine: str
    """One of `intervals.STATES`."""
    detail: str = ""
    """What the group did, or for whom it waited, in words."""

    @property
    def num_us(self) -> int:
        return self.end_us - self.start_us


@dataclass(frozen=True)
class TimeInState:
    """How long all groups together were in a state, and of what that time consisted."""

    num_us: int
    parts: Counter[str]
    """Microseconds in each fine state."""


@view
def find_phases(record: RunRecord) -> dict[int, tuple[StateSpan, ...]]:
    """Return the phases of each group, without gaps, from the job's begin to its end."""
    lost = {group.slot for group in find_outcome(record).lost}
    found = {}
    for group, row in timeline(record).groups.items():
        phases = list(_fold(record, group, row))
        died = [attempt.failed for attempt in record.attempts.get(group, [])][-1:] == [True]
        if phases[-1].state == "unknown" and (group in lost or died):
            phases[-1] = replace(phases[-1], state="lost", detail="not started again")
        found[group] = tuple(phases)
    return found


@view
def time_in_states(record: RunRecord) -> dict[int, dict[str, TimeInState]]:
    """Return for each group how long it was in each state."""
    return {group: add_up(row) for group, row in find_phases(record).items()}


def add_up(phases: Iterable[StateSpan]) -> dict[str, TimeInState]:
    """Return how long some phases took together, by state."""
    parts: dict[tuple[str, str], int] = defaultdict(int)
    for phase in phases:
        parts[phase.state, phase.fine] += phase.end_us - phase.start_us
    states: dict[str, Counter[str]] = defaultdict(Counter)
    for (state, fine), num_us in parts.items():
        states[state][fine] += num_us
    return {state: TimeInState(fine.total(), fine) for state, fine in states.items()}


def _fold(record: RunRecord, group: int, row: Sequence[Interval]) -> Iterator[StateSpan]:
    exchanges = [each.num_us for each in row if each.state == "exchange_wait" and not each.is_sum]
    # Half a step of patience: exchanges of usual steps differ in length, above all on a busy
    # machine.
    longest_usual = (2 * median(exchanges) if exchanges else 0) + record.usual_step_us / 2
    attempts = record.attempts.get(group, [])
    begins = [attempt.begin_us for attempt in attempts]
    gave_up_us = attempts[-1].gave_up_us if attempts else None
    for each in row:
        phase = StateSpan(
            each.start_us, each.end_us, _STATE_OF[each.state], each.state, _describe(each)
        )
        if each.state == "exchange_wait" and not each.is_sum and each.num_us > longest_usual:
            phase = replace(phase, state="waiting", detail="for the other groups, in an exchange")
        if each.state == "idle" and gave_up_us is not None and each.start_us >= gave_up_us:
            phase = replace(phase, state="lost", detail="gave up")
        if phase.state == "waiting" and each.state != "wait_for_groups":
            phase = replace(
                phase, detail=f"{phase.detail}; {_for_whom(record, group, each)}".removesuffix("; ")
            )
        if each.state == "restart":
            yield from _split_restart(phase, begins)
        else:
            yield phase


def _describe(interval: Interval) -> str:
    return ": ".join(filter(None, (DETAILS[interval.state], interval.detail)))


def _split_restart(phase: StateSpan, begins: Sequence[int]) -> Iterator[StateSpan]:
    """Yield the part of a restart in which nothing ran, and the part in which the new process
    started.
    """
    begin = next(
        (begin for begin in begins if phase.start_us < begin <= phase.end_us), phase.end_us
    )
    if begin > phase.start_us:
        yield replace(phase, end_us=begin, state="lost")
    if phase.end_us > begin:
        yield replace(phase, start_us=begin)


def _for_whom(record: RunRecord, group: int, interval: Interval) -> str:
    """Return the group that a group waited for in an interval, and why; empty if unknown.

    The commit that ended the wait names it. In histories without such commits, it is the last
    incident of another group.
    """
    commits = record.commits_by_group.get(group, [])
    place = bisect_left(commits, interval.end_us / 1e6, key=lambda commit: commit.time)
    waits = commits[place].waits if place < len(commits) else None
    if waits:
        return ", ".join(
            f"for group {wait.slot} ({REASONS.get(wait.why, wait.why)})" for wait in waits
        )
    incident = last_incident(record, interval.start_us - 2 * record.usual_step_us, interval.end_us)
    if incident is None or group in incident.replicas:
        return ""
    whom = name_groups(incident.replicas) if incident.replicas else ""
    return f"because of {whom} ({incident.fault})" if whom else f"because of {incident.fault}"


def last_incident(record: RunRecord, since_us: float, until_us: float) -> Incident | None:
    """Return the last incident that began between two moments."""
    incidents = find_incidents(record)
    place = bisect_right(incidents, until_us / 1e6, key=lambda incident: incident.time) - 1
    return incidents[place] if place >= 0 and 1e6 * incidents[place].time >= since_us else None
