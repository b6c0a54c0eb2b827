# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Write the job's curves of a run that no launcher watches over: `titan-ft curves`."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from titan_ft.config import ConfigError, check_folder
from titan_ft.live.job_curve import FILE_PREFIX, JobCurve
from titan_ft.live.run_status import RunStatus
from titan_ft.run.paths import RunPaths
from titan_ft.run.stop import StopRequests
from titan_ft.run.tail import EventTail

POLL_SECONDS = 1.0


def write_curves(run_dir: Path, folder: Path | None = None) -> int:
    """Write the curves of a run until it is over, or a signal ends it; return 0, or 1 when they cannot be written.

    They are made anew from the run's events: what an earlier call has written goes.

    Raises:
        ConfigError: there is no such run, or its launcher writes them.
    """
    check_folder("RUN_DIR", run_dir)
    paths, status = RunPaths(run_dir), RunStatus()
    folder = folder or paths.job_curve
    tail = EventTail(paths.events, from_start=True)
    events = tail.poll()
    for event in events:
        status.observe(event)
    if status.launched and not status.end and folder.exists():
        raise ConfigError(
            f"--out must be a folder that nobody else writes, got {folder}; the run's launcher does, or did until it "
            "was killed: give another one"
        )
    for old in folder.glob(f"{FILE_PREFIX}*"):
        old.unlink()
    failures: list[str] = []
    curve = JobCurve(folder, failures.append)
    stop = StopRequests(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        print(f"curves: tensorboard --logdir {folder.parent}", flush=True)
        if not events:
            print(f"no event in {paths.events} yet: waiting", flush=True)
        while True:
            for event in events:
                curve.observe(event)
            if stop or status.end or failures:
                break
            time.sleep(POLL_SECONDS)
            events = tail.poll()
            for event in events:
                status.observe(event)
    finally:
        curve.close()
        stop.close()
    for line in failures:
        print(f"titan-ft curves: {line}", file=sys.stderr)
    return 1 if failures else 0
