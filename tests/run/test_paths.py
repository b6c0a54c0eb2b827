# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Run paths."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from titan_ft.run.paths import RunPaths


def test_layout() -> None:
    """The files of a run lie where the documentation says."""
    paths = RunPaths("/runs/a")
    assert paths.config == Path("/runs/a/config.toml")
    assert paths.logs(1, 2, 3) == Path("/runs/a/logs/replica-1/attempt-2/rank-3.log")
    assert paths.worker_events(1, 3, 2, 99) == Path(
        "/runs/a/events/replica-1-rank-3-attempt-2-99.jsonl"
    )
    assert paths.agent_events(1, 99) == Path("/runs/a/events/supervisor-1-99.jsonl")
    assert paths.launcher_events(99) == Path("/runs/a/events/launcher-99.jsonl")
    assert [paths.checkpoint.name, paths.report.name] == ["checkpoint", "report"]


def test_events_of_an_attempt(tmp_path: Path) -> None:
    """The files of one attempt are those of all its ranks, and of no other attempt or replica."""
    paths = RunPaths(tmp_path)
    assert not paths.has_events()
    paths.events.mkdir()
    mine = [paths.worker_events(1, rank, 2, 10 + rank) for rank in (0, 1)]
    for path in [*mine, paths.worker_events(1, 0, 20, 5), paths.worker_events(11, 0, 2, 6)]:
        path.touch()
    assert sorted(paths.events.glob(paths.workers_pattern(1, 2))) == mine
    assert not paths.has_events()  # none of them holds any
    mine[1].write_text("{}")
    assert paths.has_events()


def test_next_attempt(tmp_path: Path) -> None:
    """The next attempt of a group is one that no log in the folder belongs to."""
    paths = RunPaths(tmp_path)
    assert paths.next_attempt(1) == 0
    for replica, attempt in ((1, 0), (1, 9), (1, 10), (11, 50)):
        paths.logs(replica, attempt, 0).parent.mkdir(parents=True)
    (tmp_path / "logs" / "replica-1" / "attempt-x").mkdir()
    assert paths.next_attempt(1) == 11


def test_launcher_loads_no_torch() -> None:
    """The command line and the launcher start fast and work without torch."""
    modules = "titan_ft.cli.main, titan_ft.launch.local, titan_ft.launch.launch_plan, titan_ft.launch.group.agent"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'torchft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
