# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure a change of membership: from the quorum's reply until every rank has met its
counterparts.

The ranks are threads of some processes (`meeting_ranks.py`), and run the real code without a model.
Groups die and return one after the other. All ranks share the cores of this machine, unlike in a
job.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.meeting_ranks import COLUMNS, GLOO, STORE
from benchmarks.run import BenchError, progress

SIZES = ((2, 1), (2, 8), (30, 1), (30, 8), (100, 1), (100, 8), (300, 1))
"""Groups, and ranks of each."""
EXTRAPOLATED = ((12, 8192), (8, 1000))
CHANGES = 3
"""Deaths, each with a return."""
LARGEST_STORE = 100_000
"""Pairs of ranks that read each other's address: by one store, each pair is a request."""
LARGEST_GLOO = 100
"""Ranks of a job that are connected by Gloo: of more, the connections would be more than a process
may have files.
"""

_RANKS_OF_A_PROCESS = 100
_MOST_PROCESSES = 8
_AHEAD_SECONDS = 0.5
"""Until all processes have read an order."""
_ROOT = Path(__file__).parents[1]


class Job:
    """Processes of groups.

    Args:
        kind: see `meeting_ranks`.
        num_ranks: of a group.
    """

    def __init__(self, kind: str, num_groups: int, num_ranks: int) -> None:
        self._num_groups = num_groups
        wanted = max(2, num_groups * num_ranks // _RANKS_OF_A_PROCESS)
        self._num_processes = min(wanted, num_groups, _MOST_PROCESSES)
        command = [sys.executable, "-m", "benchmarks.meeting_ranks", kind, str(num_ranks)]
        # As the process that serves a group's store has it: no address of a peer is looked up.
        environ = os.environ | {"RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        pipe = subprocess.PIPE
        self._processes = [
            subprocess.Popen(command, cwd=_ROOT, env=environ, stdin=pipe, stdout=pipe, text=True)
            for _ in range(self._num_processes)
        ]
        self._names: dict[int, str] = {}
        self._last_id = 0
        self.cpu_seconds = 0.0
        """Of all processes, in all meetings."""

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.communicate()

    def start(self, slots: Sequence[int]) -> None:
        """Start groups, or start them again."""
        shares = [
            [slot for slot in slots if slot % self._num_processes == each]
            for each in range(self._num_processes)
        ]
        answers = self._order([{"start": share} for share in shares])
        for share, names in zip(shares, answers, strict=True):
            self._names.update(zip(share, names, strict=True))

    def meet(self, without: int | None = None) -> float:
        """Let all groups but one meet; returns the seconds from the quorum's reply until the last
        rank is ready.
        """
        self._last_id += 1
        members = [name for slot, name in sorted(self._names.items()) if slot != without]
        at = time.monotonic() + _AHEAD_SECONDS
        order = {"members": members, "id": self._last_id, "at": at}
        answers = self._order([order] * self._num_processes)
        self.cpu_seconds += sum(cpu for _, cpu in answers)
        return float(max(end for end, _ in answers) - at)

    def _order(self, orders: Sequence[Mapping[str, Any]]) -> list[Any]:
        for process, order in zip(self._processes, orders, strict=True):
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the answer that is missing says so
                process.stdin.write(json.dumps(order) + "\n")
                process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            try:
                answers.append(json.loads(process.stdout.readline()))
            except ValueError:
                raise BenchError("groups ended without an answer") from None
        return answers


def measure_meetings(
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and figures of each size of a job, by each way, and the formula that they
    follow.
    """
    found = []
    for num_groups, num_ranks in sizes:
        for kind in (COLUMNS, STORE, GLOO):
            if kind == GLOO and num_groups * num_ranks > LARGEST_GLOO:
                continue
            if kind == STORE and num_groups**2 * num_ranks > LARGEST_STORE:
                continue
            figures = measure(kind, num_groups, num_ranks)
            if kind == COLUMNS:
                found.append(figures)
            yield f"meeting-{kind}-{num_groups}-{num_ranks}", figures
    yield "meeting-formula", fit(found)


def measure(
    kind: str, num_groups: int, num_ranks: int, num_changes: int = CHANGES
) -> dict[str, Any]:
    """Let groups meet, die and return.

    Returns:
        Seconds of the `first` meeting, and of those after a death (`death`) and a return
        (`return`), the medians; milliseconds of CPU that a meeting takes for each rank
        (`rank_cpu`).

    Raises:
        BenchError: a process has ended.
    """
    with contextlib.closing(Job(kind, num_groups, num_ranks)) as job:
        job.start(range(num_groups))
        first = job.meet()
        deaths, returns = [], []
        for change in range(num_changes):
            # The groups that came first lead most columns: let these and others die.
            slot = change * num_groups // num_changes
            deaths.append(job.meet(without=slot))
            job.start([slot])
            returns.append(job.meet())
        cpu = job.cpu_seconds / (1 + 2 * num_changes) / (num_groups * num_ranks)
    figures = {
        "kind": kind,
        "groups": num_groups,
        "ranks": num_ranks,
        "first": first,
        "death": statistics.median(deaths),
        "return": statistics.median(returns),
        "rank_cpu": 1000 * cpu,
    }
    progress(
        f"{kind}, {num_groups} groups of {num_ranks}: {figures['death']:.3f} s, {figures['return']:.3f} s"
    )
    return figures


def fit(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fit `seconds = a + b x groups x ranks` to the product's meetings, which share these cores.

    Returns:
        `a` and `b`, by least squares of the relative errors, and `shared`, the seconds of
        `EXTRAPOLATED` sizes on these cores.
    """
    slower = [max(figures["death"], figures["return"]) for figures in measured]
    sizes = [figures["groups"] * figures["ranks"] for figures in measured]
    b, a = statistics.linear_regression(sizes, slower)
    shared = {f"{groups}-{ranks}": a + b * groups * ranks for groups, ranks in EXTRAPOLATED}
    return {"a": a, "b": b, "shared": shared}
