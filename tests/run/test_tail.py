# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Following the files of a run while they grow."""

from __future__ import annotations

import contextlib
import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.event_builder import build
from titan_ft.launch.restart_policy import has_run_committed
from titan_ft.run import log
from titan_ft.run import tail as tail_module
from titan_ft.run.events import Drained, Event, Hung
from titan_ft.run.log import EventLog, encode, read_history
from titan_ft.run.paths import RunPaths
from titan_ft.run.tail import EventTail, FileTail, last_error_line


def hung(step: int) -> Hung:
    return build(Hung, step=step)


def steps(tail: EventTail) -> list[int]:
    return [event.step for event in tail.poll() if isinstance(event, Hung)]


def test_events_of_an_earlier_run_are_not_read(tmp_path: Path) -> None:
    """Existing events in the folder belong to an earlier run; later lines of such a file
    are new.
    """
    log = EventLog(tmp_path / "a.jsonl")
    log.emit(hung(1))
    tail = EventTail(tmp_path)
    EventLog(tmp_path / "b.jsonl").emit(hung(2))
    log.emit(hung(3))
    assert steps(tail) == [2, 3]


def test_unfinished_lines_are_read_later(tmp_path: Path) -> None:
    """The tail returns each whole line once, in the order of time over all files, and skips
    damage.
    """
    tail = EventTail(tmp_path / "events")
    assert tail.poll() == []
    first, second = (EventLog(tmp_path / "events" / f"{name}.jsonl", replica=0) for name in "ba")
    first.emit(hung(1))
    second.emit(hung(2))
    assert steps(tail) == [1, 2]
    line = encode(build(Hung, time=1.0, step=3))
    with (tmp_path / "events" / "a.jsonl").open("ab") as file:
        file.write(b"broken\n" + line[:40])
        file.flush()
        assert tail.poll() == []
        file.write(line[40:])
    assert steps(tail) == [3]
    assert tail.poll() == []


def test_from_the_start(tmp_path: Path) -> None:
    """Asked to, the tail begins with what the files hold already, and goes on with what is new."""
    log = EventLog(tmp_path / "a.jsonl")
    log.emit(hung(1))
    tail = EventTail(tmp_path, from_start=True)
    log.emit(hung(2))
    EventLog(tmp_path / "b.jsonl").emit(hung(3))
    assert steps(tail) == [1, 2, 3]
    log.emit(hung(4))
    assert steps(tail) == [4]


@pytest.mark.parametrize("from_start", [False, True])
def test_folder_that_comes_and_goes(tmp_path: Path, from_start: bool) -> None:
    """A folder that is not there, yet or any more, has no events."""
    folder = tmp_path / "events"
    tail = EventTail(folder, from_start=from_start)
    assert tail.poll() == []
    path = folder / "a.jsonl"
    EventLog(path).emit(hung(1))
    assert steps(tail) == [1]
    path.unlink()
    folder.rmdir()
    assert tail.poll() == []


@pytest.mark.parametrize(
    "line",
    [
        *(
            "[]",
            "3",
            '{"time": 1.0}',
            '{"time": "x", "event": "hung"}',
            '{"time": 1.0, "event": 3}',
        ),
        *(
            '{"time": 1.0, "event": "hung", "mono": 1.0, "pid": 1}',
            '{"time": 1.0, "event": "of_a_newer_version"}',
        ),
    ],
)
def test_what_is_no_event_is_skipped(tmp_path: Path, line: str) -> None:
    """Only an object with a number as time, a name as event and that event's fields is one."""
    (tmp_path / "a.jsonl").write_bytes(
        line.encode() + b"\n" + encode(build(Hung, time=2.0, step=7))
    )
    assert steps(EventTail(tmp_path, from_start=True)) == [7]


def test_lines_of_any_file(tmp_path: Path) -> None:
    """The tail of a file that is not there yet is empty; then it returns whole lines, each once."""
    path = tmp_path / "orders"
    tail = FileTail(path)
    assert tail.poll() == b""
    path.write_bytes(b"one\ntw")
    assert tail.poll() == b"one\n"
    assert tail.poll() == b""
    with path.open("ab") as file:
        file.write(b"o\n")
    assert tail.poll() == b"two\n"
    assert FileTail(path, offset=4).poll() == b"two\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one\nValueError: x\n[rank0]: done\n\n", "ValueError: x"),
        ("[rank1]: torch.OutOfMemoryError: y\nafter\n", "[rank1]: torch.OutOfMemoryError: y"),
        ("one\ntwo\n", "two"),
        (
            "one\nFatal Python error: Segmentation fault\n\nThread 0x1\nExtension modules: a, b\n",
            "Fatal Python error: Segmentation fault",
        ),
        (
            "RuntimeError: long ago\nterminate called\n  what():  8 vs 4\nFatal Python error: Aborted\n\nThread 0x1\n",
            "what():  8 vs 4",
        ),
        ("\n", "(empty log)"),
        (None, "(no log)"),
    ],
)
def test_why_a_worker_failed(tmp_path: Path, text: str | None, line: str) -> None:
    """The last line that names an exception, else the last non-empty one, else a note; before a
    crash's stacks.
    """
    path = tmp_path / "rank-0.log"
    if text is not None:
        path.write_text(text)
    assert last_error_line(path) == line


