# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Append records to a file whose disk may be full, read-only or gone for a while.

A full disk must not end a healthy run. A record that cannot be written waits in memory. It is
written, in order, as soon as there is room again: at the next record, or when the process calls
`retry_waiting` in an existing loop or thread.

See docs/observing.md.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from weakref import WeakSet

from titan_ft.system.ownership import make_folder, no_follow, only_files

WAITING_BYTES = 16 * 2**20
"""Memory for the waiting records of one file.

A worker's step is about 1.5 kB, so that 11,000 steps fit: hours of most jobs. The eight workers of
a host take 128 MB at most, which training does not miss.
"""
FINISH_SECONDS = 5.0
"""An ending process waits this long for room. A longer wait would delay the group's restart."""
DISK_ERRNOS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.EROFS,
        errno.ESTALE,
        errno.EFBIG,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
    }
)
"""Errors of a write to a disk. The last three come from file servers that are away."""
_POLL_SECONDS = 0.05
_MAX_RECORDS_PER_WRITE = 256
"""Buffers of one `writev`. Linux allows 1024 (IOV_MAX)."""
_NEWLINE = b"\n"
"""A waiting record that restores the last newline of a file.

`FileAppender` truncates that newline while records wait (see its `is_json_lines`), in this process
or an earlier one. No record of JSON is an empty line, so this record cannot be mistaken for one.
"""


_appenders: WeakSet[Appender] = WeakSet()
"""Every appender of this process; a forked child resets them."""
_stalled: dict[int, Appender] = {}
"""Appenders with waiting records, by id. The reference keeps an appender alive until its records
are written.
"""
_registry_lock = threading.RLock()
"""Guards `_appenders` and `_stalled`. Reentrant, because signal handlers print."""


@dataclass
class Stall:
    """A period in which a file could not be written.

    Attributes:
        error: the first error.
        began: Unix seconds of the first record that could not be written at once.
        reported: True if `on_stall` was called; see `Appender`.
        num_waited: records that waited in memory and are in the file now.
        dropped: lost records by kind: there was no memory left for them.
        first_dropped: Unix seconds of the first lost record; 0 if none is lost.
        last_dropped: Unix seconds of the last lost record; 0 if none is lost.
    """

    error: OSError
    began: float
    reported: bool = False
    num_waited: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first_dropped: float = 0.0
    last_dropped: float = 0.0

    @property
    def reason(self) -> str:
        """The system's words for the error, such as "No space left on device"."""
        return self.error.strerror or str(self.error)


