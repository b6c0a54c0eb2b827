# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/bench.py --only control: agreements of real processes, and the table of their figures."""

from __future__ import annotations

import sys

import pytest

from benchmarks import control, table
from benchmarks.control import fit, measure, measure_agreements
from benchmarks.run import BenchError


@pytest.mark.parametrize(("kind", "delay_ms"), [("tree", 0.0), ("tree", 20.0), ("store", 0.0)])
def test_an_agreement_takes_a_trip_up_and_down(kind: str, delay_ms: float) -> None:
    """In a tree of depth 1 an agreement takes at least two delays of a link."""
    figures = measure(kind, 3, delay_ms, num_agreements=5)
    assert figures["depth"] == 1
    assert 2 * delay_ms < figures["median"] <= figures["p90"]
    assert figures["rank_cpu"] > 0
    assert (figures["root_cpu"] is None) == (kind == "store")


def test_ranks_that_fail_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without figures there is an error, not a table."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BenchError, match="exit status 1"):
        measure("tree", 2)


def test_the_formula() -> None:
    """The fit is exact for times that follow the formula. Rank 0 of the first group has less than
    full fan-out.
    """
    measured = [
        {"ranks": 8, "depth": 1, "delay_ms": 0.0, "median": 0.8, "root_cpu": 100.0},
        {"ranks": 64, "depth": 2, "delay_ms": 0.0, "median": 6.4, "root_cpu": 500.0},
        {"ranks": 64, "depth": 2, "delay_ms": 10.0, "median": 46.4, "root_cpu": 900.0},
        {"ranks": 256, "depth": 2, "delay_ms": 0.0, "median": 25.6, "root_cpu": 700.0},
    ]
    found = fit(measured)
    assert found["a"] == pytest.approx(0.1)
    assert found["shared"] == pytest.approx(819.2)
    assert (found["depth"], found["apart"]) == (4, pytest.approx(2.0))


def test_each_number_of_ranks_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is left out where it would take too long."""

    def measure(kind: str, size: int, delay_ms: float = 0.0) -> dict[str, object]:
        cpu = {"rank_cpu": 50.0, "root_cpu": 300.0 if kind == "tree" else None}
        return {
            "kind": kind,
            "ranks": size,
            "depth": 2,
            "delay_ms": delay_ms,
            "median": 1.0,
            "p90": 2.0,
            **cpu,
        }

    monkeypatch.setattr(control, "measure", measure)
    found = dict(measure_agreements([64, 1024]))
    assert list(found) == [
        "tree-64-0",
        "tree-64-10",
        "store-64",
        "tree-1024-0",
        "tree-1024-10",
        "formula",
    ]
    _, _, first, second, *rest = table._control_table(found)
    assert [cell.strip() for cell in first.split("|")[1:3]] == ["64 ranks", "2"]
    assert first.split("|")[-3].strip() == "1.00 (p90 2.00)"
    assert [cell.strip() for cell in second.split("|")[-3:-1]] == ["-", "-"]
    assert "Extrapolated to 8,192 ranks" in rest[-1]
    assert table._control_table({"tree-64-0": found["tree-64-0"]}), (
        "a run that was cut off shows its figures"
    )
