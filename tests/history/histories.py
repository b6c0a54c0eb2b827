# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Short histories of two groups, with times that a reader can add up."""

from __future__ import annotations

from typing import Any

from tests.event_builder import event as make
from titan_ft.run.events import Event


def say(time: float, event: str, replica: int | None = None, **fields: Any) -> Any:
    """Return an event of a group's rank 0, or of the launcher."""
    context = {} if replica is None else {"replica": replica, "rank": 0, "attempt": 0}
    return make(event, time=1e9 + time, **context | fields)


def fault(time: float, name: str, replica: int | None = None, **fields: Any) -> Any:
    target = {"lighthouse": True} if replica is None else {"replica": replica}
    return say(time, "fault_injected", fault=name, target=target, seed=1, **fields)


def commit(time: float, step: int, replica: int, **fields: Any) -> Any:
    """Return a commit of two groups that computed two microbatches each."""
    usual = {
        "participants": [0, 1],
        "lineage": f"{step:012x}",
        "parent": f"{step - 1:012x}",
        "tokens": 1000,
        "seconds": 1.0,
        "compute_seconds": 0.7,
        "exchange_seconds": 0.2,
        "apply_seconds": 0.1,
        "exchanges": 1,
        "forward_passes": 2,
    }
    return say(time, "step_committed", replica, step=step, **(usual | fields))


def calm_run(steps: int = 10) -> list[Event]:
    """Return a run of two groups that start in 10 s and make a step a second."""
    events = [say(0.0, "launch_started", replicas=2)]
    for replica in (0, 1):
        events.append(
            say(
                9.0, "joined", replica, participants=[0, 1], quorum_seconds=0.0, rebuild_seconds=0.0
            )
        )
        events += [commit(9.0 + step, step, replica) for step in range(1, steps + 1)]
        events.append(say(9.0 + steps, "training_finished", replica, step=steps))
    return [*events, say(9.0 + steps + 1.0, "launch_finished", code=0)]


def killed_run() -> list[Event]:
    """Make a run in which group 1 is killed at 12.5 s, after step 3, and contributes again to step
    8 of 10.

    Step 4 comes 3 s after step 3, with a second exchange; the other steps each a second after the
    previous one.
    """
    events = [say(0.0, "launch_started", replicas=2)]
    for replica in (0, 1):
        events.append(
            say(
                9.0, "joined", replica, participants=[0, 1], quorum_seconds=0.0, rebuild_seconds=0.0
            )
        )
        events += [commit(9.0 + step, step, replica) for step in (1, 2, 3)]
    events += [
        fault(12.5, "kill_group", 1, shot=0),
        say(12.6, "worker_exited", 1, signal="SIGKILL", stopped=False),
        say(12.7, "replica_restarted", 1, attempt=1),
        say(13.0, "exchange_failed", 0, error="closed", seconds=0.3, step=3),
        commit(15.0, 4, 0, participants=[0], exchanges=2, seconds=3.0, exchange_seconds=2.2),
    ]
    events += [commit(11.0 + step, step, 0, participants=[0]) for step in (5, 6, 7)]
    events += [
        say(16.0, "heal_started", 1, donor=0, from_step=5, step=5, attempt=1),
        say(
            18.0,
            "heal_finished",
            1,
            donor=0,
            from_step=5,
            step=7,
            bytes=9,
            seconds=2.0,
            replayed=2,
            attempt=1,
        ),
    ]
    for step in (8, 9, 10):
        events += [commit(11.0 + step, step, 0), commit(11.0 + step, step, 1, attempt=1)]
    return events
