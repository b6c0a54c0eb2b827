# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A launch whose disk is full: its processes decide although events come late, or never."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from titan_ft.run.appender import any_is_cut, is_cut
from titan_ft.run.log import read_history
from titan_ft.run.paths import RunPaths
from titan_ft.training.finished import finished_step, mark_finished

sys.path.insert(0, str(Path(__file__).parent))

from supervised import Supervised


def steps(run: Any, replica: int, attempt: int = 0) -> list[int]:
    """Return the steps of the commit events, in the order of the file."""
    return [
        e["step"]
        for e in run.events("step_committed")
        if (e["replica"], e["attempt"]) == (replica, attempt)
    ]


def make_steps(run: Any, replica: int, *numbers: int, attempt: int = 0) -> None:
    for number in numbers:
        run.order(replica, 0, attempt, f"step {number}")
        run.wait_obeyed(replica, 0, attempt)


def end(run: Any, replicas: int = 2) -> None:
    for replica in range(replicas):
        run.order(replica, "any", "any", "exit 0")


def worker_files(run: Any, replica: int, attempt: int | str = "*") -> str:
    return RunPaths.workers_pattern(replica, attempt)  # type: ignore[arg-type]


def test_run_goes_on_and_tells_all_when_there_is_room(run_on_disk: Any, small_disk: Any) -> None:
    """A full disk ends neither workers nor agents nor the launcher. A group that dies meanwhile
    returns. At the end the files have all events of living processes, and the status is 0.
    """
    run = run_on_disk
    launcher = run.launch(replicas=2)
    first = [run.worker(replica, 0, 0) for replica in (0, 1)]
    make_steps(run, 0, 1, 2)
    small_disk.fill()
    make_steps(run, 0, *range(3, 15))
    assert any_is_cut(run.paths.events, worker_files(run, 0))
    os.kill(first[1]["pid"], signal.SIGKILL)
    run.worker(1, 0, 1)
    make_steps(run, 1, 8, attempt=1)
    assert run.is_alive(first[0]["pid"])
    assert launcher.poll() is None
    assert len(steps(run, 0)) < 14
    small_disk.free()
    run.wait_until(lambda: not any_is_cut(run.paths.events, "*.jsonl"), what="all files whole")
    end(run)
    printed, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 0
    assert steps(run, 0) == list(range(1, 15))
    assert steps(run, 1, attempt=1) == [8]
    assert [event["attempt"] for event in run.events("replica_restarted")] == [1]
    assert {event["replica"] for event in run.events("events_delayed")} >= {0, 1}
    assert not run.events("events_dropped")
    assert read_history(run.paths.events)[1] == []
    assert "group 1 restarting (attempt 1)" in printed


def test_agent_that_is_killed_on_a_full_disk(run_on_disk: Any, small_disk: Any) -> None:
    """No event about the agent can be written. The launcher sees the exit status of its child,
    reports the death and starts another agent.
    """
    run = run_on_disk
    launcher = run.launch(replicas=2)
    first = [run.worker(replica, 0, 0) for replica in (0, 1)]
    make_steps(run, 0, 1, 2)
    small_disk.fill()
    os.kill(first[1]["parent"], signal.SIGKILL)
    new = run.worker(1, 0, 1)
    assert new["parent"] != first[1]["parent"]
    assert run.is_alive(first[0]["pid"])
    small_disk.free()  # a process that ends waits for room
    end(run)
    printed, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 0
    assert printed.count("group 1 died: its agent was killed by SIGKILL") == 1


def test_run_whose_disk_stays_full(run_on_disk: Any, small_disk: Any) -> None:
    """The run ends with its processes, without any event. The status is 0, and a line on the
    terminal reports the missing events.
    """
    run = run_on_disk
    launcher = run.launch(replicas=2)
    for replica in (0, 1):
        run.worker(replica, 0, 0)
    small_disk.fill()
    for replica in (0, 1):
        make_steps(run, replica, *range(1, 15))
    end(run)
    printed, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, (printed, errors)
    assert "all groups finished" in printed
    for replica in (0, 1):
        assert any_is_cut(run.paths.events, worker_files(run, replica))
    assert "not all events of " in printed


@pytest.mark.slow
def test_lag_is_said_on_the_terminal(run_on_disk: Any, small_disk: Any) -> None:
    """The terminal says why no progress is shown, and when all events are written again."""
    run = run_on_disk
    launcher = run.launch(replicas=1)
    run.worker(0, 0, 0)
    small_disk.fill()
    make_steps(run, 0, *range(1, 15))
    assert launcher.stdout is not None
    lines = []
    while "not all events of 1 process can be written (is the disk full?)" not in "".join(lines):
        lines.append(launcher.stdout.readline())
        assert lines[-1], lines
    small_disk.free()
    while "all events are written again" not in lines[-1]:
        lines.append(launcher.stdout.readline())
        assert lines[-1], lines
    end(run, 1)
    assert launcher.wait(30) == 0


def test_lighthouse_that_dies_on_a_full_disk_comes_back(run_on_disk: Any, small_disk: Any) -> None:
    """The lighthouse cannot write to its log, but the run does not depend on the log."""
    run = run_on_disk
    launcher = run.launch(replicas=1)
    run.worker(0, 0, 0)
    run.wait_until(lambda: run.events("lighthouse_started"), what="the lighthouse's event")
    (first,) = run.events("lighthouse_started")
    small_disk.fill()
    os.kill(first["lighthouse_pid"], signal.SIGKILL)
    address = first["address"].removeprefix("http://").split(":")
    run.wait_until(
        lambda: not Path(f"/proc/{first['lighthouse_pid']}/exe").exists(),
        what="the lighthouse's end",
    )
    run.wait_until(lambda: refuses(*address), what="another lighthouse")
    small_disk.free()
    assert launcher.stdout is not None
    while "it is back at the same address" not in (line := launcher.stdout.readline()):
        assert line, "the run has ended"
    end(run, 1)
    assert launcher.wait(30) == 0


