# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Cut the lines out of a log that explain why its process ended."""

from __future__ import annotations

import re
from pathlib import Path

from titan_ft.system.ownership import only_files

MAX_BYTES = 262_144
"""Bytes at the end of a log that are read. They contain the traceback of a rank."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RANK = re.compile(r"^\[rank\d+\]:\s?")
"""torch's prefix of each line of an exception, such as `[rank0]: `."""
_TRACEBACK = "Traceback (most recent call last)"
_STACK = "Fatal Python error: "
"""faulthandler writes this first when a signal ends a process."""
_MARKERS = re.compile(r"^\s+[\^~]+$")
"""Lines in which Python underlines parts of a frame. Without them twice as many frames fit."""
_FRAME = re.compile(r"^\s|^The above exception|^During handling|^\+|^$")
"""Lines within a traceback. Any other line is its last one."""


def read_end(log: Path) -> list[str]:
    """Return the last lines of a log, without colours, ranks, underlines and progress bars.

    Empty if the log cannot be read.
    """
    try:
        with open(log, "rb", opener=only_files) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MAX_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = []
    for written in text.split("\n"):
        line = written.rpartition("\r")[2]  # A progress bar overwrites its line.
        line = _COLOUR.sub("", line)
        line = _RANK.sub("", line).rstrip()
        if _MARKERS.match(line) is None:
            lines.append(line)
    while lines and not lines[-1]:
        lines.pop()
    return lines


def explain_end(lines: list[str], limit: int) -> list[str]:
    """Return the lines of a log that explain the end of its process.

    The choice is, in this order: the stacks that a fatal signal left, the last traceback, the last
    lines. Of a traceback longer than `limit`, the last lines are returned: the innermost frames and
    the exception.

    Args:
        lines: lines of the log, see `read_end`.
        limit: maximum number of returned lines.
    """
    stacks = [number for number, line in enumerate(lines) if line.startswith(_STACK)]
    if stacks:
        # The line before the stacks may name the reason.
        begin = max(0, stacks[-1] - 1)
        return lines[begin : begin + limit]
    begins = [number for number, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if not begins:
        return lines[-limit:]
    begin = _first_of_chain(lines, begins)
    end = _end_of_traceback(lines, begins[-1])
    return lines[max(begin, end - limit) : end]


def _first_of_chain(lines: list[str], begins: list[int]) -> int:
    """Return the number of the line at which the last exception's chain of causes begins."""
    first = begins[-1]
    for begin in reversed(begins[:-1]):
        between = lines[_end_of_traceback(lines, begin) : first]
        if not all(_joins_tracebacks(line) for line in between):
            break
        first = begin
    return first


def _joins_tracebacks(line: str) -> bool:
    return not line or line.startswith(("The above exception", "During handling"))


def _end_of_traceback(lines: list[str], begin: int) -> int:
    """Return the number of the line after a traceback and the message of its exception."""
    for number in range(begin + 1, len(lines)):
        if _FRAME.match(lines[number]) is None:
            return number + 1
    return len(lines)
