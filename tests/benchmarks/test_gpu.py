# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/check_gpu.sh: who runs where, what is refused, the table, the exit status; and all of it on the CPU."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_plan
from benchmarks.gpu import Report, judge_parity, judge_ratio, judge_run, judge_waits, measure_steps
from benchmarks.gpu_plan import Gpus, Plan, base_config, job_config
from benchmarks.parity import Witness
from benchmarks.run import BenchError
from benchmarks.systems import STOCK, Config, Job
from tests.history.histories import killed_run
from titan_ft.config import ConfigError
from titan_ft.history.record import RunRecord
from titan_ft.run.events import FaultInjected, StepCommitted

ROOT = Path(__file__).parents[2]
FOUR = Gpus([f"GPU of number {index}" for index in range(4)], "13.0", "2.28.3")
NONE = Gpus([], None, "")


@pytest.mark.parametrize(
    ("num_gpus", "gpus", "backends", "same_steps", "timed"),
    [
        (1, (["0"], ["0"]), ["gloo"], (1, 1), (1, 1)),
        (2, (["0"], ["1"]), ["gloo", "nccl"], (1, 1), (2, 1)),
        (4, (["0", "1"], ["2", "3"]), ["gloo", "nccl"], (2, 2), (2, 2)),
        (8, (["0", "1", "2", "3"], ["4", "5", "6", "7"]), ["gloo", "nccl"], (2, 4), (2, 4)),
    ],
)
def test_who_runs_where(
    num_gpus: int,
    gpus: tuple[list[str], list[str]],
    backends: list[str],
    same_steps: tuple[int, int],
    timed: tuple[int, int],
    tmp_path: Path,
) -> None:
    """Stock torchtitan runs as many ranks, or one that does the work of both groups."""
    plan = Plan(num_gpus)
    assert (plan.gpus(0), plan.gpus(1)) == gpus
    assert plan.backends == backends
    for wanted, same in ((same_steps, True), (timed, False)):
        job = plan.stock(tmp_path, same)
        assert (job.system, job.num_groups, job.num_ranks) == (STOCK, *wanted)
    assert plan.groups(tmp_path).num_ranks == len(gpus[0])
    assert f"group 1 on GPU {', '.join(gpus[1])}" in plan.describe()
    told = plan.describe_stock()
    assert ("one rank" in told, "DDP" in told, "HSDP" in told) == (num_gpus <= 2, num_gpus == 2, num_gpus >= 4)


def test_why_nccl_is_not_between_the_groups() -> None:
    assert "two ranks on one GPU" in Plan(1).why_not("nccl")
    assert "needs GPUs" in Plan(4, on_cpu=True).why_not("nccl")
    assert "has no NCCL" in Plan(4, has_nccl=False).why_not("nccl")
    assert Plan(4, on_cpu=True).backends == Plan(4, has_nccl=False).backends == ["gloo"]


