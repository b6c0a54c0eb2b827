# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Draw the failures of a cluster: times, nodes, and the luck that decides the consequences.

One seed draws the same failures, with the same luck, for every shape of the job. Shapes are so
compared under common random numbers, and a difference between two of them is no chance.
"""

from __future__ import annotations

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
from titan_ft.forecast.scenario import DAY, Effect, Kind, Scenario, Spacing

ENDS = ("killed", "frozen", "hung")
"""Outcomes of faults after which a group is away; "left" is one in order."""
MAX_SHOTS = 10_000
"""Shots of a chaos plan from which its rate is taken."""
SEEDS_OF_LIVES = 4
"""Draws from which the rate of nodes that age is taken."""


class Luck(NamedTuple):
    """Uniform numbers from 0 to 1, one for each consequence that is left to chance."""

    breaks: float
    repair: float
    stall: float
    away: float
    rejoin: float


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure, whatever the shape of the job.

    Attributes:
        node: the first node hit; None if a trace names a group, or if the whole job is hit.
        nodes: number of nodes hit, from that one on.
        group: the group that a trace names.
        repair_seconds: until the node is mended, where a log has it.
    """

    time: float
    kind: Kind
    luck: Luck
    node: int | None = None
    nodes: int = 1
    group: int | None = None
    repair_seconds: float | None = None


_UNDRAWN = Luck(0.0, 0.0, 0.0, 0.0, 0.0)


def effect_of(fault: Fault) -> Effect | None:
    """Return the effect of a chaos fault on its group; None if the group trains on as before."""
    if isinstance(fault, SlowRank):
        return "slow"
    if fault.category == "wrong numbers" and fault.takes_down:
        return "corrupt"
    if fault.outcome == "left":
        return "drain"
    return "stop" if fault.takes_down or fault.outcome in ENDS else None


def draw_failures(scenario: Scenario, seed: int, seconds: float | None = None) -> Iterator[Failure]:
    """Yield failures in order of time, without those of chaos plans.

    Args:
        seconds: length of the run; when left out, the scenario's days.
    """
    end = scenario.days * DAY if seconds is None else seconds
    luck = random.Random(f"{seed}/luck")
    streams = [_of_kind(kind, scenario, seed) for kind in scenario.failures if kind.chaos is None]
    for failure in heapq.merge(*streams, key=lambda each: each.time):
        if failure.time > end:
            return
        drawn = Luck(*(luck.random() for _ in Luck._fields))
        yield Failure(
            failure.time,
            failure.kind,
            drawn,
            failure.node,
            failure.nodes,
            failure.group,
            failure.repair_seconds,
        )


def _of_kind(kind: Kind, scenario: Scenario, seed: int) -> Iterator[Failure]:
    rng = random.Random(f"{seed}/{kind.name}")
    if kind.name in scenario.listed:
        return _of_file(kind, scenario, rng)
    if kind.has_lives:
        return _lives(kind, scenario, rng)
    return _gaps(kind, scenario, rng)


def _of_file(kind: Kind, scenario: Scenario, rng: random.Random) -> Iterator[Failure]:
    nodes = scenario.cluster.nodes
    for entry in scenario.listed[kind.name]:
        node = None if entry.node is None else entry.node % nodes
        if entry.node is None and entry.group is None:
            node = rng.randrange(nodes)
        of_fault: Kind | None = kind
        if entry.fault is not None:
            of_fault = as_fault(kind, entry.fault)
        if of_fault is None:
            continue
        yield Failure(entry.time, of_fault, _UNDRAWN, node, 1, entry.group, entry.down_seconds)


def as_fault(kind: Kind, fault: Fault) -> Kind | None:
    """Return the kind with the effect of a chaos fault; None if the fault costs nothing."""
    effect = effect_of(fault)
    if effect is None:
        return None
    if not isinstance(fault, SlowRank):
        return msgspec.structs.replace(kind, effect=effect)
    factor, seconds = fault.factor, fault.seconds
    return msgspec.structs.replace(
        kind,
        effect="slow",
        factor=factor,
        found_after=seconds,
        leaves=False,
    )


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


