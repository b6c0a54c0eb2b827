# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/bench.py --only transfer: states from real processes over slow links, and their
figures.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import table, transfers
from benchmarks.transfers import measure, measure_transfers
from titan_ft.transfer import state_fetch


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Provide the bytes of a small state."""
    path = tmp_path / "state"
    path.write_bytes(bytes(range(256)) * 4096)
    return path


@pytest.fixture(autouse=True)
def _small_slices_and_little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_fetch, "_SLICE_BYTES", 1 << 15)
    monkeypatch.setattr(transfers, "USUAL_SECONDS", 0.5)


@pytest.mark.slow
def test_no_link_is_faster_than_it_may(state: Path) -> None:
    """Two donors give more than one can, and no more than both together."""
    one, two = measure(state, 1, 8.0), measure(state, 2, 8.0)
    for figures in (one, two):
        assert figures["bytes"] == 1 << 20
        assert 0 < figures["share"] < 1.15, (
            "a pace lets a thread that was late make up for a moment"
        )
        assert figures["lost"] == []
        assert figures["cpu_seconds_per_gb"] > 0
        assert figures["step_ratio"] > 0
    assert two["mbps"] > one["mbps"]


def test_one_is_killed_while_it_serves(state: Path) -> None:
    """The other donor sends the missing part, and the joiner names the dead one."""
    figures = measure(state, 2, 4.0, kill=True)
    assert figures["lost"] == [1]
    assert figures["cpu_seconds_per_gb"] is figures["step_ratio"] is None


def test_a_slow_donor_is_told_by_its_steps() -> None:
    """A donor's steps are as long as intended, as far as the machine permits."""
    told: list[float] = []

    class EnoughError(Exception):
        pass

    def tell(seconds: float, used: float) -> None:
        told.append(seconds)
        assert used > 0
        if len(told) == 3:
            raise EnoughError

    with pytest.raises(EnoughError):
        transfers._make_steps(tell)
    assert min(told) >= transfers.STEP_SECONDS * (1 - transfers.HOST_SHARE)


def test_copies_are_of_the_whole_state() -> None:
    """Parameters and two moments of each; and the counter of each parameter."""
    copies = transfers.measure_copies(1 << 20)
    assert 1 << 20 <= copies["bytes"] + 64 * 3 * 4 < 2 << 20
    assert copies["first_seconds"] > 0 < copies["later_seconds"]


@pytest.mark.slow
def test_each_number_of_donors_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of donors has a row with and without a kill; a single donor is not killed."""
    monkeypatch.setattr(transfers, "NUMS_DONORS", (1, 2))
    found = dict(measure_transfers(tmp_path / "runs", size=1 << 20, mbps=8.0))
    assert list(found) == ["1", "2", "2-killed", "1-unlimited", "1-tls", "copies"]
    head, _, *rows, _, copies = table._transfer_table(found)
    assert copies.startswith("a donor's copy of 1 MiB: ")
    titles = ["1, 8 Mbit/s each", "2, 8 Mbit/s each", "1, no limit", "1, no limit, TLS"]
    assert [row.split("|")[1].strip() for row in rows] == titles
    assert [found[name]["share"] for name in ("1-unlimited", "1-tls")] == [None, None]
    assert rows[0].split("|")[-2].strip() == "-"
    assert float(rows[1].split("|")[-2]) == pytest.approx(found["2-killed"]["mbps"], abs=0.5)
    assert head.split("|")[1].strip() == "donors of a state"
