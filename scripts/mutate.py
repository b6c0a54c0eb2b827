# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Break the code in small ways, one at a time, and see whether the tests notice.

    python scripts/mutate.py [--only PATTERN] [--sample N [--seed S]] [--jobs N] [--explore] [--list]

Each mutation of `scripts/mutations.toml` is made in a copy of this repository, where the narrow tests that it names
run; with `--explore` those that they miss are left to the simulation (scripts/explore.sh). Exit status: 0 all were
noticed, 1 some were not or are stale, 2 bad usage, or tests that fail without any mutation.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import os
import queue
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import tomli

ROOT = Path(__file__).resolve().parents[1]
LIST = Path("scripts", "mutations.toml")
EXPLORE = ("bash", "scripts/explore.sh", "--schedules", "2000", "--seed", "1")
NOTICED, MISSED, STALE, BROKEN = "noticed", "NOT noticed", "stale", "broken"
_LEFT_OUT = (".git", ".venv", "__pycache__", ".*_cache", "outputs", "shared")
_TESTS_FAILED = 1  # pytest's exit status; others say that it could not test at all


class MutateError(Exception):
    """Bad usage, or nothing to compare with: one line."""


@dataclass(frozen=True)
class Mutation:
    """One small change of the code.

    Attributes:
        name: says what is wrong then.
        file: below the repository's root.
        old: text that is in the file exactly once; otherwise the entry is stale.
        new: what takes its place.
        tests: arguments of pytest: the narrow selection that should notice; empty = the simulation alone.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def place(self, root: Path) -> int:
        """Return the line of `old`; 0 if it is not there exactly once."""
        path = root / self.file
        text = path.read_text() if path.is_file() else ""
        return text[: text.index(self.old)].count("\n") + 1 if text.count(self.old) == 1 else 0


@dataclass(frozen=True)
class Result:
    """What became of one mutation."""

    mutation: Mutation
    status: str
    detail: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.status:<11}  {self.mutation.file}: {self.mutation.name}{detail} ({self.seconds:.0f} s)"


def read_list(path: Path) -> list[Mutation]:
    """Read the mutations.

    Raises:
        MutateError: the file is not what it should be.
    """
    try:
        tables = tomli.loads(path.read_text())["mutation"]
        read = [Mutation(**{**table, "tests": tuple(shlex.split(table.get("tests", "")))}) for table in tables]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MutateError(f"{path} must be a list of [[mutation]] with name, file, old, new, tests: {error}") from error
    for mutation in read:
        if mutation.old == mutation.new:
            raise MutateError(f"{path}: {mutation.name!r} must change something, got old equal to new")
    names = Counter(mutation.name for mutation in read)
    if twice := [name for name, times in names.items() if times > 1]:
        raise MutateError(f"{path}: each name must be unique, got {twice[0]!r} twice")
    return read


class Workbench:
    """A copy of the repository in which mutations are made and tests run, one after the other.

    Args:
        python: the interpreter that runs the tests; whatever it has installed, the copy's package goes before.
        timeout_seconds: of one run of tests.
    """

    def __init__(self, root: Path, folder: Path, python: str, timeout_seconds: float) -> None:
        self._folder, self._python, self._timeout_seconds = folder, python, timeout_seconds
        shutil.copytree(root, folder, ignore=shutil.ignore_patterns(*_LEFT_OUT), symlinks=True)

    def test(self, tests: Sequence[str]) -> tuple[int | None, str]:
        """Run tests; return pytest's exit status, None when the time was over, and its last line."""
        return self._run(self._python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests)

    def explore(self) -> tuple[int | None, str]:
        """Run the simulation; return its exit status, None when the time was over, and its last line."""
        return self._run(*EXPLORE)

    def try_out(self, mutation: Mutation, explore: bool) -> Result:
        """Make a mutation, see whether it is noticed, and take it back."""
        started = time.monotonic()
        if not mutation.place(self._folder):
            return Result(mutation, STALE, "its text is not in the file exactly once")
        path = self._folder / mutation.file
        whole = path.read_text()
        path.write_text(whole.replace(mutation.old, mutation.new))
        try:
            status, detail = self._judge(mutation, explore)
        finally:
            path.write_text(whole)
        return Result(mutation, status, detail, time.monotonic() - started)

    def _judge(self, mutation: Mutation, explore: bool) -> tuple[str, str]:
        if mutation.tests:
            code, line = self.test(mutation.tests)
            if code is None:
                return NOTICED, "the tests do not end"
            # Threads that a failed test leaves behind may end the process by a signal, after its verdict.
            if code == _TESTS_FAILED or (code < 0 and line.startswith("FAILED")):
                return NOTICED, line
            if code != 0:
                return BROKEN, f"pytest ended with {code}: {line}"
        if explore:
            code, line = self.explore()
            return (MISSED, "") if code == 0 else (NOTICED, f"by the simulation: {line}")
        return MISSED, "" if mutation.tests else "it has no tests; --explore runs the simulation"

    def _run(self, *command: str) -> tuple[int | None, str]:
        # No bytecode: a file that is changed within a second, to one of the same size, would be taken for unchanged.
        environment = {**os.environ, "PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1"}
        environment["TITAN_FT_PYTHON"] = self._python
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command, cwd=self._folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code: int | None = process.wait(self._timeout_seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):  # it, or what it left behind
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            lines = output.read().decode(errors="replace").split("\n")
        told = [line.strip() for line in lines if line.startswith(("FAILED", "ERROR"))] or lines
        return code, next((line for line in reversed(told) if line.strip()), "")[:160]


