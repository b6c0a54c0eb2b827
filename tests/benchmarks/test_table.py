# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The tables and their contents."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.command import PARTS, describe_machine
from benchmarks.systems import OURS, PEER
from benchmarks.table import format_report


def test_the_report_is_a_table_per_part() -> None:
    spread = {"median": 1.0, "low": 0.9, "high": 1.25}
    processor = {"threads": {"main": 0.5, "idle": 0.0004}}
    columns = ("seconds", "ratio", "mean_ratio", "user", "system", "others", "processor_ratio")
    steady = {OURS: {**dict.fromkeys(columns, spread), "rounds": [[1.0]], "processor": [processor]}}
    names = ("stall_seconds", "rejoin_seconds", "rejoin_stall_seconds")
    kills: dict[str, Any] = {
        PEER: [
            {**dict.fromkeys(names, 4.0), "steps_lost": 1},
            {**dict.fromkeys(names), "stall_seconds": 5.0},
        ]
    }
    kills[PEER][1]["steps_lost"] = 0
    machine = describe_machine()
    report = {
        "command": "python scripts/bench.py",
        "machine": machine,
        "steady": steady,
        "kills": kills,
    }
    text = format_report(report, PARTS)
    assert str(machine["torch"]) in text
    assert "1.000 (0.900 to 1.250)" in text
    assert re.search(r"^\| main +\| 500 +\|$", text, re.MULTILINE)
    assert "idle" not in text
    assert "4.500 (4.000 to 5.000) | 1 " in text
    assert "4.000 (4.000 to 4.000), 1 never" in text
    assert "kill to contributing" not in format_report(report, ["failure"])
    assert "survivors' stall" not in format_report(report, ["rejoin"])


def test_recovery_has_a_table_per_kind() -> None:
    pause = {"seconds": 0.5, "steps": 2.0, "usual_seconds": 0.25}
    rejoin = {
        "transfer_steps": 20.0,
        "steps_made": 19,
        "step_ratio": 1.02,
        "stall": pause,
        "return_stall": pause,
    }
    replay, wait = (
        {**rejoin, "replay_rate": 3.5},
        {**rejoin, "step_ratio": None, "replay_rate": None},
    )
    kill = {"rejoin_seconds": 2.0, "stall_seconds": 0.1, "rejoin_stall_seconds": 0.3}
    recovery: dict[str, Any] = {
        "returns": [
            {"num_ranks": 1, "forked": False, "kills": [kill]},
            {"num_ranks": 2, "forked": True, "kills": [kill, kill]},
        ],
        "rejoins": {"transfer_max_mbps": 12.34, "replay": [replay], "wait": [wait]},
        "drains": [{"stall": pause, "leave_seconds": 0.2, "in_order": True}],
        "outages": [{"stall": pause, "away_seconds": 0.75, "num_restarts": 0}],
    }
    report = {
        "command": "python scripts/bench.py",
        "machine": describe_machine(),
        "recovery": recovery,
    }
    text = format_report(report, ["recovery"])
    rows = {row.split("|")[1].strip(): row for row in text.splitlines() if row.startswith("|")}
    assert "2.000 (2.000 to 2.000)" in rows["1 rank a group, new processes"]
    assert "2 ranks a group, forked" in rows
    assert "12.3 Mbit/s" in text
    assert "1.020 (1.020 to 1.020)" in rows["replay, 1 times"]
    assert (
        rows["wait, 1 times"].split("|")[4].strip()
        == rows["wait, 1 times"].split("|")[-2].strip()
        == "-"
    )
    assert "0.200 (0.200 to 0.200)" in rows["1 drains, 1 in order"]
    assert rows["1 times"].split("|")[-2].strip() == "0"
    # What is measured is shown, even when the run ends before the rest.
    del recovery["drains"], recovery["outages"], recovery["rejoins"]["wait"]
    assert "drains" not in format_report(report, ["recovery"])
