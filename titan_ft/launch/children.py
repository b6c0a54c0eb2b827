# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Start the processes of a launcher, and end exactly those."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from titan_ft.launch.orphan import PARENT_PID_ENV


@dataclass(frozen=True)
class Child:
    """A process started here."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def code(self) -> int | None:
        """Exit status (negative: the signal), or None while it runs."""
        return self.process.poll()

    def tell(self, line: str) -> None:
        """Write one line to its stdin and close it; a child that is gone is noticed elsewhere."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.close()
        except BrokenPipeError:
            pass

    def describe_end(self) -> str:
        code = self.code
        if code is None:
            return f"{self.name} runs"
        how = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
        return f"{self.name} ended ({how})"


class Children:
    """The processes started by one launcher, in the order of their start."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = {**os.environ, **env, PARENT_PID_ENV: str(os.getpid())}
        self._children: list[Child] = []

    def start(self, name: str, command: list[str], log: Path) -> Child:
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
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def stop(self, grace_seconds: float, impatient: Callable[[], bool] = lambda: False) -> None:
        """End all that still run: SIGTERM, and SIGKILL after `grace_seconds` or as soon as `impatient` says so.

        The last one started ends first, and the lighthouse, which the others need, after all others.
        """
        for group in (self._children[1:], self._children[:1]):
            running = [child for child in group if child.code is None]
            for child in running:
                child.process.terminate()
            deadline = time.monotonic() + grace_seconds
            while any(child.code is None for child in running):
                if impatient() or time.monotonic() >= deadline:
                    break
                time.sleep(0.02)
            for child in running:
                if child.code is None:
                    child.process.kill()
            for child in running:
                child.process.wait()
        for child in self._children:
            if child.process.stdin is not None and not child.process.stdin.closed:
                child.process.stdin.close()
