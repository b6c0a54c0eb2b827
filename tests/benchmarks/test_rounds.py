# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/bench.py --only rounds-loss: the comparisons, and their figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.record import read_run
from benchmarks.rounds import (
    CASES,
    GLOBAL_BATCH,
    OTHER_SEED,
    SEQ_LEN,
    STEPS,
    Case,
    bytes_per_step,
    configure,
    describe,
    final_losses,
    measure_losses,
)
from benchmarks.run import BenchError
from benchmarks.systems import OURS, PEER, Job
from tests.benchmarks.histories import commit
from titan_ft.config import FaultTolerance, check_toml, load_toml
from titan_ft.run.events import Event
from titan_ft.run.log import encode

BASE = load_toml(Path(__file__).parents[2] / "configs" / "llama3_debug.toml")


def test_all_cases_train_as_many_tokens_in_whole_rounds() -> None:
    for case in CASES:
        config = configure(BASE, Job(OURS, Path("unused"), case.num_groups, 1), case)
        assert config["training"]["local_batch_size"] * case.num_groups == GLOBAL_BATCH
        assert (config["training"]["seq_len"], config["training"]["steps"]) == (SEQ_LEN, STEPS)
        assert STEPS % case.sync_steps == 0
        assert config["fault_tolerance"].get("semi_sync_method") == (
            None if case.outer_lr is None else "diloco"
        )
        check_toml(config)
    assert len({case.name for case in CASES}) == len(CASES) == 2 + 12 + 1
    assert {case.seed for case in CASES} == {42, OTHER_SEED}
    assert all(case.reference in {other.name for other in CASES} for case in CASES)


def test_the_peer_gets_only_the_fields_that_it_knows() -> None:
    table = configure(BASE, Job(PEER, Path("unused")), Case(2, 10, 0.7))["fault_tolerance"]
    assert (table["semi_sync_method"], table["sync_steps"]) == ("diloco", 10)
    assert table.keys() & {"outer_lr", "outer_momentum", "digest_every"} == set()
    ours = configure(BASE, Job(OURS, Path("unused")), Case(2, 10, 0.7))["fault_tolerance"]
    check_toml({"fault_tolerance": ours}, FaultTolerance)
    assert ours["outer_lr"] == 0.7


def logged(step: int, loss: float) -> str:
    return f"[titan] 2026-01-02 03:04:05,678 - root - INFO - \x1b[36mvalidate step: {step:2}  \x1b[32mloss: {loss:7.4f}\n"


def make_run(folder: Path, events: list[Event], **losses: float) -> Path:
    """Leave events and logs as a run does; the losses are by group, such as `group0`."""
    (folder / "events").mkdir(parents=True)
    (folder / "events" / "a.jsonl").write_bytes(b"".join(map(encode, events)))
    for group, loss in losses.items():
        log = (
            folder / "logs" / f"replica-{group.removeprefix('group')}" / "attempt-0" / "rank-0.log"
        )
        log.parent.mkdir(parents=True)
        size = "\x1b[34mModel llama3 debugmodel \x1b[31msize: 6,163,712 total parameters\x1b[39m\n"
        log.write_text(size + logged(1, 8.0) + logged(4, loss))
    return folder


def rounds_of(steps: int, last: int, **fields: Any) -> list[Event]:
    numbers = range(1, last // steps + 1)
    whole = {"inner_steps": steps, "tokens": 100, **fields}
    return [commit(float(n), n, inner_step=n * steps, **whole) for n in numbers]


def test_the_figures_of_a_run(tmp_path: Path) -> None:
    """The loss is that after the last step. Without an event about bytes they are those of an
    all-reduce.
    """
    run = make_run(tmp_path / "run", rounds_of(2, 4), group0=5.25, group1=5.25)
    assert final_losses(run, 4) == {0: 5.25, 1: 5.25}
    found = describe(run, Case(2, 2, 0.7), 4)
    assert found == {"loss": 5.25, "tokens": 200, "bytes_per_step": 4 * 6_163_712 / 2}
    assert bytes_per_step(read_run(run), 1000, Case(4)) == 6000


@pytest.mark.parametrize(
    ("events", "losses", "message"),
    [
        (rounds_of(2, 2), {"group0": 5.0, "group1": 5.0}, "did not end with step 4"),
        ([], {"group0": 5.0, "group1": 5.0}, "did not end with step 4"),
        (
            rounds_of(2, 4, participants=[0]),
            {"group0": 5.0, "group1": 5.0},
            "not all groups were in step 1",
        ),
        (rounds_of(2, 4), {"group0": 5.0, "group1": 5.5}, "must be one, got"),
        (rounds_of(2, 4), {"group0": 5.0}, "must be one, got"),
    ],
)
def test_a_run_that_trained_otherwise_is_no_result(
    events: list[Event], losses: dict[str, float], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BenchError, match=message):
        describe(make_run(tmp_path / "run", events, **losses), Case(2, 2, 0.7), 4)


@pytest.mark.slow
def test_a_short_real_run(tmp_path: Path) -> None:
    """Two groups make two rounds of two steps: the loss is that of a real model."""
    ((name, found),) = measure_losses(BASE, tmp_path, {}, [Case(2, 2, 0.7)], 4)
    assert name == "diloco-2-lr0.7-groups2"
    assert 6.0 < found["loss"] < 8.5  # ln 2048 is 7.6
    assert found["tokens"] == pytest.approx(4 * GLOBAL_BATCH * SEQ_LEN, rel=0.01)
    assert found["bytes_per_step"] == pytest.approx(24.7e6 / 2, rel=0.01)
