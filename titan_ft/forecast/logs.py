# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read failures from files: chaos traces, and logs in the format that LANL has published.

A scenario reads the files of its failures here.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from titan_ft.chaos.plan_file import read_trace
from titan_ft.config import ConfigError
from titan_ft.faults.fault import Fault

LANL_COLUMNS = ("System", "nodenumz", "Prob Started", "Prob Fixed")
"""Of LA-UR-05-7318, https://www.lanl.gov/projects/ultrascale-systems-research-center/data/failure-
data.php."""
_LANL_TIME = "%m/%d/%Y %H:%M"


@dataclass(frozen=True)
class LoggedFailure:
    """One failure of a file.

    Attributes:
        time: seconds since the log's first failure, or since the trace's start.
        fault: of a trace; None for a log.
        group: the group that a trace names; None leaves it to luck.
        node: the node of a log.
        down_seconds: until the node was mended; None if the file does not have it.
    """

    time: float
    fault: Fault | None = None
    group: int | None = None
    node: int | None = None
    down_seconds: float | None = None


def read_faults(path: Path) -> list[LoggedFailure]:
    """Read a chaos trace, in order of time.

    Raises:
        ConfigError: the file cannot be read, or a line of it is wrong; names the line.
    """
    found = [LoggedFailure(entry.at, entry.fault, entry.replica) for entry in read_trace(path)]
    return sorted(found, key=lambda each: each.time)


def read_lanl(path: Path, system: int | None = None) -> list[LoggedFailure]:
    """Read a log in LANL's format, in order of time.

    Args:
        system: number of the system in the log; None takes all.

    Raises:
        ConfigError: the file cannot be read, or a line of it is wrong; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        got = f"{path} ({reason})"
        raise ConfigError(
            f"log must be a readable CSV file, got {got}; correct the path"
        ) from error
    rows = csv.DictReader(lines)
    missing = [name for name in LANL_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        rule = f"must have the columns {', '.join(LANL_COLUMNS)}, as LANL's log has them"
        got = f"none named {missing[0]!r}"
        raise ConfigError(f"{path.name}:1 {rule}, got {got}; a chaos trace is given as trace")
    found = [
        _lanl_failure(f"{path.name}:{rows.line_num}", row)
        for row in rows
        if system is None or (row["System"] or "").strip() == str(system)
    ]
    if not found:
        of_system = "" if system is None else f" of system {system}"
        rule = f"must hold a failure{of_system}"
        raise ConfigError(f"{path.name} {rule}, got none; give another log or system")
    found.sort(key=lambda each: each.time)
    first = found[0].time
    return [replace(each, time=each.time - first) for each in found]


def _lanl_failure(name: str, row: dict[str, str]) -> LoggedFailure:
    """Return the failure of a row, at its Unix time."""
    try:
        start = datetime.strptime(row["Prob Started"].strip(), _LANL_TIME).replace(tzinfo=UTC)
        node, fixed = int(row["nodenumz"]), row["Prob Fixed"].strip()
        down = None
        if fixed:
            end = datetime.strptime(fixed, _LANL_TIME).replace(tzinfo=UTC)
            down = max(0.0, (end - start).total_seconds())
    except (AttributeError, TypeError, ValueError) as error:
        rule = "must have a node's number and times such as 6/21/2005 10:54"
        got = f"{row.get('nodenumz')!r}, {row.get('Prob Started')!r}, {row.get('Prob Fixed')!r}"
        raise ConfigError(f"{name} {rule}, got {got}; correct it") from error
    return LoggedFailure(start.timestamp(), node=node, down_seconds=down)