def test_a_file_that_was_cut_begins_anew(tmp_path: Path) -> None:
    """A log is emptied or replaced while somebody follows it."""
    path = tmp_path / "a.log"
    path.write_text("one\ntwo\n")
    tail = FileTail(path)
    assert tail.poll() == b"one\ntwo\n"
    path.write_text("3\n")
    assert tail.poll() == b"3\n"
    assert tail.poll() == b""


def test_shared_storage_that_lags_tells_no_event_twice(tmp_path: Path) -> None:
    """Its caches may show a file with an old length, although this process has read more of it
    already.
    """
    path = tmp_path / "a.jsonl"
    log = EventLog(path)
    log.emit(hung(1))
    early = path.read_bytes()
    tail = EventTail(tmp_path, from_start=True)
    assert steps(tail) == [1]
    log.emit(hung(2))
    assert steps(tail) == [2]
    whole = path.read_bytes()
    path.write_bytes(early)
    assert tail.poll() == []
    path.write_bytes(whole)
    assert tail.poll() == []
    log.emit(hung(3))
    assert steps(tail) == [3]


def test_bytes_that_have_yet_to_come_are_waited_for(tmp_path: Path) -> None:
    """The length of a file may be there before what was written last: zeros stand in its place."""
    path = tmp_path / "a.jsonl"
    EventLog(path).emit(hung(1))
    line = path.read_bytes()
    path.write_bytes(line + b"\0" * (len(line) - 1) + b"\n")
    tail = EventTail(tmp_path, from_start=True)
    assert len(tail.poll()) == 1
    path.write_bytes(line + line)
    assert len(tail.poll()) == 1


def test_another_file_of_the_same_name_is_read_from_its_beginning(tmp_path: Path) -> None:
    """A failed launch is removed, and the next one may have its pid."""
    path = tmp_path / "a.jsonl"
    tail = EventTail(tmp_path, from_start=True)
    for step in (1, 2):
        EventLog(path).emit(hung(step))
    assert len(tail.poll()) == 2
    other = tmp_path / "other"
    EventLog(other).emit(hung(3))
    other.replace(path)
    assert steps(tail) == [3]


def test_an_endless_line_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's file. The launcher polls ten times a second, and read all of it each time."""
    for module in (log, tail_module):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 100)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 250)
    tail = FileTail(path)
    for _ in range(3):
        assert tail.poll() == b""
        assert tail.is_cut
    assert tail._offset == 200
    with path.open("ab") as file:
        file.write(b"\nlast\n" + b"y" * 99 + b"\n")
    assert tail.poll().splitlines()[1:] == [b"last", b"y" * 99]


class Counted:
    """Counts the bytes that are read from a file."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.num_bytes = 0

    def seek(self, place: int) -> int:
        return self.file.seek(place)

    def read(self, size: int = -1) -> bytes:
        return self._count(self.file.read(size))

    def readline(self, size: int = -1) -> bytes:
        return self._count(self.file.readline(size))

    def _count(self, data: bytes) -> bytes:
        self.num_bytes += len(data)
        return data


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function for the number of bytes that were read from files of lines."""
    files: list[Counted] = []
    opened = log.open_lines

    @contextlib.contextmanager
    def count(path: Path) -> Iterator[Counted]:
        with opened(path) as file:
            files.append(Counted(file))
            yield files[-1]

    for module in (log, tail_module):
        monkeypatch.setattr(module, "open_lines", count)
    return lambda: sum(file.num_bytes for file in files)


