# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Groups that live and are in no quorum, because they are in the midst of a long step: the others wait for them."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.events import audit
from harness.job import Job
from harness.trajectory import check, check_finished, check_one_trajectory, named

from titan_ft.training.checkpoint.folder import complete_steps

STEP = 4  # the step that takes long
QUORUM_SECONDS, START_SECONDS = 1.0, 1.5
LIVES = "groups [{}] live and are in no quorum"


def gate(name: str, replica: int, step: int = STEP, **more: Any) -> dict[str, Any]:
    return {"name": name, "replica": replica, "step": step, **more}


@pytest.mark.slow
def test_a_request_outlasts_the_time_after_which_a_rank_looks_for_the_lighthouse(make_job: Callable[..., Job]) -> None:
    """A joiner's ranks ask while the other group is in a long step, for several times `PROBE_SECONDS`.

    A rank that asked again by itself would be counted for the next quorum, and get that before its sibling.
    """
    job = make_job(
        groups=2,
        ranks=2,
        steps=8,
        flags=["--fault_tolerance.start_timeout_seconds=1"],
        hooks={
            "gates": [gate("go", 0, rank=rank) for rank in range(2)],
            "hold": 1,
            "constants": {"titan_ft.membership.seat.PROBE_SECONDS": QUORUM_SECONDS},
        },
    )
    job.start(absent=[1])
    job.wait_for_gate("go", 0, [0, 1])
    job.start_again(1)
    job.wait_until(
        lambda: job.output(1).count("waiting for other groups") >= 2, 60, "the joiner has waited for twice its time"
    )
    job.mark("go")
    job.finish()
    events = check(job, survivors=[0], longest_gap=math.inf)
    assert job.groups[1].attempt == 0
    assert not named(events, "exchange_failed")
    assert {(e["replica"], e["rank"]) for e in named(events, "heal_finished")} == {(1, 0), (1, 1)}
    last = {(*e["participants"],) for e in named(events, "step_committed") if e["step"] == job.steps}
    assert last == {(0, 1)}


@pytest.mark.slow
def test_a_job_is_not_begun_anew_beside_a_group_in_a_long_step(make_job: Callable[..., Job]) -> None:
    """All others die, come back, and have a quorum of their own: they wait longer than they would for one that is gone.

    They heal from it, and no step is made twice.
    """
    job = make_job(
        groups=3,
        steps=8,
        flags=[f"--fault_tolerance.start_timeout_seconds={START_SECONDS:g}"],
        hooks={"gates": [gate("go", 2)], "hold": 1},
        max_restarts=0,
        lighthouse={"join_timeout_ms": 1000},
    )
    job.start()
    job.wait_for_gate("go", 2)
    for replica in (0, 1):
        job.send_signal(replica, signal.SIGKILL)
    for replica in (0, 1):
        job.wait_for_end(replica)
        job.start_again(replica)
    job.wait_until(lambda: all(LIVES.format(2) in job.output(r, attempt=1) for r in (0, 1)), 60, "both wait for it")
    until = time.monotonic() + 2 * START_SECONDS
    job.wait_until(lambda: time.monotonic() > until, 60, "they have waited for longer than they would")
    assert not [e for e in job.events("step_committed") if e["attempt"] == 1]
    job.mark("go")
    job.finish()
    events = check(job, survivors=[2], longest_gap=math.inf)
    assert {e["replica"] for e in named(events, "heal_finished")} == {0, 1}
    assert {e["step"] for e in named(events, "step_committed") if e["attempt"] == 1} <= set(range(STEP + 1, 9))
    assert audit(events).verdict == "holds"


def test_nobody_finishes_without_a_group_in_a_long_step(make_job: Callable[..., Job]) -> None:
    """It was silent for a moment and is left out; the other one has made all steps and waits, for longer than it would.

    So the late one gets the final state, and the same bytes.
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
    job.wait_until(lambda: LIVES.format(1) in job.output(0), 60, "the one that has made all steps waits")
    assert not job.events("training_finished")
    job.mark("go")
    job.finish()
    events = check(job, survivors=[0], longest_gap=math.inf)
    assert job.groups[1].attempt == 0
    assert [(e["replica"], e["step"]) for e in named(events, "heal_finished")] == [(1, job.steps)]
    participants = {e["step"]: e["participants"] for e in named(events, "step_committed")}
    assert [participants[step] for step in (STEP - 1, STEP, job.steps)] == [[0, 1], [0], [0]]


@pytest.mark.slow
def test_a_group_that_heals_at_the_end_trains_on_from_an_earlier_state(make_job: Callable[..., Job]) -> None:
    """Its bytes differ after the last step, and all others die before it has theirs: they begin anew, and it with them.

    Training does not end successfully at an earlier step.
    """
    job = make_job(
        groups=3,
        steps=6,
        # All take part in each step: the bit flips in the last step of both lives, and two of three know better.
        flags=["--fault_tolerance.digest_every=1000", "--fault_tolerance.min_replica_size=3"],
        hooks={
            "chaos": [{"replica": 2, "fault": "flip_parameter", "steps": [6]}],
            "pauses": [{"replica": 2, "after": ["dead"]}],
        },
        max_restarts=0,
    )
    job.start()
    job.wait_until(lambda: (job.markers / "fetching-2-0-0").exists(), 60, "group 2 fetches the final state")
    for replica in (0, 1):
        job.send_signal(replica, signal.SIGKILL)
    for replica in (0, 1):
        job.wait_for_end(replica)
        job.start_again(replica)
    job.mark("dead")
    job.finish()
    events = job.events()
    assert [group.attempt for group in job.groups] == [1, 1, 0]
    check_finished(job, events, job.steps)
    healed, last = (e for e in named(events, "heal_finished") if e["replica"] == 2)
    assert healed["step"] < job.steps == last["step"]
    own = [e["step"] for e in named(events, "step_committed") if e["replica"] == 2]
    assert own == [*range(1, 7), *range(healed["step"] + 1, 7)]
    check_one_trajectory(e for e in named(events, "step_committed") if e["attempt"] == 1 or e["time"] > healed["time"])


@pytest.mark.slow
def test_a_checkpoint_is_no_witness_for_the_group_that_wrote_it(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """A bit flips in one of two groups, which saves; a third one comes back at that very step with this checkpoint.

    It would outvote the group whose bytes are right: nobody can tell which are, so that the run ends and says so.
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
