# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The event log of a process, and reading a folder of them back."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.event_builder import build
from titan_ft.cli.main import main
from titan_ft.run.appender import is_cut, retry_waiting
from titan_ft.run.events import (
    CheckpointFailed,
    EventsDelayed,
    EventsDropped,
    FaultInjected,
    Hung,
    RankEvent,
    StepCommitted,
    Target,
    WorkerExited,
    WorkerStarted,
)
from titan_ft.run.excerpt import read_end
from titan_ft.run.log import (
    EventLog,
    ReadPosition,
    decode,
    encode,
    read_events,
    read_history,
    stream_events,
)
from titan_ft.run.paths import RunPaths
from titan_ft.run.tail import EventTail, last_error_line


def write(folder: Path, name: str, *lines: bytes | str) -> None:
    (folder / name).write_bytes(
        b"".join(line.encode() if isinstance(line, str) else line for line in lines)
    )


def test_line_has_header_and_fields(tmp_path: Path) -> None:
    """Each line is a JSON object with its name, times, process and subject, and the event's own
    fields.
    """
    log = EventLog(tmp_path / "events" / "a.jsonl", replica=1, rank=0, attempt=None)
    before, mono = time.time(), round(time.monotonic(), 6)
    log.emit(
        WorkerExited(
            rank=1,
            attempt=2,
            worker_pid=7,
            reason="it got SIGKILL",
            stopped=False,
            signal="SIGKILL",
        )
    )
    log.close()
    text = (tmp_path / "events" / "a.jsonl").read_text()
    assert text.endswith("\n")
    event = json.loads(text)
    assert before <= event.pop("time") <= time.time()
    assert mono <= event.pop("mono") <= time.monotonic() + 1e-6
    assert event == {
        "event": "worker_exited",
        "pid": os.getpid(),
        "replica": 1,
        "rank": 1,
        "attempt": 2,
        "worker_pid": 7,
        "reason": "it got SIGKILL",
        "stopped": False,
        "signal": "SIGKILL",
    }


def test_event_comes_back(tmp_path: Path) -> None:
    """A read event equals the emitted one, with its parts; absent values have no field."""
    log = EventLog(tmp_path / "a.jsonl", replica=1, rank=0, attempt=2)
    data = {"slot": 1, "first_batch": 4, "num_batches": 2, "checksum": "c5"}
    told = build(
        StepCommitted, step=3, participants=[0, 1], data=data, batches={"1": [4, 2]}, loss=2.5
    )
    told.replica = told.rank = told.attempt = -1  # as an emitter leaves them
    log.emit(told)
    log.emit(
        FaultInjected(
            fault="kill_group", target=Target(lighthouse=True), seed=None, params={"bit": 3}
        )
    )
    assert '"digest"' not in (tmp_path / "a.jsonl").read_text()
    commit, fault = read_events(tmp_path)
    assert commit == told
    assert isinstance(commit, StepCommitted)
    assert (commit.replica, commit.rank, commit.attempt, commit.pid) == (1, 0, 2, os.getpid())
    assert (commit.data, commit.batches) == (told.data, {1: (4, 2)})
    assert isinstance(fault, FaultInjected)
    assert (fault.target, fault.params, fault.replica) == (Target(lighthouse=True), {"bit": 3}, 1)


def test_lines_are_in_the_file_at_once(tmp_path: Path) -> None:
    """What was emitted can be read before the log is closed, and survives a SIGKILL of its
    writer.
    """
    code = (
        "import os, signal, sys; from pathlib import Path; from titan_ft.run.log import EventLog\n"
        "from titan_ft.run.events import Hung\n"
        "log = EventLog(Path(sys.argv[1]), replica=0, rank=0, attempt=0); [log.emit(Hung(step=i)) for i in range(10)]\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.jsonl")], timeout=60, check=False
    )
    assert process.returncode == -signal.SIGKILL
    assert [event.step for event in read_events(tmp_path) if isinstance(event, Hung)] == list(
        range(10)
    )


