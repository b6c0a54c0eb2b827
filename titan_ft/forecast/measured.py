# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure the costs of failures in the records of a user's own runs. A record is the events of a run.

`titan-ft plan --from` and `--like` call `measure`. `choice` calls `resample`, to show how far a
forecast depends on the few observations of a record.

`measure` works in this order:

1. It cuts each record into steps: the times from one commit to the next (`_split_into_steps`). In a
   semi-synchronous run these are rounds.
2. It takes the mean of the *calm* steps of each record. In a calm step no group died, returned or
   was absent, and no checkpoint was saved.
3. Each other step is compared with the calm steps of the same record, because two runs may have
   different step times. The difference is the *delay* of the step.
4. The delays of the steps with a death are the stalls. Those of the steps with a return, with absent
   groups, and with a save give the other costs.

A stall alone is not the whole cost of a failure. Where groups share a machine, it is about half: the
other groups are slower as well while a group starts beside them. So absent and returning groups have
costs of their own.

A group *dies* in this module when it drops out of the exchanges, even if its processes live on.
An observation is *cut off* (censored) if it still went on when the record ended. It only shows that
the cost is at least so long. `lengths.Samples` takes it into account.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from titan_ft.forecast.lengths import Fit, Samples, fit_weibull
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.timing.incidents import RecordedFailure, find_failures
from titan_ft.run.events import CheckpointSaved, StepCommitted


class ObservationRow(NamedTuple):
    """An input that a forecast takes from records, in words for people."""

    input: str
    value: str
    rests_on: str
    """The number of observations."""


@dataclass
class Measured:
    """The costs of failures in some runs, in seconds. A cost that no failure showed is None."""

    step: float
    """Mean of the calm steps. The median would hide slow steps. The record has no reason for them,
    but they do cost time."""
    usual_step: float
    """How much of `step` counts as effective. `titan-ft report` counts each step at most as the
    median calm step. This is the mean of these counts."""
    num_steps: int
    """Number of calm steps."""
    groups: int
    """Groups of the job when all are present."""
    drag: float
    """By how much each absent group makes a step longer."""
    num_drag_steps: int
    """Number of steps from which `drag` is computed. Groups were absent in them, and nothing else
    happened."""
    stall: Samples | None
    """Delays of the steps in which a group died."""
    away: Samples | None
    """How long groups were away until they could join a step."""
    rejoin: Samples | None
    """Delays of the steps in which a group returned."""
    stretch_means: tuple[float, ...]
    """Mean calm step in each of about ten stretches of the record. The means differ, because a
    machine is faster at one time and slower at another."""
    save: float | None
    """Mean delay of the steps with a save; None if no checkpoint was saved."""
    save_interval: float | None
    """Time of computing between two saves; None if no checkpoint was saved."""
    mtbf: float | None
    """Mean time between failures of the job; None without a failure."""
    gap_fit: Fit | None
    """The Weibull distribution of the gaps between failures; None with fewer than three gaps."""
    observed_seconds: float
    """Time from the first commit of each record to its end, summed over the records."""
    failures_by_cause: dict[str, int] = field(default_factory=dict)
    stalls_by_cause: dict[str, Samples] = field(default_factory=dict)
    """The stalls by the cause of death. If several groups died in a step, the first death counts."""

    @property
    def pressure(self) -> float:
        """Return the share of all time that failures would take if their costs never overlapped."""
        if self.mtbf is None or self.stall is None or self.away is None:
            return 0.0
        delay = self.stall.mean + (0.0 if self.rejoin is None else self.rejoin.mean)
        # While one of n groups is away, the job loses 1/n of its work.
        return (delay + self.away.mean / self.groups) / self.mtbf

    def observations(self) -> list[ObservationRow]:
        """Return the inputs that a forecast takes from the records."""
        rows = [
            _describe("step without trouble", self.step, self.num_steps),
            _describe("longer for each group away", self.drag, self.num_drag_steps),
        ]
        lengths = {
            "stall: a step with a death is late by": self.stall,
            "away until it could join": self.away,
            "late when one returns": self.rejoin,
        }
        if len(self.stalls_by_cause) > 1:
            for cause, stalls in self.stalls_by_cause.items():
                # A cause may be an exception with its message: leave out the message.
                short_cause = cause.partition(":")[0]
                lengths[f"stall after {short_cause}"] = stalls
        for name, samples in lengths.items():
            if samples is not None:
                rows.append(_describe(name, samples.mean, samples.number, samples.censored))
        if self.mtbf is not None:
            num_failures = sum(self.failures_by_cause.values())
            rows.append(_describe("time between failures", self.mtbf, num_failures))
        fit = self.gap_fit
        if fit is not None:
            shape = f"shape {fit.shape:.2f} ({fit.low:.2f} to {fit.high:.2f})"
            rows.append(ObservationRow("their spacing", shape, f"{fit.number} observations"))
        return rows


