# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Write points of curves into a file that TensorBoard reads.

torch's own writer has a thread, and raises the error of a full disk from the next call of the
training thread. Its file is lost from then on.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from titan_ft.run.appender import FileAppender, Outage

if TYPE_CHECKING:
    from tensorboard.compat.proto import event_pb2

FILE_PREFIX = "events.out.tfevents."
"""TensorBoard finds its files by this prefix."""
_numbers = count()


class CurveFile:
    """One file of points in a folder; file and folder are made with the first point.

    Points that cannot be written wait in memory; see `Appender`. A point is in the file at once, so
    a killed process leaves all of its points.

    Args:
        folder: folder of the curves. It may hold earlier files of the same curves.
        report: called with a line for people when the file cannot be written, and when it can be
            written again.
    """

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        self._folder = folder
        self._report = report
        self._file: FileAppender | None = None

    @property
    def has_outage(self) -> bool:
        """True while points wait, because the file cannot be written."""
        return self._file is not None and self._file.outage is not None

    def add(self, step: int, values: Mapping[str, float], when: float, *, anew: bool) -> None:
        """Write a point of each curve.

        Args:
            when: Unix seconds.
            anew: True if TensorBoard is to drop all earlier points of this step and of later ones,
                because they are of a lost state.
        """
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        records = []
        if self._file is None:
            self._file = self._open()
            records.append(Record(wall_time=when, file_version="brain.Event:2"))
        if anew:
            start = SessionLog(status=SessionLog.START)
            records.append(Record(wall_time=when, step=step, session_log=start))
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        records.append(Record(wall_time=when, step=step, summary=Summary(value=points)))
        self._file.append(b"".join(map(_encode, records)), "points", when)

    def close(self, seconds: float = 0.0) -> int:
        """Close the file; return the number of lost points.

        Args:
            seconds: wait this long for room.
        """
        if self._file is None:
            return 0
        return self._file.close(seconds)

    def _open(self) -> FileAppender:
        where = f"{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        path = self._folder / f"{FILE_PREFIX}{self._next_stamp():010d}.{where}"
        return FileAppender(path, self._report_outage, self._report_end)

    def _next_stamp(self) -> int:
        """Return the seconds in the name of the next file: greater than those of all earlier files.

        TensorBoard reads the files in the order of their names. After a clock had gone back, or
        when two attempts began within one second, an earlier attempt was read last, and its start
        dropped the later attempt's steps.
        """
        latest = 0
        for path in self._folder.glob(f"{FILE_PREFIX}*"):
            stamp = path.name.removeprefix(FILE_PREFIX).partition(".")[0]
            if stamp.isdigit():
                latest = max(latest, int(stamp))
        return max(int(time.time()), latest + 1)

    def _report_outage(self, outage: Outage) -> None:
        reason = f"{self._folder} cannot be written ({outage.reason})"
        self._report(f"{reason}: its curves wait until it can")

    def _report_end(self, outage: Outage) -> None:
        num_lost = outage.dropped.total()
        if outage.reported or num_lost:
            lost = f"; {num_lost} points are lost" if num_lost else ""
            self._report(f"{self._folder} can be written again{lost}")


def _encode(record: event_pb2.Event) -> bytes:
    """Return a record in the form of TensorBoard's files, with its length and checksums."""
    from io import BytesIO

    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = BytesIO()
    RecordWriter(buffer).write(record.SerializeToString())
    return buffer.getvalue()
