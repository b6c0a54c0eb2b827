# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Restart decisions."""

from __future__ import annotations

from titan_ft.launch.restart_policy import RestartPolicy, backoff_seconds


def test_backoff_starts_at_once_and_is_capped() -> None:
    """The first restart waits for nothing, the next ones for twice as long each, up to a cap."""
    assert [backoff_seconds(streak) for streak in range(8)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert backoff_seconds(10_000) == 10.0


def test_backoff_grows_in_a_crash_loop() -> None:
    """A group that dies young each time waits longer and longer."""
    policy = RestartPolicy(max_restarts=10)
    delays = [policy.decide(1, alive_seconds=5.0, committed=False) for _ in range(4)]
    assert delays == [0.0, 0.5, 1.0, 2.0]


def test_backoff_is_reset_by_health() -> None:
    """A group that committed a step, or lived long, is restarted at once when it dies."""
    policy = RestartPolicy(max_restarts=10)
    for _ in range(3):
        policy.decide(1, alive_seconds=5.0, committed=False)
    assert policy.decide(-9, alive_seconds=5.0, committed=True) == 0.0
    assert policy.decide(-9, alive_seconds=5.0, committed=False) == 0.5
    assert policy.decide(-9, alive_seconds=61.0, committed=False) == 0.0


def test_restarts_are_limited() -> None:
    """After max_restarts, healthy or not, the group has failed."""
    policy = RestartPolicy(max_restarts=2)
    decisions = [policy.decide(-9, alive_seconds=100.0, committed=True) for _ in range(3)]
    assert decisions == [0.0, 0.0, "no restart left (--max-restarts 2)"]


def test_bad_config_is_never_restarted() -> None:
    """Exit status 2 says that the configuration is wrong, which another start would find again."""
    reason = RestartPolicy(max_restarts=5).decide(2, alive_seconds=1.0, committed=False)
    assert reason == "the configuration is wrong (exit status 2); it is not started again"
