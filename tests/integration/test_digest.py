# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""State that differs between groups is noticed, named and repaired, or the run ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness.job import Job
from harness.trajectory import check_finished, check_one_trajectory, named

STEP = 5


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_flipped_bit_heals_from_the_majority(make_job: Callable[..., Job], ranks: int) -> None:
    """A flipped bit of one parameter in one of three groups: the group is named and heals, and all
    are equal again.
    """
    flip = {"replica": 1, "rank": ranks - 1, "fault": "flip_parameter", "steps": [STEP]}
    job = make_job(groups=3, ranks=ranks, hooks={"chaos": [flip], "hold": 2})
    job.run()
    events = job.events()
    assert all(group.finished and group.attempt == 0 for group in job.groups)

    mismatches = named(events, "digest_mismatch")
    assert {(e["replica"], e["rank"]) for e in mismatches} == {
        (g, r) for g in range(3) for r in range(ranks)
    }
    for event in mismatches:
        assert (event["step"], event["minority"]) == (STEP, [1])
        assert event["digests"]["0"] == event["digests"]["2"] != event["digests"]["1"]
    assert {(e["replica"], e["step"]) for e in named(events, "heal_finished")}
    assert {e["replica"] for e in named(events, "heal_finished")} == {1}
    # The corrupted state was never averaged into a step: the others' next one is without that
    # group.
    committed = named(events, "step_committed")
    assert {tuple(e["participants"]) for e in committed if e["step"] == STEP + 1} == {(0, 2)}
    check_one_trajectory(
        e for e in committed if (e["replica"], e["rank"], e["step"]) != (1, flip["rank"], STEP)
    )
    check_finished(job, events, job.steps)
    assert {tuple(e["participants"]) for e in committed if e["step"] == job.steps} == {(0, 1, 2)}


def test_tie_ends_the_run(make_job: Callable[..., Job]) -> None:
    """Two groups that differ cannot tell which one is right: both end with a message, and must not
    be restarted.
    """
    job = make_job(
        groups=2, hooks={"chaos": [{"replica": 1, "fault": "flip_parameter", "steps": [STEP]}]}
    )
    job.run()
    for group in job.groups:
        assert [worker.code for worker in group.workers] == [3]
        output = job.output(group.replica)
        assert "Traceback" not in output
        (message,) = [line for line in output.splitlines() if line.startswith("titan_ft: ")]
        assert f"after step {STEP}" in message
        assert "checkpoint" in message  # what to do
    mismatches = job.events("digest_mismatch")
    assert {event["replica"] for event in mismatches} == {0, 1}
    assert all(event["digests"]["0"] != event["digests"]["1"] for event in mismatches)
    assert not job.events("training_finished")
