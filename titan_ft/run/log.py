# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Write and read the events of a run.

Each process of a run writes its own event files, one JSON object a line: `EventLog.emit`. Other
processes read them: `read_events` and `read_history` all at once, `stream_events` in pieces, and
`run/tail.py` during the run. An event is an object of a class in `run/events.py`. Its *header* is
the fields that all classes have: time, pid, and, where they apply, slot (`replica`), rank and
attempt.

A file is *cut* if it is empty or does not end with a newline. Its writer had further events and did
not write them, because the disk was full or the writer was killed within a line. A reader skips
half a line at the end, and reports the cut file.
"""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from titan_ft.run.appender import FINISH_SECONDS, WAITING_BYTES, FileAppender, Outage
from titan_ft.run.events import Event, EventsDelayed, EventsDropped, kinds
from titan_ft.run.paths import RunPaths
from titan_ft.system.ownership import no_follow, only_files

_BLOCK_BYTES = 256 * 1024
"""Read this much of a file at a time."""
_UNSET = (None, -1)
"""Defaults of replica, rank and attempt in an event whose emitter has not set them."""
ROTATE_BYTES = 64 * 2**20
"""A process opens its next file of events when the present file has this size."""
MAX_LINE_BYTES = 16 * 2**20
"""Every reader takes a longer line for damage. Without the limit, such a line would fill the
reader's memory."""
_MAX_FILE_BYTES = 64 * ROTATE_BYTES
"""A larger file is refused. A file grows beyond `ROTATE_BYTES` only while events wait, or while no
next file can be made."""


class EventLog:
    """Appends events to the files of this process, one file after the other. Any thread may emit.

    After `ROTATE_BYTES`, NAME.jsonl is complete, and NAME.2.jsonl follows.

    If a file cannot be written, the process goes on, and the events wait in memory (see
    `appender.py`). The log reports this on stderr once, and again when the events are written. Then
    it adds the event `EventsDelayed`, and also `EventsDropped` if the memory for waiting events was
    full.

    Args:
        path: the first file, made with its folders by the first event. None discards all events.
        replica, rank, attempt: written into the header of each event that has not set them; None if
            not applicable.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        replica: int | None = None,
        rank: int | None = None,
        attempt: int | None = None,
    ) -> None:
        self._header_defaults = {"replica": replica, "rank": rank, "attempt": attempt}
        self._lock = threading.Lock()
        # A log without a path is closed from the start. Its appender gets no record, and so opens
        # no file.
        self._closed = path is None
        self._first_path = path or Path()
        self._file_number = 1
        # Bytes that this process has appended to the present file.
        self._num_bytes = 0
        self._file = self._open(self._first_path)

    @property
    def has_outage(self) -> bool:
        """True while events wait, because the file cannot be written."""
        return self._file.outage is not None

    def emit(self, event: Event, *, is_stamped: bool = False) -> None:
        """Write one event, with its header filled in. After `close` the event is discarded.

        The event is in the file when this returns, unless the disk fails: no buffer of this process
        could lose it to a SIGKILL.

        Args:
            is_stamped: True if the caller set the event's time by `stamp`, because it emits an
                event of an earlier moment. Otherwise the time is now.
        """
        with self._lock:
            if self._closed:
                return
            if not is_stamped:
                stamp(event)
            # Not in `_append`: `_report_recovery` calls that in the middle of a write to this file.
            # While events wait for this file, it must stay open.
            if self._num_bytes >= ROTATE_BYTES and self._file.outage is None:
                self._open_next_file()
            self._append(event)

    def _open(self, path: Path) -> FileAppender:
        return FileAppender(
            path,
            self._report_outage,
            self._report_recovery,
            is_json_lines=True,
            on_cut=self._report_cut,
        )

    def _open_next_file(self) -> None:
        path = RunPaths.following(self._first_path, self._file_number + 1)
        try:
            with open(path, "ab", opener=no_follow):
                pass
        except OSError:
            # The disk may be full. Continue the present file: only a file that exists can be marked
            # as cut while events wait.
            return
        # No events wait, so the close need not wait for any.
        self._file.close(seconds=0.0)
        self._file_number += 1
        self._num_bytes = 0
        self._file = self._open(path)

    def close(self) -> None:
        """Close the file; wait up to `FINISH_SECONDS` for room for waiting events first.

        A second call does nothing.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        num_lost = self._file.close(FINISH_SECONDS)
        if num_lost:
            _report(
                f"{self._file.path} still cannot be written: the last {num_lost} events of this "
                "process are lost"
            )

    def _append(self, event: Event) -> None:
        event.pid = os.getpid()
        for name, value in self._header_defaults.items():
            is_unset = getattr(event, name) in _UNSET
            if is_unset and value is not None:
                setattr(event, name, value)
        line = encode(event)
        self._num_bytes += len(line)
        self._file.append(line, event.name, event.time)

    # The appender of the file calls the methods below, on the thread that writes, in the middle of
    # a write. They append to the same file.

    def _report_outage(self, outage: Outage) -> None:
        _report(
            f"{self._file.path} cannot be written ({outage.reason}): this process keeps up to "
            f"{WAITING_BYTES >> 20} MiB of events in memory until there is room, and goes on"
        )

    def _report_recovery(self, outage: Outage) -> None:
        num_dropped = outage.dropped.total()
        # The appender does not report a short outage soon after another one (`Appender`). Lost
        # events are reported even then.
        if outage.reported or num_dropped:
            lost = f"; {num_dropped} more are lost" if num_dropped else ""
            _report(
                f"{self._file.path} can be written again: {outage.num_waited} events came late{lost}"
            )
            delayed = EventsDelayed(
                error=outage.reason, events=outage.num_waited, since=outage.began
            )
            stamp(delayed)
            self._append(delayed)
        if num_dropped:
            dropped = EventsDropped(
                error=outage.reason,
                events=num_dropped,
                kinds=dict(outage.dropped),
                since=outage.first_dropped,
                until=outage.last_dropped,
            )
            stamp(dropped)
            self._append(dropped)

    def _report_cut(self) -> None:
        """Report that events of an earlier process are lost, which wrote the same file.

        File names contain pids, and a restarted container uses the same pids again.
        """
        cause = "an earlier process of the same pid was killed while its events waited"
        dropped = EventsDropped(error=cause, events=None, kinds={}, since=None, until=None)
        stamp(dropped)
        self._append(dropped)


