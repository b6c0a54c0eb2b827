# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Find in a worker's log the line that says why it failed."""

from __future__ import annotations

import re
from pathlib import Path

_EXCEPTION = re.compile(r"^(\[rank\d+\]:\s*)?([A-Za-z_][\w.]*\.)?\w*(Error|Exception|Interrupt|Exit)\b")


def last_error_line(path: Path, max_bytes: int = 65536) -> str:
    """Return the last line that names an exception, else the last that is not empty, else a note that there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - max_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return "(no log)"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    exceptions = [line for line in lines if _EXCEPTION.match(line)]
    return (exceptions or lines or ["(empty log)"])[-1]
