# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The last lines of a run that was stopped."""

from __future__ import annotations

from typing import Any

import pytest

from tests.event_builder import event
from titan_ft.launch.stopped_run import describe_stop
from titan_ft.live.run_status import RunStatus
from titan_ft.run.events import Event

COMMAND = "titan-ft launch CONFIG --resume"
ROUNDS: Any = {"semi_sync_method": "diloco", "sync_steps": 10, "round_steps": 10, "steps": 95}


def step(number: int) -> Any:
    return event("step_committed", step=number)


def saved(number: int, **fields: Any) -> Any:
    return event("checkpoint_saved", step=number, seconds=1.0, **fields)


LEAVES = event("saving_before_leaving", step=105, seconds_left=20.0)
SKIPPED = event("checkpoint_skipped", step=100, instead=60)
LOADED = event("checkpoint_loaded", step=60)
FAILED = event("checkpoint_failed", step=105, error="No space left on device", latest=60)


@pytest.mark.parametrize(
    ("events", "line"),
    [
        (
            [step(105), saved(60), LEAVES, saved(105)],
            "stopped after step 105; the checkpoint of step 105 is complete",
        ),
        (
            [step(105), saved(60), LEAVES],
            "stopped after step 105; the latest complete checkpoint is that of step 60 (that of step 105 was not in "
            "time: raise --drain-timeout, 25 s now)",
        ),
        (
            [step(105), saved(60), LEAVES, FAILED],
            "stopped after step 105; the latest complete checkpoint is that of step 60 (that of step 105 could not be "
            "written: No space left on device)",
        ),
        (  # killed at once, by a second Ctrl-C
            [step(105), saved(60)],
            "stopped after step 105; the latest complete checkpoint is that of step 60",
        ),
        (
            [step(105), saved(60), saved(100), event("checkpoint_withdrawn", step=100)],
            "stopped after step 105; the latest complete checkpoint is that of step 60",
        ),
        (  # step 100 is damaged: the job has gone on from 60
            [saved(60), saved(100), SKIPPED, LOADED, step(105), FAILED],
            "stopped after step 105; the latest complete checkpoint is that of step 60 (that of step 105 could not be "
            "written: No space left on device)",
        ),
        (  # step 100 has vanished
            [saved(60), saved(100), LOADED, step(80)],
            "stopped after step 80; the latest complete checkpoint is that of step 60",
        ),
        (  # another group has loaded 60 too, and has saved 100 before this one is done
            [
                event("worker_started", time=5.0),
                saved(100, time=9.0),
                event("checkpoint_loaded", step=60, time=11.0),
            ],
            "stopped before a step was made; the checkpoint of step 100 is complete",
        ),
        (
            [step(105), saved(60), saved(105, model_only=True)],
            "stopped after step 105; the latest complete checkpoint is that of step 60 (that of step 105 is of the "
            "model only)",
        ),
        (
            [step(105), saved(60), saved(105, model_only=True), LEAVES],
            "stopped after step 105; the latest complete checkpoint is that of step 60 (that of step 105 was not in "
            "time: raise --drain-timeout, 25 s now)",
        ),
        (
            [step(105), saved(60), saved(105, model_only=True), LEAVES, saved(105)],
            "stopped after step 105; the checkpoint of step 105 is complete",
        ),
        (  # the last save as it was asked for takes the place of the whole state
            [step(105), saved(60), saved(105), saved(105, model_only=True)],
            "stopped after step 105; the latest complete checkpoint is that of step 60 (that of step 105 is of the "
            "model only)",
        ),
        (
            [event("checkpoint_loaded", step=60, lineage="l")],
            "stopped before a step was made; the checkpoint of step 60 is complete",
        ),
        (
            [event("worker_started", config=ROUNDS), step(3), saved(30)],
            "stopped after round 3 (step 30); the checkpoint of step 30 is complete",
        ),
    ],
)
def test_a_run_that_can_go_on_ends_with_the_command(events: list[Event], line: str) -> None:
    """The lines also name the step from which the run continues."""
    assert told(*events) == [f"{line}; go on with:", f"  {COMMAND}"]


@pytest.mark.parametrize(
    ("events", "saves", "line"),
    [
        ([], True, "stopped before the first step; the same command starts it again"),
        ([], False, "stopped before the first step; the same command starts it again"),
        (
            [step(105)],
            False,
            "stopped after step 105; nothing is saved: checkpoints are off (checkpoint.enable): if all groups are "
            "stopped or lost, training starts anew; --checkpoint.enable after a -- turns them on",
        ),
        (
            [step(105)],
            True,
            "stopped after step 105; no checkpoint is complete: training would start anew, in another --run-dir",
        ),
        (
            [step(105), LEAVES],
            True,
            "stopped after step 105; no checkpoint is complete (that of step 105 was not in time: raise "
            "--drain-timeout, 25 s now): training would start anew, in another --run-dir",
        ),
    ],
)
def test_a_run_that_cannot_go_on_says_why(events: list[Event], saves: bool, line: str) -> None:
    """The lines show no command that would be refused."""
    assert told(*events, saves=saves) == [line]


def test_a_second_launch_in_the_folder_counts_its_own_steps() -> None:
    """Saves of an earlier launch do not count, except for the checkpoint that this launch has
    loaded.
    """
    again = event("launch_started", replicas=1, ranks_per_replica=1, spares=0, job_id="j")
    assert told(step(50), saved(50), again) == [
        "stopped before the first step; the same command starts it again"
    ]


def told(*events: Event, saves: bool = True) -> list[str]:
    run = RunStatus(1)
    for each in events:
        run.observe(each)
    return describe_stop(run, COMMAND, saves=saves, drain_seconds=25.0)
