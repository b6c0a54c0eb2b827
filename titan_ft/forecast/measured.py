# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure the costs of failures in runs of one's own, each with its number of observations.

The costs: a calm step, a step with a death, steps while groups are away, a step in which a group
returns, and the time that a group is away. If groups share a machine, stalls are only about half of
the cost of failures: the others are also slower while a group starts beside them.

`titan-ft plan --from` and `--like` measure here. `choice` resamples the measured costs, to show how
certain a forecast is.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median

from titan_ft.forecast.lengths import Fit, Samples, fit_weibull
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.timing.incidents import RecordedFailure, find_failures
from titan_ft.run.events import CheckpointSaved, StepCommitted


@dataclass
class Measured:
    """The costs of failures in runs; all in seconds. A cost that no failure showed is None."""

    step: float
    """Mean, not median, of the steps without trouble (*calm* steps): slow steps that no failure
    explains must count, too."""
    usual_step: float
    """Mean of what the report counts of calm steps: of each no more than their median."""
    num_steps: int
    groups: int
    drag: float
    """By how much each group that is away makes a step longer."""
    num_drag_steps: int
    """Steps that `drag` rests on: groups were away, and nothing else happened."""
    stall: Samples | None
    """Lateness of the steps in which a group died."""
    away: Samples | None
    """How long a group is away until it could join a step."""
    rejoin: Samples | None
    """Lateness of the steps in which a group returned."""
    pace: tuple[float, ...]
    """The calm steps, in order, are cut into about ten stretches; these are the means of each. A
    machine is faster at one time and slower at another."""
    save: float | None
    """Mean lateness of the steps with a save; None if no checkpoint was saved."""
    save_interval: float | None
    """Time of computing between two saves; None likewise."""
    mtbf: float | None
    fit: Fit | None
    """The Weibull distribution fitted to the gaps between failures; None below three gaps."""
    seconds: float
    """Observed time: of each record from its first commit to its end, summed."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Failures by their cause."""
    stalls: dict[str, Samples] = field(default_factory=dict)
    """The stalls by the cause of the first death in the step."""

    @property
    def pressure(self) -> float:
        """Return the share of the time that failures take if none of their costs overlap."""
        if self.mtbf is None or self.stall is None or self.away is None:
            return 0.0
        late = self.stall.mean + (0.0 if self.rejoin is None else self.rejoin.mean)
        # One of the groups is away, which costs the job that part of the time.
        return (late + self.away.mean / self.groups) / self.mtbf

    def observations(self) -> list[tuple[str, str, str]]:
        """Return the inputs that a forecast takes from the records: name, value, observations."""
        found = [
            _observation("step without trouble", self.step, self.num_steps),
            _observation("longer for each group away", self.drag, self.num_drag_steps),
        ]
        lengths = {
            "stall: a step with a death is late by": self.stall,
            "away until it could join": self.away,
            "late when one returns": self.rejoin,
        }
        if len(self.stalls) > 1:
            for cause, stalls in self.stalls.items():
                lengths[f"stall after {cause.partition(':')[0]}"] = stalls
        for name, samples in lengths.items():
            if samples is not None:
                found.append(_observation(name, samples.mean, samples.number, samples.censored))
        if self.mtbf is not None:
            number = sum(self.kinds.values())
            found.append(_observation("time between failures", self.mtbf, number))
        if self.fit is not None:
            shape = f"shape {self.fit.shape:.2f} ({self.fit.low:.2f} to {self.fit.high:.2f})"
            found.append(("their spacing", shape, f"{self.fit.number} observations"))
        return found


def _observation(name: str, seconds: float, number: int, censored: int = 0) -> tuple[str, str, str]:
    """Return a row of `Measured.observations`.

    Args:
        censored: observations that the end of the record, or the group's next failure, cut off.
    """
    cut = f", {censored} cut off" if censored else ""
    return name, f"{seconds:.3g} s", f"{number} observations{cut}"


@dataclass
class _Step:
    """One step of a record.

    Attributes:
        absent: groups that were away for all of it.
        causes: of the deaths in it, one for each group that died.
        returns: groups that returned in it.
        has_save: a checkpoint was saved in it.
    """

    seconds: float
    absent: int
    causes: list[str]
    returns: int
    has_save: bool

    @property
    def is_calm(self) -> bool:
        return not (self.absent or self.causes or self.returns or self.has_save)

    @property
    def has_only_absences(self) -> bool:
        """True if groups were away and nothing else happened."""
        return bool(self.absent) and not (self.causes or self.returns or self.has_save)


