# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Explore schedules of faults: `bash scripts/explore.sh --schedules N --seed S`."""

from __future__ import annotations

import argparse
import collections
import gc
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from titan_ft.host import cpu

cpu.prepare()

from tests.simulation import standins  # noqa: E402
from tests.simulation.schedule import KINDS, MODES, ROUND_KINDS, Schedule, draw, drawn_kinds, shrink  # noqa: E402
from tests.simulation.world import Problem, World  # noqa: E402

_CHUNK = 25  # number of schedules in one task of a process
_CHUNKS = 4  # tasks of a process; its end frees its garbage faster than a collection would


@dataclass
class Findings:
    """The results of a number of schedules."""

    schedules: int = 0
    virtual_seconds: float = 0.0
    commits: int = 0
    faults: Counter[str] = field(default_factory=collections.Counter)
    problems: Counter[str] = field(default_factory=collections.Counter)
    # For each kind of problem: the lowest seed that finds it, and its text.
    first: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, other: Findings) -> None:
        """Add the findings of other schedules."""
        self.schedules += other.schedules
        self.virtual_seconds += other.virtual_seconds
        self.commits += other.commits
        self.faults.update(other.faults)
        self.problems.update(other.problems)
        for kind, found in other.first.items():
            self.first[kind] = min(self.first.get(kind, found), found)


def kind_of(problem: Problem) -> str:
    """Return the text of a problem without the values that differ between seeds."""
    text = problem.text.split(":")[0] if problem.promise == "liveness" else problem.text
    text = re.sub(r"\b[0-9a-f]{12}\b|-?\d+(\.\d+)?(e-?\d+)?|\bnan\b", "#", text)
    return f"{problem.promise}: {re.sub(r'[#, ]*#', '#', text)[:90]}"


def explore(seeds: Sequence[int], kinds: Sequence[str] = (), mode: str = "sync") -> Findings:
    """Run the schedules of these seeds; the stand-ins must be installed."""
    findings = Findings()
    for seed in seeds:
        schedule = draw(seed, kinds, mode)
        world = schedule.run()
        findings.schedules += 1
        findings.virtual_seconds += world.kernel.now
        findings.commits += world.commits
        findings.faults.update(type(fault).__name__ for fault in schedule.faults)
        for problem in world.problems[:1]:
            kind = kind_of(problem)
            findings.problems[kind] += 1
            findings.first.setdefault(kind, (seed, problem.text))
    return findings


def _explore_apart(work: tuple[Sequence[int], Sequence[str], str]) -> Findings:
    with standins.installed():
        return explore(*work)


def run_all(
    first: int, count: int, kinds: Sequence[str], mode: str, jobs: int
) -> Iterator[Findings]:
    """Explore in several processes; yield the findings of each chunk of seeds."""
    chunks = [
        (range(start, min(start + _CHUNK, first + count)), kinds, mode)
        for start in range(first, first + count, _CHUNK)
    ]
    for warm_mode in MODES[:2]:  # load torch's lazy parts before the forks
        _explore_apart((range(1), (), warm_mode))
    gc.collect()
    gc.freeze()
    with multiprocessing.get_context("fork").Pool(
        jobs, initializer=gc.disable, maxtasksperchild=_CHUNKS
    ) as pool:
        yield from pool.imap_unordered(_explore_apart, chunks)


def show(world: World, schedule: Schedule) -> None:
    """Print a schedule's trace and its problems."""
    options = schedule.options
    print(
        f"{options.groups} groups x {options.ranks} ranks, {options.steps} steps; {options.fault_tolerance}"
    )
    for fault in schedule.faults:
        print(f"  {fault}")
    for at, who, text in world.trace:
        print(f"{at:10.4f}  {who:9} {text}")
    for problem in world.problems:
        print(f"{problem.at:10.4f}  BROKEN: {problem.promise}: {problem.text}")


def _print_findings(findings: Findings, seconds: float, kinds: Sequence[str], mode: str) -> None:
    hours = findings.virtual_seconds / 3600
    print(
        f"{findings.schedules} schedules, {hours:.2f} virtual hours, {findings.commits} commits in {seconds:.0f} s "
        f"({findings.schedules / max(seconds, 1e-9):.0f} a second)"
    )
    for name, number in findings.faults.most_common():
        print(f"  {number:8} {name}")
    if not findings.problems:
        print("every promise held")
    for kind, number in findings.problems.most_common():
        seed, text = findings.first[kind]
        print(f"{number:6} x {kind}")
        print(f"         first: seed {seed}: {text[:200]}")
        chosen = (f" --kinds {','.join(kinds)}" if kinds else "") + (
            "" if mode == "mixed" else f" --mode {mode}"
        )
        print(f"         bash scripts/explore.sh --schedules 1 --seed {seed}{chosen} --trace")


def main(arguments: Sequence[str]) -> int:
    """Explore; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(
        prog="explore.sh", description="Simulate the protocol under schedules of faults."
    )
    parser.add_argument("--schedules", type=int, default=1000, help="how many (1000)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first one (0); the next ones follow"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes (all cores)"
    )
    known = list(dict.fromkeys((*KINDS, *ROUND_KINDS)))
    parser.add_argument(
        "--kinds",
        default="",
        help=f"faults to draw from (all that the mode has): {','.join(known)}",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="mixed",
        help="semi: with a semi-synchronous method; mixed: one in twenty (mixed)",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="print the trace of the first one, or of the first that fails, as it is",
    )
    parser.add_argument(
        "--replay",
        metavar="JSON",
        help="run this schedule, which was printed before, with its trace",
    )
    options = parser.parse_args(arguments)
    kinds, mode = tuple(filter(None, options.kinds.split(","))), options.mode
    if kinds and mode == "mixed":
        mode = "sync"  # most kinds belong to one of the modes
    if unknown := set(kinds) - {*(ROUND_KINDS if mode == "semi" else KINDS)}:
        parser.error(
            f"--kinds must be of {','.join(known)} and of the mode, got {','.join(sorted(unknown))}"
        )
    if options.replay:
        with standins.installed():
            schedule = Schedule.decode(options.replay)
            world = schedule.run(traces=True)
        show(world, schedule)
        return 1 if world.problems else 0
    began, findings, told = time.monotonic(), Findings(), time.monotonic()
    for found in run_all(options.seed, options.schedules, kinds, mode, options.jobs):
        findings.add(found)
        for seed, text in found.first.values():
            print(f"... seed {seed}: {text[:200]}", flush=True)
        if time.monotonic() - told > 10:
            told = time.monotonic()
            rate = findings.schedules / (told - began)
            print(
                f"... {findings.schedules} of {options.schedules} schedules, {rate:.0f} a second, "
                f"{sum(findings.problems.values())} with a broken promise",
                flush=True,
            )
    if findings.problems or options.trace:
        seed = min((seed for seed, _ in findings.first.values()), default=options.seed)
        with standins.installed():
            schedule = draw(seed, kinds, mode)
            if not options.trace:
                schedule = shrink(schedule, schedule.run().problems[0])
            world = schedule.run(traces=True)
        print(
            f"seed {seed}, kinds {', '.join(drawn_kinds(seed, kinds, mode))}{'' if options.trace else ', made small'}:"
        )
        show(world, schedule)
        if not options.trace:
            print(f"bash scripts/explore.sh --replay '{schedule.encode()}'")
    _print_findings(findings, time.monotonic() - began, kinds, mode)
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
