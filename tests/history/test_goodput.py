# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The use of a run's time and work: published figures by their definitions, and stalls by their
causes.
"""

from __future__ import annotations

import json
import random

import pytest

from tests.event_builder import event as make
from tests.history.histories import calm_run, commit, killed_run, say
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.timing import goodput as goodputs
from titan_ft.history.timing.goodput import Goodput
from titan_ft.history.timing.incidents import find_incidents
from titan_ft.run.events import Event


def measure_goodput(events: list[Event]) -> Goodput:
    return goodputs.measure_goodput(RunRecord(events))


def check_sums(figures: Goodput) -> None:
    """Require that each group's microseconds sum to the wall time, and the job's to that of all
    groups.
    """
    for states in figures.groups_us.values():
        assert sum(states.values()) == figures.wall_us
    assert sum(figures.job_us.values()) == figures.wall_us * figures.num_groups == figures.group_us


def test_calm_run() -> None:
    """Without failures nothing is wasted, every attempt is committed, and only the start costs
    time.
    """
    figures = measure_goodput(calm_run())
    check_sums(figures)
    assert (figures.exchanges_committed, figures.exchanges_attempted) == (10, 10)
    assert (figures.steps_committed, figures.steps_begun) == (20, 20)
    assert (figures.forward_passes, figures.wasted) == (40, {})
    assert figures.effective_training_time == pytest.approx(10 / 20)
    assert figures.effective_training_time_in_training == pytest.approx(1.0)
    assert figures.steps_per_hour == pytest.approx(10 * 3600 / 20)
    assert figures.tokens_per_second == pytest.approx(10 * 1000 / 20)
    assert (figures.num_failures, figures.mean_stall_seconds) == (0, None)


def test_killed_run() -> None:
    """A kill costs its stall, its group's absence, one exchange, and one step of the dead group."""
    figures = measure_goodput(killed_run())
    check_sums(figures)
    assert (figures.exchanges_committed, figures.exchanges_attempted) == (10, 11)
    assert (figures.steps_committed, figures.steps_begun) == (16, 17)
    assert (figures.forward_passes, figures.wasted) == (34, {"unfinished: kill_group (SIGKILL)": 2})
    # Three steps of both groups, four of one, three of both; 21 s in all, 12 of them from the first
    # step on.
    assert figures.effective_training_time == pytest.approx((3 + 4 * 0.5 + 3) / 21)
    assert figures.effective_training_time_in_training == pytest.approx((3 + 4 * 0.5 + 3) / 12)
    assert figures.mean_stall_seconds == pytest.approx(2.0)


def test_a_faster_step_does_not_make_up_for_a_stall() -> None:
    """No step counts for more than the usual one, nor for more than its own time."""
    events = calm_run()
    for event in events:
        if event.name == "step_committed" and event.step == 5:
            event.time += 0.4  # 1.4 s for this step, 0.6 s for the next
    assert measure_goodput(events).effective_training_time == pytest.approx((9 + 0.6) / 20)


def test_every_broken_exchange_is_an_attempt() -> None:
    """An attempt counts whether its step was committed later, by others only, or by nobody."""
    events = calm_run()
    events += [
        say(12.1, "exchange_failed", 0, error="x", seconds=0.1, step=3),
        say(
            12.2, "exchange_failed", 0, error="x", seconds=0.1, step=3
        ),  # the commit of step 4 says 1: too few
        say(
            19.1, "exchange_failed", 1, error="x", seconds=0.1, step=10
        ),  # of a step that nobody committed
    ]
    figures = measure_goodput(events)
    assert (figures.exchanges_committed, figures.exchanges_attempted) == (10, 13)


def test_waiting_is_one_attempt() -> None:
    """The many empty exchanges of waiting groups are one uncommitted attempt."""
    events = calm_run()
    for event in events:
        if event.name == "step_committed" and event.step == 5:
            event.exchanges = 500
    events.append(
        say(
            13.2,
            "waiting",
            0,
            step=4,
            participants=[0],
            reason="1 group(s) have a gradient, 2 needed",
        )
    )
    events.append(
        say(
            13.2,
            "waiting",
            1,
            step=4,
            participants=[0],
            reason="1 group(s) have a gradient, 2 needed",
        )
    )
    figures = measure_goodput(events)
    assert (figures.exchanges_committed, figures.exchanges_attempted) == (10, 11)


LEFT_OUT = ("step_committed", 0, 4)


def test_void_and_left_out_work_is_wasted() -> None:
    """A minority's step and an excluded gradient are wasted attempts and passes."""
    events = [
        event
        for event in calm_run()
        if (event.name, event.replica, getattr(event, "step", 0)) != LEFT_OUT
    ]
    for event in events:
        if event.name == "step_committed" and event.step == 6:
            event.participants = [1]
    events.append(commit(13.0, 4, 0, lineage="f" * 12))
    events.append(say(13.05, "heal_started", 0, donor=1, from_step=4, step=4))
    events.append(
        say(
            13.1, "heal_finished", 0, donor=1, from_step=4, step=4, bytes=1, seconds=0.1, replayed=0
        )
    )
    figures = measure_goodput(events)
    check_sums(figures)
    assert (figures.exchanges_committed, figures.exchanges_attempted) == (10, 11)
    assert figures.wasted == {
        "the state was thrown away": 2,
        "the gradient was left out": 2,
        "unfinished: its state was not the job's": 1,
    }


def test_figures_are_json() -> None:
    """The figures are plain JSON."""
    data = json.loads(json.dumps(measure_goodput(killed_run()).to_dict()))
    assert sum(data["shares"].values()) == pytest.approx(1.0, abs=1e-4)


def test_nothing_known() -> None:
    """Without events, or without a commit, no figure is made up."""
    assert measure_goodput([]) == Goodput()
    figures = measure_goodput(
        [say(0.0, "launch_started", replicas=2), say(5.0, "worker_started", 0)]
    )
    check_sums(figures)
    assert figures.effective_training_time is None
    assert figures.exchanges_attempted == 0


@pytest.mark.parametrize("seed", range(60))
def test_thinned_histories_add_up(seed: int) -> None:
    """Histories with missing lines or zero fields sum up, and never commit more than they
    attempt.
    """
    dice = random.Random(seed)
    events = [event for event in killed_run() if dice.random() < 0.8]
    for event in events:
        zero = make(event.name)
        for name in event.__struct_fields__:
            if name != "time" and dice.random() < 0.1:
                setattr(event, name, getattr(zero, name))
    figures = measure_goodput(events)
    check_sums(figures)
    assert figures.exchanges_committed <= figures.exchanges_attempted
    assert figures.steps_committed <= figures.steps_begun
    assert figures.num_wasted <= figures.forward_passes
    assert 0.0 <= (figures.effective_training_time or 0.0) <= 1.0
    for incident in find_incidents(RunRecord(events)):
        assert incident.stall_seconds is None or incident.stall_seconds >= 0.0
