# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The rounds of a run with a semi-synchronous method: the local steps of each group.

In a *round* each group makes several local steps, and then the groups exchange one *fragment* of
the model (or all of it). `find_rounds` counts the steps for the report. `find_partial` finds, for
the audit of the batches,
the work that is in the updates of some fragments only. See docs/semi_sync.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from titan_ft.history.fold.unit import STEP, Unit
from titan_ft.history.judgement import count
from titan_ft.history.record.run_record import ProcessHistory, RunRecord, once_per_record
from titan_ft.history.record.trajectory import JobState
from titan_ft.run.events import (
    CheckpointLoaded,
    GradientExcluded,
    HealFinished,
    StartedAnew,
    StepCommitted,
)


@dataclass(frozen=True)
class ShortRound:
    """A round for which some group made too few steps."""

    number: int
    step: int
    """torchtitan's step after the round."""
    time: float
    """Unix seconds of its first commit."""
    length: int
    """Number of steps that a group makes for it."""
    fewer: dict[int, int | None]
    """The number of steps that count, of each group that made too few.

    0 if the group was away, healed or was left out; None if it died after its exchange, so that no
    event reports its steps.
    """

    def describe(self) -> str:
        """Return the groups and their numbers of steps in words."""
        texts = []
        for group, steps in self.fewer.items():
            number = "unknown"
            if steps is not None:
                number = str(steps)
            texts.append(f"group {group}: {number}")
        return f"{', '.join(texts)} of {self.length}"


@dataclass(frozen=True)
class RecordedRounds:
    """The rounds of a job's trajectory."""

    unit: Unit = STEP
    committed: int = 0
    steps: tuple[tuple[int, int], ...] = ()
    """Each group, and the number of its own steps in the job's state."""
    short: tuple[ShortRound, ...] = ()

    def describe(self) -> str:
        """Return a line with the number of rounds and the steps of the groups in them."""
        length = count(self.unit.steps, "step")
        text = f"{self.committed:,}, of {length} each ({self.unit.method})"
        made = [steps for _, steps in self.steps]
        if not made or not self.short:
            return text
        short = self.unit.count(len(self.short))
        return (
            f"{text}; {min(made):,} to {max(made):,} steps of a group; not all of them in {short}"
        )


@once_per_record
def find_rounds(record: RunRecord) -> RecordedRounds | None:
    """Return the rounds of a run; None if the groups exchanged at each step."""
    unit = record.unit
    if not unit.method:
        return None
    made: Counter[int] = Counter(dict.fromkeys(record.groups, 0))
    short = []
    for state in record.chain:
        length = unit.steps_of(state.step)
        fewer: dict[int, int | None] = {}
        for group, steps in _count_own_steps(record, state).items():
            if steps:
                made[group] += steps
            if steps is None or steps < length:
                fewer[group] = steps
        if fewer:
            step = unit.step_after(state.step)
            short.append(ShortRound(state.step, step, state.time, length, fewer))
    return RecordedRounds(unit, len(record.chain), tuple(sorted(made.items())), tuple(short))


def _count_own_steps(record: RunRecord, state: JobState) -> dict[int, int | None]:
    """Return the number of steps of each group in a round; see `ShortRound.fewer`."""
    reported: dict[int, int | None] = {}
    for event in record.commits_by_lineage[state.lineage]:
        if event.rank == 0 and event.contributed:
            reported[event.replica] = event.inner_steps
    found: dict[int, int | None] = {}
    for group in record.groups:
        # A participant without a report died after its exchange.
        unreported = None if group in state.participants else 0
        found[group] = reported.get(group, unreported)
    return found


@dataclass(frozen=True)
class PartialRound:
    """The work of a group for a round that is in the updates of some fragments only.

    The group started again before the turn of the other fragments.
    """

    group: int
    state: JobState
    """The state that the round made."""
    num_exchanged: int
    """Number of fragments whose updates have the work."""
    num_fragments: int
    """Number of fragments of the group's model."""