def test_an_event_that_is_nested_without_end_is_none() -> None:
    """msgspec's error for it is no ValueError: it ended `top`, `check` and the launcher."""
    nested = b'{"time": 1.0, "event": "joined", "participants": ' + b"[" * 100_000
    with pytest.raises(ValueError, match="must be a JSON object"):
        decode(nested)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_file_of_another_kind_is_an_error(tmp_path: Path, kind: str) -> None:
    """Such as another user's run: `check` waited for the writer of a pipe, and read /dev/zero until
    its memory was full.
    """
    path = tmp_path / "a.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    named = "Is a directory" if kind == "folder" else "a pipe or a device"
    with pytest.raises(OSError, match=named) as caught:
        read_history(tmp_path)
    assert caught.value.filename == str(path)
    with pytest.raises(OSError, match=named):
        list(stream_events(path, ReadPosition()))
    if kind != "folder":
        assert last_error_line(path) == "(no log)"
        assert read_end(path) == []


def test_an_endless_line_is_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader stops, and names it."""
    monkeypatch.setattr("titan_ft.run.log.MAX_LINE_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" + b"x" * 2000)
    with pytest.raises(ValueError, match=r"a\.jsonl:2 must be at most .* long"):
        list(stream_events(path, ReadPosition()))


def test_threads_and_logs_share_a_file_without_mixing_lines(tmp_path: Path) -> None:
    """Several threads, and several logs on one file, never mix their lines."""
    logs = [EventLog(tmp_path / "a.jsonl", replica=i, attempt=0) for i in range(2)]

    def emit(log: EventLog, thread: int) -> None:
        for i in range(100):
            log.emit(CheckpointFailed(step=i, rank=thread, error="x" * 300))

    threads = [threading.Thread(target=emit, args=(logs[t % 2], t)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    told = [(e.rank, e.step) for e in read_events(tmp_path) if isinstance(e, CheckpointFailed)]
    assert sorted(told) == [(t, i) for t in range(4) for i in range(100)]


def test_log_without_path_or_after_close_discards(tmp_path: Path) -> None:
    """A log without a path writes nothing, and neither does one that was closed; closing twice is
    harmless.
    """
    log = EventLog(None, replica=0)
    log.emit(Hung(step=1))
    log.close()
    log = EventLog(tmp_path / "a.jsonl", replica=0, rank=0, attempt=0)
    log.emit(Hung(step=2))
    log.close()
    log.close()
    log.emit(Hung(step=3))
    assert [event.step for event in read_events(tmp_path) if isinstance(event, Hung)] == [2]


def test_values_that_json_does_not_know(tmp_path: Path) -> None:
    """Tuples become lists, scalars of other libraries numbers, paths their text, and NaN and
    infinity null.
    """

    class Scalar:
        def item(self) -> float:
            return 2.5

    log = EventLog(tmp_path / "a.jsonl", replica=0, rank=0, attempt=0)
    told = build(StepCommitted, participants=[1, 2], batches={0: [0, 1]})
    told.loss, told.grad_norm, told.own_loss = float("nan"), float("inf"), np.float32("nan")
    told.lr, told.seconds, told.step, told.participants = (
        Scalar(),
        np.float64(0.5),
        np.int64(3),
        (1, 2),
    )
    told.lineage = Path("x/y")
    log.emit(told)
    line = (tmp_path / "a.jsonl").read_text()
    event = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (event["loss"], event["grad_norm"], event["own_loss"]) == (None, None, None)
    assert (event["lr"], event["seconds"], event["step"], event["lineage"]) == (2.5, 0.5, 3, "x/y")
    assert (event["participants"], event["batches"]) == ([1, 2], {"0": [0, 1]})
    assert len(read_events(tmp_path)) == 1


class Limit:
    """A limit for the size of files stands for a disk of which only some bytes are left (EFBIG)."""

    def __init__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def set(self, size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, self._before[1]))

    def lift(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


@pytest.fixture
def limit() -> Iterator[Limit]:
    made = Limit()
    yield made
    made.lift()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_full_disk_raises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A process whose events cannot be written continues; it reports that once, and again at the
    end of the outage.
    """
    log = EventLog(Path("/dev/full"))
    for step in range(3):
        log.emit(Hung(step=step))
    assert log.has_outage
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "titan_ft: /dev/full cannot be written (No space left on device): this process keeps "
    )
    log._file.close(0.0)  # without the seconds that the end of a process waits
    log.close()
    assert capsys.readouterr().err == ""


