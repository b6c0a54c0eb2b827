# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The ranks of a run that differ from the others in speed or memory; empty if all are alike."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from titan_ft.history.record.run_record import RunRecord, once_per_record
from titan_ft.run.events import StepCommitted, WorkerStarted

SLOWER = 1.2
"""A rank whose usual computing takes so many times the others' is slow."""
MORE_MEMORY = 1.25
"""A rank whose memory is so many times the others' holds too much."""


@dataclass(frozen=True)
class RankFigures:
    """The figures of one rank of a group, over all its attempts."""

    group: int
    rank: int
    hosts: str
    compute_seconds: float
    """Median of its forward and backward passes of a step."""
    times_others: float
    """`compute_seconds` as a multiple of the median rank's."""
    memory_bytes: int | None
    """At most."""
    memory_times_others: float | None


@once_per_record
def find_odd_ranks(record: RunRecord) -> list[RankFigures]:
    """Return the ranks that differ from the others, the slowest first."""
    commits: dict[tuple[int, int], list[StepCommitted]] = defaultdict(list)
    hosts: dict[tuple[int, int], dict[str, None]] = defaultdict(dict)
    for event in record.of(StepCommitted):
        commits[event.replica, event.rank].append(event)
    for started in record.of(WorkerStarted):
        hosts[started.replica, started.rank][started.node] = None
    computing: dict[tuple[int, int], float] = {}
    memory: dict[tuple[int, int], int] = {}
    for key, made in commits.items():
        computing[key] = median(event.compute_seconds for event in made)
        memory[key] = max(event.memory_bytes or 0 for event in made)
    if not commits:
        return []
    usual = median(computing.values())
    usual_memory = median(memory.values())
    odd = []
    for key, seconds in computing.items():
        times_others = 1.0
        if usual:
            times_others = seconds / usual
        memory_times_others = None
        if usual_memory:
            memory_times_others = memory[key] / usual_memory
        is_slow = times_others > SLOWER
        holds_more = (memory_times_others or 1.0) > MORE_MEMORY
        if not is_slow and not holds_more:
            continue
        figures = RankFigures(
            *key,
            hosts=", ".join(hosts[key]),
            compute_seconds=seconds,
            times_others=times_others,
            memory_bytes=memory[key] or None,
            memory_times_others=memory_times_others,
        )
        odd.append(figures)
    return sorted(odd, key=lambda each: -each.times_others)
