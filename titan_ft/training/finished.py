# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The mark that a finished job leaves in its run's folder, for a group that comes back afterwards.

Nobody is left then who could tell it, and without the mark it would wait for company and train the whole job again.
"""

from __future__ import annotations

import json
from pathlib import Path

from titan_ft.run.marks import leave_mark, read_mark
from titan_ft.system.whole_file import write_whole


def mark_finished(path: Path, config_digest: str, step: int) -> None:
    """Leave the mark, whole or not at all; any group of the job may, and all leave the same.

    Args:
        config_digest: hash of what is equal in all groups of the job, hex: a run with other settings in the same folder
            is another one. The number of steps is one of these settings.
        step: number of the last one.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps({"config_digest": config_digest, "step": step}) + "\n"
    try:
        write_whole(path, text.encode())
    except OSError:  # a full disk, perhaps, on which another group may come back for all that
        leave_mark(path, f"{config_digest} {step}")


def finished_step(path: Path, config_digest: str) -> int | None:
    """Return the last step of the job if it is made already; None if not, or if the mark is that of another job."""
    try:
        mark = json.loads(path.read_text())
        return int(mark["step"]) if mark["config_digest"] == config_digest else None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ):  # no mark, or none that can be read: the job goes on
        digest, _, step = (read_mark(path) or "").partition(" ")
        return int(step) if digest == config_digest and step.isdecimal() else None
