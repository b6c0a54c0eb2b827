# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The events of a run beside its faults, in plain words; each once, however many groups report it.

The report shows the notes, and `titan_ft.history.checks.silence` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from titan_ft.history.fold.unit import Unit
from titan_ft.history.record.run_record import RunRecord, view
from titan_ft.run import events as ev

SAME_SECONDS = 10.0
"""Equal reports of several groups within this time are about one happening."""
_OF_ONE_GROUP = (ev.AgentEnded, ev.ReplicaGaveUp, ev.SpareTookOver)
"""Each of these events is a happening of its own, also if its text is equal to the one before."""


@dataclass
class Note:
    """A happening, or several equal ones in a row."""

    time: float
    """Seconds since the begin of the run."""
    event: str
    where: str
    """The groups that reported it, or the target that it was about."""
    text: str
    count: int = 1


# The text of each event. Groups report one happening in the same words, so a text has no figures
# that differ between groups. An event with an empty text gives no note.
TEXTS: dict[type[ev.Event], Callable[[Any, Unit], str]] = {
    ev.FaultSkipped: lambda e, u: f"fault skipped: {e.fault} ({e.reason})",
    ev.DonorLost: lambda e, u: (
        f"lost group {e.donor}, which it fetched a part of the state from: {e.error}"
    ),
    ev.HealFailed: lambda e, u: (
        f"could not fetch the state from group {e.donor}, another donor is asked: {e.error}"
    ),
    ev.DigestMismatch: lambda e, u: (
        f"after {u.name(e.step, ',')} the state of {name_groups(e.minority)} was not that of the others"
        if e.minority
        else f"after {u.name(e.step, ',')} the groups' states differed, and no majority told which one is right"
    ),
    ev.GradientExcluded: lambda e, u: (
        f"left out of {u.name(e.step, ',')}, as not finite: the gradient of {name_groups(e.slots)}"
    ),
    ev.Straggler: lambda e, u: (
        f"group {e.slot} became slower than the others ({e.factor:.1f} times their step)"
    ),
    ev.StragglerRecovered: lambda e, u: f"group {e.slot} is as fast as the others again",
    ev.Hung: lambda e, u: f"made no progress after {u.name(e.step, ',')}, and ended itself",
    ev.RankSilent: lambda e, u: (
        f"ranks {_list(e.ranks)} (on {_list(e.hosts)}) fell silent, and the group ended itself"
    ),
    ev.ForeignMember: lambda e, u: (
        f"the lighthouse named {e.member}, which was left aside: {e.reason}"
    ),
    ev.RolledBack: lambda e, u: (
        f"the latest state was lost with its groups: back to {u.name(e.step, ',')}, by {e.lost:,} {u.noun}s"
    ),
    ev.StartedAnew: lambda e, u: "nobody held a state any more: training began again with step 1",
    ev.LoaderChecked: lambda e, u: (
        ""
        if e.exact
        else f"the data loader does not go on exactly where its state was saved: {e.reason} ({e.loader})"
    ),
    ev.DataOpened: lambda e, u: (
        f"slot {e.slot}, opened at batch {e.first_batch}, gave another batch than the one that follows there"
        if e.exact is False
        else ""
    ),
    ev.DataReset: lambda e, u: (
        f"the data began anew behind the checkpoint of step {e.step:,}: {e.reason}"
    ),
    ev.CheckpointLoaded: lambda e, u: f"went on from the checkpoint of step {e.step:,}",
    ev.SavingBeforeLeaving: lambda e, u: (
        f"the job's state left with the last groups, and was to be saved as the checkpoint of step {e.step:,}"
        + (f", perhaps not in time: {e.shortage}" if e.shortage else "")
    ),
    ev.CheckpointFailed: lambda e, u: (
        f"the checkpoint of step {e.step:,} could not be written: {e.error}"
    ),
    ev.CheckpointSkipped: lambda e, u: (
        f"the checkpoint of step {e.step:,} is damaged, and that of step {e.instead:,} was loaded instead: {e.reason}"
    ),
    ev.CheckpointSetAside: lambda e, u: (
        f"a checkpoint of another job is {e.folder} now, for the job went back before it (saved: step {e.step:,})"
    ),
    ev.CheckpointWithdrawn: lambda e, u: (
        f"the checkpoint of step {e.step:,} was removed: its state was corrupt"
    ),
    ev.AgentEnded: lambda e, u: f"ended: {e.reason}",
    ev.ReplicaGaveUp: lambda e, u: f"was not started again: {e.reason}",
    ev.SpareTookOver: lambda e, u: "a spare took its place",
    ev.LighthouseRestarted: lambda e, u: (
        f"a new lighthouse listened after {e.seconds:.1f} s: {e.reason}"
    ),
    ev.LighthouseRenewed: lambda e, u: (
        f"the lighthouse started anew and forgot {e.num_ended:,} processes that had ended"
    ),
    ev.StrangerRefused: lambda e, u: (
        f"the {e.port or 'lighthouse'} refused {e.reason}, first from {e.source}"
    ),
    ev.CameTooLate: lambda e, u: f"came when {u.name(e.step, ',')}, the last, was made, and ended",
    ev.LighthouseMoved: lambda e, u: f"followed the lighthouse from {e.former} to {e.address}",
    ev.HostLeft: lambda e, u: (
        f"left host {e.host}, on which {e.deaths} workers had died, to be started elsewhere"
    ),
    ev.Waiting: lambda e, u: f"{u.name(e.step + 1, ',')} had to wait: {e.reason}",
    ev.LaunchStarted: lambda e, u: (
        f"went on with other values: {'; '.join(e.allowed)}" if e.allowed else ""
    ),
    ev.EventsDelayed: lambda e, u: (
        f"could not write its events for a while ({e.error}): they came late"
    ),
    ev.EventsDropped: lambda e, u: f"lost events that it could not write ({e.error})",
    ev.LaunchStopping: lambda e, u: f"all groups were asked to leave: {e.reason}",
}


