# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Waits for other groups: too few groups to commit, and a group that is slower than the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
from harness.events import audit
from harness.job import Job
from harness.trajectory import check, check_killed, named

STEP = 4  # the step in which the trouble begins
HANG_SECONDS = 2


def test_below_min_replica_size_nothing_is_committed_or_lost(make_job: Callable[..., Job]) -> None:
    """The survivor keeps its gradients beyond the hang timeout, and continues when the other group
    is back.
    """
    faults = [{"replica": 1, "point": "backward", "step": STEP}]
    flags = [
        "--fault_tolerance.min_replica_size=2",
        f"--fault_tolerance.hang_timeout_seconds={HANG_SECONDS}",
    ]
    job = make_job(groups=2, flags=flags, hooks={"faults": faults}, max_restarts=0)
    job.start()
    job.wait_until(lambda: job.events("waiting"), 60, "the survivor waits")
    since = time.monotonic()
    job.wait_until(
        lambda: time.monotonic() > since + 1.2 * HANG_SECONDS,
        60,
        "the survivor has waited for long",
    )
    job.start_again(1)
    job.finish()

    events = check(job, survivors=[0], longest_gap=math.inf)
    check_killed(job, events, [(1, 0, "sigkill:backward")])
    assert audit(events).verdict == "holds"
    assert {tuple(e["participants"]) for e in named(events, "step_committed")} == {(0, 1)}
    (waiting,) = named(events, "waiting")
    assert (waiting["replica"], waiting["step"], waiting["participants"]) == (0, STEP - 1, [0])
    assert "2 needed" in waiting["reason"]
    assert f"step {STEP} waits" in job.output(0)
    healed = named(events, "heal_finished")
    assert [(e["replica"], e["step"]) for e in healed] == [(1, STEP - 1)]


@pytest.mark.slow
def test_a_straggler_is_named_by_all(make_job: Callable[..., Job]) -> None:
    """Three slow steps make a straggler and three normal ones end it, on all groups at the same
    step.
    """
    slow = range(STEP, STEP + 5)
    job = make_job(
        groups=3,
        hooks={
            "delays": [{"replica": 1, "step": step, "seconds": 0.5} for step in slow],
            "constants": {
                "titan_ft.protocol.straggler.STEPS": 3,
                "titan_ft.protocol.straggler.FACTOR": 3,
            },
        },
    )
    job.run()
    events = check(job, survivors=[0, 1, 2])
    told = [
        (e["event"], e["step"], e["slot"], e["replica"])
        for e in named(events, "straggler", "straggler_recovered")
    ]
    expected = [("straggler", slow[2], 1), ("straggler_recovered", slow[-1] + 3, 1)]
    assert sorted(told) == sorted((*change, replica) for change in expected for replica in range(3))
    assert all(event["factor"] > 3 for event in named(events, "straggler"))