class Appender:
    """Appends whole records in order.

    Event logs, curves and outputs own one. Any thread may call any method, signal handlers as well.
    An error of the disk ends nothing: the record waits in memory.

    Args:
        on_stall: called at most once for a stall, with the facts known so far.
        on_end: called when all waiting records are written, even if the stall was not reported.
        limit: maximum bytes of waiting records.

    Both functions are called by the writing thread, with the lock held. They may append to this
    appender.

    A stall is not reported in the first `QUIET_SECONDS` after the last one ended. If it lasts
    longer, the next failed write reports it. Otherwise the reports would fill a disk that has room
    for a line now and then.
    """

    QUIET_SECONDS = 10.0

    def __init__(
        self,
        on_stall: Callable[[Stall], None] = lambda stall: None,
        on_end: Callable[[Stall], None] = lambda stall: None,
        *,
        limit: int = WAITING_BYTES,
    ) -> None:
        self._on_stall = on_stall
        self._on_end = on_end
        self._limit = limit
        self._records: deque[bytes] = deque()
        self._num_bytes = 0  # of the waiting records
        # Bytes of the first waiting record that are in the file already: a full disk may take half
        # a line.
        self._offset = 0
        self._stall: Stall | None = None
        # Monotonic seconds at the end of the last stall.
        self._last_end = -float("inf")
        self._closed = False
        self._reset_lock()
        with _registry_lock:
            _appenders.add(self)

    def _reset_lock(self) -> None:
        # Reentrant, because a signal handler may print while this thread writes.
        self._lock = threading.RLock()
        self._is_writing = False

    @property
    def stall(self) -> Stall | None:
        """The present stall; None while all records are written."""
        return self._stall

    def append(self, record: bytes, kind: str = "", when: float | None = None) -> None:
        """Write a record, or keep it until there is room. Raises no errors of a disk.

        Args:
            kind: key in `Stall.dropped` under which the record is counted if it is lost.
            when: Unix seconds of the recorded event; None means now.
        """
        with self._lock:
            if self._closed or not record:
                return
            stall = self._stall
            if stall is not None and self._must_drop(record):
                when = time.time() if when is None else when
                stall.first_dropped = stall.first_dropped or when
                stall.last_dropped = when
                stall.dropped[kind] += 1
            else:
                self._records.append(record)
                self._num_bytes += len(record)
            self._write(when)

    def retry(self) -> None:
        """Write the waiting records if that is possible now. Does not wait for another thread."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._closed:
                    self._write()
            finally:
                self._lock.release()

    def close(self, seconds: float) -> int:
        """Wait up to `seconds` for room, then take no more records.

        Returns:
            The number of waiting records that are lost, without those in `Stall.dropped`.
        """
        _wait_for([self], seconds)
        with self._lock:
            lost = sum(record != _NEWLINE for record in self._records)
            self._closed = True
            self._stall = None
            self._records.clear()
            _unregister_stall(self)
            self._release()
            return lost

    def _must_drop(self, record: bytes) -> bool:
        """Return True if memory is full, or a record of this stall was dropped before.

        After the first dropped record, all records are dropped until there is room. One gap is
        easier to report than many.
        """
        assert self._stall is not None
        return bool(self._stall.dropped) or self._num_bytes + len(record) > self._limit

    def _write(self, when: float | None = None) -> None:
        """Write all waiting records; if that fails, begin or continue a stall."""
        # A signal handler has interrupted this thread's own write. The loop of that write writes
        # the handler's record too.
        if self._is_writing:
            return
        self._is_writing = True
        try:
            while self._records:
                # This may open a new file in place of a removed one, and then drop the only record.
                descriptor = self._ensure_open()
                if self._records:
                    self._advance(self._write_some(descriptor))
        except OSError as error:
            if not self._tolerates(error):
                # Nothing can be written here any more, for example because the reader is gone. Drop
                # the waiting records, and end a stall without `on_end`, which would mean that all
                # records are written.
                self._records.clear()
                self._num_bytes = self._offset = 0
                self._stall = None
                _unregister_stall(self)
                raise
            self._on_failed_write(error, when)
            return
        finally:
            self._is_writing = False
        if self._records:  # A signal handler has added a record after the loop.
            self._write(when)
        elif self._stall is not None:
            self._end_stall(self._stall)

    def _write_some(self, descriptor: int) -> int:
        batch = list(islice(self._records, _MAX_RECORDS_PER_WRITE))
        batch[0] = batch[0][self._offset :]
        written = os.writev(descriptor, batch)
        if not written:
            # Without progress `_write` would loop for ever, so this counts as a full disk.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written

    def _advance(self, written: int) -> None:
        """Remove the written records from memory."""
        self._offset += written
        while self._records and self._offset >= len(self._records[0]):
            record = self._records.popleft()
            self._offset -= len(record)
            self._num_bytes -= len(record)
            if self._stall is not None and record != _NEWLINE:
                self._stall.num_waited += 1

    def _on_failed_write(self, error: OSError, when: float | None) -> None:
        if self._stall is None:
            self._stall = Stall(error, time.time() if when is None else when)
            with _registry_lock:
                _stalled[id(self)] = self
        is_quiet = time.monotonic() - self._last_end < self.QUIET_SECONDS
        if not is_quiet and not self._stall.reported:
            self._stall.reported = True
            self._on_stall(self._stall)

    def _end_stall(self, stall: Stall) -> None:
        self._stall = None
        _unregister_stall(self)
        self._last_end = time.monotonic()
        self._on_end(stall)

    def _ensure_open(self) -> int:
        """Return the descriptor of the file; open the file if needed.

        May drop or insert a first record.

        Raises:
            OSError: the file cannot be opened.
        """
        raise NotImplementedError

    def _tolerates(self, error: OSError) -> bool:
        """Return True if records wait after this error; False if the error is raised instead."""
        raise NotImplementedError

    def _release(self) -> None:
        """Close the file, if this appender has opened it."""

    def forget_parent(self) -> None:
        """Reset this appender in a forked child.

        The parent writes the waiting records. Another of its threads may have held the lock.
        """
        self._reset_lock()
        self._records.clear()
        self._num_bytes = self._offset = 0
        self._stall = None


class FileAppender(Appender):
    """Appends to a file, as its only writer; makes the file and its folders with the first record.

    Args:
        path: the file.
        is_json_lines: True if the records are lines of JSON. While such records wait in memory, the
            last newline is truncated from the file, which needs no room. If the process is then
            killed, the missing newline shows readers that events are lost (`is_cut`).
        on_cut: called when the file is first opened, if an earlier process left it cut.
    """

    def __init__(
        self,
        path: Path,
        on_stall: Callable[[Stall], None] = lambda stall: None,
        on_end: Callable[[Stall], None] = lambda stall: None,
        *,
        is_json_lines: bool = False,
        on_cut: Callable[[], None] = lambda: None,
        limit: int = WAITING_BYTES,
    ) -> None:
        super().__init__(on_stall, on_end, limit=limit)
        self.path = path
        self._is_json_lines = is_json_lines
        self._on_cut = on_cut
        self._file: int | None = None
        self._was_open = False

    def _tolerates(self, error: OSError) -> bool:
        return True  # No other process uses this file, so every error comes from the file system.

    def _ensure_open(self) -> int:
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            # The file was removed, and further writes would be lost: open a new file. The folder is
            # not made again, because the user may be deleting the run at this moment.
            self._release()
        if self._file is None:
            self._file = self._open()
            self._was_open = True
        return self._file

    def _open(self) -> int:
        if not self._was_open:
            make_folder(self.path.parent)
        file = no_follow(str(self.path), os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            # Empty at the second open: this is a new file in place of a removed one. After ESTALE
            # it is the old file, which is not empty.
            if self._was_open and os.fstat(file).st_size == 0:
                self._begin_anew()
            elif self._is_json_lines and not self._was_open:
                self._mend(file)
        except OSError:
            # The next write tries all of it again.
            os.close(file)
            raise
        return file

    def _release(self) -> None:
        if self._file is not None:
            file = self._file
            self._file = None
            os.close(file)

    def _begin_anew(self) -> None:
        """Let a new file begin with a whole record.

        Otherwise it would begin with the second half of a record, or with a lone newline.
        """
        self._offset = 0
        if self._is_json_lines and self._records and self._records[0] == _NEWLINE:
            self._records.popleft()
            self._num_bytes -= len(_NEWLINE)

    def _on_failed_write(self, error: OSError, when: float | None) -> None:
        if error.errno == errno.ESTALE:
            self._release()  # The file server was restarted. Only another open helps.
        self._mark_cut()
        super()._on_failed_write(error, when)

    def _mark_cut(self) -> None:
        """Let the file end without a newline, if the disk allows it; see `is_json_lines`."""
        if not self._is_json_lines or self._file is None:
            return
        if self._offset:  # The file ends with half a record, and so without a newline.
            return
        # No record is missing, or the file is marked already.
        if not self._records or self._records[0] == _NEWLINE:
            return
        with contextlib.suppress(OSError):
            size = os.fstat(self._file).st_size
            if size:
                os.ftruncate(self._file, size - 1)
                self._records.appendleft(_NEWLINE)
                self._num_bytes += 1

    def _mend(self, file: int) -> None:
        """End the last line of an earlier process, so that the next record does not continue it.

        A restarted container reuses its pids, so a file that is named after a pid may exist
        already.
        """
        size = os.fstat(file).st_size  # 0 for a new file, and for a device such as /dev/null.
        if not size or os.pread(file, 1, size - 1) == b"\n":
            return
        text = os.pread(file, size, 0)
        last = text[text.rfind(b"\n") + 1 :]
        try:
            json.loads(last)
        except ValueError:
            # Half a record: remove it.
            os.ftruncate(file, size - len(last))
        else:
            # A whole record whose newline was truncated: restore the newline.
            self._records.appendleft(_NEWLINE)
            self._num_bytes += 1
        self._on_cut()


class DescriptorAppender(Appender):
    """Appends to an output of this process, to which other processes may write as well.

    Errors that do not come from a disk are raised, such as that of a pipe without a reader.
    """

    def __init__(
        self,
        descriptor: int,
        on_stall: Callable[[Stall], None] = lambda stall: None,
        on_end: Callable[[Stall], None] = lambda stall: None,
        *,
        limit: int = WAITING_BYTES,
    ) -> None:
        super().__init__(on_stall, on_end, limit=limit)
        self.descriptor = descriptor

    def _tolerates(self, error: OSError) -> bool:
        return error.errno in DISK_ERRNOS

    def _ensure_open(self) -> int:
        return self.descriptor


def is_cut(path: Path) -> bool:
    """Return True if the writer of a file of lines had more to write; see `FileAppender`.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb", opener=only_files) as file:
        size = file.seek(0, os.SEEK_END)
        if not size:  # A file is made for a first record, so that record is missing.
            return True
        file.seek(size - 1)
        return file.read(1) != b"\n"


