# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Promise 8: whatever ends, fails or is broken has its event, and something follows from it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from titan_ft.history.checks.foundation import clock_jumps, object_to_absence
from titan_ft.history.fold.faults import expected_outcome
from titan_ft.history.judgement import Judgement, count
from titan_ft.history.outcomes.crashes import find_crashes
from titan_ft.history.outcomes.notes import find_notes
from titan_ft.history.outcomes.outcome import find_outcome
from titan_ft.history.record.run_record import ProcessHistory, RunRecord
from titan_ft.run import events as ev

NOTED: tuple[type[ev.Event], ...] = (
    ev.DigestMismatch,
    ev.Hung,
    ev.RankSilent,
    ev.RolledBack,
    ev.StartedAnew,
    ev.DataReset,
    ev.ForeignMember,
    ev.StrangerRefused,
    ev.CheckpointFailed,
    ev.CheckpointSkipped,
    ev.AgentEnded,
    ev.ReplicaGaveUp,
    ev.LighthouseRestarted,
    ev.LighthouseMoved,
    ev.HostLeft,
    ev.EventsDelayed,
    ev.EventsDropped,
)
"""Nothing that breaks a promise by itself, but worth knowing."""
ENDS = ("killed", "left", "hung")
"""Outcomes of faults after which the target's processes must be seen to end."""
END_SECONDS = 30.0
"""A group that ends so shortly before the launch does is not started again."""
CLOCK_SECONDS = 1.0
_ENDS_OF_HEALS = (
    ev.HealFinished,
    ev.HealFailed,
    ev.CatchUpRenewed,
    ev.RolledBack,
    ev.EventsDropped,
)
FOLLOWED: tuple[type[ev.GroupEvent], ...] = (ev.ReplicaRestarted, ev.ReplicaGaveUp, ev.SpareTookOver)


def check_silence(record: RunRecord, found: Judgement) -> None:
    """Check that each end, heal and fault is explained by what follows it."""
    jumped = bool(clock_jumps(record))
    for process in record.processes:
        _check_heals(process, record, found)
    _check_ends(record, found)
    _check_lost(record, found)
    exits = _check_exits(record, found, jumped)
    faults = _check_faults(record, found, jumped)
    found.statement = (
        f"{count(exits, 'exit')} of workers explained, {count(faults, 'fault')} seen to have followed by their ends"
    )
    found.notes += [f"ended by {crash.describe(record.begin)}" for crash in find_crashes(record)]
    found.notes += [f"{name.replace('_', ' ')}: {count(times, 'time')}" for name, times in _noted(record).items()]
    found.reservation = _unsaved(record)
    if jumped:
        found.unknown.append("the wall clock jumped: what followed what is unknown")
    if not record.processes:
        found.unknown.append("no worker wrote an event")


def _noted(record: RunRecord) -> Counter[str]:
    """Return how often what is worth knowing happened, each once however many groups told of it."""
    names = {str(kind.__struct_config__.tag) for kind in NOTED}
    counts = Counter[str]()
    for note in find_notes(record):
        if note.event in names:
            counts[note.event] += note.count
    return counts


def _unsaved(record: RunRecord) -> str:
    """Say which checkpoint is missing in the end because it could not be saved; empty if none is."""
    failed = max(record.of(ev.CheckpointFailed), key=lambda event: event.step, default=None)
    saved = max((event.step for event in record.of(ev.CheckpointSaved)), default=0)
    if failed is None or failed.step <= saved:
        return ""
    left = f"the latest is that of step {saved}" if saved else "there is none"
    return f"the checkpoint of step {failed.step} could not be saved ({failed.error}): {left}"


def _check_ends(record: RunRecord, found: Judgement) -> None:
    """Object to processes that fell silent without an event of their own or of their agent about it."""
    failure = next((event.reason for event in record.of(ev.LaunchFinished)[-1:] if event.code), None)
    without_end = []
    named = {group.slot for group in find_outcome(record).lost}
    for process in record.processes:
        if process.ended_in_order or process.exit is not None:
            continue
        if process.attempt < record.attempts[process.replica][-1].number:
            continue
        if record.launch_end is not None and not failure:
            object_to_absence(record, found, "fell silent, and no agent reports its end", process.events[-1])
        elif record.launch_end is not None:
            # As when its agent was killed: the launcher says that the group failed.
            found.notes.append(f"{process.name} fell silent; the launch says: {failure}")
        elif process.replica not in named:
            without_end.append(process.name)
    if without_end and not record.goes_on:
        found.unknown.append(f"nothing tells how {count(len(without_end), 'worker')} ended (first: {without_end[0]})")


