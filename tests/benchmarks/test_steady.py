# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Step times and processor times of runs without failures, and their comparison."""

from __future__ import annotations

import pytest

from benchmarks.steady import SteadyRun, compare, compare_processor, logged_steps, step_seconds
from benchmarks.systems import OURS, STOCK


def line(seconds: float, name: str, message: str) -> str:
    """Make one line of a torchtitan log."""
    whole, part = divmod(round(seconds * 1000), 1000)
    return f"[titan] 2026-01-02 03:04:{whole:02d},{part:03d} - {name} - INFO - {message}"


def step_line(seconds: float, step: int) -> str:
    return line(
        seconds,
        "root",
        f"\x1b[31mstep: {step:2}  \x1b[32mloss:  8.05838  \x1b[38;2;180;60;0mgrad_norm:  0.5",
    )


def of_run(processor_seconds: float) -> SteadyRun:
    """Make a run whose ranks used that much processor time a step, a quarter of a second of it in
    the system.
    """
    processor = {"user": processor_seconds - 0.25, "system": 0.25, "others": 0.5, "threads": {}}
    return SteadyRun([1.0], processor)


def test_step_times_come_from_the_lines_with_a_loss_and_leave_out_the_warmup() -> None:
    log = "\n".join(
        [
            "Traceback (most recent call last):",
            step_line(1.0, 1),
            step_line(10.0, 10),
            line(10.0, "root", "step: 10  ft/participants: 2"),
            step_line(15.0, 20),
            step_line(21.5, 30),
        ]
    )
    steps = logged_steps(log)
    assert [step for step, _ in steps] == [1, 10, 20, 30]
    assert step_seconds(steps, warmup=10) == pytest.approx([0.5, 0.65])
    assert step_seconds(steps, warmup=30) == []


def test_ratios_compare_runs_of_the_same_round() -> None:
    """A machine that gets twice as slow between the rounds changes no ratio."""
    figures = compare(
        {STOCK: [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]], OURS: [[1.1, 1.1, 2.0], [2.2, 2.2, 4.0]]}, STOCK
    )
    names = ("median", "low", "high")
    assert figures[OURS]["ratio"] == pytest.approx(dict.fromkeys(names, 1.1))
    assert figures[OURS]["mean_ratio"] == pytest.approx(dict.fromkeys(names, 1.4))
    assert figures[OURS]["seconds"] == pytest.approx({"median": 1.65, "low": 1.1, "high": 2.2})
    assert figures[STOCK]["ratio"] == dict.fromkeys(names, 1.0)


def test_the_processor_time_of_all_ranks_is_compared_in_the_same_round() -> None:
    """User and system time count alike; other processes have their own figure."""
    figures = compare_processor(
        {STOCK: [of_run(1.0), of_run(2.0)], OURS: [of_run(1.1), of_run(1.9)]}, STOCK
    )
    assert figures[OURS]["processor_ratio"] == pytest.approx(
        {"median": 1.025, "low": 0.95, "high": 1.1}
    )
    assert figures[OURS]["user"] == pytest.approx({"median": 1.25, "low": 0.85, "high": 1.65})
    assert figures[OURS]["system"]["median"] == pytest.approx(0.25)
    assert figures[OURS]["others"]["median"] == pytest.approx(0.5)
