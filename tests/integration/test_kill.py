# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""SIGKILL at each point of a step: the others repeat one exchange, the group returns, and all bytes
are equal.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from harness.job import Job
from harness.trajectory import check, check_killed, named

STEP = 4  # the step in which the first group is killed
AFTER_THE_UPDATE_IS_SHARED = ("vote_before", "vote_after", "commit", "optimizer")
POINTS = (
    "forward",
    "backward",  # some buckets were handed over
    "exchange_first",  # one bucket's all-reduce was launched, others not
    "exchange_last",  # all were launched
    *AFTER_THE_UPDATE_IS_SHARED,
)


def kill(replica: int, point: str, step: int = STEP, **more: Any) -> dict[str, Any]:
    return {"replica": replica, "point": point, "step": step, **more}


def participants_of(events: list[dict[str, Any]], step: int) -> list[int]:
    found: list[int] = next(
        e["participants"] for e in named(events, "step_committed") if e["step"] == step
    )
    return found


@pytest.mark.parametrize(
    ("groups", "point"),
    [
        *itertools.product([2], ["exchange_first", "vote_before"]),
        *(
            pytest.param(groups, point, marks=pytest.mark.slow)
            for groups, point in [
                (2, "forward"),
                (2, "backward"),
                (2, "exchange_last"),
                (2, "vote_after"),
                (2, "commit"),
                (2, "optimizer"),
                (3, "backward"),
                (3, "vote_before"),
            ]
        ),
    ],
)
def test_kill_at_point(make_job: Callable[..., Job], groups: int, point: str) -> None:
    """The survivors commit the current step at once, with the dead group's shared part, and the
    group heals.
    """
    job = make_job(groups=groups, hooks={"faults": [kill(1, point)], "hold": 2})
    job.run()
    survivors = [replica for replica in range(groups) if replica != 1]
    events = check(job, survivors=survivors)
    check_killed(job, events, [(1, 0, f"sigkill:{point}")])

    everybody = list(range(groups))
    shared = point in AFTER_THE_UPDATE_IS_SHARED
    if point == "exchange_last":  # all that the survivors need may have been sent, or not
        shared = participants_of(events, STEP) == everybody
    assert participants_of(events, STEP) == (everybody if shared else survivors)
    assert participants_of(events, STEP + 1) == survivors
    assert participants_of(events, job.steps) == list(range(groups))
    exchanges = [
        e["exchanges"] for e in named(events, "step_committed") if e["replica"] in survivors
    ]
    # Where it dies before its question for the quorum is there, the others have one without it, and
    # nothing breaks.
    asked = point not in ("forward", "backward") or bool(named(events, "exchange_failed"))
    assert max(exchanges) == 2 or shared or not asked
    # One for the death; one may meet the return.
    assert sum(exchanges) <= len(exchanges) + 2 * len(survivors)
    healed = named(events, "heal_finished")
    assert [(e["replica"], e["attempt"]) for e in healed] == [(1, 1)]
    assert STEP < healed[0]["step"] < job.steps


