# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft launch --resume` with other settings: real launches, real workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness.client import REPOSITORY
from harness.job import CONFIG

from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.events import (
    CheckpointLoaded,
    DataReset,
    LaunchStarted,
    StepCommitted,
    TrainingFinished,
)
from titan_ft.run.log import read_events

FLAGS = [
    "--model.flavor=debugmodel_half",
    "--training.seq_len=32",
    "--checkpoint.enable",
    "--checkpoint.interval=2",
    "--checkpoint.no-last-save-model-only",
    "--lr_scheduler.warmup_steps=0",
    "--lr_scheduler.min_lr_factor=1.0",  # a constant LR
]
WAIT_SECONDS = 180


def launch(run_dir: Path, *words: str, replicas: int = 2) -> subprocess.CompletedProcess[str]:
    """Launch groups of one rank. `words` are options and, after a --, further flags."""
    end = words.index("--") if "--" in words else len(words)
    command = [sys.executable, "-m", "titan_ft", "launch", str(CONFIG), f"--replicas={replicas}"]
    command += [
        "--ranks-per-replica=1",
        f"--run-dir={run_dir}",
        *words[:end],
        "--",
        *FLAGS,
        *words[end + 1 :],
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False, cwd=REPOSITORY
    )


@pytest.mark.slow
def test_a_change_that_is_named_counts(tmp_path: Path) -> None:
    """A changed setting is refused unless it is named. Then it holds from the first step on, and is
    recorded.

    torchtitan takes the LR, betas and weight decay from the checkpoint, whatever the config says.
    """
    run_dir = tmp_path / "run"
    first = launch(run_dir, "--", "--training.steps=4")
    assert first.returncode == 0, first.stdout + first.stderr
    before = len(list(read_events(run_dir / "events")))

    change = ["--", "--training.steps=6", "--optimizer.lr=3e-3"]
    refused = launch(run_dir, "--resume", *change)
    assert refused.returncode == 2
    assert refused.stderr == (
        "titan-ft: --resume must keep the arithmetic and the data of the earlier launch, got optimizer.lr = 0.003 (was "
        "0.0008, of the arithmetic); set it back, or go on with the change by --resume-with lr\n"
    )
    assert len(list(read_events(run_dir / "events"))) == before

    again = launch(run_dir, "--resume", "--resume-with", "lr", *change)
    assert again.returncode == 0, again.stdout + again.stderr
    said = "optimizer.lr = 0.003 (was 0.0008, of the arithmetic)"
    assert f"goes on with another value: {said}" in again.stdout
    events = list(read_events(run_dir / "events"))
    rates = {event.step: event.lr for event in events if isinstance(event, StepCommitted)}
    assert rates == pytest.approx({1: 8e-4, 2: 8e-4, 3: 8e-4, 4: 8e-4, 5: 3e-3, 6: 3e-3})
    (changed,) = [
        event.changed for event in events if isinstance(event, LaunchStarted) if event.changed
    ]
    assert {name: change.kind for name, change in changed.items()} == {
        "optimizer.lr": "arithmetic",
        "training.steps": "harmless",
    }
    assert {event.step for event in events if isinstance(event, CheckpointLoaded)} == {4}
    finals = [event for event in events if isinstance(event, TrainingFinished) if event.step == 6]
    assert len({event.digest for event in finals}) == 1
    assert not [event for event in events if isinstance(event, DataReset)]
    record = RunRecord.read(run_dir / "events")
    from titan_ft.history.check import check
    from titan_ft.history.outcomes.notes import find_notes

    assert f"went on with other values: {said}" in [note.text for note in find_notes(record)]
    assert check(record).verdict == "holds"
