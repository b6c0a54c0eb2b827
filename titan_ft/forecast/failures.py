# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Draw the failures of a cluster: times, nodes, and the luck that decides the consequences.

The simulation and `--trace-out` draw here; candidates take the mean rates for the closed forms.
One seed draws the same failures, with the same luck, for every shape of the job. Shapes are so
compared under common random numbers, and a difference between two of them is no chance.
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
from titan_ft.forecast.scenario import MAX_SHOTS, Kind, Scenario, Spacing, effect_of

SEEDS_OF_LIVES = 4
"""Draws from which the rate of nodes that age is taken."""


class Luck(NamedTuple):
    """Uniform numbers from 0 to 1, one for each consequence that is left to chance."""

    breaks: float = 0.0
    repair: float = 0.5
    stall: float = 0.5
    away: float = 0.5
    rejoin: float = 0.5

    @classmethod
    def draw(cls, rng: random.Random) -> Luck:
        return cls(rng.random(), rng.random(), rng.random(), rng.random(), rng.random())


USUAL_LUCK = Luck()
"""Of stops that no failure causes: medians, and nothing breaks."""


@dataclass(slots=True)
class Failure:
    """One failure, whatever the shape of the job.

    Attributes:
        node: the first node hit; None if a trace names a group, or if the whole job is hit.
        nodes: number of nodes hit, from that one on.
        group: the group that a trace names.
        repair_seconds: until the node is mended, where a log has it.
        luck: set by `draw_failures`, in the order of the failures' times.
    """

    time: float
    kind: Kind
    node: int | None = None
    nodes: int = 1
    group: int | None = None
    repair_seconds: float | None = None
    luck: Luck = USUAL_LUCK


def with_effect_of(kind: Kind, fault: Fault) -> Kind | None:
    """Return the kind with the effect of a chaos fault; None if the fault costs nothing."""
    effect = effect_of(fault)
    if effect is None:
        return None
    changed = msgspec.structs.replace(kind, effect=effect)
    if isinstance(fault, SlowRank):
        slow = {"factor": fault.factor, "found_after": fault.seconds, "leaves": False}
        changed = msgspec.structs.replace(changed, **slow)
    return changed


