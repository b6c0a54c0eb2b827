# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/bench.py --only transfer: states from real processes, with slow links, and what is made of the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import table, transfers
from benchmarks.transfers import measure, measure_transfers
from titan_ft.replica import state_fetch


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Provide the bytes of a small state."""
    path = tmp_path / "state"
    path.write_bytes(bytes(range(256)) * 4096)
    return path


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_fetch, "_CHUNK", 1 << 15)


def test_no_link_is_faster_than_it_may(state: Path) -> None:
    """Two donors give more than one can, and no more than both together."""
    one, two = measure(state, 1, 8.0), measure(state, 2, 8.0)
    for figures in (one, two):
        assert figures["bytes"] == 1 << 20
        assert 0 < figures["share"] < 1.15, "a pace lets a thread that was late make up for a moment"
        assert figures["lost"] == []
        assert figures["cpu_seconds_per_gb"] > 0
    assert two["mbps"] > one["mbps"]


def test_one_is_killed_while_it_serves(state: Path) -> None:
    """The other one gives what is missing, and the joiner has noticed who is gone."""
    figures = measure(state, 2, 4.0, kill=True)
    assert figures["lost"] == [1]
    assert figures["cpu_seconds_per_gb"] is None


def test_each_number_of_donors_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a kill; one alone is not killed, for nobody would be left."""
    monkeypatch.setattr(transfers, "NUMS_DONORS", (1, 2))
    found = dict(measure_transfers(tmp_path / "runs", size=1 << 20, mbps=8.0))
    assert list(found) == ["1", "2", "2-killed"]
    head, _, *rows = table._transfer_table(found)
    assert [row.split("|")[1].strip() for row in rows] == ["1, 8 Mbit/s each", "2, 8 Mbit/s each"]
    assert rows[0].split("|")[-2].strip() == "-"
    assert float(rows[1].split("|")[-2]) == pytest.approx(found["2-killed"]["mbps"], abs=0.5)
    assert head.split("|")[1].strip() == "donors of a state"