def test_events_come_late_and_whole(
    tmp_path: Path, limit: Limit, capsys: pytest.CaptureFixture[str]
) -> None:
    """Waiting events are written in order, with the times at which they happened; an event reports
    the delay.
    """
    path = tmp_path / "a.jsonl"
    log = EventLog(path, replica=1, rank=0, attempt=2)
    log.emit(Hung(step=0))
    limit.set(path.stat().st_size + 40)
    log.emit(Hung(step=1))
    before = time.time()
    log.emit(Hung(step=2))
    # Half a line is none.
    assert [event.step for event in read_events(tmp_path) if isinstance(event, Hung)] == [0]
    assert is_cut(path)
    limit.lift()
    since = time.time()
    retry_waiting()  # nobody has anything to tell
    assert not log.has_outage
    assert not is_cut(path)
    *hung, delayed = read_events(tmp_path)
    assert [event.step for event in hung if isinstance(event, Hung)] == [0, 1, 2]
    assert hung[2].time <= since
    assert isinstance(delayed, EventsDelayed)
    assert (delayed.error, delayed.events, delayed.since) == ("File too large", 2, hung[1].time)
    assert (delayed.replica, delayed.rank, delayed.attempt, delayed.pid) == (1, 0, 2, os.getpid())
    assert hung[1].time <= before <= hung[2].time <= delayed.time
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"titan_ft: {path} cannot be written (File too large)")
    assert second == f"titan_ft: {path} can be written again: 2 events came late"
    log.emit(Hung(step=3))
    assert len(read_events(tmp_path)) == 5
    log.close()


def test_events_beyond_the_memory_are_an_event(
    tmp_path: Path,
    limit: Limit,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """How many are lost, of which kinds, from when to when; what memory held is not."""
    path = tmp_path / "a.jsonl"
    log = EventLog(path, replica=1, rank=0, attempt=2)
    log.emit(Hung(step=0))
    size = path.stat().st_size
    monkeypatch.setattr(log._file, "_limit", 2 * size + 20)
    limit.set(size)
    for step in range(1, 5):
        log.emit(Hung(step=step))
    log.emit(CheckpointFailed(step=5, error="full"))
    limit.lift()
    times = [time.time()]
    log.emit(Hung(step=6))  # comes behind a gap: lost, too
    log.emit(Hung(step=7))
    events = read_events(tmp_path)
    assert [event.step for event in events if isinstance(event, Hung)] == [0, 1, 2, 7]
    (dropped,) = [event for event in events if isinstance(event, EventsDropped)]
    assert (dropped.error, dropped.events) == ("File too large", 4)
    assert dropped.kinds == {"hung": 3, "checkpoint_failed": 1}
    assert dropped.since is not None
    assert dropped.until is not None
    assert events[2].time <= dropped.since <= times[0] <= dropped.until <= dropped.time
    assert capsys.readouterr().err.splitlines()[-1].endswith("2 events came late; 4 more are lost")
    log.close()


def test_disk_that_is_full_at_the_start(tmp_path: Path) -> None:
    """The folder cannot be made yet: the first events are written when it can."""
    (tmp_path / "run").touch()
    log = EventLog(tmp_path / "run" / "events" / "a.jsonl", replica=0, rank=0, attempt=0)
    log.emit(Hung(step=1))
    (tmp_path / "run").unlink()
    log.emit(Hung(step=2))
    log.close()
    events = read_events(tmp_path / "run" / "events")
    assert [event.step for event in events if isinstance(event, Hung)] == [1, 2]


def test_refused_launch_leaves_no_file(tmp_path: Path) -> None:
    """A file is made for its first event: an empty one always belongs to a process that had
    events.
    """
    EventLog(tmp_path / "events" / "a.jsonl").close()
    assert not (tmp_path / "events").exists()


def test_events_of_a_killed_process_of_the_same_name(tmp_path: Path) -> None:
    """A pid is reused in a container: the next line is not glued to the cut one, and the loss is
    reported.
    """
    log = EventLog(tmp_path / "a.jsonl", replica=0, rank=0, attempt=0)
    log.emit(Hung(step=1))
    log.close()
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b'{"time": 1, "ev')
    log = EventLog(tmp_path / "a.jsonl", replica=0, rank=0, attempt=0)
    log.emit(Hung(step=2))
    log.close()
    first, second, dropped = read_events(tmp_path)
    assert [event.step for event in (first, second) if isinstance(event, Hung)] == [1, 2]
    assert isinstance(dropped, EventsDropped)
    assert (dropped.events, dropped.since) == (None, None)


