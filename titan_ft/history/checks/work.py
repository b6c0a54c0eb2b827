# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Promise 4: a failure makes no survivor compute a batch twice, or skip a step; nothing is made again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from titan_ft.history.checks.foundation import find_gaps
from titan_ft.history.judgement import Judgement, Offence, count
from titan_ft.history.record.run_record import Healed, ProcessHistory, RunRecord
from titan_ft.history.record.trajectory import ROOT
from titan_ft.history.record.usual_steps import UsualSteps
from titan_ft.history.timing.rework import find_rework
from titan_ft.run.events import (
    EventsDropped,
    FaultInjected,
    GradientExcluded,
    HealFinished,
    StepCommitted,
    WorkerStarted,
)

_LOSES_STATE = (*Healed, EventsDropped)
"""After these a process may go on from any state, or its events do not tell from which."""


def check_work(record: RunRecord, found: Judgement) -> None:
    """Check the commits of each process: each goes on from the one before, one forward pass for each batch.

    Steps that are made again because all groups were lost break nothing by themselves; again and again they do.
    """
    rework = find_rework(record)
    found.reservation = rework.describe()
    if find_gaps(record):  # the reason may be missing
        found.unknown += [text for _, text in rework.offences]
    else:
        found.offences += [Offence(text, time=setback.time, step=setback.step) for setback, text in rework.offences]
    passes = 0
    wasted = Counter[str]()
    for process in record.processes:
        passes += _check_passes(process, found)
        _check_order(process, record, found)
        wasted += _count_wasted(process, record, found)
    commits = len(record.of(StepCommitted)) + record.num_omitted
    found.statement = f"{count(commits, 'commit')} in order, {_passes(passes)}, one a batch"
    found.notes += [f"{_passes(number_of)} wasted: {why}" for why, number_of in wasted.items()]
    behind = sum(_fell_behind(process) for process in record.processes)
    if behind:
        found.notes.append(f"{count(behind, 'time')} a rank fell behind and healed while it lived")
    fewer = [text for process in record.processes if process.rank == 0 for text in _skipped_steps(process, record)]
    if fewer:
        found.notes.append(f"fewer steps in a round than it has, by a group that had not healed: {'; '.join(fewer)}")
    if not commits:
        found.unknown.append(f"no event tells of a committed {record.unit.noun}")


def _check_passes(process: ProcessHistory, found: Judgement) -> int:
    """Object to commits with other than one forward pass for each batch that was read; return the passes."""
    total = sum(event.forward_passes for event in process.events if isinstance(event, UsualSteps))
    for event in process.commits():
        passes = event.forward_passes
        total += passes
        read = sum(data.num_batches for data in event.readings())
        if passes != read:
            found.object_to(f"{_passes(passes)} for {count(read, 'batch', 'batches')}", event)
    return total


def _check_order(process: ProcessHistory, record: RunRecord, found: Judgement) -> None:
    """Object to a commit that does not go on from the state that the process held.

    A state without any event is missing from the history: who made it is unknown.
    """
    noun = record.unit.noun
    held: StepCommitted | UsualSteps | None = None
    # It may go on from any state that it got in the meantime, or in a part of its events that is missing.
    free = not any(isinstance(event, WorkerStarted) for event in process.events)
    for event in process.events:
        if isinstance(event, (StepCommitted, UsualSteps)):
            parent = event.parent
            known = parent == ROOT or parent in record.states
            if not known and not free and (held is None or parent != held.lineage):
                found.unknown.append(f"the history is cut: no event of {process.name} before {noun} {event.step}")
            elif not free and held is None and parent != ROOT:
                found.object_to(
                    f"its first commit changes the state {parent}, which it did not get from anybody", event
                )
            elif not free and held is not None and parent != held.lineage:
                before = f"{held.lineage} ({noun} {held.step})"
                text = f"goes on from the state {parent}; it held {before}, and did not heal between"
                found.object_to(text, event)
            held, free = event, False
        elif isinstance(event, _LOSES_STATE):
            free = True


def _skipped_steps(process: ProcessHistory, record: RunRecord) -> Iterator[str]:
    """Yield the rounds for which a process made fewer steps although it held the state since the round before.

    Who has healed joins in the midst of a round. Who comes so late to a round that the others are at its end skips it.
    """
    holds = False
    unit = record.unit
    for event in process.events:
        if isinstance(event, StepCommitted):
            if holds and event.inner_steps is not None and event.inner_steps < unit.steps:
                length = unit.step_after(event.step) - unit.step_after(event.step - 1)
                if event.inner_steps < length:  # the last round may be shorter
                    yield f"group {event.replica} made {event.inner_steps} of {length} of round {event.step}"
            holds = True
        elif isinstance(event, _LOSES_STATE):
            holds = False


def _fell_behind(process: ProcessHistory) -> int:
    """Return how often a process that had committed healed: its gradients of the step under way were thrown away."""
    first = next(process.commits(), None)
    if first is None:
        return 0
    return sum(isinstance(event, HealFinished) and event.mono >= first.mono for event in process.events)


def _count_wasted(process: ProcessHistory, record: RunRecord, found: Judgement) -> Counter[str]:
    """Return the forward passes of a process that are not in the trajectory, by reason; object to those without one.

    A batch whose first computation counted, and which was computed again, is left to the audit.
    """
    wasted = Counter[str]()
    void: dict[tuple[int, int], str | None] = {}  # (slot, first batch) -> why its first computation does not count
    excluded: set[int] = set()
    was_cut = False  # what excluded the gradients of the next step may be among the events that are missing
    on_chain, states = record.on_chain, record.states
    for event in process.events:
        if isinstance(event, StepCommitted):
            counted = event.contributed and event.lineage in on_chain
            batches = states[event.lineage].batches
            for data in event.readings():
                slot, first = data.slot, data.first_batch
                if (slot, first) in void:
                    why = void.pop((slot, first))
                    if why is None:
                        found.object_to(f"computed batch {first} of slot {slot} again", event)
                    else:
                        wasted[why] += data.num_batches
                if not counted or slot not in batches:
                    void[slot, first] = _why_void(process.replica in excluded, was_cut)
            excluded, was_cut = set(), False
        elif isinstance(event, EventsDropped):
            void, excluded, was_cut = {}, set(), True
        elif isinstance(event, (FaultInjected, *Healed)):
            void = {batch: why or f"{record.unit.noun}s that were thrown away" for batch, why in void.items()}
        elif isinstance(event, GradientExcluded):
            excluded = set(event.slots)
    return wasted


def _why_void(is_excluded: bool, was_cut: bool) -> str | None:
    """Return why the gradients of a step are not in it, if the events say so."""
    if is_excluded:
        return "gradients that were not finite"
    return "events that are missing may say why" if was_cut else None


def _passes(value: int) -> str:
    return count(value, "forward pass", "forward passes")
