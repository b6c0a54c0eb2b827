# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Write the job's curves of a run without a launcher: `titan-ft curves`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from titan_ft.config import ConfigError, check_folder, unwritable_folder_error
from titan_ft.history.record.kept import follow
from titan_ft.live.job_curve import JobCurve
from titan_ft.live.run_status import RunStatus
from titan_ft.run.appender import FINISH_SECONDS, retry_waiting
from titan_ft.run.curve_file import FILE_PREFIX
from titan_ft.run.paths import RunPaths
from titan_ft.system.ownership import make_folder
from titan_ft.system.stop import StopRequests
from titan_ft.system.whole_file import write_whole

POLL_SECONDS = 1.0
_LEAST_BYTES = 8192
"""Free space without which the command is refused; enough for a few points."""


def write_curves(run_dir: Path, folder: Path | None = None) -> int:
    """Write the curves of a run until it is over, or until a signal.

    The curves are made anew from the run's events, and replace the files of an earlier call. If the
    disk is full, the writer waits for room.

    Returns:
        0; 1 if points were lost; after a signal 128 plus its number.

    Raises:
        ConfigError: there is no such run, the launcher writes its curves, or the folder cannot be
            written.
    """
    check_folder("RUN_DIR", run_dir)
    paths, status = RunPaths(run_dir), RunStatus()
    folder = folder or paths.job_curve
    events, tail = follow(paths.events)
    for event in events:
        status.observe(event)
    if status.fold.launched and not status.end and folder.exists():
        raise ConfigError(
            f"--out must be a folder that nobody else writes, got {folder}; the run's launcher "
            "does, or did until it was killed: give another one"
        )
    try:
        _clear(folder)
    except OSError as error:
        raise unwritable_folder_error("--out", folder, error) from error
    curve = JobCurve(folder, _report)
    stop = StopRequests(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        print(f"curves: tensorboard --logdir {folder.parent}", flush=True)
        if not events:
            print(f"no event in {paths.events} yet: waiting", flush=True)
        while True:
            for event in events:
                curve.observe(event)
            if stop or status.end:
                break
            retry_waiting()
            time.sleep(POLL_SECONDS)
            events = tail.poll()
            for event in events:
                status.observe(event)
    finally:
        num_lost = curve.close(FINISH_SECONDS)
        stop.close()
    return 1 if num_lost else stop.status


def _clear(folder: Path) -> None:
    """Remove the files of an earlier call, and check that there is room for a few points.

    Raises:
        OSError: the folder cannot be written.
    """
    make_folder(folder)
    for old in folder.glob(f"{FILE_PREFIX}*"):
        old.unlink()
    probe = folder / f".room-{os.getpid()}"
    write_whole(probe, bytes(_LEAST_BYTES))
    probe.unlink()


def _report(line: str) -> None:
    print(f"titan-ft curves: {line}", file=sys.stderr, flush=True)
