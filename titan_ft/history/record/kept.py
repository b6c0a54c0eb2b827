# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Keep the reduced events of a long run beside its files of events, so that they are read once.

A run of 100,000 steps and 30 groups writes gigabytes. `keep` reduces them, step by step and in
little memory (see `usual_steps`), and keeps the result as `events/reduced.msgpack`. The launcher
calls it whenever the files have grown by `MIN_BYTES` (`titan_ft.launch.record_keeper`). Without a
launcher, the first command that reads so much does. Commands read the kept events, and the later
events of each file. The files of events stay the source: the kept events are used only if this
version made them, and if each file still begins with the same bytes.

The kept file is a head and a series of frames. A frame has the result of one reduction, and the
memory for the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import heapq
import os
import sys
import time
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Union

import msgspec

from titan_ft import versions
from titan_ft.history.record.usual_steps import Memory, Reducer, Reduction, WentBackError
from titan_ft.run.events import Batches, Event, StepCommitted, kinds
from titan_ft.run.log import ReadPosition, event_files, open_lines, read_history, stream_events
from titan_ft.run.orphan import end_with_parent
from titan_ft.run.tail import EventTail
from titan_ft.system.ownership import no_follow
from titan_ft.system.whole_file import write_whole

FILE = "reduced.msgpack"
FORMAT = 5
"""Raise it where `Reducer` takes other steps for usual, or says anything else of them."""
SETTLED_SECONDS = 1.0
"""Events older than this are in their files, whichever host wrote them."""
MIN_BYTES = 64 * 2**20
"""Fewer new bytes of events are not reduced: to read them takes a second."""
MAX_KEPT_BYTES = 2**30
"""A larger file is not read, and the events are reduced again. A writer of the folder could have
planted it, to fill the reader's memory."""
_CHUNK_EVENTS = 4096
_NICENESS = 15
"""Niceness of the process that a launcher starts, so that training goes first."""
_NUMBER_BYTES = 8
_NUM_NUMBERS = 3
"""A frame begins with the lengths of its index and its part, and their CRC-32."""


class _Source(msgspec.Struct):
    """A file of events, and the part of it that is reduced."""

    place: ReadPosition
    modified_ns: int  # when the file was last written, if all of it is reduced; else 0


class _Index(msgspec.Struct):
    """How far the files of events are reduced after a frame."""

    sources: dict[str, _Source]
    memory: Memory


class _Part(msgspec.Struct):
    """The result of one reduction: many `_Chunk`, so that a reader can share values between events
    early.
    """

    chunks: list[msgspec.Raw]


class _Chunk(msgspec.Struct):
    """Some of the events that were found."""

    events: list[Any]
    firsts: list[StepCommitted]
    # places in `events` of commits that agree with an earlier one of the same state in this chunk
    # about the groups and their batches: these fields are left empty, for with many groups they are
    # most of a commit
    alike: list[int]


class _KeptRun(msgspec.Struct):
    """The kept events of a run, or events that were reduced just now."""

    sources: dict[str, _Source]
    memory: Memory
    events: list[Any]
    firsts: list[StepCommitted]
    # of the kept file, up to the end of its last whole frame; 0 if the file is to be written anew
    num_bytes: int = 0
    inode: int = 0  # of the kept file

    @property
    def known_bytes(self) -> dict[str, int]:
        """The number of reduced bytes of each file of events."""
        return {name: source.place.num_bytes for name, source in self.sources.items()}


class _VersionHeader(msgspec.Struct):
    """The head of the file. Only the same version can read the rest."""

    version: str


def keep(folder: Path) -> None:
    """Reduce and keep the events in a folder that are not kept yet, if they are many.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: names the file and the line that is no event.
    """
    _bring_up_to_date(folder, with_events=False)


