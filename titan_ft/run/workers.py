# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Which worker processes a group has, as the events of its run tell."""

from __future__ import annotations

from collections.abc import Iterable

from titan_ft.run.events import Event, WorkerStarted


def latest_attempts(events: Iterable[Event]) -> dict[int, int]:
    """Return the number of each group's latest attempt."""
    latest: dict[int, int] = {}
    for event in events:
        if isinstance(event, WorkerStarted):
            latest[event.replica] = max(event.attempt, latest.get(event.replica, 0))
    return latest


def latest_workers(events: Iterable[Event], replica: int) -> list[int]:
    """Return the pids of the workers that a group's latest attempt started; some may have ended
    since."""
    started = [
        event for event in events if isinstance(event, WorkerStarted) and event.replica == replica
    ]
    attempt = max((event.attempt for event in started), default=0)
    return sorted({event.pid for event in started if event.attempt == attempt})
