# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Show the figures of the benchmark as Markdown, which a terminal shows well enough and a README takes as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench_steps import Spread
from bench_systems import TITLES


def format_report(report: Mapping[str, Any], parts: Sequence[str]) -> str:
    """Return machine, command and the tables of what was measured, as far as `parts` asks for it."""
    machine = report["machine"]
    lines = [
        "{cpu}, {cores} cores, {memory_gib} GiB, load {load}; {platform}".format(**machine),
        "Python {python}, torch {torch}, torchtitan {torchtitan}, torchft {torchft}".format(**machine),
        report["command"],
    ]
    if "steady" in report:
        lines += ["", *_steady_rows(report["steady"])]
    if report.get("kills"):
        lines += ["", *_kill_rows(report["kills"], parts)]
    for name, figures in report.get("recovery", {}).items():
        lines += ["", *markdown(_RECOVERY_ROWS[name](figures))]
    if "campaign_table" in report:
        lines += ["", *report["campaign_table"]]
    return "\n".join(lines)


def _steady_rows(steady: Mapping[str, Any]) -> list[str]:
    rows = [["without failures", "step (s)", "ratio of medians", "ratio of means"]]
    for system, figures in steady.items():
        ratios = [_spread(Spread(**figures[name])) for name in ("ratio", "mean_ratio")]
        rows.append([TITLES[system], _spread(Spread(**figures["seconds"])), *ratios])
    return markdown(rows)


def _kill_rows(kills: Mapping[str, Sequence[Mapping[str, Any]]], parts: Sequence[str]) -> list[str]:
    head = ["SIGKILL of a group", "kills"]
    if "failure" in parts:
        head += ["survivors' stall (s)", "steps lost, in all"]
    if "rejoin" in parts:
        head += ["kill to contributing (s)", "stall at the return (s)"]
    rows = [head]
    for system, costs in kills.items():
        row = [TITLES[system], str(len(costs))]
        if "failure" in parts:
            row += [_spread_of(costs, "stall_seconds"), str(sum(cost["steps_lost"] for cost in costs))]
        if "rejoin" in parts:
            row += [_spread_of(costs, "rejoin_seconds"), _spread_of(costs, "rejoin_stall_seconds")]
        rows.append(row)
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return an aligned Markdown table; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return [lines[0], "| " + " | ".join("-" * width for width in widths) + " |", *lines[1:]]


def _spread(spread: Spread) -> str:
    return f"{spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f})"


def _spread_of(costs: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [_value(cost, name) for cost in costs]
    known = [value for value in values if value is not None]
    missing = f", {len(costs) - len(known)} never" if len(known) < len(costs) else ""
    return (_spread(Spread.of(known)) if known else "-") + missing


def _value(cost: Any, name: str) -> float | None:
    """Return a figure, given its path such as `stall.seconds`."""
    for part in name.split("."):
        cost = cost[part]
    return None if cost is None else float(cost)


def _return_rows(returns: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = [["SIGKILL of a group", "kills", "kill to contributing (s)", "survivors' stall (s)", "at the return (s)"]]
    for case in returns:
        costs, ready = case["kills"], case["standby_ready_seconds"]
        late = ready.count(None)
        ranks = "1 rank" if case["num_ranks"] == 1 else f"{case['num_ranks']} ranks"
        title = f"{ranks} a group, {'a standby' if case['standby'] else 'no standby'}"
        title += f" ({late} of them not ready)" if late else ""
        figures = ("rejoin_seconds", "stall_seconds", "rejoin_stall_seconds")
        rows.append([title, str(len(costs)), *(_spread_of(costs, name) for name in figures)])
    return rows


def _rejoin_rows(rejoins: Mapping[str, Any]) -> list[list[str]]:
    rows = [
        [
            f"return at {rejoins['transfer_max_mbps']:.1f} Mbit/s",
            "transfer (steps)",
            "steps made meanwhile",
            "median step / before",
            "longest gap beyond a step (s)",
            "in steps",
            "when it is back (s)",
        ]
    ]
    for catch_up in ("replay", "wait"):
        if costs := rejoins.get(catch_up):
            with_ratio = [cost for cost in costs if cost["step_ratio"] is not None]
            row = [f"{catch_up}, {len(costs)} times"]
            row += [_spread_of(costs, name) for name in ("transfer_steps", "steps_made")]
            row.append(_spread_of(with_ratio, "step_ratio"))
            row += [_spread_of(costs, name) for name in ("stall.seconds", "stall.steps", "return_stall.seconds")]
            rows.append(row)
    return rows


def _drain_rows(drains: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    in_order = sum(drain["in_order"] for drain in drains)
    figures = ("stall.seconds", "stall.steps", "leave_seconds")
    return [
        ["SIGTERM to a group", "survivors' stall (s)", "in steps", "until it had left (s)"],
        [f"{len(drains)} drains, {in_order} in order", *(_spread_of(drains, name) for name in figures)],
    ]


def _outage_rows(outages: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    figures = ("stall.seconds", "stall.steps", "away_seconds")
    restarts = sum(outage["num_restarts"] for outage in outages)
    return [
        ["SIGKILL of the lighthouse", "pause (s)", "in steps", "lighthouse away (s)", "groups restarted"],
        [f"{len(outages)} times", *(_spread_of(outages, name) for name in figures), str(restarts)],
    ]


_RECOVERY_ROWS: Mapping[str, Callable[[Any], list[list[str]]]] = {
    "returns": _return_rows,
    "rejoins": _rejoin_rows,
    "drains": _drain_rows,
    "outages": _outage_rows,
}
