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
from titan_ft.history.record.run_record import RunRecord, once_per_record
from titan_ft.history.report.style import DETAILS
from titan_ft.history.timing.incidents import Incident, find_incidents
from titan_ft.history.timing.intervals import Interval
from titan_ft.history.timing.timeline import build_timeline
from titan_ft.history.timing.waits import REASONS
from titan_ft.run.events import Waited

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
    fine_state: str
    """One of `intervals.STATES`."""
    detail: str = ""
    """The activity of the group, or the group that it waited for, in words."""

    @property
    def num_us(self) -> int:
        return self.end_us - self.start_us


@dataclass(frozen=True)
class TimeInState:
    """How long all groups together were in a state, and of what that time consisted."""

    num_us: int
    parts: Counter[str]
    """Microseconds in each fine state."""


@once_per_record
def find_state_spans(record: RunRecord) -> dict[int, tuple[StateSpan, ...]]:
    """Return the spans of each group, without gaps, from the job's begin to its end."""
    lost = {group.slot for group in find_outcome(record).lost}
    found = {}
    for group, row in build_timeline(record).groups.items():
        spans = list(_make_spans(record, group, row))
        attempts = record.attempts.get(group, [])
        has_died = bool(attempts) and attempts[-1].failed
        is_gone = group in lost or has_died
        if is_gone and spans[-1].state == "unknown":
            spans[-1] = replace(spans[-1], state="lost", detail="not started again")
        found[group] = tuple(spans)
    return found


@once_per_record
def add_up_job(record: RunRecord) -> dict[str, TimeInState]:
    """Return how long all groups together were in each state."""
    spans: list[StateSpan] = []
    for row in find_state_spans(record).values():
        spans += row
    return add_up_spans(spans)


@once_per_record
def add_up_groups(record: RunRecord) -> dict[int, dict[str, TimeInState]]:
    """Return for each group how long it was in each state."""
    return {group: add_up_spans(row) for group, row in find_state_spans(record).items()}


def add_up_spans(spans: Iterable[StateSpan]) -> dict[str, TimeInState]:
    """Return how long some spans took together, by state."""
    parts: dict[tuple[str, str], int] = defaultdict(int)
    for span in spans:
        parts[span.state, span.fine_state] += span.end_us - span.start_us
    states: dict[str, Counter[str]] = defaultdict(Counter)
    for (state, fine), num_us in parts.items():
        states[state][fine] += num_us
    return {state: TimeInState(fine.total(), fine) for state, fine in states.items()}


def _make_spans(record: RunRecord, group: int, row: Sequence[Interval]) -> Iterator[StateSpan]:
    longest_usual_us = _find_longest_usual_exchange(record, row)
    attempts = record.attempts.get(group, [])
    begins = [attempt.begin_us for attempt in attempts]
    gave_up_us: int | None = None
    if attempts:
        gave_up_us = attempts[-1].gave_up_us
    for interval in row:
        state = _STATE_OF[interval.state]
        detail = _describe(interval)
        has_given_up = gave_up_us is not None and interval.start_us >= gave_up_us
        if _is_exchange(interval) and interval.num_us > longest_usual_us:
            state = "waiting"
            detail = "for the other groups, in an exchange"
        elif interval.state == "idle" and has_given_up:
            state = "lost"
            detail = "gave up"
        if state == "waiting" and interval.state != "wait_for_groups":
            reason = _describe_wait(record, group, interval)
            if reason:
                detail += f"; {reason}"
        span = StateSpan(interval.start_us, interval.end_us, state, interval.state, detail)
        if interval.state == "restart":
            yield from _split_restart(span, begins)
        else:
            yield span


def _is_exchange(interval: Interval) -> bool:
    """Return True for one exchange; a sum over usual steps says nothing of a single one."""
    return interval.state == "exchange_wait" and not interval.is_sum


def _find_longest_usual_exchange(record: RunRecord, row: Sequence[Interval]) -> float:
    """Return the microseconds above which an exchange counts as a wait for other groups."""
    exchanges = [interval.num_us for interval in row if _is_exchange(interval)]
    # Half a step of patience: exchanges of usual steps differ in length, above all on a busy
    # machine.
    patience_us = record.usual_step_us / 2
    if not exchanges:
        return patience_us
    return 2 * median(exchanges) + patience_us


def _describe(interval: Interval) -> str:
    return ": ".join(filter(None, (DETAILS[interval.state], interval.detail)))


def _split_restart(span: StateSpan, begins: Sequence[int]) -> Iterator[StateSpan]:
    """Yield the part of a restart in which nothing ran, and the part in which the new process
    started.
    """
    started_us = span.end_us
    for begin_us in begins:
        if span.start_us < begin_us <= span.end_us:
            started_us = begin_us
            break
    if started_us > span.start_us:
        yield replace(span, end_us=started_us, state="lost")
    if started_us < span.end_us:
        yield replace(span, start_us=started_us)


def _describe_wait(record: RunRecord, group: int, interval: Interval) -> str:
    """Return the group that a group waited for in an interval, and why; empty if unknown.

    The commit that ended the wait names it. In histories without such commits, it is the last
    incident of another group.
    """
    commits = record.commits_by_group.get(group, [])
    place = bisect_left(commits, interval.end_us / 1e6, key=lambda commit: commit.time)
    waits: Sequence[Waited] = ()
    if place < len(commits):
        waits = commits[place].waits or ()
    if waits:
        reasons = [f"for group {wait.slot} ({REASONS.get(wait.why, wait.why)})" for wait in waits]
        return ", ".join(reasons)
    since_us = interval.start_us - 2 * record.usual_step_us
    incident = _find_last_incident(record, since_us, interval.end_us)
    if incident is None or group in incident.replicas:
        return ""
    if not incident.replicas:
        return f"because of {incident.fault}"
    return f"because of {name_groups(incident.replicas)} ({incident.fault})"


def _find_last_incident(record: RunRecord, since_us: float, until_us: float) -> Incident | None:
    """Return the last incident that began between two moments."""
    incidents = find_incidents(record)
    place = bisect_right(incidents, until_us / 1e6, key=lambda incident: incident.time) - 1
    if place < 0:
        return None
    last = incidents[place]
    if 1e6 * last.time < since_us:
        return None
    return last
