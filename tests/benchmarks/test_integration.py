# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/integration.py: its tables, and its verdicts with a stand-in for the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import integration
from benchmarks.integration import KILL_AFTER, Case, Result, Trial, Verdict, Victim
from tests.event_builder import event
from titan_ft.run.log import encode
from titan_ft.run.paths import RunPaths

# Ends as its first argument but one says, and notes its arguments; `launch` and `check` are
# commands of titan-ft.
STAND_IN = """#!/bin/bash
echo "$*" >>{calls}
case "$*" in
*titan_ft.training.module_config*) echo "[job]"; exit {config} ;;
*" launch "*"{fail_at}"*) echo "{line}" >&2; exit {launch} ;;
*" launch "*) exit 0 ;;
*torch.distributed.run*) echo "ValueError: stock" >&2; exit {stock} ;;
*" check "*) echo "every promise"; exit {check} ;;
esac
exit 99
"""
PROCESS = "import time; time.sleep(600)"


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that judges a test whose programs end with given statuses; it returns the
    calls too.
    """

    def judge(
        test: Case, release: str = "0.2", line: str = "", fail_at: str = "", **statuses: int
    ) -> tuple[Verdict, str, list[str]]:
        calls, python = tmp_path / "calls", tmp_path / "python"
        calls.write_text("")
        given = {"config": 0, "launch": 0, "stock": 0, "check": 0, **statuses}
        python.write_text(STAND_IN.format(calls=calls, line=line, fail_at=fail_at, **given))
        python.chmod(0o755)
        monkeypatch.setattr(integration.sys, "executable", str(python))
        monkeypatch.setattr(integration, "POLL_SECONDS", 0.01)
        verdict, reason = Trial(test, tmp_path / "out", release).judge()
        return verdict, reason, calls.read_text().splitlines()

    return judge


@pytest.mark.parametrize("release", ["0.2", "0.3"])
def test_the_tables_can_be_read(release: str) -> None:
    tests = integration.read_tests(release)
    names = [test.name for test in tests]
    assert len(set(names)) == len(names) > 40
    assert [test.ranks for test in tests] == sorted(test.ranks for test in tests)
    assert all(test.runs and "--fault_tolerance" not in " ".join(test.runs) for test in tests)


def test_the_flags_of_a_run() -> None:
    """The module sets lengths and data; two groups double the batch, and CP needs a block for each
    rank.
    """
    run = "--training.steps 20 --training.global_batch_size 32 --validation.dataset=c4_test --a.b {hf} --c.d {schedule}"
    assert integration.titan_flags(run, Path("/hf"), Path("/csv")) == [
        *("--training.global_batch_size", "64"),
        *("--a.b", "/hf"),
        *("--c.d", "/csv"),
    ]
    assert "--training.seq_len=512" in integration.own_flags(
        "--parallelism.context_parallel_degree=4", "0.3"
    )
    assert "--training.seq_len=128" in integration.own_flags(
        "--parallelism.tensor_parallel_degree 2", "0.3"
    )


@pytest.mark.parametrize(
    ("run", "sequences"),
    [
        ("--parallelism.tensor_parallel_degree 2", 2),
        ("--parallelism.pipeline_parallel_degree 2", 8),
        ("--training.local_batch_size 8 --training.global_batch_size 32", 8),
    ],
    ids=["plain", "pipeline", "accumulation"],
)
def test_batches_are_small_where_the_test_allows_it(run: str, sequences: int) -> None:
    """A pipeline needs a microbatch for each stage, and a global batch is a multiple of 8."""
    assert f"--training.local_batch_size={sequences}" in integration.own_flags(run, "0.2")


def test_the_schedule_is_one_of_torch() -> None:
    from torch.distributed.pipelining.schedules import _Action, _validate_schedule

    rows = [line.split(",") for line in integration.format_schedule(4).splitlines()]
    actions = {
        rank: [_Action.from_str(cell) if cell else None for cell in row]
        for rank, row in enumerate(rows)
    }
    assert _validate_schedule(actions, 2, 4, 4) == {0: 0, 1: 1, 2: 0, 3: 1}
    begins = {cell: step for row in rows for step, cell in enumerate(row) if cell}
    for microbatch in range(4):
        chain = [
            begins[f"{name}{microbatch}"]
            for name in ("0F", "1F", "2F", "3F", "3B", "2B", "1B", "0B")
        ]
        assert chain == sorted(set(chain))


def test_a_test_that_holds_is_resumed_and_checked(judge) -> None:
    verdict, reason, calls = judge(Case("full", 2, ["--checkpoint.enable", "--checkpoint.enable"]))
    assert (verdict, reason) == (Verdict.HOLDS, "every promise")
    first, second, check = calls
    assert "--resume" not in first
    assert "--resume" in second
    assert f"--training.steps={integration.RESUMED_STEPS}" in second
    assert check.endswith("run-0")


def test_a_second_try_begins_anew(tmp_path: Path) -> None:
    """A launch refuses the folder of another run."""
    test = Case("one", 2, ["--a.b 2"])
    run = Trial(test, tmp_path, "0.2").folder / "run-0"
    run.mkdir()
    Trial(test, tmp_path, "0.2")
    assert not run.exists()


def test_a_resume_says_what_it_changes(judge) -> None:
    """Without that a resume in another layout is refused, which torchtitan's test makes on
    purpose.
    """
    runs = ["--checkpoint.enable", "--checkpoint.enable --a.b 2"]
    _, _, calls = judge(Case("full", 2, runs, resume_with="b"))
    assert ["--resume-with b" in call for call in calls] == [False, True, False]


def test_another_run_gets_another_folder_and_is_checked(judge) -> None:
    """Each folder is judged: a promise that the first run breaks is not hidden by the second."""
    _, _, calls = judge(Case("two", 2, ["--a.b 1", "--a.b 2"]))
    assert all("--resume" not in call for call in calls)
    assert all(f"--training.steps={integration.STEPS}" in call for call in calls[:2])
    assert [Path(call).name for call in calls[2:]] == ["run-0", "run-1"]


def test_stock_repeats_the_run_that_failed(judge) -> None:
    """Another run of the same test may well work in stock torchtitan."""
    runs = ["--a.b 1", "--a.b 2"]
    _, _, calls = judge(Case("two", 2, runs), fail_at="--a.b 2", launch=1)
    assert ["--a.b 2" in call for call in calls] == [False, True, True]


@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [
        ({"check": 1}, Verdict.FAILS),
        ({"launch": 2}, Verdict.REFUSED),
        ({"launch": 1}, Verdict.FAILS),
        ({"launch": 1, "stock": 1}, Verdict.STOCK_FAILS),
    ],
)
def test_verdicts(judge, statuses: dict[str, int], verdict: Verdict) -> None:
    line = "titan-ft: a.b must be 1"
    found, reason, _ = judge(Case("one", 2, ["--a.b 2"]), line=line, **statuses)
    assert found is verdict
    if verdict is Verdict.REFUSED:
        assert line in reason


def test_a_module_that_is_refused_is_not_launched(judge) -> None:
    test = Case("one", 2, ["--module qwen3 --config qwen3_debugmodel --a.b 2"])
    verdict, _, calls = judge(test, "0.3", config=2)
    assert verdict is Verdict.REFUSED
    assert [call.split("module_config ")[1] for call in calls] == [
        f"qwen3 qwen3_debugmodel {integration.GRAPHS} --a.b 2"
    ]


def test_the_victim_dies_once_after_its_steps(tmp_path: Path) -> None:
    """Steps of other ranks and of an earlier launch in the folder do not count."""
    paths = RunPaths(tmp_path)
    path = paths.events_file("worker")
    path.parent.mkdir()
    process = subprocess.Popen([sys.executable, "-c", PROCESS])
    try:

        def commit(replica: int, rank: int) -> None:
            with path.open("ab") as file:
                file.write(
                    encode(event("step_committed", replica=replica, rank=rank, pid=process.pid))
                )

        commit(1, 1)
        victim = Victim(tmp_path, rank=1)
        for _ in range(KILL_AFTER):
            commit(0, 1)
            commit(1, 0)
        for _ in range(KILL_AFTER - 1):
            commit(1, 1)
        victim.look()
        assert process.poll() is None
        commit(1, 1)
        victim.look()
        assert process.wait(30) == -9
    finally:
        process.kill()
        process.wait()


def test_results_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second call tries only the tests without a result; an unknown name is refused."""
    tried = []
    monkeypatch.setattr(
        integration, "read_tests", lambda release: [Case("a", 2, [""]), Case("b", 2, [""])]
    )
    monkeypatch.setattr(
        Trial, "judge", lambda trial: tried.append(trial.test.name) or (Verdict.FAILS, "x | y")
    )
    assert integration.main([str(tmp_path), "a"]) == 1
    assert capsys.readouterr().out == "| a | 2 | fails | x \\| y |\n"
    assert integration.main([str(tmp_path)]) == 1
    assert integration.main([str(tmp_path)]) == 0
    assert tried == ["a", "b"]
    assert integration.read_results(tmp_path / "results.jsonl")["b"] == Result(
        "b", 2, Verdict.FAILS, "x | y", 0
    )
    with pytest.raises(SystemExit) as ended:
        integration.main([str(tmp_path), "c"])
    assert ended.value.code == 2