def _check_lost(record: RunRecord, found: Judgement) -> None:
    """Object to groups that are lost, and that no event says anything about."""
    for group in find_outcome(record).lost:
        if group.reason is None and record.launch_end is None:
            object_to_absence(record, found, f"{group.describe()}")
        else:
            found.notes.append(group.describe())


def _check_exits(record: RunRecord, found: Judgement, jumped: bool) -> int:
    """Object to exits without a reason, and to failed groups that are neither restarted nor given up."""
    exits = record.of(ev.WorkerExited)
    agents = [event for event in record.of(ev.AgentEnded) if event.restarts]
    followed: dict[int, list[ev.GroupEvent]] = defaultdict(list)
    for later in record.of(*FOLLOWED):
        followed[later.replica].append(later)
    stopping = min((event.time for event in record.of(ev.LaunchStopping)), default=None)
    ends: list[ev.WorkerExited | ev.AgentEnded] = [*exits, *agents]
    for event in ends:
        was_started = isinstance(event, ev.WorkerExited) or event.agent_pid is not None
        has_status = event.code is not None or bool(event.signal)
        if not event.reason or (was_started and not has_status):
            found.object_to("a worker ended without a reason", event)
        if (isinstance(event, ev.WorkerExited) and event.stopped) or event.cause is None or jumped:
            continue
        if any(_follows(event, later) for later in followed[event.replica]):
            continue
        # Where the launch's own end is missing, so may be what followed.
        ended = record.launch_end is None or record.launch_end - event.time <= END_SECONDS
        if not ended and not (stopping is not None and stopping <= event.time):
            text = "a worker or an agent failed, and its group was neither started again nor given up"
            object_to_absence(record, found, text, event)
    return len(exits)


def _follows(exit: ev.WorkerExited | ev.AgentEnded, later: ev.GroupEvent) -> bool:
    """Tell whether an event is about what became of a group after an exit."""
    least = exit.attempt + (not isinstance(later, ev.ReplicaGaveUp))
    return later.attempt >= least or later.time >= exit.time


def _check_heals(process: ProcessHistory, record: RunRecord, found: Judgement) -> None:
    """Object to a heal that neither ended nor failed in a process that trained on."""
    begun: ev.HealStarted | None = None
    for event in process.events:
        if isinstance(event, (ev.StepCommitted, ev.TrainingFinished)):
            if begun is not None:
                text = "began a heal, and trains on without an event about how it ended"
                object_to_absence(record, found, text, begun)
            begun = None
        elif isinstance(event, ev.HealStarted):
            begun = event
        elif isinstance(event, _ENDS_OF_HEALS):
            begun = None
    ended = process.exit is not None or process.ended_in_order or record.launch_end is not None
    if begun is not None and not ended and not record.goes_on:
        found.unknown.append(f"nothing tells how the heal of {process.name} ended")


def _check_faults(record: RunRecord, found: Judgement, jumped: bool) -> int:
    """Object to faults that must end a process, and after which none ended; return how many others there are."""
    ends: dict[int, list[ev.Event]] = defaultdict(list)
    for end in record.of(ev.WorkerExited, ev.AgentEnded, ev.Drained, *FOLLOWED):
        ends[end.replica or 0].append(end)
    finished = {event.replica: event.time for event in record.of(ev.TrainingFinished)}
    seen = 0
    for event in record.of(ev.FaultInjected):
        later: Sequence[ev.Event]
        outcome = expected_outcome(event.fault)
        if outcome == "relaunched":
            later = [*record.of(ev.LighthouseRestarted), *record.of(ev.LaunchFinished)]
        elif outcome in ENDS:
            later = [] if event.target.replica is None else ends[event.target.replica]
        else:
            continue
        if jumped:
            continue
        if any(end.time >= event.time - CLOCK_SECONDS for end in later):
            seen += 1
        elif not _is_over(event, finished, record):
            text = f"the fault {event.fault} was injected, and no event says that anything ended"
            object_to_absence(record, found, text, event)
    return seen


def _is_over(fault: ev.FaultInjected, finished: dict[int, float], record: RunRecord) -> bool:
    """Tell whether a fault came when its target had finished, or the launch was about to end."""
    late = record.launch_end is None or record.launch_end - fault.time <= END_SECONDS
    replica = fault.target.replica
    return late or (replica is not None and finished.get(replica, fault.time + 1) <= fault.time)
