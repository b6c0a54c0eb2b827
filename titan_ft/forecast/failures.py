# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Draw the failures of a cluster: times, nodes, and the luck that decides their consequences.

The simulation and `--trace-out` call `draw_failures`. Candidates call `rates_of` for the closed
forms, which know only mean rates.

The draws of a seed do not depend on the shape of the job: all candidates meet the same failures with
the same luck (common random numbers). A small difference between two candidates is then no chance.

Terms:
- clock of failures: the wall clock, or a clock that stops while the job does not train. The
  scenario's `clock` decides.
- target: a node, or a domain if the kind of failure names one.
- life: the time between two failures of one target. Kinds with a rate of each target and Weibull
  spacing draw lives. Other kinds draw the gaps between the failures of the whole cluster.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import msgspec

from titan_ft.chaos.schedule import shots
from titan_ft.faults.fault import Fault
from titan_ft.faults.inside import SlowRank
from titan_ft.forecast.lengths import Constant, Length, Uniform, Weibull
from titan_ft.forecast.scenario import MAX_SHOTS, FailureKind, Scenario, Spacing, effect_of_fault

RATE_SEEDS = 4
"""Number of draws whose mean is the rate of nodes with lives."""
MAX_RATE_TARGETS = 1000
"""Most targets in such a draw. The draw of a large cluster would take seconds."""


class Luck(NamedTuple):
    """Uniform random numbers from 0 to 1: they decide if nodes break, and select the costs.

    `Length.quantile` turns such a number into a cost, so that 0.5 is the median cost.
    """

    breaks: float = 0.0
    repair: float = 0.5
    stall: float = 0.5
    away: float = 0.5
    rejoin: float = 0.5

    @classmethod
    def draw(cls, rng: random.Random) -> Luck:
        return cls(rng.random(), rng.random(), rng.random(), rng.random(), rng.random())


USUAL_LUCK = Luck()
"""For stops without a failure, such as maintenance: every cost is its median."""


@dataclass(slots=True)
class Failure:
    """One failure, independent of the shape of the job.

    Attributes:
        time: seconds on the clock of failures.
        node: the first node that is hit; None if a trace names a group.
        nodes: how many nodes are hit: `node` and those with the next numbers.
        group: the group that a trace names.
        repair_seconds: how long the repair takes, if a log has it.
        luck: set by `draw_failures`, in order of time.
    """

    time: float
    kind: FailureKind
    node: int | None = None
    nodes: int = 1
    group: int | None = None
    repair_seconds: float | None = None
    luck: Luck = USUAL_LUCK


def with_effect_of(kind: FailureKind, fault: Fault) -> FailureKind | None:
    """Return the kind with the effect of a chaos fault; None if the fault has no effect."""
    effect = effect_of_fault(fault)
    if effect is None:
        return None
    changed = msgspec.structs.replace(kind, effect=effect)
    if isinstance(fault, SlowRank):
        slow = {"factor": fault.factor, "found_after": fault.seconds, "leaves": False}
        changed = msgspec.structs.replace(changed, **slow)
    return changed


