# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The last lines of the processes that ended by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from titan_ft.cli.main import main
from titan_ft.history.outcomes.logs import find_failed_attempts, show_logs
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.log import encode
from titan_ft.run.paths import RunPaths

BOOM = {
    "reason": "rank 0 ended with exit status 1",
    "signal": None,
    "code": 1,
    "error": "RuntimeError: boom 1",
}
TRACEBACK = (
    'Traceback (most recent call last):\n  File "mybug.py", line 15, in f\nRuntimeError: boom 1\n'
)


def write_log(root: Path, slot: int, attempt: int = 0, text: str = TRACEBACK) -> Path:
    log = RunPaths(root).logs(slot, attempt, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"step 1\nstep 2\n{text}")
    return log


def crashed(synthetic_run: Any, *slots: int) -> Any:
    run = synthetic_run(3, steps=40)
    run.begin()
    run.steps(5)
    for slot in slots:
        run.exit(slot, **BOOM, where="mybug.py:15", log=f"/elsewhere/replica-{slot}.log")
    return run


def test_exception_comes_first_with_rank_line_and_log(synthetic_run: Any, tmp_path: Path) -> None:
    """A moved run still has its logs, although the events have another host's path."""
    log = write_log(tmp_path, 1)
    lines = show_logs(RunRecord(crashed(synthetic_run, 1).events), tmp_path, None, 30)
    assert lines[2] == "RuntimeError: boom 1"
    assert lines[3].startswith("  rank 0 of group 1, attempt 0, after step 5, at ")
    assert lines[3].endswith(", mybug.py:15")
    assert lines[4] == f"  {log}"
    assert lines[5:] == [f"    {line}" for line in TRACEBACK.splitlines()]


def test_same_reason_is_printed_once(synthetic_run: Any, tmp_path: Path) -> None:
    """Groups with the same end share one entry; a kill is another one."""
    run = crashed(synthetic_run, 0, 1)
    run.exit(2, signal="SIGKILL", code=None, reason="rank 0 was killed by SIGKILL")
    ends = find_failed_attempts(RunRecord(run.events))
    assert [(end.reason.text, end.slots) for end in ends] == [
        ("killed by SIGKILL", (2,)),
        (BOOM["error"], (0, 1)),
    ]
    text = "\n".join(show_logs(RunRecord(run.events), tmp_path, None, 30))
    assert "; group 0 ended alike" in text
    assert text.count("its log is not in this folder") == 2
    assert [end.slots for end in find_failed_attempts(RunRecord(run.events), slot=0)] == [(0,)]


def test_only_the_first_rank_and_the_last_attempt_count(synthetic_run: Any) -> None:
    """Other ranks end because of the first one, and a restarted group may have ended again."""
    run = crashed(synthetic_run, 1)
    run.exit(
        1,
        rank=1,
        reason="rank 1 ended with exit status 1",
        signal=None,
        code=1,
        error="RuntimeError: lost peer",
    )
    (end,) = find_failed_attempts(RunRecord(run.events))
    assert end.reason.text == BOOM["error"]


def test_nothing_ended_by_itself(good_run: Any, tmp_path: Path) -> None:
    """The last lines of each group's rank 0 are shown; for a requested group only its own."""
    good_run.events = [event for event in good_run.events if event.name != "worker_exited"]
    log = write_log(tmp_path, 0, text="")
    RunPaths(tmp_path).latest_logs(0).symlink_to(log.parent.name)
    lines = show_logs(RunRecord(good_run.events), tmp_path, None, 1)
    assert lines[1] == "no group ended by itself; the last lines of rank 0:"
    assert lines[3:5] == [f"group 0: {RunPaths(tmp_path).latest_logs(0)}/rank-0.log", "    step 2"]
    assert "    (no log in this folder)" in lines
    assert not any(
        "group 0" in line for line in show_logs(RunRecord(good_run.events), tmp_path, 1, 1)[1:]
    )


def test_a_frozen_group_that_was_given_up(synthetic_run: Any, tmp_path: Path) -> None:
    """None of the group's workers ended by itself, and the reader asks about this group."""
    run = synthetic_run(2, steps=40)
    run.begin()
    run.steps(5)
    run.tell(
        "replica_gave_up",
        1,
        replica=1,
        attempt=0,
        cause="lost",
        reason="it was silent",
        log="",
        error="",
    )
    lines = show_logs(RunRecord(run.events), tmp_path, None, 30)
    assert lines[2] == "it was silent"
    assert lines[3].startswith("  group 1, attempt 0, after step 5, at ")


def test_dead_agent(synthetic_run: Any, tmp_path: Path) -> None:
    """If a group's agent was killed, the agent's log is shown, because no rank ended by itself."""
    run = synthetic_run(3, steps=40)
    run.begin()
    run.steps(5)
    ended = {
        "agent_pid": 7,
        "signal": "SIGKILL",
        "restarts": True,
        "log": "/elsewhere/supervisor.log",
    }
    run.tell(
        "agent_ended", 1, replica=1, attempt=0, reason="its agent was killed by SIGKILL", **ended
    )
    log = RunPaths(tmp_path).agent_log(1)
    log.parent.mkdir(parents=True)
    log.write_text("last words\n")
    lines = show_logs(RunRecord(run.events), tmp_path, None, 30)
    assert lines[2] == "its agent was killed by SIGKILL"
    assert lines[3].startswith("  group 1, attempt 0, after step 5, at ")
    assert lines[4:] == [f"  {log}", "    last words"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--group", "7"], "--group must be a group of the run (0, 1, 2), got 7"),
        (["--lines", "0"], "--lines must be >= 1, got 0; leave it out for 30"),
    ],
)
def test_mistakes(
    synthetic_run: Any, tmp_path: Path, capsys: Any, options: list[str], message: str
) -> None:
    """A wrong option is one line and status 2."""
    events = RunPaths(tmp_path).events
    events.mkdir()
    (events / "a.jsonl").write_bytes(
        b"".join(encode(event) for event in crashed(synthetic_run, 1).events)
    )
    assert main(["logs", str(tmp_path), *options]) == 2
    assert capsys.readouterr().err == f"titan-ft: {message}\n"
    assert main(["logs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[2] == "RuntimeError: boom 1"