def find_partial(record: RunRecord, chain: Sequence[JobState]) -> list[PartialRound]:
    """Return the work that groups lost again for some fragments of the model.

    Between two exchanges of a fragment, its change exists in one group only. The change is lost if
    the group dies, leaves, heals or loads a checkpoint, or if finite data ends the run before the
    fragment's turn.

    Args:
        chain: the trajectory.
    """
    if not record.unit.method:
        return []
    partial = []
    for group in record.groups:
        for span in _find_spans(record, group, chain):
            unit = span.unit
            # The last round of the training exchanges all fragments.
            has_exchanged_all = bool(unit.last) and unit.step_after(span.end) == unit.last
            if not span.is_over or has_exchanged_all:
                continue
            for state in span.rounds:
                last_turn = state.step + unit.fragments - 1
                if last_turn > span.end:
                    num_exchanged = span.end - state.step + 1
                    partial.append(PartialRound(group, state, num_exchanged, unit.fragments))
    return partial


@dataclass
class _WeightsSpan:
    """The time for which a group trained on without getting its weights from elsewhere.

    Attributes:
        unit: by the config of the process.
        begun: Unix seconds.
        rounds: the rounds to which the group contributed.
        end: the last round that has the group's change, also if the change was of former rounds
            only.
        is_over: True if the group has lost these weights.
    """

    unit: Unit
    begun: float
    rounds: list[JobState] = field(default_factory=list)
    end: int = 0
    is_over: bool = True


def _find_spans(record: RunRecord, group: int, chain: Sequence[JobState]) -> list[_WeightsSpan]:
    """Return the spans of a group along a trajectory."""
    spans: list[_WeightsSpan] = []
    # A process that was started again contributes only after its heal, except the first one.
    able_to_contribute: list[_WeightsSpan] = []
    span_of: dict[str, _WeightsSpan] = {}
    has_ended = True
    for process in record.processes:
        if process.slot != group or process.rank != 0:
            continue
        has_ended = process.exit is not None or process.ended_in_order
        span = _WeightsSpan(Unit.of(process.config), process.events[0].time)
        if not spans:
            able_to_contribute.append(span)
        spans.append(span)
        for later_span in _read_process(process, span, span_of):
            spans.append(later_span)
            able_to_contribute.append(later_span)
    if spans:
        spans[-1].is_over = has_ended
    _assign_rounds(record, group, chain, able_to_contribute, span_of)
    return spans


def _read_process(
    process: ProcessHistory, span: _WeightsSpan, span_of: dict[str, _WeightsSpan]
) -> list[_WeightsSpan]:
    """Return the further spans of a process, and note the span of each round that it reports.

    Args:
        span: the first span of the process.
        span_of: gets the span of each lineage.
    """
    later_spans = []
    for event in process.events:
        # A group that rolls back keeps its weights, so that `RolledBack` begins no span.
        if isinstance(event, HealFinished | CheckpointLoaded | StartedAnew):
            span = _WeightsSpan(span.unit, event.time)
            later_spans.append(span)
        elif isinstance(event, StepCommitted):
            span_of[event.lineage] = span
    return later_spans


def _assign_rounds(
    record: RunRecord,
    group: int,
    chain: Sequence[JobState],
    able_to_contribute: Sequence[_WeightsSpan],
    span_of: dict[str, _WeightsSpan],
) -> None:
    """Set the rounds and the end of each span of a group."""
    excluded: set[tuple[int, int]] = set()
    for event in record.of(GradientExcluded):
        excluded.update((event.step, slot) for slot in event.slots)
    for state in chain:
        span = span_of.get(state.lineage)
        if group in state.participants:
            if span is None:
                # The group died after the exchange, or its event is still to come.
                span = _find_latest(able_to_contribute, state.time)
            if span is not None:
                span.rounds.append(state)
        if span is not None and (state.step, group) not in excluded:
            span.end = state.step


def _find_latest(spans: Sequence[_WeightsSpan], time: float) -> _WeightsSpan | None:
    """Return the last span that had begun by a time."""
    for span in reversed(spans):
        if span.begun <= time:
            return span
    return None
