# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Fold the events of a run into what its report shows: faults, curves, recoveries, notes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from titan_ft.history.check import Report
from titan_ft.history.checks.judgement import Offence
from titan_ft.history.failures import group_commits
from titan_ft.history.goodput import Goodput
from titan_ft.history.stalls import Stall, stalls
from titan_ft.history.summary import RunSummary
from titan_ft.run.events import (
    ChaosStarted,
    CheckpointFailed,
    DataReset,
    DigestMismatch,
    Event,
    FaultInjected,
    FaultSkipped,
    ForeignMember,
    GradientExcluded,
    HealFailed,
    Hung,
    LaunchFinished,
    LaunchStarted,
    LaunchStopping,
    LighthouseRestarted,
    RankSilent,
    ReplicaGaveUp,
    RolledBack,
    SpareTookOver,
    StartedAnew,
    StepCommitted,
    Straggler,
    Target,
    Waiting,
)

# Events that a reader should know of, and the fields that say why.
NOTABLE: dict[type[Event], tuple[str, ...]] = {
    FaultSkipped: ("fault", "reason"),
    HealFailed: ("donor", "error"),
    DigestMismatch: ("step", "minority"),
    GradientExcluded: ("step", "slots"),
    Straggler: ("slot", "factor"),
    Hung: ("step",),
    RankSilent: ("ranks", "hosts"),
    ForeignMember: (),
    RolledBack: ("step", "lost"),
    StartedAnew: (),
    DataReset: ("reason",),
    CheckpointFailed: ("step", "error"),
    ReplicaGaveUp: ("reason",),
    SpareTookOver: (),
    LighthouseRestarted: ("reason",),
    Waiting: ("reason",),
    LaunchStopping: ("reason",),
}


@dataclass(frozen=True)
class Span:
    """A stretch of time of one group in one state; seconds since the beginning."""

    start: float
    end: float
    state: str


@dataclass(frozen=True)
class Fault:
    """One injected fault, or a failure that nobody injected, and what it cost."""

    time: float
    """Seconds since the beginning."""
    target: str
    """In words."""
    step: int | None
    """The first step that was committed after it; None if none was."""
    cost: Stall

    @property
    def kind(self) -> str:
        return self.cost.fault

    @property
    def replicas(self) -> tuple[int, ...]:
        """The groups that it hit; none for the lighthouse."""
        return self.cost.replicas


@dataclass(frozen=True)
class Note:
    """Something that happened once or several times in a row."""

    time: float
    event: str
    where: str
    text: str
    count: int = 1


@dataclass(frozen=True)
class Promise:
    """What the checker says of one promise, or of what all of them rest on."""

    number: int | None
    name: str
    verdict: str
    """holds, does not hold, unknown or not asked."""
    statement: str
    details: list[str]
    """Offending events, then why it cannot be told, then notes."""


@dataclass(frozen=True)
class Commits:
    """The curves of a run. Of a step that several groups committed, the lowest replica speaks; the last word counts."""

    losses: list[tuple[int, float | None]]
    """(step, loss); None for a loss that was not finite."""
    participants: list[tuple[float, int]]
    """(seconds since the beginning, groups with weight) at each commit."""
    step_seconds: list[float]
    """Of each group's rank 0."""
    tokens: int


@dataclass
class RunReport:
    """All that the report of a run shows."""

    summary: RunSummary
    goodput: Goodput
    plan: dict[str, Any]
    """Seed, plan, schedule, job_id, reason; those that are known."""
    seconds: float
    commits: Commits
    faults: list[Fault]
    notes: list[Note]
    check: Report
    groups: dict[int, list[Span]]


def fold_commits(history: Sequence[Event], begin: float) -> Commits:
    """Fold the commits of a history that is sorted by time."""
    commits = group_commits(history)
    best: dict[int, StepCommitted] = {}
    for event in commits:
        known = best.get(event.step)
        again = known is not None and event.lineage != known.lineage  # the job went back
        if known is None or again or event.replica < known.replica:
            best[event.step] = event
    return Commits(
        losses=[(step, best[step].loss) for step in sorted(best)],
        participants=sorted((event.time - begin, len(event.participants)) for event in best.values()),
        step_seconds=[event.seconds for event in commits],
        tokens=sum(event.tokens for event in best.values()),
    )


