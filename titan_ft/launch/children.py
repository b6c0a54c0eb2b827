# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Start the processes of a launcher, and end exactly those."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from titan_ft.run.orphan import PARENT_PID_ENV

LAST_SECONDS = 2.0
"""Time for an end at once, before SIGKILL."""


@dataclass(frozen=True)
class Child:
    """A process started here."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    needed_by_others: bool = False
    """Ends after all others."""

    @property
    def code(self) -> int | None:
        """Exit status (negative: the signal), or None while it runs."""
        return self.process.poll()

    def write_line(self, line: str, *, more: bool = False) -> None:
        """Write a line to its stdin; close it unless `more` will follow. A child that is gone is noticed elsewhere."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
            if not more:
                self.process.stdin.close()

    def describe_end(self) -> str:
        code = self.code
        assert code is not None, "it still runs"
        how = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
        return f"{self.name} ended ({how})"


class Children:
    """The processes started by one launcher, in the order of their start."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = {**os.environ, **env, PARENT_PID_ENV: str(os.getpid())}
        self._children: list[Child] = []

    def start(self, name: str, command: list[str], log: Path, *, needed_by_others: bool = False) -> Child:
        """Start a process with its output in `log` and a pipe as stdin.

        It gets a session of its own: Ctrl-C in the terminal must reach the launcher only, which ends all in order.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        child = Child(name, process, log, needed_by_others)
        self._children.append(child)
        return child

    def stop(self, grace_seconds: float, *, hurry: Callable[[], bool] = lambda: False) -> None:
        """End all that still run: SIGTERM; after `grace_seconds`, or when `hurry`, a second one ("at once"); SIGKILL.

        What the others need ends after all others. `hurry` is called every few moments while this waits.
        """
        self._end([child for child in self._children if not child.needed_by_others], grace_seconds, hurry)
        self._end([child for child in self._children if child.needed_by_others], LAST_SECONDS, hurry)
        for child in self._children:
            if child.process.stdin is not None and not child.process.stdin.closed:
                with contextlib.suppress(BrokenPipeError):
                    child.process.stdin.close()

    def _end(self, children: list[Child], grace_seconds: float, hurry: Callable[[], bool]) -> None:
        for seconds, may_hurry in ((grace_seconds, True), (LAST_SECONDS, False)):
            for child in children:
                if child.code is None:
                    child.process.terminate()
            deadline = time.monotonic() + seconds
            while any(child.code is None for child in children):
                if time.monotonic() >= deadline or (hurry() and may_hurry):
                    break
                time.sleep(0.02)
        for child in children:
            if child.code is None:
                child.process.kill()
            child.process.wait()
