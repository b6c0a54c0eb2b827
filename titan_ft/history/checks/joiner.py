# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Promise 5: a group that comes back catches up while the others train on."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from titan_ft.history.checks.foundation import object_to_absence
from titan_ft.history.fold.faults import RecordedFault
from titan_ft.history.judgement import Judgement, count
from titan_ft.history.record.run_record import ProcessHistory, RunRecord, view
from titan_ft.history.timing.waits import StepWait, count_unknown, find_waits_for_joiners
from titan_ft.run import events as ev

LONG_STEPS = 4
"""torchtitan's steps that the others may wait in all for one joiner: it ends the step that it is in, and loads."""
MOST_WAITED = 0.5
"""Share of a joiner's time that the others may wait for it, where that is more. A joiner on the same machine takes its
part of the processors from the others."""


@dataclass(frozen=True)
class Joining:
    """A process of a group that got the state from another group, and what the others waited for it meanwhile."""

    slot: int
    begin: float
    """Unix seconds of its first quorum since it trained last, or of its heal."""
    seconds: float
    """From there to the end of its last heal, or to its last event; by its own clock."""
    event: ev.HealStarted
    waits: tuple[StepWait, ...] = ()

    @property
    def waited(self) -> float:
        """Seconds that the others waited for it although it had not asked them to."""
        return sum(wait.seconds for wait in self.waits if wait.why == "catching_up")


def check_joiner(record: RunRecord, found: Judgement) -> None:
    """Check that the others did not wait long for a group that got its state, as their own commits say.

    A group that asks the others to wait says so (`catch_up_waiting`); waits for it have a reason of their own.
    """
    _check_asked(record, found)
    joinings = find_joinings(record)
    if not joinings:
        found.statement = "no group had to catch up"
        return
    if unknown := count_unknown(record):
        found.unknown.append(f"{count(unknown, 'commit')} of an older version do not say what they waited for")
        return
    step = _usual_step(record)
    longest = max(joinings, key=lambda joining: joining.waited)
    total = sum(joining.waited for joining in joinings)
    found.statement = (
        f"others waited {total:.2f} s in all for {count(len(joinings), 'joiner')}, {longest.waited:.2f} s at most for "
        f"one (a step takes {step:.2f} s)"
    )
    for joining in joinings:
        allowed = LONG_STEPS * step
        if record.unit.steps == 1:
            allowed = max(allowed, MOST_WAITED * joining.seconds)
        if joining.waited <= allowed:
            continue
        text = f"others waited {joining.waited:.2f} s for it to catch up, {allowed:.2f} s are the most"
        if fault := _find_fault(record, joining):
            found.notes.append(f"group {joining.slot}: {text}; {fault.name} was injected into it meanwhile")
        else:
            found.object_to(text, joining.event)


@view
def find_joinings(record: RunRecord) -> list[Joining]:
    """Return the joinings of all groups in order of time, each with the waits for it."""
    of_slots: dict[int, list[Joining]] = defaultdict(list)
    for process in record.processes:
        if process.rank == 0:
            of_slots[process.replica] += _joinings_of(process)
    waits: dict[int, list[StepWait]] = defaultdict(list)
    for wait in find_waits_for_joiners(record):
        waits[wait.slot].append(wait)
    found: list[Joining] = []
    for slot, joinings in of_slots.items():
        joinings.sort(key=lambda joining: joining.begin)
        begins = [joining.begin for joining in joinings]
        own: dict[int, list[StepWait]] = defaultdict(list)
        for wait in waits[slot]:
            # A commit comes after what it waited for, but for clocks of hosts that differ.
            own[max(0, bisect_right(begins, wait.time) - 1)].append(wait)
        for number, each in enumerate(joinings):
            found.append(Joining(slot, each.begin, each.seconds, each.event, tuple(own[number])))
    return sorted(found, key=lambda joining: joining.begin)


def _joinings_of(process: ProcessHistory) -> Iterator[Joining]:
    """Yield the times in which a process lacked the state, without what the others waited."""
    first: ev.Event | None = None
    event: ev.HealStarted | None = None
    last: ev.Event | None = None
    for each in process.events:
        if isinstance(each, ev.StepCommitted):
            if event is not None and first is not None and last is not None:
                yield Joining(process.replica, first.time, last.mono - first.mono, event)
            first = event = None
        elif isinstance(each, ev.Joined | ev.HealStarted):
            first = first or each
            event = event or (each if isinstance(each, ev.HealStarted) else None)
        if event is not None:
            last = each
    if event is not None and first is not None and last is not None:
        yield Joining(process.replica, first.time, last.mono - first.mono, event)


def _usual_step(record: RunRecord) -> float:
    """Return the usual seconds of one of torchtitan's steps."""
    if record.unit.steps == 1:
        return record.usual_step_seconds or 0.0
    steps = [commit.compute_seconds / (commit.inner_steps or record.unit.steps) for commit in record.commits]
    return median(steps) if steps else 0.0


def _find_fault(record: RunRecord, joining: Joining) -> RecordedFault | None:
    """Return a fault that was injected into a group while it joined, or that lasted until then."""
    begin, end = round(joining.begin * 1e6), round((joining.begin + joining.seconds) * 1e6)
    for fault in record.faults:
        if fault.replica == joining.slot and fault.time_us <= end and (fault.undone_us or fault.time_us) >= begin:
            return fault
    return None


def _check_asked(record: RunRecord, found: Judgement) -> None:
    """Object to a wait for a joiner that did not ask for it, and note those that did."""
    asked = {event.replica for event in record.of(ev.CatchUpWaiting)}
    waits = [event for event in record.of(ev.Waiting) if event.why == "asked"]
    for event in waits:
        if asked.isdisjoint(event.slots or ()):
            text = f"the update waited for groups {event.slots}, which did not ask for it"
            object_to_absence(record, found, text, event)
    seconds = sum(wait.seconds for wait in find_waits_for_joiners(record) if wait.why == "asked")
    if asked:
        steps = len({event.step for event in waits})
        who = f"groups {sorted(asked)} asked the others to wait, for {count(steps, record.unit.noun)}"
        found.notes.append(f"{who} and {seconds:.2f} s")
