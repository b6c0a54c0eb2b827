# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Restart decisions: of one group, and of all groups of a run together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.event_builder import build
from titan_ft.launch.restart_policy import (
    FINAL_CODE,
    WINDOW_SECONDS,
    AttemptEnd,
    CommonEnd,
    RestartPolicy,
    backoff_seconds,
)
from titan_ft.run.error_file import WorkerError
from titan_ft.run.events import ReplicaGaveUp, WorkerExited

KILLED = AttemptEnd(-9, alive_seconds=5.0)
FAILED = AttemptEnd(1, alive_seconds=5.0)


def raised(text: str, **fields: Any) -> AttemptEnd:
    return replace(FAILED, error=WorkerError(text, transient=False, time=0.0), **fields)


def test_backoff_starts_at_once_and_is_capped() -> None:
    """The first restart waits for nothing, the next ones for twice as long each, up to a cap."""
    assert [backoff_seconds(streak) for streak in range(8)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert backoff_seconds(10_000) == 10.0


def test_backoff_grows_in_a_crash_loop() -> None:
    """A group that dies young each time waits longer and longer."""
    policy = RestartPolicy(max_restarts=10)
    assert [policy.decide(FAILED) for _ in range(4)] == [0.0, 0.5, 1.0, 2.0]


def test_backoff_is_reset_by_health() -> None:
    """A group that committed a step, or lived long, is restarted at once when it dies."""
    policy = RestartPolicy(max_restarts=10)
    for _ in range(3):
        policy.decide(FAILED)
    assert policy.decide(replace(KILLED, committed=True)) == 0.0
    assert policy.decide(KILLED) == 0.5
    assert policy.decide(replace(KILLED, alive_seconds=61.0)) == 0.0


def test_restarts_are_limited() -> None:
    """After max_restarts, healthy or not, the group has failed."""
    policy = RestartPolicy(max_restarts=2)
    decisions = [policy.decide(replace(KILLED, alive_seconds=100.0, committed=True)) for _ in range(3)]
    assert decisions == [0.0, 0.0, "no restart left (--max-restarts 2 within 24 hours)"]


def test_restarts_long_ago_do_not_count() -> None:
    """A run of weeks does not end of restarts that were few at any time."""
    now = 0.0
    policy = RestartPolicy(max_restarts=2, clock=lambda: now)
    for day in range(30):
        for hour in (0, 12):
            now = day * WINDOW_SECONDS + hour * 3600.0
            assert isinstance(policy.decide(replace(KILLED, committed=True)), float), (day, hour)
    now += 1.0
    assert isinstance(policy.decide(replace(KILLED, committed=True)), str)


def test_restarts_without_a_commit_come_to_an_end() -> None:
    """Also where each attempt waits so long for what never comes that there are few restarts a day."""
    now = 0.0
    waits = replace(FAILED, alive_seconds=WINDOW_SECONDS, error=WorkerError("Timeout: away", transient=True, time=0.0))
    policy = RestartPolicy(max_restarts=3, clock=lambda: now)
    for _ in range(3):
        now += WINDOW_SECONDS
        assert isinstance(policy.decide(waits), float)
    now += WINDOW_SECONDS
    assert policy.decide(waits) == "no restart left (--max-restarts 3 within 24 hours)"


def test_bad_config_is_never_restarted() -> None:
    """Exit status 2 says that the configuration is wrong, which another start would find again."""
    reason = RestartPolicy(max_restarts=5).decide(replace(FAILED, code=2))
    assert reason == "the configuration is wrong (exit status 2); it is not started again"


def test_the_same_exception_again_and_again() -> None:
    """Three ends with it, whatever numbers are in it, and kills between: the group is not started a fourth time."""
    policy = RestartPolicy(max_restarts=100)
    assert policy.decide(raised("KeyError: 'nope' at 0x7f30 of pid 12")) == 0.0
    assert isinstance(policy.decide(KILLED), float)
    assert isinstance(policy.decide(raised("KeyError: 'nope' at 0x7f9c of pid 4711")), float)
    reason = policy.decide(raised("KeyError: 'nope' at 0x1 of pid 7"))
    assert reason == "the same exception 3 times in a row, and no step committed between"


@pytest.mark.parametrize(
    "ends",
    [
        [raised("ValueError: a"), raised("ValueError: b")] * 5,
        [raised("ValueError: a", committed=True)] * 9,
        [raised("ValueError: a", disturbed=True)] * 9,
        [replace(FAILED, error=WorkerError("DistStoreError: a", transient=True, time=0.0))] * 9,
        [FAILED] * 9,
        [KILLED] * 9,
    ],
    ids=["other exceptions", "commits between", "injected", "may go by itself", "no exception", "kills"],
)
def test_no_crash_loop(ends: list[AttemptEnd]) -> None:
    """What is no row of the same exception is left to the number of restarts."""
    policy = RestartPolicy(max_restarts=9)
    assert all(isinstance(policy.decide(end), float) for end in ends[:9])


def test_a_commit_begins_the_row_anew() -> None:
    """Also one of an attempt that ended otherwise; the end after it is the first of the next row."""
    policy = RestartPolicy(max_restarts=100)
    for end in (raised("E: a"), raised("E: a"), replace(KILLED, committed=True), raised("E: a"), raised("E: a")):
        assert isinstance(policy.decide(end), float)
    assert isinstance(policy.decide(raised("E: a")), str)


def exited(replica: int, error: str | None = "KeyError: 'nope'", attempt: int = 0, **fields: Any) -> WorkerExited:
    return build(WorkerExited, replica=replica, attempt=attempt, error=error, log=f"rank-{replica}.log", **fields)


def rounds(*ends: tuple[WorkerExited, int], groups: tuple[int, ...] = (0, 1)) -> list[str]:
    common = CommonEnd()
    return [common.observe_exit(event, step, groups) for event, step in ends]


def test_all_groups_end_alike_twice() -> None:
    """The same exception in all groups at the same step, and again when they are back there, stops the run."""
    again = [(exited(replica, attempt=attempt), 80) for attempt in (0, 1) for replica in (0, 1)]
    *before, reason = rounds(*again)
    assert before == ["", "", ""]
    assert reason == "all groups end with KeyError: 'nope' (after step 80, 2 times; see rank-1.log)"


def test_groups_that_are_gone_do_not_count() -> None:
    """A group that was given up earlier, with another exception, does not hide what the others have in common."""
    gone = (exited(2, "E: its own"), 3)
    again = [(exited(replica, attempt=attempt), 80) for attempt in (0, 1) for replica in (0, 1)]
    assert rounds(gone, *again)[-1]
    assert not any(rounds(gone, *again, groups=(0, 1, 2)))


@pytest.mark.parametrize(
    "ends",
    [
        [(exited(0, attempt=attempt), 80) for attempt in range(9)],
        [(exited(replica, attempt=attempt), attempt) for attempt in range(9) for replica in (0, 1)],
        [(exited(replica, f"E: {'ab'[replica]}", attempt), 80) for attempt in range(9) for replica in (0, 1)],
        [(exited(replica, None, attempt), 80) for attempt in range(9) for replica in (0, 1)],
        [(exited(replica, attempt=attempt, transient=True), 80) for attempt in range(9) for replica in (0, 1)],
        [(exited(replica, attempt=attempt, stopped=True), 80) for attempt in range(9) for replica in (0, 1)],
        [(exited(replica, attempt=attempt, code=FINAL_CODE), 80) for attempt in range(9) for replica in (0, 1)],
    ],
    ids=["one group", "other steps", "other exceptions", "no exception", "may go by itself", "stopped", "final"],
)
def test_no_common_end(ends: list[tuple[WorkerExited, int]]) -> None:
    """What is not the same for all groups twice says nothing about the run."""
    assert not any(rounds(*ends))


def test_the_first_rank_counts() -> None:
    """The end of a group is that of its first rank; others end of that."""
    ends = [
        (exited(replica, error, attempt, rank=rank), 0)
        for attempt in (0, 1)
        for replica in (0, 1)
        for rank, error in enumerate(("E: cause", f"E: lost a peer of group {'ab'[replica]}"))
    ]
    assert [bool(reason) for reason in rounds(*ends)] == [False] * 6 + [True, False]


def test_a_crash_loop_before_any_step_stops_the_run() -> None:
    """Later on the other groups train on; and a group that is out of restarts does not stop them at any time."""
    loop = build(ReplicaGaveUp, replica=1, reason="x; the same exception 3 times in a row", error="E: a", log="a.log")
    assert CommonEnd.observe_loss(loop, any_committed=False) == (
        "replica 1 ends with E: a (x; the same exception 3 times in a row by any group; see a.log)"
    )
    assert not CommonEnd.observe_loss(loop, any_committed=True)
    assert not CommonEnd.observe_loss(build(ReplicaGaveUp, reason="no restart left"), any_committed=False)
