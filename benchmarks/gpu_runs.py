# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The training runs of scripts/check_gpu.sh: each part starts jobs, and enters rows into the
report.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.gpu_plan import DEADLY_ATTEMPT, Plan, job_config
from benchmarks.gpu_report import LEFT_OUT, Report, text_of
from benchmarks.kills import MAX_RESTARTS, costs, kill_repeatedly
from benchmarks.parity import Witness, compare_with_stock, read_host_waits, read_witnesses
from benchmarks.record import (
    compare_digests,
    injected,
    longest_delay,
    read_run,
    survivor_gaps,
    usual_step,
)
from benchmarks.recovery import STEPS as ENDLESS
from benchmarks.run import VICTIM, BenchError, Run
from benchmarks.steady import LOG_FREQ, compare, logged_steps, step_seconds, time_steps
from benchmarks.systems import NUM_GROUPS, STOCK, Config, Job, first_log
from titan_ft.history.check import check
from titan_ft.history.record.run_record import RunRecord
from titan_ft.launch.group.agent import WORKERS_ARE_NEW_PROCESSES
from titan_ft.run.events import HealFinished, StateServed, WorkerStarted
from titan_ft.run.paths import RunPaths

DETERMINISTIC = {"seed": 42, "deterministic": True}
TRACE_WARMUP, TRACE_STEPS = 2, 3
"""Steps after the timed ones: with those the profiler begins, and these it keeps."""
MOST_RATIO = 1.05
MOST_WAITS = 3
"""Of the training thread in a step, for the loss, the rows and the messages (docs/gpu.md); a group
of several ranks gathers its losses besides."""
LEAST_STEP_SECONDS = 0.2
"""In a shorter step a vote and a few waits of the host are several percent, on a healthy machine
too.
"""
TIMED_SEQ_LEN, TIMED_TOKENS = 2048, 16384
"""Of the first try: the debug model, whose attention in fp32 keeps all scores, takes 0.13 s and 21
GB on an H200.
"""
LENGTH_TRIES = 4
NUM_KILLS = 2
RUN_SECONDS = 600.0
"""A deadline of a run that ends by itself."""
RECIPE_STEPS = 10
LEAST_SEQ_LEN = 2048
_MEMORY = re.compile(r"memory:\s*([\d.]+GiB\([\d.]+%\))")
"""In torchtitan's line of a step."""
WITNESS, DEATH = (
    {"experimental": {"custom_import": f"benchmarks.{name}"}} for name in ("witness", "death")
)
FORMS: Mapping[str, Config] = {
    "gradients in bfloat16": {"exchange_dtype": "bfloat16"},
    "gradients in 8 bits": {"should_quantize": True},
}


