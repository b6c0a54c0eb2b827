# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What happens to records of which the disk takes none, or a part."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from titan_ft.run import appender as appender_module
from titan_ft.run.appender import (
    DescriptorAppender,
    FileAppender,
    Outage,
    finish_waiting,
    is_cut,
    retry_waiting,
)


class Disk:
    """Stands for the file system below `os.writev`: takes so many more bytes, then it is full."""

    def __init__(self) -> None:
        self.room: float = float("inf")
        self.error = errno.ENOSPC
        self._writev = os.writev

    def writev(self, file: int, buffers: list[bytes]) -> int:
        data = b"".join(buffers)
        if self.room <= 0:
            raise OSError(self.error, os.strerror(self.error))
        taken = data[: int(min(self.room, len(data)))]
        self.room -= len(taken)
        return self._writev(file, [taken])


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(os, "writev", made.writev)
    return made


@pytest.fixture
def outages() -> list[Outage]:
    return []


MakeAppender = Callable[..., FileAppender]


@pytest.fixture
def make(tmp_path: Path, outages: list[Outage]) -> Iterator[MakeAppender]:
    made: list[FileAppender] = []

    def build(name: str = "a.jsonl", **settings: int) -> FileAppender:
        made.append(
            FileAppender(
                tmp_path / name, on_recovery=outages.append, is_json_lines=True, **settings
            )
        )
        return made[-1]

    yield build
    for each in made:
        each.close(0.0)


@pytest.mark.parametrize("room", [0, 1, 4, 7, 8, 9, 16])
def test_records_wait_and_keep_their_order(
    make: MakeAppender, disk: Disk, tmp_path: Path, room: int
) -> None:
    """Whatever part of the lines fits, no line is ever glued to another one, and all come in their
    order.
    """
    path, log = tmp_path / "a.jsonl", make()
    log.append(b'{"n":1}\n')
    disk.room = room
    for number in (2, 3, 4):
        log.append(b'{"n":%d}\n' % number)
        shown = path.read_bytes()
        assert b'{"n":1}\n{"n":2}\n{"n":3}\n{"n":4}\n'.startswith(shown)
        assert is_cut(path) == (log.outage is not None)
    disk.room = float("inf")
    log.append(b'{"n":5}\n')
    assert path.read_bytes() == b"".join(b'{"n":%d}\n' % number for number in range(1, 6))
    assert log.outage is None
    assert not is_cut(path)


@pytest.mark.parametrize(
    "name", ["ENOSPC", "EDQUOT", "EIO", "EROFS", "ESTALE", "EFBIG", "ENOTCONN"]
)
def test_error_of_a_file_system_ends_nothing(
    make: MakeAppender, disk: Disk, outages: list[Outage], name: str, tmp_path: Path
) -> None:
    """After each error that a file system has for a write, the appender waits and tries again."""
    log, disk.room, disk.error = make(), 0, getattr(errno, name)
    log.append(b"1\n")
    assert log.outage is not None
    assert log.outage.reason == os.strerror(disk.error)
    disk.room = 2
    retry_waiting()
    assert (tmp_path / "a.jsonl").read_bytes() == b"1\n"
    assert [outage.num_waited for outage in outages] == [1]


def test_a_full_disk_is_no_error(tmp_path: Path) -> None:
    """The device that is always full: nothing is raised, whatever it is asked for."""
    log = FileAppender(Path("/dev/full"), is_json_lines=True)
    for _ in range(3):
        log.append(b"line\n")
    assert log.outage is not None
    assert log.close(0.0) == 3
    log.append(b"line\n")  # closed


def test_limit_of_a_file(tmp_path: Path) -> None:
    """A process with a limit of its files' size (RLIMIT_FSIZE) continues; its file keeps whole
    lines and half of one.
    """
    code = (
        "import resource, sys; from pathlib import Path; from titan_ft.run.appender import FileAppender\n"
        "log = FileAppender(Path(sys.argv[1]), is_json_lines=True); log.append(b'first line\\n')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30, resource.RLIM_INFINITY))\n"
        "for n in range(5): log.append(b'line number %d\\n' % n)\n"
        "print(log.outage.reason, Path(sys.argv[1]).stat().st_size)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "log.append(b'last line\\n'); print(log.outage)"
    )
    path = tmp_path / "a.jsonl"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "File too large 30\nNone\n"
    lines = ["first line", *(f"line number {number}" for number in range(5)), "last line"]
    assert path.read_text().splitlines() == lines


