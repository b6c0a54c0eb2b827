# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The words that processes leave for each other where no file can be written."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from titan_ft.run.error_file import FILE_ENV, beside
from titan_ft.run.events import Drained
from titan_ft.run.log import EventLog
from titan_ft.run.marks import (
    announce_left,
    has_left,
    leave_mark,
    mark_end_in_order,
    mark_training,
    read_mark,
    remove_training_mark,
)


def test_the_last_word_counts(tmp_path: Path) -> None:
    """Whatever is there before; nothing is left beside it."""
    path = tmp_path / "mark"
    assert read_mark(path) is None
    path.write_text("a file")
    assert read_mark(path) is None
    for word in ("one", "two"):
        leave_mark(path, word)
        assert read_mark(path) == word
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("room", [True, False])
def test_a_worker_that_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool) -> None:
    """Its event says so. Only if the event must wait, there is a mark beside its log."""
    error_file = beside(tmp_path / "rank-0.log")
    monkeypatch.setenv(FILE_ENV, str(error_file))
    log = EventLog(
        tmp_path / "a.jsonl" if room else Path("/dev/full"), replica=0, rank=0, attempt=0
    )
    announce_left(log, Drained(step=3, reason="SIGTERM", in_order=True))
    assert has_left(error_file) == (not room)
    assert not has_left(beside(tmp_path / "rank-1.log"))
    log._file.close(0.0)


def test_a_worker_whose_mark_is_not_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker leaves all the same, and so does one without a supervisor."""
    log = EventLog(Path("/dev/full"), replica=0, rank=0, attempt=0)
    monkeypatch.setenv(FILE_ENV, str(tmp_path / "nowhere" / "error.json"))
    announce_left(log, Drained(step=3, reason="SIGTERM", in_order=True))
    monkeypatch.delenv(FILE_ENV)
    announce_left(log, Drained(step=3, reason="SIGTERM", in_order=True))
    log._file.close(0.0)


def test_a_worker_that_ends_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes its mark of training; a mark that is left after a worker's end shows an early end,
    once.
    """
    error_file = beside(tmp_path / "rank-0.log")
    monkeypatch.setenv(FILE_ENV, str(error_file))
    mark_training()
    mark_end_in_order()
    assert not remove_training_mark(error_file)
    mark_training()
    assert not remove_training_mark(beside(tmp_path / "rank-1.log"))
    assert remove_training_mark(error_file)
    assert not remove_training_mark(error_file)
    assert not list(tmp_path.iterdir())


def test_a_mark_that_cannot_be_removed_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has become read-only: a worker that has finished could not remove it either."""
    error_file = beside(tmp_path / "rank-0.log")
    monkeypatch.setenv(FILE_ENV, str(error_file))
    mark_training()

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    mark_end_in_order()
    assert not remove_training_mark(error_file)
    monkeypatch.setenv(FILE_ENV, str(tmp_path / "nowhere" / "error.json"))
    mark_training()
    mark_end_in_order()
