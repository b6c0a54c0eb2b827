# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Find the failures of a run in its events, and what each cost the survivors and the group itself."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from titan_ft.history.events import Event

Attempt = tuple[int, int]  # replica, attempt
_NUMBERS = (int, float)
SUPERVISOR_EVENTS = ("worker_exited", "replica_restarted", "replica_gave_up")


@dataclass
class Heal:
    """One transfer of state to a group; all its ranks together."""

    replica: int
    attempt: int
    time: float
    """Unix seconds at which the last rank was done."""
    donor: Any
    from_step: int | None
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


def number(event: Mapping[str, Any], name: str) -> float | None:
    """Return a numeric field, or None where it is missing or no number."""
    value = event.get(name)
    return value if type(value) in _NUMBERS else None  # asked for millions of times; bool is a subclass of int


def integer(event: Mapping[str, Any], name: str, default: int = 0) -> int:
    """Return a whole-numbered field, or the default where it is missing or no number."""
    value = number(event, name)
    return default if value is None else int(value)


def attempt_of(event: Mapping[str, Any]) -> Attempt | None:
    """Return replica and attempt (0 where it is missing) of an event, or None for one of no replica."""
    replica = number(event, "replica")
    return None if replica is None else (int(replica), integer(event, "attempt"))


def targets(event: Event) -> set[int]:
    """Return the replicas that a fault was aimed at: a number, `{"replica": r}` with or without a rank, or several."""
    target = event.get("target")
    found = set()
    for each in target if isinstance(target, list) else [target]:
        replica = number(each if isinstance(each, Mapping) else {"replica": each}, "replica")
        if replica is not None:
            found.add(int(replica))
    return found


def group_commits(events: Iterable[Event]) -> list[Event]:
    """Return one `step_committed` per group and step: that of rank 0, which speaks for the group."""
    return [
        event
        for event in events
        if event["event"] == "step_committed" and attempt_of(event) is not None and integer(event, "rank") == 0
    ]


def contributed(event: Event) -> bool:
    """Tell whether the group of a `step_committed` gave weight to that step."""
    participants = event.get("participants")
    return isinstance(participants, list) and event.get("replica") in participants


def find_heals(events: Iterable[Event]) -> list[Heal]:
    """Fold the ranks' `heal_finished` of one group into one transfer each, in order of time."""
    found: dict[tuple[Attempt, int | None], Heal] = {}
    for event in events:
        attempt = attempt_of(event)
        if event["event"] != "heal_finished" or attempt is None:
            continue
        step = None if number(event, "from_step") is None else integer(event, "from_step")
        heal = found.setdefault((attempt, step), Heal(*attempt, event["time"], event.get("donor"), step, 0, 0.0, 0))
        heal.time = event["time"]
        heal.num_bytes += integer(event, "bytes")
        heal.seconds = max(heal.seconds, number(event, "seconds") or 0.0)
        heal.replayed = max(heal.replayed, integer(event, "replayed"))
    return sorted(found.values(), key=lambda heal: heal.time)


def find_failures(events: Sequence[Event], heals: Iterable[Heal]) -> list[Failure]:
    """Return one failure per replica and attempt that a signal or a nonzero code ended, in order of time."""
    commits = group_commits(events)
    usual = median_seconds(commits)
    drained = {attempt_of(event) for event in events if event["event"] == "drained"}
    spans = _signs_of_life(events)
    healed = sorted(heals, key=lambda heal: heal.time)
    failures: dict[Attempt, Failure] = {}
    for event in events:
        attempt, cause = attempt_of(event), _cause(event)
        if event["event"] != "worker_exited" or attempt is None or cause is None or event.get("stopped"):
            continue  # a worker that its supervisor stopped did not fail
        if attempt in drained and cause == "SIGTERM":
            continue  # nor did one that was asked to leave
        if attempt in failures:
            continue  # the first exit of an attempt is the failure; other ranks die of it
        exited = float(event["time"])
        born, last_seen = spans.get(attempt, (exited, exited))
        died = _injected(events, attempt[0], born, exited) or exited
        stall = _stall(commits, attempt[0], min(last_seen, died), exited, usual)
        back = next((c for c in commits if _is_return(c, attempt)), None)
        heal = None
        if back is not None:
            before = [h for h in healed if (h.replica, h.attempt) == attempt_of(back) and h.time <= back["time"]]
            heal = before[-1] if before else None
        rejoin = None if back is None else max(0.0, back["time"] - died)
        failures[attempt] = Failure(*attempt, died, cause, stall, rejoin, heal)
    return list(failures.values())


