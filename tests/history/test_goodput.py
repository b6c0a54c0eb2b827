# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What a run's time and work went into: the published figures by their definitions, and the stalls by their causes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest

from tests.event_builder import event as make
from titan_ft.history import goodput as goodputs
from titan_ft.history.goodput import Goodput
from titan_ft.history.incidents import Incident, find_incidents
from titan_ft.history.record import RunRecord
from titan_ft.run.events import Event


def goodput(events: list[Event]) -> Goodput:
    return goodputs.goodput(RunRecord(events))


def stalls(events: Iterable[Event]) -> list[Incident]:
    return [incident for incident in find_incidents(RunRecord(events)) if incident.failed]


def say(time: float, event: str, replica: int | None = None, **fields: Any) -> Any:
    """Return an event of a group's rank 0, or of the launcher."""
    context = {} if replica is None else {"replica": replica, "rank": 0, "attempt": 0}
    return make(event, time=1e9 + time, **context | fields)


def fault(time: float, name: str, replica: int | None = None, **fields: Any) -> Any:
    target = {"lighthouse": True} if replica is None else {"replica": replica}
    return say(time, "fault_injected", fault=name, target=target, seed=1, **fields)


def commit(time: float, step: int, replica: int, **fields: Any) -> Any:
    """Return a commit of two groups that computed two microbatches each."""
    usual = {
        "participants": [0, 1],
        "lineage": f"{step:012x}",
        "parent": f"{step - 1:012x}",
        "tokens": 1000,
        "seconds": 1.0,
        "compute_seconds": 0.7,
        "exchange_seconds": 0.2,
        "apply_seconds": 0.1,
        "exchanges": 1,
        "forward_passes": 2,
    }
    return say(time, "step_committed", replica, step=step, **(usual | fields))


def calm_run(steps: int = 10) -> list[Event]:
    """Return a run of two groups that start in 10 s and make a step a second."""
    events = [say(0.0, "launch_started", replicas=2)]
    for replica in (0, 1):
        events.append(say(9.0, "joined", replica, participants=[0, 1], quorum_seconds=0.0, rebuild_seconds=0.0))
        events += [commit(9.0 + step, step, replica) for step in range(1, steps + 1)]
        events.append(say(9.0 + steps, "training_finished", replica, step=steps))
    return [*events, say(9.0 + steps + 1.0, "launch_finished", code=0)]


def killed_run() -> list[Event]:
    """Return a run in which group 1 is killed at 12.5 s, after step 3, and contributes again to step 8 of 10.

    Step 4 comes 3 s after step 3, with a second exchange; the others each a second after the one before.
    """
    events = [say(0.0, "launch_started", replicas=2)]
    for replica in (0, 1):
        events.append(say(9.0, "joined", replica, participants=[0, 1], quorum_seconds=0.0, rebuild_seconds=0.0))
        events += [commit(9.0 + step, step, replica) for step in (1, 2, 3)]
    events += [
        fault(12.5, "kill_group", 1, shot=0),
        say(12.6, "worker_exited", 1, signal="SIGKILL", stopped=False),
        say(12.7, "replica_restarted", 1, attempt=1),
        say(13.0, "exchange_failed", 0, error="closed", seconds=0.3, step=3),
        commit(15.0, 4, 0, participants=[0], exchanges=2, seconds=3.0, exchange_seconds=2.2),
    ]
    events += [commit(11.0 + step, step, 0, participants=[0]) for step in (5, 6, 7)]
    events += [
        say(16.0, "heal_started", 1, donor=0, from_step=5, step=5, attempt=1),
        say(18.0, "heal_finished", 1, donor=0, from_step=5, step=7, bytes=9, seconds=2.0, replayed=2, attempt=1),
    ]
    for step in (8, 9, 10):
        events += [commit(11.0 + step, step, 0), commit(11.0 + step, step, 1, attempt=1)]
    return events


def check_sums(figures: Goodput) -> None:
    """Require that each group's microseconds add up to the wall time, and the job's to that of all groups."""
    for states in figures.groups_us.values():
        assert sum(states.values()) == figures.wall_us
    assert sum(figures.job_us.values()) == figures.wall_us * figures.num_groups == figures.group_us


