# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Append to a file of a run that is full, read-only or gone for a while.

A full disk must not end a healthy run. A record that cannot be written waits in memory. It is
written, in order, as soon as there is room again: at the next record, or when the process calls
`retry_waiting` in a loop or a thread that it has anyway.
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

WAITING_BYTES = 16 * 2**20
"""Memory for the waiting records of one file.

A worker's step is about 1.5 kB, so that 11,000 steps fit: hours of most jobs. The eight workers of
a host take 128 MB at most, which training does not miss.
"""
LAST_SECONDS = 5.0
"""How long the end of a process waits for room. A longer wait would delay the group's restart."""
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
"""Errors of a write to a disk; the last three are those of file servers that are away."""
_POLL_SECONDS = 0.05
_RECORDS_OF_A_WRITE = 256  # Linux takes 1024 buffers in one call
_NEWLINE = b"\n"  # that a writer took away; no record of JSON is an empty line


@dataclass
class Stall:
    """A time in which a file could not be written."""

    error: OSError
    """The first error."""
    began: float
    """Unix seconds of the first record that could not be written at once."""
    told: bool = False
    """Whether `on_stall` was called; see `Appender`."""
    num_waited: int = 0
    """Records that waited in memory and are in the file now."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Records beyond the memory's limit, which are lost; by kind."""
    first_dropped: float = 0.0
    """Unix seconds of the first lost record."""
    last_dropped: float = 0.0
    """Unix seconds of the last lost record."""

    @property
    def reason(self) -> str:
        """Return the system's words for the error, such as "No space left on device"."""
        return self.error.strerror or str(self.error)


