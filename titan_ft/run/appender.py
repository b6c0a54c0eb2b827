# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Append records to a file whose disk may be full, read-only or gone for a while.

A full disk must not end a healthy run. `Appender.append` writes at once, or else:

1. The record waits in memory, and an *outage* of this file begins. The appender calls the owner's
   `on_outage` once.
2. Later records wait after it. If the memory for waiting records is full, later records are dropped
   and counted.
3. Each further `append`, and each `retry_waiting`, which processes call in a loop that they have
   anyway, tries to write the waiting records in order.
4. When all of them are written, the outage ends. The appender calls the owner's `on_recovery`,
   which reports how many records were late or lost.

A process that is killed during an outage loses its waiting records. Readers of a file of JSON lines
notice that: the file is *cut*, which means that it is empty or lacks its last newline.
`FileAppender` removes this newline while records wait, because that needs no room on the disk.

All functions may run on any thread, in signal handlers, and after a fork.

See docs/observing.md, "A full disk".
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
_LAST_NEWLINE = b"\n"
"""A waiting record that restores the newline of a cut file.

No record of JSON is an empty line, so no record of the owner is equal to this one.
"""


_appenders: WeakSet[Appender] = WeakSet()
"""Every appender of this process. After a fork, the child resets them."""
_appenders_with_outage: dict[int, Appender] = {}
"""Appenders with waiting records, by id.

This dictionary keeps such an appender alive until its records are written, even if its owner drops
it.
"""
_registry_lock = threading.RLock()
"""Guards `_appenders` and `_appenders_with_outage`. Reentrant, because signal handlers print."""


