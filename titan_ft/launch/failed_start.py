# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A launch that ended before any step (a wrong flag, Ctrl-C at the start) must not keep the next one out of its run."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from titan_ft.run.events import LaunchFinished, LaunchStarted, StepCommitted
from titan_ft.run.paths import RunPaths
from titan_ft.run.tail import EventTail


def is_failed_start(paths: RunPaths) -> bool:
    """Tell whether all that a folder holds of a run are launches that are over and have not made a step.

    One that does not say that it is over may be going on, and so may one that no launcher started.
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
    """Move events, logs and orders of such launches to a folder of their own in the run's, and return it.

    Raises:
        OSError: it cannot be written.
    """
    folder = next(
        path for number in count(1) if not (path := paths.root / f"failed-start-{number}").exists()
    )
    folder.mkdir()
    for path in (paths.events, paths.lighthouse_log.parent, paths.chaos_orders.parent):
        if path.exists():
            path.rename(folder / path.name)
    return folder
