# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Random scenarios of all inputs together: the time adds up, and steps at once are steps one by
one.
"""

from __future__ import annotations

import math
import random
from statistics import fmean, stdev
from typing import Any

import pytest

from tests.forecast.scenarios import scenario
from titan_ft.forecast.candidate import make_candidates
from titan_ft.forecast.closed_forms import estimate, find_doubts
from titan_ft.forecast.simulation import simulate

SPACINGS: tuple[dict[str, Any], ...] = (
    {"spacing": "memoryless"},
    {"spacing": "even"},
    {"spacing": "uniform"},
    {"spacing": "weibull", "shape": 0.6},
)
EFFECTS: tuple[dict[str, Any], ...] = (
    {"effect": "stop"},
    {"effect": "stop", "breaks": 0.5, "repair": {"median": 100.0, "p99": 1000.0}},
    {"effect": "stop", "scope": "job"},
    {"effect": "stop", "domain": "rack"},
    {"effect": "drain"},
    {"effect": "slow", "factor": 3.0, "found_after": 30.0},
    {"effect": "slow", "factor": 1.1, "found_after": 300.0, "leaves": False},
    {"effect": "corrupt", "found_after": 100.0},
)


def drawn(seed: int) -> dict[str, Any]:
    """Return the tables of a small cluster that fails often, for a few hours."""
    rng = random.Random(seed)
    choose = rng.choice
    groups = choose([1, 2, 3, 8])
    nodes = groups * choose([1, 2, 6])
    failures: list[dict[str, Any]] = []
    for number in range(rng.randint(1, 3)):
        rate = choose([{"mtbf": 50.0}, {"mtbf": 600.0}, {"mtbf_of_each": 900.0 * nodes}])
        failures.append({"name": f"{number}", **rate, **choose(SPACINGS), **choose(EFFECTS)})
    has_plan = rng.random() < 0.2
    if has_plan:
        plan = {"name": "plan", "chaos": "campaign", "seed": seed, "found_after": 20.0}
        failures.append(plan)
    cluster = {"gpus": nodes, "gpus_per_node": 1, "domain": [{"name": "rack", "nodes": 2}]}
    if rng.random() < 0.6:
        cluster["spare_nodes"] = choose([0, 1, 5])
    service = [{"every": 700.0, "nodes": 2, "lasts": choose([10.0, 2000.0])}]
    checkpoint = choose([None, {"save": 3.0}, {"save": 0.0, "interval": 60.0}])
    return {
        "clock": choose(["wall", "training"]),
        "days": 0.1,
        "cluster": cluster,
        "job": {
            "step": choose([1.0, 20.0]),
            "groups": groups,
            "min_replica_size": rng.randint(1, groups),
        },
        "failure": failures,
        "maintenance": choose([None, service]),
        "checkpoint": checkpoint,
        "restart": None if has_plan or checkpoint is None else {"recover": choose([0.0, 30.0])},
        "groups": {
            "stall": choose([0.0, 2.0]),
            "away": choose([0.0, 10.0, 200.0]),
            "rejoin": choose([0.0, 2.0]),
            "drag": choose([0.0, 0.1]),
            "loses": choose([True, False]),
        },
        "rounds": choose([None, {"steps": 5, "exchange": 2.0}]),
    }


@pytest.mark.parametrize("seed", range(20))
def test_the_time_adds_up(seed: int) -> None:
    for candidate in make_candidates(scenario(**drawn(seed))):
        assert 0 <= estimate(candidate) <= 1 + 1e-9
        account = simulate(candidate, seed)
        assert math.fsum(account.shares().values()) == pytest.approx(1.0, abs=1e-9)
        assert min(account.group_seconds.values()) >= 0
        single = simulate(candidate, seed, on_commit=lambda time, groups: None)
        # A failure at the very end of a step may come before it or after it, by rounding.
        step = 2 * candidate.step * candidate.groups
        assert single.group_seconds == pytest.approx(account.group_seconds, rel=1e-6, abs=step)
        assert (single.steps, single.failures) == (account.steps, account.failures)


def drawn_mildly(seed: int) -> dict[str, Any]:
    """Return the tables of a cluster that fails seldom enough for the closed forms, or nearly."""
    rng = random.Random(seed)
    choose = rng.choice
    groups = choose([1, 2, 4, 12])
    nodes = groups * choose([1, 2, 8])
    failures: list[dict[str, Any]] = []
    for number in range(rng.randint(1, 2)):
        effect = choose(EFFECTS)
        mtbf = choose([1800.0, 3600.0, 20000.0])
        if effect.get("scope") == "job":
            mtbf = 100_000.0
        failures.append({"name": f"{number}", "mtbf": mtbf, **choose(SPACINGS), **effect})
    cluster = {"gpus": nodes, "gpus_per_node": 1, "domain": [{"name": "rack", "nodes": 2}]}
    if rng.random() < 0.5:
        cluster["spare_nodes"] = choose([0, 2, 30])
    service = [{"every": choose([3600.0, 28_800.0]), "nodes": 1, "lasts": 7200.0}]
    checkpoint = choose([None, {"save": 3.0}, {"save": 0.0, "interval": 60.0}])
    return {
        "days": 3.0,
        "cluster": cluster,
        "job": {"step": choose([1.0, 5.0]), "groups": groups},
        "failure": failures,
        "maintenance": choose([None, None, service]),
        "checkpoint": checkpoint,
        "restart": None if checkpoint is None else {"recover": choose([10.0, 60.0])},
        "groups": {
            "stall": choose([0.0, 2.0, 20.0]),
            "away": choose([10.0, 60.0, 300.0]),
            "rejoin": choose([0.0, 2.0]),
            "drag": choose([0.0, 0.2]),
            "loses": choose([True, False]),
        },
        "rounds": choose([None, {"steps": 20, "exchange": 2.0}]),
    }


@pytest.mark.parametrize("seed", range(0, 120, 20))
def test_an_estimate_without_a_doubt_is_right(seed: int) -> None:
    """Within 1 % of the simulation, and the chance of four runs; some rows of each seed are."""
    number = 0
    for each in range(seed, seed + 20):
        for candidate in make_candidates(scenario(**drawn_mildly(each))):
            if list(find_doubts(candidate)):
                continue
            number += 1
            runs = [simulate(candidate, run).effective for run in range(4)]
            chance = 3 * stdev(runs) / 2
            assert estimate(candidate) == pytest.approx(fmean(runs), rel=0.012, abs=chance), each
    assert number > 5
