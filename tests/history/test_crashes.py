# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The exceptions that ended groups of a run."""

from __future__ import annotations

from typing import Any

from tests.event_builder import event
from titan_ft.history.check import check
from titan_ft.history.outcomes.crashes import find_crashes
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.summary import make_summary_table, summarize
from titan_ft.history.terminal import text_of


def exited(time: float, replica: int, attempt: int, error: str | None, **fields: Any) -> Any:
    fields = {"code": 1, "log": f"replica-{replica}.log", "reason": "x", **fields}
    return event(
        "worker_exited", time=time, replica=replica, attempt=attempt, error=error, **fields
    )


RECORD = RunRecord(
    [
        event("launch_started", time=100.0, replicas=2),
        exited(101.0, 0, 0, "KeyError: 'nope' of pid 12"),
        exited(101.1, 0, 0, "DistStoreError: rank 1 lost its peer", rank=1),
        exited(101.2, 0, 0, "DistStoreError: lost as well", rank=2, stopped=True),
        exited(102.0, 1, 0, "KeyError: 'nope' of pid 4711"),
        exited(103.0, 0, 1, "LighthouseError: away", transient=True),
        exited(104.0, 1, 1, None, code=None, signal="SIGKILL"),
        exited(105.5, 1, 2, "KeyError: 'nope' of pid 3", where="mybug.py:15"),
    ]
)
NOPE = "KeyError: 'nope' of pid 12 (mybug.py:15; 3 times, groups 0, 1, from 1.0 s to 5.5 s; replica-1.log)"
AWAY = "LighthouseError: away (1 time, group 0, 3.0 s; replica-0.log)"


def test_each_exception_once() -> None:
    """Each attempt's cause counts, whatever numbers it contains; kills and consequences do not."""
    nope, away = find_crashes(RECORD)
    assert (nope.count, nope.replicas, nope.first, nope.last) == (3, [0, 1], 101.0, 105.5)
    assert [nope.transient, away.transient] == [False, True]
    assert [crash.describe(100.0) for crash in (nope, away)] == [NOPE, AWAY]


def test_where_they_are_shown() -> None:
    """Exceptions are in the report's table and figures, and in `check`'s row about silence."""
    summary = summarize(RECORD)
    lines = text_of(make_summary_table(summary)).splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("exception ")] == [
        NOPE,
        AWAY,
    ]
    assert [crash["count"] for crash in summary.to_dict()["crashes"]] == [3, 1]
    notes = check(RECORD)["nothing silent"].notes
    assert notes[:2] == [f"ended by {NOPE}", f"ended by {AWAY}"]
