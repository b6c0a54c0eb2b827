# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Groups side by side while nothing fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness.job import Job
from harness.trajectory import check, named


@pytest.mark.parametrize(("groups", "ranks"), [(2, 1), (2, 2), (3, 1)])
def test_groups_stay_identical(make_job: Callable[..., Job], groups: int, ranks: int) -> None:
    """All groups take part in each step and hold the same bytes after it."""
    job = make_job(groups=groups, ranks=ranks)
    job.run()
    events = check(job, survivors=range(groups))
    committed = named(events, "step_committed")
    assert len(committed) == groups * ranks * job.steps
    assert {tuple(event["participants"]) for event in committed} == {tuple(range(groups))}
    assert {event["exchanges"] for event in committed} == {1}
    assert all(event["digest"] for event in committed)
    assert not named(events, "exchange_failed", "heal_started", "digest_mismatch")


def test_slow_group_is_waited_for(make_job: Callable[..., Job]) -> None:
    """A group that takes seconds longer for a step than the others is neither left out nor taken for dead."""
    job = make_job(groups=3, steps=6, hooks={"delays": [{"replica": 1, "step": 3, "seconds": 4}]})
    job.run()
    events = check(job, survivors=range(3))
    committed = named(events, "step_committed")
    assert {(tuple(event["participants"]), event["exchanges"]) for event in committed} == {((0, 1, 2), 1)}
    assert not named(events, "exchange_failed", "heal_started")


def test_lighthouse_comes_back(make_job: Callable[..., Job]) -> None:
    """Groups outlive a lighthouse that dies and is started again: they wait for it and lose nothing."""
    pause = [{"replica": replica, "step": 4, "seconds": 1} for replica in range(2)]
    flags = ["--fault_tolerance.quorum_timeout_seconds=2"]
    job = make_job(groups=2, steps=8, flags=flags, hooks={"delays": pause})
    job.start()
    job.wait_until(lambda: any(e["step"] == 3 for e in job.events("step_committed")), 30, "step 3")
    job.restart_lighthouse()
    job.finish()
    events = check(job, survivors=range(2))
    assert {tuple(event["participants"]) for event in named(events, "step_committed")} == {(0, 1)}
