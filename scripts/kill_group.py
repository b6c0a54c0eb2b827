# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause

"""SIGKILL every worker of one replica group once it has committed a step, and record the fault in
the run's events.

Exit status: 0 killed, 1 the step was not reached in time or no worker of the group was alive, 2 bad
usage.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from titan_ft.run.events import Event, FaultInjected, StepCommitted, Target
from titan_ft.run.log import EventLog, read_events
from titan_ft.run.workers import latest_workers
from titan_ft.system.process import is_running_worker

POLL_SECONDS = 0.1


def has_committed(events: Iterable[Event], replica: int, step: int) -> bool:
    """Tell whether the group has committed `step` or a later one."""
    return any(
        isinstance(event, StepCommitted) and event.replica == replica and event.step >= step
        for event in events
    )


def kill_group(run_dir: Path, replica: int, at_step: int, timeout_seconds: float) -> str | None:
    """Wait for the step, then kill. Return what went wrong, or None."""
    events_folder = run_dir / "events"
    deadline = time.monotonic() + timeout_seconds
    while not has_committed(
        events := read_events(events_folder) if events_folder.is_dir() else [], replica, at_step
    ):
        if time.monotonic() > deadline:
            return f"group {replica} did not commit step {at_step} within {timeout_seconds:g} s"
        time.sleep(POLL_SECONDS)

    workers = [pid for pid in latest_workers(events, replica) if is_running_worker(pid)]
    if not workers:
        return f"group {replica} has no live worker on this host"
    log = EventLog(events_folder / f"kill-group-{os.getpid()}.jsonl")
    log.emit(FaultInjected(fault="kill_group", target=Target(replica), seed=None))
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    log.close()
    print(
        f"kill_group.py: SIGKILL to group {replica} (pids {', '.join(map(str, workers))})",
        flush=True,
    )
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, help="the folder of the running job")
    parser.add_argument("--replica", type=int, required=True, help="the group to kill")
    parser.add_argument(
        "--at-step", type=int, default=0, help="wait until the group has committed this step"
    )
    parser.add_argument(
        "--timeout-seconds", type=float, default=300.0, help="give up after this time"
    )
    args = parser.parse_args()
    problem = kill_group(args.run_dir, args.replica, args.at_step, args.timeout_seconds)
    if problem is not None:
        print(f"kill_group.py: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
