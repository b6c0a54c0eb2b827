# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Promise 7: what counts steps advances with a commit, and only then."""

from __future__ import annotations

from titan_ft.history.checks.foundation import object_to_absence
from titan_ft.history.judgement import Judgement, count
from titan_ft.history.record.run_record import RunRecord, view
from titan_ft.history.record.trajectory import ROOT
from titan_ft.history.record.usual_steps import UsualSteps
from titan_ft.run.events import (
    CheckpointLoaded,
    CheckpointSaved,
    GradientExcluded,
    HealFinished,
    StepCommitted,
    TrainingFinished,
    WorkerStarted,
)


def check_counters(record: RunRecord, found: Judgement) -> None:
    """Check step, LR, tokens, checkpoints and `min_replica_size` against the commits."""
    _check_steps(record, found)
    compared = _check_rates(record, found)
    _check_finished(record, found)
    saved = _check_saved(record, found)
    _check_sizes(record, found)
    unit = record.unit
    steps = unit.count(len(record.chain)) + (f" of {count(unit.steps, 'step')} ({unit.method})" if unit.method else "")
    rates = f"LR of {count(compared, 'commit')} by {unit.noun}"
    found.statement = f"{steps} by one each, {rates}, {count(saved, 'checkpoint')}"
    if not record.chain:
        found.unknown.append(f"no event tells of a committed {unit.noun}")


def _check_steps(record: RunRecord, found: Judgement) -> None:
    noun = record.unit.noun
    for state in record.states.values():
        parent = record.states.get(state.parent)
        before = 0 if state.parent == ROOT else None if parent is None else parent.step
        if before is not None and state.step != before + 1:
            text = f"{noun} {state.step} changes the state of {noun} {before}; {noun}s must go up by one"
            found.object_to(text, record.commits_of[state.lineage][0])
        for event in record.commits_of[state.lineage]:
            if (event.step, event.parent) != (state.step, state.parent):
                found.object_to(f"{noun} and parent of the state {state.lineage} are not what others report", event)


def _check_rates(record: RunRecord, found: Judgement) -> int:
    """Check that the LR is the same wherever step, share of the batch and config are; return the commits compared.

    A schedule that advanced on a failed exchange gives another LR to the same step of a group that did not see it
    fail, and to its repetition.
    """
    noun = record.unit.noun
    rates: dict[tuple[object, ...], tuple[float | None, StepCommitted]] = {}
    compared = record.num_omitted - len(record.firsts)
    states = record.states
    for process in record.processes:
        digest = ""
        for event in process.events:
            if not isinstance(event, StepCommitted):
                if isinstance(event, WorkerStarted):
                    digest = event.config_digest
                continue
            rate, share = event.lr, len(states[event.lineage].batches)
            first, other = rates.setdefault((digest, event.step, share), (rate, event))
            compared += other is not event
            # Within one state a difference is that of its groups' arithmetic.
            if first != rate and other.lineage != event.lineage:
                text = f"LR {rate!r}; it was {first!r} at this {noun} before, of the same share of the batch"
                found.object_to(text, event)
    return compared


def _check_finished(record: RunRecord, found: Judgement) -> None:
    """Check the final counts of steps and tokens against the trajectory."""
    tokens: dict[str, int] = {}
    for event in record.of(TrainingFinished):
        state, tokens_seen = record.states.get(event.lineage), event.tokens
        if state is not None and event.step != state.step:
            noun = record.unit.noun
            found.object_to(f"finished with {noun} {event.step} in the state of {noun} {state.step}", event)
        if tokens.setdefault(event.lineage, tokens_seen) != tokens_seen:
            found.object_to(f"finished with {tokens_seen} tokens, others with {tokens[event.lineage]}", event)
        elif record.chain and event.lineage == record.chain[-1].lineage and record.chain[0].parent == ROOT:
            _check_tokens(record, event, found)


def _check_tokens(record: RunRecord, event: TrainingFinished, found: Judgement) -> None:
    """Compare a final count with the sum of the steps' tokens. Tokens without a label are in the count only."""
    tokens_seen, (total, all_labelled) = event.tokens, _add_up_tokens(record)
    if tokens_seen < total or (all_labelled and tokens_seen != total):
        found.object_to(f"finished with {tokens_seen} tokens, the {record.unit.noun}s' own are {total}", event)


@view
def _add_up_tokens(record: RunRecord) -> tuple[int, bool]:
    """Return the tokens of all steps, and whether each batch had the same number of them."""
    batches = [sum(number for _, number in state.batches.values()) for state in record.chain]
    full = {point.event.tokens / number for point, number in zip(record.curve, batches, strict=True) if number}
    return sum(point.event.tokens for point in record.curve), len(full) == 1


def _check_saved(record: RunRecord, found: Judgement) -> int:
    """Check that each checkpoint is of a state that its writer had made; return their number.

    A checkpoint's step is torchtitan's, which is another number where the job counts rounds.
    """
    saved = 0
    for process in record.processes:
        held = set()
        for event in process.events:
            if isinstance(event, StepCommitted):
                held.add(event.titan_step)
            elif isinstance(event, UsualSteps):
                held.update(range(event.first_step, event.step + 1))
            elif isinstance(event, HealFinished | TrainingFinished):
                held.add(record.unit.step_after(event.step))
            elif isinstance(event, CheckpointLoaded):
                held.add(event.step)
            elif isinstance(event, CheckpointSaved):
                saved += 1
                if event.step not in held:
                    object_to_absence(record, found, "saved a checkpoint of a step that it had not committed", event)
    return saved


def _check_sizes(record: RunRecord, found: Judgement) -> None:
    """Check that no state was made by fewer groups than `min_replica_size`; those with void gradients were there."""
    num_unknown = 0
    for process in record.processes:
        least = None if process.config is None else process.config.min_replica_size
        excluded: list[int] = []
        for event in process.events:
            if isinstance(event, GradientExcluded):
                excluded = event.slots
            elif isinstance(event, UsualSteps):
                num_unknown += event.num_steps if least is None else 0
            elif isinstance(event, StepCommitted):
                present = len(event.participants) + len(excluded)
                num_unknown += least is None
                if least is not None and present < least:
                    # A gradient that was left out, of a group that was there, has an event of its own.
                    text = f"committed with {count(present, 'group')}; min_replica_size is {least}"
                    object_to_absence(record, found, text, event)
                excluded = []
    if num_unknown:
        found.unknown.append(f"{count(num_unknown, 'commit')} of workers whose min_replica_size is not in the history")
