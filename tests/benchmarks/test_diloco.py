# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/bench.py --only rounds-diloco: the figures of a run of each of the two DiLoCos."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import diloco
from benchmarks.diloco import describe, measure_diloco
from benchmarks.run import BenchError, Run
from benchmarks.tries import InnerStepMade, translate
from tests.benchmarks.histories import commit, in_order
from tests.benchmarks.test_tries import LOST, tried
from tests.event_builder import build
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.events import Event, TrainingFinished


def inner(num: int, begin: float, replica: int, rank: int, attempt: int = 0) -> list[Event]:
    where = {"replica": replica, "rank": rank, "attempt": attempt}
    return [build(InnerStepMade, time=begin + n / 100, **where) for n in range(num)]


def round_of(time: float, step: int, replica: int, rank: int, **fields: Any) -> list[Event]:
    """Make the events of ten steps and their round."""
    digest = fields.pop("digest", "a")
    made = inner(10, time - 1, replica, rank, fields.get("attempt", 0))
    return [*made, tried(time, step, replica, rank=rank, inner_steps=10, digest=digest, **fields)]


RANKS = [(replica, rank) for replica in (0, 1) for rank in (0, 1)]


def test_rounds_of_the_peer_that_are_in_no_model_are_counted() -> None:
    """In round 1 each group gets one rank's state from the other; round 2 fails; group 1 dies in
    its round 3.
    """
    events = [e for g, r in RANKS for e in round_of(1.0, 1, g, r, contributed=g == r)]
    events += [e for g, r in RANKS for e in round_of(2.0, 2, g, r, **LOST, digest=None)]
    events += [
        e for r in (0, 1) for e in [*inner(4, 2.5, 1, r), *round_of(4.0, 2, 0, r, digest=f"own{r}")]
    ]
    found = describe(RunRecord(translate(in_order(events))), {0: 5.0})
    assert found["steps_made"] == 20 + 20 + 4 + 10
    assert found["steps_thrown_away"] == 10 + 20 + 4
    assert found["rounds_mixed"] == 2
    assert (found["rounds_committed"], found["rounds_failed"]) == (2, 1)
    assert found["groups_finished"] == 1
    assert found["digests"] == "equal (step 1)"


def test_groups_of_the_peer_that_end_differently_are_told() -> None:
    events = [e for g, r in RANKS for e in round_of(1.0, 1, g, r, digest=f"{g}{r}")]
    assert describe(RunRecord(translate(in_order(events))), {})["digests"].startswith(
        "differ (step 1)"
    )


def test_the_steps_of_ours_that_count_are_those_of_its_contributions() -> None:
    commits = [
        commit(float(n), n, g, inner_step=10 * n, inner_steps=10, batches={g: (n, 1)})
        for n in (1, 2)
        for g in (0, 1)
    ]
    finished = [build(TrainingFinished, time=3.0, step=2, replica=g) for g in (0, 1)]
    found = describe(RunRecord([*commits, *finished]), {0: 5.0, 1: 5.0})
    assert (found["steps_made"], found["steps_thrown_away"]) == (40, 0)
    assert (found["rounds_committed"], found["rounds_failed"], found["groups_finished"]) == (
        2,
        0,
        2,
    )


def test_the_victim_dies_half_a_round_behind_the_survivors_commits() -> None:
    record = RunRecord([commit(4.0 * n, n) for n in range(1, 5)])
    done: list[Any] = []

    def wait_for(
        look: Callable[[RunRecord], RunRecord | None], what: str, timeout: float
    ) -> RunRecord:
        found = look(record)
        if found is None:
            raise BenchError(f"no {what}")
        return found

    run: Any = SimpleNamespace(
        wait_for=wait_for, sleep=done.append, kill=lambda who: done.append(f"kill {who}")
    )
    diloco._kill_behind(run, (2, 4), 1e12)
    assert done == [2.0, "kill 1", 2.0, "kill 1"]
    with pytest.raises(BenchError, match="no round 5"):
        diloco._kill_behind(run, (5,), 1e12)


def test_a_run_that_breaks_is_a_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, starts: Any
) -> None:
    """Finished cases are not run again, and a run that breaks is recorded."""
    starts("raise SystemExit(3)")
    assert Run is diloco.Run
    done = {"ours-kills0": {}, "peer-kills0": {}, "ours-kills2": {}}
    ((name, found),) = measure_diloco({}, tmp_path, done)
    assert name == "peer-kills2"
    assert "ended with status 3" in found["ended"]
    assert (found["loss"], found["steps_made"], found["kills"]) == (None, 0, 2)
