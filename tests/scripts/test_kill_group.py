# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause

"""scripts/kill_group.py on a folder of events and real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.event_builder import build
from titan_ft.run.events import Event, FaultInjected, StepCommitted, Target, WorkerStarted
from titan_ft.run.log import encode, read_events

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_group.py"
Process = subprocess.Popen[bytes]


@pytest.fixture
def start() -> Iterator[Callable[[str], Process]]:
    """Start waiting processes with a name in their command lines, and end them after the test."""
    processes: list[Process] = []

    def start_one(name: str) -> Process:
        processes.append(
            subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", name])
        )
        return processes[-1]

    yield start_one
    for process in processes:
        process.kill()
        process.wait()


def write(run_dir: Path, *events: Event) -> None:
    folder = run_dir / "events"
    folder.mkdir(exist_ok=True)
    for moment, event in enumerate(events, start=1):
        event.time = event.mono = float(moment)
    (folder / "workers.jsonl").write_bytes(b"".join(map(encode, events)))


def started(replica: int, attempt: int, process: Process) -> Event:
    return build(WorkerStarted, replica=replica, attempt=attempt, pid=process.pid)


def committed(replica: int, step: int) -> Event:
    return build(StepCommitted, replica=replica, step=step)


def kill_group(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(run_dir), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_it_kills_all_of_the_groups_latest_attempt_and_nothing_else(
    tmp_path: Path, start: Callable[[str], Process]
) -> None:
    """Both ranks die; another group, an earlier attempt and a process with a reused pid live; the
    fault is recorded.
    """
    other, earlier, rank0, rank1 = (start("titan_ft.train") for _ in range(4))
    stranger = start("editor")
    write(
        tmp_path,
        started(0, 0, other),
        started(1, 0, earlier),
        started(1, 1, rank0),
        started(1, 1, rank1),
        started(1, 1, stranger),
        committed(1, 7),
    )
    result = kill_group(tmp_path, "--replica", "1", "--at-step", "7")
    assert result.returncode == 0, result.stderr
    assert {rank0.wait(10), rank1.wait(10)} == {-signal.SIGKILL}
    assert [process.poll() for process in (other, earlier, stranger)] == [None, None, None]
    (fault,) = [
        event for event in read_events(tmp_path / "events") if isinstance(event, FaultInjected)
    ]
    assert (fault.fault, fault.target, fault.seed) == ("kill_group", Target(1), None)


def test_it_waits_for_the_groups_own_step(tmp_path: Path, start: Callable[[str], Process]) -> None:
    """A step that only another group committed does not count. The deadline ends the wait with a
    message.
    """
    worker = start("titan_ft.train")
    write(tmp_path, started(1, 0, worker), committed(0, 9), committed(1, 8))
    result = kill_group(tmp_path, "--replica", "1", "--at-step", "9", "--timeout-seconds", "0.5")
    assert result.returncode == 1
    assert "group 1 did not commit step 9 within 0.5 s" in result.stderr
    assert worker.poll() is None


def test_a_group_without_a_live_worker_is_named(tmp_path: Path) -> None:
    """Without a process to kill the script fails, and records no fault."""
    write(tmp_path, committed(1, 3))
    result = kill_group(tmp_path, "--replica", "1")
    assert result.returncode == 1
    assert "group 1 has no live worker on this host" in result.stderr
    assert not [
        event for event in read_events(tmp_path / "events") if isinstance(event, FaultInjected)
    ]
