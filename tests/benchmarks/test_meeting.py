# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/bench.py --only control: changes of membership and quorums of real processes, and their
tables.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks import lighthouse, meeting, table
from benchmarks.meeting import fit, measure, measure_meetings
from benchmarks.run import BenchError


@pytest.mark.parametrize("kind", ["columns", "store", "gloo"])
def test_groups_meet_after_a_death_and_a_return(kind: str) -> None:
    """Groups meet by each way; a returning group has a new process."""
    figures = measure(kind, 2, 2, num_changes=2)
    assert all(
        0 < figures[name] < meeting._AHEAD_SECONDS * 100
        for name in ("first", "death", "return", "rank_cpu")
    )


def test_groups_that_end_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without figures there is an error, not a table."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BenchError, match="without an answer"):
        measure("columns", 2, 1)


def test_the_formula() -> None:
    """The fit is exact for times that follow the formula, and uses the slower of death and
    return.
    """
    measured = [
        {"groups": groups, "ranks": ranks, "death": 0.1 + 0.001 * groups * ranks, "return": 0.0}
        for groups, ranks in ((2, 1), (30, 1), (30, 8))
    ]
    found = fit(measured)
    assert (found["a"], found["b"]) == (pytest.approx(0.1), pytest.approx(0.001))
    assert found["shared"]["8-1000"] == pytest.approx(8.1)


def test_each_size_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The single store is left out where it takes minutes, and Gloo where it needs too many
    descriptors.
    """

    def measure(kind: str, num_groups: int, num_ranks: int) -> dict[str, Any]:
        seconds = {"first": 3.0, "death": 1.0, "return": 2.0, "rank_cpu": 4.0}
        return {"kind": kind, "groups": num_groups, "ranks": num_ranks, **seconds}

    monkeypatch.setattr(meeting, "measure", measure)
    found = dict(measure_meetings([(2, 1), (300, 8)]))
    _, _, first, second, *rest = table._meeting_table(found)
    assert [cell.strip() for cell in first.split("|")[1:-1]] == [
        "2 x 1",
        *["3.000", "1.000", "2.000", "4.000"] * 2,
        "2.000",
    ]
    assert [cell.strip() for cell in second.split("|")[-6:-1]] == ["-"] * 5
    assert "Extrapolated: 12 x 8192" in rest[-1]


def test_a_lighthouse_of_many_names_is_a_row() -> None:
    """A quorum of three groups at a lighthouse that knows 50 ended processes."""
    figures = lighthouse.measure(3, 50, num_quorums=2)
    assert 0 < figures["median"] <= figures["longest"]
    assert figures["page_mb"] > 53 * 1e-4
    *_, row = table._lighthouse_table({"lighthouse-3-50": figures})
    assert [cell.strip() for cell in row.split("|")[1:3]] == ["3", "50"]
