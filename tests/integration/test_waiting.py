# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Live groups outside the quorum, in the middle of a long step: the others wait for them."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.job import Job
from harness.trajectory import check, named

from titan_ft.training.checkpoint.folder import complete_steps

STEP = 4  # the step that takes long
LIVES = "groups [{}] live and are in no quorum"


def gate(name: str, replica: int, step: int = STEP, **more: Any) -> dict[str, Any]:
    return {"name": name, "replica": replica, "step": step, **more}


def test_nobody_finishes_without_a_group_in_a_long_step(make_job: Callable[..., Job]) -> None:
    """A group that was silent for a moment is excluded. The other one, which made all steps, waits
    for it without limit.

    So the late group gets the final state, with the same bytes.
    """
    hooks = {
        "gates": [gate("go", 1), gate("last", 0, step=6)],
        "constants": {"titan_ft.engine.step.FINISH_SECONDS": 1.0},
    }
    job = make_job(groups=2, steps=6, hooks=hooks)
    job.start()
    job.wait_for_gate("go", 1)
    job.send_signal(1, signal.SIGSTOP)
    job.wait_for_gate("last", 0)
    job.send_signal(1, signal.SIGCONT)  # it heartbeats again, and is in the midst of its step
    job.mark("last")
    # Told when `FINISH_SECONDS` are over, and not before.
    job.wait_until(
        lambda: LIVES.format(1) in job.output(0), 60, "the one that has made all steps waits"
    )
    assert not job.events("training_finished")
    job.mark("go")
    job.finish()
    events = check(job, survivors=[0], longest_gap=math.inf)
    assert job.groups[1].attempt == 0
    assert [(e["replica"], e["step"]) for e in named(events, "heal_finished")] == [(1, job.steps)]
    participants = {e["step"]: e["participants"] for e in named(events, "step_committed")}
    assert [participants[step] for step in (STEP - 1, STEP, job.steps)] == [[0, 1], [0], [0]]


@pytest.mark.slow
def test_a_checkpoint_is_no_witness_for_the_group_that_wrote_it(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """A bit flips in one of two groups, which saves; a third one returns at that very step with
    this checkpoint.

    It would outvote the group with the right bytes. Nobody can tell which bytes are right, so the
    run ends with a message.
    """
    folder = tmp_path / "checkpoints"
    job = make_job(
        groups=3,
        steps=8,
        flags=[
            "--fault_tolerance.digest_every=1000",
            "--fault_tolerance.min_replica_size=3",
            "--checkpoint.enable",
            f"--checkpoint.folder={folder}",
            f"--checkpoint.interval={STEP}",
        ],
        hooks={
            "chaos": [{"replica": 0, "fault": "flip_parameter", "steps": [STEP - 1]}],
            "faults": [{"replica": 2, "point": "forward", "step": STEP + 1}],
        },
        max_restarts=0,
    )
    job.start()
    job.wait_until(lambda: len(job.events("waiting")) == 2, 60, "two groups wait for the third one")
    assert complete_steps(folder) == [STEP]
    job.start_again(2)
    job.finish()
    events = job.events()
    assert {(e["replica"], e["step"]) for e in named(events, "checkpoint_loaded")} == {(2, STEP)}
    assert not named(events, "heal_started")
    for replica in range(3):
        assert "states differ" in job.output(replica, attempt=job.groups[replica].attempt)
        assert [worker.code for worker in job.groups[replica].workers] == [3]
