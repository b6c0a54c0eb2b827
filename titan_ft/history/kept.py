# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Keep the reduced events of a long run beside its files of events, so that they are read once.

A run of 100,000 steps and 30 groups writes gigabytes. The first command that reads so much reduces it, step by step and
in little memory (see `usual_steps`), and keeps the result as `events/reduced.msgpack`. Later commands read that, and of
each file only what came since. The files of events stay the source: what is kept is used only if it was made by this
version, and if each file still begins with the very bytes that were read.
"""

from __future__ import annotations

import contextlib
import heapq
import time
import zlib
from functools import cache
from pathlib import Path
from typing import Any, Union

import msgspec

from titan_ft import versions
from titan_ft.history.usual_steps import Memory, Reducer, Reduction, WentBackError
from titan_ft.run.events import Event, StepCommitted, kinds
from titan_ft.run.log import Place, event_files, read_history, stream
from titan_ft.run.tail import EventTail
from titan_ft.run.whole_file import write_whole

FILE = "reduced.msgpack"
FORMAT = 2
"""Raise it where `Reducer` takes other steps for usual, or says anything else of them."""
SETTLED_SECONDS = 1.0
"""Events older than this are in their files, whichever host wrote them."""
MIN_BYTES = 64 * 2**20
"""So many new bytes of events are reduced. Fewer are read as they are: that takes a second."""


class _Source(msgspec.Struct):
    """A file of events, and what of it is reduced."""

    place: Place
    modified_ns: int  # when the file was last written, if all of it is reduced; else 0


class _Kept(msgspec.Struct):
    sources: dict[str, _Source]
    memory: Memory
    events: list[Any]
    firsts: list[StepCommitted]


class _Head(msgspec.Struct):
    """Stands alone before the rest, which only the same version can read."""

    version: str


def follow(folder: Path) -> tuple[list[Event], EventTail]:
    """Return the events of a run so far, in order of time and reduced where they are many, and a tail of the rest.

    A damaged line is passed over, as `EventTail` does; then nothing is reduced.
    """
    try:
        kept = _bring_up_to_date(folder)
    except (OSError, ValueError):
        kept = None
    if kept is None:
        tail = EventTail(folder, from_start=True)
        return tail.poll(), tail
    tail = EventTail(folder, from_start=True, known={name: each.place.num_bytes for name, each in kept.sources.items()})
    events = [*kept.events, *kept.firsts, *tail.poll()]
    return sorted(events, key=lambda event: event.time), tail


def read_reduced(folder: Path) -> tuple[Reduction, list[str]]:
    """Read the events of a run; return them, reduced where they are many, and the names of the files that are cut.

    Raises:
        OSError: a file, or the folder, cannot be read.
        ValueError: names the file and line that is no event.
    """
    kept = _bring_up_to_date(folder)
    if kept is None:
        events, cut = read_history(folder)
        return Reduction(events), cut
    later, cut = read_history(folder, {name: source.place for name, source in kept.sources.items()})
    return Reduction([*kept.events, *later], kept.firsts), cut


def _bring_up_to_date(folder: Path) -> _Kept | None:
    """Return what is kept, with what came since if that is much; None for a run with few events.

    Raises:
        OSError, ValueError: as `read_reduced`.
    """
    kept = _load(folder)
    sizes = {path: path.stat().st_size for path in event_files(folder)}
    known = {} if kept is None else {name: source.place.num_bytes for name, source in kept.sources.items()}
    if sum(sizes.values()) - sum(known.values()) >= MIN_BYTES:
        kept = _reduce(list(sizes), kept)
        with contextlib.suppress(OSError):  # a full or read-only disk: the next command reduces them again
            _store(folder, kept)
    return kept


def _reduce(paths: list[Path], kept: _Kept | None) -> _Kept:
    """Reduce what the files hold beyond what is kept already; all of it anew if training went back over that."""
    known = {} if kept is None else kept.sources
    # A file that is read early lacks what one that is read late has, such as the fault that is felt there.
    until = time.time() - SETTLED_SECONDS
    reducer = Reducer(None if kept is None else kept.memory, until)
    while True:
        places = {path: _copy(known.get(path.name)) for path in paths}
        modified = {path: path.stat().st_mtime_ns for path in paths}
        merged = heapq.merge(*(stream(path, place) for path, place in places.items()), key=lambda event: event.time)
        try:
            for event in merged:
                reducer.take(event)
        except WentBackError as error:
            unusual = [*reducer.memory.unusual, (error.step, reducer.memory.furthest)]
            known, kept, reducer = {}, None, Reducer(Memory(unusual=unusual), until)
            continue
        found = reducer.finish()
        sources = {}
        for path, place in places.items():
            is_all = path.stat().st_size == place.num_bytes
            sources[path.name] = _Source(place, modified[path] if is_all else 0)
        earlier = _Kept({}, Memory(), [], []) if kept is None else kept
        return _Kept(
            sources,
            reducer.memory,
            [*earlier.events, *found.events],
            [*earlier.firsts, *found.firsts],
        )


def _copy(source: _Source | None) -> Place:
    return Place() if source is None else msgspec.structs.replace(source.place)


def _load(folder: Path) -> _Kept | None:
    """Return what is kept, if it can be relied on."""
    path = folder / FILE
    try:
        data = path.read_bytes()
        if not data.startswith(_head()):
            return None
        body = memoryview(data)[len(_head()) :]
        if zlib.crc32(body[4:]) != int.from_bytes(body[:4], "big"):
            return None
        kept = _decoder().decode(body[4:])
        return kept if all(_is_unchanged(folder / name, source) for name, source in kept.sources.items()) else None
    except (OSError, msgspec.DecodeError, ValueError):
        return None


def _is_unchanged(path: Path, source: _Source) -> bool:
    """Say whether a file still begins with the bytes that were reduced.

    Raises:
        OSError: it is gone, or cannot be read.
    """
    status = path.stat()
    if status.st_size < source.place.num_bytes:
        return False
    if status.st_size == source.place.num_bytes and status.st_mtime_ns == source.modified_ns:
        return True
    crc, left = 0, source.place.num_bytes
    with path.open("rb") as file:
        while left:
            data = file.read(min(left, 1 << 20))
            if not data:
                return False
            crc, left = zlib.crc32(data, crc), left - len(data)
    return crc == source.place.crc


def _store(folder: Path, kept: _Kept) -> None:
    body = msgspec.msgpack.encode(kept)
    write_whole(folder / FILE, _head() + zlib.crc32(body).to_bytes(4, "big") + body)


@cache
def _head() -> bytes:
    """Return the beginning of a file that this version can read: its own number, and the fields of all events."""
    fields = repr([(str(kind.__struct_config__.tag), kind.__struct_fields__) for kind in kinds()])
    version = f"{versions()['titan_ft']} {FORMAT} {zlib.crc32(fields.encode()):08x}"
    return msgspec.msgpack.encode(_Head(version))


@cache
def _decoder() -> msgspec.msgpack.Decoder[_Kept]:
    any_event: Any = Union[tuple(kinds())]  # noqa: UP007  # of a tuple that is known at run time only
    known = msgspec.defstruct("_Known", [("events", list[any_event])], bases=(_Kept,))
    return msgspec.msgpack.Decoder(known)