def test_events_are_sorted_by_time_across_files(tmp_path: Path) -> None:
    """Events of all files come back in order of time; equal times keep the order of file names,
    then of lines.
    """
    told = [build(Hung, time=time, step=step) for step, time in enumerate((1.0, 3.5, 3.5, 3.5))]
    write(tmp_path, "b.jsonl", encode(told[0]), encode(told[3]))
    write(tmp_path, "a.jsonl", encode(told[1]), encode(told[2]))
    write(tmp_path, "notes.txt", "not an event")
    assert read_events(tmp_path) == told


@pytest.mark.parametrize(
    "tail", ['{"time": 2, "eve', '{"time": 2', "\x00\x00", "{", '{"time": 2, "event": "hung"}']
)
def test_cut_last_line_is_skipped(tmp_path: Path, tail: str) -> None:
    """The last line of a writer that died in it does not count; the lines before it stay."""
    whole = build(Hung, time=1.0)
    write(tmp_path, "a.jsonl", encode(whole), tail)
    assert read_events(tmp_path) == [whole]


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"time": 1}', '{"event": "hung"}', '{"event": "hung", "time": "now"}']
)
def test_whole_line_that_is_no_event_is_named(tmp_path: Path, line: str) -> None:
    """A whole line that is no event is an error with file and line, never passed over."""
    write(tmp_path, "a.jsonl", encode(build(Hung, time=1.0)), line + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2 must be a JSON object"):
        read_events(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"step": None}, r"\$\.step"),
        ({"step": "x"}, r"\$\.step"),
        ({"step": ...}, "`step`"),
        ({"pid": ...}, "pid is missing"),
        ({"mono": ...}, "mono is missing"),
        ({"replica": ...}, "replica is missing"),
        ({"rank": "0"}, r"\$\.rank"),
    ],
)
def test_event_with_a_wrong_field_is_named(
    tmp_path: Path, change: dict[str, object], named: str
) -> None:
    """A known event that lacks a field, or has one of another type, is an error with file, line and
    field.
    """
    line = json.loads(encode(build(Hung, time=1.0)))
    line = {name: value for name, value in {**line, **change}.items() if value is not ...}
    write(tmp_path, "a.jsonl", encode(build(Hung, time=1.0)), json.dumps(line) + "\n")
    with pytest.raises(
        ValueError,
        match=rf"a\.jsonl:2 must have the fields of hung \(see docs/events\.md\).*{named}",
    ):
        read_events(tmp_path)


def test_what_a_newer_version_may_have_written_is_skipped(tmp_path: Path) -> None:
    """An event of an unknown name is passed over, and so is a field that its class has not."""
    known = build(Hung, time=2.0, step=7)
    line = json.loads(encode(known)) | {"mood": "bad"}
    write(tmp_path, "a.jsonl", '{"event": "of_tomorrow", "time": 1.0}\n', json.dumps(line) + "\n")
    assert read_events(tmp_path) == [known]


def test_separators_do_not_matter(tmp_path: Path) -> None:
    """Lines as other writers of JSON make them are read as well."""
    known = build(WorkerStarted, time=2.0, host="here")
    write(tmp_path, "a.jsonl", json.dumps(json.loads(encode(known)), separators=(",", ":")) + "\n")
    assert read_events(tmp_path) == [known]


def test_program_with_events_of_its_own(tmp_path: Path) -> None:
    """A class of events that a benchmark or a test derives is read where it is defined."""

    class Weighed(RankEvent, kw_only=True):
        grams: float

    EventLog(tmp_path / "a.jsonl", replica=0, rank=0, attempt=0).emit(Weighed(grams=2.0))
    (event,) = read_events(tmp_path)
    assert isinstance(event, Weighed)
    assert (event.name, event.grams) == ("weighed", 2.0)


