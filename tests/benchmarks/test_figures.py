# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""python -m benchmarks.figures: its figures on short histories."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import figures, main
from benchmarks.record import compare_digests
from tests.benchmarks.histories import commit
from tests.event_builder import build
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.events import Event, ExchangeFailed, FaultInjected, StepCommitted, Target
from titan_ft.run.log import encode


def fault(time: float, replica: int) -> Event:
    return build(FaultInjected, time=time, fault="kill_groups", shot=0, target=Target(replica))


def test_figures_of_a_short_history() -> None:
    """Steps of 1 s; a fault stalls one by 2 s and costs a retry; the groups end with equal
    weights.
    """
    times = {1: 1.0, 2: 2.0, 3: 5.0, 4: 6.0, 5: 7.0}
    shape: dict[str, Any] = {"participants": [0, 1, 2], "forward_passes": 1, "batches": {}}
    events = [
        commit(
            time,
            step,
            replica,
            digest="aa" if step == 5 else f"{replica}",
            exchanges=2 if step == 3 else 1,
            loss=9.0 - step,
            **shape,
        )
        for step, time in times.items()
        for replica in (0, 1, 2)
    ]
    # One shot that hits two groups, and that breaks an exchange, is one failure.
    events += [fault(2.1 + replica / 100, replica) for replica in (1, 2)]
    events += [build(ExchangeFailed, time=3.0, replica=0, error="closed", seconds=0.5, step=2)]
    shown = figures(RunRecord(events))
    assert shown["faults injected"] == "1 of 1 kinds"
    assert shown["exchanges committed of attempted"] == "5 of 6 (83.3 %)"
    assert shown["forward passes for nothing"] == "0 of 15 (0.0 %)"
    # 4 steps of 1 s in 6 s.
    assert shown["effective training time"] == "66.7 %"
    assert shown["stall per failure (s), median (max)"] == "2.00 (2.00)"
    assert (
        shown["weights after the last step that all have"]
        == "equal (step 5); differ in 4 of 5 comparisons"
    )
    assert shown["loss of the last steps that all runs have"] == "6.000"
    assert (
        figures(RunRecord(events), until=3)["loss of the last steps that all runs have"] == "7.000"
    )


def digest(step: int, replica: int, value: str, rank: int = 0) -> Event:
    return build(
        StepCommitted, time=float(step), step=step, replica=replica, rank=rank, digest=value
    )


def test_digests_are_compared_by_rank_and_state() -> None:
    same = [
        digest(5, 0, "a"),
        digest(5, 1, "a"),
        digest(5, 0, "b", rank=1),
        digest(5, 1, "b", rank=1),
    ]
    assert compare_digests(RunRecord(same)) == "equal (step 5)"
    # At the last step only one group has one.
    assert compare_digests(RunRecord([*same, digest(10, 0, "c")])) == "equal (step 5)"
    differ = [
        *same,
        digest(10, 0, "c", rank=1),
        digest(10, 1, "d", rank=1),
        digest(10, 0, "e"),
        digest(10, 1, "e"),
    ]
    assert compare_digests(RunRecord(differ)) == "differ (step 10); differ in 1 of 4 comparisons"
    assert compare_digests(RunRecord([digest(5, 0, "a")])) == "unknown"
    assert compare_digests(RunRecord([])) == "unknown"


@pytest.fixture
def run_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run the command in this process; return its exit status, and its errors or its table."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["figures", *arguments])
        status = main()
        printed = capsys.readouterr()
        return status, printed.err or printed.out

    return run


def test_the_table_is_printed(tmp_path: Path, run_figures: Callable[..., tuple[int, str]]) -> None:
    """A column for each run, with losses of the same steps; a folder without events is named."""
    for name, last in (("a", 3), ("b", 4)):
        events = tmp_path / name / "events"
        events.mkdir(parents=True)
        lines = [encode(commit(float(step), step, loss=9.0 - step)) for step in range(1, last + 1)]
        (events / "replica-0.jsonl").write_bytes(b"".join(lines))
    _, shown = run_figures(str(tmp_path / "a"), str(tmp_path / "b"))
    assert "3 of 3 (100.0 %)" in shown
    assert "4 of 4 (100.0 %)" in shown
    assert [cell.strip() for cell in shown.splitlines()[-1].split("|")[2:4]] == ["7.000", "7.000"]
    status, unbroken = run_figures("--expect-faults", str(tmp_path / "a"))
    assert status == 1
    assert "no fault was injected, so that this proves nothing; give it more --minutes" in unbroken
    (tmp_path / "a" / "events" / "chaos.jsonl").write_bytes(encode(fault(2.5, 0)))
    assert run_figures("--expect-faults", str(tmp_path / "a"), str(tmp_path / "b"))[0] == 0
    status, empty = run_figures(str(tmp_path / "c"))
    assert status == 1
    assert "has no events" in empty
