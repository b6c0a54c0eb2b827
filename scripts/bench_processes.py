# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Find the processes of a launch in /proc, and give each group cores of its own."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from bench_run import BenchError, Run

from titan_ft.run.process import read_command, read_status

LOOK_SECONDS = 0.1
START_SECONDS = 60.0
IDLE_LOOKS = 20
"""Looks in a row at which a standby sleeps, until it counts as ready: its imports are never that long without work."""


def split_cores(cores: Collection[int], num_groups: int) -> list[set[int]]:
    """Give each group as many cores, and no core to two groups.

    Raises:
        BenchError: there are fewer cores than groups.
    """
    each = len(cores) // num_groups
    if not each:
        raise BenchError(f"recovery is measured with a core for each of {num_groups} groups, got {len(cores)}")
    ordered = sorted(cores)
    return [set(ordered[group * each : (group + 1) * each]) for group in range(num_groups)]


def pin_groups(run: Run, num_groups: int) -> list[set[int]]:
    """Pin each group of a launch that has just begun to its cores, and return these.

    The supervisors are pinned, while they still import: their workers and standbys, of all attempts, inherit it.

    Raises:
        BenchError: this is not Linux, the cores are too few, or no supervisors start.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise BenchError("recovery is measured with pinned groups, which needs Linux")
    shares = split_cores(os.sched_getaffinity(0), num_groups)
    deadline = time.monotonic() + START_SECONDS
    while len(found := supervisors(run.pid)) < num_groups:
        if time.monotonic() > deadline or not run.is_running():
            raise BenchError(f"the launch started {len(found)} of {num_groups} supervisors; logs in {run.run_dir}")
        time.sleep(LOOK_SECONDS)
    for replica, pid in found.items():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # the thread ended meanwhile
                os.sched_setaffinity(int(thread.name), shares[replica])
    return shares


def children(parent: int) -> dict[int, list[str]]:
    """Return pid and command line of each running process that `parent` started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # somebody else's, who hides it
            status = read_status(int(folder.name))
            if status is not None and status.parent == parent and (command := read_command(int(folder.name))):
                found[int(folder.name)] = command
    return found


def supervisors(launcher: int) -> dict[int, int]:
    """Return the pid of each group's supervisor."""
    found = {}
    for pid, arguments in children(launcher).items():
        replicas = [argument.removeprefix("--replica=") for argument in arguments if argument.startswith("--replica=")]
        if "titan_ft.launch.supervisor" in arguments and replicas:
            found[int(replicas[0])] = pid
    return found


def lighthouse(launcher: int) -> int | None:
    """Return the pid of the launch's lighthouse, or None while there is none."""
    pids = [pid for pid, arguments in children(launcher).items() if arguments[2:4] == ["titan_ft", "lighthouse"]]
    return pids[0] if pids else None


def wait_for_standby(
    supervisor: int, workers: Callable[[], Collection[int]], num_ranks: int, timeout_seconds: float
) -> float | None:
    """Wait until a group's standby has imported everything; return the seconds, or None if it has not in time.

    Nothing but its work tells it from outside: a rank that imports wants the CPU, one that is ready sleeps.

    Args:
        workers: returns the pids of the workers that train.
    """
    began = time.monotonic()
    num_idle = 0
    while (waited := time.monotonic() - began) < timeout_seconds:
        training = workers()
        ranks = [pid for pid in children(supervisor) if pid not in training]
        num_idle = num_idle + 1 if len(ranks) == num_ranks and _sleep(ranks) else 0
        if num_idle == IDLE_LOOKS:
            return waited
        time.sleep(LOOK_SECONDS)
    return None


def _sleep(pids: Sequence[int]) -> bool:
    """Tell whether all threads of all these processes sleep."""
    try:
        return all(_sleeps(pid, int(thread)) for pid in pids for thread in os.listdir(f"/proc/{pid}/task"))
    except OSError:  # one ended meanwhile
        return False


def _sleeps(pid: int, thread: int) -> bool:
    status = read_status(pid, thread)
    return status is not None and status.state == "S"
