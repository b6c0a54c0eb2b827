# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Keep one replica group running: start its workers, and start them all again when one of them dies.

One process per group (`python -m titan_ft.launch.supervisor`), so that a restart does not pay for this module's imports
again. The group as a whole is what is restarted, because its ranks cannot go on without each other.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from titan_ft.history.events import EventLog
from titan_ft.launch.log_tail import last_error_line
from titan_ft.launch.orphan import PARENT_PID_ENV, exit_with_parent
from titan_ft.launch.restart_policy import CONFIG_ERROR_CODE, RestartPolicy
from titan_ft.launch.run_paths import RunPaths

if TYPE_CHECKING:
    from titan_ft.launch.worker_group import WorkerExit, WorkerGroup

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0
DEFAULT_MODULE = "titan_ft.train"


@dataclass
class GroupSpec:
    """What a supervisor runs."""

    paths: RunPaths
    replica: int
    num_ranks: int
    module: str = DEFAULT_MODULE
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    max_restarts: int = 100
    grace_seconds: float = GRACE_SECONDS


class Supervisor:
    """Run one group until it finishes, may not be restarted any more, or `stop` is asked for."""

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec
        self._stop = False
        self._policy = RestartPolicy(spec.max_restarts)
        self._events = EventLog(spec.paths.supervisor_events(spec.replica, os.getpid()), replica=spec.replica)
        self._group: WorkerGroup | None = None

    def request_stop(self) -> None:
        """Ask `run` to end the workers and return; only sets a flag, so that a signal handler may call it."""
        self._stop = True

    def stopping(self) -> bool:
        return self._stop

    def kill_workers(self) -> None:
        """Kill the workers at once; for the thread that found this process orphaned."""
        self._stop = True
        if self._group is not None:
            self._group.kill()

    def run(self) -> int:
        """Return 0 when the group finished, 2 when its configuration is wrong, else 1."""
        attempt = 0
        try:
            while not self.stopping():
                started = time.monotonic()
                failure = self._run_attempt(attempt)
                if self.stopping():
                    break
                if failure is None:
                    return 0
                decision = self._policy.decide(failure.code, time.monotonic() - started, self._has_committed(attempt))
                if not decision.restart:
                    self._give_up(attempt, failure, decision.reason)
                    return CONFIG_ERROR_CODE if failure.code == CONFIG_ERROR_CODE else 1
                self._pause(decision.delay_seconds)
                if self.stopping():
                    break
                attempt += 1
                self._events.emit("replica_restarted", attempt=attempt, reason=failure.describe())
            return 1
        finally:
            self._events.close()

    def _run_attempt(self, attempt: int) -> WorkerExit | None:
        """Run the group once; return the first worker that failed, None when all finished or a stop was asked for."""
        from titan_ft.launch.worker_group import WorkerGroup

        spec = self.spec
        logs = {rank: spec.paths.logs(spec.replica, attempt, rank) for rank in range(spec.num_ranks)}
        env = {**spec.env, "TITAN_FT_ATTEMPT": str(attempt), PARENT_PID_ENV: str(os.getpid())}
        group = self._group = WorkerGroup(spec.module, spec.args, env, logs, attempt, spec.max_restarts)
        first: WorkerExit | None = None
        told: set[int] = set()
        try:
            exits = self._wait_for_end(group)
            first = root_failure(exits)
            # Before the others are ended, which may take the grace time: the event's time is that of the failure.
            for exit in sorted(exits, key=lambda exit: exit is not first):
                self._emit_exit(attempt, exit, exit.describe())
                told.add(exit.rank)
        finally:
            final = group.end(spec.grace_seconds)
            self._group = None
        for exit in final:
            if exit.rank not in told:
                cause = first.describe() if first else "the run was stopped"
                self._emit_exit(attempt, exit, f"stopped because {cause}", stopped=True)
        return first

    def _wait_for_end(self, group: WorkerGroup) -> list[WorkerExit]:
        """Wait until all finished, one failed, or a stop was asked for; return those that ended by themselves."""
        while True:
            exits = group.exits()
            if self.stopping() or len(exits) == group.num_ranks or any(exit.failed for exit in exits):
                return exits
            time.sleep(POLL_SECONDS)

    def _emit_exit(self, attempt: int, exit: WorkerExit, reason: str, stopped: bool = False) -> None:
        ending = {"code": exit.code} if exit.code >= 0 else {"signal": signal.Signals(-exit.code).name}
        fields = {"worker_pid": exit.pid, "reason": reason, "stopped": stopped, **ending}
        self._events.emit("worker_exited", rank=exit.rank, attempt=attempt, **fields)

    def _has_committed(self, attempt: int) -> bool:
        """Tell whether the group committed a step in this attempt."""
        files = self.spec.paths.attempt_events(self.spec.replica, attempt)
        return any(b'"step_committed"' in path.read_bytes() for path in files)

    def _give_up(self, attempt: int, failure: WorkerExit, why: str) -> None:
        log = self.spec.paths.logs(self.spec.replica, attempt, failure.rank)
        line = last_error_line(log)
        fields = {"reason": f"{failure.describe()}; {why}", "log": str(log), "error": line}
        self._events.emit("replica_gave_up", attempt=attempt, rank=failure.rank, **fields)
        print(f"replica {self.spec.replica}: {failure.describe()}; {why}; {log}: {line}", file=sys.stderr, flush=True)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.stopping() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def root_failure(exits: list[WorkerExit]) -> WorkerExit | None:
    """Return the worker whose end most likely caused the others', among those found ended at the same look.

    A rank that was killed brings its peers down with a connection error before the next look, not the other way round.
    """
    failed = [exit for exit in exits if exit.failed]
    return min(failed, key=lambda exit: (exit.code != CONFIG_ERROR_CODE, exit.code > 0, exit.rank), default=None)


