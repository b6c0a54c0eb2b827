# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Real campaigns of eight groups, predicted: the second half from the first, and one before it
runs. Minutes each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from titan_ft.forecast.candidate import make_candidates
from titan_ft.forecast.choice import Forecast, run_seeds
from titan_ft.forecast.measured import measure
from titan_ft.forecast.scenario import DAY, read_scenarios
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.timing.incidents import find_failures
from titan_ft.run.paths import RunPaths

ROOT = Path(__file__).parents[2]
PLAN = """
start_seconds = 10
[limits]
max_down = 3
patience_seconds = 6
[[rule]]
when = "poisson"
mtbf_seconds = 9
faults = ["kill_group"]
"""
FLAGS = (
    "--model.flavor=debugmodel_half",
    "--training.seq_len=128",
    "--training.steps=100000",
    "--lr_scheduler.total_steps=100000",
    "--fault_tolerance.batch_policy=constant",
    "--fault_tolerance.hang_timeout_seconds=60",
)


def campaign(run_dir: Path, plan: str, minutes: float, seed: int) -> RunRecord:
    words = [
        "launch",
        "llama3_debug",
        "--replicas",
        "8",
        "--ranks-per-replica",
        "1",
        "--run-dir",
        str(run_dir),
    ]
    words += ["--minutes", str(minutes), "--chaos", plan, "--chaos-seed", str(seed), "--", *FLAGS]
    subprocess.run(
        [sys.executable, "-m", "titan_ft", *words], cwd=ROOT, check=True, capture_output=True
    )
    return RunRecord.read(RunPaths(run_dir).events)


def second_half(record: RunRecord, folder: Path) -> tuple[int, float, float]:
    """Return the steps of the second half, and the 5th and the 95th percentile as predicted from
    the first.

    The second half's faults are known to the prediction, as those of a chaos plan are; what they
    cost is not."""
    times = sorted(event.time for event in record.first_commit_of_step.values())
    middle, seconds = (times[0] + times[-1]) / 2, (times[-1] - times[0]) / 2
    measured = measure([record], until=middle)
    assert measured is not None
    failures = [each for each in find_failures(record) if each.away and each.time > middle]
    lines = [f"{each.time - middle},kill_group,{each.replica}" for each in failures]
    (folder / "second.csv").write_text("\n".join(["time,fault,target", *lines]))
    values = {
        "clock": "wall",
        "days": seconds / DAY,
        "cluster": {"gpus": 8, "gpus_per_node": 1},
        "job": {"step": measured.step, "groups": 8},
        "failure": [{"name": "kills", "trace": "second.csv"}],
        "groups": {},
    }
    (scenario,) = read_scenarios(values, folder)
    (job,) = make_candidates(scenario, measured)
    low, high = Forecast(job, 0.0, run_seeds([job], measured, 200, seconds)[0]).spread(
        lambda run: run.steps
    )
    return sum(time > middle for time in times), low, high


@pytest.mark.slow
@pytest.mark.alone
def test_second_halves_follow_from_first_halves(tmp_path: Path) -> None:
    """Of three campaigns two at least lie in the interval that holds 90 % of runs."""
    (tmp_path / "kills.toml").write_text(PLAN)
    found = []
    for seed in (1, 2, 3):
        record = campaign(tmp_path / f"run-{seed}", str(tmp_path / "kills.toml"), 2.0, seed)
        found.append(second_half(record, tmp_path))
    assert sum(low <= steps <= high for steps, low, high in found) >= 2, found


@pytest.mark.slow
@pytest.mark.alone
def test_a_campaign_is_predicted_before_it_runs(tmp_path: Path) -> None:
    """By `--chaos blog_15s`, from the record of another campaign: steps, and every fault that
    hits.
    """
    (tmp_path / "kills.toml").write_text(PLAN)
    campaign(tmp_path / "before", str(tmp_path / "kills.toml"), 1.5, 7)
    words = [
        "plan",
        "--chaos",
        "blog_15s",
        "--from",
        str(tmp_path / "before"),
        "--minutes",
        "2",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "titan_ft", *words, "--seeds", "100"],
        capture_output=True,
        check=True,
    )
    counts = json.loads(done.stdout)["counts"]
    record = campaign(tmp_path / "run", "blog_15s", 2.0, 15)
    kills = [fault for fault in record.faults if fault.name == "kill_group"]
    low, high = counts["steps"]["range"]
    print(
        f"predicted {counts['steps']['mean']} steps ({low} to {high}), measured {len(record.first_commit_of_step)}"
    )
    assert len(kills) == counts["failures"]["mean"]
    spread = (
        high - low
    ) / 2  # the machine's pace may differ between two runs by more than within one
    assert low - spread <= len(record.first_commit_of_step) <= high + spread
