# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Candidates are ranked by what is paid for; the advice names the runner-up and what would turn
it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.forecast.scenarios import MEMORYLESS, candidate, tables
from titan_ft.config import ConfigError
from titan_ft.forecast.candidate import Candidate
from titan_ft.forecast.choice import (
    Case,
    Forecast,
    _find_relevant_inputs,
    advise,
    compare,
    find_sensitivities,
    find_tipping_point,
    half_interval_of_mean,
    scale_input,
)
from titan_ft.forecast.closed_forms import enough_spares, estimate
from titan_ft.forecast.scenario import read_scenarios
from titan_ft.forecast.simulation import Account
from titan_ft.forecast.table import case_figures, case_notes, percentages

NODES = {
    "name": "node",
    "per_1000_node_days": 6.5,
    "spacing": "weibull",
    "shape": 0.8,
    "age": "1000 d",
    "breaks": 0.4,
    "repair": "10 h",
}
STRATEGIES = {
    "checkpoint": {"save": "30 s"},
    "restart": {"recover": {"base": "50 s", "per_gpu": "9 ms"}},
    "rounds": {"steps": 30},
}


def cases(seeds: int = 4, **changes: Any) -> list[Case]:
    return compare(read_scenarios(tables(**changes), Path()), num_runs=seeds)


def test_groups_beat_restarts_and_the_sentence_says_so() -> None:
    (case,) = cases(job={"step": 20.0, "groups": [6, 48]}, **STRATEGIES)
    best, *_, last = case.forecasts
    assert (best.candidate.strategy, best.candidate.groups) == ("groups", 48)
    assert last.candidate.strategy == "restart"
    assert len(case.forecasts) == 5, "a restart is one candidate, whatever the groups are"
    assert f"restart from checkpoints: {100 * last.effective:.1f} % effective" in case.advice
    assert case.advice.startswith(
        f"Take 48 groups of 2,048: {100 * best.effective:.1f} % effective training time; next"
    )


def test_what_is_paid_for_ranks() -> None:
    """Twice the GPUs as spares for nothing: they cost half of what is paid, and the effective time
    is the same.
    """
    (case,) = cases(
        cluster={
            "gpus": 98304,
            "gpus_per_node": 8,
            "price_per_gpu_hour": 2.0,
            "spare_nodes": [0, 12288],
        }
    )
    none, many = case.forecasts
    assert (none.candidate.spares, many.candidate.spares) == (0, 12288)
    assert none.effective == many.effective
    assert many.worth == pytest.approx(none.worth / 2)
    figures = case_figures(case)["candidates"]
    assert figures[1]["money_lost_a_month"] - figures[0]["money_lost_a_month"] == pytest.approx(
        98304 * 720 * 2.0
    )


def test_circumstances_are_not_compared() -> None:
    found = cases(
        groups={"stall": [180.0, 2.0], "away": 600.0}, job={"step": 20.0, "groups": [6, 12]}
    )
    assert [case.circumstances for case in found] == [
        {"groups.stall": 180.0},
        {"groups.stall": 2.0},
    ]
    assert [len(case.forecasts) for case in found] == [2, 2]


def test_an_input_that_would_turn_the_choice() -> None:
    """Groups against restarts: much longer stalls make restarts better."""
    groups = candidate(groups={"stall": 60.0, "away": 600.0})
    (job,) = [
        each.candidate
        for each in cases(**STRATEGIES | {"restart": {"recover": "5 min"}})[0].forecasts
        if each.candidate.strategy == "restart"
    ]  # fmt: skip
    tipping_point = find_tipping_point(groups, job, estimate(groups) - estimate(job))
    assert tipping_point is not None
    name, factor = tipping_point
    assert name == "stall"
    assert 3 < factor <= 16
    before, after = (estimate(scale_input(groups, "stall", factor * share)) for share in (0.9, 1.1))
    assert before > estimate(job) > after


def test_no_input_is_named_where_the_closed_forms_are_off() -> None:
    """An advantage that they get wrong by 2 % of it all would turn at a false factor."""
    (case,) = cases(job={"step": 20.0, "groups": [6, 48]})
    best, other = case.forecasts
    assert "would be better if" in case.advice or "turns that" in case.advice
    wrong = replace(best, estimate=best.estimate - 0.02)
    assert advise([wrong, other]).endswith(
        ". The closed forms are too far off here to name an input that turns that."
    )


def test_a_difference_of_chance_is_called_none() -> None:
    (case,) = cases(
        failure=[{"name": "any", "mtbf": 1e9, "spacing": "memoryless"}],
        job={"step": 20.0, "groups": [6, 12]},
    )
    assert "The first two do not differ" in case.advice


def test_a_shape_that_does_not_fit_is_left_out() -> None:
    def refuse(found: Candidate) -> Candidate:
        if found.groups == 48:
            raise ConfigError(
                "cluster.gpu_memory_gb must hold 90.0 GB and activations, got 80; take larger groups"
            )
        return replace(found, has_sizes=True)

    scenarios = read_scenarios(tables(job={"step": 20.0, "groups": [12, 48]}), Path())
    (case,) = compare(scenarios, num_runs=2, fit_to_sizes=refuse)
    assert [each.candidate.groups for each in case.forecasts] == [12]
    assert case.excluded == (
        "48 groups of 2,048: cluster.gpu_memory_gb must hold 90.0 GB and activations, got 80; take larger groups",
    )
    runs = "Simulated: 2 runs of 10 d each."
    assert case_notes(case) == [
        f"Left out: {case.excluded[0]}.",
        runs,
        "The shape is not bounded by memory: give cluster.gpu_memory_gb.",
    ]
    (unbounded,) = cases(2)
    assert case_notes(unbounded) == [
        runs,
        "The shape is not bounded by memory and exchange: give job.config.",
    ]


