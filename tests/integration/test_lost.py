# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Nobody is lost silently: agents and hosts are killed, and every view says so."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.client import REPOSITORY
from harness.job import CONFIG, Job

from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.timing.incidents import find_incidents
from titan_ft.live import status
from titan_ft.live.run_status import RunStatus
from titan_ft.run.events import AgentEnded, Event, StepCommitted, TrainingFinished
from titan_ft.run.log import read_events

SECONDS = 150.0  # only ever reached by a bug
FLAGS = [
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--training.steps=240",
    "--fault_tolerance.digest_every=5",
    "--fault_tolerance.start_timeout_seconds=60",
]


class Launched:
    """A run of `titan-ft launch` with two groups of one rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "titan_ft", "launch", str(CONFIG), "--replicas=2", "--ranks-per-replica=1"]
        self.process = subprocess.Popen(
            [*command, f"--run-dir={folder}", "--", *FLAGS],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def events(self) -> list[Event]:
        return sorted(read_events(self.folder / "events"), key=lambda event: event.time)

    def wait_for_step(self, step: int, attempt: int) -> int:
        """Wait for a commit of group 1; returns the pid of the worker."""
        deadline = time.monotonic() + SECONDS
        while True:
            made = [e for e in self.events() if isinstance(e, StepCommitted) and (e.replica, e.attempt) == (1, attempt)]
            if made and made[-1].step >= step:
                return made[-1].pid
            assert time.monotonic() < deadline, f"not in time: step {step} of attempt {attempt}"
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.1)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Launched]:
    launched = Launched(tmp_path / "run")
    yield launched
    if launched.process.poll() is None:
        launched.process.terminate()
        launched.process.communicate(timeout=SECONDS)


@pytest.mark.slow
def test_fault_that_kills_an_agent(run: Launched) -> None:
    """`titan-ft chaos RUN kill_agent` hits the agent alone; the fault is the cause of the one failure."""
    stat = Path(f"/proc/{run.wait_for_step(5, attempt=0)}/stat").read_text()
    agent = int(stat.rpartition(")")[2].split()[1])  # the parent of the worker
    command = [sys.executable, "-m", "titan_ft", "chaos", str(run.folder), "kill_agent", "--replica=1"]
    subprocess.run(command, cwd=REPOSITORY, timeout=SECONDS, check=True)
    run.wait_for_step(1, attempt=1)
    printed, _ = run.process.communicate(timeout=SECONDS)
    assert run.process.returncode == 0, printed
    events = run.events()
    (ended,) = [event for event in events if isinstance(event, AgentEnded)]
    assert (ended.replica, ended.attempt, ended.agent_pid, ended.signal) == (1, 0, agent, "SIGKILL")
    assert len({event.digest for event in events if isinstance(event, TrainingFinished)}) == 1
    (incident,) = [one for one in find_incidents(RunRecord(events)) if one.injected]
    assert (incident.fault, incident.injected, incident.replicas, incident.ended) == ("kill_agent", True, (1,), True)
    checked = [sys.executable, "-m", "titan_ft", "check", str(run.folder)]
    subprocess.run(checked, cwd=REPOSITORY, timeout=SECONDS, check=True)


@pytest.mark.slow
def test_lost_host(make_job: Callable[..., Job]) -> None:
    """A group whose workers and agent are gone for good: the survivor says it, waits for it by name, ends without."""
    job = make_job(
        groups=2,
        steps=4000,
        max_restarts=0,
        flags=["--fault_tolerance.digest_every=50"],
        hooks={"constants": {"titan_ft.engine.step.FINISH_SECONDS": 3.0}},
    )
    job.start()
    job.wait_until(lambda: any(e["step"] > 5 for e in job.events("step_committed")), 60, "training")
    job.send_signal(1, signal.SIGKILL)
    job.wait_until(lambda: job.events("group_lost"), 60, "the loss is noticed")
    (lost,) = job.events("group_lost")
    last = max(e["step"] for e in job.events("step_committed") if e["replica"] == 1)
    assert (lost["replica"], lost["slot"]) == (0, 1)
    assert lost["last_step"] in (last, last + 1)
    assert 10.0 <= lost["seconds"] < 20.0
    events = sorted(read_events(job.paths.events), key=lambda event: event.time)
    shown = RunStatus()
    lines = [shown.observe(event) for event in events]
    assert shown.groups[1].state == status.LOST
    assert f"group 1 is lost: silent for {lost['seconds']:.0f} s, last in step {lost['last_step']}" in lines
    assert not shown.end
