# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The faults of a run, and the attempts of its groups: when each began, what its rank 0 did, how it ended.

Each fact has one source: rank 0 for what the group does, the agent for its end and its restart, and whoever
injects a fault for its moment (an agent notes a death only afterwards).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from titan_ft.history.fold.attempt import AttemptFold, microseconds
from titan_ft.history.fold.faults import InjectedFaults
from titan_ft.history.fold.group import is_of_worker
from titan_ft.history.fold.run import RunFold
from titan_ft.run import events as ev


@dataclass(frozen=True)
class RecordedFault:
    """One fault that was injected into the run, as its events have it; times in Unix microseconds."""

    time_us: int
    name: str
    replica: int | None
    """None where it hit no group, but the lighthouse or whichever group comes first."""
    rank: int | None
    lighthouse: bool
    shot: int | None
    """Its number in the schedule; one shot may hit several groups."""
    number: int
    """The how-manieth fault of the run it is part of, from 1; see `InjectedFaults`."""
    undone_us: int | None
    """When it was undone, as the events or its own parameters say; for a lighthouse, when the next one listened."""

    @property
    def outcome(self) -> str:
        """What to expect of the target: see `titan_ft.faults.fault.Outcome`."""
        return expected_outcome(self.name)

    @property
    def category(self) -> str | None:
        """See `titan_ft.faults.fault.Category`; None for an unknown name."""
        # Loaded late: a run without faults loads nothing that breaks runs.
        from titan_ft.faults.catalogue import read_category

        return read_category(self.name)

    @property
    def deadly(self) -> bool:
        """Whether it ends a process at once."""
        return self.outcome == "killed"


@dataclass
class Attempt(AttemptFold):
    """One attempt of a group, with what its rank 0 did and which fault ended it."""

    moments: list[tuple[int, ev.Event]] = field(default_factory=list)
    """Rank 0's events, in order of time."""
    fault: RecordedFault | None = None
    """The fault that ended it; None if none is known to."""

    @property
    def cause(self) -> str:
        """What ended it, in words: the fault, the exception, the signal or the exit code."""
        return self.reason if self.fault is None else f"{self.fault.name} ({self.reason})"

    @property
    def died_us(self) -> int | None:
        """When it ended: at the fault that ended it, if one is known, else when that was noticed."""
        if self.exit_us is None or self.fault is None or not self.fault.deadly:
            return self.exit_us
        alive = [time for time, event in self.moments if isinstance(event, ev.StepCommitted | ev.HealFinished)]
        return max([self.fault.time_us, *alive[-1:]])


def expected_outcome(fault: str) -> str:
    """Return what to expect of the target of a fault of that name: see `titan_ft.faults.fault.Outcome`."""
    from titan_ft.faults.catalogue import read_outcome  # a run that nobody breaks loads nothing of what breaks runs

    return read_outcome(fault)


def seconds_of(fault: ev.FaultInjected) -> float:
    """Return how long a fault lasts by its parameters; 0 where they do not say."""
    seconds = (fault.params or {}).get("seconds", 0.0)
    return seconds if isinstance(seconds, int | float) else 0.0


def read_faults(events: Iterable[ev.Event]) -> list[RecordedFault]:
    """Return the injected faults of events that are in order of time."""
    relevant = ev.FaultEvent | ev.LighthouseRestarted | ev.ChaosStarted | ev.LaunchStarted
    events = [event for event in events if isinstance(event, relevant)]
    undone: dict[tuple[str, int | None, ev.Target], list[int]] = defaultdict(list)
    back = [microseconds(event) for event in events if isinstance(event, ev.LighthouseRestarted)]
    for event in events:
        if isinstance(event, ev.FaultUndone):
            undone[event.fault, event.shot, event.target].append(microseconds(event))
    faults, counted = [], InjectedFaults()
    for event in events:
        counted.observe(event)
        if isinstance(event, ev.FaultInjected):
            time, target = microseconds(event), event.target
            ends = back if target.lighthouse else undone.get((event.fault, event.shot, target), [])
            end = next((end for end in ends if end >= time), None)
            if end is None and (seconds := seconds_of(event)):
                end = time + round(seconds * 1e6)
            whom = (target.replica, target.rank, target.lighthouse)
            faults.append(RecordedFault(time, event.fault, *whom, event.shot, counted.last, end))
    return faults


def read_attempts(
    fold: RunFold, events: Iterable[ev.Event], faults: Sequence[RecordedFault]
) -> dict[int, list[Attempt]]:
    """Return the attempts of each group that have events, in order.

    Args:
        fold: of the same events.
        events: in order of time.
    """
    found = {key: Attempt(**vars(attempt)) for key, attempt in fold.attempts.items()}
    for event in events:
        if event.replica is not None and event.rank == 0 and is_of_worker(event) and not isinstance(event, ev.Hung):
            found[event.replica, event.attempt or 0].moments.append((microseconds(event), event))
    groups: dict[int, list[Attempt]] = defaultdict(list)
    for attempt in sorted(found.values(), key=lambda attempt: attempt.number):
        before = groups[attempt.replica][-1].exit_us if groups[attempt.replica] else None
        attempt.fault = _fatal_fault(attempt, faults, since=before or 0)
        groups[attempt.replica].append(attempt)
    return dict(groups)


def _fatal_fault(attempt: Attempt, faults: Sequence[RecordedFault], since: int) -> RecordedFault | None:
    """Return the fault that ended an attempt: the last deadly one that hit it, else the last it did not survive."""
    if not attempt.failed or attempt.exit_us is None:
        return None
    hits = [f for f in faults if f.replica == attempt.replica and since <= f.time_us <= attempt.exit_us]
    last = max((time for time, event in attempt.moments if isinstance(event, ev.StepCommitted)), default=0)
    fatal = [f for f in hits if f.deadly] or [f for f in hits if (f.undone_us or f.time_us) >= last]
    return fatal[-1] if fatal else None
