# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Keep the reduced record of a long run during the run, so that no command has to read
gigabytes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from titan_ft.history.record.kept import MIN_BYTES
from titan_ft.launch.group.children import Child, Children
from titan_ft.run.log import event_files
from titan_ft.system.token import TOKEN_ENV

LOOK_SECONDS = 10.0
"""Pause between two looks at the sizes of the files."""


class RecordKeeper:
    """Reduces the events of a run each time they have grown by `MIN_BYTES`.

    A child process of low priority does the work. To reduce 64 MiB of events takes seconds, and the
    launcher must watch its groups meanwhile. The record only saves time: if the process fails, the
    next command that reads the run reduces the events. `LocalRun` calls `poll` on its only thread.

    Args:
        folder: folder of the event files.
        children: starts the process.
        log: file for the output of the process.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        folder: Path,
        children: Children,
        log: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._children = children
        self._log = log
        self._clock = clock
        self._next_look = clock() + LOOK_SECONDS
        self._num_bytes = 0
        """Size of the event files at the start of the latest process."""
        self._child: Child | None = None

    def poll(self) -> None:
        """Start the process when it is due; call it often."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        if self._child is not None and self._child.code is None:
            return
        try:
            num_bytes = sum(path.stat().st_size for path in event_files(self._folder))
        except OSError:
            # A file server may have no answer right now. The next look tries again.
            return
        if num_bytes - self._num_bytes < MIN_BYTES:
            return
        self._num_bytes = num_bytes
        command = [sys.executable, "-m", "titan_ft.history.record.kept", str(self._folder)]
        try:
            # Without the token: the process only reads files.
            self._child = self._children.start(
                "the keeper of the record", command, self._log, env={TOKEN_ENV: ""}
            )
        except OSError:
            # The host has no room for a process. The run does not depend on the record.
            self._child = None
