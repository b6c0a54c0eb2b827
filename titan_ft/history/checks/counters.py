# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Promise 7: the counters of steps, learning rate and tokens advance with a commit, and only then.

See docs/guarantees.md.
"""

from __future__ import annotations

from titan_ft.history.checks.foundation import object_to_absence
from titan_ft.history.judgement import Judgement, count
from titan_ft.history.record.run_record import RunRecord, once_per_record
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
    """Check steps, learning rates, tokens, checkpoints and `min_replica_size` against the
    commits.
    """
    unit = record.unit
    _check_steps(record, found)
    num_compared = _check_rates(record, found)
    _check_finished(record, found)
    num_saved = _check_saved(record, found)
    _check_sizes(record, found)
    steps = unit.count(len(record.chain))
    if unit.method:
        steps += f" of {count(unit.steps, 'step')} ({unit.method})"
    rates = f"LR of {count(num_compared, 'commit')} by {unit.noun}"
    found.statement = f"{steps} by one each, {rates}, {count(num_saved, 'checkpoint')}"
    if not record.chain:
        found.unknown.append(f"no event tells of a committed {unit.noun}")


def _check_steps(record: RunRecord, found: Judgement) -> None:
    """Object to a state whose step does not follow its parent's step."""
    noun = record.unit.noun
    for state in record.states.values():
        before: int | None = None
        if state.parent == ROOT:
            before = 0
        elif state.parent in record.states:
            before = record.states[state.parent].step
        commits = record.commits_by_lineage[state.lineage]
        if before is not None and state.step != before + 1:
            change = f"{noun} {state.step} changes the state of {noun} {before}"
            found.object_to(f"{change}; {noun}s must go up by one", commits[0])
        for event in commits:
            if event.step != state.step or event.parent != state.parent:
                what = f"{noun} and parent of the state {state.lineage}"
                found.object_to(f"{what} are not what others report", event)


def _check_rates(record: RunRecord, found: Judgement) -> int:
    """Check that equal steps with an equal config and share of the batch have an equal LR.

    If a failed exchange advanced the schedule, the repetition of the step has another LR, and so
    have the groups that did not see the exchange fail.

    Returns:
        The number of commits that were compared with another one.
    """
    noun = record.unit.noun
    first_of: dict[tuple[str, int, int], StepCommitted] = {}
    # All commits of a usual step agree, by its definition.
    num_compared = record.num_omitted - len(record.usual_commits)
    for process in record.processes:
        config_digest = ""
        for event in process.events:
            if isinstance(event, WorkerStarted):
                config_digest = event.config_digest
            if not isinstance(event, StepCommitted):
                continue
            share = len(record.states[event.lineage].batches)
            first = first_of.setdefault((config_digest, event.step, share), event)
            if first is event:
                continue
            num_compared += 1
            # Within one state, a difference is one of arithmetic: promise 1 judges it.
            if first.lr != event.lr and first.lineage != event.lineage:
                before = f"it was {first.lr!r} at this {noun} before"
                text = f"LR {event.lr!r}; {before}, of the same share of the batch"
                found.object_to(text, event)
    return num_compared


def _check_finished(record: RunRecord, found: Judgement) -> None:
    """Check the final counts of steps and tokens against the trajectory."""
    noun = record.unit.noun
    first_count: dict[str, int] = {}
    for event in record.of(TrainingFinished):
        state = record.states.get(event.lineage)
        if state is not None and event.step != state.step:
            text = f"finished with {noun} {event.step} in the state of {noun} {state.step}"
            found.object_to(text, event)
        other_count = first_count.setdefault(event.lineage, event.tokens)
        if other_count != event.tokens:
            text = f"finished with {event.tokens} tokens, others with {other_count}"
            found.object_to(text, event)
        elif _has_whole_trajectory(record, event.lineage):
            _check_tokens(record, event, found)


def _has_whole_trajectory(record: RunRecord, lineage: str) -> bool:
    """Return whether the history has all steps from the first to a final state."""
    chain = record.chain
    return bool(chain) and chain[0].parent == ROOT and chain[-1].lineage == lineage


def _check_tokens(record: RunRecord, event: TrainingFinished, found: Judgement) -> None:
    """Compare a final count with the sum over the steps.

    The final count includes tokens without a label, and the steps' own numbers do not.
    """
    total, all_labelled = _add_up_tokens(record)
    has_too_few = event.tokens < total
    has_too_many = all_labelled and event.tokens > total
    if has_too_few or has_too_many:
        own = f"the {record.unit.noun}s' own are {total}"
        found.object_to(f"finished with {event.tokens} tokens, {own}", event)


@once_per_record
def _add_up_tokens(record: RunRecord) -> tuple[int, bool]:
    """Return the tokens of all steps, and whether each batch had the same number of tokens.

    If so, every token has a label.
    """
    total = 0
    tokens_per_batch: set[float] = set()
    for state, point in zip(record.chain, record.curve, strict=True):
        total += point.event.tokens
        num_batches = sum(number for _, number in state.batches.values())
        if num_batches:
            tokens_per_batch.add(point.event.tokens / num_batches)
    return total, len(tokens_per_batch) == 1


def _check_saved(record: RunRecord, found: Judgement) -> int:
    """Check that the writer of each checkpoint held the state of its step.

    All steps here are torchtitan's, also if the job counts rounds.

    Returns:
        The number of checkpoints.
    """
    num_saved = 0
    for process in record.processes:
        held: set[int | None] = set()
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
                num_saved += 1
                if event.step not in held:
                    text = "saved a checkpoint of a step that it had not committed"
                    object_to_absence(record, found, text, event)
    return num_saved


def _check_sizes(record: RunRecord, found: Judgement) -> None:
    """Check that at least `min_replica_size` groups were present at each commit.

    A group whose gradient was left out was present: `GradientExcluded` names it.
    """
    num_unknown = 0
    for process in record.processes:
        least = None if process.config is None else process.config.min_replica_size
        num_excluded = 0
        for event in process.events:
            if isinstance(event, GradientExcluded):
                num_excluded = len(event.slots)
            elif isinstance(event, UsualSteps):
                if least is None:
                    num_unknown += event.num_steps
            elif isinstance(event, StepCommitted):
                num_present = len(event.participants) + num_excluded
                num_excluded = 0
                if least is None:
                    num_unknown += 1
                elif num_present < least:
                    groups = count(num_present, "group")
                    text = f"committed with {groups}; min_replica_size is {least}"
                    object_to_absence(record, found, text, event)
    if num_unknown:
        commits = count(num_unknown, "commit")
        text = f"{commits} of workers whose min_replica_size is not in the history"
        found.unknown.append(text)
