# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The events of a run beside its faults, in plain words; each once, however many groups report it.

The report shows the notes, and `titan_ft.history.checks.silence` counts them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from titan_ft.history.fold.unit import Unit
from titan_ft.history.record.run_record import RunRecord, once_per_record
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


def _describe(event: ev.Event, unit: Unit) -> str:
    """Return the text of an event; empty for an event that gives no note.

    Groups report one happening in the same words, so a text has no figures that differ between
    groups.
    """
    match event:
        case ev.StepCommitted():
            return ""  # nearly all events of a long run
        # Faults
        case ev.FaultSkipped():
            return f"fault skipped: {event.fault} ({event.reason})"
        # Heals
        case ev.DonorLost():
            part = "which it fetched a part of the state from"
            return f"lost group {event.donor}, {part}: {event.error}"
        case ev.HealFailed():
            failed = f"could not fetch the state from group {event.donor}"
            return f"{failed}, another donor is asked: {event.error}"
        # The groups' states and gradients
        case ev.DigestMismatch():
            step = unit.name(event.step, ",")
            if event.minority:
                state = f"the state of {name_groups(event.minority)}"
                return f"after {step} {state} was not that of the others"
            differ = "the groups' states differed, and no majority told which one is right"
            return f"after {step} {differ}"
        case ev.GradientExcluded():
            gradient = f"the gradient of {name_groups(event.slots)}"
            return f"left out of {unit.name(event.step, ',')}, as not finite: {gradient}"
        case ev.RolledBack():
            lost = "the latest state was lost with its groups"
            return f"{lost}: back to {unit.name(event.step, ',')}, by {event.lost:,} {unit.noun}s"
        case ev.StartedAnew():
            return "nobody held a state any more: training began again with step 1"
        # Slow, hung and silent groups
        case ev.Straggler():
            times = f"{event.factor:.1f} times their step"
            return f"group {event.slot} became slower than the others ({times})"
        case ev.StragglerRecovered():
            return f"group {event.slot} is as fast as the others again"
        case ev.Hung():
            return f"made no progress after {unit.name(event.step, ',')}, and ended itself"
        case ev.RankSilent():
            ranks = f"ranks {_list(event.ranks)} (on {_list(event.hosts)})"
            return f"{ranks} fell silent, and the group ended itself"
        case ev.Waiting():
            return f"{unit.name(event.step + 1, ',')} had to wait: {event.reason}"
        # Data
        case ev.LoaderChecked() if not event.exact:
            fault = "the data loader does not go on exactly where its state was saved"
            return f"{fault}: {event.reason} ({event.loader})"
        case ev.DataOpened() if event.exact is False:
            place = f"slot {event.slot}, opened at batch {event.first_batch}"
            return f"{place}, gave another batch than the one that follows there"
        case ev.DataReset():
            checkpoint = f"the checkpoint of step {event.step:,}"
            return f"the data began anew behind {checkpoint}: {event.reason}"
        # Checkpoints
        case ev.CheckpointLoaded():
            return f"went on from the checkpoint of step {event.step:,}"
        case ev.SavingBeforeLeaving():
            text = (
                "the job's state left with the last groups, and was to be saved as the checkpoint"
            )
            text += f" of step {event.step:,}"
            if event.shortage:
                text += f", perhaps not in time: {event.shortage}"
            return text
        case ev.CheckpointFailed():
            return f"the checkpoint of step {event.step:,} could not be written: {event.error}"
        case ev.CheckpointSkipped():
            instead = f"that of step {event.instead:,} was loaded instead"
            damaged = f"the checkpoint of step {event.step:,} is damaged"
            return f"{damaged}, and {instead}: {event.reason}"
        case ev.CheckpointSetAside():
            why = f"for the job went back before it (saved: step {event.step:,})"
            return f"a checkpoint of another job is {event.folder} now, {why}"
        case ev.CheckpointWithdrawn():
            return f"the checkpoint of step {event.step:,} was removed: its state was corrupt"
        # Ends and restarts of groups
        case ev.AgentEnded():
            return f"ended: {event.reason}"
        case ev.ReplicaGaveUp():
            return f"was not started again: {event.reason}"
        case ev.SpareTookOver():
            return "a spare took its place"
        case ev.CameTooLate():
            return f"came when {unit.name(event.step, ',')}, the last, was made, and ended"
        case ev.HostLeft():
            deaths = f"on which {event.deaths} workers had died"
            return f"left host {event.host}, {deaths}, to be started elsewhere"
        # The lighthouse, strangers and the launcher
        case ev.ForeignMember():
            return f"the lighthouse named {event.member}, which was left aside: {event.reason}"
        case ev.LighthouseRestarted():
            return f"a new lighthouse listened after {event.seconds:.1f} s: {event.reason}"
        case ev.LighthouseRenewed():
            ended = f"{event.num_ended:,} processes that had ended"
            return f"the lighthouse started anew and forgot {ended}"
        case ev.LighthouseMoved():
            return f"followed the lighthouse from {event.former} to {event.address}"
        case ev.StrangerRefused():
            port = event.port or "lighthouse"
            return f"the {port} refused {event.reason}, first from {event.source}"
        case ev.LaunchStarted() if event.allowed:
            return f"went on with other values: {'; '.join(event.allowed)}"
        case ev.LaunchStopping():
            return f"all groups were asked to leave: {event.reason}"
        # Events
        case ev.EventsDelayed():
            return f"could not write its events for a while ({event.error}): they came late"
        case ev.EventsDropped():
            return f"lost events that it could not write ({event.error})"
    return ""


@dataclass
class _Report:
    """The last note with one text, and the groups that reported it."""

    note: Note
    reporters: set[int | None]


@once_per_record
def find_notes(record: RunRecord) -> list[Note]:
    """Return the notes in order of time. Equal notes in a row are one, with their count.

    Several groups, or ranks of a group, report one happening in the same words. Within
    `SAME_SECONDS` their reports are one note."""
    reports: dict[tuple[str, str], _Report] = {}
    notes: list[Note] = []
    for event in record.events:
        text = _describe(event, record.unit)
        if not text:
            continue
        time = event.time - record.begin
        target = ""
        if isinstance(event, ev.FaultSkipped) and event.target is not None:
            target = name_target(event.target)
        where = target or _name_writer(event)
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


def name_groups(slots: Iterable[int | None], rank: int | None = None) -> str:
    """Return groups, and their rank if one is given, in words."""
    known = sorted(slot for slot in slots if slot is not None)
    noun = "group" if len(known) == 1 else "groups"
    groups = f"{noun} {_list(known)}"
    if rank is None:
        return groups
    return f"{groups}, rank {rank}"


def name_target(target: ev.Target) -> str:
    """Return the target of a fault in words."""
    if target.lighthouse:
        return "lighthouse"
    return name_groups((target.replica,), target.rank)


def _name_writer(event: ev.Event) -> str:
    """Return the group of an event's writer in words; the job if the writer has none."""
    if event.replica is None:
        return "job"
    return f"group {event.replica}"


def _list(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
