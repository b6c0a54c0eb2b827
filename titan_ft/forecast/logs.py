# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read failures from files: chaos traces, and logs in the format that LANL has published; write chaos traces."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from titan_ft.chaos.plan_file import COLUMNS, read_trace
from titan_ft.config import ConfigError, unwritable

LANL_COLUMNS = ("System", "nodenumz", "Prob Started", "Prob Fixed")
"""Of LA-UR-05-7318, https://www.lanl.gov/projects/ultrascale-systems-research-center/data/failure-data.php."""
_LANL_TIME = "%m/%d/%Y %H:%M"


@dataclass(frozen=True)
class LoggedFailure:
    """One failure of a file.

    Attributes:
        time: seconds since the file's first second, or since the schedule's start.
        group: that it hit; None leaves it to luck.
        node: that it hit, of a log of nodes.
        down_seconds: until the node was mended; None if the file does not have it.
    """

    time: float
    group: int | None = None
    node: int | None = None
    down_seconds: float | None = None


def read_log(path: Path, system: int | None = None, *, is_lanl: bool = False) -> list[LoggedFailure]:
    """Read a trace, or a log of LANL's, in order of time.

    Args:
        system: number of the system in LANL's log; None takes all.

    Raises:
        ConfigError: the file cannot be read, or a line of it is wrong; names the line.
    """
    if is_lanl:
        return _read_lanl(path, system)
    entries = [LoggedFailure(entry.at, entry.replica) for entry in read_trace(path)]
    return sorted(entries, key=lambda entry: entry.time)


def _read_lanl(path: Path, system: int | None) -> list[LoggedFailure]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"log must be a readable CSV file, got {path} ({reason}); correct the path") from error
    rows = csv.DictReader(lines)
    missing = [name for name in LANL_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        rule = f"must have the columns {', '.join(LANL_COLUMNS)}, as LANL's log has them"
        raise ConfigError(f"{path.name}:1 {rule}, got none named {missing[0]!r}; a chaos trace is given as trace")
    found = [
        _lanl_failure(f"{path.name}:{rows.line_num}", row)
        for row in rows
        if system is None or row["System"].strip() == str(system)
    ]
    if not found:
        raise ConfigError(f"{path.name} must hold a failure of system {system}, got none; give another system")
    found.sort(key=lambda each: each[0])
    first = found[0][0]
    return [LoggedFailure((start - first).total_seconds(), None, node, down) for start, node, down in found]


def _lanl_failure(name: str, row: dict[str, str]) -> tuple[datetime, int, float | None]:
    """Return when, which node, and for how many seconds."""
    try:
        start = datetime.strptime(row["Prob Started"].strip(), _LANL_TIME).replace(tzinfo=UTC)
        node, fixed = int(row["nodenumz"]), row["Prob Fixed"].strip()
        end = datetime.strptime(fixed, _LANL_TIME).replace(tzinfo=UTC) if fixed else None
    except (AttributeError, TypeError, ValueError) as error:
        rule = "must have a node's number and times such as 6/21/2005 10:54"
        raise ConfigError(
            f"{name} {rule}, got {row.get('nodenumz')!r}, {row.get('Prob Started')!r}; correct it"
        ) from error
    return start, node, None if end is None else max(0.0, (end - start).total_seconds())


def write_trace(path: Path, lines: Iterable[tuple[float, str, int | None, str]], notes: Iterable[str] = ()) -> int:
    """Write failures as a chaos trace: seconds, fault, group, parameters. Return how many there are.

    Raises:
        ConfigError: the file cannot be written.
    """
    rows = list(_rows(lines))
    text = "\n".join([*(f"# {note}" for note in notes), ",".join(COLUMNS), *rows])
    try:
        path.write_text(f"{text}\n")
    except OSError as error:
        raise unwritable("--trace-out", path, error) from error
    return len(rows)


def _rows(lines: Iterable[tuple[float, str, int | None, str]]) -> Iterator[str]:
    for time, fault, group, params in lines:
        yield f"{time!r},{fault},{'' if group is None else group},{params}"
