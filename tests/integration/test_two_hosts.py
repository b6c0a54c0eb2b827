# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group on two hosts with an agent on each: a rank dies, an agent dies, a host vanishes, the
first host vanishes.

A third host has the lighthouse and another group, which trains on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.namespaces import Hosts, three_hosts
from titan_ft.launch.lighthouse import ANNOUNCEMENT
from titan_ft.run import events as ev
from titan_ft.run.log import read_events
from titan_ft.run.paths import RunPaths

ROOT = Path(__file__).parents[2]
SECONDS = 120.0
FLAGS = (
    "--model.flavor=tiny",
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--training.steps=400",
    "--fault_tolerance.digest_every=1",
    "--experimental.custom_import=tests.slurm.slow_steps",
)
TITAN_FT = (sys.executable, "-m", "titan_ft")
A, B, C = range(3)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with three_hosts() as made:
        yield made


class Job:
    """Group 0 on hosts A and B, a rank each; group 1 on host C."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        self.paths, self.go = RunPaths(folder / "run"), folder / "go"
        self.processes: list[subprocess.Popen[str]] = []
        lighthouse = self.start(C, *TITAN_FT, "lighthouse")
        assert lighthouse.stdout is not None
        self.lighthouse = lighthouse.stdout.readline().strip().removeprefix(ANNOUNCEMENT)
        options = ["--replica", "1", "--ranks-per-node", "2"]
        self.other_group = self.start_group(C, *options)
        self.agents = {host: self.start_agent(host) for host in (A, B)}

    def start(self, host: int, *command: str) -> subprocess.Popen[str]:
        path = [ROOT, ROOT / "tests" / "integration"]
        env = {**os.environ, "PYTHONPATH": ":".join(map(str, path)), "OMP_NUM_THREADS": "1"}
        env |= {"TITAN_FT_TOKEN": "a secret of this run", "TITAN_FT_DRILL_GO": str(self.go)}
        env["GLOO_SOCKET_IFNAME"] = (
            "eth7"  # the name of a host is resolved to nothing here, and Gloo would take the loopback
        )
        with (self._folder / f"{len(self.processes)}-{'abc'[host]}.log").open("w") as log:
            process = subprocess.Popen(
                [*self._hosts.command(host), *command],
                env=env,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if "lighthouse" in command else log,
                stderr=log,
                text=True,
            )
        self.processes.append(process)
        return process

    def start_group(self, host: int, *options: str) -> subprocess.Popen[str]:
        config = str(ROOT / "configs" / "llama3_debug.toml")
        command = [*TITAN_FT, "group", config, "--replicas", "2", "--lighthouse", self.lighthouse]
        return self.start(host, *command, "--run-dir", str(self.paths.root), *options, "--", *FLAGS)

    def start_agent(self, host: int) -> subprocess.Popen[str]:
        """Start the agent of group 0 on a host: the same command on each."""
        rendezvous = f"{self._hosts.address(A)}:29400"
        options = [
            "--replica",
            "0",
            "--ranks-per-node",
            "1",
            "--nodes",
            "2",
            "--rendezvous",
            rendezvous,
        ]
        return self.start_group(host, *options)

    def of(self, kind: type[ev.Event], attempt: int) -> list[Any]:
        """Return the events of an attempt of group 0."""
        events = read_events(self.paths.events)
        return [
            each
            for each in events
            if isinstance(each, kind) and (each.replica, each.attempt) == (0, attempt)
        ]

    def wait_until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + SECONDS
        while not (value := condition()):
            assert time.monotonic() < deadline, f"not within {SECONDS:g} s: {what}\n{self.logs()}"
            time.sleep(0.1)
        return value

    def wait_for_contribution(self, attempt: int) -> None:
        """Wait until an attempt of group 0 contributes to a step of both groups."""

        def contributes() -> bool:
            return any(
                step.contributed and step.participants == [0, 1]
                for step in self.of(ev.StepCommitted, attempt)
            )

        self.wait_until(contributes, f"attempt {attempt} of group 0 contributes")

    def worker(self, attempt: int, rank: int) -> int:
        return next(event.pid for event in self.of(ev.WorkerStarted, attempt) if event.rank == rank)

    def cause(self, attempt: int) -> ev.WorkerExited:
        """Return the end that ended an attempt."""

        def ends() -> list[ev.WorkerExited]:
            return [event for event in self.of(ev.WorkerExited, attempt) if not event.stopped]

        return self.wait_until(ends, f"the end of attempt {attempt} is announced")[0]

    def logs(self) -> str:
        logs = sorted(self._folder.glob("*.log"))
        return "".join(
            f"\n--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs
        )


@pytest.mark.slow
def test_a_group_on_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """The group returns as a whole each time and heals from the other group, and nothing is
    lost.
    """
    job = Job(hosts, tmp_path)
    job.wait_for_contribution(0)
    assert [
        event.host for event in sorted(job.of(ev.WorkerStarted, 0), key=lambda each: each.rank)
    ] == [
        "host-a",
        "host-b",
    ]

    os.kill(job.worker(0, rank=1), signal.SIGKILL)
    job.wait_for_contribution(1)
    assert (job.cause(0).rank, job.cause(0).reason) == (1, "rank 1 was killed by SIGKILL")
    assert job.cause(0).host == "host-b"

    worker = job.worker(1, rank=1)
    job.agents[B].kill()
    assert (job.cause(1).rank, job.cause(1).reason) == (
        1,
        "rank 1 was lost with its host host-b, or with the agent there",
    )
    job.wait_until(lambda: not Path(f"/proc/{worker}").exists(), "the worker ended with its agent")
    job.agents[B] = job.start_agent(B)
    job.wait_for_contribution(2)

    hosts.lose(B)
    assert (job.cause(2).rank, job.cause(2).reason) == (
        1,
        "rank 1 was lost with its host host-b, or with the agent there",
    )
    hosts.plug(B, "up")
    job.agents[B] = job.start_agent(B)
    job.wait_for_contribution(3)

    follower = job.worker(3, rank=1)
    hosts.lose(A)
    job.wait_until(
        lambda: not Path(f"/proc/{follower}").exists(), "the rank without a leader ended"
    )
    assert job.agents[B].poll() is None
    hosts.plug(A, "up")
    job.agents[A] = job.start_agent(A)
    job.wait_for_contribution(4)

    hosts.plug(B, "down")  # and nothing dies: both hosts are there, and do not reach each other
    assert job.cause(4).reason == "rank 1 was lost with its host host-b, or with the agent there"
    hosts.plug(B, "up")
    job.wait_for_contribution(5)

    job.go.touch()
    for process in (job.other_group, job.agents[A], job.agents[B]):
        process.communicate(timeout=SECONDS)
    statuses = [process.returncode for process in (job.other_group, job.agents[A], job.agents[B])]
    assert statuses == [0, 0, 0], job.logs()
    command = [*TITAN_FT, "check", str(job.paths.root)]
    check = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=SECONDS)
    assert check.returncode == 0, check.stdout
