# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/bench.py --only exchange: sums between real processes over slow links, and their
figures.
"""

from __future__ import annotations

import pytest

from benchmarks import bandwidth, table
from benchmarks.bandwidth import measure, measure_bandwidth
from benchmarks.run import BenchError


@pytest.mark.slow
def test_no_exchange_is_faster_than_its_link() -> None:
    """Two members send each byte once, so the sums per second are limited by the link's rate."""
    figures = measure(2, 40.0, num_buckets=2, bucket_bytes=1 << 19)
    for name in ("bare", "ours"):
        assert 0 < figures[name] < 1.5 * 40 / 8, (
            "a pace lets a connection that was idle make up for a moment"
        )
    assert 0 < figures["ratio"]["low"] <= figures["ratio"]["median"] <= figures["ratio"]["high"] < 2


def test_a_member_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without figures there is an error, not a table."""
    monkeypatch.setattr(bandwidth.sys, "executable", "/bin/false")
    with pytest.raises(BenchError, match="exit status 1"):
        measure(2, 0.0, num_buckets=1, bucket_bytes=1 << 10)


def test_each_number_of_members_and_each_rate_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has the rows in this order."""
    told = {
        "bare": 10.0,
        "ours": 9.0,
        "buckets": 1,
        "ratio": {"median": 0.9, "low": 0.8, "high": 1.0},
    }
    monkeypatch.setattr(
        bandwidth, "measure", lambda members, mbps, _: {**told, "members": members, "mbps": mbps}
    )
    found = dict(measure_bandwidth([(0.0, 1), (100.0, 1)]))
    assert list(found) == ["2-0", "2-100", "4-0", "4-100"]
    head, _, *rows = table._bandwidth_table(found)
    assert head.split("|")[1].strip() == "gradients summed over Gloo, MB/s"
    assert [row.split("|")[1].strip() for row in rows[:2]] == [
        "2 members, not throttled",
        "2 members, 100 Mbit/s",
    ]
    assert rows[0].split("|")[-2].strip() == "0.900 (0.800 to 1.000)"
