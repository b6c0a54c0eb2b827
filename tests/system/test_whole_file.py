# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Files that are written completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from titan_ft.system import whole_file
from titan_ft.system.whole_file import write_whole


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """Nothing else is left in the file's folder."""
    for content in (b"first", b"second"):
        write_whole(tmp_path / "page.html", content)
        assert (tmp_path / "page.html").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_planted_link_gives_no_file_of_its_users_away(tmp_path: Path) -> None:
    """A link of another user with the name of the temporary file is not followed, and does not
    stay.
    """
    victim, page = tmp_path / ".bashrc", tmp_path / "page.html"
    victim.write_text("mine")
    (tmp_path / f".page.html-{os.getpid()}").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        write_whole(page, b"theirs")
    assert victim.read_text() == "mine"
    write_whole(page, b"ours")
    assert page.read_bytes() == b"ours"


def test_nothing_is_removed_through_a_refused_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is another user's link to a folder that has a file of the temporary name."""
    victim = tmp_path / f".page.html-{os.getpid()}"
    victim.write_text("mine")

    def refuse(_: Path) -> None:
        raise OSError("a link that belongs to user 1")

    monkeypatch.setattr(whole_file, "check_links", refuse)
    with pytest.raises(OSError, match="belongs to user 1"):
        write_whole(tmp_path / "page.html", b"theirs")
    assert victim.read_text() == "mine"
