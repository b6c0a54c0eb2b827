# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Steps without failures: their time by the log, their CPU time by /proc, and the ratios to stock
torchtitan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.processor import ProcessorClock
from benchmarks.run import BenchError, Run, progress
from benchmarks.systems import STOCK, Job, derive_config, first_log

LOG_FREQ = 10
"""Steps between two lines of the log, torchtitan's default: stock pays for the means that it logs,
ours do not.
"""
WARMUP_STEPS = 10
_STEP = re.compile(
    r"^\[titan\] (?P<stamp>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - "
    r".*?step:\s*(?P<step>\d+)\s+(?:\x1b\[[\d;]*m)?loss:",
    re.MULTILINE,
)


def logged_steps(log: str) -> list[tuple[int, float]]:
    """Return step and Unix seconds of each line with a loss; torchtitan writes it when the step is
    over.
    """
    times = [
        (match["step"], datetime.strptime(match["stamp"], "%Y-%m-%d %H:%M:%S,%f"))
        for match in _STEP.finditer(log)
    ]
    return [(int(step), time.timestamp()) for step, time in times]  # the log is in local time


def step_seconds(steps: Sequence[tuple[int, float]], warmup: int) -> list[float]:
    """Return the seconds per step of each interval between two logged steps, from step `warmup`
    on.
    """
    late = [(step, time) for step, time in steps if step >= warmup]
    return [(end - begin) / (last - first) for (first, begin), (last, end) in pairwise(late)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, and the range that it comes from."""
    return {"median": median(values), "low": min(values), "high": max(values)}


@dataclass(frozen=True)
class SteadyRun:
    """One run without failures.

    Attributes:
        seconds: of a step, for each interval between two lines of the log.
        processor: see `ProcessorClock.per_step`.
    """

    seconds: list[float]
    processor: dict[str, Any]

    @property
    def processor_seconds(self) -> float:
        """Return the processor time that all ranks take for a step."""
        return float(self.processor["user"] + self.processor["system"])


def compare(samples: Mapping[str, list[list[float]]], reference: str) -> dict[str, dict[str, Any]]:
    """Compare the systems' step times, round by round, with those of the reference.

    Args:
        samples: for each system and round, the seconds per step of each interval.

    Returns:
        For each system: `seconds`, the spread of the rounds' medians; `ratio`, the spread of the
            medians'
        ratios to the reference in the same round; `mean_ratio`, the same for the means, which
        include rare costs that a median hides; and the `rounds`.
    """
    found = {}
    for system, rounds in samples.items():
        pairs = list(zip(rounds, samples[reference], strict=True))
        found[system] = {
            "seconds": spread([median(values) for values in rounds]),
            "ratio": spread([median(values) / median(others) for values, others in pairs]),
            "mean_ratio": spread([fmean(values) / fmean(others) for values, others in pairs]),
            "rounds": rounds,
        }
    return found


def compare_processor(
    samples: Mapping[str, list[SteadyRun]], reference: str
) -> dict[str, dict[str, Any]]:
    """Compare the processor time of a step, round by round, with that of the reference.

    Returns:
        For each system: the spread of `user` and `system`, the seconds of all ranks, and of
            `others`, the
        seconds of the job's other processes; `processor_ratio`, the ratio of the ranks' seconds to
        the reference in the same round; and `processor`, the rounds.
    """
    found = {}
    for system, runs in samples.items():
        pairs = zip(runs, samples[reference], strict=True)
        found[system] = {
            "user": spread([run.processor["user"] for run in runs]),
            "system": spread([run.processor["system"] for run in runs]),
            "others": spread([run.processor["others"] for run in runs]),
            "processor_ratio": spread(
                [run.processor_seconds / other.processor_seconds for run, other in pairs]
            ),
            "processor": [run.processor for run in runs],
        }
    return found


def time_steps(job: Job, config: Mapping[str, Any], timeout_seconds: float) -> SteadyRun:
    """Run a job to its end, and measure its steps after the warm-up.

    Raises:
        BenchError: the job failed, took too long, or logged no complete interval.
    """
    with Run(job, config) as run:
        clock = ProcessorClock(run.pids)
        run.wait(timeout_seconds, clock.sample)
    steps = logged_steps(first_log(job).read_text(errors="replace"))
    seconds = step_seconds(steps, WARMUP_STEPS)
    if not seconds:
        raise BenchError(f"{job.system}: no steps in the log of {job.run_dir}")
    (first, begin), *_, (last, end) = [(step, when) for step, when in steps if step >= WARMUP_STEPS]
    made = SteadyRun(
        seconds, clock.per_step(begin, end, last - first, job.num_groups * job.num_ranks)
    )
    text = " ".join(f"{value:.3f}" for value in seconds)
    progress(
        f"{job.run_dir.name}: {text} s a step; {made.processor_seconds:.3f} CPU s of all ranks"
    )
    return made


def measure_steady(
    base: Mapping[str, Any], systems: Sequence[str], work_dir: Path, rounds: int, steps: int
) -> dict[str, Any]:
    """Run all systems in turn, round by round, and compare their step times.

    Every second round has the opposite order, so that a machine that slows down favors no system.
    """
    samples: dict[str, list[SteadyRun]] = {system: [] for system in systems}
    for number in range(rounds):
        for system in systems if number % 2 == 0 else reversed(systems):
            job = Job(system, work_dir / f"steady-{number}-{system}")
            config = derive_config(base, job, steps, LOG_FREQ)
            samples[system].append(time_steps(job, config, timeout_seconds=120 + 30 * steps))
    times = compare(
        {system: [run.seconds for run in runs] for system, runs in samples.items()}, STOCK
    )
    processor = compare_processor(samples, STOCK)
    return {system: times[system] | processor[system] for system in systems}