def follow(folder: Path) -> tuple[list[Event], EventTail]:
    """Return the events of a run so far, in order of time and reduced if many, and a tail of later
    ones.

    A damaged line is skipped, as in `EventTail`; then nothing is reduced.
    """
    try:
        kept = _bring_up_to_date(folder)
    except (OSError, ValueError):
        kept = None
    if kept is None:
        tail = EventTail(folder, from_start=True)
        return tail.poll(), tail
    tail = EventTail(folder, from_start=True, known=kept.known_bytes)
    events = [*kept.events, *kept.firsts, *tail.poll()]
    return sorted(events, key=lambda event: event.time), tail


def read_reduced(folder: Path) -> tuple[Reduction, list[str]]:
    """Read the events of a run; return them, reduced if many, and the names of the cut files.

    Raises:
        OSError: a file, or the folder, cannot be read.
        ValueError: names the file and the line that is no event.
    """
    kept = _bring_up_to_date(folder)
    if kept is None:
        events, cut = read_history(folder)
        return Reduction(events), cut
    places = {name: source.place for name, source in kept.sources.items()}
    later, cut = read_history(folder, places)
    return Reduction([*kept.events, *later], kept.firsts), cut


def _bring_up_to_date(folder: Path, *, with_events: bool = True) -> _KeptRun | None:
    """Return the kept events, extended by later ones if these are many; None for a run with few
    events.

    Args:
        with_events: False if the caller does not need the events themselves.

    Raises:
        OSError, ValueError: see `read_reduced`.
    """
    kept = _load(folder, with_events=with_events)
    paths = event_files(folder)
    num_new_bytes = sum(path.stat().st_size for path in paths)
    if kept is not None:
        num_new_bytes -= sum(kept.known_bytes.values())
    if num_new_bytes < MIN_BYTES:
        return kept
    found = _reduce(paths, kept)
    # A full or read-only disk: the next command reduces them again.
    with contextlib.suppress(OSError):
        _store(folder, found)
    if kept is not None and found.num_bytes:
        found.events = [*kept.events, *found.events]
        found.firsts = [*kept.firsts, *found.firsts]
    return found


def _reduce(paths: list[Path], kept: _KeptRun | None) -> _KeptRun:
    """Reduce the events that are not kept yet; reduce all events again if training went back to
    kept ones.
    """
    if kept is None:
        kept = _KeptRun({}, Memory(), [], [])
    known = kept.sources
    num_bytes = kept.num_bytes
    # The files are read one after the other. A file that is read early may lack an event, such as a
    # fault, whose effects are in a file that is read late.
    until = time.time() - SETTLED_SECONDS
    reducer = Reducer(kept.memory, until)
    while True:
        places = {path: _copy(known.get(path.name)) for path in paths}
        modified = {path: path.stat().st_mtime_ns for path in paths}
        streams = [stream_events(path, place) for path, place in places.items()]
        try:
            for event in heapq.merge(*streams, key=lambda event: event.time):
                reducer.take(event)
        except WentBackError as error:
            unusual = [*reducer.memory.unusual, (error.step, reducer.memory.furthest)]
            reducer = Reducer(Memory(unusual=unusual), until)
            known = {}
            num_bytes = 0
            continue
        found = reducer.finish()
        sources = {}
        for path, place in places.items():
            is_all = path.stat().st_size == place.num_bytes
            sources[path.name] = _Source(place, modified[path] if is_all else 0)
        return _KeptRun(sources, reducer.memory, found.events, found.firsts, num_bytes, kept.inode)


def _copy(source: _Source | None) -> ReadPosition:
    """Return a copy, because `stream_events` moves the place on."""
    if source is None:
        return ReadPosition()
    return msgspec.structs.replace(source.place)


