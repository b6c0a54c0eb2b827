# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What only a machine with GPUs can tell, in minutes: what scripts/check_gpu.sh runs.

Two groups beside stock torchtitan: the same steps (with deterministic kernels); step times, with the waits of the host;
a group that is SIGKILLed and heals. Each for every process group that can be between them. With --cpu all of it on the
CPU, so that its logic can be tried anywhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks.command import describe_machine
from benchmarks.gpu_plan import BACKENDS, Gpus, Plan, base_config, job_config, make_plan, probe
from benchmarks.kills import MAX_RESTARTS, costs, kill_repeatedly
from benchmarks.parity import Witness, compare_with_stock, read_host_waits, read_witnesses
from benchmarks.record import compare_digests, read_run
from benchmarks.recovery import STEPS as ENDLESS
from benchmarks.run import BenchError, Run, progress
from benchmarks.steady import LOG_FREQ, compare, time_steps
from benchmarks.systems import NUM_GROUPS, STOCK, Config, Job
from benchmarks.table import markdown
from titan_ft.config import ConfigError, load_toml
from titan_ft.data.assets import find_config
from titan_ft.history.check import check
from titan_ft.history.record import RunRecord
from titan_ft.launch.gpus import listed_gpus
from titan_ft.run.events import HealFinished, StateServed

ROOT = Path(__file__).parents[1]
PARITY_STEPS = 20
TRACE_WARMUP, TRACE_STEPS = 2, 3
"""Steps behind those that are timed which the profiler begins with, and which it keeps."""
NUM_KILLS = 2
MOST_RATIO = 1.05
MOST_WAITS = 3
"""Of the training thread in a step, for the loss, the rows and the messages (docs/design.md); a group of several ranks
gathers its losses besides."""
RUN_SECONDS = 600.0
"""That a run to its end may take."""
WITNESS = {"experimental": {"custom_import": "benchmarks.witness"}}

T = TypeVar("T")