class Trajectories:
    """The same steps by stock torchtitan and by the groups.

    Args:
        base: see `gpu_plan.base_config`.
    """

    def __init__(self, plan: Plan, base: Config, work_dir: Path, report: Report) -> None:
        self._plan, self._base, self._work_dir, self._report = plan, base, work_dir, report
        self._steps = 5 if plan.small else 20
        self._stock: list[Witness] | None = None

    def compare_all(self) -> None:
        """Compare the groups over each backend with stock torchtitan, with deterministic
        kernels.
        """
        job = self._plan.stock(self._work_dir / "parity-stock", same_steps=True)
        what = f"stock torchtitan: {self._steps} steps"
        self._stock = self._report.attempt(what, partial(self._train, job, "", DETERMINISTIC))
        for backend in self._plan.backends if self._stock else []:
            self._report.attempt(
                f"{backend}: the steps of stock torchtitan", partial(self._compare, backend)
            )

    def compare_undetermined(self) -> None:
        """Compare the steps over NCCL without deterministic kernels: with those torch switches
        NCCL's NVLS off.
        """
        if self._stock is None:
            raise BenchError("stock torchtitan made no steps")
        ours = self._groups("nccl", "nvls", debug={"seed": 42})
        found = compare_with_stock(self._stock, ours, self._plan.num_ranks)
        verdict = "holds" if found.close else "does not hold"
        self._report.judge("nccl: the steps of stock torchtitan, with NVLS", verdict, found.text)

    def compare_form(self, form: str) -> None:
        """Compare gradients that travel in fewer bits over NCCL with the same over Gloo: of two
        groups, bit for bit.
        """
        gloo, nccl = (
            self._groups(backend, form.replace(" ", "-"), fault_tolerance=FORMS[form])
            for backend in ("gloo", "nccl")
        )
        found = compare_with_stock(gloo, nccl, self._plan.num_ranks)
        self._report.judge(
            f"nccl: {form}, as over Gloo", "holds" if found.holds else "does not hold", found.text
        )

    def stock_step_seconds(self) -> float:
        """Return the time of a step of the config as it is."""
        log = first_log(
            self._plan.stock(self._work_dir / "parity-stock", same_steps=True)
        ).read_text(errors="replace")
        return median(step_seconds(logged_steps(log), self._steps // 2))

    def _compare(self, backend: str) -> None:
        assert self._stock is not None
        judge_parity(
            self._stock, self._groups(backend, "parity"), self._plan, backend, self._report
        )

    def _groups(self, backend: str, name: str, **tables: Config) -> list[Witness]:
        job = self._plan.groups(self._work_dir / f"{name}-{backend}")
        return self._train(job, backend, **{"debug": DETERMINISTIC, **tables})

    def _train(self, job: Job, backend: str, debug: Config, **tables: Config) -> list[Witness]:
        config = job_config(
            self._base, job, backend, self._steps, 1, debug=debug, **WITNESS, **tables
        )
        with Run(job, config) as run:
            run.wait(RUN_SECONDS)
        if job.system == STOCK:  # one group of all ranks
            return read_witnesses(job.run_dir, 1, job.num_groups * job.num_ranks)
        return read_witnesses(job.run_dir, job.num_groups, job.num_ranks)


def judge_parity(
    stock: list[Witness], ours: list[Witness], plan: Plan, backend: str, report: Report
) -> None:
    """Enter whether the groups made the steps of stock torchtitan."""
    found = compare_with_stock(stock, ours, plan.num_ranks)
    verdict = "holds" if found.holds else "does not hold"
    report.judge(f"{backend}: the steps of stock torchtitan", verdict, found.text)
    report.enter(
        f"{backend}: a digest (ms)", text_of([1e3 * witness.digest_seconds for witness in ours])
    )


def measure_steps(plan: Plan, base: Config, work_dir: Path, report: Report) -> None:
    """Time the steps of stock torchtitan and of the groups in turn; then, on a GPU, the profiler
    sees a few more.

    Raises:
        BenchError: stock torchtitan failed.
    """
    rounds, steps = (3 if "nccl" in plan.backends and not plan.small else 1), 30
    timed = StepTimes(plan, base, steps, work_dir)
    if plan.small:
        first = timed.time(STOCK, "steady-0-stock")
    else:
        first = timed.lengthen()
        report.enter("stock: tokens of a rank in a step that is timed", timed.size)
    samples: dict[str, list[list[float]]] = {
        STOCK: [first],
        **{backend: [] for backend in plan.backends},
    }
    folders = {STOCK: timed.last}
    for number in range(rounds):
        for column in [column for column in samples if len(samples[column]) == number]:
            what = f"{column}: step time, round {number + 1} of {rounds}"
            seconds = report.attempt(what, partial(timed.time, column, f"steady-{number}-{column}"))
            if seconds is None:
                del samples[column]
                continue
            samples[column].append(seconds)
            folders[column] = timed.last
    for column, found in compare(samples, STOCK).items() if STOCK in samples else ():
        report.enter(
            f"{column}: step (ms)", text_of([1e3 * median(values) for values in found["rounds"]])
        )
        if column != STOCK:
            judge_ratio(found["ratio"], column, plan, report)
    if plan.small:
        report.judge(
            "host waits for the GPU in a step",
            f"{LEFT_OUT}: the profiler needs a GPU's own libraries",
        )
    elif STOCK in samples:
        judge_waits({column: _host_waits(folders[column]) for column in samples}, plan, report)


class StepTimes:
    """Runs whose steps are timed, all of one size.

    Attributes:
        last: folder of the last run.
    """

    def __init__(self, plan: Plan, base: Config, steps: int, work_dir: Path) -> None:
        self._plan, self._base, self._steps, self._work_dir = (
            plan,
            copy.deepcopy(base),
            steps,
            work_dir,
        )
        self.last = work_dir
        behind = TRACE_WARMUP + TRACE_STEPS
        profiler = {
            "profiler_warmup": TRACE_WARMUP,
            "profiler_active": TRACE_STEPS,
            "profile_freq": steps + behind,
        }
        self._tables: dict[str, Config] = {}
        if not plan.small:
            self._tables = {"profiling": {"enable_profiling": True, **profiler}}
            self._steps += behind + 1  # the last step of a run is another one

    @property
    def size(self) -> str:
        """Return sequences and their length."""
        training = self._base["training"]
        return f"{training['local_batch_size']} x {training['seq_len']}"

    def time(self, column: str, name: str) -> list[float]:
        """Return the seconds of a step in each interval that is logged.

        Raises:
            BenchError: the run failed.
        """
        plan, self.last = self._plan, self._work_dir / name
        job = plan.stock(self.last, same_steps=False) if column == STOCK else plan.groups(self.last)
        config = job_config(self._base, job, column, self._steps, LOG_FREQ, **self._tables)
        return time_steps(job, config, RUN_SECONDS).seconds

    def lengthen(self) -> list[float]:
        """Make steps so long that stock torchtitan's takes `LEAST_STEP_SECONDS`; returns the times
        of its run.

        Raises:
            BenchError: a run failed, or so many tries were not enough.
        """
        training = self._base["training"]
        training["seq_len"] = max(training.get("seq_len", 0), TIMED_SEQ_LEN)
        training["local_batch_size"] = max(
            training["local_batch_size"], TIMED_TOKENS // training["seq_len"]
        )
        for number in range(LENGTH_TRIES):
            found = self.time(STOCK, f"length-{number}")
            if (seconds := median(found)) >= LEAST_STEP_SECONDS:
                return found
            # Of a short step much is not the GPU's time: it grows by less than the batch does.
            training["local_batch_size"] *= math.ceil(1.25 * LEAST_STEP_SECONDS / seconds)
        raise BenchError(
            f"a step of {self.size} tokens is not known to take {LEAST_STEP_SECONDS:g} s"
        )


def judge_ratio(ratio: Mapping[str, float], column: str, plan: Plan, report: Report) -> None:
    """Judge a step's time beside stock torchtitan's; no verdict if the machine is noisier than the
    bound.

    Over Gloo all gradients go to the host and back, so that ratio is a figure without a verdict.
    """
    what = f"{column}: step, ratio to stock torchtitan"
    if column != "nccl" or plan.small:
        report.enter(what, _spread(ratio))
        return
    low, middle = ratio["low"], ratio["median"]
    verdict = (
        "holds"
        if middle <= MOST_RATIO
        else "does not hold"
        if low > MOST_RATIO
        else "cannot be told"
    )
    report.judge(f"{what}, at most {MOST_RATIO:g}", verdict, _spread(ratio))


def judge_waits(found: Mapping[str, tuple[float, float] | str], plan: Plan, report: Report) -> None:
    """Judge how often the training thread waits for the GPU in a step, beside stock
    torchtitan's.
    """
    most = MOST_WAITS + (plan.num_ranks > 1)
    for column, waits in found.items():
        text = (
            waits
            if isinstance(waits, str)
            else f"{waits[0]:.1f}, {waits[1]:.1f} by the training thread"
        )
        what = f"{column}: host waits for the GPU in a step"
        if column == STOCK:
            report.enter(what, text)
            continue
        stock = found[STOCK]
        if isinstance(waits, str) or isinstance(stock, str):
            verdict = "cannot be told"
        else:
            verdict = "holds" if waits[1] <= stock[1] + most else "does not hold"
        report.judge(f"{what}, at most {most} more of training", verdict, text)


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


def measure_kills(plan: Plan, base: Config, backend: str, work_dir: Path, report: Report) -> None:
    """SIGKILL a group twice, end the run in order, and judge it.

    After the first kill the group heals. After the second one its next attempt dies too, while the
    other groups connect with it (`benchmarks.death`); the attempt after that one heals.

    Raises:
        BenchError: the run ended by itself, or the group did not come back, or no attempt of it
            died in set-up.
    """
    run_dir = work_dir / f"kills-{backend}"
    job = plan.groups(run_dir, MAX_RESTARTS)
    with Run(job, job_config(base, job, backend, ENDLESS, LOG_FREQ, **DEATH)) as run:
        kill_repeatedly(run, NUM_KILLS)
    record = read_run(run_dir)
    what = f"{backend}: SIGKILL of a group"
    judge_run(record, what, report)
    kills = costs(record)
    if len(kills) < NUM_KILLS or any(cost["rejoin_seconds"] is None for cost in kills):
        raise BenchError(f"a group that was killed did not come back ({len(kills)} kills)")
    report.enter(f"{what}: survivors' stall (s)", text_of([kills[0]["stall_seconds"]]))
    report.enter(f"{what}: until it contributes again (s)", text_of([kills[0]["rejoin_seconds"]]))
    report.enter(
        f"{what}: steps lost by both kills", text_of([sum(kill["steps_lost"] for kill in kills)])
    )
    report.enter(f"{what}: workers are forks, with all imports done", find_forks(run_dir))
    enter_rates(record, backend, report)
    starts = {event.attempt for event in record.of(WorkerStarted) if event.replica == VICTIM}
    if starts != set(range(DEADLY_ATTEMPT + 2)):
        raise BenchError(f"no attempt died in set-up, of {sorted(starts)}")
    gaps = survivor_gaps(record, injected(record)[-1].time, math.inf)
    longest = longest_delay(gaps, usual_step(record))
    report.judge(
        f"{backend}: SIGKILL in set-up", "holds", f"survivors' longest stall {longest:.3g} s"
    )


def find_forks(run_dir: Path) -> str:
    """Return "yes" if the workers of a run are forks, otherwise "no" and the reason.

    Without forks each restart imports everything again. That took 17 of the 19.5 s of a rejoin on
    an H100, where NVML had started a thread.
    """
    log = RunPaths(run_dir).agent_log(VICTIM)
    for line in log.read_text(errors="replace").splitlines():
        reason, found, _ = line.partition(f": {WORKERS_ARE_NEW_PROCESSES}")
        if found:
            return f"no: {reason}"
    return "yes"


def judge_run(record: RunRecord, what: str, report: Report) -> None:
    """Enter the verdict of `titan-ft check` on all promises but the arithmetic, and that on the
    groups' digests.
    """
    verdicts = check(record)
    # A row without a promise, such as the clocks, counts only where something is wrong with it.
    asked = [each for each in verdicts.judgements if each.asked]
    asked = [each for each in asked if each.promise is not None or each.verdict != "holds"]
    worse = [each for each in asked if each.verdict != "holds"]
    why = "; ".join(
        f"{each.name}: {'; '.join(each.details(verdicts.start, verdicts.unit.noun)[:3])}"
        for each in worse
    )
    verdict = (
        "holds"
        if not worse
        else "does not hold"
        if verdicts.verdict == "does not hold"
        else "cannot be told"
    )
    noted = [f"{each.name}: {each.reservation}" for each in asked if each.reservation]
    figure = "; ".join([f"{len(asked) - len(worse)} of {len(asked)}", *noted])
    report.judge(f"{what}: promises of `titan-ft check`", verdict, figure, why)
    digests = compare_digests(record)
    equal = digests.startswith("equal (")
    report.judge(f"{what}: groups' digests", "holds" if equal else "does not hold", digests)


def enter_rates(record: RunRecord, backend: str, report: Report) -> None:
    """Enter how large a state is, and how fast it is copied and fetched."""
    served = [event for event in record.of(StateServed) if event.copy_seconds > 0]
    fetched = [event for event in record.of(HealFinished) if event.fetch_seconds > 0]
    rates = {
        "state of a rank (MB)": [event.bytes / 1e6 for event in fetched],
        "donor's copy of it (GB/s)": [event.bytes / 1e9 / event.copy_seconds for event in served],
        "joiner's fetch of it (Mbit/s)": [
            event.bytes * 8 / 1e6 / event.fetch_seconds for event in fetched
        ],
    }
    for figure, values in rates.items():
        report.enter(f"{backend}: {figure}", text_of(values) if values else "-")


def measure_recipe(
    plan: Plan,
    recipe: Config,
    name: str,
    memory_gb: Sequence[float],
    work_dir: Path,
    report: Report,
) -> None:
    """Make some steps of a recipe by two groups, over the process group that it names.

    Raises:
        BenchError: the run failed.
    """
    what = f"{name}: {RECIPE_STEPS} steps by two groups"
    training = recipe["training"] = dict(recipe["training"])
    while not plan.small and (needed := _recipe_gb(plan, training["seq_len"])) > min(memory_gb):
        if training["seq_len"] <= LEAST_SEQ_LEN:
            report.judge(
                what, f"{LEFT_OUT}: needs {needed:.0f} GB of a GPU", f"{min(memory_gb):.0f} GB"
            )
            return
        training["seq_len"] //= 2
    job = plan.groups(work_dir / "recipe")
    backend = recipe["fault_tolerance"].get("process_group", "gloo")
    with Run(job, job_config(recipe, job, backend, RECIPE_STEPS, 1)) as run:
        run.wait(RUN_SECONDS)
    log = first_log(job).read_text(errors="replace")
    size = f"{training['local_batch_size']} x {training['seq_len']} tokens a rank"
    report.enter(
        f"{what}: step (s)",
        f"{text_of(step_seconds(logged_steps(log), 2))}; {size}, over {backend}",
    )
    if held := _MEMORY.findall(log):
        report.enter(f"{what}: memory of a GPU that a rank holds", held[-1])
    judge_run(read_run(job.run_dir), what, report)


def _recipe_gb(plan: Plan, seq_len: int) -> float:
    """Return how much memory of a GPU the llama3_1b recipe needs, as measured on an H200 at 8192
    tokens.
    """
    groups_of_a_gpu = NUM_GROUPS if plan.num_gpus == 1 else 1
    state, activations, rest = 24 / plan.num_ranks, 22 * seq_len / 8192, 1
    return groups_of_a_gpu * (state + activations + rest)
