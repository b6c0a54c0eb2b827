# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Stand in for `titan_ft.train`: announce itself, then follow orders from files.

In $FAKE_WORKERS it writes `<replica>-<rank>-<attempt>.json` (pid, environment, command line). Then
it waits for the file `<replica>-<rank>-<attempt>.do`, or `<replica>-any-any.do`, with one of these
orders: "exit CODE", "ignore" (from now on SIGTERM only makes a file
`<replica>-<rank>-<attempt>.told`), "step N", "drain" (finish when SIGTERM comes) or "raise". The
worker removes the file when the order is carried out, except for "any".
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from titan_ft.run.events import StepCommitted, WorkerStarted
from titan_ft.run.log import EventLog
from titan_ft.run.orphan import exit_with_parent
from titan_ft.run.output import protect_output
from titan_ft.run.paths import RunPaths


def flag(name: str) -> str:
    return next(arg.split("=", 1)[1] for arg in sys.argv if arg.startswith(f"--{name}="))


def main() -> None:
    protect_output()
    exit_with_parent(poll_seconds=0.1)
    folder = Path(os.environ["FAKE_WORKERS"])
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TITAN_FT_ATTEMPT"])
    replica = int(flag("fault_tolerance.replica_id"))
    paths = RunPaths(flag("job.dump_folder"))
    log = EventLog(
        paths.worker_events(replica, rank, attempt, os.getpid()),
        replica=replica,
        rank=rank,
        attempt=attempt,
    )
    log.emit(WorkerStarted(config_digest="", host=socket.gethostname(), slurm=None))
    # As a data loader's process would be: it dies with its worker's group.
    helper = subprocess.Popen(["sleep", "600"])
    me = f"{replica}-{rank}-{attempt}"
    about = {
        "pid": os.getpid(),
        "helper": helper.pid,
        "env": dict(os.environ),
        "argv": sys.argv[1:],
    }
    about |= {"parent": os.getppid(), "command": Path("/proc/self/cmdline").read_text().split("\0")}
    (folder / f"{me}.tmp").write_text(json.dumps(about))
    (folder / f"{me}.tmp").rename(folder / f"{me}.json")
    print("out", me, flush=True)
    print("err", me, file=sys.stderr)
    while True:
        for order in (folder / f"{me}.do", folder / f"{replica}-any-any.do"):
            if order.exists():
                obey(order.read_text().split(), log, replica, folder / f"{me}.told")
                if "any" not in order.name:
                    order.unlink()
        time.sleep(0.02)


def finish(signum: int, frame: object) -> None:
    sys.exit(0)


def obey(words: list[str], log: EventLog, replica: int, told: Path) -> None:
    match words:
        case ["exit", code]:
            print(f"leaving with {code}", file=sys.stderr)
            sys.exit(int(code))
        case ["raise"]:
            raise RuntimeError("told to fail")
        case ["ignore"]:
            signal.signal(signal.SIGTERM, lambda signum, frame: told.touch())
        case ["drain"]:
            signal.signal(signal.SIGTERM, finish)
        case ["step", number]:
            log.emit(committed(int(number)))


def committed(step: int) -> StepCommitted:
    """Return a step of two groups of which only the loss and the own part matter."""
    return StepCommitted(
        step=step,
        lineage=f"{step:012x}",
        parent=f"{step - 1:012x}",
        participants=[0, 1],
        tokens=2,
        loss=3.25,
        own_tokens=1,
        own_loss=3.25,
        grad_norm=1.0,
        lr=1e-3,
        seconds=0.1,
        exchanges=1,
        exchange_seconds=0.0,
        compute_seconds=0.1,
        apply_seconds=0.0,
        forward_passes=1,
        data=None,
        extra_data=[],
        batches={},
    )


if __name__ == "__main__":
    main()
