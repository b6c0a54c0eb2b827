# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The basis of all other checkers: is the history whole, and are its clocks right?

`titan_ft.history.check` shows both as rows of their own (`check_whole`, `check_clock`). The other
checkers call `find_gaps` and `object_to_absence`: on a full disk a missing event proves nothing.
See docs/observing.md, "What is missing is visible".
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from itertools import pairwise

from titan_ft.history.judgement import Judgement, count
from titan_ft.history.outcomes.outcome import find_outcome
from titan_ft.history.record.run_record import ProcessHistory, RunRecord, once_per_record
from titan_ft.history.record.trajectory import ROOT, JobState
from titan_ft.run.events import (
    CheckpointLoaded,
    Drained,
    Event,
    EventsDropped,
    LaunchFinished,
    LaunchStarted,
    StepCommitted,
    TrainingFinished,
    WorkerExited,
    WorkerStarted,
)

MAX_DRIFT_SECONDS = 1.0
"""A wall clock that NTP disciplines may gain or lose this much between two events."""


@once_per_record
def find_gaps(record: RunRecord) -> list[str]:
    """Return, in words, the events that are missing because they could not be written.

    A process on a full disk keeps its events in memory. Beyond a limit it drops events and reports
    this later (`EventsDropped`). A SIGKILL takes all events that wait; then the file has no newline
    at its end (`RunRecord.cut`). If the storage was too broken even for that, the missing events
    show only by steps that other groups or ranks report.
    """
    gaps = [_name_dropped(event) for event in record.of(EventsDropped)]
    for name in record.cut:
        why = "they waited for room on the disk when its process ended"
        gaps.append(f"the last events of {name} are missing: {why}")
    return [*gaps, *_find_unreported_steps(record), *_find_steps_unreported_by_rank(record)]


def _name_dropped(event: EventsDropped) -> str:
    writer = "the launcher"
    if event.replica is not None:
        writer = f"group {event.replica}"
    if event.rank is not None:
        writer += f", rank {event.rank}"
    number = "some events"
    if event.events is not None:
        number = count(event.events, "event")
    kinds = ""
    if event.kinds:
        numbers = [f"{number_of} {name}" for name, number_of in event.kinds.items()]
        kinds = f" ({', '.join(numbers)})"
    return f"{number} of {writer} were dropped{kinds}: {event.error}"


def _find_unreported_steps(record: RunRecord) -> list[str]:
    """Return, in words, the steps in a row that a group took part in and that it does not report.

    A single such step proves nothing: the group may have died between the exchange and its event.
    Before a second step it would have written the event of the first.
    """
    reported: dict[int, set[str]] = defaultdict(set)
    for commit in record.of(StepCommitted):
        reported[commit.replica].add(commit.lineage)
    starts: dict[int, list[float]] = defaultdict(list)
    for event in record.of(WorkerStarted):
        starts[event.replica].append(event.time)
    rows: dict[int, list[list[JobState]]] = defaultdict(list)
    # By slot, the step before, if the group does not report it.
    last_missing: dict[int, JobState] = {}
    for state in record.chain:
        # All participants of a usual step have reported it.
        is_usual = state.lineage in record.usual_lineages
        if is_usual and not last_missing:
            continue
        for slot in state.participants & reported.keys():
            if is_usual or state.lineage in reported[slot]:
                last_missing.pop(slot, None)
                continue
            last = last_missing.get(slot)
            # A group that was started again may have died after each of the two exchanges.
            if last is None or _has_started(starts[slot], last.time, state.time):
                rows[slot].append([])
            rows[slot][-1].append(state)
            last_missing[slot] = state
    found = []
    for slot, rows_of_group in sorted(rows.items()):
        for row in rows_of_group:
            if len(row) > 1:
                steps = f"{record.unit.noun}s {row[0].step} to {row[-1].step}"
                found.append(f"group {slot} took part in {steps}, and no event of it says so")
    return found


def _has_started(starts: list[float], begin: float, end: float) -> bool:
    """Return whether a group was started again within a time."""
    return any(begin <= start <= end for start in starts)


def _find_steps_unreported_by_rank(record: RunRecord) -> list[str]:
    """Return, in words, the ranks that do not report several steps that their group made.

    One step may be missing because the rank was killed before its event.
    """
    attempts: dict[tuple[int, int, int], list[ProcessHistory]] = defaultdict(list)
    launches = [event.time for event in record.of(LaunchStarted)]
    for process in record.processes:
        # Each launch counts attempts from 0, and a resume may give a group fewer ranks: without the
        # number of the launch, ranks that no longer exist would seem to be silent.
        launch = bisect_right(launches, process.events[0].time)
        attempts[launch, process.slot, process.attempt].append(process)
    found = []
    for (_, slot, attempt), processes in attempts.items():
        reported: dict[int, set[str]] = defaultdict(set)
        for process in processes:
            reported[process.rank].update(commit.lineage for commit in process.commits())
        reported_by_any = set().union(*reported.values())
        for rank, own in reported.items():
            num_missing = len(reported_by_any - own)
            if num_missing > 1:
                name = f"group {slot}, attempt {attempt}, rank {rank}"
                steps = record.unit.count(num_missing)
                found.append(f"{name} tells nothing of {steps} that other ranks of its group made")
    return found


def object_to_absence(
    record: RunRecord, found: Judgement, text: str, event: Event | None = None
) -> None:
    """Object to something that no event reports.

    If events are missing, the report may have been among them. Then the text is a reason for
    "unknown" and no offence.
    """
    if not find_gaps(record):
        found.object_to(text, event)
        return
    where = ""
    if event is not None and event.replica is not None:
        where = f"group {event.replica}: "
    found.unknown.append(f"{where}{text}, unless an event that is missing says so")


