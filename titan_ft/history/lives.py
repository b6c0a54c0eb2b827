# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the events tell of each attempt of a group: its first rank's own words, and how it ended.

One speaker per fact: rank 0 for what the group does, the supervisor for its end and its restart, and whoever injects a
fault for its moment (a supervisor notes a death only afterwards).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_ft.history.events import Event
from titan_ft.history.failures import attempt_of, integer, number

SUPERVISOR_EVENTS = ("worker_exited", "replica_restarted", "replica_gave_up", "spare_took_over")
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
        spoke = [time for time, event in self.moments if event["event"] in ("step_committed", "heal_finished")]
        return max([self.fault.time_us, *spoke[-1:]])


def read_moments(events: Iterable[Event]) -> list[Moment]:
    """Return the events with the microseconds at which they were, in that order.

    Wall clocks may be set while a run goes on. Where all events are of one host its monotonic clock tells how much
    time really passed.
    """
    history = sorted(events, key=lambda event: event["time"])
    hosts = {event.get("host") for event in history if event["event"] == "worker_started"}
    launches = sum(event["event"] == "launch_started" for event in history)
    ticks = [number(event, "mono") for event in history]
    known = [(event["time"] - tick, event) for event, tick in zip(history, ticks, strict=True) if tick is not None]
    steady = not known or max(known, key=lambda pair: pair[0])[0] - min(known, key=lambda pair: pair[0])[0] < 0.1
    if steady or len(known) < len(history) or len(hosts) != 1 or None in hosts or launches > 1:
        return [(round(event["time"] * 1e6), event) for event in history]
    offset, _ = min(known, key=lambda pair: float(pair[1]["mono"]))
    moments = [(round((event["mono"] + offset) * 1e6), event) for event in history]
    return sorted(moments, key=lambda moment: moment[0])


def read_faults(moments: Sequence[Moment]) -> list[Fault]:
    """Return the injected faults, in order of time."""
    undone: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for time, event in moments:
        if event["event"] == "fault_undone":
            for target in _targets(event):
                undone[(event.get("fault"), event.get("shot"), *target)].append(time)
    faults = []
    for time, event in moments:
        if event["event"] != "fault_injected":
            continue
        params = event.get("params")
        seconds = number(params, "seconds") if isinstance(params, Mapping) else None
        shot = None if number(event, "shot") is None else integer(event, "shot")
        for target in _targets(event):
            ends = undone.get((event.get("fault"), event.get("shot"), *target), [])
            end = next((end for end in ends if end >= time), None)
            if end is None and seconds is not None:
                end = time + round(seconds * 1e6)
            faults.append(Fault(time, str(event.get("fault")), *target, shot, end))
    return faults


def _targets(event: Event) -> list[tuple[int | None, int | None, bool]]:
    """Return replica, rank and whether it is the lighthouse, of each target; a bare number is a replica."""
    found: list[tuple[int | None, int | None, bool]] = []
    target = event.get("target")
    for each in target if isinstance(target, list) else [target]:
        if isinstance(each, Mapping):
            replica, rank = number(each, "replica"), number(each, "rank")
            lighthouse = bool(each.get("lighthouse"))
        else:
            replica, rank, lighthouse = number({"replica": each}, "replica"), None, False
        found.append((None if replica is None else int(replica), None if rank is None else int(rank), lighthouse))
    return found


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
        name = event["event"]
        if name == "worker_exited":
            _note_exit(life, time, event)
        elif name == "replica_gave_up":
            life.gave_up_us = time
        elif name == "hung":
            life.hung_us = life.hung_us or time
        elif name not in SUPERVISOR_EVENTS and integer(event, "rank") == 0:
            life.moments.append((time, event))
    groups: dict[int, list[Life]] = defaultdict(list)
    for life in sorted(lives.values(), key=lambda life: life.attempt):
        before = groups[life.replica][-1].exit_us if groups[life.replica] else None
        _find_fault(life, faults, since=before or 0)
        groups[life.replica].append(life)
    return dict(groups)


def _note_exit(life: Life, time: int, event: Event) -> None:
    life.exit_us = time if life.exit_us is None else life.exit_us
    by_signal, code = event.get("signal"), event.get("code")
    if event.get("stopped"):
        life.stopped = life.stopped or not life.failed
    elif (by_signal or code not in (None, 0)) and not life.failed:
        life.failed, life.stopped = True, False
        life.cause = str(by_signal) if by_signal else f"exit code {code}"


def _find_fault(life: Life, faults: Sequence[Fault], since: int) -> None:
    """Name the fault that ended a life: the last deadly one that hit it, else the last that it did not survive."""
    if not life.failed or life.exit_us is None:
        return
    hits = [f for f in faults if f.replica == life.replica and since <= f.time_us <= (life.exit_us or 0)]
    commits = [time for time, event in life.moments if event["event"] == "step_committed"]
    last = commits[-1] if commits else 0
    fatal = [f for f in hits if f.deadly] or [f for f in hits if (f.undone_us or f.time_us) >= last]
    if fatal:
        life.fault = fatal[-1]
        life.cause = f"{life.fault.name} ({life.cause})"