def test_torch_is_asked_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """That one hides no GPU from those that come after it; what it fails of is told."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert replace(gpu.probe(), cuda=None) == NONE
    monkeypatch.setattr(gpu_plan, "_PROBE", "raise OSError('no driver')")
    with pytest.raises(ConfigError, match="fails: OSError: no driver"):
        gpu.probe()


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Plan]]:
    """Return what says which GPUs there are and what is found; the plans that are carried out then."""
    plans: list[Plan] = []

    def arrange(gpus: Gpus, act: Callable[[Report], None] = lambda report: None) -> list[Plan]:
        def measure(plan: Plan, base: Config, work_dir: Path, report: Report) -> None:
            plans.append(plan)
            work_dir.mkdir()
            act(report)

        monkeypatch.setattr(gpu, "probe", lambda: gpus)
        monkeypatch.setattr(gpu, "measure", measure)
        monkeypatch.setattr(gpu, "run_gpu_tests", lambda plan, report: "3 passed")
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
        (["--cpu"], Plan(2, on_cpu=True), ""),
        (["--cpu", "--gpus", "4"], Plan(4, on_cpu=True), ""),
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
    """Both groups have as many, and none is seen with --cpu."""
    plans = found(FOUR)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0,2")
    assert gpu.main([*arguments, "--work-dir", str(tmp_path / "work")]) == 0
    assert plans == [plan]
    assert gpu.os.environ["CUDA_VISIBLE_DEVICES"] == visible


def all_hold(report: Report) -> None:
    for backend in ("gloo", "nccl"):
        report.judge("one trajectory", backend, "holds")
    report.judge("no work lost", "gloo", "holds, but", "a step was made again")
    report.enter("step (ms)", "gloo", "12.5")


def one_broken(report: Report) -> None:
    all_hold(report)
    report.judge("every batch once", "nccl", "does not hold", why="batch 7 was lost")


def one_unknown(report: Report) -> None:
    all_hold(report)
    report.judge("every batch once", "nccl", "unknown", why="the history is cut")


def one_failed(report: Report) -> None:
    all_hold(report)

    def fail() -> None:
        raise BenchError("a run ended")

    assert report.attempt("nccl: SIGKILL", fail) is None


@pytest.mark.parametrize(
    ("act", "status", "last"),
    [
        (all_hold, 0, "every promise holds"),
        (one_broken, 1, "nccl: every batch once: does not hold; batch 7 was lost"),
        (one_unknown, 1, "nccl: every batch once: unknown; the history is cut"),
        (one_failed, 1, "nccl: SIGKILL: a run ended"),
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
    """The table names machine, GPU and versions, and stands there whatever failed."""
    found(FOUR, act)
    assert gpu.main(["--work-dir", str(tmp_path / "work")]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == last
    assert any(line.startswith("4 x GPU of number 0; CUDA 13.0, NCCL 2.28.3; group 0 on GPU 0, 1; ") for line in lines)
    (row,) = [line for line in lines if line.startswith("| no work lost")]
    assert [cell.strip() for cell in row.split("|")[2:-1]] == ["", "holds, but: a step was made again", "-"]
    assert "tests that need a GPU: 3 passed" in lines
    kept = json.loads((tmp_path / "work" / "figures.json").read_text())
    assert kept["figures"] == {"step (ms)": {"gloo": "12.5"}}
    assert (kept["problems"] == []) == (status == 0)


def test_what_is_not_run_says_why() -> None:
    report = Report()
    report.judge("one trajectory", "gloo", "holds")
    machine = dict.fromkeys(("cpu", "cores", "memory_gib", "load", "platform", "python"), "x")
    machine |= dict.fromkeys(("torch", "torchtitan", "torchft"), "1")
    text = gpu.format_report(report, Plan(1), machine, FOUR, "-")
    assert "| holds            | not run" in text
    assert "groups over nccl: not run: NCCL refuses two ranks on one GPU" in text


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"parallelism": {"tensor_parallel_degree": 2}}, "parallelism.tensor_parallel_degree must be 1"),
        ({"fault_tolerance": {"semi_sync_method": "diloco"}}, "fault_tolerance.semi_sync_method must be left out"),
        ({"experimental": {"custom_import": "mine"}}, "experimental.custom_import must be left out"),
    ],
)
def test_a_config_that_cannot_be_compared_is_refused(tables: Config, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        base_config(tables)


def test_all_systems_make_steps_of_one_size(tmp_path: Path) -> None:
    """A rank that does the work of both groups has both their microbatches."""
    given = {"training": {"local_batch_size": 3, "global_batch_size": 96}, "checkpoint": {"enable": True}}
    base = base_config(given)
    plan = Plan(2)
    alone = job_config(base, plan.stock(tmp_path, True), "", 5, 1)
    assert alone["training"]["global_batch_size"] == 6
    groups = job_config(base, plan.groups(tmp_path), "nccl", 5, 1, debug={"deterministic": True})
    assert "global_batch_size" not in groups["training"]
    assert groups["fault_tolerance"]["process_group"] == "nccl"
    assert groups["debug"] == {"deterministic": True}
    assert not groups["checkpoint"]["enable"]
    assert given["training"]["global_batch_size"] == 96


def test_a_difference_to_stock_torchtitan_breaks_the_promise() -> None:
    witness = Witness({1: (8.0, 0.5)}, "aa", 0.002)
    report = Report()
    judge_parity([witness], [witness] * 2, Plan(2), "gloo", report)
    judge_parity([witness], [witness, replace(witness, digest="bb")], Plan(2), "nccl", report)
    assert report.promises["same arithmetic"]["gloo"] == "holds: bit for bit, 1 steps"
    (problem,) = report.problems
    assert problem.startswith("nccl: same arithmetic: does not hold; the states of 1 of 2 ranks differ")
    assert report.figures["a digest (ms)"] == {"gloo": "2", "nccl": "2"}


@pytest.mark.parametrize(("digest", "told"), [("bb", "differ"), (None, "unknown")])
def test_the_digests_behind_the_kills_must_be_equal(digest: str | None, told: str) -> None:
    """Not compared is not equal. And a run whose second kill is missing says so."""
    events: list[Any] = []
    for event in killed_run():
        if isinstance(event, StepCommitted) and event.step == 10:
            event.digest = "aa" if event.replica == 0 else digest
        events.append(event)
    report = Report()
    with pytest.raises(BenchError, match=r"did not come back \(1 kills\)"):
        judge_run(RunRecord(events), "gloo", report)
    assert any(line.startswith(f"gloo: groups' digests: does not hold; {told}") for line in report.problems)


def test_every_promise_of_a_run_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the arithmetic, which is compared with stock torchtitan; with what the kills cost."""
    monkeypatch.setattr(gpu, "NUM_KILLS", 1)
    report = Report()
    assert sum(isinstance(event, FaultInjected) for event in killed_run()) == 1
    judge_run(RunRecord(killed_run()), "gloo", report)
    wanted = {"one trajectory", "exact average", "no work lost", "no stall for a joiner", "every batch once"}
    assert wanted | {"counters follow commits", "nothing silent"} <= set(report.promises)
    assert report.figures["kill to contributing again (s)"] == {"gloo": "6.5"}
    assert report.figures["survivors' stall at a SIGKILL (s)"] == {"gloo": "2"}
    assert report.figures["steps lost by it"] == {"gloo": "0"}
    # This history does not tell how long the fetch took.
    assert report.figures["joiner's fetch of it (Mbit/s)"] == {"gloo": "-"}


