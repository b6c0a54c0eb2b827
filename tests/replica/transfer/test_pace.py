# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The limit on a donor's rate."""

from __future__ import annotations

import heapq
from collections import Counter

import pytest

from titan_ft.transfer.pace import _CREDIT_SECONDS, Pace
from titan_ft.transfer.state_fetch import _STALL_SECONDS


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("connections", [1, 5, 64])
@pytest.mark.parametrize("max_mbps", [0.01, 1.0, 100.0, 10_000.0])
def test_the_rate_holds_over_all_connections(max_mbps: float, connections: int) -> None:
    """All connections together send at the rate, in equal parts, whatever their number is."""
    clock = Clock()
    pace = Pace(max_mbps, clock)
    rate, begin = max_mbps * 1e6 / 8, clock.now
    sent: Counter[int] = Counter()
    # Times at which the connections have sent a slice and want to send the next one.
    turns = [(begin, number) for number in range(connections)]
    for _ in range(2000):
        clock.now, number = heapq.heappop(turns)
        delay = pace.book(pace.slice_bytes)
        assert delay < _STALL_SECONDS / 2, "a connection that waits for its turn does not look dead"
        heapq.heappush(turns, (clock.now + delay, number))
        sent[number] += pace.slice_bytes
        allowed = rate * (clock.now + delay - begin + _CREDIT_SECONDS) + pace.slice_bytes
        assert sent.total() <= allowed * (1 + 1e-9)
    assert sent.total() >= rate * (clock.now - begin)
    assert max(sent.values()) - min(sent.values()) <= rate * _CREDIT_SECONDS + 2 * pace.slice_bytes


def test_idle_time_earns_no_credit() -> None:
    """After a pause of any length, sending goes on at the rate, without a burst."""
    clock = Clock()
    pace = Pace(8.0, clock)  # a million bytes per second
    pace.book(1000)
    clock.now += 1000.0
    total = 0
    while pace.book(1000) == 0.0:
        total += 1000
    assert total <= 1_000_000 * _CREDIT_SECONDS + 1000


def test_without_a_rate_nothing_waits() -> None:
    """0 is no limit, and the data is not cut into slices."""
    pace = Pace(0.0)
    assert [pace.book(1 << 40) for _ in range(3)] == [0.0] * 3
    assert pace.slice_bytes > 1 << 40
