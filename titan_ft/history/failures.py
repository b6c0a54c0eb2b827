# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Find the failures of a run in its events, and what each cost the survivors and the group itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from titan_ft.run.events import (
    Drained,
    Event,
    FaultEvent,
    FaultInjected,
    HealFinished,
    RankEvent,
    StepCommitted,
    WorkerExited,
)

Attempt = tuple[int, int]  # replica, attempt


@dataclass
class Heal:
    """One transfer of state to a group; all its ranks together."""

    replica: int
    attempt: int
    time: float
    """Unix seconds at which the last rank was done."""
    donor: int
    from_step: int
    num_bytes: int
    """Bytes of all ranks."""
    seconds: float
    """Seconds of the slowest rank."""
    replayed: int
    """Queued updates applied."""


@dataclass
class Failure:
    """One death of a group's attempt."""

    replica: int
    attempt: int
    time: float
    """Unix seconds of the injected fault that caused it, or else at which the supervisor noted the death."""
    cause: str
    """Name of the signal, or the exit code."""
    stall_seconds: float | None
    """What the survivor hit hardest lost beyond a usual step; None where no survivor committed on both sides."""
    rejoin_seconds: float | None
    """Seconds until a later attempt contributed to a committed step; None if none did."""
    heal: Heal | None
    """The last transfer of state before that step; None if the group did not contribute again, or healed nothing."""


@dataclass
class Drain:
    """One group's attempt that left because it was asked to."""

    replica: int
    attempt: int
    time: float
    """Unix seconds at which its first rank said so."""
    in_order: bool
    """Whether it finished its step first."""
    stall_seconds: float | None
    """What the group hit hardest lost beyond a usual step; None where no other group committed on both sides."""


def attempt_of(event: Event) -> Attempt | None:
    """Return replica and attempt (0 where it is not told) of an event, or None for one of no replica."""
    return None if event.replica is None else (event.replica, event.attempt or 0)


def is_of_worker(event: Event) -> bool:
    """Tell whether a worker tells an event: its own, or those of the chaos agent in it."""
    return isinstance(event, RankEvent) or (isinstance(event, FaultEvent) and event.rank is not None)


def group_commits(events: Iterable[Event]) -> list[StepCommitted]:
    """Return one commit per group and step: that of rank 0, which speaks for the group."""
    return [event for event in events if isinstance(event, StepCommitted) and event.rank == 0]


def contributed(commit: StepCommitted) -> bool:
    """Tell whether the group of a commit gave weight to that step."""
    return commit.replica in commit.participants


def find_heals(events: Iterable[Event]) -> list[Heal]:
    """Fold what the ranks of a group tell of a heal into one transfer, in order of time."""
    found: dict[tuple[Attempt, int], Heal] = {}
    for event in events:
        if not isinstance(event, HealFinished):
            continue
        attempt, step = (event.replica, event.attempt), event.from_step
        heal = found.setdefault((attempt, step), Heal(*attempt, event.time, event.donor, step, 0, 0.0, 0))
        heal.time = event.time
        heal.num_bytes += event.bytes
        heal.seconds = max(heal.seconds, event.seconds)
        heal.replayed = max(heal.replayed, event.replayed)
    return sorted(found.values(), key=lambda heal: heal.time)


