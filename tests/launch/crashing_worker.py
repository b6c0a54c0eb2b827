# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A worker of `titan_ft.train`'s entry that runs the code in $CRASH in place of training.

The code is Python, with the names `replica`, `rank`, `attempt`, `paths`, `commit` (a function of a
step), `inject` (of an event) and `mark_training`. An exception of the code ends the worker as any
exception in training would. Without one the worker waits.
"""

from __future__ import annotations

import builtins
import os
import time
from collections.abc import Mapping
from pathlib import Path

from fake_worker import committed

from titan_ft import train
from titan_ft.config import read_flags
from titan_ft.run.events import WorkerStarted
from titan_ft.run.log import EventLog
from titan_ft.run.marks import mark_training
from titan_ft.run.paths import RunPaths


def crash(args: list[str], environ: Mapping[str, str]) -> int:
    flags = dict(read_flags(args))
    replica, rank = int(flags["fault_tolerance.replica_id"]), int(environ["RANK"])
    attempt = int(environ.get("TITAN_FT_ATTEMPT") or environ["TORCHELASTIC_RESTART_COUNT"])
    paths = RunPaths(Path(flags["job.dump_folder"]))
    events = EventLog(
        paths.worker_events(replica, rank, attempt, os.getpid()),
        replica=replica,
        rank=rank,
        attempt=attempt,
    )
    events.emit(WorkerStarted(config_digest="", host="", slurm=None))

    def commit(step: int) -> None:
        events.emit(committed(step))

    names = {"replica": replica, "rank": rank, "attempt": attempt, "paths": paths}
    names |= {"commit": commit, "inject": events.emit, "mark_training": mark_training}
    exec(environ["CRASH"], {**vars(builtins), **names})
    time.sleep(600)
    return 0


train._run = crash  # type: ignore[assignment]

if __name__ == "__main__":
    train.main()