def find_faults(history: Sequence[Event], begin: float) -> list[Fault]:
    """Return the faults and the failures of a history that is sorted by time."""
    commits = group_commits(history)
    times = [event.time for event in commits]
    faults = []
    for cost in stalls(history):
        after = bisect_left(times, cost.time)
        step = commits[after].step if after < len(commits) else None
        faults.append(Fault(cost.time - begin, _name_groups(cost), step, cost))
    return faults


def _name_groups(cost: Stall) -> str:
    if not cost.replicas:
        return "lighthouse" if "lighthouse" in cost.fault else "none"
    groups = ("group " if len(cost.replicas) == 1 else "groups ") + ", ".join(map(str, cost.replicas))
    return groups if cost.rank is None else f"{groups}, rank {cost.rank}"


def name_target(target: Target) -> str:
    """Return the target of a skipped fault in words."""
    if target.lighthouse:
        return "lighthouse"
    return f"group {target.replica}" + ("" if target.rank is None else f", rank {target.rank}")


def count_kinds(kinds: Iterable[str]) -> list[tuple[str, int]]:
    """Return kinds and how many of each, the most frequent first."""
    return sorted(Counter(kinds).items(), key=lambda item: (-item[1], item[0]))


def read_promises(report: Report) -> list[Promise]:
    """Return what the checker says, in words."""
    return [
        Promise(
            number=each.promise,
            name=each.name,
            verdict=each.verdict if each.asked else "not asked",
            statement=each.statement,
            details=[*(_tell(offence, report.start) for offence in each.offences), *each.unknown, *each.notes],
        )
        for each in report.judgements
    ]


def _tell(offence: Offence, start: float) -> str:
    where = [f"{offence.time - start:.2f} s"] if offence.time is not None else []
    places = (("group", offence.replica), ("rank", offence.rank), ("step", offence.step))
    where += [f"{name} {value}" for name, value in places if value is not None]
    return f"{', '.join(where)}: {offence.text}" if where else offence.text


def find_notes(history: Iterable[Event], begin: float) -> list[Note]:
    """Return what else a reader should know; the same words again in a row are counted."""
    notes: list[Note] = []
    for event in history:
        fields = NOTABLE.get(type(event))
        if fields is None or event.rank:  # rank 0 speaks for its group
            continue
        details = [_say(name, getattr(event, name)) for name in fields]
        where = "job" if event.replica is None else f"group {event.replica}"
        if isinstance(event, FaultSkipped) and event.target is not None:
            where = name_target(event.target)
        note = Note(event.time - begin, event.name, where, ", ".join(details))
        last = notes[-1] if notes else None
        if last is not None and (last.event, last.where, last.text) == (note.event, note.where, note.text):
            notes[-1] = Note(last.time, last.event, last.where, last.text, last.count + 1)
        else:
            notes.append(note)
    return notes


def _say(name: str, value: Any) -> str:
    """Return a field in words; a text speaks for itself."""
    if isinstance(value, list):
        value = " ".join(map(str, value))
    elif isinstance(value, float):
        value = f"{value:.3g}"
    return str(value) if name in ("reason", "error", "fault") else f"{name} {value}"


def plan_of(history: Iterable[Event]) -> dict[str, Any]:
    """Return seed, plan and schedule of a run's chaos, its job's id and why it ended; the last word on each."""
    found: dict[str, Any] = {}
    for event in history:
        match event:
            case ChaosStarted():
                found |= {"seed": event.seed, "plan": event.plan, "schedule": event.schedule}
            case LaunchStarted():
                found.pop("reason", None)  # an earlier launch ended so
                found["job_id"] = event.job_id
            case LaunchFinished():
                found["reason"] = event.reason
            # A fault of a plan has a seed of its own, which follows from the plan's.
            case FaultInjected(seed=int(seed)) if "plan" not in found:
                found["seed"] = seed
    return found


def duration(seconds: float | None) -> str:
    """Return a duration with its unit and a sensible number of digits."""
    if seconds is None:
        return "unknown"
    if 0 < abs(seconds) < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if abs(seconds) < 100:
        return f"{seconds:.{2 if abs(seconds) < 9.995 else 1}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def clock(seconds: float) -> str:
    """Return seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(num_bytes: float) -> str:
    """Return an amount of bytes with its unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"
