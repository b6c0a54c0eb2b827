# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Commands on a run folder that is full, read-only, a file, or unreadable: one line, and no
traceback.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from titan_ft.cli.main import main
from titan_ft.run.log import encode

LINE = "titan-ft: --out must be a folder that can be written, got {} ({}); make room, or give another\n"


def write_events(run: Any, folder: Path) -> Path:
    (folder / "run" / "events").mkdir(parents=True)
    (folder / "run" / "events" / "all.jsonl").write_bytes(b"".join(map(encode, run.events)))
    return folder / "run"


@pytest.mark.parametrize(("command", "default"), [("report", "report"), ("curves", "tb/job")])
def test_folder_that_is_a_file(
    good_run: Any, tmp_path: Path, command: str, default: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default output and a given one are refused alike."""
    run_dir = write_events(good_run, tmp_path)
    (run_dir / default.partition("/")[0]).touch()
    reason = "Not a directory" if "/" in default else "File exists"
    assert main([command, str(run_dir)]) == 2
    assert capsys.readouterr().err == LINE.format(run_dir / default, reason)
    assert main([command, str(run_dir), "--out", str(run_dir / "events" / "all.jsonl" / "x")]) == 2
    assert capsys.readouterr().err == LINE.format(
        run_dir / "events" / "all.jsonl" / "x", "Not a directory"
    )
    assert main([command, str(run_dir), "--out", str(tmp_path / "elsewhere")]) == 0


@pytest.mark.parametrize("command", ["report", "curves"])
def test_folder_on_a_full_disk(
    good_run: Any, small_disk: Any, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier files stay, no partial file is left, and another folder can be given."""
    run_dir = write_events(good_run, small_disk.folder)
    small_disk.fill()
    out = run_dir / ("report" if command == "report" else "tb/job")
    assert main([command, str(run_dir)]) == 2
    assert capsys.readouterr().err == LINE.format(out, "No space left on device")
    assert list(out.iterdir()) == []
    assert main([command, str(run_dir), "--out", str(tmp_path / "out")]) == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert files
    assert not any(name.startswith(".") for name in files)


def test_page_that_was_there_stays_whole(
    good_run: Any, small_disk: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page that cannot be rewritten stays the former one."""
    run_dir = write_events(good_run, small_disk.folder)
    (run_dir / "report").mkdir()
    (run_dir / "report" / "index.html").write_text("the former page")
    small_disk.fill()
    assert main(["report", str(run_dir)]) == 2
    assert "--out" in capsys.readouterr().err
    assert [path.name for path in (run_dir / "report").iterdir()] == ["index.html"]
    assert (run_dir / "report" / "index.html").read_text() == "the former page"


def test_read_only_disk(good_run: Any, small_disk: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands that only read work; those that write report that they cannot."""
    run_dir = write_events(good_run, small_disk.folder)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk.folder)], check=True)
    for command, out in (("report", "report"), ("curves", "tb/job")):
        assert main([command, str(run_dir)]) == 2
        assert capsys.readouterr().err == LINE.format(run_dir / out, "Read-only file system")
    assert main(["check", str(run_dir)]) == 0
    assert main(["top", str(run_dir), "--once"]) == 0
    assert main(["report", str(run_dir), "--json"]) == 0
    launch = ["launch", "llama3_debug", "--replicas", "2", "--ranks-per-replica", "1"]
    assert main([*launch, "--run-dir", str(small_disk.folder / "next")]) == 2
    errors = capsys.readouterr().err
    assert (
        f"--run-dir must be a folder that can be written, got {small_disk.folder / 'next'} (Read-only"
        in errors
    )


@pytest.mark.parametrize("command", ["check", "report"])
def test_events_that_are_no_folder(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unreadable events are named, and nothing is claimed about the run."""
    (tmp_path / "events").touch()
    assert main([command, str(tmp_path)]) == 1
    captured = capsys.readouterr()
    text = f"{tmp_path / 'events'} must be a folder with events, got Not a directory; mend or remove it"
    assert text in captured.out + captured.err
    assert "Traceback" not in captured.out + captured.err


def test_curves_of_a_run_on_a_disk_that_fills(
    good_run: Any,
    small_disk: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A disk that fills during the run loses points, which is reported with status 1."""
    run_dir = write_events(good_run, small_disk.folder)
    monkeypatch.setattr("titan_ft.live.curves.FINISH_SECONDS", 0.1)
    monkeypatch.setattr(
        "titan_ft.live.curves.StopRequests", lambda *signals: small_disk.fill() or _NoStop()
    )
    assert main(["curves", str(run_dir)]) == 1
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith(
        f"titan-ft curves: {run_dir}/tb/job cannot be written (No space left on device)"
    )
    assert last.endswith("points of its curves are lost")


class _NoStop:
    def __bool__(self) -> bool:
        return False

    def close(self) -> None:
        pass
