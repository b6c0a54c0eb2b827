# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A user's loader that ends its process during training, as if the job had finished."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.client import REPOSITORY
from harness.job import CONFIG

from titan_ft.run.events import ReplicaRestarted, StepCommitted, TrainingFinished
from titan_ft.run.log import read_events
from titan_ft.run.paths import RunPaths

MODULE = '''
"""torchtitan's loader; in the first attempt the process ends at the third batch."""
import os
from torchtitan.components.dataloader import ParallelAwareDataloader

read = ParallelAwareDataloader.__iter__

def end_early(self):
    for number, batch in enumerate(read(self)):
        if number == 3 and os.environ["TITAN_FT_ATTEMPT"] == "0":
            END
        yield batch

ParallelAwareDataloader.__iter__ = end_early
'''


@pytest.mark.slow
@pytest.mark.parametrize("end", ["os._exit(0)", "raise SystemExit(0)"])
def test_a_group_that_ends_early_is_started_again(tmp_path: Path, end: str) -> None:
    """The group does not count as finished: it restarts and makes all steps."""
    (tmp_path / "user_loader.py").write_text(MODULE.replace("END", end))
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "titan_ft",
        "launch",
        str(CONFIG),
        "--replicas=1",
        "--ranks-per-replica=1",
    ]
    flags = ["--training.steps=8", "--experimental.custom_import=user_loader"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    done = subprocess.run(
        [*command, f"--run-dir={run}", "--", *flags],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    events = read_events(RunPaths(run).events)
    restarts = [event.reason for event in events if isinstance(event, ReplicaRestarted)]
    assert restarts == ["rank 0 ended with exit status 0 before the last step"]
    assert "group 0 died: exit status 0 before the last step" in done.stdout
    assert max(event.step for event in events if isinstance(event, StepCommitted)) == 8
    assert any(isinstance(event, TrainingFinished) for event in events)