def check_tests(bench: Workbench, mutations: Sequence[Mutation]) -> None:
    """Check that the tests pass without any mutation: else nobody could tell what they notice.

    Raises:
        MutateError: they do not.
    """
    tests = list(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
    if tests:
        code, line = bench.test(tests)
        if code != 0:
            raise MutateError(f"the tests must pass without any mutation, got: {line or 'no end'}")


def try_all(mutations: Sequence[Mutation], benches: Sequence[Workbench], explore: bool) -> Iterator[Result]:
    """Try mutations out, as many at once as there are workbenches; yield results as they come."""
    free: queue.SimpleQueue[Workbench] = queue.SimpleQueue()
    for bench in benches:
        free.put(bench)

    def try_one(mutation: Mutation) -> Result:
        bench = free.get()
        try:
            return bench.try_out(mutation, explore)
        finally:
            free.put(bench)

    with ThreadPoolExecutor(len(benches)) as pool:
        tasks = [pool.submit(try_one, mutation) for mutation in mutations]
        try:
            for task in as_completed(tasks):
                yield task.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", default="*", help="of file or name, such as *ledger*")
    parser.add_argument("--sample", metavar="N", type=int, help="try so many of them, drawn by --seed (all)")
    parser.add_argument("--seed", type=int, default=0, help="of --sample (0)")
    parser.add_argument("--jobs", type=int, default=1, help="mutations tried at once (1)")
    parser.add_argument("--explore", action="store_true", help="leave what the tests miss to the simulation")
    parser.add_argument("--list", action="store_true", help="name the mutations and end")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one run of tests (600)")
    parser.add_argument("--root", type=Path, default=ROOT, help="repository (this one)")
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except MutateError as error:
        print(f"mutate.py: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """Do what the options say.

    Raises:
        MutateError: bad usage, or tests that fail by themselves.
    """
    if options.jobs < 1:
        raise MutateError(f"--jobs must be >= 1, got {options.jobs}; 1 tries one after the other")
    pattern = f"*{options.only}*"
    read = read_list(options.root / LIST)
    wanted = [m for m in read if fnmatch.fnmatch(m.file, pattern) or fnmatch.fnmatch(m.name, pattern)]
    if not wanted:
        raise MutateError(f"--only must match a mutation, got {options.only!r}; --list names them")
    if options.sample is not None:
        if options.sample < 1:
            raise MutateError(f"--sample must be >= 1, got {options.sample}; leave it out for all")
        wanted = random.Random(options.seed).sample(wanted, min(options.sample, len(wanted)))
    if options.list:
        for mutation in wanted:
            print(f"{mutation.file}:{mutation.place(options.root) or 'stale'}: {mutation.name}")
        return 0
    if options.explore and not (options.root / EXPLORE[1]).is_file():
        raise MutateError(f"--explore needs {EXPLORE[1]}, and there is none; leave it out")
    with tempfile.TemporaryDirectory(prefix="mutate") as folder:
        benches = [
            Workbench(options.root, Path(folder, str(number)), sys.executable, options.timeout)
            for number in range(min(options.jobs, len(wanted)))
        ]
        check_tests(benches[0], wanted)
        counts: Counter[str] = Counter()
        for result in try_all(wanted, benches, options.explore):
            counts[result.status] += 1
            print(result, flush=True)
    others = [f"{counts[status]} {status}" for status in (MISSED, STALE, BROKEN) if counts[status]]
    print(", ".join([f"{counts[NOTICED]} of {len(wanted)} noticed", *others]))
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
