# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The mark of a finished job: only the job that left it sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from titan_ft.training.finished import finished_step, mark_finished


def test_the_job_finds_its_mark(tmp_path: Path) -> None:
    """Several groups leave it, one after the other, and nothing else beside it."""
    mark = tmp_path / "finished.json"
    assert finished_step(mark, "c0ffee") is None
    for _ in range(2):
        mark_finished(mark, "c0ffee", 60)
    assert finished_step(mark, "c0ffee") == 60
    assert [path.name for path in tmp_path.iterdir()] == [mark.name]


def test_another_job_in_the_folder_is_not_over(tmp_path: Path) -> None:
    """One with more steps goes on from the last checkpoint of the one before."""
    mark_finished(tmp_path / "finished.json", "c0ffee", 60)
    assert finished_step(tmp_path / "finished.json", "decaf") is None


@pytest.mark.parametrize(
    "text", ["", '{"config_digest": "c0ffee"', '{"config_digest": "c0ffee"}', "[]", "null"]
)
def test_a_mark_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    """To train on is the safe mistake."""
    (tmp_path / "finished.json").write_text(text)
    assert finished_step(tmp_path / "finished.json", "c0ffee") is None


def test_a_mark_takes_no_room(small_disk: Any) -> None:
    """On a full disk, too, a returning group learns that the job is finished; a later mark replaces
    it.
    """
    mark = small_disk.folder / "finished.json"
    small_disk.fill()
    for _ in range(2):
        mark_finished(mark, "c0ffee", 60)
    assert finished_step(mark, "c0ffee") == 60
    assert finished_step(mark, "decaf") is None
    small_disk.free()
    mark_finished(mark, "c0ffee", 61)
    assert finished_step(mark, "c0ffee") == 61
    assert not mark.is_symlink()
    assert [path.name for path in small_disk.folder.iterdir()] == [mark.name]


@pytest.mark.parametrize("word", ["c0ffee", "c0ffee x", " 60", "elsewhere.json"])
def test_a_link_that_is_no_mark(tmp_path: Path, word: str) -> None:
    (tmp_path / "finished.json").symlink_to(word)
    assert finished_step(tmp_path / "finished.json", "c0ffee") is None
