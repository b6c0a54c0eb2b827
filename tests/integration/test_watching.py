# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The traces of a launch for its observers, after a group is killed and returns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.client import REPOSITORY
from harness.job import CONFIG
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util import tensor_util

from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.events import Event, StepCommitted, WorkerStarted
from titan_ft.run.log import read_events
from titan_ft.run.paths import RunPaths

LOSS = "loss_metrics/global_avg_loss"


def points(folder: Path) -> list[tuple[int, float]]:
    """Return step and value of every point of the loss in the files of a folder, in the order of
    the files.
    """
    records = [
        record for file in sorted(folder.iterdir()) for record in EventFileLoader(str(file)).Load()
    ]
    values = [
        (record.step, value)
        for record in records
        for value in record.summary.value
        if value.tag == LOSS
    ]
    return [(step, float(tensor_util.make_ndarray(value.tensor))) for step, value in values]


def wait_for(
    run: subprocess.Popen[str],
    events: Callable[[], list[Any]],
    found: Callable[[Any], bool],
    what: str,
) -> Any:
    """Return the first event that fits; fail after two minutes."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and run.poll() is None:
        for event in events():
            if found(event):
                return event
        time.sleep(0.2)
    pytest.fail(f"not within 120 s: {what}")


@pytest.mark.slow
def test_curves_of_a_run_with_a_killed_group(tmp_path: Path) -> None:
    """TensorBoard has one folder for each group and one for the job. Steps continue after a kill
    without a duplicate, and every value is the committed loss of the events.
    """
    paths = RunPaths(tmp_path / "run")
    flags = ["--training.seq_len=32", "--training.local_batch_size=1", "--training.steps=100000"]
    command = [
        sys.executable,
        "-m",
        "titan_ft",
        "launch",
        str(CONFIG),
        "--replicas",
        "2",
        "--ranks-per-replica",
        "1",
    ]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.Popen(
        [*command, "--run-dir", str(paths.root), "--", *flags],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )

    def committed(replica: int, attempt: int, steps: int) -> None:
        def is_it(event: Event) -> bool:
            mine = isinstance(event, StepCommitted) and (event.replica, event.attempt) == (
                replica,
                attempt,
            )
            return (
                mine
                and sum(isinstance(e, StepCommitted) and e.attempt == attempt for e in events())
                >= steps
            )

        wait_for(
            run, events, is_it, f"group {replica} committed {steps} steps in attempt {attempt}"
        )

    def events() -> list[Event]:
        return read_events(paths.events) if paths.events.exists() else []

    try:
        committed(1, 0, 5)
        started = [e for e in events() if isinstance(e, WorkerStarted) and e.replica == 1]
        os.kill(started[0].pid, signal.SIGKILL)
        committed(1, 1, 5)
        run.send_signal(signal.SIGINT)
        printed, _ = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130, printed

    record = RunRecord.read(paths.events)
    losses = {point.step: point.loss for point in record.curve}
    curves = {path.name: points(path) for path in (paths.root / "tb").iterdir()}
    assert set(curves) == {"job", "replica_0", "replica_1"}
    for name, curve in curves.items():
        steps = [step for step, _ in curve]
        assert steps == sorted(set(steps)), name
        assert dict(curve) == {step: pytest.approx(losses[step], rel=1e-6) for step in steps}
    made = {r: {e.step for e in record.commits if e.replica == r} for r in (0, 1)}
    assert [step for step, _ in curves["job"]] == sorted(losses)
    assert {step for step, _ in curves["replica_0"]} == made[0]
    assert {step for step, _ in curves["replica_1"]} == made[1]
    assert max(made[1]) - min(made[1]) >= len(made[1])  # it was away for a while

    assert (
        f"watch it: titan-ft top {paths.root}; logs: {paths.root}/logs/replica-*/latest/" in printed
    )
    assert f"curves: tensorboard --logdir {paths.root}/tb" in printed
    assert paths.latest_logs(1).resolve() == paths.logs(1, 1, 0).parent
    assert (paths.latest_logs(0) / "rank-0.log").is_file()