class Appender:
    """Appends whole records in order; safe to share between threads, and with signal handlers.

    Args:
        on_stall: called when the file cannot be written, with what is known of it.
        on_end: called when everything that waited is written.
        limit: bytes that may wait.

    A stall within `QUIET_SECONDS` of the end of another one is `told` when it has lasted as long.
    On a disk with room for a line now and then, messages about it would take that room.
    """

    QUIET_SECONDS = 10.0

    def __init__(
        self,
        on_stall: Callable[[Stall], None] = lambda stall: None,
        on_end: Callable[[Stall], None] = lambda stall: None,
        *,
        limit: int = WAITING_BYTES,
    ) -> None:
        self._on_stall, self._on_end, self._limit = on_stall, on_end, limit
        self._records: deque[bytes] = deque()
        self._num_bytes = 0
        """Size of the records that wait."""
        self._offset = 0
        """Bytes of the first record that are in the file: a full disk takes half a line."""
        self._stall: Stall | None = None
        self._stall_begin = self._last_end = -float("inf")
        """Seconds of the monotonic clock."""
        self._closed = False
        self._prepare()
        with _registry_lock:
            _appenders.add(self)

    def _prepare(self) -> None:
        # Reentrant, for a signal handler may print while this thread writes.
        self._lock = threading.RLock()
        self._busy = False

    @property
    def stall(self) -> Stall | None:
        """Return what keeps records waiting; None while all are written."""
        return self._stall

    def append(self, record: bytes, kind: str = "", when: float | None = None) -> None:
        """Write a record, or keep it until there is room; raises nothing for a disk.

        Args:
            kind: what it is counted as if it is lost.
            when: Unix seconds of what it tells; None stands for now.
        """
        with self._lock:
            if self._closed or not record:
                return
            stall = self._stall
            if stall is not None and self._is_full(record):
                when = time.time() if when is None else when
                stall.first_dropped = stall.first_dropped or when
                stall.last_dropped = when
                stall.dropped[kind] += 1
            else:
                self._records.append(record)
                self._num_bytes += len(record)
            self._write(when)

    def retry(self) -> None:
        """Write the records that wait, if possible now. Does not wait for another thread."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._closed:
                    self._write()
            finally:
                self._lock.release()

    def close(self, seconds: float) -> int:
        """Take no more records, and wait for room for so many seconds; return how many are lost."""
        _wait_for([self], seconds)
        with self._lock:
            lost = sum(record != _NEWLINE for record in self._records)
            self._closed, self._stall = True, None
            self._records.clear()
            _forget(self)
            self._release()
            return lost

    def _is_full(self, record: bytes) -> bool:
        """Tell whether a record must be dropped: for want of memory, or because one before it was.

        After the first dropped record all are, until there is room: one gap is easier to tell of
        than many.
        """
        assert self._stall is not None
        return bool(self._stall.dropped) or self._num_bytes + len(record) > self._limit

    def _write(self, when: float | None = None) -> None:
        """Write all that waits, or begin a stall."""
        if self._busy:  # a signal handler's record, which waits for the write that it came into
            return
        self._busy = True
        try:
            while self._records:
                descriptor = self._descriptor()
                if self._records:  # the file may be another one, which half a record is not for
                    self._advance(self._write_some(descriptor))
        except OSError as error:
            if not self._tolerates(error):
                self._records.clear()
                self._num_bytes = self._offset = 0
                raise
            self._begin_stall(error, when)
            return
        finally:
            self._busy = False
        if self._stall is not None:
            self._end_stall(self._stall)

    def _write_some(self, descriptor: int) -> int:
        batch = list(islice(self._records, _RECORDS_OF_A_WRITE))
        batch[0] = batch[0][self._offset :]
        written = os.writev(descriptor, batch)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written

    def _advance(self, written: int) -> None:
        """Forget what is in the file now."""
        self._offset += written
        while self._records and self._offset >= len(self._records[0]):
            record = self._records.popleft()
            self._offset -= len(record)
            self._num_bytes -= len(record)
            if self._stall is not None and record != _NEWLINE:
                self._stall.num_waited += 1

    def _begin_stall(self, error: OSError, when: float | None) -> None:
        now = time.monotonic()
        if self._stall is None:
            self._stall = Stall(error, time.time() if when is None else when)
            self._stall_begin = now
            with _registry_lock:
                _stalled[id(self)] = self
        is_close = now - self._last_end < self.QUIET_SECONDS
        is_short = now - self._stall_begin < self.QUIET_SECONDS
        if not self._stall.told and not (is_close and is_short):
            self._stall.told = True
            self._on_stall(self._stall)

    def _end_stall(self, stall: Stall) -> None:
        self._stall = None
        _forget(self)
        self._last_end = time.monotonic()
        self._on_end(stall)

    def _descriptor(self) -> int:
        """Return the open file.

        Raises:
            OSError: it cannot be opened.
        """
        raise NotImplementedError

    def _tolerates(self, error: OSError) -> bool:
        """Tell whether a record waits after this error, which is no mistake of the program."""
        raise NotImplementedError

    def _release(self) -> None:
        """Let go of the file."""

    def forget_parent(self) -> None:
        """In a fork: drop the records that wait, for the parent writes them, and its locks."""
        self._prepare()
        self._records.clear()
        self._num_bytes = self._offset = 0
        self._stall = None


class FileAppender(Appender):
    """Appends to a file that it opens, and makes with its folders, for its first record.

    It is the only writer of the file.

    Args:
        path: the file.
        lines: whether the records are lines of JSON. Then a file that ends without a newline is
            cut (`is_cut`): its writer had more to write. A writer that cannot write anything takes
            the last newline away, which needs no room. So a reader sees that events are missing
            after a SIGKILL of a process whose events waited in memory.
        on_cut: called when the file is there already, and cut: by an earlier process.
    """

    def __init__(
        self,
        path: Path,
        on_stall: Callable[[Stall], None] = lambda stall: None,
        on_end: Callable[[Stall], None] = lambda stall: None,
        *,
        lines: bool = False,
        on_cut: Callable[[], None] = lambda: None,
        limit: int = WAITING_BYTES,
    ) -> None:
        super().__init__(on_stall, on_end, limit=limit)
        self.path, self._lines, self._on_cut = path, lines, on_cut
        self._file: int | None = None
        self._was_open = False

    def _tolerates(self, error: OSError) -> bool:
        return True  # of a file of our own every error is one of its file system

    def _descriptor(self) -> int:
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            # The file was removed: what is written there is lost. It is made anew in its folder, as
            # soon as that is there again, and not beside those who remove the run.
            self._release()
        if self._file is None:
            if not self._was_open:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o644)
            if self._was_open and os.fstat(self._file).st_size == 0:
                self._drop_rest()
            elif self._lines and not self._was_open:
                self._mend(self._file)
            self._was_open = True
        return self._file

    def _release(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def _drop_rest(self) -> None:
        """Drop the rest of a record whose first half went with the removed file."""
        if self._offset or (self._records and self._records[0] == _NEWLINE):
            size = len(self._records.popleft())
            self._num_bytes -= size
            self._offset = 0

    def _begin_stall(self, error: OSError, when: float | None) -> None:
        if error.errno == errno.ESTALE:
            self._release()  # of a file server that was started again: only another open helps
        self._mark_cut()
        super()._begin_stall(error, when)

    def _mark_cut(self) -> None:
        """Let the file end without a newline; see `lines`. A read-only disk does not allow it."""
        if not self._lines or self._file is None or self._offset:
            return
        if not self._records or self._records[0] == _NEWLINE:
            return
        with contextlib.suppress(OSError):
            size = os.fstat(self._file).st_size
            if size:
                os.ftruncate(self._file, size - 1)
                self._records.appendleft(_NEWLINE)
                self._num_bytes += 1

    def _mend(self, file: int) -> None:
        """End the last line of an earlier process, so that ours is not glued to it.

        A container that is started again has the same pids, and so do files that are named by them.
        """
        size = os.fstat(file).st_size  # 0 of a device, too
        if not size or os.pread(file, 1, size - 1) == b"\n":
            return
        text = os.pread(file, size, 0)
        last = text[text.rfind(b"\n") + 1 :]
        try:
            json.loads(last)
        except ValueError:
            os.ftruncate(file, size - len(last))
        else:
            self._records.appendleft(_NEWLINE)
            self._num_bytes += 1
        self._on_cut()


class DescriptorAppender(Appender):
    """Appends to an open file of which others are writers, too: an output of this process.

    Errors that do not come from a disk, such as a reader that is gone, are raised.
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

    def _descriptor(self) -> int:
        return self.descriptor