def _report(text: str) -> None:
    """Print a line for people on stderr."""
    # OSError, ValueError: stderr is closed. AttributeError: it is None. A failed report must not
    # end the process.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"titan_ft: {text}", file=sys.stderr, flush=True)


def stamp(event: Event) -> None:
    """Set the time of an event to now. The event may be written later."""
    event.time = time.time()
    event.mono = round(time.monotonic(), 6)


def encode(event: Event) -> bytes:
    """Return the line of an event.

    Non-finite numbers become null. Scalars of NumPy or torch become numbers.
    """
    try:
        line = _ENCODER.encode(event)
    except UnicodeEncodeError:
        # A path or a message is not UTF-8. A report about it must not end the process.
        builtins = msgspec.to_builtins(event, str_keys=True, enc_hook=_to_builtin)
        line = _ENCODER.encode(_with_utf8(builtins))
    # Add a space after each colon and comma, for people and their search tools.
    return msgspec.json.format(line, indent=0) + b"\n"


class DamagedLineError(ValueError):
    """A line is no event. No version of this package wrote it in whole."""


def decode(line: bytes, *wanted: type[Event]) -> Event | None:
    """Return the event of a line; None if its class is not wanted, or unknown to this version.

    Args:
        wanted: classes of events that the caller wants; empty for all.

    Raises:
        DamagedLineError: the line is no event.
        ValueError: its fields are not those of its class. The error names the field.
    """
    try:
        head = _LINE_START.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedLineError(
            f"must be a JSON object with time and event, got {line[:80]!r}; remove it to read the "
            "rest"
        ) from error
    kind = _find_class(head.event)
    if kind is None:
        return None
    if wanted and not issubclass(kind, wanted):
        return None
    try:
        event: Event = _decoder(kind).decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _wrong_fields(head.event, str(error)) from error
    header = _required_header(kind)
    # msgspec fills a missing field with its default, and no required field is written with its
    # default. So a default value means that the field is missing. `map` compares in C: a loop of
    # Python for each line would take longer than the decoding.
    has_missing = any(map(operator.eq, header.read_values(event), header.defaults))
    if has_missing:
        for name, default in zip(header.names, header.defaults, strict=True):
            if getattr(event, name) == default:
                raise _wrong_fields(head.event, f"{name} is missing")
    return event


