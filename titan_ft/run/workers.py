# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The worker processes of a group, from the events of its run."""

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
    """Return the pids of the workers of a group's latest attempt. Some may have ended since."""
    pids: dict[int, set[int]] = {}  # by attempt
    for event in events:
        if isinstance(event, WorkerStarted) and event.replica == replica:
            pids.setdefault(event.attempt, set()).add(event.pid)
    if not pids:
        return []
    return sorted(pids[max(pids)])
