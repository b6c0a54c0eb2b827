# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Following the event files of a run while they grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ft.history.events import EventLog
from titan_ft.launch.event_tail import EventTail


def test_events_of_an_earlier_run_are_not_read(tmp_path: Path) -> None:
    """What the folder holds when the tail is made was told by the earlier run; the rest of such a file is new."""
    log = EventLog(tmp_path / "a.jsonl")
    log.emit("old")
    tail = EventTail(tmp_path)
    EventLog(tmp_path / "b.jsonl").emit("new")
    log.emit("newer")
    assert [each["event"] for each in tail.poll()] == ["new", "newer"]


def test_unfinished_lines_are_read_later(tmp_path: Path) -> None:
    """The tail returns each whole line once, in the order of time over all files, and skips damage."""
    tail = EventTail(tmp_path / "events")
    assert tail.poll() == []
    first, second = (EventLog(tmp_path / "events" / f"{name}.jsonl", replica=0) for name in "ba")
    first.emit("one")
    second.emit("two")
    assert [each["event"] for each in tail.poll()] == ["one", "two"]
    path = tmp_path / "events" / "a.jsonl"
    with path.open("a") as file:
        file.write('broken\n{"time": 1.0, "event"')
        file.flush()
        assert tail.poll() == []
        file.write(': "three"}\n')
    assert [each["event"] for each in tail.poll()] == ["three"]
    assert tail.poll() == []


def test_from_the_start(tmp_path: Path) -> None:
    """Asked to, the tail begins with what the files hold already, and goes on with what is new."""
    log = EventLog(tmp_path / "a.jsonl")
    log.emit("old")
    tail = EventTail(tmp_path, from_start=True)
    log.emit("older than the first look")
    EventLog(tmp_path / "b.jsonl").emit("new")
    assert [each["event"] for each in tail.poll()] == ["old", "older than the first look", "new"]
    log.emit("newer")
    assert [each["event"] for each in tail.poll()] == ["newer"]


@pytest.mark.parametrize("from_start", [False, True])
def test_folder_that_comes_and_goes(tmp_path: Path, from_start: bool) -> None:
    """A folder that is not there, yet or any more, has no events."""
    folder = tmp_path / "events"
    tail = EventTail(folder, from_start=from_start)
    assert tail.poll() == []
    path = folder / "a.jsonl"
    EventLog(path).emit("one")
    assert [each["event"] for each in tail.poll()] == ["one"]
    path.unlink()
    folder.rmdir()
    assert tail.poll() == []


@pytest.mark.parametrize(
    "line", ["[]", "3", '{"time": 1.0}', '{"time": "x", "event": "a"}', '{"time": 1.0, "event": 3}']
)
def test_what_is_no_event_is_skipped(tmp_path: Path, line: str) -> None:
    """Only an object with a number as time and a name as event is one."""
    (tmp_path / "a.jsonl").write_text(f'{line}\n{{"time": 2.0, "event": "whole"}}\n')
    assert [each["event"] for each in EventTail(tmp_path, from_start=True).poll()] == ["whole"]