def _describe(name: str, seconds: float, number: int, num_cut_off: int = 0) -> ObservationRow:
    """Return the row of an input.

    Args:
        number: observations with an end.
        num_cut_off: observations without an end.
    """
    cut_off = f", {num_cut_off} cut off" if num_cut_off else ""
    return ObservationRow(name, f"{seconds:.3g} s", f"{number} observations{cut_off}")


@dataclass
class _Step:
    """One step of a record: the time from one commit to the next.

    Attributes:
        num_absent: groups that were absent for the whole step.
        causes_of_death: of each group that died in the step, in order of time.
        num_returned: groups that contributed to this step and not to the step before.
        has_save: a checkpoint was saved in the step.
    """

    seconds: float
    num_absent: int
    causes_of_death: list[str]
    num_returned: int
    has_save: bool

    @property
    def has_all_groups(self) -> bool:
        """True if no group was absent, died or returned."""
        return not (self.num_absent or self.causes_of_death or self.num_returned)

    @property
    def is_calm(self) -> bool:
        return self.has_all_groups and not self.has_save

    @property
    def has_only_absences(self) -> bool:
        """True if groups were absent and nothing else happened."""
        something_else = self.causes_of_death or self.num_returned or self.has_save
        return self.num_absent > 0 and not something_else


class _ComparedStep(NamedTuple):
    step: _Step
    calm_mean: float
    """Mean seconds of the calm steps in the same record."""


class _DragPoint(NamedTuple):
    """One step with absent groups, from which `drag` is computed."""

    num_absent: int
    delay: float


@dataclass
class _Observations:
    """The observations in all records. Times are in seconds; `_cut_off` marks censored ones."""

    calm_steps: list[float] = field(default_factory=list)
    """Lengths of the calm steps."""
    drag_points: list[_DragPoint] = field(default_factory=list)
    steps: list[_ComparedStep] = field(default_factory=list)
    """All steps, the calm ones included."""
    stalls_cut_off: list[float] = field(default_factory=list)
    """Stalls that went on at the end of a record."""
    absences: list[float] = field(default_factory=list)
    """Times from a group's failure until the group could join a step."""
    absences_cut_off: list[float] = field(default_factory=list)
    """Absences that went on at the end of a record, or at the group's next failure."""
    failure_gaps: list[float] = field(default_factory=list)
    """Times from one failure to the next. The first of each record begins at its first commit."""
    failure_gaps_cut_off: list[float] = field(default_factory=list)
    """Times from the last failure to the end of a record."""
    save_delays: list[float] = field(default_factory=list)
    """Delays of the steps in which nothing happened but a save."""
    steps_between_saves: list[float] = field(default_factory=list)
    """Numbers of steps (rounds) from one save to the next."""
    failures_by_cause: Counter[str] = field(default_factory=Counter)
    observed_seconds: float = 0.0