def _wrong_fields(name: str, problem: str) -> ValueError:
    return ValueError(
        f"must have the fields of {name} (see docs/events.md): {problem}; read an older version's "
        "run with that version"
    )


def read_events(folder: Path) -> list[Event]:
    """Read all events of a folder's `*.jsonl` files, sorted by time.

    Events of the same time keep the order of files, then of lines. A file's last line is skipped if
    the death of its writer cut it. Events unknown to this version are skipped as well. A missing
    folder has no events.

    Raises:
        OSError: a file, or the folder, cannot be read.
        ValueError: a line is no event. The error names the file, the line and the field.
    """
    return read_history(folder).events


class FolderEvents(NamedTuple):
    """The events of a folder, sorted by time, and the names of its cut files."""

    events: list[Event]
    cut_files: list[str]


class ReadPosition(msgspec.Struct):
    """A position between two lines of an event file: all lines before it have been read."""

    num_bytes: int = 0
    num_lines: int = 0
    # CRC-32 of the bytes before the position. `history/record/kept.py` compares it to find out
    # whether the file is still the same.
    crc: int = 0


def read_history(folder: Path, positions: Mapping[str, ReadPosition] | None = None) -> FolderEvents:
    """Read events as `read_events` does.

    Args:
        positions: for each file name, the position from which to read on. Other files are read from
            the start.

    Raises:
        OSError, ValueError: see `read_events`.
    """
    events: list[Event] = []
    cut_files: list[str] = []
    for path in event_files(folder):
        start = (positions or {}).get(path.name, ReadPosition())
        position = msgspec.structs.replace(start)  # A copy: the caller's position does not move.
        with open_lines(path) as file:
            block = _read_block_at(file, path, position)
            while block.lines:
                events.extend(_decode_lines(path, position, block.lines))
                block = _read_block_at(file, path, position)
        is_empty = position.num_bytes == 0 and not block.rest
        if block.rest or is_empty:
            cut_files.append(path.name)
        if block.rest:
            # Only the newline may be missing. Otherwise the writer was killed within the line, and
            # it is skipped.
            with contextlib.suppress(ValueError):
                event = decode(block.rest)
                if event is not None:
                    events.append(event)
    return FolderEvents(sorted(events, key=lambda event: event.time), cut_files)


def stream_events(path: Path, position: ReadPosition) -> Iterator[Event]:
    """Yield the events of a file from `position` on, and advance `position`.

    A last line without its newline is left for a later call.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is no event. The error names the line.
    """
    while True:
        # Opened for each block: a run may have more files than a process may keep open.
        with open_lines(path) as file:
            lines = _read_block_at(file, path, position).lines
        if not lines:
            return
        yield from _decode_lines(path, position, lines)


def _read_block_at(file: IO[bytes], path: Path, position: ReadPosition) -> Block:
    """Read some lines of the open file at `position`, and do not advance it.

    Raises:
        ValueError: the first line is too long. The error names the file and the line.
    """
    try:
        return read_block(file, position.num_bytes)
    except LongLineError as error:
        raise ValueError(f"{path}:{position.num_lines + 1} {error}") from None


def _decode_lines(path: Path, position: ReadPosition, lines: bytes) -> Iterator[Event]:
    """Yield the events of `lines`, which begin at `position`, and advance `position`.

    Raises:
        ValueError: a line is no event. The error names the line.
    """
    for line in lines.split(b"\n")[:-1]:  # After the last newline comes an empty text.
        position.num_bytes += len(line) + 1
        position.num_lines += 1
        position.crc = zlib.crc32(b"\n", zlib.crc32(line, position.crc))
        try:
            event = decode(line) if line else None
        except ValueError as error:
            raise ValueError(f"{path}:{position.num_lines} {error}") from error
        if event is not None:
            yield event


