# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Draw the failures of a cluster: when, which nodes, and the luck that their consequences are drawn from.

The same seed draws the same failures for every shape of the job, with the same luck: so shapes are compared under
common random numbers, and a difference between two of them is not one of chance.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from titan_ft.chaos.schedule import shots
from titan_ft.forecast.lengths import Constant, Length, Uniform, Weibull
from titan_ft.forecast.scenario import DAY, Kind, Scenario


class Luck(NamedTuple):
    """Uniform numbers from 0 to 1, one for each thing that a failure leaves to chance."""

    breaks: float
    repair: float
    stall: float
    away: float
    rejoin: float


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure, before it is known what it hits of a job.

    Attributes:
        node: the first one hit; None if a group is given, or everything is hit.
        nodes: how many, from that one on.
        group: the one hit, of a trace of groups.
        repair_seconds: of the node, where a log has it.
    """

    time: float
    kind: Kind
    node: int | None
    nodes: int
    luck: Luck
    group: int | None = None
    repair_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class _Hit:
    """When and what, without luck."""

    time: float
    node: int | None
    nodes: int
    group: int | None = None
    repair_seconds: float | None = None


def draw_failures(scenario: Scenario, seed: int) -> Iterator[Failure]:
    """Yield the failures of a cluster in order of time, perhaps without end, but for those of chaos plans."""
    luck = random.Random(f"{seed}/luck")
    streams = [_of_kind(kind, scenario, seed) for kind in scenario.failures if kind.chaos is None]
    for kind, hit in heapq.merge(*streams, key=lambda each: each[1].time):
        yield Failure(
            hit.time,
            kind,
            hit.node,
            hit.nodes,
            Luck(*(luck.random() for _ in Luck._fields)),
            hit.group,
            hit.repair_seconds,
        )


def _of_kind(kind: Kind, scenario: Scenario, seed: int) -> Iterator[tuple[Kind, _Hit]]:
    rng = random.Random(f"{seed}/{kind.name}")
    nodes = scenario.cluster.nodes
    size = scenario.domains[kind.domain] if kind.domain is not None else 1
    parts = range(kind.first_node // size, -(-nodes // size))
    if kind.name in scenario.listed:
        hits = _of_list(kind, scenario, rng)
    elif lives_of_its_own(kind):
        hits = _lives(rng, parts, size, Weibull(mtbf_of_each(kind), kind.shape or 1.0), kind.age)
    else:
        hits = _gaps(rng, parts, size, _gap(kind, mtbf_of(kind, scenario)))
    for hit in hits:
        yield kind, hit


def _of_list(kind: Kind, scenario: Scenario, rng: random.Random) -> Iterator[_Hit]:
    nodes = scenario.cluster.nodes
    for entry in scenario.listed[kind.name]:
        node = None if entry.node is None else entry.node % nodes
        if entry.node is None and entry.group is None:
            node = rng.randrange(nodes)
        yield _Hit(entry.time, node, 1, entry.group, entry.down_seconds)


def _gap(kind: Kind, mean: float) -> Length:
    if kind.spacing == "even":
        return Constant(mean)
    if kind.spacing == "uniform":
        return Uniform(0.0, 2 * mean)
    return Weibull(mean, kind.shape or 1.0)


def _gaps(rng: random.Random, parts: range, size: int, gap: Length) -> Iterator[_Hit]:
    """Yield failures at the gaps of the whole cluster, each of any part."""
    now = 0.0
    while True:
        now += gap.draw(rng.random())
        yield _Hit(now, rng.choice(parts) * size, size)


def _lives(rng: random.Random, parts: range, size: int, life: Length, age: float) -> Iterator[_Hit]:
    """Yield the ends of the parts' lives; each is as good as new after one. At the start they have run for `age`."""
    heap: list[tuple[float, int]] = []
    for part in parts:
        end = life.draw(rng.random())
        while end <= age:
            end += life.draw(rng.random())
        heap.append((end - age, part))
    heapq.heapify(heap)
    while True:
        now, part = heap[0]
        yield _Hit(now, part * size, size)
        heapq.heapreplace(heap, (now + life.draw(rng.random()), part))


# Rates


def lives_of_its_own(kind: Kind) -> bool:
    """True if each node or domain has a life of its own. Without memory that is the same as gaps of the whole."""
    return kind.mtbf is None and kind.spacing == "weibull"


def mtbf_of_each(kind: Kind) -> float:
    """Return the mean life of one node, or of one domain, in seconds."""
    if kind.mtbf_of_each is not None:
        return kind.mtbf_of_each
    assert kind.per_1000_node_days is not None, "a rate of the whole cluster has no lives"
    return 1000 * DAY / kind.per_1000_node_days


def mtbf_of(kind: Kind, scenario: Scenario) -> float:
    """Return the mean time between the failures of a kind in the whole cluster, in seconds."""
    if kind.mtbf is not None:
        return kind.mtbf
    if kind.name in scenario.listed:
        entries = scenario.listed[kind.name]
        return (entries[-1].time or DAY) / len(entries)
    if kind.name in scenario.plans:
        times = [shot.time for shot in itertools.islice(shots(scenario.plans[kind.name]), 500)]
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else scenario.days * DAY
    size = scenario.domains[kind.domain] if kind.domain is not None else 1
    return mtbf_of_each(kind) / -(-scenario.cluster.nodes // size)
