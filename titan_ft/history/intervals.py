# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A stretch of time that is cut into intervals without gaps or overlaps, in whole microseconds."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

STATES = (
    "productive",
    "wasted",
    "exchange_wait",
    "detection",
    "quorum",
    "rebuild",
    "wait_for_groups",
    "heal",
    "replay",
    "start",
    "restart",
    "hung",
    "overhead",
    "idle",
    "unknown",
)


@dataclass(frozen=True, slots=True)
class Interval:
    """What one group did from `start_us` to `end_us` (Unix microseconds)."""

    start_us: int
    end_us: int
    state: str
    detail: str = ""

    @property
    def num_us(self) -> int:
        return self.end_us - self.start_us


class Strip:
    """Cuts the time from `begin` to `end` into intervals, from the left to the right.

    In whatever order it is filled, it only goes on from where it is, never beyond the end; what nobody filled is
    "unknown".
    """

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, max(begin, end)
        self.cursor = begin
        self._starts: list[int] = []
        self._states: list[tuple[str, str]] = []

    def fill(self, until: int, state: str, detail: str = "") -> None:
        """Give the time from the cursor to `until` a state; do nothing if the cursor is there already."""
        until = min(until, self.end)
        if until > self.cursor:
            self._starts.append(self.cursor)
            self._states.append((state, detail))
            self.cursor = until

    def paint(self, start: int, end: int, state: str, over: Collection[str], detail: str = "") -> None:
        """Give the time from `start` to `end` a more exact state, where it is in one of the states `over`."""
        start, end = max(start, self.begin), min(end, self.cursor)
        if start >= end:
            return
        first = bisect_right(self._starts, start) - 1
        last = first
        starts: list[int] = []
        states: list[tuple[str, str]] = []
        while last < len(self._starts) and self._starts[last] < end:
            left, before = self._starts[last], self._states[last]
            last += 1
            right = self._starts[last] if last < len(self._starts) else self.cursor
            if before[0] not in over:
                pieces = [(left, before)]
            else:
                pieces = [(left, before)] if left < start else []
                pieces.append((max(left, start), (state, detail)))
                pieces += [(end, before)] if right > end else []
            starts += [place for place, _ in pieces]
            states += [said for _, said in pieces]
        self._starts[first:last] = starts
        self._states[first:last] = states

    def stretches(self, state: str) -> list[tuple[int, int]]:
        """Return start and end of the intervals in a state."""
        pieces = zip(self._starts, self._ends(), self._states, strict=True)
        return [(left, right) for left, right, said in pieces if said[0] == state]

    def _ends(self) -> list[int]:
        return [*self._starts[1:], *([self.cursor] if self._starts else [])]

    def cut(self) -> tuple[Interval, ...]:
        """Return the intervals; neighbours in the same state with the same detail are one."""
        self.fill(self.end, "unknown")
        intervals: list[Interval] = []
        for left, right, (state, detail) in zip(self._starts, self._ends(), self._states, strict=True):
            if intervals and (intervals[-1].state, intervals[-1].detail) == (state, detail):
                left = intervals.pop().start_us
            intervals.append(Interval(left, right, state, detail))
        assert sum(interval.num_us for interval in intervals) == self.end - self.begin, "time was lost or made"
        return tuple(intervals)


def total_us(intervals: Collection[Interval]) -> Counter[str]:
    """Return the microseconds in each state."""
    totals: Counter[str] = Counter()
    for interval in intervals:
        totals[interval.state] += interval.num_us
    return totals