@dataclass
class Outage:
    """A period in which a file could not be written.

    Attributes:
        error: the first error.
        began: Unix seconds of the first record that could not be written at once.
        reported: True if `on_outage` was called; it is not called for all outages, see
            `Appender`.
        num_waited: records that waited in memory and are in the file now.
        dropped: number of lost records, by the `kind` that `append` got. The memory for waiting
            records was full.
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
    """Appends whole records in order; see the head of this file.

    Event logs, curves and the processes' outputs each own one appender. Any thread and any signal
    handler may call any method.

    Args:
        on_outage: called at the first failed write of an outage. The outage goes on, so its counts
            are not final.
        on_recovery: called when all waiting records are written, even if `on_outage` was not
            called.
        limit: maximum bytes of waiting records.

    Both functions run on the thread that writes, with the lock held. They may append to this
    appender.

    `on_outage` is not called in the first `REPORT_PAUSE_SECONDS` after the last outage ended. If
    the outage lasts longer, the first failed write after that time calls it. Without the pause, the
    reports would fill a disk that has room for a line now and then.
    """

    REPORT_PAUSE_SECONDS = 10.0

    def __init__(
        self,
        on_outage: Callable[[Outage], None] = lambda outage: None,
        on_recovery: Callable[[Outage], None] = lambda outage: None,
        *,
        limit: int = WAITING_BYTES,
    ) -> None:
        self._on_outage = on_outage
        self._on_recovery = on_recovery
        self._limit = limit
        self._records: deque[bytes] = deque()
        # The waiting records have this many bytes in all.
        self._num_bytes = 0
        # Bytes of the first waiting record that are in the file already: a full disk may take half
        # a line.
        self._offset = 0
        self._outage: Outage | None = None
        self._last_outage_ended_at = -float("inf")  # in monotonic seconds
        self._closed = False
        self._reset_lock()
        with _registry_lock:
            _appenders.add(self)

    def _reset_lock(self) -> None:
        # Reentrant: a signal handler interrupts this thread in the middle of a write, and may
        # append a record itself. `_in_write` shows the handler that it must leave the write alone.
        self._lock = threading.RLock()
        self._in_write = False

    @property
    def outage(self) -> Outage | None:
        """The present outage; None if no records wait."""
        return self._outage

    def append(self, record: bytes, kind: str = "", when: float | None = None) -> None:
        """Write a record, or keep it until there is room. Raises no errors of a disk.

        Args:
            kind: key in `Outage.dropped` under which the record is counted if it is lost.
            when: Unix seconds of what the record describes, for `Outage`; None means now.
        """
        with self._lock:
            if self._closed or not record:
                return
            if self._outage is not None and self._must_drop(self._outage, record):
                _count_dropped(self._outage, kind, when)
            else:
                self._records.append(record)
                self._num_bytes += len(record)
            # Even if this record was dropped: the disk may have room for the waiting ones now.
            self._write_waiting(when)

    def retry(self) -> None:
        """Write the waiting records if the disk takes them now.

        Does nothing if another thread holds the lock: that thread is writing.
        """
        if self._lock.acquire(blocking=False):
            try:
                if not self._closed:
                    self._write_waiting()
            finally:
                self._lock.release()

    def close(self, seconds: float) -> int:
        """Give an outage `seconds` to end, then close the file. Later records are discarded.

        Returns:
            The number of records that were waiting, and are lost now. Records in `Outage.dropped`
            are not counted again.
        """
        _wait_for_recovery([self], seconds)
        with self._lock:
            num_lost = sum(record != _LAST_NEWLINE for record in self._records)
            self._closed = True
            self._outage = None
            self._records.clear()
            _unregister_outage(self)
            self._release()
            return num_lost

    def _must_drop(self, outage: Outage, record: bytes) -> bool:
        if outage.dropped:
            # Once a record is dropped, all records are dropped until the disk has room: one gap in
            # the file is easier to report than many.
            return True
        return self._num_bytes + len(record) > self._limit

    def _write_waiting(self, when: float | None = None) -> None:
        """Write all waiting records; begin or continue an outage if that fails."""
        if self._in_write:
            # This is a signal handler that interrupted a write of this thread. The loop of that
            # write also writes the handler's record.
            return
        self._in_write = True
        try:
            while self._records:
                # This may open a new file in place of a removed one. If only `_LAST_NEWLINE` waited
                # for the old file, nothing is left to write.
                descriptor = self._ensure_open()
                if self._records:
                    self._forget_written(self._write_batch(descriptor))
        except OSError as error:
            if not self._is_of_disk(error):
                # Nothing can be written here any more, for example because the reader of a pipe is
                # gone. Drop the waiting records. The outage ends without `on_recovery`, which would
                # report that the records are written.
                self._records.clear()
                self._num_bytes = self._offset = 0
                self._outage = None
                _unregister_outage(self)
                raise
            self._on_failed_write(error, when)
            return
        finally:
            self._in_write = False
        if self._records:
            # A signal handler has added a record after the loop, before `_in_write` was reset.
            self._write_waiting(when)
        elif self._outage is not None:
            self._end_outage(self._outage)

    def _write_batch(self, descriptor: int) -> int:
        """Write the first waiting records; return the number of written bytes.

        Raises:
            OSError: nothing was written.
        """
        batch = list(islice(self._records, _MAX_RECORDS_PER_WRITE))
        batch[0] = batch[0][self._offset :]
        written = os.writev(descriptor, batch)
        if not written:
            # Without progress `_write_waiting` would loop for ever, so this counts as a full disk.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written

    def _forget_written(self, written: int) -> None:
        """Remove the records in the first `written` bytes from memory."""
        self._offset += written
        while self._records and self._offset >= len(self._records[0]):
            record = self._records.popleft()
            self._offset -= len(record)
            self._num_bytes -= len(record)
            if self._outage is not None and record != _LAST_NEWLINE:
                self._outage.num_waited += 1

    def _on_failed_write(self, error: OSError, when: float | None) -> None:
        """Begin or continue an outage, and report it once."""
        if self._outage is None:
            self._outage = Outage(error, time.time() if when is None else when)
            with _registry_lock:
                _appenders_with_outage[id(self)] = self
        seconds_since_last = time.monotonic() - self._last_outage_ended_at
        in_pause = seconds_since_last < self.REPORT_PAUSE_SECONDS
        if not in_pause and not self._outage.reported:
            self._outage.reported = True
            self._on_outage(self._outage)

    def _end_outage(self, outage: Outage) -> None:
        self._outage = None
        _unregister_outage(self)
        self._last_outage_ended_at = time.monotonic()
        self._on_recovery(outage)

    # For subclasses

    def _ensure_open(self) -> int:
        """Return the descriptor of the file; open the file if needed.

        May add `_LAST_NEWLINE` as the first waiting record, or remove it.

        Raises:
            OSError: the file cannot be opened.
        """
        raise NotImplementedError

    def _is_of_disk(self, error: OSError) -> bool:
        """Return True if records wait after this error. Any other error is raised."""
        raise NotImplementedError

    def _release(self) -> None:
        """Close the file if this appender has opened it."""

    def reset_in_child(self) -> None:
        """Reset this appender in a forked child.

        The parent writes the waiting records. The lock is new, because another thread of the
        parent, which does not exist in the child, may have held the old one.
        """
        self._reset_lock()
        self._records.clear()
        self._num_bytes = self._offset = 0
        self._outage = None


class FileAppender(Appender):
    """Appends to a file, as its only writer; makes the file and its folders with the first record.

    The file may be removed, and the file server restarted, at any time. The appender then opens the
    path again.

    Args:
        path: the file.
        is_json_lines: True if the records are lines of JSON. Only then is the file marked as cut
            during an outage, see the head of this file.
        on_cut: called when the file is first opened, if an earlier process left it cut. Runs like
            `on_outage`.
    """

    def __init__(
        self,
        path: Path,
        on_outage: Callable[[Outage], None] = lambda outage: None,
        on_recovery: Callable[[Outage], None] = lambda outage: None,
        *,
        is_json_lines: bool = False,
        on_cut: Callable[[], None] = lambda: None,
        limit: int = WAITING_BYTES,
    ) -> None:
        super().__init__(on_outage, on_recovery, limit=limit)
        self.path = path
        self._is_json_lines = is_json_lines
        self._on_cut = on_cut
        self._descriptor: int | None = None  # None while the file is closed
        self._has_been_open = False

    def _is_of_disk(self, error: OSError) -> bool:
        return True  # No other process uses this file, so every error comes from the file system.

    def _ensure_open(self) -> int:
        if self._descriptor is not None:
            was_removed = os.fstat(self._descriptor).st_nlink == 0
            if was_removed:
                # Further writes would be lost: open a new file.
                self._release()
        if self._descriptor is None:
            self._descriptor = self._open_file()
            self._has_been_open = True
        return self._descriptor

    def _open_file(self) -> int:
        is_first_open = not self._has_been_open
        if is_first_open:
            # Only now: later, a missing folder means that the user is deleting the run.
            make_folder(self.path.parent)
        descriptor = no_follow(str(self.path), os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            if is_first_open:
                if self._is_json_lines:
                    self._repair_last_line(descriptor)
            else:
                # Empty: a new file in place of a removed one. Otherwise it is the old file, opened
                # again after ESTALE.
                is_new_file = os.fstat(descriptor).st_size == 0
                if is_new_file:
                    self._start_with_whole_record()
        except OSError:
            # The next write tries all of it again.
            os.close(descriptor)
            raise
        return descriptor

    def _release(self) -> None:
        if self._descriptor is not None:
            descriptor = self._descriptor
            self._descriptor = None
            os.close(descriptor)

    def _start_with_whole_record(self) -> None:
        """Forget how much of the waiting records is in the old file, which was removed.

        Otherwise the new file would begin with the second half of a record, or with a newline.
        """
        self._offset = 0
        if self._is_marked_as_cut():
            self._records.popleft()
            self._num_bytes -= len(_LAST_NEWLINE)

    def _is_marked_as_cut(self) -> bool:
        """Return True if the file's last newline is among the waiting records."""
        if not self._is_json_lines or not self._records:
            return False
        return self._records[0] == _LAST_NEWLINE

    def _on_failed_write(self, error: OSError, when: float | None) -> None:
        if error.errno == errno.ESTALE:
            self._release()  # The file server was restarted. Only another open helps.
        self._mark_as_cut()
        super()._on_failed_write(error, when)

    def _mark_as_cut(self) -> None:
        """Remove the last newline of the file, if the disk allows it, while records wait."""
        if not self._is_json_lines or self._descriptor is None:
            return
        if not self._records or self._is_marked_as_cut():
            return
        ends_with_half_a_record = self._offset > 0
        if ends_with_half_a_record:
            return  # The file has no last newline.
        with contextlib.suppress(OSError):
            size = os.fstat(self._descriptor).st_size
            if size:
                os.ftruncate(self._descriptor, size - 1)
                self._wait_with_newline()

    def _wait_with_newline(self) -> None:
        self._records.appendleft(_LAST_NEWLINE)
        self._num_bytes += len(_LAST_NEWLINE)

    def _repair_last_line(self, descriptor: int) -> None:
        """End the last line of an earlier process, so that the next record does not continue it.

        A restarted container reuses its pids, so a file that is named after a pid may exist
        already.
        """
        # A new file, or a device such as /dev/null, has size 0.
        size = os.fstat(descriptor).st_size
        if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
            return
        text = os.pread(descriptor, size, 0)
        last_line = text[text.rfind(b"\n") + 1 :]
        try:
            json.loads(last_line)
        except ValueError:
            # Half a record: remove it.
            os.ftruncate(descriptor, size - len(last_line))
        else:
            # A whole record whose newline the earlier process removed, to mark the file as cut.
            self._wait_with_newline()
        self._on_cut()


