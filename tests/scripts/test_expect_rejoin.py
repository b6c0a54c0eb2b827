# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""scripts/expect_rejoin.py on short histories."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.event_builder import typed
from titan_ft.run.events import Event
from titan_ft.run.log import encode

SCRIPT = Path(__file__).parents[2] / "scripts" / "expect_rejoin.py"


def history(
    final: str = "aa", at_step: str = "11", kill: bool = True, rejoin: bool = True
) -> list[Event]:
    """Make a history of two groups of one rank: group 1 is killed after step 1, returns for step 3,
    and both end after it.
    """

    def worker(
        time: float, event: str, replica: int, attempt: int = 0, **fields: Any
    ) -> dict[str, Any]:
        pid = 100 + 10 * replica + attempt
        return {
            "time": time,
            "event": event,
            "pid": pid,
            "replica": replica,
            "rank": 0,
            "attempt": attempt,
            **fields,
        }

    def commit(
        time: float, replica: int, step: int, attempt: int = 0, **fields: Any
    ) -> dict[str, Any]:
        both = [0, 1] if step != 2 else [0]
        return worker(
            time,
            "step_committed",
            replica,
            attempt,
            step=step,
            participants=both,
            seconds=1.0,
            **fields,
        )

    events = [worker(0.0, "worker_started", r) for r in (0, 1)] + [
        commit(1.0, r, 1) for r in (0, 1)
    ]
    if kill:
        agent = {"time": 1.2, "pid": 9, "replica": 1, "attempt": 0, "rank": 0}
        events.append(
            {
                "time": 1.1,
                "pid": 8,
                "event": "fault_injected",
                "fault": "sigkill_group",
                "target": {"replica": 1},
            }
        )
        events.append({**agent, "event": "worker_exited", "signal": "SIGKILL", "stopped": False})
        events.append({**agent, "event": "replica_restarted", "attempt": 1})
    attempt = 1 if kill else 0
    events += [commit(2.0, 0, 2), commit(3.0, 0, 3, digest="11")]
    events.append(worker(4.0, "training_finished", 0, step=3, digest="aa"))
    if rejoin:
        events.append(worker(1.5, "worker_started", 1, attempt))
        events.append(commit(3.0, 1, 3, attempt, digest=at_step))
        events.append(worker(4.0, "training_finished", 1, attempt, step=3, digest=final))
    return [typed({"time": 1e9 + event.pop("time"), **event}) for event in events]


def expect_rejoin(run_dir: Path, events: list[Event]) -> subprocess.CompletedProcess[str]:
    (run_dir / "events").mkdir()
    (run_dir / "events" / "all.jsonl").write_bytes(b"".join(map(encode, events)))
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(run_dir)], capture_output=True, text=True, timeout=60
    )


def test_a_group_that_came_back_with_equal_digests_passes(tmp_path: Path) -> None:
    """A successful rejoin prints nothing."""
    result = expect_rejoin(tmp_path, history())
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final": "bb"}, "final digests: differ"),
        ({"at_step": "22"}, "digests of the steps: differ (first at step 3)"),
        ({"rejoin": False}, "only groups [0] of 2 finished"),
        ({"rejoin": False}, "no group died and contributed again"),
        ({"kill": False}, "no group died and contributed again"),
    ],
)
def test_what_does_not_hold_is_said(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """A failure prints one line and sets the status."""
    result = expect_rejoin(tmp_path, history(**changes))
    assert result.returncode == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
