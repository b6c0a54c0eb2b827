# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Promise 4: a failure makes no survivor compute a batch twice, or skip a step.

Steps that are made again because all groups were lost break no promise. Steps that are made again
and again do (`titan_ft.history.timing.rework`). See docs/guarantees.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from titan_ft.history.checks.foundation import find_gaps
from titan_ft.history.judgement import Judgement, Offence, count
from titan_ft.history.record.run_record import STATE_REPLACING_EVENTS, ProcessHistory, RunRecord
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

_LOSES_STATE = (*STATE_REPLACING_EVENTS, EventsDropped)
"""After these events the next state of a process need not follow from its last one.

Either the process took another state, or the events that would say so are missing.
"""


def check_work(record: RunRecord, found: Judgement) -> None:
    """Check that each process commits in order, with one forward pass for each batch."""
    _check_rework(record, found)
    num_passes = 0
    num_healed_alive = 0
    wasted = Counter[str]()
    short_rounds: list[str] = []
    for process in record.processes:
        num_passes += _check_passes(process, found)
        _check_order(process, record, found)
        wasted += _WastedPasses(process, record, found).count()
        num_healed_alive += _count_heals_alive(process)
        if process.rank == 0:
            short_rounds += _find_short_rounds(process, record)
    num_commits = len(record.of(StepCommitted)) + record.num_omitted
    commits = count(num_commits, "commit")
    found.statement = f"{commits} in order, {_passes(num_passes)}, one a batch"
    for why, number in wasted.items():
        found.notes.append(f"{_passes(number)} wasted: {why}")
    if num_healed_alive:
        found.notes.append(
            f"{count(num_healed_alive, 'time')} a rank fell behind and healed while it lived"
        )
    if short_rounds:
        who = "by a group that had not healed"
        found.notes.append(f"fewer steps in a round than it has, {who}: {'; '.join(short_rounds)}")
    if not num_commits:
        found.unknown.append(f"no event tells of a committed {record.unit.noun}")


def _check_rework(record: RunRecord, found: Judgement) -> None:
    """Object to steps that were made again and again."""
    rework = find_rework(record)
    found.reservation = rework.describe()
    history_has_gaps = bool(find_gaps(record))
    for setback, text in rework.offences:
        if history_has_gaps:
            # The event that explains the setback may be missing.
            found.unknown.append(text)
        else:
            found.offences.append(Offence(text, time=setback.time, step=setback.step))


def _check_passes(process: ProcessHistory, found: Judgement) -> int:
    """Object to commits without exactly one forward pass for each batch.

    Returns:
        The number of forward passes.
    """
    total = 0
    for event in process.events:
        if isinstance(event, UsualSteps):
            total += event.forward_passes
        elif isinstance(event, StepCommitted):
            passes = event.forward_passes
            total += passes
            num_read = sum(data.num_batches for data in event.readings())
            if passes != num_read:
                batches = count(num_read, "batch", "batches")
                found.object_to(f"{_passes(passes)} for {batches}", event)
    return total


def _check_order(process: ProcessHistory, record: RunRecord, found: Judgement) -> None:
    """Object to a commit that does not continue from the state that the process held."""
    noun = record.unit.noun
    held: StepCommitted | UsualSteps | None = None
    # The first events of a process may be missing, and its heal among them.
    may_hold_any_state = not any(isinstance(event, WorkerStarted) for event in process.events)
    for event in process.events:
        if isinstance(event, _LOSES_STATE):
            may_hold_any_state = True
            continue
        if not isinstance(event, (StepCommitted, UsualSteps)):
            continue
        parent = event.parent
        if not may_hold_any_state:
            follows_held = held is not None and parent == held.lineage
            # A state without any event is missing from the history: its maker is unknown.
            is_missing = parent != ROOT and parent not in record.states
            if not follows_held and is_missing:
                text = f"no event of {process.name} before {noun} {event.step}"
                found.unknown.append(f"the history is cut: {text}")
            elif held is None and parent != ROOT:
                text = f"its first commit changes the state {parent}"
                found.object_to(f"{text}, which it did not get from anybody", event)
            elif held is not None and not follows_held:
                before = f"{held.lineage} ({noun} {held.step})"
                text = f"goes on from the state {parent}; it held {before}"
                found.object_to(f"{text}, and did not heal between", event)
        held = event
        may_hold_any_state = False


