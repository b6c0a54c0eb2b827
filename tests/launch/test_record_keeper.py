# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The launcher lets the events of a long run be reduced as they grow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from titan_ft.launch import record_keeper
from titan_ft.launch.record_keeper import LOOK_SECONDS, RecordKeeper


class Process:
    code: int | None = None


class Started:
    """Stands in for the launcher's children."""

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.obstacle: OSError | None = None

    def start(self, name: str, command: list[str], log: Path, *, env: dict[str, str]) -> Any:
        assert env == {"TITAN_FT_TOKEN": ""}, "it has no use for the token"
        if self.obstacle is not None:
            raise self.obstacle
        self.processes.append(Process())
        return self.processes[-1]


class Kept:
    def __init__(self, folder: Path) -> None:
        self.now, self.started, self.file = 0.0, Started(), folder / "a.jsonl"
        children: Any = self.started
        self.keeper = RecordKeeper(folder, children, folder / "log", lambda: self.now)

    def num_after(self, num_bytes: int) -> int:
        """Return the number of started processes after the file has grown to a size."""
        self.file.write_bytes(bytes(num_bytes))
        self.now += LOOK_SECONDS
        self.keeper.poll()
        return len(self.started.processes)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setattr(record_keeper, "MIN_BYTES", 100)
    return Kept(tmp_path)


def test_a_short_run_has_no_record(kept: Kept) -> None:
    assert kept.num_after(99) == 0


def test_each_growth_is_reduced_once(kept: Kept) -> None:
    """One process runs at a time. The next process reduces later events."""
    assert kept.num_after(100) == 1
    assert kept.num_after(250) == 1, "the first one runs"
    kept.started.processes[0].code = 0
    assert kept.num_after(250) == 2
    kept.started.processes[1].code = 1
    assert kept.num_after(300) == 2


def test_a_host_without_room_for_a_process_ends_no_launcher(kept: Kept) -> None:
    kept.started.obstacle = OSError(11, "Resource temporarily unavailable")
    assert kept.num_after(100) == 0
    kept.started.obstacle = None
    assert kept.num_after(200) == 1


def test_the_process_can_be_started(tmp_path: Path) -> None:
    """The process is started as the launcher does. From a few events it keeps nothing."""
    (tmp_path / "launcher-1.jsonl").write_text('{"event": "launch_stopping", "time": 1.0}\n')
    command = [sys.executable, "-m", "titan_ft.history.record.kept", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "reduced.msgpack").exists()
