# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A stretch of time that is cut into intervals without gaps or overlaps, in whole microseconds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

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


class _Label(NamedTuple):
    """The state of a stretch; see `Interval`."""

    state: str
    detail: str
    is_sum: bool


class Strip:
    """Cuts the time from `begin` to `end` into intervals, from left to right.

    Each call continues at the current place, never beyond the end. A stretch without a call is
    "unknown".
    """

    def __init__(self, begin: int, end: int) -> None:
        self.begin = begin
        self.end = max(begin, end)
        self.cursor = begin
        self._starts: list[int] = []
        """The begin of each stretch. It ends at the next begin, the last one at the cursor."""
        self._labels: list[_Label] = []

    def fill(self, until: int, state: str, detail: str = "", *, is_sum: bool = False) -> None:
        """Give the time from the cursor to `until` a state; do nothing if the cursor is there
        already.
        """
        until = min(until, self.end)
        if until > self.cursor:
            self._starts.append(self.cursor)
            self._labels.append(_Label(state, detail, is_sum))
            self.cursor = until

    def paint(
        self, start: int, end: int, state: str, over: Collection[str], detail: str = ""
    ) -> None:
        """Give the time from `start` to `end` a more exact state, where it is in one of the states
        `over`.
        """
        start = max(start, self.begin)
        end = min(end, self.cursor)
        if start >= end:
            return
        # In this order: a cut at the start moves all later places on by one.
        first = self._split(start, over)
        after_last = self._split(end, over)
        for place in range(first, after_last):
            if self._labels[place].state in over:
                self._labels[place] = _Label(state, detail, is_sum=False)

    def _split(self, at: int, over: Collection[str]) -> int:
        """Cut the stretch around `at` in two if its state is in `over`; return the place of the
        first stretch from `at` on.
        """
        place = bisect_left(self._starts, at)
        is_start = place < len(self._starts) and self._starts[place] == at
        if is_start or at >= self.cursor:
            return place
        around = self._labels[place - 1]
        if around.state in over:
            self._starts.insert(place, at)
            self._labels.insert(place, around)
        return place

    def stretches(self, state: str) -> list[tuple[int, int]]:
        """Return start and end of the intervals in a state."""
        return [(left, right) for left, right, label in self._pieces() if label.state == state]

    def _pieces(self) -> Iterator[tuple[int, int, _Label]]:
        """Yield begin, end and label of each stretch."""
        ends = [*self._starts[1:], self.cursor]
        # An empty strip has one end and no begin.
        return zip(self._starts, ends, self._labels, strict=False)

    def cut(self) -> tuple[Interval, ...]:
        """Return the intervals; neighbours in the same state with the same detail are one."""
        self.fill(self.end, "unknown")
        intervals: list[Interval] = []
        for begin, end, label in self._pieces():
            if intervals:
                last = intervals[-1]
                if last.state == label.state and last.detail == label.detail:
                    begin = last.start_us
                    intervals.pop()
            intervals.append(Interval(begin, end, label.state, label.detail, label.is_sum))
        assert sum(interval.num_us for interval in intervals) == self.end - self.begin, (
            "time was lost or made"
        )
        return tuple(intervals)
