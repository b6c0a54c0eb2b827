# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Start the processes of one job, follow its events, disturb it, and end exactly the started
processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import tomli_w

from benchmarks.systems import NUM_GROUPS, PEER, PEER_MODULE, Command, Job, commands
from benchmarks.tries import translate
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.events import Event, FaultInjected, Target
from titan_ft.run.log import EventLog
from titan_ft.run.paths import RunPaths
from titan_ft.run.tail import EventTail, last_error_line
from titan_ft.run.workers import latest_workers
from titan_ft.system.process import is_running_worker

T = TypeVar("T")
POLL_SECONDS = 0.2
LOOK_SECONDS = 0.5
"""Each look at the events takes time from the steps where all share their cores."""
STOP_SECONDS = 15.0
RETURN_SECONDS = 240.0
"""More than the start of a group takes."""
SURVIVOR, VICTIM = 0, 1
"""The groups that see, and that get, what is done to a job of two."""


class BenchError(RuntimeError):
    """A run did not do what was to be measured."""


class TooLateError(BenchError):
    """Something did not happen in time, in a run that goes on."""


def progress(line: str) -> None:
    """Say how far the benchmark is, on stderr: stdout is for the tables."""
    print(line, file=sys.stderr, flush=True)


class Run:
    """The processes of one job; a context manager that ends them.

    Args:
        config: the config of the system, as `derive_config` returns it.
    """

    def __init__(self, job: Job, config: Mapping[str, Any]) -> None:
        self.job, self.paths = job, RunPaths(job.run_dir)
        job.run_dir.mkdir(parents=True)
        self.paths.config.write_text(tomli_w.dumps(config), encoding="utf-8")
        self._started: list[tuple[Command, subprocess.Popen[bytes]]] = []
        self._tail, self._events = EventTail(self.paths.events, from_start=True), list[Event]()
        self._faults: EventLog | None = None
        self._num_faults = 0

    def __enter__(self) -> Run:
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
        # Quiet servers and one thread per rank for all systems alike: torchft's log of each
        # heartbeat costs time.
        env = {**os.environ, "PYTHONPATH": path, "RUST_LOG": "warn", "OMP_NUM_THREADS": "1"}
        for command in commands(self.job):
            with self._log(command).open("wb") as output:
                process = subprocess.Popen(
                    command.args,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**env, **command.env},
                    start_new_session=True,
                )
            self._started.append((command, process))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for _, process in reversed(self._started):
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for _, process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                # Workers end by themselves once their parent is gone.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if self._faults is not None:
            self._faults.close()

    @property
    def pids(self) -> list[int]:
        """Return the pids of the processes that were started, services too."""
        return [process.pid for _, process in self._started]

    def _log(self, command: Command) -> Path:
        return self.job.run_dir / f"{command.name}.log"

    def is_running(self) -> bool:
        """Tell whether a training process still runs.

        Raises:
            BenchError: a process ended that should not have.
        """
        for command, process in self._started:
            code = process.poll()
            if code or (code is not None and command.service):
                line = last_error_line(self._log(command))
                raise BenchError(self._say(f"{command.name} ended with status {code}; {line}"))
        return any(
            process.poll() is None for command, process in self._started if not command.service
        )

    def wait(self, timeout_seconds: float, look: Callable[[], object] = lambda: None) -> None:
        """Wait until the training processes have finished.

        Args:
            look: called meanwhile, each `LOOK_SECONDS`.

        Raises:
            BenchError: one failed, or the time is over.
        """
        deadline = time.monotonic() + timeout_seconds
        while self.is_running():
            if time.monotonic() > deadline:
                raise TooLateError(self._say(f"did not finish within {timeout_seconds:g} s"))
            look()
            time.sleep(LOOK_SECONDS)

    def sleep(self, seconds: float) -> None:
        """Sleep while the job runs.

        Raises:
            BenchError: it ended.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not self.is_running():
                raise BenchError(self._say("all groups ended by themselves"))
            time.sleep(min(POLL_SECONDS, left))

    def record(self) -> RunRecord:
        """Return the record of the run so far; of a peer, translated."""
        self._events = sorted([*self._events, *self._tail.poll()], key=lambda event: event.time)
        return RunRecord(translate(self._events))

    def wait_for(
        self,
        look: Callable[[RunRecord], T | None],
        what: str,
        timeout_seconds: float = RETURN_SECONDS,
    ) -> T:
        """Call `look` with the record until it returns a value, and return that value.

        Raises:
            TooLateError: `look` returned none in time.
            BenchError: the job ended.
        """
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if (found := look(self.record())) is not None:
                return found
            self.sleep(LOOK_SECONDS)
        raise TooLateError(self._say(f"no {what} within {timeout_seconds:g} s"))

    def wait_trained(self, num_steps: int, since: float = 0.0) -> RunRecord:
        """Wait until all of two groups together have made some steps since a moment; return the
        record.
        """

        def look(record: RunRecord) -> RunRecord | None:
            made = [
                e
                for e in record.commits
                if e.replica == SURVIVOR and len(e.participants) == NUM_GROUPS
            ]
            return record if sum(event.time > since for event in made) >= num_steps else None

        return self.wait_for(look, f"{num_steps} steps of all groups")

    def workers(self, replica: int) -> list[int]:
        """Return the pids of a group's workers that still run; a pid that is another program's by
        now is not.
        """
        mark = PEER_MODULE if self.job.system == PEER else "titan_ft"
        return [
            pid
            for pid in latest_workers(self.record().events, replica)
            if is_running_worker(pid, mark)
        ]

    def inject(
        self, fault: str, target: Target, pids: Iterable[int], signum: signal.Signals
    ) -> FaultInjected:
        """Signal some processes, and write the event of this fault, as for any other fault."""
        if self._faults is None:
            self._faults = EventLog(self.paths.events_file(f"bench-{os.getpid()}"))
        event = FaultInjected(fault=fault, target=target, seed=None, shot=self._num_faults)
        self._num_faults += 1
        self._faults.emit(event)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        return event

    def kill(self, replica: int) -> FaultInjected:
        """SIGKILL all workers of a group."""
        return self.inject("sigkill_group", Target(replica), self.workers(replica), signal.SIGKILL)

    def _say(self, what: str) -> str:
        return f"{self.job.system}: {what}; logs in {self.job.run_dir}"
