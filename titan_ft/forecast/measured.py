# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure what failures cost in runs of one's own, each cost with the number of observations it rests on.

The costs: a calm step, a step with a death, steps while groups are away, a step in which one returns, and how long a
group is away.

A stall alone is about half of what a failure costs where groups share a machine: the others go on slower while a group
starts beside them.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean

from titan_ft.forecast.lengths import Fit, Samples, fit_weibull
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.timing.incidents import Failure, find_failures


@dataclass(frozen=True)
class Observation:
    """One input and what it rests on."""

    name: str
    value: str
    number: int
    censored: int = 0
    """Observations that were cut off by the end of the record, or by the group's next failure."""


@dataclass
class Measured:
    """The costs of failures in runs; all in seconds. A cost that no failure showed is None."""

    step: float
    """Mean of the steps without trouble: a median would leave out what is late without a failure."""
    num_steps: int
    groups: int
    drag: float
    """By how much each group that is away makes a step longer."""
    num_away: int
    stall: Samples | None
    away: Samples | None
    rejoin: Samples | None
    pace: tuple[float, ...]
    """Means of the steps without trouble, in each tenth of the record: a machine is now faster and now slower."""
    mtbf: float | None
    fit: Fit | None
    """Of the gaps between failures."""
    seconds: float
    kinds: dict[str, int] = field(default_factory=dict)
    """Failures by what ended the group."""

    @property
    def pressure(self) -> float:
        """Return the share of the time that failures take if none of their costs overlap."""
        if self.mtbf is None or self.stall is None or self.away is None:
            return 0.0
        late = self.stall.mean + (0.0 if self.rejoin is None else self.rejoin.mean)
        return (late + self.away.mean / self.groups) / self.mtbf

    def observations(self) -> list[Observation]:
        """Return the inputs for a table."""
        found = [
            Observation("step without trouble", f"{self.step:.3g} s", self.num_steps),
            Observation("longer for each group away", f"{self.drag:.3g} s", self.num_away),
        ]
        for name, samples in (
            ("stall: a step with a death is late by", self.stall),
            ("away until it could join", self.away),
            ("late when one returns", self.rejoin),
        ):
            if samples is not None:
                found.append(Observation(name, f"{samples.mean:.3g} s", samples.number, samples.censored))
        if self.mtbf is not None:
            found.append(Observation("time between failures", f"{self.mtbf:.3g} s", sum(self.kinds.values())))
        if self.fit is not None:
            shape = f"shape {self.fit.shape:.2f} ({self.fit.low:.2f} to {self.fit.high:.2f})"
            found.append(Observation("their spacing", shape, self.fit.number))
        return found


@dataclass
class _Step:
    begin: float
    seconds: float
    absent: int
    deaths: int
    returns: int


@dataclass
class _Found:
    """What the records of several runs show together."""

    steps: list[_Step] = field(default_factory=list)
    away: list[float] = field(default_factory=list)
    cut: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    last_gaps: list[float] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: float = 0.0


def measure(records: Sequence[RunRecord], until: float | None = None) -> Measured | None:
    """Return what the records show; None if they hold no two steps.

    Args:
        until: Unix seconds after which nothing counts, of one record: to predict its rest.
    """
    found = _Found()
    for record in records:
        _look(record, found, until)
    calm = [step.seconds for step in found.steps if not (step.absent or step.deaths or step.returns)]
    if not found.steps:
        return None
    usual = fmean(calm) if calm else min(step.seconds for step in found.steps)
    quiet = [step for step in found.steps if step.absent and not (step.deaths or step.returns)]
    drag = _slope([(step.absent, step.seconds - usual) for step in quiet])
    stalls = [_late(step, usual, drag) for step in found.steps if step.deaths]
    rejoins = [_late(step, usual, drag) for step in found.steps if step.returns and not step.deaths]
    number = sum(found.kinds.values())
    tenth = max(1, len(calm) // 10)
    pace = tuple(fmean(calm[place : place + tenth]) for place in range(0, len(calm) - tenth + 1, tenth))
    return Measured(
        step=usual,
        num_steps=len(calm),
        groups=max(record.group_size or len(record.groups) for record in records),
        drag=drag,
        num_away=len(quiet),
        stall=Samples(stalls) if stalls else None,
        away=Samples(found.away, found.cut) if found.away else None,
        rejoin=Samples(rejoins) if rejoins else None,
        pace=pace or (usual,),
        mtbf=found.seconds / number if number else None,
        fit=fit_weibull(found.gaps, found.last_gaps),
        seconds=found.seconds,
        kinds=dict(found.kinds),
    )


def resample(measured: Measured, seed: int) -> Measured:
    """Return what another record of as many observations could have shown: so a forecast shows how little is known.

    The pace of a run is that of one tenth of the record.
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


def _late(step: _Step, usual: float, drag: float) -> float:
    return step.seconds - usual - drag * step.absent


def _slope(points: Iterable[tuple[int, float]]) -> float:
    """Return the slope of the line through zero that fits points best, not below 0."""
    points = list(points)
    weight = sum(x * x for x, _ in points)
    return max(0.0, sum(x * y for x, y in points) / weight) if weight else 0.0


def _look(record: RunRecord, found: _Found, until: float | None) -> None:
    commits = [event for _, event in sorted(record.first_commits.items())]
    commits = [event for event in commits if until is None or event.time <= until]
    if len(commits) < 2:
        return
    first, last = commits[0].time, commits[-1].time
    size = record.group_size or len(record.groups)
    failures = [each for each in find_failures(record) if each.away and first <= each.time <= last]
    for before, after in pairwise(commits):
        if after.step != before.step + 1:
            continue
        deaths = sum(before.time < each.time <= after.time for each in failures)
        returns = len(set(after.participants) - set(before.participants))
        absent = max(0, size - len(after.participants) - deaths)
        found.steps.append(_Step(before.time, after.time - before.time, absent, deaths, returns))
    ends = [event.time for event in commits]
    for failure in failures:
        found.kinds[failure.cause] = found.kinds.get(failure.cause, 0) + 1
        _look_at_return(failure, failures, ends, found)
    times = [first, *(each.time for each in failures)]
    found.gaps += [after - before for before, after in pairwise(times)]
    found.last_gaps.append(last - times[-1])
    found.seconds += last - first


def _look_at_return(failure: Failure, failures: Sequence[Failure], ends: Sequence[float], found: _Found) -> None:
    """Note how long a group was away until it could join: half a step before the begin of the step that it joined.

    Args:
        ends: when the steps were committed; each is the begin of the next.
    """
    back = None if failure.rejoin_seconds is None else failure.time + failure.rejoin_seconds
    again = (other.time for other in failures if other.replica == failure.replica and other.time > failure.time)
    end = min([ends[-1], *again])
    joined = 0 if back is None else bisect_right(ends, back) - 1
    if back is None or back > end or joined < 2:
        found.cut.append(max(0.0, end - failure.time))
        return
    half = (ends[joined - 1] - ends[joined - 2]) / 2
    found.away.append(max(0.0, ends[joined - 1] - half - failure.time))
