# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Step times: what torchtitan's log says of a run, and how the runs of several systems compare."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from statistics import median

STAMP = r"^\[titan\] (?P<stamp>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - "
_STEP = re.compile(STAMP + r".*?step:\s*(?P<step>\d+)\s+(?:\x1b\[[\d;]*m)?loss:", re.MULTILINE)


def parse_stamp(stamp: str) -> float:
    """Return the Unix seconds of a time stamp of torchtitan's log, which is in local time."""
    return datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp()


def logged_steps(log: str) -> list[tuple[int, float]]:
    """Return step and time of each line with a loss; torchtitan writes it when the step is over."""
    return [(int(match["step"]), parse_stamp(match["stamp"])) for match in _STEP.finditer(log)]


def step_seconds(steps: Sequence[tuple[int, float]], warmup: int) -> list[float]:
    """Return the seconds per step of each interval between two logged steps, from step `warmup` on."""
    late = [(step, time) for step, time in steps if step >= warmup]
    return [(end - begin) / (last - first) for (first, begin), (last, end) in pairwise(late)]


@dataclass(frozen=True)
class Spread:
    """A median with the range that it comes from."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Steady:
    """Step time of one system over all rounds.

    Attributes:
        seconds: of the rounds' medians.
        ratio: of each round's median to the reference's in the same round.
        mean_ratio: the same of the rounds' means, in which rare costs count that a median hides.
        rounds: seconds per step, of each interval of each round.
    """

    seconds: Spread
    ratio: Spread
    mean_ratio: Spread
    rounds: list[list[float]]


def compare(samples: Mapping[str, list[list[float]]], reference: str) -> dict[str, Steady]:
    """Compare the systems' step times, round by round, with those of the reference.

    Args:
        samples: for each system and round, the seconds per step of each interval.
    """
    found = {}
    for system, rounds in samples.items():
        pairs = list(zip(rounds, samples[reference], strict=True))
        found[system] = Steady(
            seconds=Spread.of([median(values) for values in rounds]),
            ratio=Spread.of([median(values) / median(others) for values, others in pairs]),
            mean_ratio=Spread.of([_mean(values) / _mean(others) for values, others in pairs]),
            rounds=rounds,
        )
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
