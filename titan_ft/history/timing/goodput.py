# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The use of a run's time and work, in figures that can be compared with those of other systems.

- Time: each group's microseconds in each state, from the timeline.
- *Effective training time*: the share of the time in which the job made steps at its usual pace.
- Exchanges: how many were attempted and how many led to a commit.
- Work: forward passes that groups computed, and those that were for nothing.

If other systems publish several definitions of a figure, this module uses the stricter one: all
time from the launch to its end counts, the start included. For a long run the record has only the
first commit of a *usual step* and sums over the others (`UsualSteps`); each figure adds these. The
report, the forecast and the benchmarks call this module. See docs/observing.md, "The history".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any, NamedTuple

from titan_ft.history.record.run_record import RunRecord, once_per_record
from titan_ft.history.record.usual_steps import UsualSteps
from titan_ft.history.timing.incidents import find_failures
from titan_ft.history.timing.intervals import STATES
from titan_ft.history.timing.timeline import build_timeline
from titan_ft.run.events import ExchangeFailed, StepCommitted, Waiting


@dataclass
class Goodput:
    """The figures of one run. A figure that the history does not have is None."""

    wall_us: int = 0
    """From `launch_started` (else the first event) to `launch_finished` (else the last event)."""
    num_groups: int = 0
    groups_us: dict[int, dict[str, int]] = field(default_factory=dict)
    """Microseconds of each group in each state of `titan_ft.history.timing.timeline`.

    The sum of each group is `wall_us`.
    """
    job_us: dict[str, int] = field(default_factory=dict)
    """The sum over the groups. The sum of all states is exactly `wall_us` x `num_groups`."""
    usual_step_seconds: float | None = None
    """Median time from step to step, over the steps that all groups made at the first try."""
    effective_training_time: float | None = None
    """See `effective_training_time`; the share of the whole time, start and end included."""
    effective_training_time_in_training: float | None = None
    """The share of the time from the begin of the first step to the last commit."""
    exchanges_attempted: int = 0
    exchanges_committed: int = 0
    """See `count_exchanges`."""
    steps_begun: int = 0
    """The steps that groups began to compute; each group counts."""
    steps_committed: int = 0
    """The number of these steps that are in the job's state."""
    forward_passes: int = 0
    """Forward passes (microbatches) that groups computed; all ranks of a group are one.

    For a step that was cut short, the number is an upper bound.
    """
    wasted: dict[str, int] = field(default_factory=dict)
    """The forward passes that were computed for nothing, by reason."""
    steps_per_hour: float | None = None
    """Committed steps of the job per hour of the whole time."""
    tokens_per_second: float | None = None
    """Tokens of committed steps per second of the whole time."""
    num_failures: int = 0
    """See `titan_ft.history.fold.run`."""
    mean_stall_seconds: float | None = None
    """Mean over the failures that other groups survived; a failure without a stall counts as 0."""

    @property
    def group_us(self) -> int:
        """Wall time x groups."""
        return self.wall_us * self.num_groups

    @property
    def num_wasted(self) -> int:
        return sum(self.wasted.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain dictionaries and numbers for JSON."""
        whole_us = self.group_us or 1
        figures = asdict(self)
        figures["group_us"] = self.group_us
        figures["shares"] = {
            state: round(self.job_us.get(state, 0) / whole_us, 6) for state in STATES
        }
        figures["num_wasted"] = self.num_wasted
        return figures


@once_per_record
def measure_goodput(record: RunRecord) -> Goodput:
    """Return the use of a run's time and work."""
    result = Goodput()
    _add_up_times(record, result)
    whole, in_training = effective_training_time(record)
    result.usual_step_seconds = record.usual_step_seconds
    result.effective_training_time = whole
    result.effective_training_time_in_training = in_training
    result.exchanges_attempted, result.exchanges_committed = count_exchanges(record)
    _count_work(record, result)
    if result.wall_us:
        steps = record.first_commit_of_step.values()
        result.steps_per_hour = len(steps) * 3600e6 / result.wall_us
        result.tokens_per_second = sum(event.tokens for event in steps) * 1e6 / result.wall_us
    failures = find_failures(record)
    result.num_failures = len(failures)
    stalls = [each.stall_seconds for each in failures if each.stall_seconds is not None]
    if stalls:
        result.mean_stall_seconds = mean(stalls)
    return result


def _add_up_times(record: RunRecord, result: Goodput) -> None:
    """Set the microseconds of each group and of the job in each state."""
    timeline = build_timeline(record)
    result.wall_us = timeline.wall_us
    result.num_groups = len(timeline.groups)
    job_us: Counter[str] = Counter()
    for slot in timeline.groups:
        totals = timeline.totals_us(slot)
        assert sum(totals.values()) == timeline.wall_us, f"the time of group {slot} does not add up"
        result.groups_us[slot] = {state: totals[state] for state in STATES if totals[state]}
        job_us += Counter(result.groups_us[slot])
    result.job_us = dict(job_us)
    assert sum(result.job_us.values()) == result.group_us, "the job's time does not add up"


def _count_work(record: RunRecord, result: Goodput) -> None:
    """Set the numbers of steps and forward passes."""
    begun = _find_begun_steps(record)
    result.steps_begun = len(begun)
    for step in begun:
        result.forward_passes += step.forward_passes
        if not step.why_wasted:
            result.steps_committed += 1
        elif step.forward_passes:
            known = result.wasted.get(step.why_wasted, 0)
            result.wasted[step.why_wasted] = known + step.forward_passes
    for usual in record.of(UsualSteps):
        if usual.rank == 0:
            result.steps_begun += usual.num_steps
            result.steps_committed += usual.num_steps
            result.forward_passes += usual.forward_passes


def effective_training_time(record: RunRecord) -> tuple[float | None, float | None]:
    """Return the effective training time as a share of all time, and of the time in training.

    The time in training is the time between the first and the last step. Effective training time is
    the sum, over all committed steps, of

        min(time since the step before, usual step) x contributing groups / all groups

    So a stall is lost for all groups. The absence of a group is lost for this group. A step that
    was slower than usual, for any reason, counts as a usual step, and a faster step does not make
    up for it: on a machine with varying steps the share is below 100 % even without failures. A
    group that joins in the midst of a round counts by the steps that it made for the round.

    Source: "effective training time" of FT-HSDP (Salpekar et al., "Training LLMs with Fault
    Tolerant HSDP on 100,000 GPUs", arXiv 2602.00277): from 44 % to 80 % as the stall per failure
    goes from 10 to 3 minutes. Only the abstract of the paper was at hand, and it has no formula.
    This formula explains its figures with a failure each 18 minutes: 1 - 10/18 = 44 % if all groups
    wait for one, and 1 - 3/18 = 83 % less the share of a replica that is being restarted.
    """
    steps = record.first_commit_of_step
    usual_us = record.usual_step_us
    begin, end = record.span_us
    if not steps or not usual_us or begin == end or not record.groups:
        return None, None
    effective_us = 0.0
    before = begin
    for _, event in sorted(steps.items()):
        step_us = max(0, event.time_us - before)
        share = _count_contributors(record, event) / len(record.groups)
        effective_us += min(step_us, usual_us) * min(1.0, share)
        before = event.time_us
    times = [event.time_us for event in steps.values()]
    # The first step began one usual step before its commit.
    training_us = min(max(times) - min(times) + usual_us, end - begin)
    return effective_us / (end - begin), min(1.0, effective_us / training_us)


def _count_contributors(record: RunRecord, event: StepCommitted) -> float:
    """Return how many groups contributed to a step.

    A group that made only some steps of a round counts as that part of a group, as far as known.
    """
    groups = float(len(event.participants))
    unit = record.unit
    if unit.steps == 1:
        return groups
    steps_of_round = unit.steps_of(event.step)
    if not steps_of_round:
        return groups
    for commit in record.commits_by_lineage[event.lineage]:
        is_of_contributor = commit.rank == 0 and commit.contributed
        if is_of_contributor and commit.inner_steps is not None:
            missing_share = 1 - commit.inner_steps / steps_of_round
            groups -= max(0.0, missing_share)
    return groups


@once_per_record
def count_exchanges(record: RunRecord) -> tuple[int, int]:
    """Return the exchanges between the groups that were attempted, and those that were committed.

    These are the steps that torchft's runs count: with a failure each 60 s, 5,145 of 6,249 were
    committed, and with one each 15 s 268 of 888 ("Fault Tolerant Llama", PyTorch blog, 2025,
    pytorch.org/blog/fault-tolerant-llama-training-with-2000-synthetic-failures-every-15-seconds-
    and-no-checkpoints-on-crusoe-l40s). There, an attempt is a step whose exchange was voted on.
    Without a commit, its forward and backward passes and its batch are lost. Here the exchange is
    repeated from the same gradients; the failed attempt counts all the same.

    The attempts of a step are the exchanges of the group that made most of them. An exchange that
    broke for any group counts. Steps that nobody committed and states that were thrown away are
    included. Rounds in which groups only waited, below `min_replica_size`, count as one exchange.
    """
    # By step and lineage, the attempts of each committed step.
    attempts_of: dict[tuple[int, str], int] = {}
    for first in record.usual_commits:
        attempts_of[first.step, first.lineage] = 1
    # By group and step, failed exchanges since the group's last commit of this step.
    num_failed: dict[tuple[int, int], int] = defaultdict(int)
    waited: set[tuple[int, int]] = set()
    for event in record.events:
        if not isinstance(event, ExchangeFailed | Waiting | StepCommitted) or event.rank != 0:
            continue
        if isinstance(event, ExchangeFailed):
            num_failed[event.replica, event.step + 1] += 1
        elif isinstance(event, Waiting):
            waited.add((event.replica, event.step + 1))
        else:
            step_of_group = (event.replica, event.step)
            num_failed_before = num_failed.pop(step_of_group, 0)
            if step_of_group in waited:
                # `exchanges` counts each round of the wait. Count one exchange for the wait, and
                # one for the commit.
                attempts = num_failed_before + 2
                waited.discard(step_of_group)
            else:
                attempts = max(event.exchanges, num_failed_before + 1)
            state = (event.step, event.lineage)
            attempts_of[state] = max(attempts_of.get(state, 1), attempts)
    num_attempted = sum(attempts_of.values())
    # A group that died in an exchange saw it break no more often than the other groups, whose
    # commits count the attempts. So only steps that nobody committed are added.
    committed_steps = {step for step, _ in attempts_of}
    attempts_without_commit: dict[int, int] = {}
    for (_, step), fails in num_failed.items():
        if step not in committed_steps:
            attempts_without_commit[step] = max(attempts_without_commit.get(step, 0), fails)
    num_attempted += sum(attempts_without_commit.values())
    num_committed = 0
    for _, lineage in attempts_of:
        if lineage not in record.void_lineages:
            num_committed += 1
    return num_attempted, num_committed


@once_per_record
def count_wire_bytes(record: RunRecord) -> tuple[int | None, float | None]:
    """Return the bytes of gradients that all ranks sent, and the bytes of a group for each step.

    Each step within a round counts. The bytes that a group sent after its last commit are unknown.
    """
    sent: int | None = None
    num_steps = 0
    for event in record.of(StepCommitted):
        if event.wire_bytes is not None:
            sent = (sent or 0) + event.wire_bytes
            if event.rank == 0:
                num_steps += event.inner_steps or 0
    for usual in record.of(UsualSteps):
        if usual.wire_bytes is not None:
            sent = (sent or 0) + usual.wire_bytes
            if usual.rank == 0:
                num_steps += usual.num_steps
    if sent is None or num_steps == 0:
        return sent, None  # an old history has no `inner_steps`
    return sent, sent / num_steps


class _BegunStep(NamedTuple):
    """A step that a group began to compute.

    Attributes:
        why_wasted: why its forward passes were for nothing; empty if they count.
    """

    forward_passes: int
    why_wasted: str


def _find_begun_steps(record: RunRecord) -> list[_BegunStep]:
    """Return the steps that groups began to compute, except usual steps.

    A computed step does not count in three cases: the group died or healed before its commit (and
    the others did not commit its gradient), its gradient was left out, or its state was thrown
    away.
    """
    begun = []
    for event in record.commits:
        if event.forward_passes <= 0:
            continue
        why = ""
        if event.lineage in record.void_lineages:
            why = "the state was thrown away"
        elif not event.contributed:
            why = "the gradient was left out"
        begun.append(_BegunStep(event.forward_passes, why))
    for step in build_timeline(record).unfinished:
        why = ""
        if not step.is_committed:
            why = f"unfinished: {step.reason}"
        begun.append(_BegunStep(step.forward_passes, why))
    return begun
