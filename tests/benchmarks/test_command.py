# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/bench.py: its command line, and one short run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import command
from benchmarks.systems import OURS, STOCK

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench.py"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "15"],
        ["--kills", "0"],
        ["--recoveries", "0"],
        ["--rounds", "x"],
        ["--only", "all"],
    ],
)
def test_bad_usage_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2


def test_a_config_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--config", str(tmp_path / "none.toml")]) == 2
    assert "none.toml" in capsys.readouterr().err


def fake_rounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """Make each part of rounds measure one case; record the cases that were already done."""
    calls: list[tuple[str, list[str]]] = []

    def measure(part: str) -> Callable[..., Iterator[tuple[str, Any]]]:
        def run(base: Any, work_dir: Path, done: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
            calls.append((part, list(done)))
            yield from () if "a" in done else [("a", {"loss": 5.0, "bytes_per_step": 1.0})]

        return run

    monkeypatch.setattr(command, "_ROUNDS_PARTS", {part: measure(part) for part in command.ROUNDS})
    monkeypatch.setattr(command, "format_report", lambda report, parts: "a report")
    return calls


def test_rounds_go_on_from_the_figures_so_far(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rounds are measured only on request. Figures of other runs are refused."""
    calls, figures = fake_rounds(monkeypatch), tmp_path / "figures.json"
    assert not {"rounds", *command.ROUNDS} & set(command.PARTS)
    arguments = ["--json", str(figures), "--work-dir", str(tmp_path / "work"), "--only"]
    assert command.main([*arguments, "rounds-loss"]) == 0
    assert command.main([*arguments, "rounds", "--go-on"]) == 0
    assert calls == [
        ("rounds-loss", []),
        ("rounds-loss", ["a"]),
        ("rounds-diloco", []),
        ("rounds-links", []),
    ]
    found = json.loads(figures.read_text())
    assert all("a" in found["rounds"][part] for part in command.ROUNDS)
    found["rounds"]["settings"] = "3 steps"
    figures.write_text(json.dumps(found))
    assert command.main([*arguments, "rounds", "--go-on"]) == 1
    assert len(calls) == 4
    with pytest.raises(SystemExit):
        command.main(["--only", "rounds", "--go-on"])


def processes_with(text: str) -> list[str]:
    """List the command lines that hold a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        if text in command:
            found.append(command)
    return found


@pytest.mark.slow
def test_a_short_run_compares_step_times(tmp_path: Path) -> None:
    """Two real jobs run one after the other, and no process stays."""
    work_dir, figures = tmp_path / "work", tmp_path / "figures.json"
    arguments = [sys.executable, str(SCRIPT), "--only", "steady", "--skip-peer", "--rounds", "1"]
    arguments += ["--steps", "20", "--work-dir", str(work_dir), "--json", str(figures)]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(figures.read_text())
    assert set(report["steady"]) == {STOCK, OURS}
    assert report["steady"][STOCK]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    # Wide enough for a machine that does something else meanwhile.
    assert 0.2 < report["steady"][OURS]["ratio"]["median"] < 5.0
    assert 0.5 < report["steady"][OURS]["processor_ratio"]["median"] < 2.0
    assert "titan_ft, 2 groups x 2 ranks" in ended.stdout
    deadline = time.monotonic() + 10.0
    while processes_with(str(work_dir)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_with(str(work_dir)) == []