def groups_hit(failure: Failure, groups: int, group_nodes: int) -> dict[int, int]:
    """Return the groups that a failure hits, each with the number of its nodes that are hit.

    A failure of the whole job breaks no nodes: the numbers are 0.

    Args:
        groups: number of groups of the job.
        group_nodes: nodes of each group. Group 0 has the nodes with the lowest numbers.
    """
    if failure.kind.scope == "job":
        return dict.fromkeys(range(groups), 0)
    if failure.group is not None:
        return {failure.group % groups: 1}
    assert failure.node is not None, "a failure hits a node, a group or the job"
    # The last domain may have fewer nodes than the others.
    end = min(failure.node + failure.nodes, groups * group_nodes)
    return dict(Counter(node // group_nodes for node in range(failure.node, end)))


# Drawing


def draw_failures(scenario: Scenario, seed: int, seconds: float | None = None) -> Iterator[Failure]:
    """Yield the failures of a run in order of time, except for those of chaos plans.

    A chaos plan chooses its groups by the state of the job, so the simulation carries it out itself.

    Args:
        seconds: length of the run; None takes the scenario's days.
    """
    end = scenario.seconds if seconds is None else seconds
    luck_rng = random.Random(f"{seed}/luck")
    streams = [_draw_kind(kind, scenario, seed) for kind in scenario.failures if kind.chaos is None]
    for failure in heapq.merge(*streams, key=lambda failure: failure.time):
        if failure.time > end:
            return
        failure.luck = Luck.draw(luck_rng)
        yield failure


def _draw_kind(kind: FailureKind, scenario: Scenario, seed: int) -> Iterator[Failure]:
    """Return the failures of one kind in order of time. Only those of a file come to an end."""
    draw_name = f"{seed}/{kind.name}"
    if kind.name in scenario.listed_failures:
        return _read_listed(kind, scenario, random.Random(draw_name))
    if kind.has_lives:
        targets = scenario.targets_of(kind)
        return _draw_lives(kind, targets, scenario.nodes_per_target(kind), draw_name)
    return _draw_gaps(kind, scenario, random.Random(draw_name))


def _read_listed(kind: FailureKind, scenario: Scenario, rng: random.Random) -> Iterator[Failure]:
    """Yield the failures of a trace or a log that have an effect.

    A failure without a node and without a group hits a random node.
    """
    num_nodes = scenario.cluster.nodes
    for listed in scenario.listed_failures[kind.name]:
        node = None if listed.node is None else listed.node % num_nodes
        if listed.node is None and listed.group is None:
            node = rng.randrange(num_nodes)
        effective_kind = kind if listed.fault is None else with_effect_of(kind, listed.fault)
        if effective_kind is None:
            continue
        yield Failure(
            time=listed.time,
            kind=effective_kind,
            node=node,
            group=listed.group,
            repair_seconds=listed.down_seconds,
        )


def _draw_gaps(kind: FailureKind, scenario: Scenario, rng: random.Random) -> Iterator[Failure]:
    """Yield failures with random gaps in the whole cluster, each on a random target."""
    gaps_of_mean_1: dict[Spacing | None, Length] = {
        "memoryless": Weibull(1.0),
        "even": Constant(1.0),
        "uniform": Uniform(0.0, 2.0),
        "weibull": Weibull(1.0, kind.shape or 1.0),
    }
    gap = gaps_of_mean_1[kind.spacing]
    mean = scenario.mtbf_of(kind)
    targets = scenario.targets_of(kind)
    size = scenario.nodes_per_target(kind)
    now = 0.0
    while True:
        now += mean * gap.quantile(rng.random())
        yield Failure(now, kind, rng.choice(targets) * size, size)


def _draw_lives(kind: FailureKind, targets: range, size: int, draw_name: str) -> Iterator[Failure]:
    """Yield a failure at the end of each life. A repaired target begins a new life.

    Args:
        size: nodes of each target.
        draw_name: seed of the random numbers.
    """
    life = Weibull(kind.mean_life, kind.shape or 1.0)
    cached_ends, cached_rng = _draw_first_ends(kind, targets, draw_name)
    ends = cached_ends.copy()
    rng = copy.copy(cached_rng)
    while True:
        now, target = ends[0]
        yield Failure(now, kind, target * size, size)
        heapq.heapreplace(ends, (now + life.quantile(rng.random()), target))


@lru_cache(maxsize=8)
def _draw_first_ends(
    kind: FailureKind, targets: range, draw_name: str
) -> tuple[list[tuple[float, int]], random.Random]:
    """Draw the end of the first life of each target.

    All candidates of a seed need the same ends. With 12,288 nodes the draw takes longer than all
    steps of a simulated run, so it is cached. The caller must copy both results before it changes
    them.

    Returns:
        ends: a heap of (time, target). The lives began `kind.age` seconds before the run.
        rng: the source of random numbers for the lives that follow.
    """
    life = Weibull(kind.mean_life, kind.shape or 1.0)
    rng = random.Random(draw_name)
    ends = []
    for target in targets:
        end = life.quantile(rng.random())
        while end <= kind.age:
            end += life.quantile(rng.random())
        ends.append((end - kind.age, target))
    heapq.heapify(ends)
    return ends, rng


# Rates


def rates_of(kind: FailureKind, scenario: Scenario) -> dict[FailureKind, float]:
    """Return how often failures of a kind come, per second in the scenario's days.

    The result has one entry, or for a trace or a chaos plan one entry for each effect of its faults.
    """
    if kind.name in scenario.plans:
        return _rates_of_plan(kind, scenario)
    if kind.name in scenario.listed_failures:
        counts: Counter[FailureKind] = Counter()
        for failure in _read_listed(kind, scenario, random.Random(0)):
            counts[failure.kind] += failure.time <= scenario.seconds
        return {each: number / scenario.seconds for each, number in counts.items()}
    if kind.has_lives and kind.shape != 1.0:
        return {kind: _rate_of_lives(kind, len(scenario.targets_of(kind)), scenario.seconds)}
    return {kind: 1 / scenario.mtbf_of(kind)}


def _rates_of_plan(kind: FailureKind, scenario: Scenario) -> dict[FailureKind, float]:
    plan = scenario.plans[kind.name]
    seconds = scenario.seconds
    counts: Counter[FailureKind] = Counter()
    for shot in itertools.islice(shots(plan), MAX_SHOTS):
        time = plan.start_seconds + shot.time
        if time > seconds:
            break
        effective_kind = with_effect_of(kind, shot.fault)
        if effective_kind is not None:
            counts[effective_kind] += 1
        if shot.number == MAX_SHOTS - 1:
            seconds = time  # The later shots are not counted, so their time must not count.
    return {each: number / seconds for each, number in counts.items()}


@lru_cache(maxsize=64)
def _rate_of_lives(kind: FailureKind, num_targets: int, seconds: float) -> float:
    """Return the mean rate of failures at the ends of lives, from a few draws.

    1 / mean life would be wrong: with a shape below 1, young nodes fail far more often.
    """
    drawn_targets = range(min(num_targets, MAX_RATE_TARGETS))
    number = 0
    for seed in range(RATE_SEEDS):
        for failure in _draw_lives(kind, drawn_targets, 1, f"{seed}/{kind.name}/rate"):
            if failure.time > seconds:
                break
            number += 1
    return number / RATE_SEEDS / len(drawn_targets) * num_targets / seconds
