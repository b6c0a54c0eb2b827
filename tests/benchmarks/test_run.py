# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The processes of a run: their ends, and their disturbances."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.run import BenchError, Run, TooLateError
from benchmarks.systems import OURS, PEER, PEER_MODULE, Job
from tests.benchmarks.histories import commit, started
from titan_ft.run.events import FaultInjected, Target
from titan_ft.run.log import encode, read_events

WAIT = "import signal; signal.pause()"


def test_a_run_ends_with_its_training_and_takes_the_services_along(
    starts: Callable[..., None], tmp_path: Path
) -> None:
    starts("pass", "pass", services=(WAIT,))
    with Run(Job(OURS, tmp_path / "run"), {"job": {}}) as run:
        run.wait(30.0)
        processes = [process for _, process in run._started]
        assert processes[-1].poll() is None
    assert all(process.poll() is not None for process in processes)


@pytest.mark.parametrize(
    ("codes", "services"), [((WAIT, "raise ValueError('no')"), ()), ((WAIT,), ("pass",))]
)
def test_a_process_that_ends_early_ends_the_run(
    codes: tuple[str, ...], services: tuple[str, ...], starts: Callable[..., None], tmp_path: Path
) -> None:
    starts(*codes, services=services)
    with (
        pytest.raises(BenchError, match="ended with status"),
        Run(Job(OURS, tmp_path / "run"), {}) as run,
    ):
        run.wait(30.0)
    assert all(process.poll() is not None for _, process in run._started)


def test_a_run_that_takes_too_long_is_stopped(starts: Callable[..., None], tmp_path: Path) -> None:
    starts(WAIT)
    with (
        pytest.raises(TooLateError, match="did not finish within"),
        Run(Job(OURS, tmp_path / "run"), {}) as run,
    ):
        run.wait(0.0)
    assert all(process.poll() is not None for _, process in run._started)


def test_what_a_run_tells_is_waited_for(starts: Callable[..., None], tmp_path: Path) -> None:
    """Steps that only some groups made, or made before, do not count."""
    starts(WAIT)
    with Run(Job(OURS, tmp_path / "run"), {}) as run:
        path = run.paths.events_file("workers")
        path.parent.mkdir()
        path.write_bytes(b"".join(map(encode, [commit(2.0, 2, participants=[0]), commit(1.0, 1)])))
        assert [event.time for event in run.wait_trained(1).events] == [1.0, 2.0]
        with pytest.raises(TooLateError, match="no second step within 0 s"):
            run.wait_for(lambda record: None, "second step", 0.0)
        with path.open("ab") as file:
            file.write(encode(commit(3.0, 3)))
        assert len(run.wait_trained(1, since=1.5).events) == 3
        run._started[0][1].kill()
        with pytest.raises(BenchError, match="ended with status"):
            run.wait_trained(1, since=9.0)


@pytest.mark.parametrize(("system", "mark"), [(OURS, "titan_ft.train"), (PEER, PEER_MODULE)])
def test_only_workers_are_killed_and_the_run_tells_of_it(
    system: str, mark: str, starts: Callable[..., None], tmp_path: Path
) -> None:
    """A pid that has gone to another program since, or is of an earlier attempt, is left alone."""
    starts(WAIT)
    code = "print(flush=True); " + WAIT
    processes = [
        subprocess.Popen([sys.executable, "-c", code, name], stdout=subprocess.PIPE)
        for name in (mark, "other", mark)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it runs
        worker, other, earlier = processes
        with Run(Job(system, tmp_path / "run"), {}) as run:
            path = run.paths.events_file("workers")
            path.parent.mkdir()
            told = [started(1.0, pid=earlier.pid), started(2.0, attempt=1, pid=worker.pid)]
            path.write_bytes(
                b"".join(map(encode, [*told, started(2.0, attempt=1, rank=1, pid=other.pid)]))
            )
            before = time.time()
            kill = run.kill(1)
            assert worker.wait(10.0) == -signal.SIGKILL
            assert [other.poll(), earlier.poll()] == [None, None]
            assert before <= kill.time <= time.time()
            run.inject("kill_lighthouse", Target(lighthouse=True), [worker.pid], signal.SIGKILL)
        first, second = [
            event for event in read_events(run.paths.events) if isinstance(event, FaultInjected)
        ]
        assert (first.fault, first.target, first.shot) == ("sigkill_group", Target(1), 0)
        assert (second.fault, second.shot) == ("kill_lighthouse", 1)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
