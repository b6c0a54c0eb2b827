# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""No group is lost silently: agents, hosts and frozen groups are killed or stopped, and every view
reports it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.client import REPOSITORY
from harness.job import CONFIG, Job

from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.timing.incidents import find_failures, find_incidents
from titan_ft.live import status
from titan_ft.live.run_status import RunStatus
from titan_ft.run.events import (
    AgentEnded,
    Event,
    GroupBack,
    GroupLost,
    StepCommitted,
    TrainingFinished,
)
from titan_ft.run.log import read_events

SECONDS = 150.0  # only ever reached by a bug
SMALL = [
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--fault_tolerance.digest_every=5",
]


class Launched:
    """A run of `titan-ft launch` with two groups of one rank."""

    def __init__(self, folder: Path, steps: int, *flags: str, **options: Any) -> None:
        self.folder = folder
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
            f"--run-dir={folder}",
            *(f"--{name.replace('_', '-')}={value}" for name, value in options.items()),
        ]
        command += ["--", f"--training.steps={steps}", *SMALL, *flags]
        self.process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def events(self) -> list[Event]:
        return sorted(read_events(self.folder / "events"), key=lambda event: event.time)

    def wait(self, condition: Callable[[list[Event]], Any], what: str) -> Any:
        """Return the first true value of a condition on the events so far."""
        deadline = time.monotonic() + SECONDS
        while not (value := condition(self.events())):
            assert time.monotonic() < deadline, f"not in time: {what}"
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.1)
        return value

    def wait_for_step(self, step: int, replica: int = 0, attempt: int = 0) -> int:
        """Wait for a commit of a group; returns the pid of the worker."""

        def find(events: list[Event]) -> int | None:
            made = [
                e
                for e in events
                if isinstance(e, StepCommitted) and (e.replica, e.attempt) == (replica, attempt)
            ]
            return next((event.pid for event in made if event.step >= step), None)

        return int(self.wait(find, f"step {step} of group {replica}, attempt {attempt}"))

    def finish(self) -> str:
        printed, _ = self.process.communicate(timeout=SECONDS)
        return printed


@pytest.fixture
def launch(tmp_path: Path) -> Any:
    runs: list[Launched] = []

    def start(steps: int, *flags: str, **options: Any) -> Launched:
        runs.append(Launched(tmp_path / f"run-{len(runs)}", steps, *flags, **options))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.communicate(timeout=SECONDS)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def fold(events: list[Event]) -> tuple[RunStatus, list[str]]:
    """Return the status that `top` shows of a run, and its lines."""
    run = RunStatus()
    lines = [line for event in events if (line := run.observe(event))]
    return run, lines


def final_digests(events: list[Event]) -> list[str | None]:
    return [event.digest for event in events if isinstance(event, TrainingFinished)]


@pytest.mark.slow
def test_killed_agent_of_a_launch(launch: Any) -> None:
    """After kill -9 of an agent its group returns with the same weights; terminal, events and
    report name the cause.
    """
    run = launch(240, "--fault_tolerance.start_timeout_seconds=60")
    agent = parent_of(run.wait_for_step(5, replica=1))
    os.kill(agent, signal.SIGKILL)
    run.wait_for_step(1, replica=1, attempt=1)
    printed = run.finish()
    assert run.process.returncode == 0, printed
    events = run.events()
    (ended,) = [event for event in events if isinstance(event, AgentEnded)]
    assert (ended.replica, ended.attempt, ended.agent_pid, ended.signal) == (1, 0, agent, "SIGKILL")
    (line,) = [line for line in printed.splitlines() if "died" in line]
    assert line.startswith("[")
    assert "group 1 died: its agent was killed by SIGKILL" in line
    assert "group 1 restarting (attempt 1)" in printed
    (failure,) = find_failures(RunRecord(events))
    assert (failure.replica, failure.cause) == (1, "agent: SIGKILL")
    assert failure.rejoin_seconds is not None
    digests = final_digests(events)
    assert len(digests) == 2
    assert len(set(digests)) == 1
    shown, _ = fold(events)
    assert {group.state for group in shown.groups.values()} == {status.FINISHED}


