# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Launches that ended before any step (a wrong flag, an early Ctrl-C), which must not block the
next launch.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

from titan_ft.run.events import LaunchFinished, LaunchStarted, StepCommitted
from titan_ft.run.paths import RunPaths
from titan_ft.run.tail import EventTail


def is_failed_start(paths: RunPaths) -> bool:
    """True if a run's folder holds only launches that have ended without a step.

    A launch without an end event may still be running, and so may a run without a launcher.
    """
    if paths.has_checkpoint():
        return False
    wanted = (LaunchStarted, LaunchFinished, StepCommitted)
    events = EventTail(paths.events, *wanted, from_start=True).poll()
    started = {event.pid for event in events if isinstance(event, LaunchStarted)}
    finished = {event.pid for event in events if isinstance(event, LaunchFinished)}
    return (
        bool(started)
        and started == finished
        and not any(isinstance(event, StepCommitted) for event in events)
    )


def set_aside(paths: RunPaths) -> Path:
    """Move events, logs and orders of such launches to a new folder in the run's, and return it.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = next(
        path for number in count(1) if not (path := paths.root / f"failed-start-{number}").exists()
    )
    folder.mkdir()
    for path in (paths.events, paths.lighthouse_log.parent, paths.chaos_orders.parent):
        if path.exists():
            path.rename(folder / path.name)
    return folder
