# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Promise 8: nothing happens in silence. Each end, heal, failure and fault has its events.

`titan_ft.history.check` calls `check_silence`. It objects in these cases:

1. A heal began, and its process trained on without an event about how the heal ended.
2. A process fell silent, and neither the process nor its agent reports why.
3. A group is lost, and no event says so.
4. A worker or an agent failed, and its group was neither started again nor given up.
5. A fault was injected that ends a process, and nothing ended.

A missing event is no offence if events could not be written (`object_to_absence`), or if the launch
was ending anyway. Cases 4 and 5 depend on the order of events of different processes, so they are
unknown if a wall clock was set. See docs/guarantees.md.
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
SHUTDOWN_SECONDS = 30.0
"""A group that fails within this time before the end of the launch is not started again."""
MAX_CLOCK_DIFFERENCE_SECONDS = 1.0
"""The clocks of two hosts may differ by this much."""
HEAL_ENDS = (
    ev.HealFinished,
    ev.HealFailed,
    ev.CatchUpRenewed,
    ev.RolledBack,
    ev.EventsDropped,
)
"""Events after which a heal is over; after `EventsDropped` its end may be missing."""
CONSEQUENCES: tuple[type[ev.GroupEvent], ...] = (
    ev.ReplicaRestarted,
    ev.ReplicaGaveUp,
    ev.SpareTookOver,
)
"""Events one of which must follow the failure of a group."""


def check_silence(record: RunRecord, found: Judgement) -> None:
    """Check that an event explains each end, each heal and each fault."""
    clock_jumped = bool(clock_jumps(record))
    for process in record.processes:
        _check_heals(process, record, found)
    _check_ends(record, found)
    _check_lost(record, found)
    num_exits = _check_exits(record, found, clock_jumped)
    num_faults = _check_faults(record, found, clock_jumped)
    exits = f"{count(num_exits, 'exit')} of workers explained"
    found.statement = f"{exits}, {count(num_faults, 'fault')} seen to have followed by their ends"
    for crash in find_crashes(record):
        found.notes.append(f"ended by {crash.describe(record.begin)}")
    for name, number in _count_noted(record).items():
        found.notes.append(f"{name.replace('_', ' ')}: {count(number, 'time')}")
    found.reservation = _describe_unsaved(record)
    if clock_jumped:
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
    last_saved = 0
    for saved in record.of(ev.CheckpointSaved):
        last_saved = max(last_saved, saved.step)
    last_failed: ev.CheckpointFailed | None = None
    for failed in record.of(ev.CheckpointFailed):
        if last_failed is None or failed.step > last_failed.step:
            last_failed = failed
    if last_failed is None or last_failed.step <= last_saved:
        return ""
    latest = "there is none"
    if last_saved:
        latest = f"the latest is that of step {last_saved}"
    why = f"could not be saved ({last_failed.error})"
    return f"the checkpoint of step {last_failed.step} {why}: {latest}"


def _check_ends(record: RunRecord, found: Judgement) -> None:
    """Object to a process that fell silent if no event of its own or of its agent says why."""
    launch_failure = ""
    launch_ends = record.of(ev.LaunchFinished)
    if launch_ends and launch_ends[-1].code:
        launch_failure = launch_ends[-1].reason
    names_without_end = []
    lost = {group.slot for group in find_outcome(record).lost}
    for process in record.processes:
        if process.ended_in_order or process.exit is not None:
            continue
        last_attempt = record.attempts[process.slot][-1]
        if process.attempt < last_attempt.number:
            continue  # its group was started again, so somebody noticed its end
        if record.launch_end is None:
            # `_check_lost` judges the lost groups.
            if process.slot not in lost:
                names_without_end.append(process.name)
        elif launch_failure:
            # For example, the agent of the process was killed, and the launcher reports that the
            # group failed.
            found.notes.append(f"{process.name} fell silent; the launch says: {launch_failure}")
        else:
            text = "fell silent, and no agent reports its end"
            object_to_absence(record, found, text, process.events[-1])
    if names_without_end and not record.is_live:
        workers = count(len(names_without_end), "worker")
        found.unknown.append(f"nothing tells how {workers} ended (first: {names_without_end[0]})")


def _check_lost(record: RunRecord, found: Judgement) -> None:
    """Object to lost groups about which no event says anything."""
    for group in find_outcome(record).lost:
        if group.reason is None and record.launch_end is None:
            object_to_absence(record, found, group.describe())
        else:
            found.notes.append(group.describe())


