# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The ranks of a run that differ from the others in speed or memory; empty if all are alike."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from titan_ft.history.record.run_record import RunRecord, view
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
    """That, as a multiple of the median rank's."""
    memory_bytes: int | None
    """At most."""
    memory_times_others: float | None


@view
def find_odd_ranks(record: RunRecord) -> list[RankFigures]:
    """Return the ranks that differ from the others, the slowest first."""
    commits: dict[tuple[int, int], list[StepCommitted]] = defaultdict(list)
    hosts: dict[tuple[int, int], dict[str, None]] = defaultdict(dict)
    for event in record.of(StepCommitted):
        commits[event.replica, event.rank].append(event)
    for started in record.of(WorkerStarted):
        hosts[started.replica, started.rank][started.node] = None
    computing = {
        rank: median(event.compute_seconds for event in made) for rank, made in commits.items()
    }
    memory = {
        rank: max((event.memory_bytes or 0 for event in made), default=0)
        for rank, made in commits.items()
    }
    usual, usual_memory = (
        median(values.values()) if values else 0 for values in (computing, memory)
    )
    figures = [
        RankFigures(
            *rank,
            hosts=", ".join(hosts[rank]),
            compute_seconds=seconds,
            times_others=seconds / usual if usual else 1.0,
            memory_bytes=memory[rank] or None,
            memory_times_others=memory[rank] / usual_memory if usual_memory else None,
        )
        for rank, seconds in computing.items()
    ]
    odd = [
        each
        for each in figures
        if each.times_others > SLOWER or (each.memory_times_others or 1.0) > MORE_MEMORY
    ]
    return sorted(odd, key=lambda each: -each.times_others)