@pytest.mark.parametrize("start", [b"", b"\n", b"x", b"x\nx", b"x" * (1 << 20)])
def test_zeros_cost_a_follower_nothing(
    tmp_path: Path, num_read: Callable[[], int], start: bytes
) -> None:
    """A sparse file. Each poll read 16 MiB of it, and all of it after a newline."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(start)
    os.truncate(path, 1 << 29)
    tail = EventTail(tmp_path, from_start=True)
    for _ in range(20):
        assert tail.poll() == []
        assert tail.cut == {"a.jsonl"}
    assert num_read() <= 20 << 20
    before = num_read()
    assert tail.poll() == []
    assert num_read() - before == 1, "the byte that is awaited"
    num_start = len(start.rpartition(b"\n")[0] + b"\n") if b"\n" in start else 0
    with path.open("r+b") as file:
        file.seek(num_start)
        file.write(b" " * (len(start) - num_start) + encode(hung(1)))
    assert steps(tail) == [1]


@pytest.mark.parametrize("reader", [read_history, has_run_committed])
def test_zeros_fill_the_memory_of_no_reader(
    tmp_path: Path, num_read: Callable[[], int], reader: Callable[[Any], Any]
) -> None:
    """A sparse file costs its author nothing."""
    paths = RunPaths(tmp_path)
    EventLog(paths.events / "a.jsonl").emit(hung(1))
    planted = paths.events / "replica-0-rank-0-attempt-0-1.jsonl"
    planted.touch()
    os.truncate(planted, 1 << 29)
    tracemalloc.start()
    if reader is has_run_committed:
        assert not reader(paths)
    else:
        limit = r"attempt-0-1\.jsonl:1 must be at most 16 MiB long; remove it"
        with pytest.raises(ValueError, match=limit):
            reader(paths.events)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    assert num_read() <= 17 << 20


def test_a_long_line_that_grows_is_read_once(tmp_path: Path, num_read: Callable[[], int]) -> None:
    """Ten times a second, a launcher read again what there was of the line."""
    path = tmp_path / "a.jsonl"
    line = b" " * (1 << 20) + encode(hung(1))
    path.write_bytes(line[:-9])
    tail = EventTail(tmp_path, from_start=True)
    for _ in range(9):
        assert (tail.poll(), tail.cut) == ([], {"a.jsonl"})
    assert num_read() < 2 << 20
    with path.open("ab") as file:
        file.write(line[-9:] + encode(hung(2)))
    assert steps(tail) == [1, 2]
    assert tail.cut == set()


def test_a_file_of_damage_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB of newlines and single letters stopped the launcher for a minute."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x\n" * 999 + encode(hung(1)) + b"x\n" * 100_000 + encode(hung(2)))
    num_looked = 0

    def decode(line: bytes, *wanted: type[Event]) -> Event | None:
        nonlocal num_looked
        num_looked += 1
        return log.decode(line, *wanted)

    monkeypatch.setattr(tail_module, "decode", decode)
    tail = EventTail(tmp_path, from_start=True)
    other = EventLog(tmp_path / "b.jsonl")
    for step in (3, 4):
        other.emit(hung(step))
        assert steps(tail)[-1] == step
    assert num_looked <= 2003


def test_a_file_larger_than_any_that_is_written_is_not_read(tmp_path: Path) -> None:
    """A sparse file costs its author nothing."""
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert EventTail(tmp_path, from_start=True).poll() == []
    with pytest.raises(OSError, match="File too large"):
        read_history(tmp_path)


def test_only_what_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the files with such names, each line is looked at once, and only events of the wanted
    classes are returned.
    """
    looked_at: list[bytes] = []

    def decode(line: bytes, *wanted: type[Event]) -> Event | None:
        looked_at.append(line)
        return log.decode(line, *wanted)

    monkeypatch.setattr(tail_module, "decode", decode)
    tail = EventTail(tmp_path, Drained, pattern="replica-1-*.jsonl", from_start=True)
    mine, other = (EventLog(tmp_path / f"replica-{replica}-x.jsonl") for replica in (1, 2))
    for file in (mine, other):
        for event in (hung(1), build(Drained, step=2), hung(3)):
            file.emit(event)
    assert [(event.name, event.step) for event in tail.poll() if isinstance(event, Drained)] == [
        ("drained", 2)
    ]
    assert tail.poll() == []
    mine.emit(build(Drained, step=4))
    assert len(tail.poll()) == 1
    assert len(looked_at) == 4


def test_what_a_writer_could_not_write_is_seen(tmp_path: Path) -> None:
    """An empty file, half a line, a newline that was taken away: how many files have a writer with
    more to tell.
    """
    tail = EventTail(tmp_path)
    paths = [tmp_path / f"{name}.jsonl" for name in "abc"]
    for path in paths:
        EventLog(path).emit(hung(1))
    assert (len(tail.poll()), tail.cut) == (3, set())
    with paths[0].open("ab") as file:
        file.write(b'{"time"')
    os.truncate(paths[1], paths[1].stat().st_size - 1)
    (tmp_path / "d.jsonl").touch()
    for _ in range(2):
        assert (tail.poll(), tail.cut) == ([], {"a.jsonl", "b.jsonl", "d.jsonl"})
    with paths[1].open("ab") as file:
        file.write(b"\n" + encode(build(Hung, time=2.0, step=2)))
    (event,) = tail.poll()
    assert (event.time, tail.cut) == (2.0, {"a.jsonl", "d.jsonl"})


def test_a_folder_that_cannot_be_listed_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without a free descriptor ended here, and with the launcher the whole run."""
    log = EventLog(tmp_path / "a.jsonl")
    tail = EventTail(tmp_path)
    log.emit(hung(1))
    assert steps(tail) == [1]
    log.emit(hung(2))

    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as without_descriptors:
        without_descriptors.setattr(Path, "glob", fail)
        found = steps(tail)
    log.emit(hung(3))
    assert [*found, *steps(tail)] == [2, 3]


def test_events_of_another_version_are_no_damage(tmp_path: Path) -> None:
    """A reader of another version would give the file up, and miss how its group ended."""
    good = encode(build(Hung, time=1.0, step=7))
    other = json.dumps({**json.loads(good), "step": "seven"}).encode() + b"\n"
    path = tmp_path / "a.jsonl"
    path.write_bytes(other * (tail_module.MAX_DAMAGED_LINES + 1) + good)
    tail = tail_module.EventFileTail(path)
    assert [event.step for event in tail.poll() if isinstance(event, Hung)] == [7]