def find_failures(events: Sequence[Event], heals: Iterable[Heal]) -> list[Failure]:
    """Return one failure per replica and attempt that a signal or a nonzero code ended, in order of time."""
    commits = group_commits(events)
    usual = median_seconds(commits)
    drained = {(event.replica, event.attempt) for event in events if isinstance(event, Drained)}
    spans = _signs_of_life(events)
    healed = sorted(heals, key=lambda heal: heal.time)
    failures: dict[Attempt, Failure] = {}
    for event in events:
        if not isinstance(event, WorkerExited):
            continue
        attempt, cause = (event.replica, event.attempt), cause_of(event)
        if cause is None or event.stopped:
            continue  # a worker that its supervisor stopped did not fail
        if attempt in drained and cause == "SIGTERM":
            continue  # nor did one that was asked to leave
        if attempt in failures:
            continue  # the first exit of an attempt is the failure; other ranks die of it
        exited = event.time
        born, last_seen = spans.get(attempt, (exited, exited))
        died = _injected(events, attempt[0], born, exited) or exited
        stall = _stall(commits, attempt[0], min(last_seen, died), exited, usual)
        back = next((c for c in commits if _is_return(c, attempt)), None)
        heal = None
        if back is not None:
            before = [h for h in healed if (h.replica, h.attempt) == attempt_of(back) and h.time <= back.time]
            heal = before[-1] if before else None
        rejoin = None if back is None else max(0.0, back.time - died)
        failures[attempt] = Failure(*attempt, died, cause, stall, rejoin, heal)
    return list(failures.values())


def find_drains(events: Sequence[Event]) -> list[Drain]:
    """Return the attempts that left because they were asked to, each at its first rank's word."""
    commits = group_commits(events)
    usual = median_seconds(commits)
    drains: dict[Attempt, Drain] = {}
    for event in events:
        if isinstance(event, Drained) and (event.replica, event.attempt) not in drains:
            attempt, left = (event.replica, event.attempt), event.time
            stall = _stall(commits, event.replica, left, left, usual)
            drains[attempt] = Drain(*attempt, left, event.in_order, stall)
    return list(drains.values())


def median_seconds(commits: Iterable[StepCommitted]) -> float | None:
    """Return the median duration of a step, or None without any."""
    seconds = [commit.seconds for commit in commits]
    return median(seconds) if seconds else None


def cause_of(event: WorkerExited) -> str | None:
    """Return what ended a worker, or None where it ended well."""
    return event.signal or (f"exit code {event.code}" if event.code else None)


def _signs_of_life(events: Iterable[Event]) -> dict[Attempt, tuple[float, float]]:
    """Return for each attempt its first event, and since when it may be dead: the last event of the rank that fell
    silent first."""
    first: dict[Attempt, float] = {}
    last: dict[Attempt, dict[int, float]] = defaultdict(dict)
    for event in events:
        attempt = attempt_of(event)
        if attempt is None or not is_of_worker(event):
            continue
        first.setdefault(attempt, event.time)
        last[attempt][event.rank or 0] = event.time
    return {attempt: (first[attempt], min(times.values())) for attempt, times in last.items()}


def _injected(events: Iterable[Event], replica: int, born: float, exited: float) -> float | None:
    """Return when the last fault was injected into an attempt of the replica, or None without any.

    A supervisor notes a death only after it has stopped the other ranks, which may take seconds.
    """
    times = [
        event.time
        for event in events
        if isinstance(event, FaultInjected) and replica == event.target.replica and born <= event.time <= exited
    ]
    return max(times, default=None)


def _stall(
    commits: Iterable[StepCommitted], failed: int, start: float, exited: float, usual: float | None
) -> float | None:
    """Return the longest time between two commits of a survivor around a failure, less a usual step.

    The supervisor may note a death long after the survivors went on. So each gap counts that touches the time between
    the last sign of life (start) and the exit.
    """
    times: dict[Attempt, list[float]] = defaultdict(list)
    for event in commits:
        if event.replica != failed:
            times[event.replica, event.attempt].append(event.time)
    gaps = [
        after - before
        for moments in times.values()
        for before, after in pairwise(moments)
        if before <= exited and after >= start
    ]
    return max(0.0, max(gaps) - (usual or 0.0)) if gaps else None


def _is_return(commit: StepCommitted, failed: Attempt) -> bool:
    """Tell whether a commit is one to which a later attempt of the failed group contributed."""
    return commit.replica == failed[0] and commit.attempt > failed[1] and contributed(commit)