@dataclass
class _Observations:
    """The observations in the records of several runs."""

    calm: list[float] = field(default_factory=list)
    drag_points: list[tuple[int, float]] = field(default_factory=list)
    """For each step with groups away and nothing else: how many, and by how much it was longer than
    a calm one."""
    steps: list[tuple[_Step, float]] = field(default_factory=list)
    """All steps, each with the mean seconds of its record's calm steps."""
    stalls_cut: list[float] = field(default_factory=list)
    """Stalls that went on at the end of the record (censored)."""
    away: list[float] = field(default_factory=list)
    """Absences of groups, until they could join a step."""
    away_cut: list[float] = field(default_factory=list)
    """Absences that went on at the end of the record, or at the group's next failure (censored)."""
    gaps: list[float] = field(default_factory=list)
    last_gaps: list[float] = field(default_factory=list)
    """From the last failure to the end of the record (censored)."""
    saves: list[float] = field(default_factory=list)
    """Lateness of the steps in which nothing happened but a save."""
    save_steps: list[float] = field(default_factory=list)
    """Numbers of steps (rounds) between two saves."""
    kinds: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def measure(records: Sequence[RunRecord], until: float | None = None) -> Measured | None:
    """Return the costs that the records show; None if no record has two commits in a row.

    Each step is compared with the calm steps of its own record, because steps of two runs may take
    different times.

    Args:
        until: Unix seconds after which nothing of the record counts, so that its rest can be
            predicted. Only with one record.
    """
    found = _Observations()
    for record in records:
        _add_record(record, found, until)
    if not found.steps:
        return None
    calm = found.calm
    if not calm:
        # Every step had trouble: the shortest one had the least.
        calm = [min(step.seconds for step, _ in found.steps)]
    drag = _fit_slope(found.drag_points)
    stalls: dict[str, list[float]] = defaultdict(list)
    all_stalls: list[float] = []
    rejoins: list[float] = []
    for step, usual in found.steps:
        late = step.seconds - usual - drag * step.absent
        if step.causes:
            # A group that returned in the same step adds no lateness of its own.
            stalls[step.causes[0]].append(late)
            all_stalls.append(late)
        elif step.returns:
            rejoins.append(late)
    num_failures = found.kinds.total()
    stretch = max(1, len(calm) // 10)
    starts = range(0, len(calm) - stretch + 1, stretch)  # whole stretches only
    median_step = median(calm)
    save_interval = None
    if found.saves:
        save_interval = median(found.save_steps) * fmean(calm)
    return Measured(
        step=fmean(calm),
        usual_step=fmean(min(seconds, median_step) for seconds in calm),
        num_steps=len(found.calm),
        groups=max(_num_groups(record) for record in records),
        drag=drag,
        num_drag_steps=len(found.drag_points),
        stall=_samples(all_stalls, found.stalls_cut),
        away=_samples(found.away, found.away_cut),
        rejoin=_samples(rejoins),
        pace=tuple(fmean(calm[start : start + stretch]) for start in starts),
        save=max(0.0, fmean(found.saves)) if found.saves else None,
        save_interval=save_interval,
        mtbf=found.seconds / num_failures if num_failures else None,
        fit=fit_weibull(found.gaps, found.last_gaps),
        seconds=found.seconds,
        kinds=dict(found.kinds),
        stalls={cause: Samples(of_cause) for cause, of_cause in stalls.items()},
    )


def resample(measured: Measured, seed: int) -> Measured:
    """Return costs that another record might have shown, drawn from the observed ones.

    `step` becomes the mean of one stretch, because machines have slow and fast times.
    """
    rng = random.Random(f"{seed}/record")

    def again(samples: Samples | None) -> Samples | None:
        return None if samples is None else samples.resample(rng)

    return replace(
        measured,
        step=rng.choice(measured.pace),
        stall=again(measured.stall),
        away=again(measured.away),
        rejoin=again(measured.rejoin),
    )


def _num_groups(record: RunRecord) -> int:
    """Return how many groups the job has when all are present; if unknown, those with events."""
    return record.group_size or len(record.groups)


def _samples(seen: Sequence[float], cut: Sequence[float] = ()) -> Samples | None:
    """Return the distribution of a cost; None if none was seen to its end."""
    return Samples(seen, cut) if seen else None


def _fit_slope(points: Sequence[tuple[int, float]]) -> float:
    """Return the slope of the line through zero that fits points best, not below 0."""
    weight = sum(x * x for x, _ in points)
    if weight == 0:
        return 0.0
    return max(0.0, sum(x * y for x, y in points) / weight)


def _add_record(record: RunRecord, found: _Observations, until: float | None) -> None:
    """Add the observations of one record."""
    commits = [event for _, event in sorted(record.first_commit_of_step.items())]
    if until is not None:
        commits = [event for event in commits if event.time <= until]
    if len(commits) < 2:
        return
    first, last = commits[0].time, commits[-1].time
    end = until or record.events[-1].time
    # Left out are broken exchanges that were repeated with all groups: `away` is False.
    failures = [each for each in find_failures(record) if each.away and first <= each.time <= end]
    ends_in_stall = any(each.time > last for each in failures)
    if not ends_in_stall:
        # A run goes on for a while after its last step, to save and to leave.
        end = last
    saved = sorted(event.time for event in record.of(CheckpointSaved))
    steps = _steps_of(commits, failures, _num_groups(record), saved)
    calm = [step.seconds for step in steps if step.is_calm]
    if calm:
        usual = fmean(calm)
    else:
        usual = min((step.seconds for step in steps), default=0.0)
    found.calm += calm
    found.steps += [(step, usual) for step in steps]
    for step in steps:
        if step.has_only_absences:
            found.drag_points.append((step.absent, step.seconds - usual))
        if step.has_save and not (step.absent or step.causes or step.returns):
            found.saves.append(step.seconds - usual)
    if ends_in_stall:
        found.stalls_cut.append(max(0.0, end - last - usual))
    commit_times = [event.time for event in commits]
    for failure in failures:
        found.kinds[failure.cause] += 1
        _add_absence(failure, failures, commit_times, end, found)
    # The wait for the first failure counts as a gap.
    times = [first, *(each.time for each in failures)]
    found.gaps += [after - before for before, after in pairwise(times)]
    _add_saves(record, end, found)
    found.last_gaps.append(end - times[-1])
    found.seconds += end - first


def _steps_of(
    commits: Sequence[StepCommitted],
    failures: Sequence[RecordedFailure],
    size: int,
    saved: Sequence[float],
) -> list[_Step]:
    """Return the steps between commits that follow each other.

    Args:
        size: number of groups of the job.
        saved: Unix seconds at which checkpoints were saved, in order.
    """
    steps = []
    for before, after in pairwise(commits):
        if after.step != before.step + 1:
            continue
        causes = [each.cause for each in failures if before.time < each.time <= after.time]
        returns = len(set(after.participants) - set(before.participants))
        # A group that died in this step was there at its begin. One that died after its gradient was
        # sent is among the participants: not below 0.
        absent = max(0, size - len(after.participants) - len(causes))
        has_save = bisect_right(saved, after.time) > bisect_right(saved, before.time)
        steps.append(_Step(after.time - before.time, absent, causes, returns, has_save))
    return steps


def _add_absence(
    failure: RecordedFailure,
    failures: Sequence[RecordedFailure],
    commit_times: Sequence[float],
    record_end: float,
    found: _Observations,
) -> None:
    """Add how long a group was away until it could join a step.

    A group becomes ready at some time during a step, and joins the next one. So it is taken to be
    ready half a step before the step that it joins.
    """
    cut_at = record_end
    for other in failures:
        if other.replica == failure.replica and other.time > failure.time:
            cut_at = min(cut_at, other.time)
    if failure.back is None or failure.back > cut_at:
        found.away_cut.append(max(0.0, cut_at - failure.time))
        return
    joined = bisect_right(commit_times, failure.back) - 1  # the commit that has its part again
    if joined < 2:  # It died and returned in the first steps, and no step before is known.
        found.away.append(max(0.0, failure.back - failure.time))
        return
    begin, begin_before = commit_times[joined - 1], commit_times[joined - 2]
    ready = begin - (begin - begin_before) / 2
    found.away.append(max(0.0, ready - failure.time))


def _add_saves(record: RunRecord, record_end: float, found: _Observations) -> None:
    """Add the steps between saves. The first gap begins with the run."""
    saves = [event for event in record.of(CheckpointSaved) if event.time <= record_end]
    steps = sorted({event.step for event in saves})
    # A checkpoint is numbered by local steps, also where a round has several.
    gaps = [after - before for before, after in pairwise([0, *steps])]
    found.save_steps += [gap / record.unit.steps for gap in gaps]
