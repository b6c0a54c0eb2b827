# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The mark of a finished job in its run's folder, for a group that comes back afterwards.

No other group is left then. Without the mark the group would wait for company and train the whole
job again.
"""

from __future__ import annotations

import json
from pathlib import Path

from titan_ft.run.marks import leave_mark, read_mark
from titan_ft.system.ownership import read_note
from titan_ft.system.whole_file import write_whole


def mark_finished(path: Path, config_digest: str, step: int) -> None:
    """Write the mark, whole or not at all. Any group of the job may write it; all write the same.

    Args:
        config_digest: hash of the settings that are equal in all groups of the job, hex. A run with
            other settings in the same folder is another job. The number of steps is one of these
            settings.
        step: number of the last step.

    Raises:
        OSError: the mark cannot be written.
    """
    text = json.dumps({"config_digest": config_digest, "step": step}) + "\n"
    try:
        write_whole(path, text.encode())
    except OSError:
        # A full disk has no room for a file's content, but a link may still fit.
        leave_mark(path, f"{config_digest} {step}")


def finished_step(path: Path, config_digest: str) -> int | None:
    """Return the last step of a finished job.

    None if the job is not finished, if the mark cannot be read, or if it is another job's.
    """
    try:
        mark = json.loads(read_note(path))
        step = int(mark["step"])
        digest = mark["config_digest"]
    except (OSError, ValueError, KeyError, TypeError):
        digest, _, text = (read_mark(path) or "").partition(" ")
        if not text.isdecimal():
            return None
        step = int(text)
    return step if digest == config_digest else None