@dataclass
class _Report:
    """The last note with one text, and the groups that reported it."""

    note: Note
    reporters: set[int | None]


@view
def find_notes(record: RunRecord) -> list[Note]:
    """Return the notes in order of time. Equal notes in a row are one, with their count.

    Several groups, or ranks of a group, report one happening in the same words. Within
    `SAME_SECONDS` their reports are one note."""
    reports: dict[tuple[str, str], _Report] = {}
    notes: list[Note] = []
    for event in record.events:
        describe = TEXTS.get(type(event))
        text = "" if describe is None else describe(event, record.unit)
        if not text:
            continue
        time = event.time - record.begin
        target = ""
        if isinstance(event, ev.FaultSkipped) and event.target is not None:
            target = name_target(event.target)
        where = target or _where(event)
        known = reports.get((event.name, text))
        if known is not None:
            is_soon = time - known.note.time <= SAME_SECONDS
            if is_soon and not target and event.replica is not None:
                known.reporters.add(event.replica)
                known.note.where = name_groups(known.reporters)
                if isinstance(event, _OF_ONE_GROUP):
                    known.note.count += 1
                continue
            if notes[-1] is known.note and known.note.where == where:
                known.note.count += 1
                continue
        note = Note(time, event.name, where, text)
        notes.append(note)
        reports[event.name, text] = _Report(note, {event.replica})
    return notes


def name_groups(replicas: Iterable[int | None], rank: int | None = None) -> str:
    """Return groups, and their rank if one is given, in words."""
    known = sorted(replica for replica in replicas if replica is not None)
    noun = "group" if len(known) == 1 else "groups"
    groups = f"{noun} {', '.join(map(str, known))}"
    return groups if rank is None else f"{groups}, rank {rank}"


def name_target(target: ev.Target) -> str:
    """Return the target of a fault in words."""
    return "lighthouse" if target.lighthouse else name_groups((target.replica,), target.rank)


def _where(event: ev.Event) -> str:
    return "job" if event.replica is None else f"group {event.replica}"


def _list(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