def test_missing_or_empty_folder_has_no_events(tmp_path: Path) -> None:
    """A run that has not begun has an empty history."""
    assert read_events(tmp_path / "missing") == []
    (tmp_path / "a.jsonl").write_text("")
    assert read_events(tmp_path) == []


def test_report_names_a_line_of_another_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unreadable history is one line on stderr, with place, mistake and remedy, and status 1."""
    (tmp_path / "events").mkdir()
    write(tmp_path / "events", "a.jsonl", '{"event": "hung", "time": 1.0}\n')
    assert main(["report", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"titan-ft report: {tmp_path / 'events' / 'a.jsonl'}:1 must have the fields of hung"
    )
    assert "`step`" in line
    assert line.endswith("read an older version's run with that version")


def test_text_that_is_not_utf_8_ends_nobody(tmp_path: Path) -> None:
    """A path of bytes that are no UTF-8 comes as lone surrogates; the line is written, and can be
    read.
    """
    with_path = build(CheckpointFailed, error="no /data/\udcff")
    log = EventLog(tmp_path / "a.jsonl", replica=0, rank=0, attempt=0)
    log.emit(with_path)
    (event,) = read_events(tmp_path)
    assert isinstance(event, CheckpointFailed)
    assert event.error == "no /data/?"
    (tmp_path / "b.jsonl").write_bytes(b'{"time": 1, "event": "\xff"}\n')
    with pytest.raises(ValueError, match="must be a JSON object"):
        read_events(tmp_path)


def test_text_that_is_not_utf_8_beside_a_number_that_is_none(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "a.jsonl", replica=0, rank=0, attempt=0)
    log.emit(build(StepCommitted, lr=float("nan"), lineage="\udcff"))
    (event,) = read_events(tmp_path)
    assert isinstance(event, StepCommitted)
    assert (event.lr, event.lineage) == (None, "?")


def test_a_learning_rate_that_is_no_number_can_be_read(tmp_path: Path) -> None:
    """A schedule of the user's may give a NaN: the run's record is read all the same."""
    log = EventLog(tmp_path / "a.jsonl", replica=0, rank=0, attempt=0)
    log.emit(build(StepCommitted, lr=float("nan")))
    (event,) = read_events(tmp_path)
    assert isinstance(event, StepCommitted)
    assert event.lr is None


def test_a_long_file_is_followed_by_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names are still those of the process, and a reader gets every event once, in order."""
    monkeypatch.setattr("titan_ft.run.log.ROTATE_BYTES", 2000)
    first = RunPaths(tmp_path).worker_events(0, 1, 2, 99)
    events = EventLog(first, replica=0, rank=1, attempt=2)
    tail = EventTail(tmp_path / "events", pattern=RunPaths.workers_pattern(0, 2), from_start=True)
    followed = []
    for step in range(60):
        events.emit(Hung(step=step))
        followed += tail.poll()
    events.close()
    names = sorted(path.name for path in (tmp_path / "events").iterdir())
    assert len(names) > 3
    assert names == sorted(
        path.name for path in (tmp_path / "events").glob(RunPaths.workers_pattern(0, 2))
    )
    assert {RunPaths.process_of(name) for name in names} == {first.stem}
    assert [event.step for event in read_events(tmp_path / "events")] == list(range(60))
    assert [event.step for event in followed] == list(range(60))
    assert read_history(tmp_path / "events")[1] == []
    assert max(path.stat().st_size for path in (tmp_path / "events").iterdir()) < 2500


def test_a_long_file_goes_on_where_no_other_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise events would wait, without a report of it in any file."""
    monkeypatch.setattr("titan_ft.run.log.ROTATE_BYTES", 200)
    events = EventLog(tmp_path / "a.jsonl", replica=0, rank=1, attempt=2)
    (tmp_path / "a.2.jsonl").mkdir()
    for step in range(20):
        events.emit(Hung(step=step))
    assert not events.has_outage
    assert (tmp_path / "a.jsonl").read_bytes().count(b"\n") == 20
    (tmp_path / "a.2.jsonl").rmdir()
    for step in range(20, 30):
        events.emit(Hung(step=step))
    events.close()
    assert (tmp_path / "a.2.jsonl").exists()
    assert [event.step for event in read_events(tmp_path)] == list(range(30))
