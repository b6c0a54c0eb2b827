# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The processor time of a job's processes and of their threads, by /proc, on Linux.

Wall time of a step depends on all that runs on the machine. The processor time that the job takes
depends far less."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.run import BenchError

MAIN_THREAD, ENDED_THREADS = "main", "ended"


@dataclass(frozen=True)
class Seconds:
    """Processor time that a process has taken, in seconds.

    Attributes:
        threads: of its living threads, by name.
    """

    user: float
    system: float
    threads: Mapping[str, float]

    @property
    def total(self) -> float:
        """Return user and system time together."""
        return self.user + self.system


Sample = Mapping[int, Seconds]
"""Of each process of a job, by pid."""


@dataclass(frozen=True)
class _Stat:
    parent: int
    name: str
    user: float
    system: float


class ProcessorClock:
    """Samples the processor time of some processes and of all their descendants.

    Args:
        roots: pids of the processes that were started for a job.
    """

    def __init__(self, roots: Collection[int]) -> None:
        self._roots = frozenset(roots)
        self._times: list[float] = []
        self._samples: list[Sample] = []

    def sample(self) -> Sample:
        """Read the processor time of each process of the job now."""
        stats = {int(folder.name): _read_stat(folder) for folder in Path("/proc").glob("[0-9]*")}
        running = {pid: stat for pid, stat in stats.items() if stat is not None}
        found = {}
        for pid, stat in running.items():
            if self._is_of_job(pid, running):
                found[pid] = Seconds(stat.user, stat.system, _read_threads(pid))
        self.add(time.time(), found)
        return found

    def add(self, when: float, sample: Sample) -> None:
        """Note a sample of a moment (Unix seconds)."""
        self._times.append(when)
        self._samples.append(sample)

    def _is_of_job(self, pid: int, running: Mapping[int, _Stat]) -> bool:
        while pid in running:
            if pid in self._roots:
                return True
            pid = running[pid].parent
        return False

    def per_step(self, begin: float, end: float, steps: int, num_ranks: int) -> dict[str, Any]:
        """Return the processor seconds of a step, from `begin` to `end` (Unix seconds).

        Returns:
            `user` and `system` time of all ranks together, `others`: the time of all other
                processes of the job, and
            `threads`: the time of the ranks' threads by name. The ranks are the processes that took
                the most.

        Raises:
            BenchError: there is no /proc.
        """
        if not any(self._samples):
            raise BenchError(
                "the processor time of a step is read from /proc, which only Linux has"
            )
        first, last = self._at(begin), self._at(end)
        taken = {
            pid: _subtract(seconds, first[pid]) for pid, seconds in last.items() if pid in first
        }
        ordered = sorted(taken.values(), key=lambda seconds: seconds.total, reverse=True)
        ranks, others = ordered[:num_ranks], ordered[num_ranks:]
        threads: defaultdict[str, float] = defaultdict(float)
        for rank in ranks:
            for name, seconds in rank.threads.items():
                threads[name] += seconds
            threads[ENDED_THREADS] += rank.total - sum(rank.threads.values())
        return {
            "user": sum(rank.user for rank in ranks) / steps,
            "system": sum(rank.system for rank in ranks) / steps,
            "others": sum(other.total for other in others) / steps,
            "threads": {name: seconds / steps for name, seconds in threads.items()},
        }

    def _at(self, when: float) -> Sample:
        """Return what the processes had taken at a moment, between the samples before and after
        it.
        """
        after = min(max(bisect_left(self._times, when), 1), len(self._times) - 1)
        before = after - 1
        share = (when - self._times[before]) / (self._times[after] - self._times[before])
        share = min(max(share, 0.0), 1.0)
        early, late = self._samples[before], self._samples[after]
        return {pid: _between(early[pid], late.get(pid, early[pid]), share) for pid in early}


def _between(early: Seconds, late: Seconds, share: float) -> Seconds:
    threads = {name: early.threads.get(name, 0.0) for name in {*early.threads, *late.threads}}
    for name, seconds in threads.items():
        threads[name] = seconds + share * (late.threads.get(name, seconds) - seconds)
    user = early.user + share * (late.user - early.user)
    system = early.system + share * (late.system - early.system)
    return Seconds(user, system, threads)


def _subtract(late: Seconds, early: Seconds) -> Seconds:
    threads = {
        name: seconds - early.threads.get(name, 0.0) for name, seconds in late.threads.items()
    }
    return Seconds(late.user - early.user, late.system - early.system, threads)


def _read_threads(pid: int) -> dict[str, float]:
    threads: defaultdict[str, float] = defaultdict(float)
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        stat = _read_stat(folder)
        if stat is not None:
            name = MAIN_THREAD if folder.name == str(pid) else stat.name
            threads[name] += stat.user + stat.system
    return dict(threads)


def _read_stat(folder: Path) -> _Stat | None:
    """Return what proc(5) calls fields 2, 4, 14 and 15; None of a process or thread that is
    gone.
    """
    try:
        head, _, tail = (folder / "stat").read_text().rpartition(")")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields: Sequence[str] = tail.split()
    ticks = os.sysconf("SC_CLK_TCK")
    return _Stat(
        int(fields[1]), head.partition("(")[2], int(fields[11]) / ticks, int(fields[12]) / ticks
    )
