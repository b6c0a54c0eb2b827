# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Check what the other checkers rest on: that the history is whole, and that its clocks can be believed."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from itertools import pairwise

from titan_ft.history.judgement import Judgement, count
from titan_ft.history.outcomes.outcome import find_outcome
from titan_ft.history.record.run_record import ProcessHistory, RunRecord, view
from titan_ft.history.record.trajectory import ROOT, State
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

TOLERANCE_SECONDS = 1.0
"""What a wall clock may gain or lose between two events, as one that is disciplined by NTP does."""


@view
def find_gaps(record: RunRecord) -> list[str]:
    """Return, in words, which events are missing because they could not be written.

    A process on a full disk keeps its events in memory. Beyond a limit it drops them, which it says later; a SIGKILL
    takes them all. Then its file is cut, unless the storage was so far gone that nothing could be changed there. What
    other groups tell of the steps that it made is left then.
    """
    gaps = [_name_dropped(event) for event in record.of(EventsDropped)]
    gaps += [
        f"the last events of {name} are missing: they waited for room on the disk when its process ended"
        for name in record.cut
    ]
    return [*gaps, *_unseen_steps(record), *_unseen_by_rank(record)]


def _name_dropped(event: EventsDropped) -> str:
    who = "the launcher" if event.replica is None else f"group {event.replica}"
    if event.rank is not None:
        who += f", rank {event.rank}"
    kinds = ", ".join(f"{number} {name}" for name, number in event.kinds.items())
    number = "some events" if event.events is None else count(event.events, "event")
    return f"{number} of {who} were dropped{f' ({kinds})' if kinds else ''}: {event.error}"


def _unseen_steps(record: RunRecord) -> list[str]:
    """Name steps in a row that a group took part in, and that none of its events tells of.

    One such step is usual: the group died after the exchange and before its event. Of a second one it would have told.
    """
    told: dict[int, set[str]] = defaultdict(set)
    for commit in record.of(StepCommitted):
        told[commit.replica].add(commit.lineage)
    starts: dict[int, list[float]] = defaultdict(list)
    for event in record.of(WorkerStarted):
        starts[event.replica].append(event.time)
    rows: dict[int, list[list[State]]] = defaultdict(list)
    before: dict[int, State] = {}
    for state in record.chain:
        if not before and state.lineage in record.usual:
            continue  # all participants of a usual step told of it
        for replica in state.participants & told.keys():
            if state.lineage in told[replica] or state.lineage in record.usual:
                before.pop(replica, None)
                continue
            last = before.get(replica)
            if last is None or any(last.time <= start <= state.time for start in starts[replica]):
                rows[replica].append([])
            rows[replica][-1].append(state)
            before[replica] = state
    return [
        f"group {replica} took part in {record.unit.noun}s {row[0].step} to {row[-1].step}, and no event of it says so"
        for replica, its in sorted(rows.items())
        for row in its
        if len(row) > 1
    ]


def _unseen_by_rank(record: RunRecord) -> list[str]:
    """Name ranks that do not tell of several steps that other ranks of their group have made with them."""
    attempts: dict[tuple[int, int, int], list[ProcessHistory]] = defaultdict(list)
    launches = [event.time for event in record.of(LaunchStarted)]
    for process in record.processes:
        # Attempts are counted anew in each launch, and a resume may give a group fewer ranks.
        launch = bisect_right(launches, process.events[0].time)
        attempts[launch, process.replica, process.attempt].append(process)
    found = []
    for (_, replica, attempt), processes in attempts.items():
        if len({process.rank for process in processes}) == 1:
            continue
        made: dict[int, set[str]] = defaultdict(set)
        for process in processes:
            made[process.rank].update(commit.lineage for commit in process.commits())
        together = set().union(*made.values())
        for rank, own in made.items():
            missing = len(together - own)
            if missing > 1:
                who = f"group {replica}, attempt {attempt}, rank {rank}"
                found.append(f"{who} tells nothing of {record.unit.count(missing)} that other ranks of its group made")
    return found