def _load(folder: Path, *, with_events: bool = True) -> _KeptRun | None:
    """Return the kept events; None if the file is missing, damaged, or of other events."""
    try:
        with open_lines(folder / FILE) as file:
            status = os.fstat(file.fileno())
            head = file.read(len(_head()))
            if head != _head() or status.st_size > MAX_KEPT_BYTES:
                return None
            data = head + file.read()
        frames = list(_frames(memoryview(data)))
        if not frames:
            return None
        latest = frames[-1]
        index = _index_decoder().decode(latest.encoded_index)
        for name, source in index.sources.items():
            if not _is_unchanged(folder / name, source):
                return None
        kept = _KeptRun(index.sources, index.memory, [], [], latest.end, status.st_ino)
        if with_events:
            _add_events(kept, [frame.encoded_part for frame in frames])
        return kept
    except (OSError, msgspec.DecodeError, ValueError):
        return None


class _Frame(NamedTuple):
    """A frame of the kept file.

    Attributes:
        end: number of the byte after the frame in the file.
    """

    encoded_index: memoryview
    encoded_part: memoryview
    end: int


def _frames(data: memoryview) -> Iterator[_Frame]:
    """Yield the frames of a file, up to an incomplete one: its writer was killed."""
    position = len(_head())
    while True:
        numbers = []
        for _ in range(_NUM_NUMBERS):
            numbers.append(int.from_bytes(data[position : position + _NUMBER_BYTES], "big"))
            position += _NUMBER_BYTES
        index_bytes, part_bytes, crc = numbers
        begin_of_part = position + index_bytes
        end = begin_of_part + part_bytes
        if not index_bytes or end > len(data):
            return
        if zlib.crc32(data[position:end]) != crc:
            return
        yield _Frame(data[position:begin_of_part], data[begin_of_part:end], end)
        position = end


