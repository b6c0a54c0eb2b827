# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the events of a run tell the benchmark. The only module here that knows `titan_ft.history`.

A stall, a usual step and the time until a group is back are history's, the same as in reports.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.run import SURVIVOR, BenchError, commits_of
from benchmarks.tries import StepTried, translate
from titan_ft.history.audit import audit
from titan_ft.history.goodput import goodput
from titan_ft.history.job_facts import JobFacts
from titan_ft.history.stalls import Stall, stalls
from titan_ft.run.events import Drained, Event, HealStarted, RolledBack, StepCommitted, TrainingFinished
from titan_ft.run.log import read_events
from titan_ft.run.paths import RunPaths

__all__ = ["Stall", "audit", "goodput"]
Gap = tuple[float, float]


def read_run(run_dir: Path) -> list[Event]:
    """Return the events of a run, in order of time; of a peer, translated."""
    return translate(read_events(RunPaths(run_dir).events))


def injected(events: Iterable[Event]) -> list[Stall]:
    """Return what each injected fault cost."""
    return [stall for stall in stalls(events) if stall.injected]


def num_crashes(events: Iterable[Event]) -> int:
    """Return how many attempts of groups ended although nobody had injected a fault."""
    return sum(not stall.injected for stall in stalls(events))


def usual_step(events: Iterable[Event]) -> float:
    """Return the seconds of a usual step.

    Raises:
        BenchError: no two steps were committed.
    """
    if not (usual := JobFacts(events).usual_step_us()):
        raise BenchError("no steps were committed before what was to be measured")
    return usual / 1e6


def survivor_gaps(events: Iterable[Event], begin: float, end: float) -> list[Gap]:
    """Return the times between commits of the survivor that touch a time."""
    times = [event.time for event in commits_of(events, SURVIVOR)]
    return [gap for gap in pairwise(times) if gap[1] >= begin and gap[0] <= end]


def longest_delay(gaps: Iterable[Gap], usual: float) -> float:
    """Return by how many seconds the latest of some commits was behind its time; 0 if none was."""
    return max((after - before - usual for before, after in gaps if after - before > usual), default=0.0)


def steps_lost(events: Iterable[Event], replica: int, begin: float, end: float) -> int:
    """Return how many steps a group computed and threw away in a time, instead of committing them.

    That is so when it must heal or roll back; when it computed more forward passes than the step has batches; and, with
    the peer, when a try was not committed.
    """
    lost = 0
    for event in events:
        if (event.replica, event.rank) == (replica, 0) and begin <= event.time < end:
            match event:
                case HealStarted() | RolledBack() | StepTried(committed=False):
                    lost += 1
                case StepCommitted() if event.data is not None:
                    lost += event.forward_passes > event.data.num_batches
    return lost


def compare_digests(events: Sequence[Event]) -> str:
    """Compare the groups' digests, state by state and rank by rank.

    Returns:
        "equal", "differ" or "unknown", for the last state of which all groups told a digest; and what differs in all.
    """
    found: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    steps: dict[str, int] = {}
    for event in events:
        if isinstance(event, StepCommitted | Drained | TrainingFinished) and event.digest:
            lineage = event.lineage or ""
            found[lineage, event.rank][event.replica] = event.digest
            steps[lineage] = steps.pop(lineage, event.step)  # in the order in which they were last told
    num_groups = len({replica for told in found.values() for replica in told})
    differs = {state: len(set(told.values())) > 1 for state, told in found.items() if len(told) > 1}
    whole = {lineage for (lineage, _), told in found.items() if len(told) == num_groups > 1}
    verdict = "unknown"
    if last := next((lineage for lineage in reversed(steps) if lineage in whole), None):
        differ = any(different for (lineage, _), different in differs.items() if lineage == last)
        verdict = f"{'differ' if differ else 'equal'} (step {steps[last]})"
    num_differing = sum(differs.values())
    return verdict + (f"; differ in {num_differing} of {len(differs)} comparisons" if num_differing else "")
