# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The last groups of a job leave, together or one after the other, and their training is saved."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.events import Event
from harness.job import Job
from harness.trajectory import by_process, check, check_finished, check_one_trajectory, exits, named

from titan_ft.training.checkpoint.folder import Manifest, complete_steps

pytestmark = pytest.mark.slow

STEPS = 16
SCHEDULE = [f"--lr_scheduler.total_steps={STEPS}"]


def flags(folder: Path, **more: Any) -> list[str]:
    """Flags of a job that saves every fifth step in a folder; the save of the last step has the
    model only.
    """
    settings = {"folder": folder, "interval": 5, **more}
    return [
        "--checkpoint.enable",
        *(f"--checkpoint.{name}={value}" for name, value in settings.items()),
        *SCHEDULE,
    ]


def gate(replica: int, step: int) -> dict[str, Any]:
    """A gate for a group in the forward of a step."""
    return {"name": f"go-{replica}", "replica": replica, "step": step}


def send_away(job: Job, replica: int) -> None:
    """Send SIGTERM to a group that waits at its gate, and wait until the group knows of it."""
    job.wait_for_gate(f"go-{replica}", replica)
    job.send_signal(replica, signal.SIGTERM)
    job.wait_until(lambda: (job.markers / f"told-{replica}-0").exists(), 30, "the group was told")


def saved(job: Job) -> list[tuple[int, int]]:
    """List (replica, step) of each saved checkpoint."""
    return [(event["replica"], event["step"]) for event in named(job.events(), "checkpoint_saved")]


def left(job: Job) -> dict[int, tuple[int, bool]]:
    """After which step each group left, and whether in order."""
    return {
        event["replica"]: (event["step"], event["in_order"])
        for event in named(job.events(), "drained")
    }


def digests(events: list[Event]) -> set[tuple[int, str]]:
    """The final state of each rank of a group."""
    return {(event["rank"], event["digest"]) for event in named(events, "training_finished")}


def check_goes_on(make_job: Callable[..., Job], folder: Path, step: int) -> None:
    """A later job continues after exactly this step, to the bytes of an unstopped run."""
    straight = make_job(groups=2, steps=STEPS, flags=SCHEDULE)
    straight.run()
    again = make_job(groups=2, steps=STEPS, flags=flags(folder))
    again.run()
    events = again.events()
    for own in by_process(events).values():
        (loaded,) = named(own, "checkpoint_loaded")
        first = named(own, "step_committed")[0]
        assert (loaded["step"], first["step"], first["parent"]) == (
            step,
            step + 1,
            loaded["lineage"],
        )
    check_one_trajectory(named(events, "step_committed"))
    check_finished(again, events, STEPS)
    assert digests(events) == digests(check(straight, survivors=[0, 1]))


@pytest.mark.parametrize("first", [0, 1])
def test_groups_that_leave_one_after_the_other(
    make_job: Callable[..., Job], tmp_path: Path, first: int
) -> None:
    """The group that is asked first leaves its state to the other one, which makes a step alone and
    saves.
    """
    folder, last = tmp_path / "checkpoints", 1 - first
    hooks = {"gates": [gate(first, 7), gate(last, 8)]}
    job = make_job(groups=2, steps=STEPS, flags=flags(folder), hooks=hooks)
    job.start()
    send_away(job, first)
    job.mark(f"go-{first}")
    send_away(job, last)
    job.mark(f"go-{last}")
    job.finish()
    assert left(job) == {first: (7, True), last: (8, True)}
    assert saved(job) == [(0, 5), (last, 8)]
    alone = [
        event["step"]
        for event in named(job.events(), "step_committed")
        if event["participants"] == [last]
    ]
    assert alone == [8]
    again = make_job(groups=2, steps=STEPS, flags=flags(folder))
    again.run()
    check_finished(again, again.events(), STEPS)
    assert {event["step"] for event in named(again.events(), "checkpoint_loaded")} == {8}


def test_a_group_that_dies_in_its_save_is_followed_by_the_next(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """The other group stayed until the checkpoint was complete, so it saves after the first one
    dies.
    """
    folder = tmp_path / "checkpoints"
    faults = [{"replica": 0, "point": "save", "step": 8}]
    hooks = {"gates": [gate(0, 8), gate(1, 8)], "faults": faults}
    job = make_job(
        groups=2, steps=STEPS, flags=flags(folder, interval=100), hooks=hooks, max_restarts=0
    )
    job.start()
    for replica in (0, 1):
        send_away(job, replica)
    for replica in (0, 1):
        job.mark(f"go-{replica}")
    job.finish()
    assert [worker.code for group in job.groups for worker in group.workers] == [-signal.SIGKILL, 0]
    assert left(job) == {1: (8, True)}
    assert saved(job) == [(1, 8)]
    assert complete_steps(folder) == [8]
    check_goes_on(make_job, folder, 8)


def test_a_save_that_takes_longer_than_is_left_is_broken_off(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """The group ends in time and reports the missing save. An incomplete checkpoint is never
    loaded.
    """
    folder = tmp_path / "checkpoints"
    settings = [*flags(folder), "--fault_tolerance.drain_timeout_seconds=4"]
    stuck = {"name": "never", "replica": 0, "point": "save", "step": 8}
    job = make_job(groups=1, steps=STEPS, flags=settings, hooks={"gates": [gate(0, 8), stuck]})
    job.start()
    send_away(job, 0)
    job.mark("go-0")
    job.finish()
    assert [group.finished for group in job.groups] == [True], exits(job)
    assert left(job) == {0: (8, False)}
    (drained,) = named(job.events(), "drained")
    assert (
        "drain_timeout_seconds (4 s) is over, before the checkpoint of step 8 was complete"
        in drained["reason"]
    )
    assert complete_steps(folder) == [5]


def test_groups_that_leave_with_the_last_step(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """The groups save the whole state. A later job has no step to train, and makes the last save as
    configured.
    """
    folder = tmp_path / "checkpoints"
    job = make_job(
        groups=2, steps=8, flags=flags(folder), hooks={"gates": [gate(0, 8), gate(1, 8)]}
    )
    job.start()
    for replica in (0, 1):
        send_away(job, replica)
    for replica in (0, 1):
        job.mark(f"go-{replica}")
    job.finish()
    assert left(job) == {0: (8, True), 1: (8, True)}
    assert complete_steps(folder) == [5, 8]
    assert not _is_model_only(folder, 8)
    again = make_job(groups=2, steps=8, flags=flags(folder))
    again.run()
    assert not named(again.events(), "step_committed")
    assert {event["step"] for event in named(again.events(), "training_finished")} == {8}
    assert _is_model_only(folder, 8)


def _is_model_only(folder: Path, step: int) -> bool:
    manifest = Manifest.read(folder / f"step-{step}")
    return manifest is not None and manifest.model_only
