# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torchrun itself, which starts workers again only where that can help; the workers' entry is real, training is not."""

from __future__ import annotations

import socket
import subprocess
from typing import Any

import pytest


def torchrun(run: Any, crash: str, *options: str, ranks: int = 2) -> subprocess.Popen[str]:
    run.env["CRASH"] = crash
    flags = [f"--job.dump_folder={run.paths.root}", "--fault_tolerance.replica_id=3"]
    command = ["-m", "titan_ft.launch.torchrun", f"--nproc-per-node={ranks}", "--max-restarts=9", *options]
    return run.start(*command, "-m", "crashing_worker", *flags)


def test_a_wrong_config_is_not_started_again(run: Any) -> None:
    """The status is that of the worker, and one line says why; the events have it too."""
    crash = "from titan_ft.config import ConfigError\nif rank == 1: raise ConfigError('x must be y, got z')"
    process = torchrun(run, crash, "--standalone")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert (
        "titan_ft: replica 3: rank 1 ended with exit status 2; the configuration is wrong (exit status 2); it is not "
        "started again; ConfigError: x must be y, got z\n"
    ) in errors
    ends = {(event["rank"], event["stopped"], event.get("error")) for event in run.events("worker_exited")}
    assert ends == {(1, False, "ConfigError: x must be y, got z"), (0, True, None)}
    (gave_up,) = run.events("replica_gave_up")
    assert (gave_up["replica"], gave_up["attempt"]) == (3, 0)
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_crash_loop_ends(run: Any) -> None:
    """Kills and steps are no part of one; what torchrun itself ends is not the cause."""
    crash = """
import os, signal, time
if attempt == 0 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)
if attempt == 2 and rank == 1: commit(1)
if rank == 1: raise KeyError("nope")
"""
    process = torchrun(run, crash, "--standalone")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "the same exception 3 times in a row, and no step committed between; KeyError: 'nope'" in errors
    restarts = [(event["attempt"], event["reason"]) for event in run.events("replica_restarted")]
    failed = "rank 1 ended with exit status 1"
    # The exception of attempt 2 came after a commit: the row begins with it.
    assert restarts == [(1, "rank 1 was killed by SIGKILL"), (2, failed), (3, failed), (4, failed)]
    assert {(event["rank"], event["stopped"]) for event in run.events("worker_exited")} == {(1, False), (0, True)}


@pytest.mark.slow
def test_all_nodes_of_a_group_end(run: Any) -> None:
    """Where the group must not come back, the agent of the other node ends as well."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=x"]
    crash = """
import os, pathlib
from titan_ft.replica.errors import DivergedError
if rank == 1: raise DivergedError("two states")
while not (paths.events.parent / "logs").exists(): __import__("time").sleep(0.05)
raise ConnectionError("lost rank 1")
"""
    nodes = [torchrun(run, crash, *options, ranks=1) for _ in range(2)]
    run.wait_until(lambda: any(node.poll() == 3 for node in nodes), 60.0, "the node of rank 1 ended")
    (run.paths.root / "logs").mkdir()
    errors = [node.communicate(timeout=60)[1] for node in nodes]
    assert sorted(node.returncode for node in nodes) == [1, 3], errors
    assert any("DivergedError: two states" in text for text in errors)