def find_drains(events: Sequence[Event]) -> list[Drain]:
    """Return the attempts that left because they were asked to, each at its first rank's word."""
    commits = group_commits(events)
    usual = median_seconds(commits)
    drains: dict[Attempt, Drain] = {}
    for event in events:
        attempt = attempt_of(event)
        if event["event"] == "drained" and attempt is not None and attempt not in drains:
            left = float(event["time"])
            stall = _stall(commits, attempt[0], left, left, usual)
            drains[attempt] = Drain(*attempt, left, event.get("in_order") is not False, stall)
    return list(drains.values())


def median_seconds(commits: Iterable[Event]) -> float | None:
    """Return the median duration of a step, or None without any."""
    seconds = [value for value in (number(event, "seconds") for event in commits) if value is not None]
    return median(seconds) if seconds else None


def _cause(event: Event) -> str | None:
    """Return what ended a worker, or None where it ended well."""
    ended_by = event.get("signal")
    code = event.get("code")
    if not ended_by and isinstance(code, int) and code < 0:
        ended_by = -code  # how Python's subprocess reports a signal
    if ended_by:
        try:
            return signal.Signals(ended_by).name
        except ValueError:  # a name already, or a number that this platform has no name for
            return ended_by if isinstance(ended_by, str) else f"signal {ended_by}"
    return None if code in (None, 0) else f"exit code {code}"


def _signs_of_life(events: Iterable[Event]) -> dict[Attempt, tuple[float, float]]:
    """Return for each attempt its first event, and since when it may be dead: the last event of the rank that fell
    silent first."""
    first: dict[Attempt, float] = {}
    last: dict[Attempt, dict[int, float]] = defaultdict(dict)
    for event in events:
        attempt = attempt_of(event)
        # What a supervisor writes about a rank is no sign of life of it.
        if attempt is None or number(event, "rank") is None or event["event"] in SUPERVISOR_EVENTS:
            continue
        first.setdefault(attempt, event["time"])
        last[attempt][integer(event, "rank")] = event["time"]
    return {attempt: (first[attempt], min(times.values())) for attempt, times in last.items()}


def _injected(events: Iterable[Event], replica: int, born: float, exited: float) -> float | None:
    """Return when the last fault was injected into an attempt of the replica, or None without any.

    A supervisor notes a death only after it has stopped the other ranks, which may take seconds.
    """
    times = [
        event["time"]
        for event in events
        if event["event"] == "fault_injected" and replica in targets(event) and born <= event["time"] <= exited
    ]
    return max(times, default=None)


def _stall(commits: Iterable[Event], failed: int, start: float, exited: float, usual: float | None) -> float | None:
    """Return the longest time between two commits of a survivor around a failure, less a usual step.

    The supervisor may note a death long after the survivors went on. So each gap counts that touches the time between
    the last sign of life (start) and the exit.
    """
    times: dict[Attempt, list[float]] = defaultdict(list)
    for event in commits:
        attempt = attempt_of(event)
        if attempt is not None and attempt[0] != failed:
            times[attempt].append(event["time"])
    gaps = [
        after - before
        for moments in times.values()
        for before, after in pairwise(moments)
        if before <= exited and after >= start
    ]
    return max(0.0, max(gaps) - (usual or 0.0)) if gaps else None


def _is_return(commit: Event, failed: Attempt) -> bool:
    """Tell whether a commit is one to which a later attempt of the failed group contributed."""
    attempt = attempt_of(commit)
    return attempt is not None and attempt[0] == failed[0] and attempt[1] > failed[1] and contributed(commit)