def check_whole(record: RunRecord, found: Judgement) -> None:
    """Check that the history has a beginning and an end, and no part of it is missing."""
    processes = count(len(record.processes), "worker process", "worker processes")
    found.statement = f"{count(record.num_events, 'event')} of {processes}"
    if not record.events:
        found.unknown.append("the history is empty: the folder has no events (events/*.jsonl)")
        return
    found.unknown += find_gaps(record)
    if not record.states:
        found.unknown.append(f"no event tells of a committed {record.unit.noun}")
        return
    _check_end(record, found)
    started = {(event.pid, event.replica) for event in record.of(WorkerStarted)}
    for process in record.processes:
        if (process.pid, process.slot) not in started:
            missing = f"the first events of {process.name} are missing"
            found.unknown.append(f"the history is cut: {missing}")
    _check_first_state(record, found)
    participants: set[int] = set()
    for point in record.curve:
        participants.update(point.event.participants)
    slots_with_events = {process.slot for process in record.processes}
    silent = sorted(participants - slots_with_events)
    if silent:
        groups = f"groups {silent} took part in {record.unit.noun}s"
        found.unknown.append(f"the history is cut: {groups} and have no events of their own")


def _check_first_state(record: RunRecord, found: Judgement) -> None:
    """Check that the trajectory begins with step 1, or with a checkpoint that was loaded."""
    noun = record.unit.noun
    first = record.chain[0]
    loaded = {event.lineage for event in record.of(CheckpointLoaded)}
    if first.parent != ROOT:
        if first.parent not in loaded:
            state = f"the state before {noun} {first.step}"
            found.unknown.append(f"the history is cut: no event tells how {state} was made")
    elif first.step != 1:
        found.notes.append(f"the first {noun} is {first.step}")


def _check_end(record: RunRecord, found: Judgement) -> None:
    """Check that the end of the run is in the history, unless the run goes on."""
    has_launcher = bool(record.of(LaunchStarted))
    if not record.is_live:
        if has_launcher:
            _check_end_of_launch(record, found)
        else:
            _check_end_of_groups(record, found)
    for process in record.processes:
        exit = process.exit
        if not isinstance(exit, WorkerExited):
            continue
        ended_well = exit.code == 0 and exit.error is None
        if ended_well and not exit.stopped and not process.ended_in_order:
            missing = f"{process.name} ended well, and its last events are missing"
            found.unknown.append(f"the history is cut: {missing}")


def _check_end_of_launch(record: RunRecord, found: Judgement) -> None:
    if record.launch_end is None:
        found.unknown.append("the history is cut: the launch did not end (no launch_finished)")
        return
    some_group_finished = bool(record.of(TrainingFinished, Drained))
    launch_ended_well = record.of(LaunchFinished)[-1].code == 0
    if launch_ended_well and not some_group_finished:
        missing = "the launch ended well, and no group tells that it finished"
        found.unknown.append(f"the history is cut: {missing}")


def _check_end_of_groups(record: RunRecord, found: Judgement) -> None:
    """Check that each group of a run without a launcher finished or left."""
    # By slot and rank, the last process: its earlier processes were replaced.
    last_of = {(process.slot, process.rank): process for process in record.processes}
    without_end = {process.slot for process in last_of.values() if not process.ended_in_order}
    # The checker of promise 8 asks whether an event names the lost groups.
    lost = {group.slot for group in find_outcome(record).lost}
    running = sorted(without_end - lost)
    if running:
        found.unknown.append(f"the history is cut: groups {running} neither finished nor left")


def check_clock(record: RunRecord, found: Judgement) -> None:
    """Check that each host's wall clock advanced as its monotonic clock did."""
    jumps = clock_jumps(record)
    found.statement = f"{count(len(_by_clock(record)), 'clock')} advanced evenly"
    if jumps:
        times = count(len(jumps), "time")
        found.statement = f"wall clocks jumped {times}: what rests on times is unknown"
    for event, seconds in jumps:
        direction = "back"
        if seconds > 0:
            direction = "forward"
        moved = f"{abs(seconds):.1f} s further {direction} than before"
        found.object_to(f"the wall clock was {moved}, as its process saw it", event)
    if not record.events:
        found.unknown.append("there are no events")


@once_per_record
def clock_jumps(record: RunRecord) -> list[tuple[Event, float]]:
    """Return each event before which its host's wall clock was set, and by how many seconds."""
    jumps = []
    for events in _by_clock(record).values():
        for before, after in pairwise(events):
            seconds = (after.time - before.time) - (after.mono - before.mono)
            if abs(seconds) > MAX_DRIFT_SECONDS:
                jumps.append((after, seconds))
    return jumps


@once_per_record
def _by_clock(record: RunRecord) -> dict[object, list[Event]]:
    """Return the events that share a monotonic clock, in the order of this clock.

    All processes of a host share its clock. If the host of a process is unknown, the events of the
    process stand alone: a comparison with another host's clock would show a jump that never was.
    """
    host_of = {event.pid: event.host for event in record.of(WorkerStarted)}
    hosts = set(host_of.values())
    only_host: str | None = None
    if len(hosts) == 1:
        (only_host,) = hosts
    found: dict[object, list[Event]] = defaultdict(list)
    for event in record.written:
        host = host_of.get(event.pid, only_host)
        if host:
            found[host].append(event)
        else:
            found[event.pid, event.replica, event.rank, event.attempt].append(event)
    for events in found.values():
        events.sort(key=lambda event: event.mono)
    return found
