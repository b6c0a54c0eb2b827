# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Late streams change no byte, and the engine needs each of its waits.

`late_streams.py` runs each case in a process of its own, because a removed wait may leave anything
behind.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cuda import stream_scenarios
from tests.cuda.late_streams import (
    CASES,
    COVERED_BY,
    LATE,
    LAZY,
    NOTICED_BY,
    SCENARIOS,
    Case,
    Result,
    removals_of,
)
from tests.cuda.waits import find_waits

_ROOT = Path(__file__).parents[2]
_QUICK_SCENARIOS = ("train", "heal", "copy_beside_training")
_QUICK_REMOVALS = (
    "gradients.flight.Flight._sum_and_gather:wait_for",
    "engine.outer.OuterModel.compute_changes:synchronize",
    "transfer.snapshot.TrainState._await_running_copy:wait_for",
)


def run(cases: Sequence[Case], **environ: str) -> list[Result]:
    """Run cases in another process, whose forks have not imported titan_ft yet, as this one has."""
    completed = subprocess.run(
        [sys.executable, "-m", "tests.cuda.late_streams", "--run"],
        cwd=_ROOT,
        input=json.dumps([case.as_json() for case in cases]),
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [Result(**fields) for fields in json.loads(completed.stdout)]


def check_late(cases: Sequence[Case]) -> None:
    """Check that each case ends as the undisturbed one, bit for bit."""
    results = dict(zip(cases, run(cases), strict=True))
    for case, result in results.items():
        assert not result.error, f"{case}, {case.lateness}: {result.error}"
        assert result.digest == results[case.reference].digest, f"{case}, {case.lateness}"


def late_cases(scenarios: Sequence[tuple[str, str]], latenesses: Sequence[str]) -> list[Case]:
    """Return each scenario, punctual and with each lateness."""
    cases = [Case(*scenario) for scenario in scenarios]
    return cases + [
        Case(*scenario, (lateness,)) for scenario in scenarios for lateness in latenesses
    ]


def check_removals(waits: Sequence[str]) -> None:
    """Check that the removal of each of these waits is noticed, or covered, as the tables say."""
    expected = {case: noticed for wait in waits for case, noticed in removals_of(wait)}
    cases = list(dict.fromkeys([*expected, *(case.reference for case in expected)]))
    results = dict(zip(cases, run(cases), strict=True))
    for case, noticed in expected.items():
        undisturbed = results[case.reference]
        assert not undisturbed.error, f"{case}: {undisturbed.error}"
        is_noticed = results[case].digest != undisturbed.digest
        assert is_noticed == noticed, (
            f"{case} without {', '.join(sorted(case.removed))}: {results[case]}"
        )


def test_the_tables_name_every_wait() -> None:
    """A new wait needs a case that notices its removal."""
    assert set(find_waits()) == {*NOTICED_BY, *COVERED_BY}
    assert set(NOTICED_BY.values()) <= set(CASES)


def test_the_tables_name_every_scenario() -> None:
    functions = inspect.getmembers(stream_scenarios, inspect.isfunction)
    own = {name for name, function in functions if function.__module__ == stream_scenarios.__name__}
    assert {name for name in own if name[0] != "_" and name != "exchange_goes_on"} == set(SCENARIOS)


@pytest.mark.slow  # a minute
def test_late_streams_change_nothing() -> None:
    check_late(late_cases([(scenario, "nccl") for scenario in _QUICK_SCENARIOS], [*LATE, LAZY[0]]))


def test_a_removed_wait_is_noticed() -> None:
    check_removals(_QUICK_REMOVALS)


@pytest.mark.slow  # a minute and a half
def test_late_streams_change_nothing_in_any_scenario() -> None:
    check_late(late_cases(CASES, [*LATE, *LAZY]))


@pytest.mark.slow  # a minute
def test_each_removed_wait_is_noticed() -> None:
    check_removals(find_waits())


def test_the_gpus_path_has_the_bytes_of_the_cpus() -> None:
    """The same scenarios on a CPU, whose buckets the host fills and reads."""
    cases = [
        Case(scenario, "gloo") for scenario in ("train", "train_on_two_streams", "heal", "rounds")
    ]
    on_gpu, on_cpu = run(cases), run(cases, FAKE_CUDA_DEVICES="0")
    for case, gpu, cpu in zip(cases, on_gpu, on_cpu, strict=True):
        assert not gpu.error + cpu.error, f"{case}: {gpu.error or cpu.error}"
        assert gpu.digest == cpu.digest, str(case)