def any_is_cut(folder: Path, pattern: str) -> bool:
    """Return True if any file in `folder` that matches `pattern` is cut or cannot be read."""
    try:
        return any(is_cut(path) for path in folder.glob(pattern))
    except OSError:
        return True


def retry_waiting() -> None:
    """Write the waiting records of this process, as far as there is room.

    Cheap while no records wait.
    """
    if not _stalled:
        return
    with _registry_lock:
        waiting = list(_stalled.values())
    for appender in waiting:
        # An output whose reader is gone raises an error. Its next print will raise it as well.
        with contextlib.suppress(OSError):
            appender.retry()


def finish_waiting(seconds: float = FINISH_SECONDS) -> None:
    """At the end of a process, wait up to `seconds` until all its waiting records are written."""
    with _registry_lock:
        waiting = list(_stalled.values())
    _wait_for(waiting, seconds)


def _wait_for(appenders: list[Appender], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        retry_waiting()
        if not any(appender.stall for appender in appenders) or time.monotonic() >= deadline:
            return
        time.sleep(_POLL_SECONDS)


def _unregister_stall(appender: Appender) -> None:
    with _registry_lock:
        _stalled.pop(id(appender), None)


def _forget_parent() -> None:
    """Drop the parent's waiting records in a forked child, or lines would be written twice."""
    # Another thread of the parent may have held the lock.
    global _registry_lock
    _registry_lock = threading.RLock()
    _stalled.clear()
    for appender in list(_appenders):
        appender.forget_parent()


os.register_at_fork(after_in_child=_forget_parent)
