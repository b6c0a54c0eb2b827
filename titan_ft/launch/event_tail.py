# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Follow the event files of a run while they grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class EventTail:
    """Read what was added to the event files of a folder since the last call.

    Args:
        folder: holds the files, also those that are made later.
        from_start: whether the first call returns what the files hold already. A launcher wants only what is new: the
            rest is of an earlier run in the folder, and would be taken for this one's.
    """

    def __init__(self, folder: Path, *, from_start: bool = False) -> None:
        self._folder = folder
        existing = () if from_start else folder.glob("*.jsonl")
        self._offsets = {path: path.stat().st_size for path in existing}

    def poll(self) -> list[dict[str, Any]]:
        """Return the new events of all files, sorted by time; a line that is not whole yet is left for later."""
        events: list[dict[str, Any]] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            events.extend(self._read(path))
        return sorted(events, key=lambda event: event["time"])

    def _read(self, path: Path) -> list[dict[str, Any]]:
        offset = self._offsets.get(path, 0)
        try:
            if path.stat().st_size <= offset:
                return []
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
        except FileNotFoundError:  # removed since the folder was listed
            return []
        whole = data.rfind(b"\n") + 1
        self._offsets[path] = offset + whole
        return [event for line in data[:whole].splitlines() if (event := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the event of a line; a damaged line must not end the launcher, `titan-ft report` names it."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(event, dict) and isinstance(event.get("event"), str)
    return event if whole and isinstance(event.get("time"), int | float) else None
