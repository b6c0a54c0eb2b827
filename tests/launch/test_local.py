# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The launcher of a run, with fake workers, real processes and real signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


def children(pid: int) -> list[int]:
    """List the processes that a process started and that still are its children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_killed_group_is_restarted_alone(run: Any) -> None:
    """One group dies and comes back; the other is not touched; plain lines tell it; status 0 when all finished."""
    launcher = run.launch(replicas=2, worker_args=["--training.steps=3"])
    first = [run.worker(replica, 0, 0) for replica in (0, 1)]
    assert first[0]["argv"][-1] == "--training.steps=3"
    tokens = {worker["env"]["TITAN_FT_TOKEN"] for worker in first}
    assert len(tokens) == 1
    assert len(tokens.pop()) >= 32
    assert first[0]["env"]["TORCHFT_LIGHTHOUSE"].startswith("http://127.0.0.1:")
    assert first[0]["env"]["RUST_LOG"] == os.environ.get("RUST_LOG", "warn")

    run.order(0, 0, 0, "step 7")
    run.wait_obeyed(0, 0, 0)
    os.kill(first[1]["pid"], signal.SIGKILL)
    run.worker(1, 0, 1)
    assert run.is_alive(first[0]["pid"])
    for replica in (0, 1):
        run.order(replica, "any", "any", "exit 0")
    printed, errors = launcher.communicate(timeout=20)
    assert (launcher.returncode, errors) == (0, "")
    lines = [line.split("] ", 1)[1] for line in printed.splitlines()]
    assert lines[0].startswith("lighthouse at http://127.0.0.1:")
    assert "replica 1 died: rank 0 was killed by SIGKILL" in lines
    assert "replica 1 restarting (attempt 1)" in lines
    assert any(line.startswith("step 7  loss 3.25000  groups 2/2") for line in lines)
    assert lines[-1].startswith("all groups finished")
    assert not any("replica 0 died" in line for line in lines)
    assert run.events("launch_finished")[0]["code"] == 0
    assert run.all_gone()


def test_signal_stops_everything_it_started(run: Any) -> None:
    """Ctrl-C (SIGINT to the launcher's process group) ends lighthouse, supervisors, workers, and nothing else."""
    launcher = run.launch(replicas=2)
    stranger = run.start("-c", "import time; time.sleep(600)")
    for replica in (0, 1):
        run.worker(replica, 0, 0)
    started = children(launcher.pid)
    assert len(started) == 3
    os.killpg(launcher.pid, signal.SIGINT)
    printed, _ = launcher.communicate(timeout=15)
    assert launcher.returncode == 1
    assert "stopping all groups" in printed
    assert "died" not in printed
    assert run.all_gone()
    assert not any(run.is_alive(pid) for pid in started)
    assert stranger.poll() is None


def test_killed_launcher_leaves_no_orphans(run: Any) -> None:
    """After SIGKILL of the launcher all that it started ends within seconds, also workers that ignore SIGTERM."""
    launcher = run.launch(replicas=2)
    for replica in (0, 1):
        run.worker(replica, 0, 0)
    run.order(0, 0, 0, "ignore")
    run.wait_obeyed(0, 0, 0)
    started = children(launcher.pid)
    launcher.kill()
    run.wait_until(lambda: run.all_gone() and not any(run.is_alive(pid) for pid in started), 5.0, "all gone")


def test_killed_supervisor_and_lighthouse(run: Any) -> None:
    """A killed supervisor leaves no workers and fails only its group; without a lighthouse the run ends and says so."""
    launcher = run.launch(replicas=2)
    workers = [run.worker(replica, 0, 0) for replica in (0, 1)]
    lighthouse, *supervisors = children(launcher.pid)
    os.kill(supervisors[0], signal.SIGKILL)
    run.wait_until(lambda: not run.is_alive(workers[0]["pid"]), 5.0, "workers of the killed supervisor gone")
    assert run.is_alive(workers[1]["pid"])
    os.kill(lighthouse, signal.SIGKILL)
    _, errors = launcher.communicate(timeout=15)
    assert launcher.returncode == 1
    assert "supervisor of replica 0 ended (SIGKILL)" in errors
    assert "the lighthouse ended (SIGKILL), so all groups are stopped" in errors
    assert run.all_gone()


def test_bad_config_ends_the_run(run: Any) -> None:
    """When the workers of one group refuse the config, the run ends with status 2 and their line."""
    run.order(1, "any", "any", "exit 2")
    launcher = run.launch(replicas=2)
    printed, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 2
    assert "leaving with 2" in printed
    assert run.all_gone()
