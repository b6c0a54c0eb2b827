# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read failures from files: chaos traces, and logs in the format of LANL's published logs.

`forecast.scenario` calls both readers, for the fields `trace` and `log` of a kind of failure.
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
"""The columns that are read. The format is that of LA-UR-05-7318, https://www.lanl.gov/projects/ultrascale-systems-research-center/data/failure-
data.php."""
_LANL_TIME = "%m/%d/%Y %H:%M"


@dataclass(frozen=True)
class LoggedFailure:
    """One failure of a file.

    Attributes:
        time: seconds since the first failure of a log, or since the start of a trace.
        fault: the chaos fault of a trace; None in a log.
        group: the group that a trace names; None if it names none.
        node: the node that a log names.
        down_seconds: how long the node was down, if the file says it.
    """

    time: float
    fault: Fault | None = None
    group: int | None = None
    node: int | None = None
    down_seconds: float | None = None


def read_faults(path: Path) -> list[LoggedFailure]:
    """Read a chaos trace, in order of time.

    Raises:
        ConfigError: the file cannot be read, or a line of it is wrong. The text names the line.
    """
    found = [LoggedFailure(entry.at, entry.fault, entry.replica) for entry in read_trace(path)]
    return sorted(found, key=lambda each: each.time)


def read_lanl(path: Path, system: int | None = None) -> list[LoggedFailure]:
    """Read a log in LANL's format, in order of time.

    Args:
        system: number of the system whose failures are taken; None takes those of all systems.

    Raises:
        ConfigError: the file cannot be read, or a line of it is wrong. The text names the line.
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
    found = []
    for row in rows:
        row_system = (row["System"] or "").strip()  # None in a row that is too short
        if system is None or row_system == str(system):
            found.append(_parse_lanl_row(f"{path.name}:{rows.line_num}", row))
    if not found:
        of_system = "" if system is None else f" of system {system}"
        rule = f"must hold a failure{of_system}"
        raise ConfigError(f"{path.name} {rule}, got none; give another log or system")
    found.sort(key=lambda each: each.time)
    first = found[0].time
    return [replace(each, time=each.time - first) for each in found]


def _parse_lanl_row(name: str, row: dict[str, str]) -> LoggedFailure:
    """Return the failure of a row. Its time is in Unix seconds.

    Args:
        name: file and line, for errors.
    """
    try:
        start = datetime.strptime(row["Prob Started"].strip(), _LANL_TIME).replace(tzinfo=UTC)
        node = int(row["nodenumz"])
        fixed = row["Prob Fixed"].strip()
        down_seconds = None
        if fixed:
            end = datetime.strptime(fixed, _LANL_TIME).replace(tzinfo=UTC)
            down_seconds = max(0.0, (end - start).total_seconds())
    except (AttributeError, TypeError, ValueError) as error:
        rule = "must have a node's number and times such as 6/21/2005 10:54"
        got = f"{row.get('nodenumz')!r}, {row.get('Prob Started')!r}, {row.get('Prob Fixed')!r}"
        raise ConfigError(f"{name} {rule}, got {got}; correct it") from error
    return LoggedFailure(start.timestamp(), node=node, down_seconds=down_seconds)