def object_to_absence(record: RunRecord, found: Judgement, text: str, event: Event | None = None) -> None:
    """Object to what no event tells of. Where events are missing it may have been among them, and is unknown."""
    if find_gaps(record):
        where = "" if event is None or event.replica is None else f"group {event.replica}: "
        found.unknown.append(f"{where}{text}, unless an event that is missing says so")
    else:
        found.object_to(text, event)


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
    begun = {(event.pid, event.replica) for event in record.of(WorkerStarted)}
    for process in record.processes:
        if (process.pid, process.replica) not in begun:
            found.unknown.append(f"the history is cut: the first events of {process.name} are missing")
    first = record.chain[0]
    loaded = {event.lineage for event in record.of(CheckpointLoaded)}
    if first.parent != ROOT and first.parent not in loaded:
        state = f"the state before {record.unit.noun} {first.step}"
        found.unknown.append(f"the history is cut: no event tells how {state} was made")
    elif first.parent == ROOT and first.step != 1:
        found.notes.append(f"the first {record.unit.noun} is {first.step}")
    known = {process.replica for process in record.processes}
    silent = sorted({slot for point in record.curve for slot in point.event.participants} - known)
    if silent:
        who = f"groups {silent} took part in {record.unit.noun}s"
        found.unknown.append(f"the history is cut: {who} and have no events of their own")


def _check_end(record: RunRecord, found: Judgement) -> None:
    """Find out whether the end of the run is in the history; of one that goes on it cannot be."""
    if record.goes_on:
        pass
    elif record.of(LaunchStarted):
        if record.launch_end is None:
            found.unknown.append("the history is cut: the launch did not end (no launch_finished)")
        elif not record.of(TrainingFinished, Drained) and record.of(LaunchFinished)[-1].code == 0:
            found.unknown.append("the history is cut: the launch ended well, and no group tells that it finished")
    else:
        last = {(process.replica, process.rank): process for process in record.processes}
        lost = {group.slot for group in find_outcome(record).lost}  # promise 8 asks whether anybody says so
        running = sorted({process.replica for process in last.values() if not process.ended_in_order} - lost)
        if running:
            found.unknown.append(f"the history is cut: groups {running} neither finished nor left")
    for process in record.processes:
        exit = process.exit
        if not isinstance(exit, WorkerExited) or exit.code != 0 or exit.error is not None:
            continue
        if not exit.stopped and not process.ended_in_order:
            found.unknown.append(f"the history is cut: {process.name} ended well, and its last events are missing")


def check_clock(record: RunRecord, found: Judgement) -> None:
    """Check that each host's wall clock advanced as its monotonic clock did."""
    jumps = clock_jumps(record)
    found.statement = f"{count(len(_by_host(record)), 'clock')} advanced evenly"
    if jumps:
        found.statement = f"wall clocks jumped {count(len(jumps), 'time')}: what rests on times is unknown"
    for event, seconds in jumps:
        way = "forward" if seconds > 0 else "back"
        found.object_to(
            f"the wall clock was {abs(seconds):.1f} s further {way} than before, as its process saw it", event
        )
    if not record.events:
        found.unknown.append("there are no events")


@view
def clock_jumps(record: RunRecord) -> list[tuple[Event, float]]:
    """Return each event before which its host's wall clock was set, and by how many seconds."""
    jumps = []
    for events in _by_host(record).values():
        for before, after in pairwise(events):
            seconds = (after.time - before.time) - (after.mono - before.mono)
            if abs(seconds) > TOLERANCE_SECONDS:
                jumps.append((after, seconds))
    return jumps


@view
def _by_host(record: RunRecord) -> dict[object, list[Event]]:
    """Return the events that share a monotonic clock, in its order: those of one host, or of one process."""
    host_of = {event.pid: event.host for event in record.of(WorkerStarted)}
    known = set(host_of.values())
    only = known.pop() if len(known) == 1 else None
    found: dict[object, list[Event]] = defaultdict(list)
    for event in record.written:
        host = host_of.get(event.pid, only)
        found[host or (event.pid, event.replica, event.rank, event.attempt)].append(event)
    for events in found.values():
        events.sort(key=lambda event: event.mono)
    return found
