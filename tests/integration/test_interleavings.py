# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Rare meetings of failures, which the simulation has found, with real workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness.events import audit
from harness.job import Job
from harness.trajectory import check_finished, check_one_trajectory, named

STEP = 4


@pytest.mark.slow
def test_a_start_without_a_group(make_job: Callable[..., Job]) -> None:
    """The ranks of all groups end the wait in the same round, and the group that comes late heals.

    By its own clock each group's second rank has waited for less: by more than what lies between two rounds.
    """
    flags = ["--fault_tolerance.start_timeout_seconds=1.5"]
    delays = [{"replica": replica, "rank": rank, "seconds": 0.1} for replica in range(2) for rank in range(2)]
    late = [{"replica": replica, "rank": 1, "seconds": 0.3} for replica in range(2)]
    job = make_job(groups=3, ranks=2, steps=40, flags=flags, hooks={"delays": delays, "late": late})
    job.start(absent=[2])
    job.wait_until(lambda: job.events("step_committed"), 60, "two groups begin")
    job.start_again(2)
    job.finish()
    events = job.events()
    assert [group.attempt for group in job.groups] == [0, 0, 0]
    first = [e for e in named(events, "step_committed") if e["step"] == 1]
    assert sorted((e["replica"], e["rank"]) for e in first) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {tuple(e["participants"]) for e in first} == {(0, 1)}
    assert {e["replica"] for e in named(events, "heal_finished")} == {2}
    check_one_trajectory(named(events, "step_committed"))
    check_finished(job, events, job.steps)


@pytest.mark.slow
def test_a_corrupt_group_is_no_donor(make_job: Callable[..., Job]) -> None:
    """A bit flips long before the next comparison is due; the joiner that comes meanwhile is what finds it.

    Fetched from the corrupt group, its state would be two against two at the next comparison, and end the run. It may
    have asked that one for a part already when the comparison comes: then it is the bytes of the whole that count.
    """
    flags = ["--fault_tolerance.digest_every=1000"]
    hooks = {
        "chaos": [{"replica": 0, "fault": "flip_parameter", "steps": [STEP]}],
        "faults": [{"replica": 3, "point": "backward", "step": STEP + 2}],
        "hold": 2,
    }
    job = make_job(groups=4, flags=flags, hooks=hooks)
    job.run(90)
    events = job.events()
    mismatches = named(events, "digest_mismatch")
    assert {tuple(e["minority"]) for e in mismatches} == {(0,)}
    healed = named(events, "heal_finished")
    assert {e["replica"] for e in healed} == {0, 3}
    assert [e["donor"] in (1, 2) for e in healed if e["replica"] == 0] == [True]
    assert [group.attempt for group in job.groups] == [0, 0, 0, 1]
    check_finished(job, events, job.steps)


@pytest.mark.slow
def test_a_reader_dies_for_good_while_another_is_just_back(make_job: Callable[..., Job]) -> None:
    """Two groups of three are enough, and the one that is back takes over what nobody reads."""
    flags = [
        "--fault_tolerance.batch_policy=constant",
        "--fault_tolerance.min_replica_size=2",
    ]
    faults = [
        {"replica": 2, "point": "backward", "step": STEP},
        {"replica": 0, "point": "forward", "step": STEP, "after": ["healed-2-1"]},
    ]
    delays = [{"replica": replica, "attempt": "any", "seconds": 0.1} for replica in range(3)]
    hooks = {"faults": faults, "delays": delays, "constants": {"titan_ft.engine.step.FINISH_SECONDS": 2.0}}
    job = make_job(groups=3, steps=60, flags=flags, hooks=hooks, max_restarts=0)
    job.start()
    job.wait_until(lambda: job.groups[2].gone, 60, "group 2 is dead")
    job.start_again(2)
    job.finish()
    events = job.events()
    finished = {e["replica"]: e["digest"] for e in named(events, "training_finished")}
    assert sorted(finished) == [1, 2]
    assert len(set(finished.values())) == 1
    check_one_trajectory(named(events, "step_committed"))
    last = [e for e in named(events, "step_committed") if e["step"] == job.steps]
    assert {tuple(e["participants"]) for e in last} == {(1, 2)}
    found = audit(events)
    assert (found.num_lost, found.num_repeated) == (0, 0), found
