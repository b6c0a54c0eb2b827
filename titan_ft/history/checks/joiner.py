# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Promise 5: a group that comes back catches up while the others train on.

A *joiner* is a group that lacks the state of the job: it fetches the state from a donor, and then
applies the updates that the others made meanwhile. Each commit reports for which groups its group
waited, how long and why (`titan_ft.history.timing.waits`). The checker adds up the waits for each
joiner, and allows some steps. See docs/guarantees.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from titan_ft.history.checks.foundation import object_to_absence
from titan_ft.history.fold.faults import RecordedFault
from titan_ft.history.judgement import Judgement, count
from titan_ft.history.record.run_record import ProcessHistory, RunRecord, once_per_record
from titan_ft.history.timing.waits import StepWait, count_unknown, find_waits_for_joiners
from titan_ft.run import events as ev

MAX_STEPS_WAITED = 4
"""The other groups may wait this many of torchtitan's steps for one joiner.

The joiner finishes the step that it is in, and loads the state.
"""
MAX_SHARE_WAITED = 0.5
"""The other groups may wait for this share of the joiner's time, if that is more.

A joiner on the same machine takes processor time from the other groups.
"""


@dataclass(frozen=True)
class Joining:
    """The time in which a process lacked the state, and the waits of the other groups."""

    slot: int
    begin: float
    """Unix seconds of the first quorum without the state, or of the heal."""
    seconds: float
    """Seconds from `begin` to the joiner's last event before its commit, by the joiner's clock."""
    heal: ev.HealStarted
    waits: tuple[StepWait, ...] = ()

    @property
    def waited(self) -> float:
        """Seconds for which the others waited without being asked to."""
        seconds = 0.0
        for wait in self.waits:
            if wait.why == "catching_up":
                seconds += wait.seconds
        return seconds


def check_joiner(record: RunRecord, found: Judgement) -> None:
    """Check that the other groups did not wait long for a joiner.

    A joiner may ask the others to wait (`catch_up_waiting`). Such waits have a reason of their own,
    and only need the joiner's event.
    """
    _check_asked(record, found)
    joinings = find_joinings(record)
    if not joinings:
        found.statement = "no group had to catch up"
        return
    num_unknown = count_unknown(record)
    if num_unknown:
        commits = count(num_unknown, "commit")
        found.unknown.append(f"{commits} of an older version do not say what they waited for")
        return
    step_seconds = _usual_step_seconds(record)
    longest = max(joining.waited for joining in joinings)
    total = sum(joining.waited for joining in joinings)
    in_all = f"others waited {total:.2f} s in all for {count(len(joinings), 'joiner')}"
    for_one = f"{longest:.2f} s at most for one (a step takes {step_seconds:.2f} s)"
    found.statement = f"{in_all}, {for_one}"
    for joining in joinings:
        allowed = MAX_STEPS_WAITED * step_seconds
        if record.unit.steps == 1:
            # A round has many steps: half of a joiner's time would allow any wait there.
            allowed = max(allowed, MAX_SHARE_WAITED * joining.seconds)
        if joining.waited <= allowed:
            continue
        waited = f"others waited {joining.waited:.2f} s for it to catch up"
        text = f"{waited}, {allowed:.2f} s are the most"
        fault = _find_fault(record, joining)
        if fault is None:
            found.object_to(text, joining.heal)
        else:
            why = f"{fault.name} was injected into it meanwhile"
            found.notes.append(f"group {joining.slot}: {text}; {why}")


@once_per_record
def find_joinings(record: RunRecord) -> list[Joining]:
    """Return the joinings of all groups in order of time, each with the waits for it."""
    joinings_of: dict[int, list[Joining]] = defaultdict(list)
    for process in record.processes:
        if process.rank == 0:
            joinings_of[process.slot] += _find_joinings_of(process)
    waits_for: dict[int, list[StepWait]] = defaultdict(list)
    for wait in find_waits_for_joiners(record):
        waits_for[wait.slot].append(wait)
    found: list[Joining] = []
    for slot, joinings in joinings_of.items():
        joinings.sort(key=lambda joining: joining.begin)
        begins = [joining.begin for joining in joinings]
        waits_by_joining: dict[int, list[StepWait]] = defaultdict(list)
        for wait in waits_for[slot]:
            # A commit follows the joining that it waited for. Where clocks of hosts differ, a
            # commit may seem to come before the first joining.
            index = max(0, bisect_right(begins, wait.time) - 1)
            waits_by_joining[index].append(wait)
        for index, joining in enumerate(joinings):
            found.append(replace(joining, waits=tuple(waits_by_joining[index])))
    return sorted(found, key=lambda joining: joining.begin)


def _find_joinings_of(process: ProcessHistory) -> Iterator[Joining]:
    """Yield the times in which a process lacked the state, without the waits.

    Such a time ends with a commit of the process. It begins with the first quorum or heal after the
    commit before, if a heal follows.
    """
    first: ev.Joined | ev.HealStarted | None = None
    joining: Joining | None = None
    for event in process.events:
        if isinstance(event, ev.StepCommitted):
            if joining is not None:
                yield joining
            first = None
            joining = None
            continue
        if first is None and isinstance(event, ev.Joined | ev.HealStarted):
            first = event
        if first is None:
            continue
        seconds = event.mono - first.mono
        if joining is not None:
            joining = replace(joining, seconds=seconds)
        elif isinstance(event, ev.HealStarted):
            joining = Joining(process.slot, first.time, seconds, heal=event)
    if joining is not None:
        yield joining


def _usual_step_seconds(record: RunRecord) -> float:
    """Return the usual seconds of one of torchtitan's steps."""
    if record.unit.steps == 1:
        return record.usual_step_seconds or 0.0
    seconds = []
    for commit in record.commits:
        num_steps = commit.inner_steps or record.unit.steps
        seconds.append(commit.compute_seconds / num_steps)
    if not seconds:
        return 0.0
    return median(seconds)


def _find_fault(record: RunRecord, joining: Joining) -> RecordedFault | None:
    """Return a fault that was injected into a group while it joined, or that lasted until then."""
    begin_us = round(joining.begin * 1e6)
    end_us = round((joining.begin + joining.seconds) * 1e6)
    for fault in record.faults:
        fault_end_us = fault.undone_us or fault.time_us
        overlaps = fault.time_us <= end_us and fault_end_us >= begin_us
        if fault.slot == joining.slot and overlaps:
            return fault
    return None


def _check_asked(record: RunRecord, found: Judgement) -> None:
    """Object to waits for joiners that did not ask for them, and note the joiners that did."""
    askers = {event.replica for event in record.of(ev.CatchUpWaiting)}
    waits = [event for event in record.of(ev.Waiting) if event.why == "asked"]
    for event in waits:
        awaited = event.slots or ()
        if askers.isdisjoint(awaited):
            text = f"the update waited for groups {event.slots}, which did not ask for it"
            object_to_absence(record, found, text, event)
    if not askers:
        return
    seconds = 0.0
    for wait in find_waits_for_joiners(record):
        if wait.why == "asked":
            seconds += wait.seconds
    steps = count(len({event.step for event in waits}), record.unit.noun)
    asked = f"groups {sorted(askers)} asked the others to wait"
    found.notes.append(f"{asked}, for {steps} and {seconds:.2f} s")