@dataclass
class Report:
    """What was found, by row and column of the table: stock torchtitan, or what is between the groups.

    Attributes:
        problems: what keeps the exit status from 0, a line each.
    """

    promises: dict[str, dict[str, str]] = field(default_factory=dict)
    figures: dict[str, dict[str, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def judge(self, promise: str, column: str, verdict: str, detail: str = "", why: str = "") -> None:
        """Enter a verdict; one that does not begin with "holds" is a problem, and `why` says more about that."""
        self.promises.setdefault(promise, {})[column] = f"{verdict}: {detail}" if detail else verdict
        if not verdict.startswith("holds"):
            self.problems.append(f"{column}: {promise}: {verdict}; {why or detail}")

    def enter(self, figure: str, column: str, text: str) -> None:
        """Enter a figure."""
        self.figures.setdefault(figure, {})[column] = text

    def attempt(self, what: str, measure: Callable[[], T]) -> T | None:
        """Measure something; where that fails it is a problem, and what comes next goes on."""
        progress(what)
        try:
            return measure()
        except (BenchError, FileNotFoundError) as error:
            self.problems.append(f"{what}: {error}")
            progress(self.problems[-1])
            return None


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every promise holds, 1 if one does not or a run failed, 2 for bad usage or without a GPU."""
    options = parse(argv)
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also of a machine that has some
    try:
        base = base_config(load_toml(find_config(options.config)))
        gpus = probe()
        plan = make_plan(options.gpus, options.cpu, gpus)
    except ConfigError as error:
        print(f"check_gpu: {error}", file=sys.stderr)
        return 2
    if not plan.on_cpu:
        listed = listed_gpus() or [str(index) for index in range(len(gpus.names))]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(listed[: plan.num_gpus])
    work_dir = (options.work_dir or ROOT / "outputs" / time.strftime("check-gpu-%Y%m%d-%H%M%S")).absolute()
    progress(f"{plan.describe()}; runs in {work_dir}")
    report, machine = Report(), describe_machine()
    measure(plan, base, work_dir, report)
    tests = run_gpu_tests(plan, report)
    (work_dir / "figures.json").write_text(json.dumps(asdict(report) | {"machine": machine | asdict(gpus)}, indent=2))
    print(format_report(report, plan, machine, gpus, tests))
    return 1 if report.problems else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs to use; all if left out, with --cpu 2 ranks")
    parser.add_argument("--cpu", action="store_true", help="without a GPU, and with Gloo alone")
    parser.add_argument("--config", type=Path, default=Path("llama3_debug"), help="TOML of the model and the data")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="folder for the runs, to be made")
    options = parser.parse_args(argv)
    if options.work_dir is not None and options.work_dir.exists():
        parser.error(f"--work-dir must not exist yet, got {options.work_dir}")
    return options


def measure(plan: Plan, base: Config, work_dir: Path, report: Report) -> None:
    """Run everything that the plan allows; runs that take long come last."""
    measure_parity(plan, base, work_dir, report)
    measure_steps(plan, base, work_dir, report)
    for backend in plan.backends:
        what = f"{backend}: SIGKILL of a group, {NUM_KILLS} times"
        report.attempt(what, partial(measure_kills, plan, base, backend, work_dir / f"kills-{backend}", report))


def measure_parity(plan: Plan, base: Config, work_dir: Path, report: Report) -> None:
    """Let stock torchtitan and the groups make the same steps, with deterministic kernels, and compare."""

    def train(job: Job, num_groups: int, num_ranks: int, backend: str = "") -> list[Witness]:
        debug = {"seed": 42, "deterministic": True}
        with Run(job, job_config(base, job, backend, PARITY_STEPS, 1, debug=debug, **WITNESS)) as run:
            run.wait(RUN_SECONDS)
        return read_witnesses(job.run_dir, num_groups, num_ranks)

    job = plan.stock(work_dir / "parity-stock", same_steps=True)
    stock = report.attempt(f"stock: {PARITY_STEPS} steps", partial(train, job, 1, job.num_groups * job.num_ranks))
    for backend in plan.backends if stock else []:
        job = plan.groups(work_dir / f"parity-{backend}")
        what = f"{backend}: the same {PARITY_STEPS} steps"
        ours = report.attempt(what, partial(train, job, NUM_GROUPS, plan.num_ranks, backend))
        if stock and ours:
            judge_parity(stock, ours, plan, backend, report)


def judge_parity(stock: list[Witness], ours: list[Witness], plan: Plan, backend: str, report: Report) -> None:
    """Enter whether the groups made the steps of stock torchtitan."""
    found = compare_with_stock(stock, ours, plan.num_ranks)
    report.judge("same arithmetic", backend, "holds" if found.holds else "does not hold", found.text)
    report.enter("a digest (ms)", backend, _text([1e3 * witness.digest_seconds for witness in ours]))


def measure_steps(plan: Plan, base: Config, work_dir: Path, report: Report) -> None:
    """Time the steps of stock torchtitan and of the groups in turn; behind them the profiler looks at some on a GPU."""
    rounds, steps = (1, 30) if plan.on_cpu else (3, 300)
    tables: dict[str, Config] = {}
    behind = 0
    if not plan.on_cpu:  # torchtitan's profiler wants one
        behind = TRACE_WARMUP + TRACE_STEPS
        profiler = {"profiler_warmup": TRACE_WARMUP, "profiler_active": TRACE_STEPS, "profile_freq": steps + behind}
        tables = {"profiling": {"enable_profiling": True, **profiler}}
        behind += 1  # the last step of a run is another one
    samples: dict[str, list[list[float]]] = {column: [] for column in (STOCK, *plan.backends)}
    for number in range(rounds):
        for column in list(samples):
            run_dir = work_dir / f"steady-{number}-{column}"
            job = plan.stock(run_dir, same_steps=False) if column == STOCK else plan.groups(run_dir)
            config = job_config(base, job, column, steps + behind, LOG_FREQ, **tables)
            what = f"{column}: step time, round {number + 1} of {rounds}"
            seconds = report.attempt(what, partial(time_steps, job, config, RUN_SECONDS))
            if seconds is None:
                del samples[column]
                continue
            samples[column].append(seconds)
    for column, found in compare(samples, STOCK).items() if STOCK in samples else ():
        report.enter("step (ms)", column, _text([1e3 * median(values) for values in found["rounds"]]))
        report.enter("step, ratio to stock", column, _spread(found["ratio"]))
        if plan.on_cpu:
            report.enter("host waits for the GPU in a step", column, "not measured")
        elif column == "nccl":  # Gloo brings all gradients to the host and back: a figure
            judge_ratio(found["ratio"], column, report)
    if not plan.on_cpu and STOCK in samples:
        folders = {column: work_dir / f"steady-{rounds - 1}-{column}" for column in samples}
        judge_waits({column: _host_waits(folder) for column, folder in folders.items()}, plan, report)


def judge_ratio(ratio: Mapping[str, float], column: str, report: Report) -> None:
    """Judge a step's time beside stock torchtitan's; where the machine is noisier than the bar nothing can be told."""
    low, middle = ratio["low"], ratio["median"]
    verdict = "holds" if middle <= MOST_RATIO else "does not hold" if low > MOST_RATIO else "cannot be told"
    report.judge(f"a step takes at most {MOST_RATIO:g} of stock's", column, verdict, _spread(ratio))


def judge_waits(found: Mapping[str, tuple[float, float] | str], plan: Plan, report: Report) -> None:
    """Judge how often the training thread waits for the GPU in a step, beside stock torchtitan's."""
    for column, waits in found.items():
        text = waits if isinstance(waits, str) else f"{waits[0]:.1f}, {waits[1]:.1f} by the training thread"
        report.enter("host waits for the GPU in a step", column, text)
        if column == STOCK:
            continue
        stock, most = found[STOCK], MOST_WAITS + (plan.num_ranks > 1)
        if isinstance(waits, str) or isinstance(stock, str):
            verdict = "cannot be told"
        else:
            verdict = "holds" if waits[1] <= stock[1] + most else "does not hold"
        report.judge(f"training waits for the GPU at most {most} times more in a step", column, verdict, text)


def _spread(found: Mapping[str, float]) -> str:
    return (
        "{median:.3f} ({low:.3f} to {high:.3f})".format(**found)
        if found["low"] < found["high"]
        else f"{found['median']:.3f}"
    )


def _host_waits(run_dir: Path) -> tuple[float, float] | str:
    try:
        return read_host_waits(run_dir)
    except BenchError as error:
        return f"not measured: {error}"


def measure_kills(plan: Plan, base: Config, backend: str, run_dir: Path, report: Report) -> None:
    """SIGKILL a group again and again, let it heal, end the run in order, and judge it.

    Raises:
        BenchError: the run ended by itself, or a group did not come back.
    """
    job = plan.groups(run_dir, MAX_RESTARTS)
    with Run(job, job_config(base, job, backend, ENDLESS, LOG_FREQ)) as run:
        kill_repeatedly(run, NUM_KILLS)
    judge_run(read_run(run_dir), backend, report)


def judge_run(record: RunRecord, backend: str, report: Report) -> None:
    """Enter the verdict of `titan-ft check` on each promise but the arithmetic, the digests, and what the kills cost.

    Raises:
        BenchError: a group that was killed did not come back.
    """
    verdicts = check(record)
    for each in verdicts.judgements:
        if each.asked and (each.promise is not None or each.verdict != "holds"):
            why = "; ".join(each.details(verdicts.start, verdicts.unit.noun)[:3])
            report.judge(each.name, backend, each.shown_verdict, each.reservation, why)
    digests = compare_digests(record)
    report.judge("groups' digests", backend, "holds" if digests.startswith("equal (") else "does not hold", digests)
    kills = costs(record)
    if len(kills) < NUM_KILLS or any(cost["rejoin_seconds"] is None for cost in kills):
        raise BenchError(f"a group that was killed did not come back ({len(kills)} kills)")
    for figure, name in (("survivors' stall at a SIGKILL (s)", "stall_seconds"), ("steps lost by it", "steps_lost")):
        report.enter(figure, backend, _text([cost[name] for cost in kills]))
    report.enter("kill to contributing again (s)", backend, _text([cost["rejoin_seconds"] for cost in kills]))
    served = [event for event in record.of(StateServed) if event.copy_seconds > 0]
    fetched = [event for event in record.of(HealFinished) if event.fetch_seconds > 0]
    rates = {
        "state of a rank (MB)": [event.bytes / 1e6 for event in fetched],
        "donor's copy of it (GB/s)": [event.bytes / 1e9 / event.copy_seconds for event in served],
        "joiner's fetch of it (Mbit/s)": [event.bytes * 8 / 1e6 / event.fetch_seconds for event in fetched],
    }
    for figure, values in rates.items():
        report.enter(figure, backend, _text(values) if values else "-")


def run_gpu_tests(plan: Plan, report: Report) -> str:
    """Run the tests that need a GPU; return what became of them."""
    if plan.on_cpu:
        return "not run: there is none"
    if importlib.util.find_spec("pytest") is None:
        return f"not run: {sys.executable} has no pytest"
    progress("tests that need a GPU")
    # Not those of this module, one of which starts all of it.
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--ignore=tests/benchmarks"]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired:
        ended = subprocess.CompletedProcess(command, 1, f"not over within {RUN_SECONDS:g} s", "")
    last = ((ended.stdout.strip() or ended.stderr.strip()).splitlines() or ["no word"])[-1]
    if ended.returncode != 0:
        report.problems.append(f"tests that need a GPU: {last}")
    return last


def format_report(report: Report, plan: Plan, machine: Mapping[str, Any], gpus: Gpus, tests: str) -> str:
    """Return what to paste: machine, table, what was not run, and what does not hold."""
    columns = [STOCK, *BACKENDS]
    rows = [["", "stock torchtitan", *(f"groups over {backend}" for backend in BACKENDS)]]
    for name, cells in [*report.promises.items(), *report.figures.items()]:
        missing = {column: "-" if column in plan.backends else "not run" for column in BACKENDS}
        rows.append([name, *({STOCK: "", **missing, **cells}[column] for column in columns)])
    used = f"{plan.num_gpus} x {gpus.names[0]}" if gpus.names else "no GPU"
    lines = [
        "{cpu}, {cores} cores, {memory_gib} GiB, load {load}; {platform}".format(**machine),
        f"{used}; CUDA {gpus.cuda or '-'}, NCCL {gpus.nccl or '-'}; {plan.describe()}",
        "Python {python}, torch {torch}, torchtitan {torchtitan}, torchft {torchft}".format(**machine)
        + time.strftime("; %Y-%m-%d"),
        "",
        *markdown(rows),
        "",
        plan.describe_stock(),
        *(f"groups over {name}: not run: {plan.why_not(name)}" for name in BACKENDS if plan.why_not(name)),
        f"tests that need a GPU: {tests}",
        *(report.problems or ["every promise holds"]),
    ]
    return "\n".join(lines)


def _text(values: Sequence[float]) -> str:
    """Return the median, and the range that it comes from."""
    figures = median(values), min(values), max(values)
    middle, low, high = (f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in figures)
    return middle if low == high else f"{middle} ({low} to {high})"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it started ends with it
    sys.exit(main())
