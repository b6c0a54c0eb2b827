# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The event log of a process, and reading a folder of them back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from titan_ft.history.events import EventLog, read_events


def test_line_has_time_event_pid_context_and_fields(tmp_path: Path) -> None:
    """Each line is a JSON object with the common fields, the log's context and the event's own fields."""
    log = EventLog(tmp_path / "events" / "a.jsonl", replica=1, rank=0, attempt=None)
    before, mono = time.time(), round(time.monotonic(), 6)
    log.emit("step_committed", step=3, participants=[0, 1], data={"slot": 1})
    log.close()
    text = (tmp_path / "events" / "a.jsonl").read_text()
    assert text.endswith("\n")
    event = json.loads(text)
    assert before <= event.pop("time") <= time.time()
    assert mono <= event.pop("mono") <= time.monotonic() + 1e-6
    assert event == {
        "event": "step_committed",
        "pid": os.getpid(),
        "replica": 1,
        "rank": 0,
        "step": 3,
        "participants": [0, 1],
        "data": {"slot": 1},
    }


def test_lines_are_in_the_file_at_once(tmp_path: Path) -> None:
    """What was emitted can be read before the log is closed, and survives a SIGKILL of its writer."""
    code = (
        "import os, signal, sys; from pathlib import Path; from titan_ft.history.events import EventLog\n"
        "log = EventLog(Path(sys.argv[1])); [log.emit('e', i=i) for i in range(10)]\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.jsonl")], timeout=60, check=False)
    assert process.returncode == -signal.SIGKILL
    assert [event["i"] for event in read_events(tmp_path)] == list(range(10))


def test_threads_and_logs_share_a_file_without_mixing_lines(tmp_path: Path) -> None:
    """Several threads, and several logs on one file, never mix their lines."""
    logs = [EventLog(tmp_path / "a.jsonl", log=i) for i in range(2)]

    def emit(log: EventLog, thread: int) -> None:
        for i in range(100):
            log.emit("e", thread=thread, i=i, padding="x" * 300)

    threads = [threading.Thread(target=emit, args=(logs[t % 2], t)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    events = read_events(tmp_path)
    assert sorted((e["thread"], e["i"]) for e in events) == [(t, i) for t in range(4) for i in range(100)]


def test_log_without_path_or_after_close_discards(tmp_path: Path) -> None:
    """A log without a path writes nothing, and neither does one that was closed; closing twice is harmless."""
    log = EventLog(None, replica=0)
    log.emit("e")
    log.close()
    log = EventLog(tmp_path / "a.jsonl")
    log.emit("kept")
    log.close()
    log.close()
    log.emit("late")
    assert [event["event"] for event in read_events(tmp_path)] == ["kept"]


def test_values_that_json_does_not_know(tmp_path: Path) -> None:
    """Paths become text, tuples and sets lists, scalars of other libraries numbers, and NaN and infinity null."""

    class Scalar:
        def item(self) -> float:
            return 2.5

    log = EventLog(tmp_path / "a.jsonl")
    log.emit("e", path=Path("x/y"), pair=(1, 2), ids={3, 1, 2}, scalar=Scalar(), loss=float("nan"), slots={0: "ab"})
    line = (tmp_path / "a.jsonl").read_text()
    event = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (event["path"], event["pair"], event["ids"]) == ("x/y", [1, 2], [1, 2, 3])
    assert (event["scalar"], event["loss"], event["slots"]) == (2.5, None, {"0": "ab"})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_full_disk_is_an_error() -> None:
    """An event that cannot be written raises instead of vanishing."""
    log = EventLog(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left"):
        log.emit("e")


def test_events_are_sorted_by_time_across_files(tmp_path: Path) -> None:
    """Events of all files come back in order of time; equal times keep the order of file names, then of lines."""
    (tmp_path / "b.jsonl").write_text('{"time": 1, "event": "b1"}\n{"time": 3.5, "event": "b2"}\n')
    (tmp_path / "a.jsonl").write_text('{"time": 3.5, "event": "a1"}\n{"time": 3.5, "event": "a2"}\n')
    (tmp_path / "notes.txt").write_text("not an event")
    assert [event["event"] for event in read_events(tmp_path)] == ["b1", "a1", "a2", "b2"]


@pytest.mark.parametrize("tail", ['{"time": 2, "eve', '{"time": 2', "\x00\x00", "{"])
def test_cut_last_line_is_skipped(tmp_path: Path, tail: str) -> None:
    """The last line of a writer that died in it counts for nothing; the lines before it stay."""
    (tmp_path / "a.jsonl").write_text('{"time": 1, "event": "whole"}\n' + tail)
    assert [event["event"] for event in read_events(tmp_path)] == ["whole"]


@pytest.mark.parametrize("line", ["{", "[1]", '{"time": 1}', '{"event": "e"}', '{"event": "e", "time": "now"}'])
def test_whole_line_that_is_no_event_is_named(tmp_path: Path, line: str) -> None:
    """A whole line that is no event is an error with file and line, never passed over."""
    (tmp_path / "a.jsonl").write_text('{"time": 1, "event": "whole"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2 must be a JSON object"):
        read_events(tmp_path)


def test_missing_or_empty_folder_has_no_events(tmp_path: Path) -> None:
    """A run that has not begun has an empty history."""
    assert read_events(tmp_path / "missing") == []
    (tmp_path / "a.jsonl").write_text("")
    assert read_events(tmp_path) == []
