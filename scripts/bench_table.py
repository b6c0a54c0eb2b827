# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Show the figures of the benchmark as Markdown, which a terminal shows well enough and a README takes as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    known = [cost[name] for cost in costs if cost[name] is not None]
    missing = f", {len(costs) - len(known)} never" if len(known) < len(costs) else ""
    return (_spread(Spread.of(known)) if known else "-") + missing
