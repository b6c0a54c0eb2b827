# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Leave a word for another process, even on a full disk.

Three words decide about restarts: that a group left on request, that the job is finished, and that
a worker trains. On a full disk the events of a process wait in memory, and are lost with it. A mark
is a symbolic link with the word as its target. File systems keep a short target in the inode, so
the mark needs no block.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from titan_ft.run.error_file import find_file
from titan_ft.run.events import Drained
from titan_ft.run.log import EventLog
from titan_ft.system.ownership import check_links

LEFT = "left"
TRAINS = "trains"


def leave_mark(path: Path, word: str) -> None:
    """Leave a word of about twenty characters; it replaces an existing mark.

    Raises:
        OSError: a link cannot be made either, for example on a read-only file system, or its folder
            is another user's link.
    """
    check_links(path.parent)
    part = path.with_name(f".{path.name}-{os.getpid()}")
    part.unlink(missing_ok=True)  # An earlier process of the same pid may have left one.
    os.symlink(word, part)
    part.replace(path)


def read_mark(path: Path) -> str | None:
    """Return the word; None without a mark."""
    try:
        return os.readlink(path)
    except OSError:
        return None


def announce_left(events: EventLog, event: Drained) -> None:
    """Emit that this worker leaves. If the event waits for room, leave a mark for the agent too."""
    events.emit(event)
    error_file = find_file()
    if events.has_outage and error_file is not None:
        # Without the mark the agent does not start this group again.
        with contextlib.suppress(OSError):
            leave_mark(_mark_beside(error_file, LEFT), LEFT)


def has_left(error_file: Path) -> bool:
    """Return True if the worker with this error file has left a mark that it leaves."""
    return read_mark(_mark_beside(error_file, LEFT)) == LEFT


def mark_training() -> None:
    """Mark that this worker trains.

    An exit with status 0 is in order only if the mark is gone by then. Without the mark, a loader
    that called `os._exit(0)` in the middle of training ended its group as finished.
    """
    error_file = find_file()
    if error_file is not None:
        # Without the mark, status 0 counts as an end in order.
        with contextlib.suppress(OSError):
            leave_mark(_mark_beside(error_file, TRAINS), TRAINS)


def mark_end_in_order() -> None:
    """Remove the mark that this worker trains. The removal needs no room on a full disk."""
    error_file = find_file()
    if error_file is not None:
        remove_training_mark(error_file)


def remove_training_mark(error_file: Path) -> bool:
    """Remove the mark of the worker with this error file; return True if that succeeded.

    For a worker that has ended, True means that it did not end in order. A mark that cannot be
    removed means nothing: on a read-only disk the worker could not remove it either.
    """
    mark = _mark_beside(error_file, TRAINS)
    if read_mark(mark) != TRAINS:
        return False
    try:
        mark.unlink()
    except OSError:
        return False
    return True


def _mark_beside(error_file: Path, word: str) -> Path:
    return error_file.with_name(f"{error_file.name}.{word}")
