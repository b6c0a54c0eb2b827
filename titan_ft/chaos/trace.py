# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read the faults of a trace: a CSV file with the columns time, fault, target and, if wanted, params."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from titan_ft.chaos.faults import FAULTS
from titan_ft.chaos.rules import Entry, make_entry
from titan_ft.config import ConfigError

COLUMNS = ("time", "fault", "target", "params")
_TARGET = re.compile(r"(\d+)(?:/(\d+))?")


def read_trace(path: Path) -> tuple[Entry, ...]:
    """Read a trace; the result is in order of time.

    A line's time is in seconds since the schedule's start. Its target is a group (`2`), a rank of one (`2/0`),
    `lighthouse`, or empty, which lets the seed choose. Its params are NAME=VALUE, separated by spaces. Empty lines and
    those that begin with # are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line of it is wrong; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"trace must be a readable CSV file, got {path} ({reason}); correct the path") from error
    entries = list(_entries(path.name, [(number, line) for number, line in enumerate(lines, 1) if _counts(line)]))
    if not entries:
        raise ConfigError(f"{path.name} must hold at least one fault, got none; add a line such as 30,kill_group,0")
    return tuple(sorted(entries, key=lambda entry: entry.at))


def _counts(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _entries(name: str, lines: list[tuple[int, str]]) -> Iterator[Entry]:
    """Yield the entries of numbered lines, whose first names the columns."""
    width = 0
    for number, line in lines:
        cells = [cell.strip() for cell in line.split(",")]  # no cell holds a comma, so nothing is quoted
        if not width:
            if tuple(cells) not in (COLUMNS, COLUMNS[:-1]):
                rule = f"must name the columns {','.join(COLUMNS)} (the last may be missing)"
                raise ConfigError(f"{name}:{number} {rule}, got {line!r}; put them in the first line")
            width = len(cells)
        elif len(cells) != width:
            remedy = "an empty cell needs its comma"
            raise ConfigError(f"{name}:{number} must have {width} columns, got {len(cells)}; {remedy}")
        else:
            yield _entry(f"{name}:{number}", *cells)


def _entry(field_name: str, time: str, fault: str, target: str, params: str = "") -> Entry:
    """Return the entry of one line's cells."""
    match = _TARGET.fullmatch(target)
    replica, rank = (None if part is None else int(part) for part in match.groups()) if match else (None, None)
    if match is None and target not in ("", "lighthouse"):
        rule = "must be a group (2), a rank of one (2/0), lighthouse, or empty"
        raise ConfigError(f"{field_name}.target {rule}, got {target!r}; correct it")
    entry = make_entry(field_name, _number(time), fault, replica, rank, dict(_params(field_name, params)))
    if target == "lighthouse" and FAULTS[entry.fault].scope != "lighthouse":
        raise ConfigError(f"{field_name}.target must be a group or empty with {fault}, got {target!r}; correct it")
    return entry


def _params(field_name: str, text: str) -> Iterator[tuple[str, float | str]]:
    for part in text.split():
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"{field_name}.params must be NAME=VALUE, got {part!r}; write for example seconds=10")
        yield key, _number(value)


def _number(text: str) -> float | str:
    """Return the number that the text stands for, or the text, for the check of its field to refuse."""
    try:
        return float(text)
    except ValueError:
        return text