def visible_devices(replica: int, num_ranks: int, devices: list[str]) -> list[str] | None:
    """Choose the GPUs of a group among those of the host; groups share them in turn when there are too few.

    Returns None (leave the choice to the workers) when the host has fewer than one for each rank of a group.
    """
    if num_ranks > len(devices):
        return None
    return [devices[(replica * num_ranks + rank) % len(devices)] for rank in range(num_ranks)]


def worker_env(replica: int, num_ranks: int, lighthouse: str) -> dict[str, str]:
    """Return what the environment of all workers of a group holds, whatever the attempt."""
    import torch

    env = {"TORCHFT_LIGHTHOUSE": lighthouse}
    for name, value in (("OMP_NUM_THREADS", "1"), ("PYTHONUNBUFFERED", "1"), ("RUST_LOG", "warn")):
        env[name] = os.environ.get(name, value)
    known = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = [name for name in known.split(",") if name] if known is not None else None
    devices = listed if listed is not None else [str(index) for index in range(torch.cuda.device_count())]
    chosen = visible_devices(replica, num_ranks, devices)
    if chosen is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    return env


def main(argv: list[str] | None = None) -> int:
    """Supervise the group that the command line describes."""
    parser = argparse.ArgumentParser(prog="python -m titan_ft.launch.supervisor", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--max-restarts", type=int, default=100)
    parser.add_argument("--module", default=DEFAULT_MODULE)
    parser.add_argument("--lighthouse", default="", help="its address; if left out, read as one line from stdin")
    parser.add_argument("worker_args", nargs="*", help="command line of the workers, after --")
    options = parser.parse_args(argv)

    started: list[Supervisor] = []

    def kill_workers() -> None:
        for supervisor in started:
            supervisor.kill_workers()

    exit_with_parent(before_exit=kill_workers)
    # Imported here, while the lighthouse starts, and before its address is waited for.
    import titan_ft.launch.worker_group  # noqa: F401

    lighthouse = options.lighthouse or sys.stdin.readline().strip()
    if not lighthouse:
        return 1  # the launcher ended before the lighthouse was there
    spec = GroupSpec(
        paths=RunPaths(options.run_dir),
        replica=options.replica,
        num_ranks=options.ranks,
        module=options.module,
        args=options.worker_args,
        env=worker_env(options.replica, options.ranks, lighthouse),
        max_restarts=options.max_restarts,
    )
    supervisor = Supervisor(spec)
    started.append(supervisor)

    def request_stop(signum: int, frame: FrameType | None) -> None:
        supervisor.request_stop()

    # torch would install handlers that raise in the middle of whatever runs; SIGQUIT is one nobody sends here.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, request_stop)
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