class DescriptorAppender(Appender):
    """Appends to an open descriptor, such as stderr, to which other processes may write as well.

    An error that does not come from a disk is raised, for example if a pipe has no reader.
    """

    def __init__(
        self,
        descriptor: int,
        on_outage: Callable[[Outage], None] = lambda outage: None,
        on_recovery: Callable[[Outage], None] = lambda outage: None,
        *,
        limit: int = WAITING_BYTES,
    ) -> None:
        super().__init__(on_outage, on_recovery, limit=limit)
        self.descriptor = descriptor

    def _is_of_disk(self, error: OSError) -> bool:
        return error.errno in DISK_ERRNOS

    def _ensure_open(self) -> int:
        return self.descriptor


def is_cut(path: Path) -> bool:
    """Return True if a file of JSON lines is cut: its writer had records that are not in the file.

    Such a file is empty, or does not end with a newline.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb", opener=only_files) as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:  # A file is made for a first record, so that record is missing.
            return True
        file.seek(size - 1)
        return file.read(1) != b"\n"


def any_is_cut(folder: Path, pattern: str) -> bool:
    """Return True if any file in `folder` that matches the glob `pattern` is cut or unreadable."""
    try:
        return any(is_cut(path) for path in folder.glob(pattern))
    except OSError:
        return True


def retry_waiting() -> None:
    """Write the waiting records of all appenders of this process, as far as there is room.

    Processes call this in a loop that they have anyway. Cheap if no records wait.
    """
    if not _appenders_with_outage:
        return
    with _registry_lock:
        waiting = list(_appenders_with_outage.values())
    for appender in waiting:
        # A pipe without a reader raises. Ignored here: the next print to the pipe raises again.
        with contextlib.suppress(OSError):
            appender.retry()


def finish_waiting(seconds: float = FINISH_SECONDS) -> None:
    """Wait up to `seconds` until all records of this process are written. Call this at its end."""
    with _registry_lock:
        waiting = list(_appenders_with_outage.values())
    _wait_for_recovery(waiting, seconds)


def _wait_for_recovery(appenders: list[Appender], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        retry_waiting()
        if not any(appender.outage for appender in appenders):
            return
        if time.monotonic() >= deadline:
            return
        time.sleep(_POLL_SECONDS)


def _count_dropped(outage: Outage, kind: str, when: float | None) -> None:
    if when is None:
        when = time.time()
    if not outage.dropped:
        outage.first_dropped = when
    outage.last_dropped = when
    outage.dropped[kind] += 1


def _unregister_outage(appender: Appender) -> None:
    with _registry_lock:
        _appenders_with_outage.pop(id(appender), None)


def _reset_in_child() -> None:
    """Drop the parent's waiting records in a forked child. Both would write them otherwise."""
    # Another thread of the parent may have held the lock.
    global _registry_lock
    _registry_lock = threading.RLock()
    _appenders_with_outage.clear()
    for appender in list(_appenders):
        appender.reset_in_child()


os.register_at_fork(after_in_child=_reset_in_child)
