# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Write and read the events of a run: one JSON object a line, one file per process."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class EventLog:
    """Append events to one file of a process; safe to share between threads.

    Args:
        path: the file, made with its folders if missing. None discards all events.
        context: fields of every event, such as replica, rank and attempt; those that are None are dropped.
    """

    def __init__(self, path: Path | None, **context: object) -> None:
        self._context = {name: value for name, value in context.items() if value is not None}
        self._lock = threading.Lock()
        self._fd: int | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def emit(self, event: str, **fields: object) -> None:
        """Write one event with times and pid, the context, then the fields. After `close` it is discarded.

        `time` is in Unix seconds; `mono` in seconds of the host's monotonic clock, which nobody sets: beside it, a
        wall clock that was set shows.

        Raises:
            OSError: the line could not be written whole, for example because the disk is full.
        """
        # Without a buffer of our own, what was emitted before a SIGKILL is in the file.
        with self._lock:
            if self._fd is None:
                return
            record = {"time": time.time(), "mono": round(time.monotonic(), 6), "event": event, "pid": os.getpid()}
            record |= {**self._context, **fields}
            line = (json.dumps(_plain(record), allow_nan=False) + "\n").encode()
            if os.write(self._fd, line) != len(line):
                raise OSError(f"event {event!r} was written only in part; is the disk full?")

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None


def read_events(folder: Path) -> list[Event]:
    """Read all `*.jsonl` files of a folder, sorted by time; equal times keep the order of files, then of lines.

    A file's last line is skipped when it was cut by the death of its writer. A missing folder has no events.

    Raises:
        ValueError: names the file and line that is no event.
    """
    events: list[Event] = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            event = _parse(line)
            if event is not None:
                events.append(event)
            elif number < len(lines):  # the text behind the last newline is a line that was cut
                raise ValueError(f"{path}:{number} must be a JSON object with time and event, got {line[:80]!r}")
    return sorted(events, key=lambda event: event["time"])


def _parse(line: bytes) -> Event | None:
    """Return the event of a line, or None where there is none."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("event"), str):
        return None
    moment = value.get("time")
    return value if isinstance(moment, int | float) and not isinstance(moment, bool) else None


def _plain(value: Any) -> Any:
    """Return a value as JSON knows it: numbers that are not finite become null, unknown types their text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(_plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if callable(getattr(value, "item", None)):  # a scalar of NumPy or torch, which this layer does not import
        return _plain(value.item())
    return str(value)