@pytest.mark.parametrize("point", ["rendezvous", pytest.param("configure", marks=pytest.mark.slow)])
@pytest.mark.parametrize("attempt", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_kill_between_quorum_and_process_group(
    make_job: Callable[..., Job], point: str, attempt: int
) -> None:
    """A group that dies before its process group is complete costs its peers a new quorum, at the
    start and on return.
    """
    first = [] if attempt == 0 else [kill(1, "forward")]
    faults = [*first, kill(1, point, 0, attempt=attempt)]
    # The peer waits so long for the dead one.
    constants = {"titan_ft.membership.rendezvous._BASE_SECONDS": 1.0}
    job = make_job(
        groups=2, hooks={"faults": faults, "hold": 2, "constants": constants}, late=False
    )
    job.run()
    events = check(job, survivors=[0])
    check_killed(
        job, events, [*[(1, 0, "sigkill:forward")][: len(first)], (1, attempt, f"sigkill:{point}")]
    )
    assert participants_of(events, job.steps) == [0, 1]


@pytest.mark.parametrize(
    ("point", "rank"),
    [
        ("vote_before", 1),
        *(
            pytest.param(point, rank, marks=pytest.mark.slow)
            for point, rank in [
                ("backward", 0),
                ("backward", 1),
                ("exchange_first", 0),
                ("exchange_first", 1),
                ("vote_before", 0),
                ("commit", 0),
                ("commit", 1),
            ]
        ),
    ],
)
def test_kill_one_rank_of_two(make_job: Callable[..., Job], point: str, rank: int) -> None:
    """One dead rank ends its group. The survivors' rank whose own peer lives does not wait for a
    timeout.
    """
    job = make_job(groups=2, ranks=2, hooks={"faults": [kill(1, point, rank=rank)], "hold": 2})
    job.run()
    events = check(job, survivors=[0])
    check_killed(job, events, [(1, 0, f"sigkill:{point}")])
    for event in named(events, "exchange_failed"):
        assert event["seconds"] < 5.0


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_connections_within_a_group_that_end_cost_nothing(
    make_job: Callable[..., Job], rank: int
) -> None:
    """Connections that break at five points of each step, around and between its agreements, cost
    nothing.
    """
    points = ("forward", "exchange_first", "vote_before", "vote_after", "commit")
    resets = [{"replica": 1, "rank": rank, "point": point} for point in points]
    job = make_job(groups=2, ranks=2, hooks={"resets": resets})
    job.run()
    events = check(job, survivors=[0, 1])
    assert list(job.markers.glob("broken-control-1-0"))
    assert not named(events, "exchange_failed")


@pytest.mark.slow
@pytest.mark.parametrize("fan_out", [1, 16])
def test_a_reset_at_each_message_of_a_step_costs_nothing(
    make_job: Callable[..., Job], fan_out: int
) -> None:
    """Every third message of each rank is lost with its connection, at changing points of a
    step.
    """
    job = make_job(groups=2, ranks=3, hooks={"reset_every": 3, "fan_out": fan_out})
    job.run()
    events = check(job, survivors=[0, 1])
    assert list(job.markers.glob("broken-control-1-0"))
    assert not named(events, "exchange_failed", "rank_silent")


@pytest.mark.slow
def test_kill_each_rank_of_four(make_job: Callable[..., Job]) -> None:
    """In a tree where rank 1 has a child, each killed rank is named by a sibling, and the other
    group trains on.
    """
    faults = [kill(1, "backward", rank=rank, attempt=rank) for rank in range(4)]
    hooks = {"faults": faults, "hold": 1, "fan_out": 2}
    job = make_job(groups=2, ranks=4, steps=40, max_restarts=4, hooks=hooks)
    job.run(240)
    events = check(job, survivors=[0])
    check_killed(job, events, [(1, rank, "sigkill:backward") for rank in range(4)])
    assert participants_of(events, job.steps) == [0, 1]
    for dead in range(4):
        siblings = [job.output(1, rank, attempt=dead) for rank in range(4) if rank != dead]
        assert any(f"rank {dead} of this group" in output for output in siblings)


@pytest.mark.slow
@pytest.mark.parametrize("points", [("backward", "backward"), ("forward", "vote_before")])
def test_kill_two_of_four(make_job: Callable[..., Job], points: tuple[str, str]) -> None:
    """Two groups die in the same step, and both come back."""
    faults = [kill(replica, point) for replica, point in zip((1, 2), points, strict=True)]
    job = make_job(groups=4, hooks={"faults": faults, "hold": 2})
    job.run()
    events = check(job, survivors=[0, 3])
    check_killed(
        job, events, [(r, 0, f"sigkill:{point}") for r, point in zip((1, 2), points, strict=True)]
    )
    assert participants_of(events, job.steps) == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("late", [True, False])
def test_kill_same_group_again_and_again(make_job: Callable[..., Job], late: bool) -> None:
    """A group that dies right after each heal costs the other group only exchanges."""
    faults = [
        kill(1, point, attempt=attempt)
        for attempt, point in enumerate(("backward", "commit", "exchange_first"))
    ]
    job = make_job(groups=2, steps=40, hooks={"faults": faults, "hold": 1}, late=late)
    job.run()
    events = check(job, survivors=[0])
    check_killed(
        job, events, [(1, fault["attempt"], f"sigkill:{fault['point']}") for fault in faults]
    )
    assert participants_of(events, job.steps) == [0, 1]


@pytest.mark.slow
def test_kill_twenty_times(make_job: Callable[..., Job]) -> None:
    """Twenty kills of random groups at random points, one at a time, leave one trajectory."""
    dice = random.Random(20)
    faults: list[dict[str, Any]] = []
    attempts = [0, 0, 0]
    for _ in range(20):
        victim = dice.randrange(3)
        fault = kill(victim, dice.choice(POINTS), dice.randint(1, 3), attempt=attempts[victim])
        if faults:  # the one before has healed
            fault["after"] = [f"healed-{faults[-1]['replica']}-{faults[-1]['attempt'] + 1}"]
        attempts[victim] += 1
        faults.append(fault)
    job = make_job(groups=3, steps=170, hooks={"faults": faults, "hold": 1}, max_restarts=20)
    job.run(seconds=240)
    events = check(job, survivors=[r for r in range(3) if not attempts[r]])
    check_killed(
        job, events, [(f["replica"], f["attempt"], f"sigkill:{f['point']}") for f in faults]
    )
    assert participants_of(events, job.steps) == [0, 1, 2]
