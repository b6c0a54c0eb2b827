# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Catch-up: a joiner fetches the state while the others train, replays the updates since, and
contributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import pytest
from harness.events import Event
from harness.job import Job
from harness.trajectory import check, check_killed, named

STEP = 4  # the step in which the first group is killed


def kill(replica: int, point: str, **more: Any) -> dict[str, Any]:
    return {"replica": replica, "point": point, **more}


def sleepy(groups: int, seconds: float) -> list[dict[str, Any]]:
    """Let every forward take some time, so that transfers do not outlast the job."""
    return [{"replica": replica, "attempt": "any", "seconds": seconds} for replica in range(groups)]


def of(events: Iterable[Event], replica: int, name: str) -> list[Event]:
    return [event for event in events if event["replica"] == replica and event["event"] == name]


def check_contributes_at_once(events: Sequence[Event], replica: int) -> Event:
    """The only heal of a group ended amid training, and the next step has the group's gradient."""
    (healed,) = of(events, replica, "heal_finished")
    after = [
        event for event in named(events, "step_committed") if event["step"] == healed["step"] + 1
    ]
    assert after, "the heal ended with the job"
    assert all(replica in event["participants"] for event in after)
    return healed


@pytest.mark.alone
def test_others_train_on_at_full_speed(make_job: Callable[..., Job]) -> None:
    """During a transfer of many steps the others neither wait nor slow down; the joiner replays
    those steps.
    """
    least, most, first = 6, 9, 6
    hooks = {
        "faults": [kill(1, "backward", step=first)],
        "hold": 2,
        "hold_fetching": most,
        "pauses": [{"replica": 1, "attempt": 1, "queued": least}],
        "delays": sleepy(2, 0.2),  # sleep does not depend on what else the machine does
        "pin": True,
    }
    # The tiny model's state of 5.5 MB takes 1.1 seconds, 5 steps of a quiet machine.
    flags = ["--fault_tolerance.transfer_max_mbps=40"]
    job = make_job(groups=2, steps=first + most + 8, hooks=hooks, flags=flags)
    job.run()
    events = check(job, survivors=[0])
    check_killed(job, events, [(1, 0, "sigkill:backward")])
    assert not named(events, "waiting", "catch_up_waiting", "heal_failed")
    healed = check_contributes_at_once(events, 1)
    assert healed["replayed"] >= least
    held = {event["step"]: event["held_seconds"] for event in of(events, 0, "computed")}
    seconds = {e["step"]: e["seconds"] - held[e["step"]] for e in of(events, 0, "step_committed")}
    before = [seconds[step] for step in range(3, first)]
    # The first step with the joiner has built the process group.
    during = [seconds[step] for step in range(healed["from_step"] + 2, healed["step"] + 1)]
    after = [seconds[step] for step in range(healed["step"] + 2, job.steps + 1)]
    assert max(during) < healed["seconds"] / 2  # no step was as long as the transfer
    # Compared with both sides, because what else runs on the machine changes with time.
    assert median(during) <= 1.1 * max(median(before), median(after)), (
        f"{before}, {during}, {after}"
    )


@pytest.mark.slow
def test_replay_in_bfloat16_with_clipping(make_job: Callable[..., Job]) -> None:
    """A replayed update of sharded bfloat16 parameters is rounded and clipped as the live one
    was.
    """
    ranks, max_norm, least = 2, 0.05, 4
    hooks = {
        "faults": [kill(1, "backward", step=STEP)],
        "hold": 2,
        "hold_fetching": 2 * least,
        "pauses": [
            {"replica": 1, "attempt": 1, "rank": rank, "queued": least} for rank in range(ranks)
        ],
    }
    flags = [
        "--training.dtype=bfloat16",
        "--training.mixed_precision_param=bfloat16",
        f"--training.max_norm={max_norm}",
    ]
    job = make_job(groups=2, ranks=ranks, steps=20, hooks=hooks, flags=flags)
    job.run()
    events = check(job, survivors=[0])
    assert min(event["grad_norm"] for event in named(events, "step_committed")) > 2 * max_norm
    healed = of(events, 1, "heal_finished")
    assert len(healed) == ranks
    assert min(event["replayed"] for event in healed) >= least


