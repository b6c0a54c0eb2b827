# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The lock that a launch holds on the config of its run folder, as long as its process lives."""

from __future__ import annotations

import fcntl
import time
from typing import IO

from titan_ft.run.paths import RunPaths

LOOK_SECONDS = 0.2
"""`is_held` takes the lock for a moment: a launch that is refused by that moment tries again for so long."""


def hold(config: IO[str]) -> bool:
    """Take the lock until the file is closed, or this process is gone; return False where another launch has it."""
    deadline = time.monotonic() + LOOK_SECONDS
    while True:
        try:
            fcntl.flock(config, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_SECONDS / 10)
        except OSError:  # a file system without locks
            return True
        else:
            return True


def is_held(paths: RunPaths) -> bool | None:
    """Tell whether a launch goes on in a run folder; None where nobody can tell, as on a file system without locks."""
    try:
        with paths.config.open(encoding="utf-8") as config:
            # Shared: two that look at the same moment do not take each other for a launch.
            fcntl.flock(config, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
