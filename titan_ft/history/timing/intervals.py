# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A time that is cut into intervals without gaps or overlaps, in whole microseconds.

`titan_ft.history.timing.timeline` fills a `Strip` for each group, and describes the states.
"""

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
    """The state of one group from `start_us` to `end_us` (Unix microseconds)."""

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
    """Cuts the time from `begin` to `end` into *stretches*, which have a state each.

    `fill_until` and `fill_for` go from left to right, from the cursor on and never beyond the end.
    `repaint` gives a time that is filled already a more exact state. Time that is not filled in the
    end is "unknown".
    """

    def __init__(self, begin: int, end: int) -> None:
        self.begin = begin
        self.end = max(begin, end)
        self.cursor = begin
        self._starts: list[int] = []
        """The begin of each stretch. It ends at the next begin, the last one at the cursor."""
        self._labels: list[_Label] = []

    def fill_until(self, until: int, state: str, detail: str = "", *, is_sum: bool = False) -> None:
        """Give the time from the cursor to `until` a state, if `until` is after the cursor."""
        until = min(until, self.end)
        if until > self.cursor:
            self._starts.append(self.cursor)
            self._labels.append(_Label(state, detail, is_sum))
            self.cursor = until

    def fill_for(self, num_us: int, state: str, detail: str = "", *, is_sum: bool = False) -> None:
        """Give the next microseconds a state."""
        self.fill_until(self.cursor + num_us, state, detail, is_sum=is_sum)

    def repaint(
        self, start: int, end: int, state: str, over_states: Collection[str], detail: str = ""
    ) -> None:
        """Replace the states `over_states` by `state` in the time from `start` to `end`."""
        start = max(start, self.begin)
        end = min(end, self.cursor)
        if start >= end:
            return
        # In this order: a cut at the start moves all later indices on by one.
        first = self._split(start, over_states)
        after_last = self._split(end, over_states)
        for index in range(first, after_last):
            if self._labels[index].state in over_states:
                self._labels[index] = _Label(state, detail, is_sum=False)

    def _split(self, at: int, over_states: Collection[str]) -> int:
        """Cut the stretch around `at` in two if its state is to be replaced.

        Returns:
            The index of the first stretch that begins at `at` or later.
        """
        index = bisect_left(self._starts, at)
        is_start = index < len(self._starts) and self._starts[index] == at
        if is_start or at >= self.cursor:
            return index
        around = self._labels[index - 1]
        if around.state in over_states:
            self._starts.insert(index, at)
            self._labels.insert(index, around)
        return index

    def find_stretches(self, state: str) -> list[tuple[int, int]]:
        """Return begin and end of the stretches in a state."""
        return [(begin, end) for begin, end, label in self._stretches() if label.state == state]

    def _stretches(self) -> Iterator[tuple[int, int, _Label]]:
        """Yield begin, end and label of each stretch."""
        ends = [*self._starts[1:], self.cursor]
        # An empty strip has one end and no begin.
        return zip(self._starts, ends, self._labels, strict=False)

    def make_intervals(self) -> tuple[Interval, ...]:
        """Return the intervals; neighbours in the same state with the same detail are one."""
        self.fill_until(self.end, "unknown")
        intervals: list[Interval] = []
        for begin, end, label in self._stretches():
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