def test_others_wait_for_a_joiner_whose_queue_is_full(make_job: Callable[..., Job]) -> None:
    """When the joiner's queue of updates is full, the others keep their gradients until the state
    has arrived.
    """
    limit = 3  # updates of 1.8 MB, as the tiny model's
    hooks = {
        "faults": [kill(1, "backward", step=STEP)],
        "hold": 2,
        "hold_fetching": None,
        "pauses": [{"replica": 1, "attempt": 1, "after": ["awaits-0-0"]}],
    }
    flags = ["--fault_tolerance.catch_up_max_gb=0.006", "--fault_tolerance.transfer_max_mbps=50"]
    job = make_job(groups=2, hooks=hooks, flags=flags)
    job.run()
    events = check(job, survivors=[0])
    healed = check_contributes_at_once(events, 1)
    (full,) = named(events, "catch_up_waiting")
    assert (full["replica"], full["step"]) == (1, healed["from_step"] + limit)
    assert "all that fault_tolerance.catch_up_max_gb" in full["reason"]
    (waiting,) = of(events, 0, "waiting")
    assert (waiting["step"], waiting["reason"]) == (full["step"], "groups [1] fetch the state")
    # And the update that was held back; at least two are replayed while the others make one more.
    assert limit + 1 <= healed["replayed"] <= limit + 2


@pytest.mark.slow
def test_two_joiners_at_once(make_job: Callable[..., Job]) -> None:
    """Groups that come back together fetch from different donors, at the same time."""
    hooks = {
        "faults": [kill(replica, "backward", step=STEP) for replica in (1, 2)],
        "hold": 2,
        "hold_fetching": None,
        "delays": sleepy(4, 0.03),
        "pauses": [
            {"replica": 1, "attempt": 1, "after": ["fetched-2-1"]},
            {"replica": 2, "attempt": 1, "after": ["fetched-1-1"]},
        ],
    }
    job = make_job(
        groups=4, steps=40, hooks=hooks, flags=["--fault_tolerance.transfer_max_mbps=100"]
    )
    job.run()
    events = check(job, survivors=[0, 3])
    check_killed(job, events, [(replica, 0, "sigkill:backward") for replica in (1, 2)])
    assert {event["donor"] for event in named(events, "heal_started")} == {0, 3}
    assert [check_contributes_at_once(events, replica)["replayed"] > 0 for replica in (1, 2)] == [
        True,
        True,
    ]


@pytest.mark.slow
def test_all_donors_but_one_die_in_one_transfer(make_job: Callable[..., Job]) -> None:
    """The last donor sends the dead donors' parts too; the joiner needs one attempt."""
    faults = [kill(1, "backward", step=STEP), kill(0, "serve"), kill(2, "serve")]
    hooks = {"faults": faults, "hold": 6, "hold_fetching": None, "delays": sleepy(4, 0.02)}
    job = make_job(
        groups=4, steps=50, hooks=hooks, flags=["--fault_tolerance.transfer_max_mbps=30"]
    )
    job.run()
    events = check(job, survivors=[3])
    check_killed(
        job, events, [(1, 0, "sigkill:backward"), (0, 0, "sigkill:serve"), (2, 0, "sigkill:serve")]
    )
    (started,) = of(events, 1, "heal_started")
    assert sorted(started["donors"]) == [0, 2, 3]
    assert sorted(event["donor"] for event in of(events, 1, "donor_lost")) == [0, 2]
    assert of(events, 1, "heal_failed") == []
    for replica in (0, 1, 2):
        check_contributes_at_once(events, replica)


def test_transfer_survives_a_broken_connection(make_job: Callable[..., Job]) -> None:
    """The joiner reconnects after a connection broke in the middle of a piece; one heal is
    enough.
    """
    hooks = {
        "faults": [kill(1, "backward", step=STEP)],
        "hold": 2,
        "breaks": [{"replica": 0, "answer": 7}],
    }
    job = make_job(groups=2, hooks=hooks)
    job.run()
    events = check(job, survivors=[0])
    assert job.output(1, attempt=1).count(" broke, try 1 of 3: ") == 1
    assert not named(events, "heal_failed")
    assert len(of(events, 1, "heal_started")) == 1
    check_contributes_at_once(events, 1)
