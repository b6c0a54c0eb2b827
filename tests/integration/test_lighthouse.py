# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A lighthouse dies: training waits for the next one, and no group and no step is lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.job import Job
from harness.trajectory import check, named

QUIET_SECONDS = 1.0  # without a commit: every group waits for the lighthouse


def committed(job: Job) -> int:
    """Return how many steps all groups together have committed."""
    return len(job.events("step_committed"))


def wait_for_quiet(job: Job) -> None:
    """Wait until no group commits steps any more."""
    last, since = committed(job), time.monotonic()

    def is_quiet() -> bool:
        nonlocal last, since
        if (now := committed(job)) != last:
            last, since = now, time.monotonic()
        return time.monotonic() > since + QUIET_SECONDS

    job.wait_until(is_quiet, 30, "training waits for the lighthouse")


def check_undisturbed(job: Job, groups: int) -> None:
    """No group restarted or healed, every step has all gradients, and at most one exchange of a
    step was repeated.
    """
    events = check(job, survivors=range(groups))
    steps = named(events, "step_committed")
    assert {tuple(event["participants"]) for event in steps} == {tuple(range(groups))}
    assert max(event["exchanges"] for event in steps) <= 2
    assert not named(events, "heal_started", "digest_mismatch")


@pytest.mark.parametrize(
    ("groups", "ranks"),
    [
        (2, 1),
        pytest.param(3, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_training_waits_for_a_lighthouse_that_is_away(
    make_job: Callable[..., Job], groups: int, ranks: int
) -> None:
    """All groups request a quorum in vain. The new lighthouse knows none of them, and yet all
    continue together.
    """
    job = make_job(groups=groups, ranks=ranks, steps=12)
    job.start()
    job.wait_until(
        lambda: any(event["step"] == 3 for event in job.events("step_committed")), 60, "step 3"
    )
    killed = job._lighthouse
    assert killed is not None
    job._zygote.signal(killed, signal.SIGKILL)
    job.wait_until(lambda: not killed.running, 10, "the lighthouse is gone")
    wait_for_quiet(job)
    assert committed(job) < groups * ranks * job.steps, (
        "the job had ended before the lighthouse was gone"
    )
    job._start_lighthouse(job._address.removeprefix("http://"))
    job.finish()
    check_undisturbed(job, groups)


def test_a_standby_takes_over(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """The groups follow the file to the standby lighthouse. No group restarts, and no step
    is lost.
    """
    file = tmp_path / "lighthouse.json"
    flags = [f"--fault_tolerance.lighthouse=file:{file}"]
    lighthouse = {"announce": str(file), "standby": True}
    # The standby takes its time to start: without the gates the job may end before.
    gates = [{"name": "killed", "replica": replica, "step": 3} for replica in (0, 1)]
    job = make_job(
        groups=2, steps=6, flags=flags, lighthouse=lighthouse, hooks={"gates": gates, "hold": 1}
    )
    job.start()
    first = job._lighthouse
    assert first is not None
    for replica in (0, 1):
        job.wait_for_gate("killed", replica)
    job._start_lighthouse("127.0.0.1:0")
    job._zygote.signal(first, signal.SIGKILL)
    job.mark("killed")
    job.finish()
    check_undisturbed(job, 2)
    moved = job.events("lighthouse_moved")
    assert {(event["replica"], event["rank"], event["address"]) for event in moved} == {
        (replica, 0, job._address) for replica in (0, 1)
    }