def _gaps(kind: Kind, scenario: Scenario, rng: random.Random) -> Iterator[Failure]:
    """Yield failures at the gaps of the whole cluster, each of any part."""
    gaps: dict[Spacing | None, Length] = {
        "memoryless": Weibull(1.0),
        "even": Constant(1.0),
        "uniform": Uniform(0.0, 2.0),
        "weibull": Weibull(1.0, kind.shape or 1.0),
    }
    mean, gap = mtbf_of(kind, scenario), gaps[kind.spacing]
    parts, size = scenario.parts_of(kind), scenario.nodes_of(kind)
    now = 0.0
    while True:
        now += mean * gap.draw(rng.random())
        yield Failure(now, kind, _UNDRAWN, rng.choice(parts) * size, size)


def _lives(kind: Kind, scenario: Scenario, rng: random.Random) -> Iterator[Failure]:
    """Yield the ends of the parts' lives, all of `kind.age` at first; a mended part is as new."""
    life = Weibull(mtbf_of_each(kind), kind.shape or 1.0)
    size = scenario.nodes_of(kind)
    heap: list[tuple[float, int]] = []
    for part in scenario.parts_of(kind):
        end = life.draw(rng.random())
        while end <= kind.age:
            end += life.draw(rng.random())
        heap.append((end - kind.age, part))
    heapq.heapify(heap)
    while True:
        now, part = heap[0]
        yield Failure(now, kind, _UNDRAWN, part * size, size)
        heapq.heapreplace(heap, (now + life.draw(rng.random()), part))


# Rates


def mtbf_of_each(kind: Kind) -> float:
    """Return the mean life of one node, or of one domain, in seconds."""
    if kind.mtbf_of_each is not None:
        return kind.mtbf_of_each
    assert kind.per_1000_node_days is not None, "a rate of the whole cluster has no lives"
    return 1000 * DAY / kind.per_1000_node_days


def mtbf_of(kind: Kind, scenario: Scenario) -> float:
    """Return the mean time in seconds between the failures of a rate in the whole cluster."""
    if kind.mtbf is not None:
        return kind.mtbf
    return mtbf_of_each(kind) / len(scenario.parts_of(kind))


def rates_of(kind: Kind, scenario: Scenario) -> dict[Kind, float]:
    """Return how often failures come, per second in the scenario's days.

    A rate has one kind. The faults of a trace or a plan have one for each of their effects.
    """
    seconds = scenario.days * DAY
    found: Counter[Kind] = Counter()
    if kind.name in scenario.plans:
        plan = scenario.plans[kind.name]
        for shot in itertools.islice(shots(plan), MAX_SHOTS):
            time = plan.start_seconds + shot.time
            if time > seconds:
                break
            of_fault = as_fault(kind, shot.fault)
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
        return {kind: 1 / mtbf_of(kind, scenario)}
    return {each: number / seconds for each, number in found.items()}


@lru_cache(maxsize=64)
def _rate_of_lives(kind: Kind, parts: int, seconds: float) -> float:
    """Return the mean rate of lives that age: of young nodes it is far from 1 / mean life.

    At most 1,000 of the parts are drawn.
    """
    drawn_parts = min(parts, 1000)
    life = Weibull(mtbf_of_each(kind), kind.shape or 1.0)
    number = 0
    for seed in range(SEEDS_OF_LIVES):
        rng = random.Random(f"{seed}/{kind.name}/rate")
        for _ in range(drawn_parts):
            end = life.draw(rng.random())
            while end <= kind.age:
                end += life.draw(rng.random())
            while end <= kind.age + seconds:
                number += 1
                end += life.draw(rng.random())
    return number / SEEDS_OF_LIVES / drawn_parts * parts / seconds
