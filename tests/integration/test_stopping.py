# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A stopped run prints the command that continues it, and loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness.client import REPOSITORY
from harness.job import CONFIG

from titan_ft.run.events import CheckpointSaved, StepCommitted
from titan_ft.run.log import read_events
from titan_ft.training.checkpoint.folder import complete_steps

pytestmark = pytest.mark.slow

STEPS = 60
SECONDS = 120.0  # only ever reached by a bug
FLAGS = [
    f"--training.steps={STEPS}",
    "--training.seq_len=32",
    "--checkpoint.enable",
    "--checkpoint.interval=10",
]


def commits(run_dir: Path) -> list[tuple[int, int]]:
    """Group and step of each commit so far, in order of time."""
    events = [
        event for event in read_events(run_dir / "events") if isinstance(event, StepCommitted)
    ]
    return [(event.replica, event.step) for event in sorted(events, key=lambda event: event.time)]


@pytest.mark.parametrize("how", ["signal", "minutes"])
def test_the_command_that_a_stopped_run_ends_with(tmp_path: Path, how: str) -> None:
    """The printed command continues after the step of the stop, to the last step."""
    run_dir = tmp_path / "a run"  # whose name needs quotes
    command = [
        sys.executable,
        "-m",
        "titan_ft",
        "launch",
        str(CONFIG),
        "--replicas=2",
        "--ranks-per-replica=1",
    ]
    command += [
        f"--run-dir={run_dir}",
        *(["--minutes=0.05"] if how == "minutes" else []),
        "--",
        *FLAGS,
    ]
    stopped = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        if how == "signal":
            deadline = time.monotonic() + SECONDS
            while not any(step >= 13 for _, step in commits(run_dir)):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            os.killpg(stopped.pid, signal.SIGINT)
        printed, _ = stopped.communicate(timeout=SECONDS)
    finally:
        stopped.kill()
    assert stopped.returncode == (130 if how == "signal" else 0), printed
    before = commits(run_dir)
    last = max(step for _, step in before)
    assert last < STEPS, "it was over before it was stopped"
    said, goes_on = printed.splitlines()[-2:]
    assert (
        said == f"stopped after step {last}; the checkpoint of step {last} is complete; go on with:"
    )
    assert complete_steps(run_dir / "checkpoint")[-1] == last

    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    subprocess.run(
        goes_on, shell=True, cwd=REPOSITORY, env=environment, timeout=SECONDS, check=True
    )
    after = commits(run_dir)[len(before) :]
    assert sorted(after) == [
        (replica, step) for replica in (0, 1) for step in range(last + 1, STEPS + 1)
    ]
    saved = [
        event for event in read_events(run_dir / "events") if isinstance(event, CheckpointSaved)
    ]
    assert {event.step for event in saved} == {*range(10, STEPS + 1, 10), last}
    checked = subprocess.run(
        [sys.executable, "-m", "titan_ft", "check", str(run_dir), "--json"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    found = json.loads(checked.stdout)
    assert (found["verdict"], found["audit"]["verdict"]) == ("holds", "holds"), found
    assert (found["audit"]["lost"], found["audit"]["repeated"], found["audit"]["void"]) == (
        [],
        [],
        [],
    )
