# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Where the lighthouse is, by an address, a name or a file."""

from __future__ import annotations

import errno
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from titan_ft.run.lighthouse import Announcement, LighthouseAddress, Place


def test_what_is_announced_is_read(tmp_path: Path) -> None:
    """With nothing beside the file, in a folder that the first announcement makes."""
    path = tmp_path / "run" / "lighthouse.json"
    said = Announcement.of_this_process("http://10.0.0.7:1234", {"SLURM_JOB_ID": "77"})
    said.write(path)
    assert Announcement.read(path) == said
    assert (said.job, said.host) == ("77", socket.gethostname())
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_prepared_announcement_needs_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby takes over on a full disk. Obsolete files are removed, and a failed attempt leaves
    nothing.
    """
    path = tmp_path / "run" / "lighthouse.json"
    standby, late = Announcement("http://10.0.0.7:1234"), Announcement("http://10.0.0.8:1234")
    standby.prepare(path)
    assert Announcement.read(path) is None

    def no_space(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        late.write(path)
    standby.write(path)
    assert Announcement.read(path) == standby
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    monkeypatch.undo()
    late.prepare(path)
    late.discard(path)
    standby.discard(path)
    assert Announcement.read(path) == standby
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "text", ["", '{"address": "http://10.0.0.7:1', "[]", '{"address": "x", "job": "", "id": ""}']
)
def test_a_file_that_is_not_whole_says_nothing(tmp_path: Path, text: str) -> None:
    """As shared storage may show it for seconds: where the lighthouse was before stays in use."""
    path = tmp_path / "lighthouse.json"
    address = LighthouseAddress(f"file:{path}")
    Announcement("http://10.0.0.7:1234").write(path)
    assert address.wait(0.0) == "http://10.0.0.7:1234"
    path.write_text(text)
    assert address.look() is None
    assert str(address) == "http://10.0.0.7:1234"


def test_a_file_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    """Groups may start before the lighthouse; if they give up, they name the awaited file."""
    path = tmp_path / "late" / "lighthouse.json"
    address = LighthouseAddress(f"file:{path}")
    with pytest.raises(TimeoutError, match=str(path)):
        address.wait(0.01)
    threading.Timer(
        0.1, lambda: Announcement("http://10.0.0.7:1234", "77", id="x").write(path)
    ).start()
    assert address.wait(20.0) == "http://10.0.0.7:1234"
    assert address.place == Place("http://10.0.0.7:1234", "x", "77")


def test_a_successor_at_the_same_address_is_another_one(tmp_path: Path) -> None:
    """It knows no group, and counts quorums from the beginning."""
    path = tmp_path / "lighthouse.json"
    address = LighthouseAddress(f"file:{path}")
    places = []
    for _ in range(2):
        Announcement("http://10.0.0.7:1234").write(path)
        places.append(address.look())
    assert places[0] != places[1]


def test_a_number_never_changes() -> None:
    """There is no lookup, and no change to follow."""
    address = LighthouseAddress("http://[::1]:29510")
    assert not address.may_change
    assert address.look() == address.place == Place("http://[::1]:29510")


def test_a_name_is_resolved_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the answers says nothing; a resolver that is away says nothing either."""
    answers: list[list[str]] = [
        ["10.0.0.1", "10.0.0.2"],
        ["10.0.0.2", "10.0.0.1"],
        ["10.0.0.3"],
        [],
    ]

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("light.house", 29510)
        if not (found := answers.pop(0)):
            raise socket.gaierror
        return [(None, None, None, "", (number, port)) for number in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    address = LighthouseAddress("http://light.house:29510")
    first, same, other, away = (address.look() for _ in range(4))
    assert first == same != other
    assert other is not None
    assert (other.url, other.mark, away) == ("http://light.house:29510", "10.0.0.3", None)
