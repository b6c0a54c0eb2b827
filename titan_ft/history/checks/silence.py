# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Promise 8: each end, failure and fault has its event, and an event that follows from it.

See docs/guarantees.md.
"""

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
    ev.LighthouseRenewed,
    ev.HostLeft,
    ev.EventsDelayed,
    ev.EventsDropped,
)
"""Events that break no promise, and that a reader should know of."""
ENDS = ("killed", "left", "hung")
"""Outcomes of faults after which some event must report the end of the target's processes."""
END_SECONDS = 30.0
"""A group that ends within this time before the end of the launch is not started again."""
CLOCK_SECONDS = 1.0
"""The clocks of two hosts may differ by this much."""
_ENDS_OF_HEALS = (
    ev.HealFinished,
    ev.HealFailed,
    ev.CatchUpRenewed,
    ev.RolledBack,
    ev.EventsDropped,
)
FOLLOWED: tuple[type[ev.GroupEvent], ...] = (
    ev.ReplicaRestarted,
    ev.ReplicaGaveUp,
    ev.SpareTookOver,
)
"""Events one of which must follow the failure of a group."""


def check_silence(record: RunRecord, found: Judgement) -> None:
    """Check that an event explains each end, each heal and each fault."""
    jumped = bool(clock_jumps(record))
    for process in record.processes:
        _check_heals(process, record, found)
    _check_ends(record, found)
    _check_lost(record, found)
    num_exits = _check_exits(record, found, jumped)
    num_faults = _check_faults(record, found, jumped)
    exits = f"{count(num_exits, 'exit')} of workers explained"
    found.statement = f"{exits}, {count(num_faults, 'fault')} seen to have followed by their ends"
    for crash in find_crashes(record):
        found.notes.append(f"ended by {crash.describe(record.begin)}")
    for name, number in _count_noted(record).items():
        found.notes.append(f"{name.replace('_', ' ')}: {count(number, 'time')}")
    found.reservation = _describe_unsaved(record)
    if jumped:
        found.unknown.append("the wall clock jumped: what followed what is unknown")
    if not record.processes:
        found.unknown.append("no worker wrote an event")


def _count_noted(record: RunRecord) -> Counter[str]:
    """Return the number of happenings of each kind in `NOTED`.

    The notes are counted instead of the events, because several groups report the same happening.
    """
    names = {str(kind.__struct_config__.tag) for kind in NOTED}
    counts = Counter[str]()
    for note in find_notes(record):
        if note.event in names:
            counts[note.event] += note.count
    return counts


def _describe_unsaved(record: RunRecord) -> str:
    """Return which checkpoint is missing at the end because a save failed; empty if none is."""
    failed = max(record.of(ev.CheckpointFailed), key=lambda event: event.step, default=None)
    last_saved = max((event.step for event in record.of(ev.CheckpointSaved)), default=0)
    if failed is None or failed.step <= last_saved:
        return ""
    latest = f"the latest is that of step {last_saved}" if last_saved else "there is none"
    return f"the checkpoint of step {failed.step} could not be saved ({failed.error}): {latest}"


def _check_ends(record: RunRecord, found: Judgement) -> None:
    """Object to a process that fell silent if no event of its own or of its agent says why."""
    launch_failure = ""
    launch_ends = record.of(ev.LaunchFinished)
    if launch_ends and launch_ends[-1].code:
        launch_failure = launch_ends[-1].reason
    without_end = []
    lost = {group.slot for group in find_outcome(record).lost}
    for process in record.processes:
        if process.ended_in_order or process.exit is not None:
            continue
        was_replaced = process.attempt < record.attempts[process.slot][-1].number
        if was_replaced:
            continue
        if record.launch_end is None:
            # `_check_lost` judges the lost groups.
            if process.slot not in lost:
                without_end.append(process.name)
        elif launch_failure:
            # For example, its agent was killed, and the launcher reports that the group failed.
            found.notes.append(f"{process.name} fell silent; the launch says: {launch_failure}")
        else:
            text = "fell silent, and no agent reports its end"
            object_to_absence(record, found, text, process.events[-1])
    if without_end and not record.is_live:
        workers = count(len(without_end), "worker")
        found.unknown.append(f"nothing tells how {workers} ended (first: {without_end[0]})")


def _check_lost(record: RunRecord, found: Judgement) -> None:
    """Object to lost groups about which no event says anything."""
    for group in find_outcome(record).lost:
        if group.reason is None and record.launch_end is None:
            object_to_absence(record, found, group.describe())
        else:
            found.notes.append(group.describe())