def measure(records: Sequence[RunRecord], until: float | None = None) -> Measured | None:
    """Return the costs that the records show; None if no record has two commits in a row.

    Args:
        until: Unix seconds. What happened later does not count. So a test can measure the first
            half of a run and predict the second half. Only with one record.
    """
    found = _Observations()
    for record in records:
        _add_record(record, found, until)
    if not found.steps:
        return None
    calm_steps = found.calm_steps
    if not calm_steps:
        # All steps had trouble. The shortest of them is the best guess at a calm step.
        calm_steps = [min(compared.step.seconds for compared in found.steps)]
    drag = _fit_slope(found.drag_points)
    stalls: list[float] = []
    stalls_by_cause: dict[str, list[float]] = defaultdict(list)
    rejoin_delays: list[float] = []
    for step, calm_mean in found.steps:
        # Absent groups delay the step as well: do not count that delay as a stall.
        delay = step.seconds - calm_mean - drag * step.num_absent
        if step.causes_of_death:
            # If a group returned in the same step, its delay cannot be told from the stall.
            stalls.append(delay)
            stalls_by_cause[step.causes_of_death[0]].append(delay)
        elif step.num_returned:
            rejoin_delays.append(delay)
    save = None
    save_interval = None
    if found.save_delays:
        save = max(0.0, fmean(found.save_delays))
        save_interval = median(found.steps_between_saves) * fmean(calm_steps)
    num_failures = found.failures_by_cause.total()
    median_step = median(calm_steps)
    return Measured(
        step=fmean(calm_steps),
        usual_step=fmean(min(seconds, median_step) for seconds in calm_steps),
        num_steps=len(found.calm_steps),
        groups=max(_num_groups(record) for record in records),
        drag=drag,
        num_drag_steps=len(found.drag_points),
        stall=_make_samples(stalls, found.stalls_cut_off),
        away=_make_samples(found.absences, found.absences_cut_off),
        rejoin=_make_samples(rejoin_delays),
        stretch_means=_average_stretches(calm_steps),
        save=save,
        save_interval=save_interval,
        mtbf=found.observed_seconds / num_failures if num_failures else None,
        gap_fit=fit_weibull(found.failure_gaps, found.failure_gaps_cut_off),
        observed_seconds=found.observed_seconds,
        failures_by_cause=dict(found.failures_by_cause),
        stalls_by_cause={cause: Samples(delays) for cause, delays in stalls_by_cause.items()},
    )


def resample(measured: Measured, seed: int) -> Measured:
    """Return the costs that another record of the same job might have shown.

    The costs are drawn with replacement from the observed ones. The step becomes the mean of one
    stretch of the record, because another run may fall into a slow or a fast time of the machine.
    """
    rng = random.Random(f"{seed}/record")

    def draw_again(samples: Samples | None) -> Samples | None:
        return None if samples is None else samples.resample(rng)

    return replace(
        measured,
        step=rng.choice(measured.stretch_means),
        stall=draw_again(measured.stall),
        away=draw_again(measured.away),
        rejoin=draw_again(measured.rejoin),
    )


def _num_groups(record: RunRecord) -> int:
    """Return how many groups the job has when all are present.

    A record without a group size has at least the groups that wrote events.
    """
    return record.group_size or len(record.groups)


def _make_samples(complete: Sequence[float], cut_off: Sequence[float] = ()) -> Samples | None:
    """Return the distribution of a cost; None if no observation of the cost has an end."""
    return Samples(complete, cut_off) if complete else None


