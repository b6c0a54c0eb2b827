# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the report of a run shows beside its views: recoveries, notes, the plan of its chaos."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from titan_ft.history.check import check
from titan_ft.history.goodput import goodput
from titan_ft.history.incidents import Incident, count_faults, find_incidents
from titan_ft.history.record import RunRecord, view
from titan_ft.history.summary import summarize
from titan_ft.run import events as ev

# Events that a reader should know of, and the fields that say why.
NOTABLE: dict[type[ev.Event], tuple[str, ...]] = {
    ev.FaultSkipped: ("fault", "reason"),
    ev.HealFailed: ("donor", "error"),
    ev.DigestMismatch: ("step", "minority"),
    ev.GradientExcluded: ("step", "slots"),
    ev.Straggler: ("slot", "factor"),
    ev.Hung: ("step",),
    ev.RankSilent: ("ranks", "hosts"),
    ev.ForeignMember: (),
    ev.RolledBack: ("step", "lost"),
    ev.StartedAnew: (),
    ev.DataReset: ("reason",),
    ev.CheckpointFailed: ("step", "error"),
    ev.ReplicaGaveUp: ("reason",),
    ev.SpareTookOver: (),
    ev.LighthouseRestarted: ("reason",),
    ev.Waiting: ("reason",),
    ev.LaunchStopping: ("reason",),
}


@dataclass(frozen=True)
class Recovery:
    """A fault, or a failure that nobody injected, and what it cost."""

    time: float
    """Seconds since the beginning."""
    step: int | None
    """The first step that was committed after it; None if none was."""
    incident: Incident

    @property
    def target(self) -> str:
        """Whom it hit, in words."""
        if not self.incident.replicas:
            return "lighthouse" if "lighthouse" in self.incident.fault else "none"
        return _name_groups(self.incident.replicas, self.incident.rank)


@dataclass(frozen=True)
class Note:
    """Something that happened once or several times in a row."""

    time: float
    event: str
    where: str
    text: str
    count: int = 1


def report_figures(record: RunRecord, against: RunRecord | None = None) -> dict[str, Any]:
    """Return the figures of a run for JSON: those of its summary, and more. `against` is `check`'s."""
    return summarize(record).to_dict() | {
        "chaos": plan_of(record),
        "faults_by_kind": count_faults(record),
        "goodput": goodput(record).to_dict(),
        "stalls": [each.incident.to_dict() for each in find_recoveries(record)],
        "check": check(record, against).to_dict(),
        "notes": [asdict(note) for note in find_notes(record)],
    }


@view
def find_recoveries(record: RunRecord) -> list[Recovery]:
    """Return the faults and the failures of a run, in order of time."""
    found = []
    for incident in find_incidents(record):
        if incident.failed:
            after = bisect_right(record.commits, incident.time, key=lambda event: event.time)
            step = record.commits[after].step if after < len(record.commits) else None
            found.append(Recovery(incident.time - record.begin, step, incident))
    return found


def _name_groups(replicas: Sequence[int | None], rank: int | None) -> str:
    groups = ("group " if len(replicas) == 1 else "groups ") + ", ".join(map(str, replicas))
    return groups if rank is None else f"{groups}, rank {rank}"


def find_notes(record: RunRecord) -> list[Note]:
    """Return what else a reader should know; equal notes in a row are counted."""
    notes: list[Note] = []
    for event in record.events:
        fields = NOTABLE.get(type(event))
        if fields is None or event.rank:  # rank 0's event stands for its group's
            continue
        details = [_say(name, getattr(event, name)) for name in fields]
        where = "job" if event.replica is None else f"group {event.replica}"
        if isinstance(event, ev.FaultSkipped) and event.target is not None:
            target = event.target
            where = "lighthouse" if target.lighthouse else _name_groups((target.replica,), target.rank)
        note = Note(event.time - record.begin, event.name, where, ", ".join(details))
        last = notes[-1] if notes else None
        if last is not None and (last.event, last.where, last.text) == (note.event, note.where, note.text):
            notes[-1] = Note(last.time, last.event, last.where, last.text, last.count + 1)
        else:
            notes.append(note)
    return notes


def _say(name: str, value: Any) -> str:
    """Return a field in words: with its name, unless it is a text."""
    if isinstance(value, list):
        value = " ".join(map(str, value))
    elif isinstance(value, float):
        value = f"{value:.3g}"
    return str(value) if name in ("reason", "error", "fault") else f"{name} {value}"


def plan_of(record: RunRecord) -> dict[str, Any]:
    """Return seed, plan and schedule of a run's chaos, its job's id and why it ended; of each the latest."""
    found: dict[str, Any] = {}
    for event in record.events:
        match event:
            case ev.ChaosStarted():
                found |= {"seed": event.seed, "plan": event.plan, "schedule": event.schedule}
            case ev.LaunchStarted():
                found.pop("reason", None)  # an earlier launch ended so
                found["job_id"] = event.job_id
            case ev.LaunchFinished():
                found["reason"] = event.reason
            # A fault of a plan has a seed of its own, which follows from the plan's.
            case ev.FaultInjected(seed=int(seed)) if "plan" not in found:
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