def _add_events(kept: _KeptRun, parts: list[memoryview]) -> None:
    """Decode the events of some frames, without Python's garbage collector.

    The collector would walk through millions of objects again and again, which took half the time
    of `check`. There are no cycles among them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        pool = _Pool()
        for data in parts:
            for raw in _part_decoder().decode(data).chunks:
                chunk = _chunk_decoder().decode(raw)
                pool.share(chunk)
                kept.events += chunk.events
                kept.firsts += chunk.firsts
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


class _Pool:
    """Shares equal values between the commits of a history. Separate values would take several
    times the memory.
    """

    def __init__(self) -> None:
        self._participants: list[int] = []
        self._nothing: list[Batches] = []

    def share(self, chunk: _Chunk) -> None:
        """Let equal values of a chunk be the same objects, and fill in the fields that were left
        empty.
        """
        alike = set(chunk.alike)
        known: dict[str, StepCommitted] = {}
        for place, event in enumerate(chunk.events):
            if not isinstance(event, StepCommitted):
                continue
            self._share_small(event)
            if place not in alike:
                self._share_lists(event)
                known[event.lineage] = event
                continue
            first = known[event.lineage]
            event.lineage = first.lineage
            event.parent = first.parent
            event.participants = first.participants
            event.batches = first.batches
        for event in chunk.firsts:
            self._share_small(event)
            self._share_lists(event)

    def _share_small(self, event: StepCommitted) -> None:
        if not event.extra_data:
            event.extra_data = self._nothing
        for wait in event.waits or ():
            msgspec.structs.force_setattr(wait, "why", sys.intern(wait.why))

    def _share_lists(self, event: StepCommitted) -> None:
        if event.participants == self._participants:
            event.participants = self._participants
        self._participants = event.participants
        # All slots have mostly trained the same batches.
        pairs: dict[tuple[int, int], tuple[int, int]] = {}
        batches = event.batches
        for slot, pair in batches.items():
            batches[slot] = pairs.setdefault(pair, pair)


def _pack(events: list[Any], firsts: list[StepCommitted]) -> _Part:
    """Return events as a part of a frame."""
    chunks = []
    for begin in range(0, max(len(events), len(firsts)), _CHUNK_EVENTS):
        some = events[begin : begin + _CHUNK_EVENTS]
        alike = []
        known: dict[str, StepCommitted] = {}
        for place, event in enumerate(some):
            if not isinstance(event, StepCommitted):
                continue
            first = known.get(event.lineage)
            if first is None or not _is_alike(first, event):
                known[event.lineage] = event
                continue
            some[place] = msgspec.structs.replace(event, participants=[], batches={})
            alike.append(place)
        chunk = _Chunk(some, firsts[begin : begin + _CHUNK_EVENTS], alike)
        chunks.append(msgspec.Raw(msgspec.msgpack.encode(chunk)))
    return _Part(chunks)


def _is_alike(first: StepCommitted, event: StepCommitted) -> bool:
    return (
        event.parent == first.parent
        and event.participants == first.participants
        and event.batches == first.batches
    )


def _is_unchanged(path: Path, source: _Source) -> bool:
    """Return True if a file still begins with the reduced bytes.

    Raises:
        OSError: the file is gone, or cannot be read.
    """
    status = path.stat()
    num_bytes = source.place.num_bytes
    if status.st_size < num_bytes:
        return False
    if status.st_size == num_bytes and status.st_mtime_ns == source.modified_ns:
        return True
    crc = 0
    num_left = num_bytes
    with open_lines(path) as file:
        while num_left:
            data = file.read(min(num_left, 1 << 20))
            if not data:
                return False
            crc = zlib.crc32(data, crc)
            num_left -= len(data)
    return crc == source.place.crc


def _store(folder: Path, found: _KeptRun) -> None:
    """Append a frame with a result, or write a new file.

    Raises:
        OSError: the file cannot be written.
    """
    index = msgspec.msgpack.encode(_Index(found.sources, found.memory))
    part = msgspec.msgpack.encode(_pack(found.events, found.firsts))
    body = index + part
    numbers = (len(index), len(part), zlib.crc32(body))
    frame = b"".join(number.to_bytes(_NUMBER_BYTES, "big") for number in numbers) + body
    path = folder / FILE
    if (found.num_bytes or len(_head())) + len(frame) > MAX_KEPT_BYTES:
        # `_load` would refuse the file. Without the frame it stays of use.
        return
    if not found.num_bytes:
        write_whole(path, _head() + frame)
        return
    with open(path, "r+b", opener=no_follow) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.seek(found.num_bytes)
        # Another process may have made the file anew meanwhile, or have appended a frame of the
        # same events.
        status = os.fstat(file.fileno())
        if status.st_ino != found.inode or status.st_size > MAX_KEPT_BYTES:
            return
        appended = memoryview(bytes(len(_head())) + file.read())
        if any(_frames(appended)):
            return
        file.truncate(found.num_bytes)
        file.seek(found.num_bytes)
        file.write(frame)


@cache
def _head() -> bytes:
    """Return the beginning of a file that this version can read: its version, and the fields of all
    events.
    """
    fields = [(str(kind.__struct_config__.tag), kind.__struct_fields__) for kind in kinds()]
    crc = zlib.crc32(repr(fields).encode())
    version = f"{versions()['titan_ft']} {FORMAT} {crc:08x}"
    return msgspec.msgpack.encode(_VersionHeader(version))


@cache
def _index_decoder() -> msgspec.msgpack.Decoder[_Index]:
    return msgspec.msgpack.Decoder(_Index)


@cache
def _part_decoder() -> msgspec.msgpack.Decoder[_Part]:
    return msgspec.msgpack.Decoder(_Part)


@cache
def _chunk_decoder() -> msgspec.msgpack.Decoder[_Chunk]:
    # The kinds are known at run time only.
    any_event: Any = Union[tuple(kinds())]  # noqa: UP007
    known = msgspec.defstruct("_Known", [("events", list[any_event])], bases=(_Chunk,))
    return msgspec.msgpack.Decoder(known)


if __name__ == "__main__":
    end_with_parent()
    os.nice(_NICENESS)
    # By its own name: as __main__ this module has classes of its own.
    from titan_ft.history.record import kept

    kept.keep(Path(sys.argv[1]))
