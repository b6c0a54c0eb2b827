# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A stretch of time that is cut into intervals without gaps or overlaps, in whole microseconds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
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
    is_sum: bool = False
    """Whether it is one of three sums over usual steps in a row, and no stretch of time by
    itself.
    """

    @property
    def num_us(self) -> int:
        return self.end_us - self.start_us


class Strip:
    """Cuts the time from `begin` to `end` into intervals, from left to right.

    Each call continues at the current place, never beyond the end. A stretch without a call is
    "unknown".
    """

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, max(begin, end)
        self.cursor = begin
        self._starts: list[int] = []
        self._states: list[tuple[str, str, bool]] = []
        """State, detail and `Interval.is_sum` from each start to the next one, the last up to the
        cursor.
        """

    def fill(self, until: int, state: str, detail: str = "", *, is_sum: bool = False) -> None:
        """Give the time from the cursor to `until` a state; do nothing if the cursor is there
        already.
        """
        until = min(until, self.end)
        if until > self.cursor:
            self._starts.append(self.cursor)
            self._states.append((state, detail, is_sum))
            self.cursor = until

    def paint(
        self, start: int, end: int, state: str, over: Collection[str], detail: str = ""
    ) -> None:
        """Give the time from `start` to `end` a more exact state, where it is in one of the states
        `over`.
        """
        start, end = max(start, self.begin), min(end, self.cursor)
        if start >= end:
            return
        for place in range(self._split(start, over), self._split(end, over)):
            if self._states[place][0] in over:
                self._states[place] = (state, detail, False)

    def _split(self, at: int, over: Collection[str]) -> int:
        """Cut an interval in one of the states `over` in two; return the place of the first one
        from `at` on.
        """
        place = bisect_left(self._starts, at)
        if (
            at < self.cursor
            and self._starts[place : place + 1] != [at]
            and self._states[place - 1][0] in over
        ):
            self._starts.insert(place, at)
            self._states.insert(place, self._states[place - 1])
        return place

    def stretches(self, state: str) -> list[tuple[int, int]]:
        """Return start and end of the intervals in a state."""
        return [(left, right) for left, right, said in self._pieces() if said[0] == state]

    def _pieces(self) -> Iterator[tuple[int, int, tuple[str, str, bool]]]:
        return zip(self._starts, [*self._starts[1:], self.cursor], self._states, strict=False)

    def cut(self) -> tuple[Interval, ...]:
        """Return the intervals; neighbours in the same state with the same detail are one."""
        self.fill(self.end, "unknown")
        intervals: list[Interval] = []
        for left, right, (state, detail, is_sum) in self._pieces():
            if intervals and (intervals[-1].state, intervals[-1].detail) == (state, detail):
                left = intervals.pop().start_us
            intervals.append(Interval(left, right, state, detail, is_sum))
        assert sum(interval.num_us for interval in intervals) == self.end - self.begin, (
            "time was lost or made"
        )
        return tuple(intervals)
