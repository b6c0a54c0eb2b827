# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/check_gpu.sh: placement, refusals, the table, the exit status, and a whole run on the
CPU.

`tests/cuda/test_check_gpu.py` runs it over the stand-in for CUDA.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_plan, gpu_probes, gpu_runs
from benchmarks.gpu_plan import Gpus, Plan, base_config, recipe_config
from benchmarks.gpu_report import Report, Row
from benchmarks.gpu_runs import find_forks, judge_parity, judge_ratio, judge_run, judge_waits
from benchmarks.parity import Witness
from benchmarks.run import VICTIM, BenchError
from benchmarks.systems import STOCK, Config
from tests.history.histories import killed_run
from titan_ft.config import ConfigError
from titan_ft.history.record.run_record import RunRecord
from titan_ft.launch.group.agent import WORKERS_ARE_NEW_PROCESSES
from titan_ft.run.events import StepCommitted
from titan_ft.run.paths import RunPaths

ROOT = Path(__file__).parents[2]
FOUR = Gpus([f"GPU of number {index}" for index in range(4)], "13.0", "2.28.3")
NONE = Gpus([], None, "")


def test_torch_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe runs in a process of its own, so it hides no GPU from later ones; its failure is
    reported.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert replace(gpu.probe(), cuda=None, driver="") == NONE
    monkeypatch.setattr(gpu_plan, "_PROBE", "raise OSError('no driver')")
    with pytest.raises(ConfigError, match="fails: OSError: no driver"):
        gpu.probe()


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Plan]]:
    """Return a function that sets the visible GPUs and the findings, and returns the executed
    plans.
    """
    plans: list[Plan] = []

    def arrange(gpus: Gpus, act: Callable[[Report], None] = lambda report: None) -> list[Plan]:
        def measure(plan: Plan, base: Config, work_dir: Path, report: Report) -> None:
            plans.append(plan)
            act(report)

        monkeypatch.setattr(gpu, "probe", lambda: gpus)
        monkeypatch.setattr(gpu, "measure_runs", measure)
        monkeypatch.setattr(gpu, "measure_gpu", lambda plan, report: report.judge("NCCL", "holds"))
        monkeypatch.setattr(gpu, "measure_recipe", lambda *_: None)
        monkeypatch.setattr(
            gpu, "run_gpu_tests", lambda plan, report: report.judge("tests", "holds", "3 passed")
        )
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        return plans

    return arrange


