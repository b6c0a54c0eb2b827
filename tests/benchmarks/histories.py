# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Short histories of two groups, of which the second one is disturbed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.event_builder import build
from titan_ft.run.events import (
    Event,
    FaultInjected,
    StepCommitted,
    Target,
    WorkerExited,
    WorkerStarted,
)


def commit(time: float, step: int, replica: int = 0, **fields: Any) -> Event:
    data = {"slot": replica, "first_batch": step, "num_batches": 1}
    usual = {"participants": [0, 1], "exchanges": 1, "forward_passes": 1, "data": data}
    return build(StepCommitted, time=time, step=step, replica=replica, **{**usual, **fields})


def commits(
    times: Iterable[float], replica: int = 0, first_step: int = 1, **fields: Any
) -> list[Event]:
    """Make the commits of a group, one after the other."""
    return [
        commit(time, step, replica, **fields) for step, time in enumerate(times, start=first_step)
    ]


def killed(
    time: float, attempt: int = 0, shot: int = 0, exited: float | None = None
) -> list[Event]:
    """Make the events of a SIGKILL of group 1, with its agent's report."""
    end: dict[str, Any] = {"signal": "SIGKILL", "replica": 1, "attempt": attempt}
    return [
        build(FaultInjected, time=time, fault="sigkill_group", target=Target(1), shot=shot),
        build(WorkerExited, time=exited or time + 0.1, **end),
    ]


def started(time: float, replica: int = 1, attempt: int = 0, rank: int = 0, pid: int = 1) -> Event:
    return build(WorkerStarted, time=time, replica=replica, attempt=attempt, rank=rank, pid=pid)


def in_order(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.time)
