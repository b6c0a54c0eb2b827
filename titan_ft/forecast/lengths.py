# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Lengths of time, constant or random; one uniform number, the luck of a failure, draws one.

Scenarios and records give lengths; the simulation draws from them, and closed forms take means.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from statistics import NormalDist
from typing import Protocol

_NORMAL = NormalDist()
_Z99 = _NORMAL.inv_cdf(0.99)


class Length(Protocol):
    """Seconds, by their distribution."""

    @property
    def mean(self) -> float:
        """Return the mean in seconds."""

    def quantile(self, luck: float) -> float:
        """Return the quantile at `luck`, from 0 to 1 (exclusive)."""


@dataclass(frozen=True)
class Constant:
    mean: float

    def quantile(self, luck: float) -> float:
        return self.mean


@dataclass(frozen=True)
class Uniform:
    low: float
    high: float

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def quantile(self, luck: float) -> float:
        return self.low + luck * (self.high - self.low)


@dataclass(frozen=True)
class Weibull:
    """Memoryless with shape 1; bursts and early deaths below, wear above."""

    mean: float
    shape: float = 1.0

    @cached_property
    def _scale(self) -> float:
        return self.mean / math.gamma(1 + 1 / self.shape)

    def quantile(self, luck: float) -> float:
        return self._scale * float((-math.log1p(-luck)) ** (1 / self.shape))


@dataclass(frozen=True)
class LogNormal:
    median: float
    p99: float

    @property
    def _sigma(self) -> float:
        return math.log(self.p99 / self.median) / _Z99

    @property
    def mean(self) -> float:
        return self.median * math.exp(self._sigma**2 / 2)

    def quantile(self, luck: float) -> float:
        inside = min(max(luck, 1e-12), 1 - 1e-12)
        return self.median * math.exp(self._sigma * _NORMAL.inv_cdf(inside))


class Samples:
    """Observed lengths. One that was cut off (censored) gives its weight to the longer ones.

    That is the estimator of Kaplan and Meier, as Efron builds it (1967). Where no longer one was
    observed, the cut one counts as it is: the mean is then too low, which `censored` says.

    Args:
        seen: lengths that were observed to their end.
        cut: lengths that were still going on when the observation ended.
    """

    def __init__(self, seen: Iterable[float], cut: Iterable[float] = ()) -> None:
        marked = sorted([*((value, False) for value in seen), *((value, True) for value in cut)])
        self.censored = sum(is_cut for _, is_cut in marked)
        self.number = len(marked) - self.censored
        self.values, weights, carried = [], [], 0.0
        for place, (value, is_cut) in enumerate(marked):
            left = len(marked) - place
            weight = 1.0 + carried
            if is_cut and left > 1:
                carried += weight / (left - 1)
                continue
            self.values.append(value)
            weights.append(weight)
        self._marked = marked
        total = sum(weights)
        self._ends = list(accumulate(weight / total for weight in weights))
        weighted = zip(self.values, weights, strict=True)
        self.mean = sum(value * weight for value, weight in weighted) / total

    def resample(self, rng: random.Random) -> Samples:
        """Return as many lengths, drawn from these with replacement, of another such record."""
        drawn = rng.choices(self._marked, k=len(self._marked))
        if all(is_cut for _, is_cut in drawn):
            return self
        return Samples(
            (value for value, is_cut in drawn if not is_cut),
            (value for value, is_cut in drawn if is_cut),
        )

    def quantile(self, luck: float) -> float:
        return self.values[min(bisect_left(self._ends, luck), len(self.values) - 1)]


@dataclass(frozen=True)
class Fit:
    """A Weibull distribution fitted to lengths, with the 95 % interval of its shape."""

    mean: float
    shape: float
    low: float
    high: float
    number: int


def fit_weibull(seen: Sequence[float], cut: Sequence[float] = ()) -> Fit | None:
    """Fit by maximum likelihood, with censored lengths. None below three observed lengths.

    The interval is exp(log(shape) +- 1.96 x standard error), by the observed information of the
    profile likelihood.
    """
    seen = [value for value in seen if value > 0]
    everything = [*seen, *(value for value in cut if value > 0)]
    if len(seen) < 3 or max(seen) == min(seen):
        return None
    unit = max(everything)  # powers of lengths below 1 do not overflow
    logs = [math.log(value / unit) for value in everything]
    mean_log = sum(math.log(value / unit) for value in seen) / len(seen)

    def moments(shape: float) -> tuple[float, float, float]:
        powers = [math.exp(shape * log) for log in logs]
        first = sum(power * log for power, log in zip(powers, logs, strict=True))
        second = sum(power * log * log for power, log in zip(powers, logs, strict=True))
        return sum(powers), first, second

    low, high = 1e-3, 1e3
    for _ in range(200):  # the slope of the profile likelihood falls with the shape: bisect
        shape = math.sqrt(low * high)
        total, first, _ = moments(shape)
        if 1 / shape + mean_log - first / total > 0:
            low = shape
        else:
            high = shape
    total, first, second = moments(shape)
    information = len(seen) * (1 / shape**2 + second / total - (first / total) ** 2)
    spread = math.exp(1.96 / (shape * math.sqrt(information)))
    scale = unit * (total / len(seen)) ** (1 / shape)
    mean = scale * math.gamma(1 + 1 / shape)
    return Fit(mean, shape, shape / spread, shape * spread, len(seen))
