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
"""The sizes of the files are looked at this often."""


class RecordKeeper:
    """Reduces the events of a run each time they have grown by `MIN_BYTES`, in a process of low
    priority.

    It needs a process: 64 MiB of events take seconds, in which the launcher must watch its groups.
    The record only saves time. If the process fails, the next command that reads the run reduces
    the events.

    Args:
        folder: holds the files of events.
        log: of the process.
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
        """Size of the files at the start of the last process."""
        self._child: Child | None = None

    def poll(self) -> None:
        """Start the process when it is due. Call this often."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        if self._child is not None and self._child.code is None:
            return
        try:
            num_bytes = sum(path.stat().st_size for path in event_files(self._folder))
        except OSError:  # a file server that has no answer right now
            return
        if num_bytes - self._num_bytes < MIN_BYTES:
            return
        self._num_bytes = num_bytes
        command = [sys.executable, "-m", "titan_ft.history.record.kept", str(self._folder)]
        try:
            # It reads files, and has no use for the token.
            self._child = self._children.start(
                "the keeper of the record", command, self._log, env={TOKEN_ENV: ""}
            )
        except OSError:  # no room for a process on this host
            self._child = None
