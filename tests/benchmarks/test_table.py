# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The tables, and what they are made of."""

from __future__ import annotations

from typing import Any

from benchmarks.command import PARTS, describe_machine
from benchmarks.links import MODES
from benchmarks.rounds import CASES, Case
from benchmarks.systems import OURS, PEER
from benchmarks.table import format_report, markdown


def test_the_report_is_a_table_per_part() -> None:
    spread = {"median": 1.0, "low": 0.9, "high": 1.25}
    steady = {OURS: {"seconds": spread, "ratio": spread, "mean_ratio": spread, "rounds": [[1.0]]}}
    names = ("stall_seconds", "rejoin_seconds", "rejoin_stall_seconds")
    kills: dict[str, Any] = {
        PEER: [{**dict.fromkeys(names, 4.0), "steps_lost": 1}, {**dict.fromkeys(names), "stall_seconds": 5.0}]
    }
    kills[PEER][1]["steps_lost"] = 0
    machine = describe_machine()
    report = {"command": "python scripts/bench.py", "machine": machine, "steady": steady, "kills": kills}
    text = format_report(report, PARTS)
    assert str(machine["torch"]) in text
    assert "1.000 (0.900 to 1.250)" in text
    assert "4.500 (4.000 to 5.000) | 1 " in text
    assert "4.000 (4.000 to 4.000), 1 never" in text
    assert "kill to contributing" not in format_report(report, ["failure"])
    assert "survivors' stall" not in format_report(report, ["rejoin"])


def test_recovery_has_a_table_per_kind() -> None:
    pause = {"seconds": 0.5, "steps": 2.0, "usual_seconds": 0.25}
    rejoin = {"transfer_steps": 20.0, "steps_made": 19, "step_ratio": 1.02, "stall": pause, "return_stall": pause}
    replay, wait = {**rejoin, "replay_rate": 3.5}, {**rejoin, "step_ratio": None, "replay_rate": None}
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
    report = {"command": "python scripts/bench.py", "machine": describe_machine(), "recovery": recovery}
    text = format_report(report, ["recovery"])
    rows = {row.split("|")[1].strip(): row for row in text.splitlines() if row.startswith("|")}
    assert "2.000 (2.000 to 2.000)" in rows["1 rank a group, new processes"]
    assert "2 ranks a group, forked" in rows
    assert "12.3 Mbit/s" in text
    assert "1.020 (1.020 to 1.020)" in rows["replay, 1 times"]
    assert rows["wait, 1 times"].split("|")[4].strip() == rows["wait, 1 times"].split("|")[-2].strip() == "-"
    assert "0.200 (0.200 to 0.200)" in rows["1 drains, 1 in order"]
    assert rows["1 times"].split("|")[-2].strip() == "0"
    # What is measured is shown, even when the run ends before the rest.
    del recovery["drains"], recovery["outages"], recovery["rejoins"]["wait"]
    assert "drains" not in format_report(report, ["recovery"])


def rounds_report(**parts: Any) -> dict[str, str]:
    """Return the rows of a report of rounds by their titles."""
    rounds = {name.replace("_", "-"): figures for name, figures in parts.items()}
    report = {"command": "python scripts/bench.py", "machine": describe_machine(), "rounds": rounds}
    rows = [line for line in format_report(report, list(rounds)).splitlines() if line.startswith("|")]
    return {row.split("|")[1].strip(): row for row in rows}


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def test_losses_stand_beside_the_synchronous_ones_of_as_many_groups() -> None:
    """A case that is missing is a dash, and so is a ratio without what it is to."""
    done = {case.name: {"loss": 5.0, "bytes_per_step": 24.7e6} for case in CASES if case.num_groups == 2}
    done[Case(2, 30, 0.7).name] = {"loss": 5.1, "bytes_per_step": 24.7e6 / 30}
    done[Case(4, 30, 0.7).name] = {"loss": 5.1, "bytes_per_step": 1e6}
    rows = rounds_report(rounds_loss=done)
    assert cells(rows["synchronous"]) == ["5.0000", "+0.00 %", "24.7", "-", "-", "-"]
    assert cells(rows["rounds of 30, outer LR 0.7"]) == ["5.1000", "+2.00 %", "0.823", "5.1000", "-", "1"]
    assert "synchronous, seed 43" in rows
    assert len(rows) == 2 + 1 + 6 + 1


def test_links_are_compared_at_each_rate() -> None:
    def mode(*speeds: float) -> dict[str, Any]:
        rates = [{"tokens_per_second": speed, "bytes_per_exchange": 24.7e6, "load": 2.0} for speed in speeds]
        return {"rates": rates}

    done = {"paced": {"1000": 998.7, "100": 100.1, "10": 10.04}}
    done |= {MODES[0].name: mode(1000.0, 900.0, 200.0, 25.0), MODES[1].name: mode(1100.0, 1100.0, 1000.0, 250.0)}
    rows = rounds_report(rounds_links=done)
    assert cells(rows["tokens/s, 2 groups"]) == ["synchronous", "rounds of 10"]
    assert cells(rows["not throttled"]) == ["1,000", "1,100 (1.1x)"]
    assert cells(rows["10 Mbit/s (measured 10.04)"]) == ["25", "250 (10x)"]
    assert cells(rows["MB per step and group, by TCP's counter"]) == ["24.7", "2.47"]
    assert cells(rows["load of the machine"]) == ["2.0 to 2.0"] * 2


def test_the_two_dilocos_stand_side_by_side() -> None:
    whole: dict[str, Any] = {"loss": 5.0, "rounds_committed": 30, "rounds_failed": 0, "steps_made": 600.0}
    whole |= {"steps_thrown_away": 0.0, "rounds_mixed": 0, "digests": "equal (step 30)", "crashes": 0}
    whole |= {"groups_finished": 2, "kills": 0, "seconds": 99.6, "ended": None}
    broken = {**whole, "loss": None, "groups_finished": 0, "kills": 2, "ended": "did not finish within 600 s"}
    rows = rounds_report(rounds_diloco={"ours-kills0": whole, "peer-kills2": broken})
    assert cells(rows["DiLoCo, 2 groups x 2 ranks, 20 rounds of 10 steps"]) == [
        "titan_ft, no SIGKILLs",
        "torchtitan's own, 2 SIGKILLs",
    ]
    assert cells(rows["the survivor's loss at the end"]) == ["5.0000", "-"]
    assert cells(rows["groups that finished"]) == ["2 of 2", "0 of 2"]
    assert cells(rows["ended early"]) == ["no", "did not finish within 600 s"]


def test_a_markdown_table_is_aligned() -> None:
    assert markdown([["a", "bb"], ["ccc", "d"]]) == ["| a   | bb |", "| --- | -- |", "| ccc | d  |"]
