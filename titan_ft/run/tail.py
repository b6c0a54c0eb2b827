# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Follow files of a run while they grow, and find the last error of a log."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from titan_ft.run.events import Event
from titan_ft.run.log import (
    MAX_LINE_BYTES,
    DamagedLineError,
    LongLineError,
    decode,
    open_lines,
    read_block,
)
from titan_ft.system.ownership import only_files

MAX_DAMAGED_LINES = 1000
"""A file with so many damaged lines in a row is read no further.

A killed process leaves one damaged line at most. A follower took minutes to skip the lines of a
file of newlines and single letters, which costs its author nothing.
"""
_MAX_LOG_BYTES = 65536
"""Bytes at the end of a log that are searched for its last error."""
_EXCEPTION = re.compile(
    r"^(\[rank\d+\]:\s*)?([A-Za-z_][\w.]*\.)?\w*(Error|Exception|Interrupt|Exit)\b"
)

_CRASH = "Fatal Python error: "
"""faulthandler writes this first when a signal ends a process (CPython's Modules/faulthandler.c).

Its last line is a list of modules. A launch once showed 2,000 characters of that list as the reason
of a failure.
"""
_WHAT = "what(): "
"""C++ begins a line with this before its SIGABRT. The line names the exception that no code caught
(libstdc++-v3/libsupc++/vterminate.cc)."""


class FileTail:
    """Reads the lines that were appended to a file since the last call.

    Args:
        path: the file, which may not exist yet.
        offset: bytes at its beginning to skip.
        only_grows: True if the file is never truncated. Shared storage may then still show an old
            length, or zeros in the place of new bytes: the reader waits for them.

    Attributes:
        is_cut: True if its writer had more to write at the last call; see `FileAppender`.
    """

    def __init__(self, path: Path, offset: int = 0, *, only_grows: bool = False) -> None:
        self._path = path
        self._offset = offset
        self._only_grows = only_grows
        self._inode: int | None = None
        # Place of the first byte that was missing, or zero, at the last call. Until that byte is
        # there, an incomplete line of up to `MAX_LINE_BYTES` is not read again.
        self._awaited = offset
        self._is_zero_awaited = False
        self.is_cut = False

    def poll(self) -> bytes:
        """Return some new whole lines; empty if there are none now.

        One call returns a block at most, so call this until it returns nothing. An incomplete line
        is left for a later call.
        """
        try:
            status = self._path.stat()
            size = status.st_size
            is_replaced = self._inode not in (None, status.st_ino)
            is_truncated = size < self._offset and not self._only_grows
            self._inode = status.st_ino
            if is_replaced or is_truncated:
                self._offset = 0
            if is_replaced or size < self._awaited:
                self._awaited = self._offset
                self._is_zero_awaited = False
            self.is_cut = size != self._offset or not size
            if size <= self._awaited or (self._is_zero_awaited and self._is_still_zero()):
                return b""
            # Opened for each block: a run may have more files than a process may keep open.
            with open_lines(self._path) as file:
                block = read_block(file, self._offset, stops_at_zero=self._only_grows)
        except OSError:
            # The file is missing, or a network file system does not answer at the moment.
            return b""
        except LongLineError:
            # Pass over an endless line. Otherwise each call would read it again.
            self._offset += MAX_LINE_BYTES
            self._awaited = self._offset
            return b""
        self._offset += len(block.lines)
        self._awaited = self._offset + len(block.rest)
        self._is_zero_awaited = not block.lines and self._awaited < size
        self.is_cut = self._offset < size or bool(block.rest)
        return block.lines

    def _is_still_zero(self) -> bool:
        with open_lines(self._path) as file:
            file.seek(self._awaited)
            return file.read(1) == b"\0"