def refuses(host: str, port: str) -> bool:
    """True if a lighthouse closes a connection without the secret. The port alone shows nothing:
    the launcher's socket listens there.
    """
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, int(port)), timeout=1.0) as stranger,
    ):
        stranger.sendall(b"no greeting")
        return stranger.recv(1) == b""
    return False


@pytest.mark.slow
def test_time_that_is_up_on_a_full_disk(run_on_disk: Any, small_disk: Any) -> None:
    """The groups have left in order, although no event says so: status 0."""
    run = run_on_disk
    launcher = run.launch(replicas=2, module="draining_worker", minutes=0.05)
    for replica in (0, 1):
        run.worker(replica, 0, 0)
        make_steps(run, replica, 1)
    run.wait_until(lambda: len(run.events("step_committed")) == 2, what="the first step")
    small_disk.fill()
    for replica in (0, 1):
        make_steps(run, replica, *range(2, 15))
    printed, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, (printed, errors)
    assert "all groups left" in printed
    assert not run.events("drained")


def test_full_at_the_start(run_on_disk: Any, small_disk: Any) -> None:
    """A launch that cannot even write its config is refused with one line."""
    small_disk.fill()
    _, errors = run_on_disk.launch(replicas=1).communicate(timeout=30)
    assert "--run-dir must be a folder that can be written" in errors
    assert "No space left on device" in errors


# Lets a worker's own file of events take no line more, while its smaller files can be written.
FULL = """
import os, resource, time
from titan_ft import train
from titan_ft.run.events import WorkerStarted
train.finish_waiting = lambda: None  # without the seconds that the end of a worker waits for room
for _ in range(60): inject(WorkerStarted(config_digest="", host="", slurm=None))
(own,) = paths.events.glob(f"replica-{replica}-*-{os.getpid()}.jsonl")
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (own.stat().st_size, limit[1]))
"""


@pytest.mark.usefixtures("no_backoff")
def test_crash_loop_of_which_no_commit_is_seen(run: Any) -> None:
    """Attempts whose events cannot be read are no crash loop, because they may have made
    progress.
    """
    crash = f"{FULL}commit(1)\nif attempt == 3: time.sleep(600)\nraise RuntimeError('as always')"
    with Supervised(run, 1, module="crashing_worker", more_env={"CRASH": crash}) as supervised:
        run.wait_until(run.paths.logs(0, 3, 0).exists, 60.0, "the fourth attempt")
        supervised.stop()
        supervised.stop()
        supervised.wait()
    ends = run.events("worker_exited")[:3]
    assert [(end["error"], end["transient"]) for end in ends] == [
        ("RuntimeError: as always", True)
    ] * 3


def test_group_that_was_sent_away_comes_back(
    run_on_disk: Any, small_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event of the leave cannot be written, and is lost. A mark that needs no room replaces it.
    After the end of the job another mark keeps the group away.
    """
    run = run_on_disk
    monkeypatch.setattr("titan_ft.run.log.FINISH_SECONDS", 0.1)
    with Supervised(run, 1, module="draining_worker") as supervised:
        worker = run.worker(0, 0, 0)
        small_disk.fill()
        make_steps(run, 0, *range(1, 15))
        os.kill(worker["pid"], signal.SIGTERM)
        back = run.worker(0, 0, 1)
        mark_finished(run.paths.finished, "c0ffee", 80)
        os.kill(back["pid"], signal.SIGTERM)
        assert supervised.wait(30.0) == 0
    assert finished_step(run.paths.finished, "c0ffee") == 80
    assert not run.events("drained")


def test_group_of_which_nothing_is_known_stays_away(
    run_on_disk: Any,
    small_disk: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A group that ended with status 0, without a last event and without a mark, may have finished.
    It must not train the job again, alone.
    """
    run = run_on_disk
    monkeypatch.setattr("titan_ft.run.log.FINISH_SECONDS", 0.1)
    with Supervised(run, 1) as supervised:
        run.worker(0, 0, 0)
        small_disk.fill()
        make_steps(run, 0, *range(1, 15))
        end(run, 1)
        assert supervised.wait(30.0) == 0
    assert (
        "titan_ft: group 0: it is not started again: its last events could not be written"
        in capfd.readouterr().err
    )
    small_disk.free()
    assert is_cut(next(run.paths.events.glob(worker_files(run, 0))))
    assert not run.events("replica_restarted")


@pytest.mark.slow
def test_crash_loop_beside_commits_that_are_not_seen(run: Any) -> None:
    """A group that is given up does not end a run in which another group trains, even if that group
    has no events.
    """
    run.env["CRASH"] = f"""
if replica == 1: raise RuntimeError("as always")
{FULL}
commit(1)
while not any("replica_gave_up" in path.read_text() for path in paths.events.glob("supervisor-1-*")):
    time.sleep(0.05)
time.sleep(1.0)
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
print("trained on", flush=True)
os._exit(0)
"""
    launcher = run.launch(replicas=2, module="crashing_worker")
    _, errors = launcher.communicate(timeout=90)
    assert launcher.returncode == 1
    assert "1 of 2 groups failed: 1" in errors
    assert "starting again does not help" not in errors
    assert "trained on" in run.paths.logs(0, 0, 0).read_text()