def test_what_memory_does_not_hold_is_counted(
    make: MakeAppender, disk: Disk, outages: list[Outage]
) -> None:
    """Beyond the limit records are dropped, all from the first one on, and reported by kind and
    time.
    """
    log, disk.room = make(limit=20), 0
    for number in range(6):
        log.append(b"12345\n", "even" if number % 2 == 0 else "odd", 100.0 + number)
    log.append(b"\n", "small", 200.0)  # would fit; but there is one gap, not many
    disk.room = 1000
    log.append(b"later\n", "later", 300.0)
    log.append(b"last\n", "last", 301.0)
    assert (log.path.read_bytes()) == b"12345\n" * 3 + b"last\n"
    (outage,) = outages
    assert (outage.began, outage.first_dropped, outage.last_dropped, outage.num_waited) == (
        100.0,
        103.0,
        300.0,
        3,
    )
    assert outage.dropped == {"odd": 2, "even": 1, "small": 1, "later": 1}


def test_folder_that_cannot_be_made_is_waited_for(tmp_path: Path) -> None:
    """The file cannot be opened at first. Later it has all records that were appended meanwhile."""
    (tmp_path / "run").touch()
    log = FileAppender(tmp_path / "run" / "events" / "a.jsonl", is_json_lines=True)
    log.append(b"1\n")
    assert log.outage is not None
    assert log.outage.reason == "Not a directory"
    (tmp_path / "run").unlink()
    retry_waiting()
    log.append(b"2\n")
    assert (tmp_path / "run" / "events" / "a.jsonl").read_bytes() == b"1\n2\n"
    log.close(0.0)


def test_folder_that_vanishes_is_not_made_again(
    make: MakeAppender, disk: Disk, tmp_path: Path
) -> None:
    """A removed run folder stays removed. If it comes back, the file has all waiting lines,
    whole.
    """
    log = make("events/a.jsonl")
    log.append(b"1\n")
    disk.room = 1
    log.append(b"2\n")  # half of it is in the file
    disk.room = 1000
    (tmp_path / "events" / "a.jsonl").unlink()
    (tmp_path / "events").rmdir()
    log.append(b"3\n")
    assert not (tmp_path / "events").exists()
    (tmp_path / "events").mkdir()
    log.append(b"4\n")
    assert (tmp_path / "events" / "a.jsonl").read_bytes() == b"2\n3\n4\n"


def test_file_of_a_former_process_is_mended_as_soon_as_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file could not be read when it was opened first; later lines must not be glued to half a
    line.
    """
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b"')
    log = FileAppender(path, is_json_lines=True)
    with monkeypatch.context() as patch:
        patch.setattr(
            os,
            "pread",
            lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO))),
        )
        log.append(b'{"c": 3}\n')
    assert log.outage is not None
    log.append(b'{"d": 4}\n')
    assert path.read_bytes() == b'{"a": 1}\n{"c": 3}\n{"d": 4}\n'
    log.close(0.0)


def test_file_server_that_was_started_again(
    make: MakeAppender, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale handle stays stale: the file is opened again, and continues at its place."""
    opened, open_file = [], os.open
    monkeypatch.setattr(
        os, "open", lambda path, *args: opened.append(path) or open_file(path, *args)
    )
    log = make()
    log.append(b"1\n")
    disk.room, disk.error = 1, errno.ESTALE
    log.append(b"2\n")
    assert log.path.read_bytes() == b"1\n2"
    disk.room = 1000
    log.append(b"3\n")
    assert log.path.read_bytes() == b"1\n2\n3\n"
    assert len(opened) == 2