def test_calm_run() -> None:
    """Without failures nothing is wasted, all that was attempted is committed, and only the start costs time."""
    figures = goodput(calm_run())
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
    """A kill costs its stall, its group's absence, one exchange and one step of the group that died."""
    figures = goodput(killed_run())
    check_sums(figures)
    assert (figures.exchanges_committed, figures.exchanges_attempted) == (10, 11)
    assert (figures.steps_committed, figures.steps_begun) == (16, 17)
    assert (figures.forward_passes, figures.wasted) == (34, {"unfinished: kill_group (SIGKILL)": 2})
    # Three steps of both groups, four of one, three of both; 21 s in all, 12 of them from the first step on.
    assert figures.effective_training_time == pytest.approx((3 + 4 * 0.5 + 3) / 21)
    assert figures.effective_training_time_in_training == pytest.approx((3 + 4 * 0.5 + 3) / 12)
    assert figures.mean_stall_seconds == pytest.approx(2.0)


def test_a_faster_step_does_not_make_up_for_a_stall() -> None:
    """No step counts for more than the usual one, nor for more than the time that it took."""
    events = calm_run()
    for event in events:
        if event.name == "step_committed" and event.step == 5:
            event.time += 0.4  # 1.4 s for this step, 0.6 s for the next
    assert goodput(events).effective_training_time == pytest.approx((9 + 0.6) / 20)


def test_every_broken_exchange_is_an_attempt() -> None:
    """An attempt is counted whether its step was committed later, by others only, or by nobody."""
    events = calm_run()
    events += [
        say(12.1, "exchange_failed", 0, error="x", seconds=0.1, step=3),
        say(12.2, "exchange_failed", 0, error="x", seconds=0.1, step=3),  # the commit of step 4 says 1: too few
        say(19.1, "exchange_failed", 1, error="x", seconds=0.1, step=10),  # of a step that nobody committed
    ]
    figures = goodput(events)
    assert (figures.exchanges_committed, figures.exchanges_attempted) == (10, 13)


def test_waiting_is_one_attempt() -> None:
    """The many empty rounds of groups that wait for others are one attempt that was not committed."""
    events = calm_run()
    for event in events:
        if event.name == "step_committed" and event.step == 5:
            event.exchanges = 500
    events.append(say(13.2, "waiting", 0, step=4, participants=[0], reason="1 group(s) have a gradient, 2 needed"))
    events.append(say(13.2, "waiting", 1, step=4, participants=[0], reason="1 group(s) have a gradient, 2 needed"))
    figures = goodput(events)
    assert (figures.exchanges_committed, figures.exchanges_attempted) == (10, 11)


LEFT_OUT = ("step_committed", 0, 4)


def test_void_and_left_out_work_is_wasted() -> None:
    """A step that only a minority made, and a gradient that was left out, are attempts and passes for nothing."""
    events = [event for event in calm_run() if (event.name, event.replica, getattr(event, "step", 0)) != LEFT_OUT]
    for event in events:
        if event.name == "step_committed" and event.step == 6:
            event.participants = [1]
    events.append(commit(13.0, 4, 0, lineage="f" * 12))
    events.append(say(13.05, "heal_started", 0, donor=1, from_step=4, step=4))
    events.append(say(13.1, "heal_finished", 0, donor=1, from_step=4, step=4, bytes=1, seconds=0.1, replayed=0))
    figures = goodput(events)
    check_sums(figures)
    assert (figures.exchanges_committed, figures.exchanges_attempted) == (10, 11)
    assert figures.wasted == {
        "the state was thrown away": 2,
        "the gradient was left out": 2,
        "unfinished: its state was not the job's": 1,
    }


def test_stall_of_a_kill() -> None:
    """A fault's stall is what its survivors waited beyond a usual step; its group is back with its contribution."""
    (stall,) = stalls(killed_run())
    assert (stall.fault, stall.injected, stall.replicas, stall.ended) == ("kill_group", True, (1,), True)
    assert stall.stall_seconds == pytest.approx(2.0)
    assert stall.rejoin_seconds == pytest.approx(19.0 - 12.5)
    assert stall.heal is not None
    assert (stall.heal.donor, stall.heal.replayed) == (0, 2)


