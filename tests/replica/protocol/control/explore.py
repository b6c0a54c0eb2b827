# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Explore schedules of faults of the control tree.

`python -m tests.replica.protocol.control.explore --schedules 1000 --seed 0`
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tests.replica.protocol.control.schedule import Schedule, draw
from tests.replica.protocol.control.world import World


@dataclass
class Findings:
    """The results of a number of schedules.

    Attributes:
        problems: for each seed whose schedule broke a rule, the first broken rule.
    """

    schedules: int = 0
    ranks: int = 0
    events: int = 0
    answers: int = 0
    heard: int = 0
    losses: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    problems: dict[int, str] = field(default_factory=dict)

    def add(self, world: World) -> None:
        """Count a world that has run."""
        schedule, rules = world.schedule, world.rules
        self.schedules += 1
        self.ranks += schedule.num_ranks
        self.events += world.events
        self.answers += rules.answers
        self.heard += rules.heard
        self.losses += rules.losses
        self.faults.update(type(fault).__name__ for fault in schedule.faults)
        if world.problems:
            self.problems[schedule.seed] = world.problems[0]


def explore(seeds: Iterable[int], stop_at_first: bool = False) -> Findings:
    """Run the schedules of these seeds."""
    findings = Findings()
    for seed in seeds:
        findings.add(run(draw(seed)))
        if findings.problems and stop_at_first:
            break
    return findings


def run(schedule: Schedule, traces: bool = False) -> World:
    """Run a schedule. An error that a node raises is a broken rule."""
    world = World(schedule, traces)
    try:
        world.run()
    except Exception as error:  # noqa: BLE001  # any error would have ended the rank's thread
        world.rules.report(f"a node raises {type(error).__name__}: {error}")
    return world


def shrink(schedule: Schedule) -> Schedule:
    """Leave out faults and notes as long as a rule is still broken."""
    for fault in schedule.faults:
        others = tuple(other for other in schedule.faults if other is not fault)
        smaller = replace(schedule, faults=others)
        if run(smaller).problems:
            schedule = smaller
    without_notes = replace(schedule, notes=())
    return without_notes if run(without_notes).problems else schedule


def show(schedule: Schedule) -> None:
    """Print the trace of a schedule."""
    world = run(schedule, traces=True)
    print(schedule)
    for at, text in world.trace:
        print(f"{at:9.4f}  {text[:160]}")
    for problem in world.problems:
        print(f"BROKEN: {problem}")


def main(arguments: Sequence[str]) -> int:
    """Explore. Return 1 if a rule was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000, help="how many (1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one; the next follow (0)")
    parser.add_argument("--trace", action="store_true", help="print the trace of the first one")
    options = parser.parse_args(arguments)
    if options.trace:
        show(draw(options.seed))
    began = time.monotonic()
    findings = explore(range(options.seed, options.seed + options.schedules))
    seconds = time.monotonic() - began
    print(
        f"{findings.schedules} schedules in {seconds:.0f} s: {findings.ranks} ranks, "
        f"{findings.events} events, {findings.answers} answers, {findings.heard} notes heard, "
        f"{findings.losses} losses"
    )
    print(", ".join(f"{number} {name}" for name, number in findings.faults.most_common()))
    for seed, problem in findings.problems.items():
        print(f"seed {seed}: {problem}")
    if findings.problems and not options.trace:
        show(shrink(draw(min(findings.problems))))
    if findings.problems:
        print(f"{len(findings.problems)} schedules broke a rule")
        return 1
    print("every rule held")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
