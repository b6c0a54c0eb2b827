# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The closed forms against the simulation, for each input that a scenario has; what they do not
hold for, they say.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from tests.forecast.scenarios import MEMORYLESS, scenario
from titan_ft.forecast.candidate import Candidate, make_candidates
from titan_ft.forecast.choice import Forecast
from titan_ft.forecast.closed_forms import estimate, find_doubts
from titan_ft.forecast.simulation import simulate
from titan_ft.forecast.table import notes_of

CLUSTER = {"gpus": 98304, "gpus_per_node": 8}
RESTART: dict[str, Any] = {
    "groups": None,
    "job": {"step": 20.0},
    "checkpoint": {"save": 30.0},
    "restart": {"recover": 300.0},
}
RARE = {**MEMORYLESS, "mtbf": 1e7}
NODE = {"name": "node", "mtbf_of_each": "150 d"}
CORRUPT = {**MEMORYLESS, "mtbf": 36000.0, "effect": "corrupt", "found_after": 3000.0}
SLOW = {**MEMORYLESS, "mtbf": 7200.0, "effect": "slow", "factor": 1.3, "found_after": 300.0}
EACH_DAY = {"every": "1 d", "nodes": 1024, "lasts": "10 h"}
LOSES = {"stall": 2.0, "away": 600.0, "loses": True}
DRAG = {"stall": 2.0, "away": 600.0, "drag": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "all but one group must be there": {
        "job": {"step": 20.0, "groups": 12, "min_replica_size": 11}
    },
    "all groups must be there": {"job": {"step": 20.0, "groups": 12, "min_replica_size": 12}},
    "nodes in maintenance, no spares": {
        "cluster": {**CLUSTER, "spare_nodes": 0},
        "failure": [RARE],
        "maintenance": [EACH_DAY],
    },
    "maintenance each hour": {"failure": [RARE], "maintenance": [{**EACH_DAY, "every": "1 h"}]},
    "groups away slow the others": {"groups": DRAG},
    "rounds that groups away slow": {"groups": DRAG, "rounds": {"steps": 30}},
    "a death loses the step": {"groups": LOSES},
    "a death loses a long step": {"job": {"step": 200.0, "groups": 12}, "groups": LOSES},
    "a straggler of a job that restarts": {**RESTART, "failure": [SLOW]},
    "wrong numbers in a job that restarts": {**RESTART, "failure": [CORRUPT]},
    "maintenance of a job that restarts": {**RESTART, "failure": [RARE], "maintenance": [EACH_DAY]},
    "young nodes": {"failure": [{**NODE, "spacing": "weibull", "shape": 0.7}]},
    "half of the nodes have lives": {
        "failure": [{**NODE, "spacing": "weibull", "shape": 1.0, "first_node": 6144}]
    },
    "half of the nodes fail": {"failure": [{**NODE, "spacing": "memoryless", "first_node": 6144}]},
    "a failure waits while the job does": {
        "clock": "training",
        "groups": {"stall": 60.0, "away": 600.0},
    },
    "a job that restarts, evenly, while it trains": {
        **RESTART,
        "clock": "training",
        "failure": [{"name": "any", "mtbf": "50 min", "spacing": "even"}],
    },
    "maintenance that overlaps": {
        "days": 30.0,
        "cluster": {**CLUSTER, "spare_nodes": 2048},
        "failure": [RARE],
        "maintenance": [{"every": "10 h", "nodes": 1024, "lasts": "39 h"}],
    },
    "groups drain": {"failure": [{**MEMORYLESS, "effect": "drain"}]},
    "two groups, which are lost together": {
        "job": {"step": 20.0, "groups": 2},
        "checkpoint": {"save": 30.0},
        "failure": [{**MEMORYLESS, "mtbf": 10_000.0}],
    },
}


def made(**changes: Any) -> Candidate:
    """Return the candidate of the last strategy that the changes name."""
    return make_candidates(scenario(**changes))[-1]


def simulated(candidate: Candidate, seeds: int = 6) -> float:
    return fmean(simulate(candidate, seed).effective for seed in range(seeds))


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_each_input_counts(changes: dict[str, Any]) -> None:
    """As in the simulation within 3 %, the chance of six runs included."""
    candidate = made(**changes)
    assert candidate.pressure < 0.25
    assert estimate(candidate) == pytest.approx(simulated(candidate), rel=0.03)


def test_all_is_lost_without_checkpoints() -> None:
    """A single group that fails each day: what is left of ten days is the time since the last
    failure.
    """
    candidate = made(job={"step": 20.0, "groups": 1}, failure=[{**MEMORYLESS, "mtbf": 86400.0}])
    assert estimate(candidate) == pytest.approx(0.1, abs=0.01)
    assert simulated(candidate, 60) == pytest.approx(0.1, abs=0.03)


def test_what_they_do_not_hold_for_is_said() -> None:
    breaks = {**MEMORYLESS, "breaks": 0.4, "repair": "10 h"}
    few = made(cluster={**CLUSTER, "spare_nodes": 0}, failure=[breaks])
    assert list(find_doubts(few)) == ["too few spares"]
    assert list(find_doubts(made(cluster={**CLUSTER, "spare_nodes": 24}, failure=[breaks]))) == []
    service = {"every": "11 h", "nodes": 12288, "lasts": "10 min"}
    hall = {"name": "hall", "domain": "hall", "mtbf": "11 h", "spacing": "even"}
    halls = {**CLUSTER, "domain": [{"name": "hall", "nodes": 12288}]}
    serviced = made(failure=[RARE], maintenance=[service])
    assert list(find_doubts(serviced)) == ["no checkpoints"]
    assert estimate(serviced) < 0.1
    broken = made(cluster=halls, failure=[hall])
    assert list(find_doubts(broken)) == ["no checkpoints", "hall is not memoryless"]
    assert estimate(broken) < 0.1
    assert list(find_doubts(made(groups={"stall": 400.0, "away": 600.0}))) == ["pressure 0.42"]


def test_a_spacing_that_puts_them_off_is_said() -> None:
    """Failures with little chance come shortly before the second save: the form is too high."""
    candidate = made(
        cluster={"gpus": 1, "gpus_per_node": 1},
        job={"step": 5.0},
        checkpoint={"save": 10.0, "interval": 500.0},
        failure=[{"name": "kill", "mtbf": 900.0, "spacing": "weibull", "shape": 6.0}],
        groups=None,
        restart={"recover": 50.0},
    )
    accounts = tuple(simulate(candidate, seed) for seed in range(3))
    forecast = Forecast(candidate, estimate(candidate), accounts)
    assert forecast.effective < 0.95 * forecast.estimate
    assert "kill is not memoryless" in list(find_doubts(candidate))
    assert f"{100 * forecast.estimate:.1f} %" in notes_of(forecast)[0]
    alone = Forecast(candidate, forecast.estimate)
    assert "kill is not memoryless" in notes_of(alone)[1]
