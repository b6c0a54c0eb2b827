# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Groups on cores of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.cores import agent_of, children, pin_groups, split_cores
from benchmarks.run import BenchError, Run
from benchmarks.systems import OURS, Job
from tests.benchmarks.histories import started

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
SLEEP = "print(flush=True); import time; time.sleep(60)"


def test_no_core_goes_to_two_groups() -> None:
    assert split_cores([5, 3, 4, 0, 1], 2) == [{0, 1}, {3, 4}]
    with pytest.raises(BenchError, match="a core for each"):
        split_cores([0], 2)


@pytest.fixture
def start() -> Iterator[Callable[..., int]]:
    """Start Python programs, and end them."""
    processes: list[subprocess.Popen[bytes]] = []

    def run(code: str, *arguments: str) -> int:
        process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()  # it runs
        return process.pid

    yield run
    for process in processes:
        process.kill()
        process.communicate()


@needs_proc
def test_children_and_parents_are_found(start: Callable[..., int]) -> None:
    pid = start(SLEEP)
    assert pid in children(os.getpid())
    assert agent_of([2**22 + 1, pid]) == os.getpid()
    with pytest.raises(BenchError, match="has no process"):
        agent_of([2**22 + 1])


AGENT = """
import subprocess, sys
command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
workers = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(2)]
print(*(worker.pid for worker in workers), flush=True)
sys.stdin.read()
"""


@needs_proc
@pytest.mark.skipif(os.cpu_count() == 1, reason="needs a core for each of two groups")
def test_groups_are_pinned_to_different_cores(starts: Callable[..., None], tmp_path: Path) -> None:
    """All workers of a group and their agents are pinned to the group's core."""
    starts("import signal; signal.pause()")
    pipe = subprocess.PIPE
    agents = [
        subprocess.Popen([sys.executable, "-c", AGENT], stdin=pipe, stdout=pipe) for _ in range(2)
    ]
    try:
        workers = []
        for agent in agents:
            assert agent.stdout is not None
            workers.append([int(pid) for pid in agent.stdout.readline().split()])
        with Run(Job(OURS, tmp_path / "run"), {}) as run:
            pin_groups(
                run, [started(0.0, replica, pid=pids[0]) for replica, pids in enumerate(workers)]
            )
        shares = split_cores(os.sched_getaffinity(0), 2)
        for agent, pids, share in zip(agents, workers, shares, strict=True):
            assert [os.sched_getaffinity(pid) for pid in (agent.pid, *pids)] == [share] * 3
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()


def test_a_launch_without_workers_cannot_be_pinned(
    starts: Callable[..., None], tmp_path: Path
) -> None:
    starts("import signal; signal.pause()")
    with (
        pytest.raises(BenchError, match=r"has no process|a core for each"),
        Run(Job(OURS, tmp_path / "run"), {}) as run,
    ):
        pin_groups(run, [])
