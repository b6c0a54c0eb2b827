# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's own integration tests, each with two replica groups, a SIGKILL and `titan-ft check`.

    python scripts/integration.py OUT [NAME ...]

The tables `integration_0_2_2.toml` and `integration_0_3_0.toml` have the flags of the tests; the
installed torchtitan chooses one. Shapes are small: 128 tokens, 2 sequences a rank, 8 in a pipeline.
So two groups of 8 ranks run on two cores, in 10 GB of memory. OUT gets the logs and results.jsonl;
a second call tries the tests that have no result there."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from benchmarks.run import progress
from titan_ft.host.release import series
from titan_ft.run.events import StepCommitted
from titan_ft.run.paths import RunPaths
from titan_ft.run.tail import EventTail, last_error_line

ROOT = Path(__file__).parents[1]
TABLES = {"0.2": "integration_0_2_2.toml", "0.3": "integration_0_3_0.toml"}
STEPS = 14
RESUMED_STEPS = 24
"""The step that a resumed run reaches. It begins at step 14 and needs ten of its own."""
STOCK_STEPS = 3
KILL_AFTER = 4
"""Steps of a run that the victim has committed when it is killed."""
RUN_SECONDS, LONG_RUN_SECONDS = 240.0, 420.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.3
MANY_RANKS = 8
SEQUENCE = 128
"""Tokens of a sequence. torchtitan 0.3 deals out blocks of so many to the ranks of a context
parallelism.
"""
MICROBATCHES = 8
SEQUENCES = 2
"""Sequences of a rank without a pipeline. With eight, a step of 2 x 4 ranks took 7 s."""
REASON_LETTERS = 300
FUNCTION = ("llama3", "llama3_debugmodel")
"""What torchtitan 0.3's tests run where they name no --module and --config."""
GRAPHS = "--training.disable_cuda_graphs"
"""Replica groups have none. torchtitan 0.3 refuses them with a pipeline, where its tests leave the
flag out.
"""
ENABLE = "--fault_tolerance.enable"
_DROPPED = (
    "--training.steps",
    "--training.local_batch_size",
    "--validation.dataset",
    "--validator.dataloader.dataset",
)
"""Flags of the tests in whose place this module has its own: their data is in torchtitan's
checkout.
"""
_OF_BASE_CONFIG = (
    "--checkpoint.no-last_save_model_only",
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=2",
)
"""What 0.2's tests have from the config that they begin with; those of 0.3 name it themselves."""


class Verdict(StrEnum):
    """How a test ends."""

    HOLDS = "holds"  # all runs ended in order, and `check` proves every promise
    REFUSED = "refused by name"
    STOCK_FAILS = "fails in stock too"
    FAILS = "fails"


class Case(msgspec.Struct, forbid_unknown_fields=True):
    """One of torchtitan's tests: the ranks of a group, and the flags of each of its runs.

    Attributes:
        resume_with: fields that a resumed run changes on purpose; `titan-ft launch` asks for them.
    """

    name: str
    ranks: int
    runs: list[str]
    resume_with: str = ""


class Result(msgspec.Struct):
    """What became of a test; a line of results.jsonl."""

    name: str
    ranks: int
    verdict: Verdict
    reason: str
    seconds: int


