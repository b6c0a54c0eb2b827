# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The mark that a finished job leaves in its run's folder, for a group that comes back afterwards.

Nobody is left then who could tell it, and without the mark it would wait for company and train the whole job again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path


def mark_finished(path: Path, config_digest: str, step: int) -> None:
    """Leave the mark, whole or not at all; any group of the job may, and all leave the same.

    Args:
        config_digest: hash of what is equal in all groups of the job, hex: a run with other settings in the same folder
            is another one. The number of steps is one of these settings.
        step: number of the last one.

    Raises:
        OSError: it cannot be written.
    """
    part = path.with_name(f".{path.name}-{os.getpid()}")
    part.write_text(json.dumps({"config_digest": config_digest, "step": step}) + "\n")
    part.replace(path)


def finished_step(path: Path, config_digest: str) -> int | None:
    """Return the last step of the job if it is made already; None if not, or if the mark is that of another job."""
    try:
        mark = json.loads(path.read_text())
        return int(mark["step"]) if mark["config_digest"] == config_digest else None
    except (OSError, ValueError, KeyError, TypeError):  # no mark, or none that can be read: the job goes on
        return None