@pytest.mark.parametrize(
    ("gpus", "arguments", "told"),
    [
        (NONE, [], "needs a GPU, and torch of .* finds none .was built for CPUs.; --cpu"),
        (replace(NONE, cuda="13.0"), [], "was built for 13.0"),
        (FOUR, ["--gpus", "5"], "--gpus must be at most 4, .* got 5"),
        (FOUR, ["--gpus", "0"], "--gpus must be at least 1, got 0"),
        (NONE, ["--cpu", "--gpus", "-1"], "--gpus must be at least 1, got -1"),
        (FOUR, ["--config", "none.toml"], "none.toml"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line(
    gpus: Gpus,
    arguments: list[str],
    told: str,
    found: Callable[..., list[Plan]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    plans = found(gpus)
    assert gpu.main([*arguments, "--work-dir", str(tmp_path / "work")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(ConfigError, match=told):
        raise ConfigError(error)
    assert plans == []
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("arguments", "plan", "visible"),
    [
        ([], Plan(4), "3,1,0,2"),
        (["--gpus", "1"], Plan(1), "3"),
        (["--gpus", "3"], Plan(2), "3,1"),
        (["--small", "--gpus", "1"], Plan(1, small=True), "3"),
        (["--cpu"], Plan(2, on_cpu=True, small=True), ""),
        (["--cpu", "--gpus", "4"], Plan(4, on_cpu=True, small=True), ""),
    ],
)
def test_gpus_are_taken_from_those_that_are_visible(
    arguments: list[str],
    plan: Plan,
    visible: str,
    found: Callable[..., list[Plan]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Both groups get equally many of the visible GPUs, and none with --cpu."""
    plans = found(FOUR)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0,2")
    assert gpu.main([*arguments, "--work-dir", str(tmp_path / "work")]) == 0
    assert plans == [plan]
    assert gpu.os.environ["CUDA_VISIBLE_DEVICES"] == visible


def all_hold(report: Report) -> None:
    for backend in ("gloo", "nccl"):
        report.judge(
            f"{backend}: SIGKILL of a group", "holds", "7 of 7; no work lost: a step was made again"
        )
    report.enter("gloo: step (ms)", "12.5")
    report.judge("FSDP", "needs 4 GPUs")
    report.judge("llama3_1b", "left out: needs 76 GB of a GPU")


def one_broken(report: Report) -> None:
    all_hold(report)
    report.judge(
        "nccl: promises", "does not hold", "6 of 7", why="every batch once: batch 7 was lost"
    )


def one_unknown(report: Report) -> None:
    all_hold(report)
    report.judge("nccl: promises", "cannot be told", "6 of 7", why="the history is cut")


def one_failed(report: Report) -> None:
    all_hold(report)

    def fail() -> None:
        raise BenchError("a run ended")

    assert report.attempt("nccl: SIGKILL", fail) is None


def one_crashed(report: Report) -> None:
    """An error in one part affects only that part."""
    assert report.attempt("nccl: SIGKILL", lambda: {}["nothing"]) is None
    all_hold(report)


@pytest.mark.parametrize(
    ("act", "status", "last"),
    [
        (all_hold, 0, "every promise holds"),
        (one_broken, 1, "nccl: promises: does not hold; every batch once: batch 7 was lost"),
        (one_unknown, 1, "nccl: promises: cannot be told; the history is cut"),
        (one_failed, 1, "nccl: SIGKILL: failed; a run ended"),
        (one_crashed, 1, "nccl: SIGKILL: failed; 'nothing'"),
    ],
)
def test_the_exit_status_follows_the_promises(
    act: Callable[[Report], None],
    status: int,
    last: str,
    found: Callable[..., list[Plan]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Table and file name machine, GPU and versions, and have all rows whatever failed."""
    found(FOUR, act)
    assert gpu.main(["--work-dir", str(tmp_path / "work")]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == last
    assert any(
        line.startswith("4 x GPU of number 0; CUDA 13.0, NCCL 2.28.3; group 0 on GPU 0, 1; ")
        for line in lines
    )
    assert any(gpu.sys.executable in line for line in lines)
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")
    ]
    assert ["gloo: step (ms)", "12.5", "-"] in rows
    assert ["FSDP", "-", "needs 4 GPUs"] in rows
    assert ["tests", "3 passed", "holds"] in rows
    kept = json.loads((tmp_path / "work" / "figures.json").read_text())
    assert len(kept["rows"]) == len(rows) - 2, "all but the head"
    assert (kept["problems"] == []) == (status == 0)
    assert kept["machine"]["nccl"] == "2.28.3"


def test_figures_are_kept_while_a_later_part_runs(tmp_path: Path) -> None:
    """A time limit that ends the check costs only the part that it ended."""
    report = Report(tmp_path / "work" / "figures.json")
    report.enter("gloo: step (ms)", "12.5")
    (row,) = json.loads((tmp_path / "work" / "figures.json").read_text())["rows"]
    assert Row(**row) == Row("gloo: step (ms)", "12.5")


@pytest.mark.parametrize(
    ("still", "left", "verdicts"),
    [
        (0.01, {"MiB": 0, "threads": 0, "descriptors": 0}, ["holds", "holds"]),
        (2.5, {"MiB": 0, "threads": 0, "descriptors": 0}, ["holds", "does not hold"]),
        (0.01, {"MiB": 400, "threads": 0, "descriptors": 0}, ["does not hold", "holds"]),
        (0.01, {"MiB": 0, "threads": 40, "descriptors": 0}, ["does not hold", "holds"]),
        (0.01, {"MiB": 0, "threads": 0, "descriptors": 40}, ["does not hold", "holds"]),
    ],
)
def test_nothing_may_be_left_and_python_goes_on(
    still: float, left: dict[str, int], verdicts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst rank counts for leftovers and for pauses of Python."""
    before = {"MiB": 600, "threads": 30, "descriptors": 20}
    good = {"seconds": [0.2, 0.3], "before": before, "after": before}
    bad = good | {"after": {name: number + left[name] for name, number in before.items()}}
    pinned = {"pin": 2.5, "pin, still": 0.01, "give back": 2.5, "give back, still": still}
    answers: dict[str, Any] = {
        "collectives": [{"seconds": {"fp32": 0.1}}, {"seconds": {"fp32": 0.2}}],
        "reconfigure": [good, bad],
        "pin": [pinned],
    }
    monkeypatch.setattr(gpu, "run_probe", lambda name, *_: answers[name])
    report = Report()
    gpu.measure_gpu(Plan(2), report)
    assert [row.verdict for row in report.rows] == ["holds", *verdicts]
    assert "fp32 0.200 s" in report.rows[0].figure


def test_a_rank_of_a_probe_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BenchError, match="rank 0 ended with status 1"):
        gpu_probes.run_probe("pin", 1, 1)


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        (
            {"parallelism": {"tensor_parallel_degree": 2}},
            "parallelism.tensor_parallel_degree must be 1",
        ),
        (
            {"fault_tolerance": {"semi_sync_method": "diloco"}},
            "fault_tolerance.semi_sync_method must be left out",
        ),
        (
            {"experimental": {"custom_import": "mine"}},
            "experimental.custom_import must be left out",
        ),
    ],
)
def test_a_config_that_cannot_be_compared_is_refused(tables: Config, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        base_config(tables)


def test_a_recipe_runs_without_its_assets(tmp_path: Path) -> None:
    """The packaged text and tokenizer stand in for them; nothing is loaded from elsewhere."""
    recipe = recipe_config(
        {"model": {"hf_assets_path": str(tmp_path / "none")}, "training": {"dataset": "c4"}}
    )
    assert recipe["model"]["hf_assets_path"] == "titan_ft://tokenizer"
    assert recipe["training"]["dataset"] == "austen"
    kept = recipe_config({"model": {"hf_assets_path": str(tmp_path)}})
    assert kept["model"]["hf_assets_path"] == str(tmp_path)


def test_a_difference_to_stock_torchtitan_breaks_the_promise() -> None:
    witness = Witness({1: (8.0, 0.5)}, "aa", 0.002)
    report = Report()
    judge_parity([witness], [witness] * 2, Plan(2), "gloo", report)
    judge_parity([witness], [witness, replace(witness, digest="bb")], Plan(2), "nccl", report)
    assert report.rows[0] == Row(
        "gloo: the steps of stock torchtitan", "bit for bit, 1 steps", "holds"
    )
    (problem,) = report.problems
    assert problem.startswith(
        "nccl: the steps of stock torchtitan: does not hold; the states of 1 of 2 ranks differ"
    )
    assert [row.figure for row in report.rows if "digest" in row.what] == ["2", "2"]


@pytest.mark.parametrize(("digest", "told"), [("bb", "differ"), (None, "unknown")])
def test_the_digests_after_the_kills_must_be_equal(digest: str | None, told: str) -> None:
    """Digests that were not compared are not equal."""
    events: list[Any] = []
    for event in killed_run():
        if isinstance(event, StepCommitted) and event.step == 10:
            event.digest = "aa" if event.replica == 0 else digest
        events.append(event)
    report = Report()
    judge_run(RunRecord(events), "gloo", report)
    assert any(
        line.startswith(f"gloo: groups' digests: does not hold; {told}") for line in report.problems
    )


def test_an_agent_that_makes_no_forks_is_named(tmp_path: Path) -> None:
    """Each restart imports everything again then: the row of the table says why."""
    log = RunPaths(tmp_path).agent_log(VICTIM)
    log.parent.mkdir(parents=True)
    log.write_text("titan_ft: group 1: started\n")
    assert find_forks(tmp_path) == "yes"
    with log.open("a") as lines:
        lines.write(
            f"titan_ft: group 1: threads were started: cuda00001: {WORKERS_ARE_NEW_PROCESSES}\n"
        )
    assert find_forks(tmp_path) == "no: titan_ft: group 1: threads were started: cuda00001"


@pytest.mark.parametrize(
    ("broken", "verdict", "figure"),
    [
        ({}, "holds", "7 of 7"),
        ({"no work lost": "does not hold"}, "does not hold", "6 of 7"),
        ({"no work lost": "unknown"}, "cannot be told", "6 of 7"),
        ({"clocks": "unknown"}, "cannot be told", "7 of 8"),
    ],
)
def test_every_promise_of_a_run_is_judged(
    broken: dict[str, Any], verdict: str, figure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every promise except the arithmetic, which is compared with stock, is judged; broken ones are
    named.
    """
    verdicts = gpu_runs.check(RunRecord(killed_run()))
    for judgement in verdicts.judgements:
        judgement.verdict = broken.get(judgement.name, "holds")
    monkeypatch.setattr(gpu_runs, "check", lambda record: verdicts)
    report = Report()
    judge_run(RunRecord(killed_run()), "gloo", report)
    promises = report.rows[0]
    assert (promises.verdict, promises.figure[:6]) == (verdict, figure)
    assert all(name in promises.problem for name in broken)


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        ((0.99, 1.05, 1.2), "holds"),
        ((1.04, 1.06, 1.2), "cannot be told"),
        ((1.06, 1.07, 1.2), "does not hold"),
    ],
)
def test_a_step_may_take_little_longer_than_stocks(
    ratio: tuple[float, float, float], verdict: str
) -> None:
    """If the rounds lie on both sides of the limit, the machine is too noisy to judge, which is a
    problem too.
    """
    spread = dict(zip(("low", "median", "high"), ratio, strict=True))
    report = Report()
    judge_ratio(spread, "nccl", Plan(2), report)
    assert report.rows[0].verdict == verdict
    assert bool(report.problems) == (verdict != "holds")
    judge_ratio(spread, "gloo", Plan(2), report)
    judge_ratio(spread, "nccl", Plan(2, small=True), report)
    assert [row.verdict for row in report.rows[1:]] == ["", ""]


@pytest.mark.parametrize(
    ("stock", "ours", "ranks", "verdict"),
    [
        ((1.0, 1.0), (9.0, 4.0), 1, "holds"),
        ((1.0, 1.0), (9.0, 4.3), 1, "does not hold"),
        ((1.0, 1.0), (9.0, 5.0), 2, "holds"),
        ("not measured: no trace", (9.0, 4.0), 1, "cannot be told"),
        ((1.0, 1.0), "not measured: no trace", 1, "cannot be told"),
    ],
)
def test_training_may_wait_for_what_it_must_know(
    stock: Any, ours: Any, ranks: int, verdict: str
) -> None:
    """Training may wait for the facts of a step in addition to stock's waits; without a trace
    nothing is known.
    """
    report = Report()
    judge_waits({STOCK: stock, "nccl": ours}, Plan(2 * ranks), report)
    assert report.rows[-1].verdict == verdict
    assert bool(report.problems) == (verdict != "holds")


def test_no_file_with_tests_that_need_a_gpu_is_missing() -> None:
    """Every file with GPU tests is listed, except this one, which starts the script that
    runs them.
    """
    marked = "pytest.mark." + "gpu"
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if marked in path.read_text()
    }
    assert found - {str(Path(__file__).relative_to(ROOT))} == set(gpu.GPU_TESTS)


def check_gpu(*arguments: str) -> str:
    """Run the script, and return the table of a run in which every promise held."""
    command = ["bash", str(ROOT / "scripts" / "check_gpu.sh"), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "every promise holds"
    return ended.stdout


@pytest.mark.slow
def test_all_of_it_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Real runs: the groups make stock torchtitan's steps, and heal from SIGKILLs."""
    monkeypatch.setenv("TITAN_FT_PYTHON", gpu.sys.executable)
    recipe = ROOT / "configs" / "llama3_debug.toml"
    table = check_gpu("--cpu", "--recipe", str(recipe), "--work-dir", str(tmp_path / "work"))
    assert "bit for bit, 5 steps" in table
    report = json.loads((tmp_path / "work" / "figures.json").read_text())
    verdicts = {row["what"]: row["verdict"] for row in report["rows"]}
    assert verdicts["gloo: SIGKILL of a group: groups' digests"] == "holds"
    assert verdicts["gloo: SIGKILL in set-up"] == "holds"
    assert verdicts["nccl: SIGKILL of a group"] == "needs 2 GPUs"
    assert list(verdicts.values()).count("holds") == 6


@pytest.mark.gpu
def test_all_of_it_on_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The check runs on all GPUs of this machine; with one GPU, over Gloo only."""
    monkeypatch.setenv("TITAN_FT_PYTHON", gpu.sys.executable)
    table = check_gpu("--work-dir", str(tmp_path / "work"))
    assert "bit for bit, 20 steps" in table
    assert all("not measured" not in line for line in table.splitlines() if "host waits" in line)
