# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Fold a run's events into time: what each group did from the job's begin to its end, without gaps or overlaps.

| state | a group is in it while |
| --- | --- |
| productive | it computes, or applies, a step that counts: forward, backward, data; clipping and the optimizer |
| wasted | it computes what is thrown away: killed in mid-step, its gradient left out, its state not the job's |
| exchange_wait | its training thread waits in an exchange that works, or for others to come to it |
| detection | an exchange is broken, from the failure (else from the begin of the wait) until that is noticed |
| quorum | it waits for the lighthouse's answer, also for a lighthouse that is down |
| rebuild | it builds the process group |
| wait_for_groups | the job has too few groups: at its first meeting, below `min_replica_size`, or held for a joiner |
| heal | it fetches the state from a donor, from the begin of the heal until the state is there |
| replay | it applies the updates that were made meanwhile |
| start | its first process starts, until it asks for its first quorum |
| restart | it is dead, from its death until the next process asks for its first quorum |
| hung | it lives and does nothing: stopped (SIGSTOP) or deadlocked |
| overhead | it is between two steps: digests, logging, checkpoints, validation |
| idle | it has finished, was drained or stopped for good, or gave up |
| unknown | there is no event, as at the end of a history that was cut |

What is hidden behind forward and backward (most quorums, a donor's transfers) is productive time: it costs nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from titan_ft.history.group_time import GroupFold, Unfinished
from titan_ft.history.intervals import Interval, total_us
from titan_ft.history.record import RunRecord, view


@dataclass(frozen=True)
class Timeline:
    """What each group did from `begin_us` to `end_us` (Unix microseconds)."""

    begin_us: int
    end_us: int
    groups: dict[int, tuple[Interval, ...]]
    unfinished: tuple[Unfinished, ...]

    @property
    def wall_us(self) -> int:
        return self.end_us - self.begin_us

    def totals_us(self, replica: int) -> Counter[str]:
        """Return a group's microseconds in each state; they add up to `wall_us`, exactly."""
        return total_us(self.groups[replica])


@view
def timeline(record: RunRecord) -> Timeline:
    """Return what each group did from the job's begin to its end."""
    folds = {replica: GroupFold(record, replica) for replica in record.groups}
    groups = {replica: fold.run() for replica, fold in folds.items()}
    unfinished = tuple(one for fold in folds.values() for one in fold.unfinished)
    return Timeline(*record.span_us, groups, unfinished)
