# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Following the files of a run while they grow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.event_builder import build
from titan_ft.run import log
from titan_ft.run import tail as tail_module
from titan_ft.run.events import Drained, Event, Hung
from titan_ft.run.log import EventLog, encode, read_history
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
    monkeypatch.setattr("titan_ft.run.tail.MAX_LINE_BYTES", 100)
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