def groups_hit(failure: Failure, groups: int, group_nodes: int) -> dict[int, int]:
    """Return the groups that a failure hits, and how many nodes of each.

    Args:
        groups: of the job.
        group_nodes: nodes of a group; the first group has the first nodes.
    """
    if failure.kind.scope == "job":
        return dict.fromkeys(range(groups), 0)
    if failure.group is not None:
        return {failure.group % groups: 1}
    assert failure.node is not None, "a failure hits a node, a group or the job"
    last = min(failure.node + failure.nodes, groups * group_nodes)
    return dict(Counter(node // group_nodes for node in range(failure.node, last)))


# Drawing


def draw_failures(scenario: Scenario, seed: int, seconds: float | None = None) -> Iterator[Failure]:
    """Yield failures in order of time, without those of chaos plans.

    Args:
        seconds: length of the run; when left out, the scenario's days.
    """
    end = scenario.seconds if seconds is None else seconds
    luck = random.Random(f"{seed}/luck")
    streams = [_of_kind(kind, scenario, seed) for kind in scenario.failures if kind.chaos is None]
    for failure in heapq.merge(*streams, key=lambda each: each.time):
        if failure.time > end:
            return
        failure.luck = Luck.draw(luck)
        yield failure


def _of_kind(kind: Kind, scenario: Scenario, seed: int) -> Iterator[Failure]:
    name = f"{seed}/{kind.name}"
    if kind.name in scenario.listed:
        return _of_file(kind, scenario, random.Random(name))
    if kind.has_lives:
        return _of_lives(kind, scenario.parts_of(kind), scenario.nodes_of(kind), name)
    return _of_gaps(kind, scenario, random.Random(name))


def _of_file(kind: Kind, scenario: Scenario, rng: random.Random) -> Iterator[Failure]:
    nodes = scenario.cluster.nodes
    for entry in scenario.listed[kind.name]:
        node = None if entry.node is None else entry.node % nodes
        if entry.node is None and entry.group is None:
            node = rng.randrange(nodes)
        of_fault = kind if entry.fault is None else with_effect_of(kind, entry.fault)
        if of_fault is not None:
            yield Failure(entry.time, of_fault, node, 1, entry.group, entry.down_seconds)


def _of_gaps(kind: Kind, scenario: Scenario, rng: random.Random) -> Iterator[Failure]:
    """Yield failures at the gaps of the whole cluster, each of any part."""
    gaps: dict[Spacing | None, Length] = {
        "memoryless": Weibull(1.0),
        "even": Constant(1.0),
        "uniform": Uniform(0.0, 2.0),
        "weibull": Weibull(1.0, kind.shape or 1.0),
    }
    mean, gap = scenario.mtbf_of(kind), gaps[kind.spacing]
    parts, size = scenario.parts_of(kind), scenario.nodes_of(kind)
    now = 0.0
    while True:
        now += mean * gap.quantile(rng.random())
        yield Failure(now, kind, rng.choice(parts) * size, size)


def _of_lives(kind: Kind, parts: range, size: int, name: str) -> Iterator[Failure]:
    """Yield the ends of the parts' lives; a mended part is as new.

    Args:
        size: nodes of a part.
        name: of the draw.
    """
    life = Weibull(kind.mean_life, kind.shape or 1.0)
    ends, rng = _first_ends(kind, parts, name)
    ends, rng = ends.copy(), copy.copy(rng)
    while True:
        now, part = ends[0]
        yield Failure(now, kind, part * size, size)
        heapq.heapreplace(ends, (now + life.quantile(rng.random()), part))


@lru_cache(maxsize=8)
def _first_ends(
    kind: Kind, parts: range, name: str
) -> tuple[list[tuple[float, int]], random.Random]:
    """Return the heap of the first ends of lives, all of `kind.age` at the start, and the rest.

    The shapes of a job meet the same lives, and 12,288 of them take longer than a run's steps.
    """
    life, rng = Weibull(kind.mean_life, kind.shape or 1.0), random.Random(name)
    ends = []
    for part in parts:
        end = life.quantile(rng.random())
        while end <= kind.age:
            end += life.quantile(rng.random())
        ends.append((end - kind.age, part))
    heapq.heapify(ends)
    return ends, rng


# Rates


def rates_of(kind: Kind, scenario: Scenario) -> dict[Kind, float]:
    """Return how often failures come, per second in the scenario's days.

    A rate has one kind. The faults of a trace or a plan have one for each of their effects.
    """
    seconds = scenario.seconds
    found: Counter[Kind] = Counter()
    if kind.name in scenario.plans:
        plan = scenario.plans[kind.name]
        for shot in itertools.islice(shots(plan), MAX_SHOTS):
            time = plan.start_seconds + shot.time
            if time > seconds:
                break
            of_fault = with_effect_of(kind, shot.fault)
            if of_fault is not None:
                found[of_fault] += 1
            if shot.number == MAX_SHOTS - 1:
                seconds = time
    elif kind.name in scenario.listed:
        for failure in _of_file(kind, scenario, random.Random(0)):
            found[failure.kind] += failure.time <= seconds
    elif kind.has_lives and kind.shape != 1.0:
        return {kind: _rate_of_lives(kind, len(scenario.parts_of(kind)), seconds)}
    else:
        return {kind: 1 / scenario.mtbf_of(kind)}
    return {each: number / seconds for each, number in found.items()}


@lru_cache(maxsize=64)
def _rate_of_lives(kind: Kind, parts: int, seconds: float) -> float:
    """Return the mean rate of lives that age: of young nodes it is far from 1 / mean life.

    At most 1,000 of the parts are drawn.
    """
    drawn_parts = range(min(parts, 1000))
    number = 0
    for seed in range(SEEDS_OF_LIVES):
        failures = _of_lives(kind, drawn_parts, 1, f"{seed}/{kind.name}/rate")
        number += sum(1 for _ in itertools.takewhile(lambda each: each.time <= seconds, failures))
    return number / SEEDS_OF_LIVES / len(drawn_parts) * parts / seconds