def _find_short_rounds(process: ProcessHistory, record: RunRecord) -> Iterator[str]:
    """Yield the rounds for which a process made too few steps although it held the state before.

    A healed group joins in the middle of a round, and makes fewer steps in order. A group that
    reaches a round when the others are at its end skips the round; that is a note.
    """
    held_state = False
    unit = record.unit
    for event in process.events:
        if isinstance(event, _LOSES_STATE):
            held_state = False
        elif isinstance(event, StepCommitted):
            made = event.inner_steps
            length = unit.steps_of(event.step)
            if held_state and made is not None and made < length:
                yield f"group {event.replica} made {made} of {length} of round {event.step}"
            held_state = True


def _count_heals_alive(process: ProcessHistory) -> int:
    """Return how often a process healed after its first commit.

    Its gradients of the step under way were thrown away each time.
    """
    number = 0
    first_commit: StepCommitted | None = None
    for event in process.events:
        if isinstance(event, StepCommitted) and first_commit is None:
            first_commit = event
        elif isinstance(event, HealFinished) and first_commit is not None:
            number += 1
    return number


class _WastedPasses:
    """Counts the forward passes of a process that are not in the trajectory, by reason.

    A batch that was computed again needs a reason; without one the checker objects. If the first
    computation counted as well, the batch is a repetition, and the audit of the batches finds it.

    `check_work` makes one for each process and calls `count` once.
    """

    def __init__(self, process: ProcessHistory, record: RunRecord, found: Judgement) -> None:
        self._process = process
        self._record = record
        self._found = found
        self._wasted = Counter[str]()
        self._void: dict[tuple[int, int], str | None] = {}
        """(slot, first batch) of each void computation, and its reason; None without a reason."""
        self._excluded_slots: set[int] = set()
        """The slots whose gradients the step under way leaves out."""
        self._is_cut = False
        """True if events since the last commit are missing, perhaps with the reason."""

    def count(self) -> Counter[str]:
        for event in self._process.events:
            if isinstance(event, StepCommitted):
                self._take_commit(event)
            elif isinstance(event, EventsDropped):
                self._void.clear()
                self._excluded_slots = set()
                self._is_cut = True
            elif isinstance(event, (FaultInjected, *STATE_REPLACING_EVENTS)):
                reason = f"{self._record.unit.noun}s that were thrown away"
                for batch, known_reason in self._void.items():
                    self._void[batch] = known_reason or reason
            elif isinstance(event, GradientExcluded):
                self._excluded_slots = set(event.slots)
        return self._wasted

    def _take_commit(self, event: StepCommitted) -> None:
        is_on_chain = event.contributed and event.lineage in self._record.chain_lineages
        batches = self._record.states[event.lineage].batches
        for data in event.readings():
            batch = (data.slot, data.first_batch)
            if batch in self._void:
                self._waste(batch, data.num_batches, event)
            if not is_on_chain or data.slot not in batches:
                self._void[batch] = self._why_void()
        self._excluded_slots = set()
        self._is_cut = False

    def _waste(self, batch: tuple[int, int], num_batches: int, event: StepCommitted) -> None:
        """Count the void computation of a batch that was computed again now."""
        reason = self._void.pop(batch)
        if reason is None:
            slot, first = batch
            self._found.object_to(f"computed batch {first} of slot {slot} again", event)
        else:
            self._wasted[reason] += num_batches

    def _why_void(self) -> str | None:
        """Return why the gradients of a step do not count, if the events say so."""
        if self._process.slot in self._excluded_slots:
            return "gradients that were not finite"
        if self._is_cut:
            return "events that are missing may say why"
        return None


def _passes(value: int) -> str:
    return count(value, "forward pass", "forward passes")
