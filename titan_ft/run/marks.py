# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Leave a word for another process where a full disk takes no file.

Two words decide what is started again: that a group left because it was asked to, and that the job
is over. On a full disk their events wait in memory, and are lost with their process. A mark is a
symbolic link with the word as its target. File systems keep a short target in the inode, so that
the mark needs no block.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from titan_ft.run.error_file import find_file
from titan_ft.run.events import Drained
from titan_ft.run.log import EventLog

LEFT = "left"


def leave_mark(path: Path, word: str) -> None:
    """Leave a word of some twenty characters; it replaces what is there.

    Raises:
        OSError: that is not possible either, on a read-only file system for example.
    """
    part = path.with_name(f".{path.name}-{os.getpid()}")
    part.unlink(missing_ok=True)  # of an earlier process of the same pid
    os.symlink(word, part)
    part.replace(path)


def read_mark(path: Path) -> str | None:
    """Return the word; None where there is none."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def announce_left(events: EventLog, event: Drained) -> None:
    """Emit that this worker leaves; if the event waits, leave a mark for the supervisor, too."""
    events.emit(event)
    error_file = find_file()
    if events.is_stalled and error_file is not None:
        with contextlib.suppress(OSError):  # then the supervisor lets it stay away
            leave_mark(_left_beside(error_file), LEFT)


def has_left(error_file: Path) -> bool:
    """Tell whether the worker with this error file has left a mark that it leaves."""
    return read_mark(_left_beside(error_file)) == LEFT


def _left_beside(error_file: Path) -> Path:
    return error_file.with_name(f"{error_file.name}.{LEFT}")