def test_file_of_a_killed_process_is_cut(tmp_path: Path) -> None:
    """Records that waited in memory at a SIGKILL are lost; the file shows it, even without half a
    line in it.
    """
    code = (
        "import os, resource, signal, sys; from pathlib import Path; from titan_ft.run.appender import FileAppender\n"
        "log = FileAppender(Path(sys.argv[1]), is_json_lines=True); log.append(b'1\\n')\n"
        "if sys.argv[2] == 'full': resource.setrlimit(resource.RLIMIT_FSIZE, (2, resource.RLIM_INFINITY))\n"
        "log.append(b'2\\n'); log.append(b'3\\n'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    for mode, lines in (("full", b"1"), ("room", b"1\n2\n3\n")):
        path = tmp_path / mode
        ran = subprocess.run([sys.executable, "-c", code, str(path), mode], timeout=60)
        assert ran.returncode == -signal.SIGKILL
        assert path.read_bytes() == lines
        assert is_cut(path) == (mode == "full")


@pytest.mark.parametrize(
    ("left", "then"),
    [
        (b'{"a": 1}\n{"b"', b'{"a": 1}\n'),
        (b'{"a": 1}\n{"b": 2}', b'{"a": 1}\n{"b": 2}\n'),
        (b'{"a": 1}\n', None),
    ],
)
def test_line_of_an_earlier_process_is_ended(
    tmp_path: Path, left: bytes, then: bytes | None
) -> None:
    """A pid is reused: half a line of its former owner is removed, a whole one gets its newline
    back.
    """
    path, cuts = tmp_path / "a.jsonl", []
    path.write_bytes(left)
    log = FileAppender(path, is_json_lines=True, on_cut=lambda: cuts.append(1))
    log.append(b'{"c": 3}\n')
    log.close(0.0)
    assert path.read_bytes() == (left if then is None else then) + b'{"c": 3}\n'
    assert len(cuts) == (then is not None)


def test_fork_leaves_to_its_parent_what_waits(tmp_path: Path, disk: Disk) -> None:
    """A writing child, such as a data loader's fork, writes none of its parent's waiting lines
    again.
    """
    path = tmp_path / "a.jsonl"
    log = FileAppender(path)
    log.append(b"1\n")
    disk.room = 0
    log.append(b"2\n")
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with log._lock:  # as a thread that writes at the moment of the fork
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            disk.room = 1000
            retry_waiting()
            log.append(b"c\n")
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    release.set()
    thread.join()
    disk.room = 1000
    retry_waiting()
    log.append(b"3\n")
    assert path.read_bytes() == b"1\nc\n2\n3\n"
    log.close(0.0)


def test_end_of_a_process_waits_for_room(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last records get their time, and no more: they are written if there is room within it."""
    monkeypatch.setattr(
        appender_module, "_appenders_with_outage", {}
    )  # without those of other tests
    log, disk.room = FileAppender(tmp_path / "a.jsonl", is_json_lines=True), 0
    log.append(b"1\n")
    sleep, naps = appender_module.time.sleep, []

    def make_room(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            disk.room = 1000
        sleep(0.001)

    monkeypatch.setattr(appender_module.time, "sleep", make_room)
    finish_waiting(60.0)
    assert (tmp_path / "a.jsonl").read_bytes() == b"1\n"
    assert len(naps) == 3
    disk.room = 0
    log.append(b"2\n")
    assert log.close(0.01) == 1


def test_disk_with_room_for_a_line_now_and_then_is_told_once(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages about a disk would take its last room; a long outage is reported in any case."""
    now = 1000.0
    monkeypatch.setattr(appender_module.time, "monotonic", lambda: now)
    told: list[Outage] = []
    ended: list[bool] = []
    log = FileAppender(
        tmp_path / "a",
        told.append,
        lambda outage: ended.append(outage.reported),
        is_json_lines=True,
    )
    for _ in range(3):
        disk.room = 0
        log.append(b"1\n")
        disk.room = 1000
        log.append(b"2\n")
        now += 1.0
    assert (len(told), ended) == (1, [True, False, False])
    disk.room = 0
    log.append(b"3\n")
    now += log.REPORT_PAUSE_SECONDS
    retry_waiting()
    assert len(told) == 2
    log.close(0.0)


def test_reader_that_goes_in_a_stall_ends_it_without_a_false_word(disk: Disk) -> None:
    """`on_recovery` says that all is written; what waited for the reader is dropped, and is not."""
    ended: list[Outage] = []
    reads, writes = os.pipe()
    log = DescriptorAppender(writes, on_recovery=ended.append)
    disk.room = 0
    log.append(b"1")
    assert log.outage is not None
    disk.error = errno.EPIPE
    with pytest.raises(BrokenPipeError):
        log.append(b"2")
    assert log.outage is None
    retry_waiting()
    assert ended == []
    os.close(reads)
    os.close(writes)


def test_record_of_a_signal_handler_beside_the_end_of_a_write(make: MakeAppender) -> None:
    """The record comes right after the last look at waiting ones. Otherwise it would wait for the
    next record.
    """
    log = make()

    class Records(deque[bytes]):
        """Lets a signal come in once, right after the loop has found nothing more."""

        signals = 1

        def __bool__(self) -> bool:
            there = len(self) > 0
            if not there and self.signals:
                Records.signals = 0
                log.append(b"2\n")
            return there

    log._records = Records()
    log.append(b"1\n")
    assert log.path.read_bytes() == b"1\n2\n"


def test_reader_that_is_gone_is_an_error() -> None:
    """A broken pipe is no error of a disk: the printing code must learn of it."""
    reads, writes = os.pipe()
    os.close(reads)
    with pytest.raises(BrokenPipeError):
        DescriptorAppender(writes).append(b"x")
    os.close(writes)
