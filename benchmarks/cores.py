# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Give each group of a launch cores of its own: by /proc, on Linux."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from benchmarks.run import BenchError, Run
from titan_ft.run.events import Event
from titan_ft.run.workers import latest_workers
from titan_ft.system.process import read_status


def split_cores(cores: Collection[int], num_groups: int) -> list[set[int]]:
    """Give each group as many cores, and no core to two groups.

    Raises:
        BenchError: there are fewer cores than groups.
    """
    each = len(cores) // num_groups
    if not each:
        raise BenchError(
            f"recovery is measured with a core for each of {num_groups} groups, got {len(cores)}"
        )
    ordered = sorted(cores)
    return [set(ordered[group * each : (group + 1) * each]) for group in range(num_groups)]


def pin_groups(run: Run, events: Sequence[Event]) -> None:
    """Pin each group of a launch to its cores: its agent, and all present and later children.

    Raises:
        BenchError: this is not Linux, the cores are too few, or a group has no process.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise BenchError("recovery is measured with pinned groups, which needs Linux")
    for replica, share in enumerate(split_cores(os.sched_getaffinity(0), run.job.num_groups)):
        agent = agent_of(latest_workers(events, replica))
        # In this order: what it starts meanwhile inherits its cores.
        for pid in (agent, *children(agent)):
            for thread in Path(f"/proc/{pid}/task").glob("*"):
                with contextlib.suppress(ProcessLookupError):  # the thread ended meanwhile
                    os.sched_setaffinity(int(thread.name), share)


def agent_of(workers: Sequence[int]) -> int:
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
    return [
        pid
        for pid, status in found
        if status is not None and status.parent == parent and not status.ended
    ]