class EventFileTail:
    """Reads the events that were added to one file since the last call.

    Args:
        path, start: see `FileTail`.
        wanted: see `EventTail`.
    """

    def __init__(self, path: Path, *wanted: type[Event], start: int = 0) -> None:
        self._lines = FileTail(path, start, only_grows=True)
        self._wanted = wanted
        self._num_damaged = 0  # damaged lines in a row

    @property
    def is_cut(self) -> bool:
        """True if its writer had more to write at the last call."""
        return self._lines.is_cut

    def poll(self) -> Iterator[Event]:
        """Yield the new events. A damaged line is skipped."""
        while self._num_damaged < MAX_DAMAGED_LINES:
            lines = self._lines.poll()
            if not lines:
                return
            for line in lines.splitlines():
                try:
                    event = decode(line, *self._wanted)
                except DamagedLineError:
                    self._num_damaged += 1
                    if self._num_damaged >= MAX_DAMAGED_LINES:
                        return
                    continue
                except ValueError:
                    # Another version wrote the line. The file may have more of them, and good ones.
                    event = None
                self._num_damaged = 0
                if event is not None:
                    yield event


class EventTail:
    """Reads the events that were added to the files of a folder since the last call.

    Each line is read once.

    Args:
        folder: folder of the files. New files are found later.
        wanted: classes of events; of other events only the name is read. None wants all.
        pattern: pattern for the names of the files.
        from_start: True if the first call returns the existing events. A launcher wants only new
            ones. The existing events are of an earlier run in the folder, and would be taken for
            this run's events.
        known: with `from_start`, for each file name, the bytes at its beginning to skip.
    """

    def __init__(
        self,
        folder: Path,
        *wanted: type[Event],
        pattern: str = "*.jsonl",
        from_start: bool = False,
        known: Mapping[str, int] | None = None,
    ) -> None:
        self._folder, self._wanted, self._pattern = folder, wanted, pattern
        starts = {folder / name: num_bytes for name, num_bytes in (known or {}).items()}
        if not from_start:
            starts = {path: path.stat().st_size for path in folder.glob(pattern)}
        self._tails = {
            path: EventFileTail(path, *wanted, start=start) for path, start in starts.items()
        }

    @property
    def cut(self) -> set[str]:
        """Names of the files whose writers had more to write at the last call.

        A full disk is one reason.
        """
        return {path.name for path, tail in self._tails.items() if tail.is_cut}

    def poll(self) -> list[Event]:
        """Return the new events of all files, sorted by time.

        A damaged line is skipped, because a follower of a run must go on whatever its files
        contain. `titan-ft report` names the line.
        """
        events: list[Event] = []
        try:
            paths = sorted(self._folder.glob(self._pattern))
        except OSError:
            # This process has no descriptor left, or a network file system does not answer at the
            # moment.
            paths = sorted(self._tails)
        for path in paths:
            if path not in self._tails:
                self._tails[path] = EventFileTail(path, *self._wanted)
            events.extend(self._tails[path].poll())
        return sorted(events, key=lambda event: event.time)


def last_exception(path: Path, offset: int = 0) -> str:
    """Return the last line of a log that names an exception; empty without such a line.

    Args:
        offset: bytes of the log to leave out.
    """
    exceptions = [line for line in _last_lines(path, offset) or [] if _EXCEPTION.match(line)]
    return exceptions[-1] if exceptions else ""


def last_error_line(path: Path) -> str:
    """Return the line of a worker's log that gives the reason of its failure.

    The choice is, in this order:

    1. After a fatal signal: C++'s line about an exception, or faulthandler's first line.
    2. The last line that names an exception.
    3. The last line that is not empty.
    4. A note that the log is missing or empty.
    """
    lines = _last_lines(path)
    if lines is None:
        return "(no log)"
    crashes = [number for number, line in enumerate(lines) if line.startswith(_CRASH)]
    if crashes:
        last = crashes[-1]
        if last > 0 and lines[last - 1].startswith(_WHAT):
            return lines[last - 1]
        return lines[last]
    exceptions = [line for line in lines if _EXCEPTION.match(line)]
    return (exceptions or lines or ["(empty log)"])[-1]


def _last_lines(path: Path, offset: int = 0) -> list[str] | None:
    """Return the last lines of a log that are not empty; None if the log cannot be read.

    Args:
        offset: bytes at the beginning of the log to leave out.
    """
    try:
        with open(path, "rb", opener=only_files) as file:
            size = file.seek(0, 2)
            file.seek(max(offset, size - _MAX_LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    return [line.strip() for line in text.splitlines() if line.strip()]