@dataclass(frozen=True)
class Ended:
    """How a process ended. `status` is None if it was ended for its time."""

    status: int | None
    log: Path

    @property
    def reason(self) -> str:
        """The line that says why it failed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        refusals = [line for line in lines if line.startswith("titan-ft:")]
        line = refusals[0] if refusals else last_error_line(self.log)
        how = "did not end in its time" if self.status is None else f"exit status {self.status}"
        return f"{how}: {line[:REASON_LETTERS]}"


def read_tests(release: str) -> list[Case]:
    """Return the tests of a release, "0.2" or "0.3", those of few ranks first."""
    text = (ROOT / "benchmarks" / TABLES[release]).read_text(encoding="utf-8")
    tests = msgspec.convert(tomllib.loads(text)["test"], list[Case])
    return sorted(tests, key=lambda test: test.ranks)


def own_flags(run: str, release: str) -> list[str]:
    """Return the flags that this module gives each run: small shapes, packaged data, float32,
    replica groups.
    """
    found = re.search(r"context_parallel_degree[= ](\d+)", run)
    length = SEQUENCE * (int(found[1]) if found else 1)
    fixed = "pipeline_parallel_degree" in run or "global_batch_size" in run
    batch = MICROBATCHES if fixed else SEQUENCES
    flags = [
        ENABLE,
        "--fault_tolerance.process_group=gloo",
        "--fault_tolerance.digest_every=5",
        "--model.hf_assets_path=titan_ft://tokenizer",
        "--training.dataset=austen",
        "--training.mixed_precision_param=float32",
        "--training.mixed_precision_reduce=float32",
        "--validation.dataset=austen_validation",
        "--lr_scheduler.warmup_steps=2",
        # A resumed run makes more steps, and goes on with the schedule.
        f"--lr_scheduler.total_steps={RESUMED_STEPS}",
        "--debug.seed=42",
    ]
    for table in ("training", "validation"):
        flags += [f"--{table}.seq_len={length}", f"--{table}.local_batch_size={batch}"]
    if release == "0.2":
        flags += _OF_BASE_CONFIG
    return flags


def titan_flags(run: str, hf_folder: Path, schedule: Path) -> list[str]:
    """Return a run's flags as torchtitan has them, without those that `own_flags` replaces.

    Two groups double a global batch. `{hf}` and `{schedule}` are files that the test has made.
    """
    text = run.replace("{hf}", str(hf_folder)).replace("{schedule}", str(schedule))
    words = text.replace("global_batch_size 32", "global_batch_size 64").split()
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
            continue
        name, equals, _ = word.partition("=")
        if name in _DROPPED:
            skip = not equals
            continue
        kept.append(word)
    return kept


def format_schedule(num_microbatches: int = MICROBATCHES) -> str:
    """Return the CSV of a schedule: two ranks with two stages each, all forwards before all
    backwards.

    A cell is the action of a rank in a time step. A stage begins a microbatch after the stage
    before has sent it.
    """
    last = 2 * num_microbatches
    begins = {"0F": 0, "1F": 1, "2F": num_microbatches, "3F": num_microbatches + 1}
    begins |= {
        "3B": last + 1,
        "2B": last + 2,
        "1B": last + 1 + num_microbatches,
        "0B": last + 2 + num_microbatches,
    }
    rows = [["" for _ in range(2 * last + 2)] for _ in range(2)]
    for name, begin in begins.items():
        for microbatch in range(num_microbatches):
            rows[int(name[0]) % 2][begin + microbatch] = f"{name}{microbatch}"
    return "".join(f"{','.join(row)}\n" for row in rows)


class Trial:
    """The runs of one test, in a folder."""

    def __init__(self, test: Case, out: Path, release: str) -> None:
        self.test, self.release = test, release
        self.folder = out / re.sub(r"[^\w.+-]", "_", test.name)
        # `titan-ft launch` refuses the folder of another run: a second try would count as refused.
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        long = test.ranks >= MANY_RANKS or "compile" in test.name
        self.seconds = LONG_RUN_SECONDS if long else RUN_SECONDS
        self.schedule = self.folder / "schedule.csv"
        self.schedule.write_text(format_schedule(), encoding="utf-8")
        self.env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}

    def judge(self) -> tuple[Verdict, str]:
        """Make all runs of the test; returns how it ended, and why."""
        run_dirs: list[Path] = []
        for number, run in enumerate(self.test.runs):
            resume = number > 0 and "--checkpoint.enable" in run and "initial_load" not in run
            if not resume:
                run_dirs.append(self.folder / f"run-{number}")
            ended = self._launch(number, run, run_dirs[-1], resume=resume)
            if ended.status == 2:
                return Verdict.REFUSED, ended.reason
            if ended.status != 0:
                return self._blame(number, ended)
        for run_dir in run_dirs:
            checked = self._run([*_titan_ft("check"), str(run_dir)], f"check-{run_dir.name}")
            lines = checked.log.read_text(encoding="utf-8").strip().splitlines()
            if checked.status != 0:
                return Verdict.FAILS, f"{run_dir.name}: {lines[-1]}"
        return Verdict.HOLDS, lines[-1]

    def _launch(self, number: int, run: str, run_dir: Path, *, resume: bool) -> Ended:
        steps = RESUMED_STEPS if resume else STEPS
        refused, config, flags = self._config(number, run)
        if refused is not None:
            return refused
        command = [*_titan_ft("launch"), str(config), "--replicas", "2"]
        command += ["--ranks-per-replica", str(self.test.ranks), "--run-dir", str(run_dir)]
        if resume:
            command.append("--resume")
        if resume and self.test.resume_with:
            command += ["--resume-with", self.test.resume_with]
        command += ["--", *flags, f"--training.steps={steps}"]
        victim = Victim(run_dir, self.test.ranks - 1)
        return self._run(command, f"launch-{number}", victim.look)

    def _config(self, number: int, run: str) -> tuple[Ended | None, Path, list[str]]:
        """Return the job's TOML and the flags over it; first, how it was refused, if it was.

        A test of 0.3 has 0.3's flags. The TOML of such a job is made of them.
        """
        hf_folder = self.folder / "run-0" / "hf_checkpoint" / f"step-{STEPS}"
        theirs, ours = titan_flags(run, hf_folder, self.schedule), own_flags(run, self.release)
        if self.release == "0.2":
            return None, ROOT / "configs" / "llama3_debug.toml", [*ours, *theirs]
        module, function = FUNCTION
        if "--module" in theirs:
            module, function = theirs[1], theirs[3]
            theirs = theirs[4:]
        config = self.folder / f"job-{number}.toml"
        reader = [
            sys.executable,
            "-m",
            "titan_ft.training.module_config",
            module,
            function,
            GRAPHS,
            *theirs,
        ]
        ended = self._run(reader, f"config-{number}", output=config)
        return (None if ended.status == 0 else ended), config, ours

    def _blame(self, number: int, ended: Ended) -> tuple[Verdict, str]:
        """Make a run that failed once more in stock torchtitan, for a few steps: does it fail
        without replica groups too?
        """
        _, config, flags = self._config(number, self.test.runs[number])
        flags = ["--fault_tolerance.no-enable" if flag == ENABLE else flag for flag in flags]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc_per_node={self.test.ranks}",
        ]
        command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "-m", "titan_ft.train"]
        command += [
            f"--job.config_file={config}",
            f"--job.dump_folder={self.folder / 'stock'}",
            *flags,
        ]
        stock = self._run([*command, f"--training.steps={STOCK_STEPS}"], "stock")
        if stock.status == 0:
            return Verdict.FAILS, ended.reason
        return Verdict.STOCK_FAILS, stock.reason

    def _run(
        self,
        command: Sequence[str],
        name: str,
        look: Callable[[], None] = lambda: None,
        output: Path | None = None,
    ) -> Ended:
        """Run a command to its end, and end it when its time is over.

        Args:
            look: called meanwhile.
            output: what its stdout goes to; the log, without one.
        """
        log = self.folder / f"{name}.log"
        with (
            log.open("wb") as errors,
            (output or log).open("ab" if output is None else "wb") as out,
        ):
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, cwd=ROOT, env=self.env,
                start_new_session=True,
            )  # fmt: skip
            try:
                deadline = time.monotonic() + self.seconds
                while process.poll() is None and time.monotonic() < deadline:
                    look()
                    time.sleep(POLL_SECONDS)
                late = process.poll() is None
            finally:
                _end(process)
        return Ended(None if late else process.returncode, log)


class Victim:
    """The rank of group 1 that is killed once in a run, after some steps."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._rank = rank
        self._tail = EventTail(RunPaths(run_dir).events, StepCommitted)
        self._steps = 0

    def look(self) -> None:
        """Kill the rank if it has made its steps."""
        for event in self._tail.poll():
            if not isinstance(event, StepCommitted) or (event.replica, event.rank) != (
                1,
                self._rank,
            ):
                continue
            self._steps += 1
            if self._steps == KILL_AFTER:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(event.pid, signal.SIGKILL)