def _check_exits(record: RunRecord, found: Judgement, clock_jumped: bool) -> int:
    """Object to exits without a reason, and to failed groups without a restart or a give-up.

    Args:
        clock_jumped: a wall clock was set, so that the order of events of different processes is
            unknown.

    Returns:
        The number of exits of workers.
    """
    exits = record.of(ev.WorkerExited)
    dead_agents = [event for event in record.of(ev.AgentEnded) if event.restarts]
    consequences_of: dict[int, list[ev.GroupEvent]] = defaultdict(list)
    for later in record.of(*CONSEQUENCES):
        consequences_of[later.replica].append(later)
    ends: list[ev.WorkerExited | ev.AgentEnded] = [*exits, *dead_agents]
    for end in ends:
        if _lacks_reason(end):
            found.object_to("a worker ended without a reason", end)
        was_stopped = isinstance(end, ev.WorkerExited) and end.stopped
        is_failure = end.cause is not None and not was_stopped
        if clock_jumped or not is_failure or _was_launch_ending(record, end.time):
            continue
        if not _has_consequence(end, consequences_of[end.replica]):
            why = "its group was neither started again nor given up"
            object_to_absence(record, found, f"a worker or an agent failed, and {why}", end)
    return len(exits)


def _was_launch_ending(record: RunRecord, time: float) -> bool:
    """Return whether nobody starts groups again at a time, because the launch ends or is stopping.

    Without the end of the launch in the history, later events may be missing as well.
    """
    if record.launch_end is None or record.launch_end - time <= SHUTDOWN_SECONDS:
        return True
    return any(event.time <= time for event in record.of(ev.LaunchStopping))


def _lacks_reason(event: ev.WorkerExited | ev.AgentEnded) -> bool:
    """Return whether the event of an end does not say why: without a text or an exit status."""
    if not event.reason:
        return True
    # An agent that never started has no exit status.
    was_started = isinstance(event, ev.WorkerExited) or event.agent_pid is not None
    has_status = event.code is not None or bool(event.signal)
    return was_started and not has_status


def _has_consequence(
    end: ev.WorkerExited | ev.AgentEnded, consequences: Sequence[ev.GroupEvent]
) -> bool:
    """Return whether an event says what became of a group after an end.

    Args:
        consequences: the restarts and the give-ups of the group.
    """
    for later in consequences:
        if later.time >= end.time:
            return True
        # Clocks of two hosts may differ, so the number of the attempt counts as well.
        if later.attempt > end.attempt:
            return True
        if isinstance(later, ev.ReplicaGaveUp) and later.attempt == end.attempt:
            return True
    return False


def _check_heals(process: ProcessHistory, record: RunRecord, found: Judgement) -> None:
    """Object to a heal that neither ended nor failed in a process that trained on."""
    under_way: ev.HealStarted | None = None
    for event in process.events:
        if isinstance(event, ev.HealStarted):
            under_way = event
        elif isinstance(event, HEAL_ENDS):
            under_way = None
        elif isinstance(event, (ev.StepCommitted, ev.TrainingFinished)):
            if under_way is not None:
                text = "began a heal, and trains on without an event about how it ended"
                object_to_absence(record, found, text, under_way)
            under_way = None
    if under_way is None:
        return
    process_has_ended = process.exit is not None or process.ended_in_order
    run_has_ended = record.launch_end is not None
    if process_has_ended or run_has_ended or record.is_live:
        return  # the end cut the heal short, or the heal goes on
    found.unknown.append(f"nothing tells how the heal of {process.name} ended")


def _check_faults(record: RunRecord, found: Judgement, clock_jumped: bool) -> int:
    """Object to faults that must end a process and after which no process ended.

    Args:
        clock_jumped: see `_check_exits`.

    Returns:
        The number of faults whose consequence is in the history.
    """
    if clock_jumped:
        return 0
    lighthouse_ends = [*record.of(ev.LighthouseRestarted), *record.of(ev.LaunchFinished)]
    group_ends: dict[int, list[ev.Event]] = defaultdict(list)
    for group_end in record.of(ev.WorkerExited, ev.AgentEnded, ev.Drained, *CONSEQUENCES):
        group_ends[group_end.replica or 0].append(group_end)
    finished = {event.replica: event.time for event in record.of(ev.TrainingFinished)}
    num_followed = 0
    for fault in record.of(ev.FaultInjected):
        outcome = expected_outcome(fault.fault)
        ends: Sequence[ev.Event] = ()
        if outcome == "relaunched":
            ends = lighthouse_ends
        elif outcome not in ENDS:
            continue
        elif fault.target.replica is not None:
            ends = group_ends[fault.target.replica]
        earliest = fault.time - MAX_CLOCK_DIFFERENCE_SECONDS
        if any(end.time >= earliest for end in ends):
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
    if record.launch_end is None or record.launch_end - fault.time <= SHUTDOWN_SECONDS:
        return True
    slot = fault.target.replica
    return slot in finished and finished[slot] <= fault.time