class Block(NamedTuple):
    """A piece of a file of lines.

    Attributes:
        lines: whole lines, each with its newline; empty if the file has no further whole line yet.
        rest: the line without a newline after them, as far as it was read.
    """

    lines: bytes
    rest: bytes


class LongLineError(ValueError):
    """A line is longer than `MAX_LINE_BYTES`."""

    def __init__(self) -> None:
        super().__init__(f"must be at most {MAX_LINE_BYTES >> 20} MiB long; remove it")


def read_block(file: IO[bytes], start: int, *, stops_at_zero: bool = False) -> Block:
    """Read some lines of an open file from byte `start` on; every reader of event files uses this.

    A block is small unless its first line is long, so that no file can fill the memory.

    Args:
        stops_at_zero: True to read no further than the first zero byte.

    Raises:
        OSError: the file cannot be read.
        LongLineError: the line at `start` is longer than `MAX_LINE_BYTES`.
    """
    file.seek(start)
    data = file.read(_BLOCK_BYTES)
    if stops_at_zero:
        data = data.partition(b"\0")[0]
    if len(data) == _BLOCK_BYTES and b"\n" not in data:
        # Rare: a line that is longer than a block.
        data += file.readline(MAX_LINE_BYTES + 1 - len(data))
        if stops_at_zero:
            data = data.partition(b"\0")[0]
    lines, newline, rest = data.rpartition(b"\n")
    if not newline and len(rest) > MAX_LINE_BYTES:
        raise LongLineError
    return Block(lines + newline, rest)


@contextlib.contextmanager
def open_lines(path: Path) -> Iterator[IO[bytes]]:
    """Open a file of lines to read it.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than any process writes.
    """
    with open(path, "rb", opener=only_files) as file:
        if os.fstat(file.fileno()).st_size > _MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        yield file


def event_files(folder: Path) -> list[Path]:
    """Return the event files of a folder, sorted by name.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        # `Path.glob` would find nothing in an unreadable folder, without an error.
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [folder / name for name in sorted(names) if name.endswith(".jsonl")]


class _LineStart(msgspec.Struct):
    """The fields that a line of any version has."""

    time: float
    event: str


def _with_utf8(value: Any) -> Any:
    """Return a JSON value with a "?" for each character that UTF-8 cannot encode."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list | tuple):
        return [_with_utf8(each) for each in value]
    if isinstance(value, dict):
        return {_with_utf8(key): _with_utf8(each) for key, each in value.items()}
    return value


def _to_builtin(value: Any) -> Any:
    """Return a number or a text for an object that JSON cannot hold."""
    # Scalars of NumPy and torch have the method `item`. `titan_ft.run` imports neither library.
    if callable(getattr(value, "item", None)):
        return value.item()
    return str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_to_builtin)
_LINE_START = msgspec.json.Decoder(_LineStart)
_CLASSES: dict[str, type[Event]] = {}
"""Known classes of events, by the name in a line's field `event`."""


def _find_class(name: str) -> type[Event] | None:
    if name not in _CLASSES:
        # A module may have defined the class since the last call.
        _CLASSES.update((str(kind.__struct_config__.tag), kind) for kind in kinds())
    return _CLASSES.get(name)


@cache
def _decoder(kind: type[Event]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@dataclass(frozen=True)
class _RequiredHeader:
    """The header fields that each line of a class must have.

    Attributes:
        defaults: default value of each of these fields, in the order of `names`.
        read_values: returns the values of an event's fields, in the same order.
    """

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    read_values: Callable[[Event], tuple[Any, ...]]


@cache
def _required_header(kind: type[Event]) -> _RequiredHeader:
    names = []
    defaults = []
    for field in msgspec.structs.fields(kind):
        is_in_header = field.name in Event.__struct_fields__
        # A field whose default is None may be absent from a line.
        if is_in_header and field.default is not None:
            names.append(field.name)
            defaults.append(field.default)
    return _RequiredHeader(tuple(names), tuple(defaults), operator.attrgetter(*names))
