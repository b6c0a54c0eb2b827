# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The inputs from a run's record: each cost by its own steps, with its number, and what was cut
off.
"""

from __future__ import annotations

from statistics import fmean

import msgspec
import pytest

from tests.forecast.scenarios import candidate
from tests.history.histories import calm_run, commit, fault, killed_run, say
from titan_ft.config import ConfigError
from titan_ft.forecast.candidate import Candidate, make_candidates
from titan_ft.forecast.choice import run_seeds
from titan_ft.forecast.closed_forms import estimate
from titan_ft.forecast.failures import draw_failures
from titan_ft.forecast.from_run import scenarios_like
from titan_ft.forecast.lengths import LogNormal
from titan_ft.forecast.measured import Measured, measure, resample
from titan_ft.forecast.simulation import simulate
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.timing.goodput import effective_training_time
from titan_ft.history.timing.incidents import find_failures
from titan_ft.run.events import Event

STALL = {"median": 1.8, "p99": 6.0}


def measured_of(events: list[Event], until: float | None = None) -> Measured:
    found = measure([RunRecord(events)], until)
    assert found is not None
    return found


def test_a_run_with_one_kill() -> None:
    """Steps of 1 s; the one with the death is 2 s late; group 1 is away from 12.5 s until it joins
    step 8 at 18 s.
    """
    found = measured_of(killed_run())
    assert found.step == pytest.approx(1.0)
    assert found.num_steps == 4, "steps 2, 3, 9 and 10"
    assert found.stall is not None
    assert found.stall.values == [pytest.approx(2.0)]
    assert found.away is not None
    assert found.away.values == [pytest.approx(19.0 - 12.5 - 1.5)], (
        "to half a step before the begin of the step it joined"
    )
    assert found.rejoin is not None
    assert found.rejoin.values == [pytest.approx(0.0)]
    assert (found.drag, found.num_drag_steps) == (pytest.approx(0.0), 3)
    assert found.failures_by_cause == {"SIGKILL": 1}
    rows = {name: basis for name, _, basis in found.observations()}
    assert rows["away until it could join"] == "1 observations"


def test_a_group_that_never_came_back_is_cut_off() -> None:
    events = [
        event for event in killed_run() if not (event.name == "step_committed" and event.step > 7)
    ]
    found = measured_of(events)
    assert found.away is None, "one that was never seen to its end is no length"
    both = measure([RunRecord(events), RunRecord(killed_run())])
    assert both is not None
    assert both.away is not None
    assert (both.away.number, both.away.censored) == (1, 1)


def test_records_with_other_steps_are_not_mixed() -> None:
    """The same kill in a run whose steps take ten times as long is as late, relative to these."""
    slow = [
        msgspec.structs.replace(event, time=1e9 + 10 * (event.time - 1e9)) for event in killed_run()
    ]
    found = measure([RunRecord(killed_run()), RunRecord(slow)])
    assert found is not None
    assert found.stall is not None
    assert found.stall.values == [pytest.approx(2.0), pytest.approx(20.0)]
    assert found.drag == pytest.approx(0.0, abs=1e-6)


def test_a_stall_without_an_end_is_cut_off() -> None:
    """Both groups die at 14 s, and no step follows until the record ends at 60 s."""
    events = [event for event in killed_run() if event.time < 1e9 + 13]
    events += [commit(13.0, 4, 0, participants=[0]), fault(14.0, "kill_group", 0, shot=1)]
    events += [
        say(14.1, "worker_exited", 0, signal="SIGKILL", stopped=False),
        say(60.0, "launch_finished", code=1),
    ]
    found = measured_of(events)
    assert found.stall is not None
    assert (found.stall.number, found.stall.censored) == (1, 1)
    assert found.stall.mean > 20
    assert found.failures_by_cause == {"SIGKILL": 2}


def test_without_failures_costs_are_unknown() -> None:
    found = measured_of(calm_run())
    assert (found.stall, found.away, found.mtbf) == (None, None, None)
    with pytest.raises(
        ConfigError, match=r"^groups\.stall must be set, got nothing; give it, or a run that has it"
    ):
        candidate(groups={"away": 10.0})
    with pytest.raises(
        ConfigError,
        match=r"^--like must be a run with a failure from which a group came back, got none",
    ):
        scenarios_like(found, 1)
    assert measure([RunRecord([say(0.0, "launch_started", replicas=2)])]) is None


def test_a_return_after_the_next_death_is_no_return() -> None:
    """The group dies at 11 s and, before it contributed again, at 40 s; it is back at 60 s."""
    events = [say(0.0, "launch_started", replicas=2)]
    deaths = {11.0: 0, 40.0: 1}
    for time, attempt in deaths.items():
        events.append(fault(time, "kill_group", 1, shot=attempt))
        events.append(
            say(time, "worker_exited", 1, signal="SIGKILL", stopped=False, attempt=attempt)
        )
    for number in range(1, 81):
        there = [0] if 11 < number < 60 else [0, 1]
        for group in there:
            attempt = 2 if group == 1 and number >= 60 else 0
            events.append(commit(float(number), number, group, participants=there, attempt=attempt))
    found = measured_of(sorted(events, key=lambda event: event.time))
    assert found.away is not None
    assert (found.away.number, found.away.censored) == (1, 1)
    assert found.away.values == [pytest.approx(60.0 - 1.5 - 40.0), pytest.approx(29.0)]


def test_steps_that_vary_count_as_in_the_report() -> None:
    """Without a failure: of each step no more than the median counts, so 1.0 of 1.2 s on
    average.
    """
    events: list[Event] = [say(0.0, "launch_started", replicas=2)]
    time = 0.0
    for number in range(1, 301):
        time += 1.6 if number % 3 == 0 else 1.0
        events += [commit(time, number, group, participants=[0, 1]) for group in (0, 1)]
    _, in_training = effective_training_time(RunRecord(events))
    found = measured_of(events)
    assert in_training is not None
    assert found.step == pytest.approx(1.2, abs=0.01)
    assert found.usual_step / found.step == pytest.approx(in_training, abs=0.01)
    job = candidate(
        failure=[{"name": "any", "mtbf": 1e9, "spacing": "memoryless"}],
        job={"step": found.step, "usual_step": found.usual_step, "groups": 2},
        cluster={"gpus": 2, "gpus_per_node": 1},
    )
    assert simulate(job, 0, 1000.0).effective == pytest.approx(in_training, abs=0.01)
    assert estimate(job) == pytest.approx(in_training, abs=0.01)


def test_a_group_that_hung_first_is_not_away_for_longer() -> None:
    """It contributed last at 11 s, the fault was noticed at 12.5 s; it is back at 19 s."""
    record = RunRecord(killed_run())
    (failure,) = find_failures(record)
    assert failure.back is not None
    assert failure.back - failure.time == pytest.approx(19.0 - 12.5)


def test_a_group_that_returns_in_the_first_steps_is_no_cut_observation() -> None:
    events = [say(0.0, "launch_started", replicas=2)]
    events += [commit(10.0, 1, group, participants=[0, 1]) for group in (0, 1)]
    events.append(fault(11.0, "kill_group", 1))
    events.append(say(11.0, "worker_exited", 1, signal="SIGKILL", stopped=False))
    for number in range(2, 30):
        for group in (0, 1):
            attempt = {"attempt": group}
            events.append(commit(10.0 * number, number, group, participants=[0, 1], **attempt))
    found = measured_of(events)
    assert found.away is not None
    assert (found.away.number, found.away.censored) == (1, 0)
    assert found.away.mean < 20.0


def test_a_run_with_checkpoints_is_forecast_with_them() -> None:
    """A checkpoint after each 8 steps of 1 s makes the next step 0.5 s late: no step of the record
    counts the save a second time.
    """
    events = [say(0.0, "launch_started", replicas=2)]
    time = 0.0
    for number in range(1, 65):
        time += 1.5 if number % 8 == 1 and number > 1 else 1.0
        there = [0] if 33 <= number < 37 else [0, 1]
        for group in there:
            attempt = int(group == 1 and number >= 37)
            events.append(commit(time, number, group, participants=there, attempt=attempt))
        if number % 8 == 0:
            events.append(say(time + 0.5, "checkpoint_saved", 0, step=number, seconds=0.7))
        if number == 32:
            events.append(fault(time + 0.2, "kill_group", 1))
            events.append(say(time + 0.2, "worker_exited", 1, signal="SIGKILL", stopped=False))
    found = measured_of(events)
    assert found.step == pytest.approx(1.0)
    assert (found.save, found.save_interval) == (pytest.approx(0.5), pytest.approx(8.0))
    for scenario in scenarios_like(found, 1):
        assert scenario.checkpoint is not None
        assert (scenario.checkpoint.save, scenario.checkpoint.interval) == (
            found.save,
            found.save_interval,
        )
        assert scenario.job.usual_step == found.usual_step


def job_of_tests() -> Candidate:
    return candidate(
        cluster={"gpus": 4, "gpus_per_node": 1},
        job={"step": 1.0, "groups": 4},
        failure=[{"name": "kill", "mtbf": 50.0, "spacing": "memoryless"}],
        groups={"stall": STALL, "away": 12.0, "rejoin": 0.5, "drag": 0.25},
    )


def events_of(seed: int, seconds: float) -> list[Event]:
    """Return a simulated run of four groups as events: kills, commits, returns."""
    job = job_of_tests()
    steps: list[tuple[float, frozenset[int]]] = []
    simulate(job, seed, seconds, lambda time, groups: steps.append((time, groups)))
    failures = list(draw_failures(job.scenario, seed))
    events = [say(0.0, "launch_started", replicas=4)]
    before, attempts = frozenset(range(4)), dict.fromkeys(range(4), 0)
    for number, (time, groups) in enumerate(steps, 1):
        for group in sorted(before - groups):
            at = max(each.time for each in failures if each.node == group and each.time <= time)
            of_attempt = {"attempt": attempts[group]}
            events.append(fault(at, "kill_group", group, shot=number))
            events.append(
                say(at, "worker_exited", group, signal="SIGKILL", stopped=False, **of_attempt)
            )
            attempts[group] += 1
        events += [
            commit(time, number, group, participants=sorted(groups), attempt=attempts[group])
            for group in sorted(groups)
        ]
        before = groups
    return events


def test_what_a_simulated_run_is_made_of_is_measured_again() -> None:
    """The costs that were put in come out of its events, and the second half follows from the
    first.
    """
    events = events_of(3, 8000.0)
    found = measured_of(events)
    assert found.step == pytest.approx(1.0, rel=0.01)
    assert found.drag == pytest.approx(0.25, rel=0.1)
    assert found.stall is not None
    assert found.stall.mean == pytest.approx(LogNormal(**STALL).mean, rel=0.15)
    assert found.away is not None
    assert found.away.mean == pytest.approx(12.0, rel=0.1)
    assert found.rejoin is not None
    assert found.rejoin.mean == pytest.approx(0.5, abs=0.15)
    half = measured_of(events, until=1e9 + 4000.0)
    steps = [
        event
        for event in RunRecord(events).first_commit_of_step.values()
        if event.time > 1e9 + 4000.0
    ]
    (job,) = make_candidates(scenarios_like(half, 1)[2], half)  # as often as in the first half
    runs = run_seeds([job], half, 20, 4000.0)[0]
    assert fmean(run.steps for run in runs) == pytest.approx(len(steps), rel=0.1)


def test_beyond_the_pressure_of_the_record_it_says_so() -> None:
    found = measured_of(events_of(3, 2000.0))
    rarest, *_, same, _, often = [
        make_candidates(case, found)[0] for case in scenarios_like(found, 1)[:5]
    ][::-1]
    assert often.pressure_ratio > 3
    assert (same.pressure_ratio, rarest.pressure_ratio) == (0, 0)


def test_another_record_would_show_other_costs() -> None:
    found = measured_of(events_of(3, 1000.0))
    again = [resample(found, seed) for seed in range(20)]
    assert len({each.stall.mean for each in again if each.stall is not None}) > 5
    assert all(each.step in found.stretch_means for each in again)
