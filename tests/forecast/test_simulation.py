# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The simulation: exact where there is a formula, adds up, is monotone and deterministic, counts as
the report does.
"""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forecast.scenarios import MEMORYLESS, candidate, restart
from tests.history.histories import commit, say
from titan_ft.forecast.candidate import Candidate, best_interval
from titan_ft.forecast.closed_forms import daly_share, estimate
from titan_ft.forecast.scenario import DAY
from titan_ft.forecast.simulation import simulate
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.timing.goodput import measure_goodput


@pytest.mark.parametrize(
    ("mtbf", "save", "recover", "exact"),
    [(1080.0, 30.0, 600.0, 0.4489), (6500.0, 60.0, 300.0, 0.8310), (32400.0, 120.0, 900.0, 0.8913)],
)
def test_restarts_are_as_daly_has_them(
    mtbf: float, save: float, recover: float, exact: float
) -> None:
    """By closed form exactly, by simulation within four standard errors."""
    assert daly_share(mtbf, best_interval(mtbf, save), save, recover) == pytest.approx(
        exact, abs=5e-5
    )
    job = restart(mtbf, save, recover)
    assert estimate(job) == pytest.approx(exact, abs=5e-5)
    values = [simulate(job, seed, 400 * mtbf).effective for seed in range(12)]
    assert abs(fmean(values) - exact) < 4 * stdev(values) / math.sqrt(len(values))


def test_the_best_interval_is_the_best() -> None:
    for mtbf, save, recover in ((1080.0, 30.0, 600.0), (32400.0, 120.0, 900.0)):
        best = best_interval(mtbf, save)
        shares = [
            daly_share(mtbf, best * factor, save, recover)
            for factor in (0.8, 0.95, 1.0, 1.05, 1.25)
        ]
        # Equation 37 is a series of two terms: its interval is within a few per cent of the best
        # one.
        assert shares[2] > shares[0]
        assert shares[2] > shares[4]
        assert shares[2] == pytest.approx(max(shares), rel=5e-4)


GRID = [
    (mtbf, groups, stall, away)
    for mtbf in (600.0, 3600.0)
    for groups in (6, 48)
    for stall in (2.0, 60.0)
    for away in (60.0, 900.0)
]


@pytest.mark.parametrize(("mtbf", "groups", "stall", "away"), GRID)
def test_closed_forms_hold_inside_their_envelope(
    mtbf: float, groups: int, stall: float, away: float
) -> None:
    """Within 1 % where the pressure is below 0.25; steps are short, for the forms know none."""
    job = candidate(
        days=300 * mtbf / DAY,
        failure=[{**MEMORYLESS, "mtbf": mtbf}],
        job={"step": 2.0, "groups": groups},
        checkpoint={"save": 0.0, "interval": 600.0},
        groups={"stall": stall, "away": away, "rejoin": 0.5},
    )
    assert job.pressure < 0.4
    simulated = fmean(simulate(job, seed, 300 * mtbf).effective for seed in range(4))
    assert estimate(job) == pytest.approx(simulated, rel=0.01 if job.pressure < 0.25 else 0.03)


def test_closed_forms_know_stragglers_and_wrong_numbers() -> None:
    """Their groups leave in order: nobody stalls, however long a stall is."""
    slow = {
        "name": "slow",
        "effect": "slow",
        "factor": 1.5,
        "found_after": 300.0,
        "mtbf": 9000,
        "spacing": "memoryless",
    }
    corrupt = {
        "name": "sdc",
        "effect": "corrupt",
        "found_after": 600.0,
        "mtbf": 9000,
        "spacing": "memoryless",
    }
    job = candidate(
        failure=[slow, corrupt],
        job={"step": 2.0, "groups": 6},
        groups={"stall": 500.0, "away": 300.0},
    )
    simulated = fmean(simulate(job, seed, 40 * DAY).effective for seed in range(4))
    assert estimate(job) == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize("groups", [4, 32])
def test_the_form_of_rounds(groups: int) -> None:
    job = candidate(
        job={"step": 20.0, "groups": groups},
        rounds={"steps": 30},
        failure=[{**MEMORYLESS, "mtbf": 3600.0}],
    )
    rounds = Candidate(**{**vars(job), "strategy": "rounds", "step": 600.0, "usual_step": 600.0})
    simulated = fmean(simulate(rounds, seed, 200 * 3600.0).effective for seed in range(4))
    assert estimate(rounds) == pytest.approx(simulated, rel=0.005)


def test_nothing_fails_and_nothing_is_lost() -> None:
    job = candidate(failure=[{**MEMORYLESS, "mtbf": 1e10}])
    account = simulate(job, 0, 43_200 * 20.0)
    assert account.steps == 43_200 - 1, "the last one ends with the run"
    assert account.effective == pytest.approx(1.0, abs=1e-4)
    assert estimate(job) == pytest.approx(1.0, abs=1e-6)


lengths = st.floats(0.0, 200.0)


@settings(max_examples=60, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 3, 8]),
    least=st.integers(1, 3),
    step=st.floats(0.5, 60.0),
    stall=lengths,
    away=lengths,
    rejoin=lengths,
    drag=st.floats(0.0, 5.0),
    loses=st.booleans(),
    clock=st.sampled_from(["wall", "training"]),
    spares=st.sampled_from([None, 0, 1, 5]),
    strategy=st.sampled_from(["groups", "rounds"]),
    seed=st.integers(0, 1000),
)
def test_every_second_of_every_group_is_accounted_for(
    groups: int,
    least: int,
    step: float,
    stall: float,
    away: float,
    rejoin: float,
    drag: float,
    loses: bool,
    clock: str,
    spares: int | None,
    strategy: str,
    seed: int,
) -> None:
    """Whatever fails: nodes, racks, the job, stragglers, wrong numbers, maintenance. The simulation
    asserts it.
    """
    job = candidate(
        clock=clock,
        cluster={
            "gpus": 24 * 8,
            "gpus_per_node": 8,
            "domain": [{"name": "rack", "nodes": 4}],
            **({} if spares is None else {"spare_nodes": spares}),
        },
        job={"step": step, "groups": groups, "min_replica_size": min(least, groups)},
        failure=[
            {
                "name": "node",
                "mtbf": 900,
                "spacing": "memoryless",
                "breaks": 0.5,
                "repair": {"median": 600, "p99": 9000},
            },
            {
                "name": "rack",
                "domain": "rack",
                "mtbf": 5000,
                "spacing": "weibull",
                "shape": 0.8,
                "breaks": 1.0,
                "repair": 300,
            },
            {"name": "job", "scope": "job", "mtbf": 9000, "spacing": "uniform"},
            {
                "name": "slow",
                "effect": "slow",
                "factor": 2.0,
                "found_after": 100,
                "mtbf": 7000,
                "spacing": "memoryless",
            },
            {
                "name": "sdc",
                "effect": "corrupt",
                "found_after": 300,
                "mtbf": 7000,
                "spacing": "memoryless",
            },
        ],
        maintenance=[{"every": "1 h", "nodes": 5, "lasts": "10 min"}],
        groups={"stall": stall, "away": away, "rejoin": rejoin, "drag": drag, "loses": loses},
        rounds={"steps": 10, "exchange": 3.0} if strategy == "rounds" else None,
        checkpoint={"save": 5.0, "interval": 200.0},
    )
    if strategy == "rounds":
        of_round = {"strategy": "rounds", "step": 10 * step, "usual_step": 10 * step}
        job = Candidate(**{**vars(job), **of_round, "exchange": 3.0})
    account = simulate(job, seed, 20_000.0)
    assert math.fsum(account.shares().values()) == pytest.approx(1.0, abs=1e-9)
    assert min(account.group_seconds.values()) >= 0
    assert 0 <= account.effective <= 1
    assert account.votes >= account.steps or account.restarts


def effective(**changes: Any) -> float:
    return fmean(simulate(candidate(days=20.0, **changes), seed).effective for seed in range(4))


def test_more_of_what_helps_never_harms() -> None:
    """Rarer failures, more spares, shorter stalls: with common random numbers each is as good or
    better.
    """
    rarer = [
        effective(failure=[{**MEMORYLESS, "mtbf": mtbf}])
        for mtbf in (540.0, 1080.0, 2160.0, 4320.0)
    ]
    assert rarer == sorted(rarer)
    shorter = [
        effective(groups={"stall": stall, "away": 600.0}) for stall in (180.0, 60.0, 20.0, 2.0)
    ]
    assert shorter == sorted(shorter)
    failure = {**MEMORYLESS, "breaks": 0.4, "repair": "10 h"}
    spares = [
        effective(
            failure=[failure], cluster={"gpus": 98304, "gpus_per_node": 8, "spare_nodes": number}
        )
        for number in (0, 8, 16, 40)
    ]
    assert spares == sorted(spares)
    assert spares[-1] > 2 * spares[0]


def test_steps_at_once_are_steps_one_by_one() -> None:
    job = candidate(
        checkpoint={"save": 7.0, "interval": 300.0},
        groups={"stall": 9.0, "away": 300.0, "rejoin": 2.0},
    )
    once, single = simulate(job, 5, DAY), simulate(job, 5, DAY, lambda time, groups: None)
    assert (once.steps, once.votes, once.failures) == (single.steps, single.votes, single.failures)
    assert once.group_seconds == pytest.approx(single.group_seconds, rel=1e-6, abs=1e-3)


@pytest.mark.parametrize("step", [0.4, 1.2, 1.6, 1.8, 3.6])
def test_a_failure_at_the_end_of_a_step_hits_no_step_made_at_once(step: float) -> None:
    """18 minutes, and a day, are whole numbers of these steps, but for rounding. A jump over calm
    steps that ended with the failure lost all of them, or died of it.
    """
    even = {"name": "even", "mtbf": "18 min", "spacing": "even"}
    rare = {**MEMORYLESS, "mtbf": "100 d"}
    service = [{"every": "1 h", "nodes": 1, "lasts": "2 min"}]
    jobs = [
        candidate(failure=[even], job={"step": step, "groups": 12}),
        candidate(failure=[rare], job={"step": step, "groups": 12}, maintenance=service),
        candidate(
            failure=[even],
            groups=None,
            job={"step": step},
            checkpoint={"save": 0.0, "interval": 70.0},
            restart={"recover": 60.0},
        ),
    ]
    for job in jobs:
        once = simulate(job, 0, 0.4 * DAY)
        single = simulate(job, 0, 0.4 * DAY, lambda time, groups: None)
        assert once.effective == pytest.approx(single.effective, abs=2e-3)


def test_the_clock_of_training_stands_in_stalls() -> None:
    """A failure after each 100 s of training, and 7 s of stall, in steps of 10 s."""
    job = candidate(
        clock="training",
        cluster={"gpus": 4, "gpus_per_node": 1},
        job={"step": 10.0, "groups": 4},
        failure=[{"name": "even", "mtbf": 104.0, "spacing": "even"}],
        groups={"stall": 7.0, "away": 20.0},
    )
    ends: list[float] = []
    account = simulate(job, 0, 10_000.0, lambda time, groups: ends.append(time))
    stalled = [after - before for before, after in pairwise(ends) if after - before > 10.5]
    assert len(stalled) > 80
    assert stalled == [pytest.approx(17.0)] * len(stalled), "no failure strikes in a stall"
    trained = 10_000.0 - 7.0 * len(stalled)
    assert account.failures == pytest.approx(trained / 104.0, abs=1.0)


def test_a_group_that_leaves_in_order_finishes_its_step() -> None:
    drain = {"name": "drain", "effect": "drain", "mtbf": 1030.0, "spacing": "even"}
    job = candidate(
        job={"step": 100.0, "groups": 4}, failure=[drain], groups={"stall": 50.0, "away": 5.0}
    )
    account = simulate(job, 0, 10 * DAY)
    assert account.failures == 838
    assert account.group_seconds["lost"] <= 4 * 100, "the step that the end of the run cuts off"
    assert account.group_seconds["stall"] == 0.0


def test_a_drain_does_not_give_back_the_nodes_of_a_maintenance() -> None:
    """Both ask the same group in one step. Its node is away for an hour, and there is no spare."""
    drain = {"name": "drain", "effect": "drain", "mtbf": 1005.0, "spacing": "even"}
    job = candidate(
        cluster={"gpus": 2, "gpus_per_node": 1, "spare_nodes": 0},
        job={"step": 100.0, "groups": 1},
        failure=[drain],
        maintenance=[{"every": 1001.0, "nodes": 1, "lasts": 3600.0}],
        groups={"stall": 0.0, "away": 5.0},
        checkpoint={"save": 1.0},
    )
    account = simulate(job, 0, 4000.0)
    assert account.group_seconds["nodes"] > 2000.0


def test_a_last_group_saves_wrong_numbers_too() -> None:
    """Nobody has found them yet, so the save before it leaves takes its time."""
    drain = {"name": "drain", "effect": "drain", "mtbf": 5000.0, "spacing": "even"}
    sdc = {"name": "sdc", "effect": "corrupt", "found_after": "9 d", "mtbf": 100.0}
    job = candidate(
        failure=[drain, {**sdc, "spacing": "even"}],
        groups=None,
        job={"step": 10.0},
        cluster={"gpus": 8, "gpus_per_node": 8},
        checkpoint={"save": 300.0, "interval": "7 d"},
        restart={"recover": 60.0},
    )
    assert simulate(job, 0, 6000.0).group_seconds["checkpoints"] == 300.0


def test_a_group_that_is_away_is_no_straggler(tmp_path: Path) -> None:
    """It dies at 100 s and is back at 300 s. What was found at 400 s was never there."""
    lines = [
        "time,fault,target,params",
        "100,kill_group,0,",
        "150,slow_rank,0,factor=3 seconds=250",
        "160,flip_parameter,0,",
    ]
    (tmp_path / "trace.csv").write_text("\n".join(lines))
    job = candidate(
        tmp_path,
        cluster={"gpus": 2, "gpus_per_node": 1},
        job={"step": 1.0, "groups": 2},
        failure=[{"name": "all", "trace": "trace.csv", "found_after": 200.0}],
        groups={"stall": 0.0, "away": 200.0},
    )
    account = simulate(job, 0, 1000.5)
    assert account.steps == 1000
    assert account.group_seconds["away"] == pytest.approx(201.0, abs=1.0)


def test_a_straggler_slows_only_the_rest_of_a_step() -> None:
    """Ten times as slow for 5 s of each 10 minutes: 4.5 s of work are lost, of steps of 20 s."""
    slow = {"name": "slow", "effect": "slow", "factor": 10.0, "found_after": 5.0, "leaves": False}
    job = candidate(failure=[{**slow, "mtbf": 600.0, "spacing": "memoryless"}])
    by_hand = 1 - 4.5 / 600
    simulated = fmean(simulate(job, seed, 10 * DAY).effective for seed in range(4))
    assert simulated == pytest.approx(by_hand, abs=1e-3)
    assert estimate(job) == pytest.approx(by_hand, abs=2e-3)


def test_two_stragglers_in_one_group_end_one_by_one(tmp_path: Path) -> None:
    """The factor is 4 from 100 to 200 s, and 2 until 400 s."""
    lines = [
        "time,fault,target,params",
        "100,slow_rank,0,factor=2 seconds=300",
        "100,slow_rank,0,factor=4 seconds=100",
    ]
    (tmp_path / "trace.csv").write_text("\n".join(lines))
    job = candidate(
        tmp_path,
        cluster={"gpus": 2, "gpus_per_node": 1},
        job={"step": 1.0, "groups": 2},
        failure=[{"name": "all", "trace": "trace.csv"}],
    )
    account = simulate(job, 0, 500.5)
    assert account.steps == 100 + 25 + 100 + 100


def test_a_step_that_a_death_loses_is_lost_and_its_stall_is_a_stall() -> None:
    job = candidate(
        cluster={"gpus": 2, "gpus_per_node": 1},
        job={"step": 10.0, "groups": 2},
        failure=[{"name": "even", "mtbf": 105.0, "spacing": "even"}],
        checkpoint={"save": 30.0, "interval": 110.0},
        groups={"stall": 60.0, "away": 20.0, "loses": True},
    )
    account = simulate(job, 0, 175.0)
    # Ten steps, one that is lost, its stall; no save is made of it. The other group lost 5 s.
    assert account.steps == 10
    assert account.group_seconds["stall"] == pytest.approx(60.0)
    assert account.group_seconds["checkpoints"] == 0.0
    assert account.group_seconds["lost"] == pytest.approx(5.0 + 10.0 + 2 * 5.0)


def test_another_failure_does_not_mend_wrong_numbers() -> None:
    """A job without other groups restarts from a checkpoint that has them, and goes back further
    when they are found. More failures never help.
    """
    sdc = {"name": "sdc", "effect": "corrupt", "found_after": "12 h", "mtbf": "2 d"}
    more = {"name": "more", "mtbf": "11 h", "spacing": "even"}
    common: dict[str, Any] = {
        "groups": None,
        "job": {"step": 10.0},
        "cluster": {"gpus": 8, "gpus_per_node": 8},
        "checkpoint": {"save": 0.0, "interval": 300.0},
        "restart": {"recover": 60.0},
    }
    alone, both = (
        simulate(candidate(failure=failures, **common), 0, 20 * DAY).effective
        for failures in ([{**sdc, "spacing": "even"}], [{**sdc, "spacing": "even"}, more])
    )
    assert alone == pytest.approx(0.75, abs=0.03)
    assert both < alone


@pytest.mark.parametrize("interval", [10.0, 300.0])
def test_a_job_goes_back_behind_any_number_of_saves(interval: float) -> None:
    sdc = {"name": "sdc", "effect": "corrupt", "found_after": "1 d", "mtbf": "5 d"}
    job = candidate(
        failure=[{**sdc, "spacing": "even"}],
        groups=None,
        job={"step": 10.0},
        cluster={"gpus": 8, "gpus_per_node": 8},
        checkpoint={"save": 0.0, "interval": interval},
        restart={"recover": 60.0},
    )
    assert simulate(job, 0, 30 * DAY).effective == pytest.approx(0.81, abs=0.03)
    # Step by step, each of 8,640 saves a day is one that it may go back to.
    one_by_one = simulate(job, 0, 7 * DAY, lambda time, groups: None)
    assert one_by_one.steps == pytest.approx(6 * 8640, rel=0.01)


def test_a_straggler_does_not_stretch_the_lateness_of_a_return(tmp_path: Path) -> None:
    """A group is back at 1,110 s, and makes that step 100 s late. A straggler slows the 10 s of
    computing alone.
    """
    lines = ["time,fault,target,params", "1001,kill_group,0,"]
    slow = "1112,slow_rank,1,factor=10 seconds=300"
    common: dict[str, Any] = {
        "cluster": {"gpus": 3, "gpus_per_node": 1},
        "job": {"step": 10.0, "groups": 3},
        "failure": [{"name": "all", "trace": "trace.csv"}],
        "groups": {"stall": 0.0, "away": 100.0, "rejoin": 100.0},
    }
    ends: list[float] = []
    (tmp_path / "trace.csv").write_text("\n".join([*lines, slow]))
    simulate(candidate(tmp_path, **common), 0, 2000.0, lambda time, groups: ends.append(time))
    late = max(after - before for before, after in pairwise(ends))
    assert late == pytest.approx(2 + 8 * 10 + 100)


def test_the_last_group_saves_before_it_leaves() -> None:
    """A drain each hour: 3,600 s of training, 300 s of a save, and 300 s until it is back."""
    drain = {"name": "drain", "effect": "drain", "mtbf": "1 h", "spacing": "even"}
    job = candidate(
        failure=[drain],
        groups=None,
        job={"step": 10.0},
        cluster={"gpus": 8, "gpus_per_node": 8},
        checkpoint={"save": 300.0, "interval": "7 d"},
        restart={"recover": 300.0},
    )
    account = simulate(job, 0, 10 * DAY)
    assert account.effective == pytest.approx(1 - 600 / 3600, abs=0.005)
    assert account.shares()["checkpoints"] == pytest.approx(300 / 3600, abs=0.005)
    assert estimate(job) == pytest.approx(account.effective, abs=0.02)


def test_a_refused_fault_is_patient_by_the_clock_of_training() -> None:
    """Stalls before it are no part of its wait."""
    changes: dict[str, Any] = {
        "cluster": {"gpus": 4, "gpus_per_node": 1},
        "job": {"step": 1.0, "groups": 4},
        "failure": [
            {"name": "kill", "chaos": "every_60s"},
            {"name": "more", "mtbf": 120.0, "spacing": "memoryless"},
        ],
        "groups": {"stall": 5.0, "away": 28.0},
    }
    wall, training = (
        simulate(candidate(clock=clock, **changes), 0, 36_000.0) for clock in ("wall", "training")
    )
    assert training.skipped < 3 * wall.skipped + 10


def test_the_same_seed_is_the_same_run_in_every_process() -> None:
    text = (
        "from tests.forecast.scenarios import candidate\n"
        "from titan_ft.forecast.simulation import simulate\n"
        "print(simulate(candidate(), 7, 200_000.0))\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", text], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert printed == {f"{simulate(candidate(), 7, 200_000.0)}\n"}
    assert simulate(candidate(), 8, 200_000.0) != simulate(candidate(), 7, 200_000.0)


def test_the_clock_of_failures_is_a_field() -> None:
    """The same numbers: 44 % with even spacing, 57 % without memory, 64 % if failures wait while
    the job recovers.
    """
    cases = {
        ("even", "wall"): 1 - 10 / 18,
        ("memoryless", "wall"): math.exp(-10 / 18),
        ("memoryless", "training"): 18 / 28,
    }
    for (spacing, clock), share in cases.items():
        job = candidate(
            clock=clock,
            failure=[{"name": "any", "mtbf": "18 min", "spacing": spacing}],
            groups=None,
            job={"step": 1.0},
            checkpoint={"save": 0.0, "interval": 1.0},
            restart={"recover": "10 min"},
        )
        simulated = fmean(simulate(job, seed, 40 * DAY).effective for seed in range(3))
        assert simulated == pytest.approx(share, abs=0.012), (spacing, clock)


def test_a_run_as_events_has_the_same_effective_training_time() -> None:
    """By the definition of the report, over the time from the first step to the last."""
    job = candidate(
        cluster={"gpus": 32, "gpus_per_node": 8},
        job={"step": 1.0, "groups": 4},
        failure=[{**MEMORYLESS, "mtbf": 40.0}],
        groups={"stall": 3.0, "away": 15.5, "rejoin": 0.75},
    )
    steps: list[tuple[float, frozenset[int]]] = []
    account = simulate(job, 2, 2000.0, lambda time, groups: steps.append((time, groups)))
    events = [say(0.0, "launch_started", replicas=4)]
    for number, (time, groups) in enumerate(steps, 1):
        events += [commit(time, number, group, participants=sorted(groups)) for group in groups]
    events.append(say(2000.0, "launch_finished", code=0))
    figures = measure_goodput(RunRecord(events))
    assert account.effective < 0.9
    assert figures.effective_training_time == pytest.approx(account.effective, abs=1e-6)


def test_a_failure_costs_its_stall_and_its_group() -> None:
    """Two failures, at 123 and 246 s, by hand: steps of 10 s, a stall of 4 s each, a group away for
    25 s each.
    """
    job = candidate(
        cluster={"gpus": 4, "gpus_per_node": 1},
        job={"step": 10.0, "groups": 4},
        failure=[{"name": "any", "mtbf": 123.0, "spacing": "even"}],
        groups={"stall": 4.0, "away": 25.0},
    )
    account = simulate(job, 0, 300.0)
    # 12 steps, 3 of which the first has the stall, 8 steps to the second failure, 3 steps again,
    # one at the end.
    assert (account.steps, account.contributions) == (29, 29 * 4 - 6)
    assert account.votes == 29 + 2 + 1, "one more for each failure, and the step that the end cuts"
    assert account.group_seconds["stall"] == pytest.approx(2 * 3 * 4)
    # A group that is ready waits for the next step: it joins at 154 and at 278 s.
    assert account.group_seconds["away"] == pytest.approx((154 - 123) + (278 - 246))
    assert account.group_seconds["lost"] == pytest.approx(
        (123 - 120) + (246 - 244) + 4 * (300 - 298)
    )


def test_nobody_left_goes_back_to_the_checkpoint() -> None:
    """All fail at 10,000 s, a moment before the save there: back to 9,000 s, and 100 s later 24
    steps to the end.
    """
    job = candidate(
        failure=[{"name": "software", "scope": "job", "mtbf": 10_000.0, "spacing": "even"}],
        checkpoint={"save": 0.0, "interval": 1000.0},
        groups={"stall": 4.0, "away": 100.0},
    )
    account = simulate(job, 0, 10_600.0)
    assert (account.restarts, account.steps) == (1, 450 + 24)
    assert account.group_seconds["away"] == pytest.approx(12 * 100)
    assert account.group_seconds["lost"] == pytest.approx(12 * (1000 + 20))


def test_the_last_group_that_is_ready_takes_the_state_with_it(tmp_path: Path) -> None:
    """All three must be there. Group 0 is back and waits for the others when they have died, and
    dies too: back to the checkpoint of 60 s.
    """
    lines = ["time,fault,target", "100.5,kill_group,0", "105,kill_group,1", "151,kill_group,2"]
    job = {"step": 1.0, "groups": 3, "min_replica_size": 3}
    common: dict[str, Any] = {
        "cluster": {"gpus": 3, "gpus_per_node": 1},
        "job": job,
        "failure": [{"name": "kills", "trace": "kills.csv"}],
        "checkpoint": {"save": 0.0, "interval": 60.0},
        "groups": {"stall": 0.0, "away": 50.0},
    }
    (tmp_path / "kills.csv").write_text("\n".join(lines))
    lives = simulate(candidate(tmp_path, **common), 0, 300.5)
    (tmp_path / "kills.csv").write_text("\n".join([*lines, "152,kill_group,0"]))
    dies = simulate(candidate(tmp_path, **common), 0, 300.5)
    assert (lives.restarts, dies.restarts) == (0, 1)
    # Both go on when the last group is back, at 201 and at 202 s.
    assert (lives.steps, dies.steps) == (100 + 99, 60 + 98)


@pytest.mark.parametrize(("time", "stall"), [(5.0, 0.0), (11.0, 5.0), (20.0, 0.0)])
def test_only_a_death_in_the_exchange_stalls_a_round(
    tmp_path: Path, time: float, stall: float
) -> None:
    """A round trains for 10 s, exchanges for 3 s, and then saves for 20 s."""
    (tmp_path / "kills.csv").write_text(f"time,fault,target\n{time},kill_group,0\n")
    found = candidate(
        tmp_path,
        cluster={"gpus": 2, "gpus_per_node": 1},
        job={"step": 1.0, "groups": 2},
        failure=[{"name": "kills", "trace": "kills.csv"}],
        checkpoint={"save": 20.0, "interval": 30.0},
        groups={"stall": 5.0, "away": 1000.0},
        rounds={"steps": 10, "exchange": 3.0},
    )
    of_round = {"strategy": "rounds", "step": 10.0, "usual_step": 10.0, "exchange": 3.0}
    rounds = Candidate(**{**vars(found), **of_round, "save_every": 1})
    account = simulate(rounds, 0, 100.0)
    assert account.group_seconds["stall"] == pytest.approx(stall)


def test_a_chaos_plan_keeps_its_limits() -> None:
    """One group may be down at once, and a fault that has waited for too long is skipped, as by the
    chaos runner.
    """
    job = candidate(
        cluster={"gpus": 4, "gpus_per_node": 1},
        job={"step": 1.0, "groups": 4},
        failure=[{"name": "kill", "chaos": "every_60s"}],
        groups={"stall": 0.5, "away": 100.0},
    )
    account = simulate(job, 0, 600.0)
    # Due at 60 s and each 60 s; the one at 120 s waits until a group is back at 161 s, the one at
    # 180 s is skipped.
    assert account.failures + account.skipped == 9
    assert account.skipped > 2
    often = simulate(
        candidate(
            failure=[{"name": "kill", "chaos": "blog_60s"}], groups={"stall": 0, "away": 100}
        ),
        0,
        600.0,
    )
    assert (often.failures, often.skipped) == (9, 0)


def test_saves_are_as_often_as_all_groups_are_lost() -> None:
    """Each 10 days: by Daly's interval, two hours; not at all as often as single groups are
    lost.
    """
    software = {"name": "software", "scope": "job", "mtbf": "10 d", "spacing": "memoryless"}
    job = candidate(failure=[MEMORYLESS, software], checkpoint={"save": 30.0})
    assert job.save_every * job.step == pytest.approx(best_interval(10 * DAY, 30.0), abs=10.0)
    assert candidate(checkpoint={"save": 30.0}).save_every * 20.0 == pytest.approx(7 * DAY)


def test_wrong_numbers_send_a_job_alone_back_before_them() -> None:
    failure = {
        "name": "sdc",
        "effect": "corrupt",
        "found_after": 950.0,
        "mtbf": 5000.0,
        "spacing": "even",
    }
    common = {"groups": None, "job": {"step": 1.0}, "restart": {"recover": 100.0}, "days": 0.1}
    job = candidate(failure=[failure], checkpoint={"save": 0.0, "interval": 300.0}, **common)
    account = simulate(job, 0, 7000.0)
    assert account.restarts == 1
    # Found at 5,950 s; the checkpoint before 5,000 s is that of 4,800 s.
    assert account.group_seconds["lost"] == pytest.approx(5950 - 4800, abs=2.0)