@pytest.mark.slow
def test_fault_that_kills_an_agent(launch: Any) -> None:
    """`titan-ft chaos RUN kill_agent` hits the agent only, and that fault is the cause of the one
    failure.
    """
    run = launch(240, "--fault_tolerance.start_timeout_seconds=60")
    agent = parent_of(run.wait_for_step(5, replica=1))
    command = [
        sys.executable,
        "-m",
        "titan_ft",
        "chaos",
        str(run.folder),
        "kill_agent",
        "--replica=1",
    ]
    subprocess.run(command, cwd=REPOSITORY, timeout=SECONDS, check=True)
    run.wait_for_step(1, replica=1, attempt=1)
    printed = run.finish()
    assert run.process.returncode == 0, printed
    events = run.events()
    (ended,) = [event for event in events if isinstance(event, AgentEnded)]
    assert (ended.replica, ended.agent_pid) == (1, agent)
    (incident,) = [one for one in find_incidents(RunRecord(events)) if one.injected]
    assert (incident.fault, incident.injected, incident.replicas, incident.ended) == (
        "kill_agent",
        True,
        (1,),
        True,
    )
    checked = [sys.executable, "-m", "titan_ft", "check", str(run.folder)]
    subprocess.run(checked, cwd=REPOSITORY, timeout=SECONDS, check=True)


@pytest.mark.slow
def test_lost_host(make_job: Callable[..., Job]) -> None:
    """A group without workers and agent is gone for good: the survivor reports it, waits for it by
    name, and ends.
    """
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
    shown, lines = fold(events)
    assert shown.groups[1].state == status.LOST
    assert (
        f"group 1 is lost: silent for {lost['seconds']:.0f} s, last in step {lost['last_step']}"
        in lines
    )
    assert not shown.end


@pytest.mark.slow
def test_end_without_a_lost_group(make_job: Callable[..., Job]) -> None:
    """After the last step the survivor names the group that it waits for, and then ends without;
    `top` shows both.
    """
    job = make_job(
        groups=2,
        steps=60,
        max_restarts=0,
        hooks={"constants": {"titan_ft.engine.step.FINISH_SECONDS": 3.0}},
    )
    job.start()
    job.wait_until(lambda: any(e["step"] > 5 for e in job.events("step_committed")), 60, "training")
    job.send_signal(1, signal.SIGKILL)
    job.finish()
    (waited,) = job.events("waiting_to_end")
    (ended,) = job.events("ended_without")
    assert (waited["slots"], ended["slots"], ended["replica"]) == ([1], [1], 0)
    shown, lines = fold(sorted(read_events(job.paths.events), key=lambda event: event.time))
    assert [group.state for group in shown.groups.values()] == [status.FINISHED, status.LOST]
    assert any(line.startswith("the last step is made; waiting for group 1 for") for line in lines)
    assert any(line.startswith("ended without group 1") for line in lines)
    assert shown.end


@pytest.mark.slow
def test_frozen_group(launch: Any) -> None:
    """A group under SIGSTOP is named while it is frozen, and named as back afterwards. It is not
    restarted.
    """
    run = launch(100000, "--fault_tolerance.digest_every=50", minutes=0.6)
    worker = run.wait_for_step(5, replica=1)
    os.kill(worker, signal.SIGSTOP)
    try:
        run.wait(
            lambda events: [e for e in events if isinstance(e, GroupLost)], "the freeze is noticed"
        )
        shown, _ = fold(run.events())
        assert shown.groups[1].state == status.LOST
    finally:
        os.kill(worker, signal.SIGCONT)
    run.wait(lambda events: [e for e in events if isinstance(e, GroupBack)], "it is back")
    printed = run.finish()
    assert run.process.returncode == 0, printed
    assert re.search(r"group 1 is lost: silent for \d\d s, last in step", printed)
    assert re.search(r"group 1 is back: it was silent for \d\d s", printed)
    told = [event.name for event in run.events() if isinstance(event, GroupLost | GroupBack)]
    assert told == ["group_lost", "group_back"]
    shown, _ = fold(run.events())
    assert [group.restarts for group in shown.groups.values()] == [0, 0]
    assert shown.groups[1].state == status.DRAINED
