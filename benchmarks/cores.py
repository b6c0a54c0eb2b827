# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Give each group of a launch cores of its own, and see when its standby is ready: by /proc, on Linux."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from benchmarks.run import BenchError, Run
from titan_ft.run.events import Event
from titan_ft.run.process import read_status
from titan_ft.run.workers import latest_workers

LOOK_SECONDS = 0.1
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


def pin_groups(run: Run, events: Sequence[Event]) -> None:
    """Pin each group of a launch to its cores: its supervisor and all that this has started, or will start.

    Raises:
        BenchError: this is not Linux, the cores are too few, or a group has no process.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise BenchError("recovery is measured with pinned groups, which needs Linux")
    for replica, share in enumerate(split_cores(os.sched_getaffinity(0), run.job.num_groups)):
        supervisor = supervisor_of(latest_workers(events, replica))
        for pid in (supervisor, *children(supervisor)):  # in this order: what it starts meanwhile inherits its cores
            for thread in Path(f"/proc/{pid}/task").glob("*"):
                with contextlib.suppress(ProcessLookupError):  # the thread ended meanwhile
                    os.sched_setaffinity(int(thread.name), share)


def supervisor_of(workers: Sequence[int]) -> int:
    """Return the process that started a group's workers.

    Raises:
        BenchError: none of them runs.
    """
    for pid in workers:
        if (status := read_status(pid)) is not None:
            return status.parent
    raise BenchError("a group that is measured has no process")


def children(parent: int) -> list[int]:
    """Return the pids of the processes that `parent` started and that run."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    found = ((pid, read_status(pid)) for pid in pids)
    return [pid for pid, status in found if status is not None and status.parent == parent and not status.ended]


def wait_for_standby(supervisor: int, workers: Collection[int], num_ranks: int, timeout_seconds: float) -> float | None:
    """Wait until a group's standby has imported everything; return the seconds, or None if it has not in time.

    Nothing but its work tells it from outside: a rank that imports wants the CPU, one that is ready sleeps.

    Args:
        workers: pids of those that train.
    """
    began = time.monotonic()
    num_idle = 0
    while (waited := time.monotonic() - began) < timeout_seconds:
        ranks = [pid for pid in children(supervisor) if pid not in workers]
        num_idle = num_idle + 1 if len(ranks) == num_ranks and _sleep(ranks) else 0
        if num_idle == IDLE_LOOKS:
            return waited
        time.sleep(LOOK_SECONDS)
    return None


def _sleep(pids: Sequence[int]) -> bool:
    """Tell whether all threads of all these processes sleep."""
    try:
        statuses = [read_status(pid, int(thread)) for pid in pids for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:  # one ended meanwhile
        return False
    return all(status is not None and status.state == "S" for status in statuses)
