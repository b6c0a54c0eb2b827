# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Lengths have the mean that they say, observations that were cut off count, and a fit finds the
shape.
"""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from titan_ft.forecast.lengths import Constant, LogNormal, Samples, Uniform, Weibull, fit_weibull


@pytest.mark.parametrize(
    "length",
    [
        Constant(3.0),
        Uniform(1.0, 5.0),
        Weibull(3.0),
        Weibull(3.0, 0.7),
        LogNormal(2.0, 9.0),
        Samples([1, 2, 9]),
    ],
)
def test_draws_have_the_mean(length: Weibull) -> None:
    number = 40_000
    drawn = fmean(length.quantile((place + 0.5) / number) for place in range(number))
    assert drawn == pytest.approx(length.mean, rel=0.01)


def test_a_log_normal_has_its_quantiles() -> None:
    length = LogNormal(60.0, 600.0)
    assert length.quantile(0.5) == pytest.approx(60.0)
    assert length.quantile(0.99) == pytest.approx(600.0)


def test_what_was_cut_off_makes_the_mean_longer() -> None:
    """As Kaplan and Meier have it: of 1, 2+, 3, 4 the third and the fourth weigh 3/8 each."""
    samples = Samples([1.0, 3.0, 4.0], [2.0])
    assert samples.mean == pytest.approx(1 / 4 + 3 * 3 / 8 + 4 * 3 / 8)
    assert (samples.number, samples.censored) == (3, 1)
    assert Samples([1.0], [5.0]).mean == pytest.approx(3.0), (
        "no longer one was seen: it counts as it is"
    )


def test_a_record_resampled_is_as_large() -> None:
    samples = Samples([1.0, 2.0, 3.0], [2.5])
    again = [samples.resample(random.Random(seed)) for seed in range(50)]
    assert all(each.number + each.censored == 4 for each in again)
    assert len({each.mean for each in again}) > 5


@pytest.mark.parametrize("shape", [0.7, 1.0, 2.0])
def test_a_fit_recovers_the_shape(shape: float) -> None:
    """In 95 of 100 cases by its interval; 88 are the fewest that chance explains (one in 500)."""
    rng, life = random.Random(1), Weibull(100.0, shape)
    inside = 0
    for _ in range(100):
        lives = [life.quantile(rng.random()) for _ in range(500)]
        end = 150.0  # an observation that ends cuts the longer ones off
        fit = fit_weibull(
            [each for each in lives if each <= end], [end for each in lives if each > end]
        )
        assert fit is not None
        inside += fit.low <= shape <= fit.high
    assert inside >= 88


def test_too_little_is_no_fit() -> None:
    assert fit_weibull([1.0, 2.0]) is None
    assert fit_weibull([2.0, 2.0, 2.0]) is None
