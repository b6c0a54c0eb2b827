# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Which workers a group has, by its events."""

from __future__ import annotations

from tests.event_builder import build
from titan_ft.run.events import StepCommitted, WorkerStarted
from titan_ft.run.workers import latest_attempts, latest_workers


def test_the_workers_are_those_of_the_latest_attempt() -> None:
    """For each group by itself; other events of workers do not count."""
    started = [(0, 0, 5), (1, 0, 6), (0, 1, 9), (0, 1, 7), (0, 0, 8)]
    events = [
        build(WorkerStarted, replica=replica, attempt=attempt, pid=pid)
        for replica, attempt, pid in started
    ]
    events.append(build(StepCommitted, replica=0, attempt=2, pid=10))
    assert latest_attempts(events) == {0: 1, 1: 0}
    assert [latest_workers(events, replica) for replica in (0, 1, 2)] == [[7, 9], [6], []]
