# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The checks that need GPUs, in less than ten minutes on one GPU: scripts/check_gpu.sh runs them.

On any number of GPUs: NCCL's collectives on one communicator, reconfigurations, pinned memory; two
groups over Gloo beside stock torchtitan (the same steps, step times, waits of the host), SIGKILLs
and heals, a recipe at size, the tests that need a GPU. With two GPUs also all of the groups over
NCCL, and gradients in fewer bits. With four and more also FSDP in each group beside the exchange.

Each part gives its rows of the table, even if another part fails. With --cpu the training runs are
on the CPU, so that their logic can be tried anywhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.command import describe_machine
from benchmarks.gpu_plan import Plan, base_config, make_plan, probe, recipe_config
from benchmarks.gpu_probes import POOL, run_probe
from benchmarks.gpu_report import FAILED, LEFT_OUT, Report, format_report, text_of
from benchmarks.gpu_runs import (
    FORMS,
    Trajectories,
    measure_kills,
    measure_recipe,
    measure_steps,
)
from benchmarks.run import progress
from benchmarks.systems import Config
from titan_ft.config import ConfigError, load_toml
from titan_ft.data.assets import find_config
from titan_ft.launch.gpus import listed_gpus

ROOT = Path(__file__).parents[1]
GPU_TESTS = ("tests/test_device.py", "tests/replica/membership/test_nccl.py")
"""By name: to collect all tests takes packages that a borrowed machine may lack."""
TEST_SECONDS = 300.0
MOST_STILL_SECONDS = 0.2
"""The longest time in which Python may stand still: heartbeats and watches of other threads go
on.
"""
LAST_COMMUNICATORS = 8
"""Each takes a second; one thread or descriptor that is left by each shows in so few."""
MOST_LEFT_MIB = 8
"""Memory of a GPU that they may leave: less than one communicator takes."""
FSDP_GPUS = 4
NCCL_ROWS = (
    "the steps of stock torchtitan",
    "step, ratio to stock torchtitan",
    "SIGKILL of a group",
    "SIGKILL in set-up",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every promise holds, 1 if one does not or a run failed, 2 for bad usage or
    without a GPU.
    """
    options = parse(argv)
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # also of a machine that has some
    try:
        base = base_config(load_toml(find_config(options.config)))
        recipe = recipe_config(load_toml(find_config(options.recipe)))
        gpus = probe()
        plan = make_plan(options.gpus, options.cpu, gpus, options.small)
    except ConfigError as error:
        print(f"check_gpu: {error}", file=sys.stderr)
        return 2
    if not plan.on_cpu:
        listed = listed_gpus() or [str(index) for index in range(len(gpus.names))]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(listed[: plan.num_gpus])
    work_dir = (
        options.work_dir or ROOT / "outputs" / time.strftime("check-gpu-%Y%m%d-%H%M%S")
    ).absolute()
    progress(f"{plan.describe()}; runs in {work_dir}")
    machine = describe_machine() | {"interpreter": sys.executable}
    report = Report(work_dir / "figures.json", machine | asdict(gpus))
    measure_gpu(plan, report)
    measure_runs(plan, base, work_dir, report)
    name = Path(options.recipe).stem
    what = f"{name}: two groups"
    report.attempt(
        what, partial(measure_recipe, plan, recipe, name, gpus.memory_gb, work_dir, report)
    )
    run_gpu_tests(plan, report)
    print(format_report(report, plan, machine, gpus))
    return 1 if report.problems else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs to use; all if left out, with --cpu 2 ranks"
    )
    parser.add_argument("--cpu", action="store_true", help="without a GPU, and with Gloo alone")
    parser.add_argument(
        "--small", action="store_true", help="fewer steps and less memory, for slow kernels"
    )
    parser.add_argument(
        "--config", type=Path, default=Path("llama3_debug"), help="TOML of the model and the data"
    )
    parser.add_argument(
        "--recipe", type=Path, default=Path("llama3_1b"), help="TOML of the run at size"
    )
    parser.add_argument(
        "--work-dir", type=Path, metavar="DIR", help="folder for the runs, to be made"
    )
    options = parser.parse_args(argv)
    if options.work_dir is not None and options.work_dir.exists():
        parser.error(f"--work-dir must not exist yet, got {options.work_dir}")
    return options


def measure_gpu(plan: Plan, report: Report) -> None:
    """Look at NCCL and at pinned memory, without a training run."""
    parts: dict[str, Callable[[str, Plan, Report], None]] = {
        "NCCL: every collective of the exchange on one communicator": measure_collectives,
        "NCCL: reconfigurations leave nothing": measure_reconfigurations,
        "Python goes on while memory is pinned and given back": measure_pinning,
    }
    for what, measure in parts.items():
        if plan.on_cpu:
            report.judge(what, "needs a GPU")
        elif not plan.has_nccl and measure is not measure_pinning:
            report.judge(what, f"{LEFT_OUT}: this torch has no NCCL")
        else:
            report.attempt(what, partial(measure, what, plan, report))


def measure_collectives(what: str, plan: Plan, report: Report) -> None:
    """Exchange gradients in each form on a communicator of all GPUs."""
    numel = 1 << (18 if plan.small else 24)
    found = run_probe("collectives", plan.num_gpus, numel)
    slowest = {name: max(each["seconds"][name] for each in found) for name in found[0]["seconds"]}
    times = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in slowest.items())
    report.judge(what, "holds", f"{plan.num_gpus} ranks, {4 * numel >> 20} MiB: {times}")


def measure_reconfigurations(what: str, plan: Plan, report: Report) -> None:
    """Build communicators one after the other, and measure their remains."""
    found = run_probe("reconfigure", plan.num_gpus, LAST_COMMUNICATORS)
    grown = {
        name: max(each["after"][name] - each["before"][name] for each in found)
        for name in found[0]["before"]
    }
    least = {"MiB": MOST_LEFT_MIB}
    verdict = (
        "holds"
        if all(number <= least.get(name, 0) for name, number in grown.items())
        else "does not hold"
    )
    seconds = text_of([seconds for each in found for seconds in each["seconds"]])
    left = ", ".join(f"{number:+d} {name}" for name, number in grown.items())
    report.judge(
        what,
        verdict,
        f"{POOL + LAST_COMMUNICATORS}, {seconds} s each; by the last {LAST_COMMUNICATORS} {left}",
    )


def measure_pinning(what: str, plan: Plan, report: Report) -> None:
    """Pin memory and give it back as a donor does, beside a thread that ticks."""
    mebibytes = 256 if plan.small else 8 << 10
    (found,) = run_probe("pin", 1, mebibytes)
    still = max(found["pin, still"], found["give back, still"])
    times = ", ".join(
        f"{name} {found[name]:.2f} s (still for {found[f'{name}, still']:.2f})"
        for name in ("pin", "give back")
    )
    report.judge(
        what,
        "holds" if still <= MOST_STILL_SECONDS else "does not hold",
        f"{mebibytes} MiB: {times}",
    )


def measure_runs(plan: Plan, base: Config, work_dir: Path, report: Report) -> None:
    """Train two groups beside stock torchtitan, over each backend that can be between them."""
    trajectories = Trajectories(plan, base, work_dir, report)
    trajectories.compare_all()
    report.attempt("step times", partial(measure_steps, plan, base, work_dir, report))
    for backend in plan.backends:
        what = f"{backend}: SIGKILL of a group"
        report.attempt(what, partial(measure_kills, plan, base, backend, work_dir, report))
    why = plan.why_not("nccl")
    for what in NCCL_ROWS if why else ():
        report.judge(f"nccl: {what}", why)
    more: dict[str, Callable[[], None]] = {
        "nccl: the steps of stock torchtitan, with NVLS": trajectories.compare_undetermined,
        **{
            f"nccl: {form}, as over Gloo": partial(trajectories.compare_form, form)
            for form in FORMS
        },
    }
    for what, compare in more.items():
        if why:
            report.judge(what, why)
        else:
            report.attempt(what, compare)
    what = "FSDP in each group, beside the exchange"
    if plan.on_cpu or plan.num_gpus < FSDP_GPUS:
        report.judge(what, f"needs {FSDP_GPUS} GPUs")
    else:
        report.enter(what, f"{plan.num_ranks} ranks a group, in all rows")


def run_gpu_tests(plan: Plan, report: Report) -> None:
    """Run the tests that need a GPU."""
    what = "tests that need a GPU"
    if plan.on_cpu:
        report.judge(what, "needs a GPU")
        return
    if importlib.util.find_spec("pytest") is None:
        report.judge(what, f"{LEFT_OUT}: {sys.executable} has no pytest")
        return
    progress(what)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *GPU_TESTS]
    try:
        ended = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TEST_SECONDS
        )
    except subprocess.TimeoutExpired:
        ended = subprocess.CompletedProcess(command, 1, f"not over within {TEST_SECONDS:g} s", "")
    last = ((ended.stdout.strip() or ended.stderr.strip()).splitlines() or ["no word"])[-1]
    report.judge(what, "holds" if ended.returncode == 0 else FAILED, last)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it started ends with it
    sys.exit(main())