def test_steps_are_timed_whatever_fails_beside_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU the profiler looks at steps behind those that are timed, for all alike."""
    configs: dict[str, Config] = {}

    def time_steps(job: Job, config: Config, timeout_seconds: float) -> list[float]:
        configs[job.run_dir.name] = config
        if job.run_dir.name == "steady-1-nccl":
            raise BenchError("a peer is lost")
        return [0.010] if job.system == STOCK else [0.0104]

    monkeypatch.setattr(gpu, "time_steps", time_steps)
    monkeypatch.setattr(gpu, "read_host_waits", lambda run_dir: (3.0, 2.0) if STOCK in run_dir.name else (6.0, 5.0))
    report = Report()
    measure_steps(Plan(2), base_config({}), tmp_path, report)
    assert report.figures["step, ratio to stock"] == {STOCK: "1.000", "gloo": "1.040"}
    assert report.figures["step (ms)"] == {STOCK: "10", "gloo": "10.4"}
    waits = "training waits for the GPU at most 3 times more in a step"
    assert report.promises == {waits: {"gloo": "holds: 6.0, 5.0 by the training thread"}}
    assert report.figures["host waits for the GPU in a step"]["gloo"] == "6.0, 5.0 by the training thread"
    assert report.problems == ["nccl: step time, round 2 of 3: a peer is lost"]
    assert "steady-2-nccl" not in configs
    for config in configs.values():
        profiling, steps = config["profiling"], config["training"]["steps"]
        assert profiling["enable_profiling"]
        behind = profiling["profiler_warmup"] + profiling["profiler_active"]
        assert (profiling["profile_freq"] - behind) % 10 == 0, "the last timed step is logged"
        assert profiling["profile_freq"] < steps < 2 * profiling["profile_freq"]
        assert config["metrics"]["log_freq"] > behind, "no step that the profiler sees is timed"


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [((0.99, 1.05, 1.2), "holds"), ((1.04, 1.06, 1.2), "cannot be told"), ((1.06, 1.07, 1.2), "does not hold")],
)
def test_a_step_may_take_little_longer_than_stocks(ratio: tuple[float, float, float], verdict: str) -> None:
    """Where the rounds lie on both sides of the bar, the machine is too noisy to tell; that is a problem too."""
    report = Report()
    judge_ratio(dict(zip(("low", "median", "high"), ratio, strict=True)), "nccl", report)
    ((told,),) = [row.values() for row in report.promises.values()]
    assert told.split(": ")[0] == verdict
    assert bool(report.problems) == (verdict != "holds")


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
def test_training_may_wait_for_what_it_must_know(stock: Any, ours: Any, ranks: int, verdict: str) -> None:
    """What the groups must read of a step, on top of stock torchtitan's; without a trace nothing is known."""
    report = Report()
    judge_waits({STOCK: stock, "nccl": ours}, Plan(2 * ranks), report)
    ((told,),) = [row.values() for row in report.promises.values()]
    assert told.split(": ")[0] == verdict
    assert bool(report.problems) == (verdict != "holds")


