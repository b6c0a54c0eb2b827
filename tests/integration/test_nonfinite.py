# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A NaN gradient stays in the group that computed it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness.job import Job
from harness.trajectory import check_finished, check_one_trajectory, named

STEP = 5


@pytest.mark.parametrize(
    ("ranks", "policy"),
    [
        (1, "shrink"),
        pytest.param(1, "constant", marks=pytest.mark.slow),
        pytest.param(2, "shrink", marks=pytest.mark.slow),
    ],
)
def test_nan_of_one_group_is_left_out(
    make_job: Callable[..., Job], ranks: int, policy: str
) -> None:
    """With a NaN in one of three groups the step excludes that group, and its batch is trained
    later.
    """
    nan = {"replica": 1, "rank": ranks - 1, "fault": "nan_gradient", "steps": [STEP]}
    flags = [f"--fault_tolerance.batch_policy={policy}"]
    job = make_job(groups=3, ranks=ranks, steps=10, flags=flags, hooks={"chaos": [nan]})
    job.run()
    events = job.events()
    assert all(group.finished and group.attempt == 0 for group in job.groups)

    excluded = named(events, "gradient_excluded")
    assert {(e["replica"], e["rank"], e["step"]) for e in excluded} == {
        (g, r, STEP) for g in range(3) for r in range(ranks)
    }
    assert all(event["slots"] == [1] for event in excluded)
    committed = named(events, "step_committed")
    for event in committed:
        assert event["participants"] == ([0, 2] if event["step"] == STEP else [0, 1, 2])
        assert event["grad_norm"] is not None  # NaN is null in JSON
        assert event["exchanges"] >= (2 if event["step"] == STEP else 1)
        # Nobody else trains what may be the reason, whatever the policy.
        assert set(event["batches"]) == ({"0", "2"} if event["step"] == STEP else {"0", "1", "2"})
    # One exchange was repeated for it; a machine that stands still costs one more, and says another
    # reason.
    spoiled = [e for e in named(events, "exchange_failed") if "not finite" in e["error"]]
    assert sorted((e["replica"], e["rank"], e["step"]) for e in spoiled) == [
        (g, r, STEP - 1) for g in range(3) for r in range(ranks)
    ]
    (own,) = {e["own_tokens"] for e in committed if (e["replica"], e["step"]) == (1, STEP)}
    assert own == 0
    check_one_trajectory(committed)
    check_finished(job, events, job.steps)


def test_nan_of_all_groups_is_committed(make_job: Callable[..., Job]) -> None:
    """If no group has finite gradients the model diverges, and the run continues as torchtitan's
    does.
    """
    nans = [{"replica": replica, "fault": "nan_gradient", "steps": [STEP]} for replica in range(2)]
    job = make_job(groups=2, steps=7, hooks={"chaos": nans})
    job.run()
    committed = job.events("step_committed")
    assert {e["replica"] for e in committed if e["step"] == job.steps} == {0, 1}
    assert all((event["grad_norm"] is None) == (event["step"] >= STEP) for event in committed)
    assert all(event["participants"] == [0, 1] for event in committed)
    assert not job.events("gradient_excluded")


def test_nan_again_and_again_ends_the_group(make_job: Callable[..., Job]) -> None:
    """A group with nonfinite gradients in three consecutive steps restarts with its peers'
    state.
    """
    nan = {"replica": 1, "fault": "nan_gradient", "steps": [STEP, STEP + 1, STEP + 2]}
    job = make_job(groups=3, steps=12, hooks={"chaos": [nan], "hold": 1})
    job.run()
    events = job.events()
    assert [group.attempt for group in job.groups] == [0, 1, 0]
    assert "look at the memory" in job.output(1, attempt=0)
    committed = named(events, "step_committed")
    check_one_trajectory(committed)
    check_finished(job, events, job.steps)