def _check_exits(record: RunRecord, found: Judgement, jumped: bool) -> int:
    """Object to exits without a reason, and to failed groups without a restart or a give-up.

    Args:
        jumped: a wall clock was set, so that the order of events of different processes is unknown.

    Returns:
        The number of exits of workers.
    """
    exits = record.of(ev.WorkerExited)
    dead_agents = [event for event in record.of(ev.AgentEnded) if event.restarts]
    followed: dict[int, list[ev.GroupEvent]] = defaultdict(list)
    for later in record.of(*FOLLOWED):
        followed[later.replica].append(later)
    stopping = min((event.time for event in record.of(ev.LaunchStopping)), default=None)
    ends: list[ev.WorkerExited | ev.AgentEnded] = [*exits, *dead_agents]
    for event in ends:
        if _lacks_reason(event):
            found.object_to("a worker ended without a reason", event)
        was_stopped = isinstance(event, ev.WorkerExited) and event.stopped
        is_failure = event.cause is not None and not was_stopped
        if jumped or not is_failure:
            continue
        if any(_is_consequence(later, event) for later in followed[event.replica]):
            continue
        # Without the end of the launch, the consequence may be missing as well.
        launch_was_ending = (
            record.launch_end is None or record.launch_end - event.time <= END_SECONDS
        )
        launch_was_stopping = stopping is not None and stopping <= event.time
        if not launch_was_ending and not launch_was_stopping:
            what = "its group was neither started again nor given up"
            object_to_absence(record, found, f"a worker or an agent failed, and {what}", event)
    return len(exits)


def _lacks_reason(event: ev.WorkerExited | ev.AgentEnded) -> bool:
    """Return whether the event of an end does not say why: without a text or an exit status."""
    if not event.reason:
        return True
    # An agent that never started has no exit status.
    was_started = isinstance(event, ev.WorkerExited) or event.agent_pid is not None
    has_status = event.code is not None or bool(event.signal)
    return was_started and not has_status


def _is_consequence(later: ev.GroupEvent, exit: ev.WorkerExited | ev.AgentEnded) -> bool:
    """Return whether an event says what became of a group after an exit."""
    if later.time >= exit.time:
        return True
    # Clocks of two hosts may differ, so the number of the attempt counts as well.
    if isinstance(later, ev.ReplicaGaveUp):
        return later.attempt >= exit.attempt
    return later.attempt > exit.attempt


def _check_heals(process: ProcessHistory, record: RunRecord, found: Judgement) -> None:
    """Object to a heal that neither ended nor failed in a process that trained on."""
    under_way: ev.HealStarted | None = None
    for event in process.events:
        if isinstance(event, ev.HealStarted):
            under_way = event
        elif isinstance(event, _ENDS_OF_HEALS):
            under_way = None
        elif isinstance(event, (ev.StepCommitted, ev.TrainingFinished)):
            if under_way is not None:
                text = "began a heal, and trains on without an event about how it ended"
                object_to_absence(record, found, text, under_way)
            under_way = None
    process_has_ended = process.exit is not None or process.ended_in_order
    run_is_over = record.launch_end is not None
    if under_way is None or process_has_ended or run_is_over or record.is_live:
        return
    found.unknown.append(f"nothing tells how the heal of {process.name} ended")


def _check_faults(record: RunRecord, found: Judgement, jumped: bool) -> int:
    """Object to faults that must end a process and after which no process ended.

    Args:
        jumped: see `_check_exits`.

    Returns:
        The number of faults whose consequence is in the history.
    """
    ends_of: dict[int, list[ev.Event]] = defaultdict(list)
    for end in record.of(ev.WorkerExited, ev.AgentEnded, ev.Drained, *FOLLOWED):
        ends_of[end.replica or 0].append(end)
    finished = {event.replica: event.time for event in record.of(ev.TrainingFinished)}
    num_followed = 0
    for fault in record.of(ev.FaultInjected):
        outcome = expected_outcome(fault.fault)
        ends: Sequence[ev.Event] = ()
        if outcome == "relaunched":
            ends = [*record.of(ev.LighthouseRestarted), *record.of(ev.LaunchFinished)]
        elif outcome in ENDS:
            if fault.target.replica is not None:
                ends = ends_of[fault.target.replica]
        else:
            continue
        if jumped:
            continue
        if any(end.time >= fault.time - CLOCK_SECONDS for end in ends):
            num_followed += 1
        elif not _came_too_late(fault, finished, record):
            text = f"the fault {fault.fault} was injected, and no event says that anything ended"
            object_to_absence(record, found, text, fault)
    return num_followed


def _came_too_late(fault: ev.FaultInjected, finished: dict[int, float], record: RunRecord) -> bool:
    """Return whether a fault came after its target had finished, or right before the launch ended.

    Args:
        finished: the time at which each group finished.
    """
    if record.launch_end is None or record.launch_end - fault.time <= END_SECONDS:
        return True
    slot = fault.target.replica
    return slot in finished and finished[slot] <= fault.time
