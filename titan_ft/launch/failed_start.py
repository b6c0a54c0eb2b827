# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Recognize launches that ended before any step (a wrong flag, an early Ctrl-C), and set their
files aside. Such files must not block the next launch in the same folder.
"""

from __future__ import annotations

from pathlib import Path

from titan_ft.run.events import LaunchFinished, LaunchStarted, StepCommitted
from titan_ft.run.paths import RunPaths
from titan_ft.run.tail import EventTail


def is_failed_start(paths: RunPaths) -> bool:
    """True if a run's folder holds only launches that have ended without a step.

    False if a launch has no end event, or if no launch has a start event: the launch, or a run
    without a launcher, may still be running.
    """
    if paths.has_checkpoint():
        return False
    wanted = (LaunchStarted, LaunchFinished, StepCommitted)
    started_pids: set[int] = set()
    finished_pids: set[int] = set()
    for event in EventTail(paths.events, *wanted, from_start=True).poll():
        if isinstance(event, StepCommitted):
            return False
        if isinstance(event, LaunchStarted):
            started_pids.add(event.pid)
        elif isinstance(event, LaunchFinished):
            finished_pids.add(event.pid)
    return bool(started_pids) and started_pids == finished_pids


def set_aside(paths: RunPaths) -> Path:
    """Move events, logs and orders of such launches to a new folder, and return that folder.

    Raises:
        OSError: the folder cannot be written.
    """
    number = 1
    while (paths.root / f"failed-start-{number}").exists():
        number += 1
    folder = paths.root / f"failed-start-{number}"
    folder.mkdir()
    for path in (paths.events, paths.lighthouse_log.parent, paths.chaos_orders.parent):
        if path.exists():
            path.rename(folder / path.name)
    return folder