def test_the_value_of_a_token_may_turn_the_choice() -> None:
    """Rounds are better by 1 % of all time; a token of theirs that is worth a tenth less is not."""
    (case,) = cases(
        rounds={"steps": 30, "value_of_a_token": 1.03}, groups={"stall": 60, "away": 60}
    )
    assert case.forecasts[0].candidate.strategy == "rounds"
    assert "if the value of a token in rounds were 0.92 times as much" in case.advice


def test_only_inputs_of_the_scenario_are_said_to_be_tried() -> None:
    """Without drag, exchange, rounds, repairs and checkpoints nobody could change them."""
    (case,) = cases(job={"step": 20.0, "groups": [6, 48]})
    best, other = (each.candidate for each in case.forecasts)
    assert _find_relevant_inputs(best, other) == ["time between failures", "stall", "time away"]


def test_the_time_away_of_groups_is_not_that_of_a_restart() -> None:
    """One of them turns the choice alone: two inputs at once are no input."""
    (case,) = cases(job={"step": 20.0, "groups": 12}, **STRATEGIES)
    groups, restart = (
        each.candidate for each in case.forecasts if each.candidate.strategy != "rounds"
    )
    assert scale_input(groups, "recover", 2.0).costs.away is groups.costs.away
    assert scale_input(restart, "time away", 2.0).costs.away is restart.costs.away
    assert scale_input(restart, "recover", 2.0).costs.away.mean == 2 * restart.costs.away.mean


def test_spares_that_cost_more_than_they_save_are_explained() -> None:
    """The choice goes by what is paid for, and the sentence says so."""
    (case,) = cases(
        cluster={"gpus": 96, "gpus_per_node": 8, "spare_nodes": [0, 1, 8]},
        job={"step": 20.0, "groups": [2, 4]},
        failure=[{**MEMORYLESS, "mtbf": "1 d", "breaks": 1.0, "repair": "6 h"}],
    )
    for forecast in case.forecasts[:2]:
        assert f"{100 * forecast.worth:.1f} % of what is paid for" in case.advice
    assert "1 spare node" in case.advice
    assert "1 spare nodes" not in case.advice
    assert "2 groups of 48" in case.advice, "the first two are of one shape"


def test_half_and_twice_of_each_input() -> None:
    rows = {
        name: values
        for name, *values in find_sensitivities(candidate(groups={"stall": 60.0, "away": 600.0}))
    }
    assert rows.keys() == {"time between failures", "stall", "time away"}
    half, usual, twice = rows["stall"]
    assert half > usual > twice
    half, usual, twice = rows["time between failures"]
    assert half < usual < twice


def test_an_input_that_changes_nothing_turns_nothing() -> None:
    """By simulation one is better by 1 %, by closed forms they are equal: only what changes that
    much turns it.
    """
    groups = candidate(groups={"stall": 60.0, "away": 600.0})
    tipping_point = find_tipping_point(groups, groups, 0.01)
    assert tipping_point is None, "both change by the same"


def test_repairs_count_whatever_their_length_is() -> None:
    failure = [{**MEMORYLESS, "breaks": 0.4, "repair": {"median": "6 h", "p99": "2 d"}}]
    rows = find_sensitivities(
        candidate(failure=failure, cluster={"gpus": 98304, "gpus_per_node": 8, "spare_nodes": 10})
    )
    assert "repair" in [name for name, *_ in rows]


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9), st.sampled_from([0, 1, 2]))
def test_percentages_add_up_exactly(values: list[float], digits: int) -> None:
    total = sum(values)
    shares = {
        str(place): value / total if total else 1 / len(values)
        for place, value in enumerate(values)
    }
    shown = percentages(shares, digits)
    assert sum(round(value * 10**digits) for value in shown.values()) == 100 * 10**digits
    assert all(
        abs(shown[name] - 100 * share) <= 1.0001 / 10**digits for name, share in shares.items()
    )


def test_intervals() -> None:
    assert half_interval_of_mean([1.0, 3.0]) == pytest.approx(12.71 * 2**0.5 / 2**0.5, rel=1e-6)
    runs = tuple(Account(1.0, 1, group_seconds={"useful": share}) for share in (0.3, 0.1, 0.2))
    assert Forecast(candidate(), 0.0, runs).spread() == pytest.approx((0.11, 0.29))


@pytest.mark.parametrize(
    ("expected", "number"), [(0.1536, 2), (0.3072, 2), (0.6144, 3), (1.2288, 4), (13.3, 22)]
)
def test_standbys_are_the_99th_percentile(expected: float, number: int) -> None:
    assert enough_spares(expected) == number


@pytest.mark.slow
@pytest.mark.alone
def test_a_plan_of_a_hundred_thousand_gpus_takes_seconds() -> None:
    """Six candidates, 20 runs each, 12,288 nodes with lives of their own, for 30 days: 14 s of a
    busy CPU core.
    """
    changes = {
        "days": 30.0,
        "cluster": {"gpus": 98304, "gpus_per_node": 8, "spare_nodes": [24, 40]},
        "job": {"step": 20.0, "groups": [6, 12, 24]},
        "failure": [NODES],
    }
    start = time.process_time()
    (case,) = cases(seeds=20, **changes)
    assert sum(len(each.accounts) for each in case.forecasts) == 120
    assert time.process_time() - start < 60, (
        "six times what it takes: a bound against a mistake, not a measurement"
    )