def _average_stretches(steps: Sequence[float]) -> tuple[float, ...]:
    """Cut the steps into about ten stretches of equal length; return the mean of each stretch.

    Steps after the last whole stretch are left out.
    """
    size = max(1, len(steps) // 10)
    begins = range(0, len(steps) - size + 1, size)
    return tuple(fmean(steps[begin : begin + size]) for begin in begins)


def _fit_slope(points: Sequence[_DragPoint]) -> float:
    """Return the delay for each absent group: the least-squares line through zero, at least 0."""
    sum_of_squares = sum(point.num_absent * point.num_absent for point in points)
    if sum_of_squares == 0:
        return 0.0
    sum_of_products = sum(point.num_absent * point.delay for point in points)
    return max(0.0, sum_of_products / sum_of_squares)


def _add_record(record: RunRecord, found: _Observations, until: float | None) -> None:
    """Add the observations of one record.

    Args:
        until: see `measure`.
    """
    commits = [event for _, event in sorted(record.first_commit_of_step.items())]
    if until is not None:
        commits = [event for event in commits if event.time <= until]
    if len(commits) < 2:
        return
    first_commit, last_commit = commits[0].time, commits[-1].time
    end = until or record.events[-1].time
    # Leave out exchanges that failed and were repeated with all groups: no group was away.
    failures = [
        failure
        for failure in find_failures(record)
        if failure.away and first_commit <= failure.time <= end
    ]
    ends_in_stall = any(failure.time > last_commit for failure in failures)
    if not ends_in_stall:
        # After the last step a run only saves and exits. This time belongs to no step.
        end = last_commit
    save_times = sorted(event.time for event in record.of(CheckpointSaved))
    steps = _split_into_steps(commits, failures, _num_groups(record), save_times)
    calm_steps = [step.seconds for step in steps if step.is_calm]
    if calm_steps:
        calm_mean = fmean(calm_steps)
    else:
        # All steps had trouble. The shortest of them is the best guess at a calm step.
        calm_mean = min((step.seconds for step in steps), default=0.0)
    found.calm_steps += calm_steps
    for step in steps:
        delay = step.seconds - calm_mean
        found.steps.append(_ComparedStep(step, calm_mean))
        if step.has_only_absences:
            found.drag_points.append(_DragPoint(step.num_absent, delay))
        if step.has_save and step.has_all_groups:
            found.save_delays.append(delay)
    if ends_in_stall:
        found.stalls_cut_off.append(max(0.0, end - last_commit - calm_mean))
    commit_times = [event.time for event in commits]
    for failure in failures:
        found.failures_by_cause[failure.cause] += 1
        _add_absence(failure, failures, commit_times, end, found)
    # Failures before the first commit are left out, so the first gap begins there.
    gap_ends = [first_commit, *(failure.time for failure in failures)]
    found.failure_gaps += [after - before for before, after in pairwise(gap_ends)]
    found.failure_gaps_cut_off.append(end - gap_ends[-1])
    _add_saves(record, end, found)
    found.observed_seconds += end - first_commit


def _split_into_steps(
    commits: Sequence[StepCommitted],
    failures: Sequence[RecordedFailure],
    num_groups: int,
    save_times: Sequence[float],
) -> list[_Step]:
    """Return the steps of a record. A step whose commit before is not in the record is left out.

    Args:
        num_groups: groups of the job when all are present.
        save_times: Unix seconds at which checkpoints were saved, in order.
    """
    steps = []
    for before, after in pairwise(commits):
        if after.step != before.step + 1:
            continue
        causes_of_death = [
            failure.cause for failure in failures if before.time < failure.time <= after.time
        ]
        num_returned = len(set(after.participants) - set(before.participants))
        # A group that died in this step was present at its begin, so it is not absent. If it died
        # after it had sent its gradients, it is also among the participants, and is subtracted
        # twice.
        num_absent = max(0, num_groups - len(after.participants) - len(causes_of_death))
        saves_before = bisect_right(save_times, before.time)
        saves_after = bisect_right(save_times, after.time)
        steps.append(
            _Step(
                seconds=after.time - before.time,
                num_absent=num_absent,
                causes_of_death=causes_of_death,
                num_returned=num_returned,
                has_save=saves_after > saves_before,
            )
        )
    return steps


def _add_absence(
    failure: RecordedFailure,
    failures: Sequence[RecordedFailure],
    commit_times: Sequence[float],
    end: float,
    found: _Observations,
) -> None:
    """Add how long the group of a failure was away until it could join a step.

    The record has only the commit of the step that the group joined. The group became ready at some
    time during the step before, and waited for its end. On average that is half a step.

    Args:
        end: end of the record.
    """
    cut_off_at = end
    for other in failures:
        if other.replica == failure.replica and other.time > failure.time:
            cut_off_at = min(cut_off_at, other.time)
    if failure.back is None or failure.back > cut_off_at:
        found.absences_cut_off.append(max(0.0, cut_off_at - failure.time))
        return
    # Index of the first commit to which the group contributed again.
    joined = bisect_right(commit_times, failure.back) - 1
    if joined < 2:
        # The step before has no begin in the record. Count the wait for its end as absence.
        found.absences.append(max(0.0, failure.back - failure.time))
        return
    begin_of_joined = commit_times[joined - 1]
    begin_of_step_before = commit_times[joined - 2]
    ready_at = begin_of_joined - (begin_of_joined - begin_of_step_before) / 2
    found.absences.append(max(0.0, ready_at - failure.time))


def _add_saves(record: RunRecord, end: float, found: _Observations) -> None:
    """Add the numbers of steps between saves. The first number counts from the begin of the run."""
    saves = [event for event in record.of(CheckpointSaved) if event.time <= end]
    saved_steps = sorted({event.step for event in saves})
    for before, after in pairwise([0, *saved_steps]):
        # Checkpoints are numbered by local steps, of which a round has several.
        found.steps_between_saves.append((after - before) / record.unit.steps)
