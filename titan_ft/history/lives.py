# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the events tell of each attempt of a group: its first rank's own words, and how it ended.

One speaker per fact: rank 0 for what the group does, the supervisor for its end and its restart, and whoever injects a
fault for its moment (a supervisor notes a death only afterwards).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from titan_ft.history.failures import attempt_of, cause_of, is_of_worker
from titan_ft.run.events import (
    Event,
    FaultInjected,
    FaultUndone,
    HealFinished,
    Hung,
    LaunchStarted,
    ReplicaGaveUp,
    StepCommitted,
    Target,
    WorkerExited,
    WorkerStarted,
)

STOPS = ("stop_rank", "stop_group")
DEADLOCKS = ("deadlock",)
_DEADLY = ("segfault", "out_of_memory", "exception")

Moment = tuple[int, Event]
"""Unix microseconds at which an event was, and the event."""


@dataclass(frozen=True)
class Fault:
    """One injected fault."""

    time_us: int
    name: str
    replica: int | None
    """None where it hit no group, but the lighthouse or whichever group comes first."""
    rank: int | None
    lighthouse: bool
    shot: int | None
    """Its number in the schedule; one shot may hit several groups."""
    undone_us: int | None
    """When it was undone, as the events or its own parameters say."""

    @property
    def deadly(self) -> bool:
        """Say whether it ends a process at once."""
        return not self.lighthouse and (self.name.startswith(("kill", "sigkill")) or self.name in _DEADLY)


@dataclass
class Life:
    """One attempt of a group."""

    replica: int
    attempt: int
    begin_us: int
    """Its first event of whoever."""
    moments: list[Moment] = field(default_factory=list)
    """Rank 0's events, in order of time."""
    last_us: int = 0
    """Its last event of whoever."""
    hung_us: int | None = None
    """When a rank noticed that it hung."""
    exit_us: int | None = None
    """When the supervisor found the first worker ended."""
    failed: bool = False
    """Whether a worker ended by itself with a signal or a nonzero code."""
    cause: str = ""
    """What ended it, in words: the fault, the signal or the exit code."""
    stopped: bool = False
    """Whether the supervisor ended it because the run was stopped."""
    gave_up_us: int | None = None
    fault: Fault | None = None
    """The fault that ended it; None if none is known to."""

    @property
    def died_us(self) -> int | None:
        """Return when it ended: at the fault that ended it, if one is known, else when that was noticed."""
        if self.exit_us is None or self.fault is None or not self.fault.deadly:
            return self.exit_us
        spoke = [time for time, event in self.moments if isinstance(event, StepCommitted | HealFinished)]
        return max([self.fault.time_us, *spoke[-1:]])


def read_moments(events: Iterable[Event]) -> list[Moment]:
    """Return the events with the microseconds at which they were, in that order.

    Wall clocks may be set while a run goes on. Where all events are of one host its monotonic clock tells how much
    time really passed.
    """
    history = sorted(events, key=lambda event: event.time)
    hosts = {event.host for event in history if isinstance(event, WorkerStarted)}
    launches = sum(isinstance(event, LaunchStarted) for event in history)
    offsets = [event.time - event.mono for event in history]
    steady = not offsets or max(offsets) - min(offsets) < 0.1
    if steady or len(hosts) != 1 or launches > 1:
        return [(round(event.time * 1e6), event) for event in history]
    first = min(history, key=lambda event: event.mono)
    offset = first.time - first.mono
    moments = [(round((event.mono + offset) * 1e6), event) for event in history]
    return sorted(moments, key=lambda moment: moment[0])


def read_faults(moments: Sequence[Moment]) -> list[Fault]:
    """Return the injected faults, in order of time."""
    undone: dict[tuple[str, int | None, Target], list[int]] = defaultdict(list)
    for time, event in moments:
        if isinstance(event, FaultUndone):
            undone[event.fault, event.shot, event.target].append(time)
    faults = []
    for time, event in moments:
        if isinstance(event, FaultInjected):
            ends = undone.get((event.fault, event.shot, event.target), [])
            end = next((end for end in ends if end >= time), None)
            if end is None and (seconds := seconds_of(event)):
                end = time + round(seconds * 1e6)
            target = event.target
            faults.append(Fault(time, event.fault, target.replica, target.rank, target.lighthouse, event.shot, end))
    return faults


def seconds_of(fault: FaultInjected) -> float:
    """Return how long a fault lasts by its parameters; 0 where they do not tell."""
    seconds = (fault.params or {}).get("seconds", 0.0)
    return seconds if isinstance(seconds, int | float) else 0.0


def read_lives(moments: Sequence[Moment], faults: Sequence[Fault]) -> dict[int, list[Life]]:
    """Return the attempts of each group that some event tells of, in order."""
    lives: dict[tuple[int, int], Life] = {}
    for time, event in moments:
        key = attempt_of(event)
        if key is None:
            continue
        if key not in lives:
            lives[key] = Life(*key, begin_us=time)
        life = lives[key]
        life.last_us = time
        match event:
            case WorkerExited():
                _note_exit(life, time, event)
            case ReplicaGaveUp():
                life.gave_up_us = time
            case Hung():
                life.hung_us = life.hung_us or time
            case _ if is_of_worker(event) and event.rank == 0:
                life.moments.append((time, event))
    groups: dict[int, list[Life]] = defaultdict(list)
    for life in sorted(lives.values(), key=lambda life: life.attempt):
        before = groups[life.replica][-1].exit_us if groups[life.replica] else None
        _find_fault(life, faults, since=before or 0)
        groups[life.replica].append(life)
    return dict(groups)


def _note_exit(life: Life, time: int, event: WorkerExited) -> None:
    life.exit_us = time if life.exit_us is None else life.exit_us
    cause = cause_of(event)
    if event.stopped:
        life.stopped = life.stopped or not life.failed
    elif cause is not None and not life.failed:
        life.failed, life.stopped, life.cause = True, False, cause


def _find_fault(life: Life, faults: Sequence[Fault], since: int) -> None:
    """Name the fault that ended a life: the last deadly one that hit it, else the last that it did not survive."""
    if not life.failed or life.exit_us is None:
        return
    hits = [f for f in faults if f.replica == life.replica and since <= f.time_us <= (life.exit_us or 0)]
    commits = [time for time, event in life.moments if isinstance(event, StepCommitted)]
    last = commits[-1] if commits else 0
    fatal = [f for f in hits if f.deadly] or [f for f in hits if (f.undone_us or f.time_us) >= last]
    if fatal:
        life.fault = fatal[-1]
        life.cause = f"{life.fault.name} ({life.cause})"
