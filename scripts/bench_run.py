# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Start the processes of one run of the benchmark, and end exactly those."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import tomli_w
from bench_systems import RANKS_PER_GROUP, Command, commands

import titan_ft
from titan_ft.run.tail import last_error_line

POLL_SECONDS = 0.2
STOP_SECONDS = 15.0
MAX_RESTARTS = 100


class BenchError(RuntimeError):
    """A run did not do what was to be measured."""


class Run:
    """The processes of one system in one folder; a context manager that ends them.

    Args:
        config: what the system reads, as `derive_config` returns it.
        max_restarts: how often a group is started again; 0 where a restart would spoil the figures.
        num_ranks: of each group.
        flags: further ones for `titan-ft launch`.
    """

    def __init__(
        self,
        system: str,
        run_dir: Path,
        config: Mapping[str, Any],
        max_restarts: int = 0,
        num_ranks: int = RANKS_PER_GROUP,
        flags: Sequence[str] = (),
    ) -> None:
        self.system, self.run_dir = system, run_dir
        self._commands = partial(commands, system, run_dir, max_restarts, num_ranks, flags)
        run_dir.mkdir(parents=True)
        (run_dir / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
        self._started: list[tuple[Command, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Run:
        root = str(Path(titan_ft.__file__).parents[1])
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
        # Quiet servers and one thread per rank for all systems alike: torchft's log of each heartbeat costs time.
        env = {**os.environ, "PYTHONPATH": path, "RUST_LOG": "warn", "OMP_NUM_THREADS": "1"}
        for command in self._commands():
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

    @property
    def pid(self) -> int:
        """Return the pid of what was started first; of ours, the launcher."""
        return self._started[0][1].pid

    def _log(self, command: Command) -> Path:
        return self.run_dir / f"{command.name}.log"

    def wait(self, timeout_seconds: float) -> None:
        """Wait until the training processes have finished.

        Raises:
            BenchError: one failed, or the time is over.
        """
        deadline = time.monotonic() + timeout_seconds
        while self.is_running():
            if time.monotonic() > deadline:
                raise BenchError(f"{self.system} did not finish within {timeout_seconds:g} s; logs in {self.run_dir}")
            time.sleep(POLL_SECONDS)

    def is_running(self) -> bool:
        """Tell whether a training process still runs.

        Raises:
            BenchError: a process ended that should not have.
        """
        for command, process in self._started:
            code = process.poll()
            if code or (code is not None and command.service):
                line = last_error_line(self._log(command))
                raise BenchError(
                    f"{self.system}: {command.name} ended with status {code}; logs in {self.run_dir}; {line}"
                )
        return any(process.poll() is None for command, process in self._started if not command.service)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, process in reversed(self._started):
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for _, process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # workers end by themselves once their parent is gone
                process.wait()
