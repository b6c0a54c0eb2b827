# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What a run's time and work went into, and the figures that other systems publish of theirs.

Where there is a choice the stricter definition is taken: all time from the launch to its end counts, start included.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any

from titan_ft.history.record.run_record import RunRecord, view
from titan_ft.history.record.usual_steps import UsualSteps
from titan_ft.history.timing.incidents import find_failures
from titan_ft.history.timing.intervals import STATES
from titan_ft.history.timing.timeline import timeline
from titan_ft.run.events import ExchangeFailed, StepCommitted, Waiting


@dataclass
class Goodput:
    """The figures of one run. None where it is not in the history."""

    wall_us: int = 0
    """From `launch_started` (else the first event) to `launch_finished` (else the last event)."""
    num_groups: int = 0
    groups_us: dict[int, dict[str, int]] = field(default_factory=dict)
    """Microseconds of each group in each state of `titan_ft.history.timing.timeline`; a group's add up to `wall_us`."""
    job_us: dict[str, int] = field(default_factory=dict)
    """The sum over the groups; adds up to `wall_us` x `num_groups`, exactly."""
    usual_step_seconds: float | None = None
    """Median time from step to step, among steps that all groups made at the first try."""
    effective_training_time: float | None = None
    """See `effective_training_time`; of the whole time, start and end included."""
    effective_training_time_in_training: float | None = None
    """The same, of the time from the begin of the first step to the last commit."""
    exchanges_attempted: int = 0
    exchanges_committed: int = 0
    """See `count_exchanges`."""
    steps_begun: int = 0
    steps_committed: int = 0
    """Each group's by themselves: those that it began to compute, and those of them that are in the job's state."""
    forward_passes: int = 0
    """Forward passes (microbatches, each counted once for its whole group) that were computed. Of a step that was cut
    short, those that may have been begun."""
    wasted: dict[str, int] = field(default_factory=dict)
    """Those of them that were for nothing, by reason."""
    steps_per_hour: float | None = None
    """Committed steps of the job per hour of the whole time."""
    tokens_per_second: float | None = None
    """Tokens of committed steps per second of the whole time."""
    num_failures: int = 0
    """See `titan_ft.history.fold.run`."""
    mean_stall_seconds: float | None = None
    """Over the failures that other groups lived to see; those that stalled nobody count as 0."""

    @property
    def group_us(self) -> int:
        """Return wall time x groups."""
        return self.wall_us * self.num_groups

    @property
    def num_wasted(self) -> int:
        return sum(self.wasted.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain dictionaries and numbers, for JSON."""
        shares = {state: round(self.job_us.get(state, 0) / (self.group_us or 1), 6) for state in STATES}
        return asdict(self) | {"group_us": self.group_us, "shares": shares, "num_wasted": self.num_wasted}


@view
def goodput(record: RunRecord) -> Goodput:
    """Return what the time and the work of a run went into."""
    line = timeline(record)
    result = Goodput(wall_us=line.wall_us, num_groups=len(line.groups))
    for replica in line.groups:
        totals = line.totals_us(replica)
        result.groups_us[replica] = {state: totals[state] for state in STATES if totals[state]}
        assert sum(totals.values()) == line.wall_us, f"the time of group {replica} does not add up"
    result.job_us = dict(sum((Counter(states) for states in result.groups_us.values()), Counter()))
    assert sum(result.job_us.values()) == result.group_us, "the job's time does not add up"
    result.usual_step_seconds = record.usual_step_seconds
    result.effective_training_time, result.effective_training_time_in_training = effective_training_time(record)
    result.exchanges_attempted, result.exchanges_committed = count_exchanges(record)
    begun = _steps_begun(record)
    usual = [event for event in record.of(UsualSteps) if event.rank == 0]
    num_usual = sum(event.num_steps for event in usual)
    result.steps_begun = len(begun) + num_usual
    result.steps_committed = sum(not why for _, why in begun) + num_usual
    result.forward_passes = sum(passes for passes, _ in begun) + sum(event.forward_passes for event in usual)
    for passes, why in begun:
        if why and passes:
            result.wasted[why] = result.wasted.get(why, 0) + passes
    if line.wall_us:
        steps = record.first_commits.values()
        result.steps_per_hour = len(steps) * 3600e6 / line.wall_us
        result.tokens_per_second = sum(event.tokens for event in steps) * 1e6 / line.wall_us
    failures = find_failures(record)
    known = [failure.stall_seconds for failure in failures if failure.stall_seconds is not None]
    result.num_failures = len(failures)
    result.mean_stall_seconds = mean(known) if known else None
    return result


def effective_training_time(record: RunRecord) -> tuple[float | None, float | None]:
    """Return the effective training time as a share of the whole time, and of the time between first and last step.

    sum over committed steps of min(time since the step before, usual step) x contributing groups / all groups, divided
    by the time. So a stall counts as lost for all groups, a group that is away for itself, and a step that was slower
    than usual for whatever reason counts as a usual one; one that was faster does not make up for it. A group that
    joins in the midst of a round counts by the steps that it made for it. On a machine on
    which steps take now more and now less time it is therefore below 100 % even without failures.

    Source: "effective training time" of FT-HSDP (Salpekar et al., "Training LLMs with Fault Tolerant HSDP on 100,000
    GPUs", arXiv 2602.00277): from 44 % to 80 % as the stall per failure goes from 10 to 3 minutes. The formula is ours:
    of the paper's text only the abstract was at hand, which has none. It is the reading that explains those figures
    with the paper's failure each 18 minutes: 1 - 10/18 = 44 % with everybody waiting for everybody, and
    1 - 3/18 = 83 % less the share of a replica that is being restarted.
    """
    steps, usual_us, (begin, end) = record.first_commits, record.usual_step_us, record.span_us
    if not steps or not usual_us or begin == end or not record.groups:
        return None, None
    effective, before = 0.0, begin
    for _, event in sorted(steps.items()):
        time, share = event.time_us, _groups_in(record, event) / len(record.groups)
        effective += min(max(0, time - before), usual_us) * min(1.0, share)
        before = time
    times = [event.time_us for event in steps.values()]
    training = min(max(times) - min(times) + usual_us, end - begin)
    return effective / (end - begin), min(1.0, effective / training)


def _groups_in(record: RunRecord, event: StepCommitted) -> float:
    """Return how many groups contributed to a step; of a round, each by its part of the steps, as far as known."""
    groups, unit = float(len(event.participants)), record.unit
    if unit.steps == 1:
        return groups
    length = unit.step_after(event.step) - unit.step_after(event.step - 1)
    for own in record.commits_of[event.lineage]:
        if own.rank == 0 and own.contributed and own.inner_steps is not None:
            groups -= max(0.0, 1 - own.inner_steps / length)
    return groups


@view
def count_exchanges(record: RunRecord) -> tuple[int, int]:
    """Return the exchanges between the groups that were attempted, and those that became a step of the job.

    The equal of the steps that torchft's runs count: 5,145 of 6,249 committed with a failure each 60 s, 268 of 888 each
    15 s ("Fault Tolerant Llama", pytorch.org/blog/fault-tolerant-llama-training-with-2000-synthetic-failures-every-15-
    seconds-and-no-checkpoints-on-crusoe-l40s). There an attempt is a step whose exchange was voted on, and one that is
    not committed is lost with its forward and backward passes and its batch. Here it is repeated from the same
    gradients; it counts as attempted and not committed all the same.

    Attempted is, for each step, the number of exchanges of the group that made most (one that broke for any of the
    groups counts), those of steps that nobody committed and of states that were thrown away included. Rounds in which
    groups only waited for others, below `min_replica_size`, count as one.
    """
    made: dict[tuple[int, str], int] = {(event.step, event.lineage): 1 for event in record.firsts}
    failed: dict[tuple[int, int], int] = defaultdict(int)  # replica, step -> since its last commit of that step
    waited: set[tuple[int, int]] = set()
    broken: dict[int, int] = {}  # step -> exchanges that groups made for it which did not commit it
    for event in record.events:
        if not isinstance(event, ExchangeFailed | Waiting | StepCommitted) or event.rank != 0:
            continue
        if isinstance(event, ExchangeFailed):
            failed[event.replica, event.step + 1] += 1
        elif isinstance(event, Waiting):
            waited.add((event.replica, event.step + 1))
        else:
            key, state = (event.replica, event.step), (event.step, event.lineage)
            fails = failed.pop(key, 0)
            count = fails + 2 if key in waited else max(event.exchanges, fails + 1)
            waited.discard(key)
            made[state] = max(made.get(state, 1), count)
    for (_, step), fails in failed.items():
        broken[step] = max(broken.get(step, 0), fails)
    committed = [state for state in made if state[1] not in record.void]
    reached = {step for step, _ in made}
    # A group that died in the exchange saw it break no more often than the others, whose commits count it.
    attempted = sum(made.values()) + sum(fails for step, fails in broken.items() if step not in reached)
    return attempted, len(committed)


@view
def count_wire_bytes(record: RunRecord) -> tuple[int | None, float | None]:
    """Return the bytes of gradients that all ranks sent to other groups, and those of a group for each of its steps.

    The steps within a round count by themselves. What a group sent behind its last commit is not known.
    """
    known = [event for event in record.of(StepCommitted) if event.wire_bytes is not None]
    usual = [event for event in record.of(UsualSteps) if event.wire_bytes is not None]
    sent = sum(event.wire_bytes or 0 for event in known) + sum(event.wire_bytes or 0 for event in usual)
    steps = sum(event.inner_steps or 0 for event in known if event.rank == 0)
    steps += sum(event.num_steps for event in usual if event.rank == 0)
    return (sent if known or usual else None), (sent / steps if steps else None)


def _steps_begun(record: RunRecord) -> list[tuple[int, str]]:
    """Return the steps that groups began to compute, counted per group: forward passes, and why for nothing.

    A step that a group computed does not count when it died or healed before it had committed it (unless the others
    committed it with its gradient), when its gradient was left out, or when the state that it made was thrown away.
    """
    begun: list[tuple[int, str]] = []
    for event in record.commits:
        void = event.lineage in record.void
        why = "the state was thrown away" if void else "" if event.contributed else "the gradient was left out"
        if event.forward_passes > 0:
            begun.append((event.forward_passes, why))
    unfinished = timeline(record).unfinished
    return begun + [(one.forward_passes, "" if one.kept else f"unfinished: {one.reason}") for one in unfinished]
