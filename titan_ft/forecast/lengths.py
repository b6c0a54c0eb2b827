# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Lengths of time: constants, distributions, and observed values.

Scenarios and records make `Length` objects. The closed forms read the mean of a length. The
simulation calls `quantile` with a uniform random number, the luck of a failure, to draw a length.
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
from typing import NamedTuple, Protocol

_NORMAL = NormalDist()
_Z99 = _NORMAL.inv_cdf(0.99)


class Length(Protocol):
    """A random number of seconds."""

    @property
    def mean(self) -> float:
        """Return the mean in seconds."""

    def quantile(self, luck: float) -> float:
        """Return the length below which a share `luck` of all lengths lies.

        Args:
            luck: from 0 to 1 (exclusive).
        """


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
    """A Weibull distribution. Shape 1 is memoryless (exponential).

    As times between failures, a shape below 1 means bursts and early deaths, above 1 wear.
    """

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
        # The normal distribution has no quantiles at 0 and 1.
        inner_luck = min(max(luck, 1e-12), 1 - 1e-12)
        return self.median * math.exp(self._sigma * _NORMAL.inv_cdf(inner_luck))


class _Observation(NamedTuple):
    """An observed length. At equal length, a complete one sorts before one that was cut off."""

    seconds: float
    is_cut_off: bool


class Samples:
    """Observed lengths as a distribution. Some observations may be cut off (censored).

    An observation that was cut off is known to be longer than its value. Its weight is divided
    evenly among all longer observations. This is the estimator of Kaplan and Meier, as Efron (1967)
    constructs it ("redistribute to the right"). If the longest observation was cut off, it counts
    with its value. The mean is then too low.

    Args:
        complete: lengths that were observed to their end.
        cut_off: lengths that still went on when the observation ended.

    Attributes:
        number: how many complete observations there are.
        censored: how many observations were cut off.
        values: the lengths that have a weight, in order.
    """

    def __init__(self, complete: Iterable[float], cut_off: Iterable[float] = ()) -> None:
        observations = [_Observation(seconds, False) for seconds in complete]
        observations += [_Observation(seconds, True) for seconds in cut_off]
        observations.sort()
        self._observations = observations
        self.censored = sum(each.is_cut_off for each in observations)
        self.number = len(observations) - self.censored
        self.values: list[float] = []
        weights = []
        redistributed = 0.0
        for index, observation in enumerate(observations):
            weight = 1.0 + redistributed
            num_longer = len(observations) - index - 1
            if observation.is_cut_off and num_longer > 0:
                redistributed += weight / num_longer
                continue
            self.values.append(observation.seconds)
            weights.append(weight)
        total = sum(weights)
        self._cumulative = list(accumulate(weight / total for weight in weights))
        weighted = zip(self.values, weights, strict=True)
        self.mean = sum(value * weight for value, weight in weighted) / total

    def resample(self, rng: random.Random) -> Samples:
        """Return as many observations, drawn from these with replacement.

        They are what another record of the same job might have shown. If only observations without
        an end are drawn, they have no distribution: then all observations are returned.
        """
        drawn = rng.choices(self._observations, k=len(self._observations))
        complete = [each.seconds for each in drawn if not each.is_cut_off]
        cut_off = [each.seconds for each in drawn if each.is_cut_off]
        return Samples(complete, cut_off) if complete else self

    def quantile(self, luck: float) -> float:
        index = bisect_left(self._cumulative, luck)
        # Rounding may leave the last cumulative weight a little below 1.
        return self.values[min(index, len(self.values) - 1)]


@dataclass(frozen=True)
class Fit:
    """A Weibull distribution that was fitted to observed lengths.

    Attributes:
        low, high: 95 % confidence interval of the shape.
        number: how many complete observations there were.
    """

    mean: float
    shape: float
    low: float
    high: float
    number: int


def fit_weibull(complete: Sequence[float], cut_off: Sequence[float] = ()) -> Fit | None:
    """Fit a Weibull distribution by maximum likelihood.

    The confidence interval is exp(log(shape) +- 1.96 x standard error). The standard error follows
    from the observed information of the profile likelihood, in which each shape has its best scale.

    Args:
        complete: lengths that were observed to their end. With fewer than three, or if all are
            equal, there is no fit.
        cut_off: lengths that still went on when the observation ended.
    """
    complete = [value for value in complete if value > 0]
    everything = [*complete, *(value for value in cut_off if value > 0)]
    if len(complete) < 3 or max(complete) == min(complete):
        return None
    # In this unit no length is above 1, so powers of lengths cannot overflow.
    unit = max(everything)
    logs = [math.log(value / unit) for value in everything]
    mean_log = sum(math.log(value / unit) for value in complete) / len(complete)

    def moments(shape: float) -> tuple[float, float, float]:
        """Return the sums of x^shape, x^shape log(x), and x^shape log(x)^2 over all lengths x."""
        powers = [math.exp(shape * log) for log in logs]
        first = sum(power * log for power, log in zip(powers, logs, strict=True))
        second = sum(power * log * log for power, log in zip(powers, logs, strict=True))
        return sum(powers), first, second

    # The slope of the profile likelihood falls with the shape, and is 0 at its maximum: bisect.
    low, high = 1e-3, 1e3
    for _ in range(200):
        shape = math.sqrt(low * high)
        total, first, _ = moments(shape)
        if 1 / shape + mean_log - first / total > 0:
            low = shape
        else:
            high = shape
    total, first, second = moments(shape)
    information = len(complete) * (1 / shape**2 + second / total - (first / total) ** 2)
    spread = math.exp(1.96 / (shape * math.sqrt(information)))
    scale = unit * (total / len(complete)) ** (1 / shape)
    mean = scale * math.gamma(1 + 1 / shape)
    return Fit(mean, shape, shape / spread, shape * spread, len(complete))
