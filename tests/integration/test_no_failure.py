# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Groups side by side while nothing fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness.job import Job
from harness.trajectory import check, named


@pytest.mark.parametrize(
    ("groups", "ranks"),
    [(3, 1), *(pytest.param(2, ranks, marks=pytest.mark.slow) for ranks in (1, 2))],
)
def test_groups_stay_identical(make_job: Callable[..., Job], groups: int, ranks: int) -> None:
    """All groups take part in each step and hold the same bytes after it."""
    job = make_job(groups=groups, ranks=ranks, heartbeat_timeout_ms=5000)
    job.run()
    events = check(job, survivors=range(groups))
    committed = named(events, "step_committed")
    assert len(committed) == groups * ranks * job.steps
    assert {tuple(event["participants"]) for event in committed} == {tuple(range(groups))}
    assert {event["exchanges"] for event in committed} == {1}
    assert all(event["digest"] for event in committed)
    assert not named(events, "exchange_failed", "heal_started", "digest_mismatch")