def test_on_a_cpu_nothing_is_traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Config] = []

    def time_steps(job: Job, config: Config, timeout_seconds: float) -> list[float]:
        seen.append(config)
        return [0.5]

    monkeypatch.setattr(gpu, "time_steps", time_steps)
    report = Report()
    measure_steps(Plan(2, on_cpu=True), base_config({}), tmp_path, report)
    assert set(report.figures["host waits for the GPU in a step"].values()) == {"not measured"}
    assert all("profiling" not in config for config in seen)


@pytest.mark.parametrize(("code", "last"), [(0, "3 passed in 9 s"), (1, "1 failed, 2 passed in 9 s")])
def test_tests_that_need_a_gpu_count(monkeypatch: pytest.MonkeyPatch, code: int, last: str) -> None:
    """Those of this module are left out: one of them starts the script that starts them."""
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, code, f"...\n{last}\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    report = Report()
    assert gpu.run_gpu_tests(Plan(2), report) == last
    assert bool(report.problems) == bool(code)
    assert "--ignore=tests/benchmarks" in commands[0]
    assert gpu.run_gpu_tests(Plan(2, on_cpu=True), report).startswith("not run")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert gpu.run_gpu_tests(Plan(2), report).endswith("has no pytest")
    assert len(commands) == 1


def check_gpu(*arguments: str) -> str:
    """Run the script, and return the table of a run in which every promise held."""
    command = ["bash", str(ROOT / "scripts" / "check_gpu.sh"), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "every promise holds"
    assert "| holds: bit for bit, 20 steps" in ended.stdout
    return ended.stdout


@pytest.mark.slow
def test_all_of_it_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Real runs: the groups make stock torchtitan's steps, and heal from two SIGKILLs."""
    monkeypatch.setenv("TITAN_FT_PYTHON", gpu.sys.executable)
    table = check_gpu("--cpu", "--work-dir", str(tmp_path / "work"))
    assert "groups over nccl: not run: NCCL needs GPUs" in table
    report = json.loads((tmp_path / "work" / "figures.json").read_text())
    assert report["promises"]["groups' digests"]["gloo"].startswith("holds: equal (step ")
    assert len(report["promises"]) == 9


@pytest.mark.gpu
def test_all_of_it_on_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On all GPUs of this machine; with one, over Gloo alone."""
    monkeypatch.setenv("TITAN_FT_PYTHON", gpu.sys.executable)
    table = check_gpu("--work-dir", str(tmp_path / "work"))
    (row,) = [line for line in table.splitlines() if line.startswith("| host waits")]
    assert "not measured" not in row