def test_death_without_a_fault() -> None:
    """A group that dies by itself is a failure too, named by what ended it."""
    (stall,) = stalls(event for event in killed_run() if event.name != "fault_injected")
    assert (stall.fault, stall.injected, stall.replicas) == ("SIGKILL", False, (1,))
    assert stall.stall_seconds == pytest.approx(2.0)


def test_stall_counts_once() -> None:
    """Of two faults the one before the stall began has it; one that comes while it lasts has none of its own."""
    events = killed_run()
    events += [fault(10.5, "slow_rank", 1, shot=7), fault(14.5, "kill_lighthouse", shot=8)]
    found = {stall.fault: stall.stall_seconds for stall in stalls(events)}
    assert found == {"slow_rank": 0.0, "kill_group": pytest.approx(2.0), "kill_lighthouse": 0.0}


def test_fault_that_comes_while_a_step_is_late() -> None:
    """A stall that no fault precedes belongs to the first that came while it lasted."""
    events = [event for event in killed_run() if event.name != "fault_injected"]
    events = [event for event in events if event.name not in ("worker_exited", "replica_restarted")]
    events.append(fault(13.5, "kill_lighthouse", shot=1))
    (stall,) = stalls(events)
    assert stall.stall_seconds == pytest.approx(2.0)
    assert stall.replicas == ()


def test_one_shot_that_hits_several_groups_is_one_failure() -> None:
    """Two groups killed by one shot are one failure, over when both are back."""
    events = [*killed_run(), fault(12.52, "kill_group", 2, shot=0)]
    (stall,) = stalls(events)
    assert stall.replicas == (1, 2)
    assert stall.rejoin_seconds is None


def test_no_survivor_no_stall() -> None:
    """Where no other group committed before and after a fault its stall is unknown, not zero."""
    events = [event for event in killed_run() if event.replica != 0]
    (stall,) = stalls(events)
    assert stall.stall_seconds is None
    assert goodput(events).mean_stall_seconds is None


def test_group_that_is_stopped_and_goes_on() -> None:
    """A group under SIGSTOP contributes again without a new attempt; the others stall meanwhile."""
    events = [*calm_run(3), fault(12.5, "stop_group", 1, shot=0, params={"seconds": 4})]
    events += [commit(17.0, 4, replica, seconds=5.0) for replica in (0, 1)]
    (stall,) = stalls(events)
    assert not stall.ended
    assert stall.stall_seconds == pytest.approx(4.0)
    assert stall.rejoin_seconds == pytest.approx(4.5)


def test_figures_are_json() -> None:
    """The figures are plain JSON."""
    data = json.loads(json.dumps(goodput(killed_run()).to_dict()))
    assert sum(data["shares"].values()) == pytest.approx(1.0, abs=1e-4)
    json.dumps([stall.to_dict() for stall in stalls(killed_run())])


def test_nothing_known() -> None:
    """Without events, or without a commit, no figure is made up."""
    assert goodput([]) == Goodput()
    figures = goodput([say(0.0, "launch_started", replicas=2), say(5.0, "worker_started", 0)])
    check_sums(figures)
    assert figures.effective_training_time is None
    assert figures.exchanges_attempted == 0


@pytest.mark.parametrize("seed", range(60))
def test_thinned_histories_add_up(seed: int) -> None:
    """Histories of which lines are missing, or fields are zero, add up, and never commit more than they attempt."""
    dice = random.Random(seed)
    events = [event for event in killed_run() if dice.random() < 0.8]
    for event in events:
        zero = make(event.name)
        for name in event.__struct_fields__:
            if name != "time" and dice.random() < 0.1:
                setattr(event, name, getattr(zero, name))
    figures = goodput(events)
    check_sums(figures)
    assert figures.exchanges_committed <= figures.exchanges_attempted
    assert figures.steps_committed <= figures.steps_begun
    assert figures.num_wasted <= figures.forward_passes
    assert 0.0 <= (figures.effective_training_time or 0.0) <= 1.0
    for stall in stalls(events):
        assert stall.stall_seconds is None or stall.stall_seconds >= 0.0