def is_cut(path: Path) -> bool:
    """Tell whether the writer of a file of lines had more to write; see `FileAppender`.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return True
        file.seek(size - 1)
        return file.read(1) != b"\n"


def any_is_cut(folder: Path, pattern: str) -> bool:
    """Tell whether one of some files is cut; True as well where a file cannot be read."""
    try:
        return any(is_cut(path) for path in folder.glob(pattern))
    except OSError:
        return True


def retry_waiting() -> None:
    """Write what waits in this process, as far as there is room. Cheap while nothing waits."""
    if _stalled:
        with _registry_lock:
            waiting = list(_stalled.values())
        for appender in waiting:
            # An output whose reader is gone raises an error, as its next print will do anyway.
            with contextlib.suppress(OSError):
                appender.retry()


def finish_waiting(seconds: float = LAST_SECONDS) -> None:
    """Give what waits in this process so many seconds; for the end of a process."""
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


def _forget(appender: Appender) -> None:
    with _registry_lock:
        _stalled.pop(id(appender), None)


_appenders: WeakSet[Appender] = WeakSet()
_stalled: dict[int, Appender] = {}
"""Those with records that wait."""
_registry_lock = threading.RLock()


def _forget_parent() -> None:
    """Leave to the parent of a fork what it has not written: a line would come twice."""
    global _registry_lock
    _registry_lock = threading.RLock()
    _stalled.clear()
    for appender in list(_appenders):
        appender.forget_parent()


os.register_at_fork(after_in_child=_forget_parent)