def _titan_ft(command: str) -> list[str]:
    return [sys.executable, "-m", "titan_ft", command]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and the session that it leads: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)


def format_row(result: Result) -> str:
    """Return a row of the table in docs/parallelism.md."""
    reason = "" if result.verdict is Verdict.HOLDS else result.reason.replace("|", "\\|")
    return f"| {result.name} | {result.ranks} | {result.verdict} | {reason} |"


def read_results(path: Path) -> dict[str, Result]:
    """Return what an earlier call found, by the names of the tests."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    results = [msgspec.json.decode(line, type=Result) for line in lines]
    return {result.name: result for result in results}


def select(tests: Iterable[Case], names: Sequence[str], known: Iterable[str]) -> list[Case]:
    """Return the tests to try: those named, or all that have no result yet.

    Raises:
        ValueError: there is no test of such a name.
    """
    tests, known = list(tests), set(known)
    unknown = set(names) - {test.name for test in tests}
    if unknown:
        raise ValueError(f"NAME must be a test of the table, got {sorted(unknown)}")
    if names:
        return [test for test in tests if test.name in names]
    return [test for test in tests if test.name not in known]


def main(args: Sequence[str]) -> int:
    """Try tests, and print a row for each; returns the exit status: 0 none fails, 1 one does, 2 bad
    usage.
    """
    parser = argparse.ArgumentParser(
        prog="integration",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the logs and results")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="tests; all that have no result yet"
    )
    options = parser.parse_args(args)
    out, release = options.out.resolve(), series()
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.jsonl"
    try:
        tests = select(read_tests(release), options.names, read_results(path))
    except ValueError as error:
        parser.error(str(error))
    failed = False
    for test in tests:
        progress(f"{test.name}: 2 groups of {test.ranks}")
        began = time.monotonic()
        verdict, reason = Trial(test, out, release).judge()
        result = Result(test.name, test.ranks, verdict, reason, round(time.monotonic() - began))
        with path.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")
        print(format_row(result), flush=True)
        failed |= verdict is Verdict.FAILS
    return int(failed)
