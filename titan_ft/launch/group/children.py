# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Start the processes of a launcher, and end exactly those.

They are the zygote, the lighthouse, the agents of the groups, and the process that reduces events.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from titan_ft.launch.group.forks import ForkedProcess
from titan_ft.launch.group.worker_group import open_log
from titan_ft.run.orphan import PARENT_PID_ENV

LAST_SECONDS = 2.0
"""Time between the second SIGTERM, which asks for an end at once, and SIGKILL."""


ChildProcess: TypeAlias = subprocess.Popen[bytes] | ForkedProcess


@dataclass(frozen=True)
class Child:
    """A process that the launcher started, or that the zygote started for it."""

    name: str
    process: ChildProcess
    log: Path
    needed_by_others: bool = False
    """Whether the process must be ended after all others."""

    @property
    def code(self) -> int | None:
        """Exit status (negative: the signal), or None while the process runs."""
        return self.process.poll()

    def describe_end(self) -> str:
        code = self.code
        assert code is not None, "the process still runs"
        how = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
        return f"{self.name} ended ({how})"


class Children:
    """The processes of one launcher, in the order of their start.

    `LocalRun` owns the object, and calls all methods on its only thread. `stop` ends every process.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = {**os.environ, **env, PARENT_PID_ENV: str(os.getpid())}
        """Environment of all children."""
        self._children: list[Child] = []

    def start(
        self,
        name: str,
        command: list[str],
        log: Path,
        *,
        needed_by_others: bool = False,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        output: BinaryIO | None = None,
    ) -> Child:
        """Start a process, which gets its own session.

        In a common session, Ctrl-C in the terminal would reach the process, and the launcher could
        not end all processes in order.

        Args:
            name: name of the process, for people.
            log: file for the output of the process.
            needed_by_others: whether the process must be ended after all others.
            env: variables in addition to the common environment.
            pass_fds: descriptors that the process inherits.
            output: open file that gets the output in place of `log`.
        """
        opened = open_log(log, "ab") if output is None else contextlib.nullcontext(output)
        with opened as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**self.env, **(env or {})},
                pass_fds=pass_fds,
                start_new_session=True,
            )
        return self.add(Child(name, process, log, needed_by_others))

    def add(self, child: Child) -> Child:
        """Adopt a process that another process started for this launcher."""
        self._children.append(child)
        return child

    def stop(self, grace_seconds: float, *, hurry: Callable[[], bool] = lambda: False) -> None:
        """End all running processes. Processes that others need end last.

        Each process gets SIGTERM. After `grace_seconds`, or as soon as `hurry` returns True, the
        process gets a second SIGTERM, which means "at once". After `LAST_SECONDS` more it gets
        SIGKILL.

        Args:
            grace_seconds: time between the two SIGTERM.
            hurry: called every few moments during the waits.
        """
        needed = [child for child in self._children if child.needed_by_others]
        others = [child for child in self._children if not child.needed_by_others]
        self._end(others, grace_seconds, hurry)
        self._end(needed, LAST_SECONDS, hurry)

    def _end(self, children: list[Child], grace_seconds: float, hurry: Callable[[], bool]) -> None:
        for seconds, may_hurry in ((grace_seconds, True), (LAST_SECONDS, False)):
            for child in children:
                if child.code is None:
                    child.process.terminate()
            deadline = time.monotonic() + seconds
            while any(child.code is None for child in children):
                if time.monotonic() >= deadline:
                    break
                # Called in the last seconds, too, because the launcher shows events there.
                wants_to_hurry = hurry()
                if wants_to_hurry and may_hurry:
                    break
                time.sleep(0.02)
        for child in children:
            if child.code is None:
                child.process.kill()
            child.process.wait()
