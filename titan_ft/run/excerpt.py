# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Cut the lines out of a log that explain why its process ended."""

from __future__ import annotations

import re
from pathlib import Path

MAX_BYTES = 262_144
"""Bytes at the end of a log that are read: the traceback of a rank is within them, whatever the
log's size.
"""
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RANK = re.compile(r"^\[rank\d+\]:\s?")
"""torch prints it before each line of an exception, as `[rank0]: Traceback (most recent call
last):`.
"""
_TRACEBACK = "Traceback (most recent call last)"
_STACK = "Fatal Python error: "
"""Begins what faulthandler writes when a signal ends a process."""
_MARKERS = re.compile(r"^\s+[\^~]+$")
"""Python underlines parts of a frame's line; without them twice as many frames fit."""
_FRAME = re.compile(r"^\s|^The above exception|^During handling|^\+|^$")
"""Lines that belong to a traceback, and do not end it."""


def read_end(log: Path) -> list[str]:
    """Return the last lines of a log, without colours, ranks, underlines and progress bars; empty
    without a log.
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MAX_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [
        _RANK.sub("", _COLOUR.sub("", line.rpartition("\r")[2])).rstrip()
        for line in text.split("\n")
    ]
    lines = [line for line in lines if _MARKERS.match(line) is None]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def explain_end(lines: list[str], limit: int) -> list[str]:
    """Return the lines of a log that explain the end of its process.

    In order: the last traceback, the stacks that a fatal signal left, the last lines. Of a
    traceback longer than `limit`, the last lines are returned: the innermost frames and the
    exception.

    Args:
        lines: lines of the log, see `read_end`.
        limit: maximum number of returned lines.
    """
    stacks = [number for number, line in enumerate(lines) if line.startswith(_STACK)]
    if stacks:
        begin = stacks[-1]
        return lines[max(0, begin - 1) : begin - 1 + limit] if begin else lines[:limit]
    begins = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not begins:
        return lines[-limit:]
    begin = _first_of_chain(lines, begins)
    end = _end_of_traceback(lines, begins[-1])
    return lines[max(begin, end - limit) : end]


def _first_of_chain(lines: list[str], begins: list[int]) -> int:
    """Return where the last exception's chain of causes begins."""
    first = begins[-1]
    for begin in reversed(begins[:-1]):
        between = lines[_end_of_traceback(lines, begin) : first]
        if any(
            line and not line.startswith(("The above exception", "During handling"))
            for line in between
        ):
            break
        first = begin
    return first


def _end_of_traceback(lines: list[str], begin: int) -> int:
    """Return the number of the line after a traceback and the message of its exception."""
    for number in range(begin + 1, len(lines)):
        if _FRAME.match(lines[number]) is None:
            return number + 1
    return len(lines)
