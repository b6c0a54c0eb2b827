# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A `launch_started` line that is read after later events of its launch, as through a network file
system.
"""

from __future__ import annotations

from typing import Any

from tests.history.histories import commit, say
from titan_ft.history.fold.run import RunFold, fold_events
from titan_ft.live.run_status import RunStatus


def launched(time: float) -> Any:
    return say(time, "launch_started", replicas=2, ranks_per_replica=1)


def started(time: float, group: int, attempt: int = 0) -> Any:
    return say(time, "worker_started", group, rank=0, attempt=attempt)


LAUNCH = [
    launched(0.0),
    started(1.0, 0),
    started(1.1, 1),
    say(1.5, "fault_injected", 1, fault="kill_group", target={"replica": 1}, seed=7, shot=3),
    say(
        2.0,
        "worker_exited",
        1,
        rank=0,
        attempt=0,
        worker_pid=1,
        reason="killed",
        signal="SIGKILL",
        stopped=False,
    ),
    say(2.5, "replica_restarted", 1, attempt=1, reason="killed", standby=False),
    started(3.0, 1, attempt=1),
    commit(4.0, 1, 0),
    commit(4.1, 1, 1, attempt=1),
]


def facts(fold: RunFold) -> dict[str, Any]:
    """Return all that a fold knows, as plain values."""
    known = {name: value for name, value in vars(fold).items() if not name.startswith("_")}
    parts = ("faults", "steps", "checkpoints", "hosts")
    return known | {name: vars(known[name]) for name in parts}


def test_groups_keep_what_their_events_said_before_the_line_came() -> None:
    """The launcher's groups were shown as not started, and forgot attempts, restarts and the
    step.
    """
    late = [*LAUNCH[1:], LAUNCH[0]]
    assert facts(fold_events(late)) == facts(fold_events(LAUNCH))
    assert fold_events(late).groups[1].num_restarts == 1


def test_the_line_of_a_resumed_launch_ends_only_what_was_before_it() -> None:
    earlier = [
        launched(-100.0),
        started(-99.0, 0),
        started(-99.0, 1),
        commit(-98.0, 7, 0),
        commit(-98.0, 7, 1),
    ]
    ended = say(-97.0, "launch_finished", code=0, reason="all groups finished")
    late = fold_events([*earlier, ended, *LAUNCH[1:], LAUNCH[0]])
    assert late.launch is LAUNCH[0]
    assert late.launch_end is None
    assert late.num_launches == 2
    assert (late.step, late.steps.num_committed, late.steps.num_tokens) == (1, 1, 1000)
    assert [(group.state, group.attempt, group.step) for group in late.groups.values()] == [
        ("training", 0, 1),
        ("training", 1, 1),
    ]
    # A group that has no event of the new launch yet is a new one.
    only_first = fold_events([*earlier, ended, started(1.0, 0, attempt=1), LAUNCH[0]])
    assert only_first.groups[0].state == "starting"
    assert only_first.groups[1].state == "not started"
    assert only_first.step is None


def test_a_resumed_launch_keeps_its_checkpoints_when_its_line_comes_late() -> None:
    """Else the launcher would say that no checkpoint is complete."""
    before = say(-98.0, "checkpoint_saved", 0, step=7, seconds=1.0)
    failed = say(-97.5, "checkpoint_failed", 0, step=8, error="disk full")
    own = say(4.5, "checkpoint_saved", 0, step=1, seconds=1.0)
    late = fold_events([launched(-100.0), before, failed, *LAUNCH[1:], LAUNCH[0], own])
    assert (late.checkpoints.latest, late.checkpoints.save_error) == (1, "")
    late = fold_events([launched(-100.0), before, failed, *LAUNCH[1:], LAUNCH[0]])
    assert (late.checkpoints.latest, late.checkpoints.save_error) == (None, "")
    late = fold_events([launched(-100.0), before, *LAUNCH[1:], own, LAUNCH[0]])
    assert late.checkpoints.latest == 1
    assert late.ended_workers == {(1, 0, 0, 1)}


def test_the_late_line_of_an_earlier_launch_ends_nothing() -> None:
    late = fold_events([*LAUNCH, launched(-100.0)])
    assert late.launch is LAUNCH[0]
    assert late.num_launches == 2
    assert late.groups[0].state == "training"


def test_a_shot_of_two_groups_is_one_fault_whenever_the_line_comes() -> None:
    second = say(
        1.6, "fault_injected", 0, fault="kill_group", target={"replica": 0}, seed=7, shot=3
    )
    fold = fold_events([*LAUNCH[1:4], LAUNCH[0], second])
    assert fold.faults.num_injected == 1


def test_faults_of_an_earlier_launch_do_not_count_after_a_late_line() -> None:
    earlier = say(
        -98.0, "fault_injected", 0, fault="stop_rank", target={"replica": 0}, seed=7, shot=3
    )
    fold = fold_events([launched(-100.0), earlier, *LAUNCH[1:], LAUNCH[0]])
    assert fold.faults.by_kind == {"kill_group": 1}


def test_lines_of_this_launch_stay_on_the_screen() -> None:
    run = RunStatus()
    for event in [*LAUNCH[1:], LAUNCH[0]]:
        run.observe(event)
    in_time = RunStatus()
    for event in LAUNCH:
        in_time.observe(event)
    assert sorted(run.lines) == sorted(in_time.lines)
    assert run.groups == in_time.groups
