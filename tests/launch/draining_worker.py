# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Stand in for a worker that leaves in order at SIGTERM: the fake worker, which prints a
last line.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import fake_worker

from titan_ft.run.events import Drained
from titan_ft.run.log import EventLog
from titan_ft.run.marks import announce_left
from titan_ft.run.paths import RunPaths


def leave(signum: int, frame: FrameType | None) -> None:
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TITAN_FT_ATTEMPT"])
    replica = int(fake_worker.flag("fault_tolerance.replica_id"))
    path = RunPaths(fake_worker.flag("job.dump_folder")).worker_events(
        replica, rank, attempt, os.getpid()
    )
    log = EventLog(path, replica=replica, rank=rank, attempt=attempt)
    announce_left(log, Drained(step=12, reason="SIGTERM", in_order=True))
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    fake_worker.main()
