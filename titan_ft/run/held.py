# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The lock by which a launch occupies its run folder.

The launcher locks the run's config file for as long as its process lives. A second launch into the
same folder is refused, and `check`, `report` and `top` see from the lock whether the run is alive.
"""

from __future__ import annotations

import fcntl
import time
from typing import IO

from titan_ft.run.paths import RunPaths
from titan_ft.system.ownership import only_files

RETRY_SECONDS = 0.2
"""`hold` retries for this long, because `is_held` in `top` or `check` locks the file for a moment.
"""


def hold(config: IO[str]) -> bool:
    """Lock the config file of a run; the lock lasts until the file is closed or this process ends.

    Returns:
        False if another launch has locked the file. True on a file system without locks.
    """
    deadline = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            fcntl.flock(config, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(RETRY_SECONDS / 10)
        except OSError:  # The file system has no locks.
            return True
        else:
            return True


def is_held(paths: RunPaths) -> bool | None:
    """Return True if a launch occupies the run folder; None if unknown, as without locks."""
    try:
        with open(paths.config, "rb", opener=only_files) as config:
            # A shared lock: with exclusive ones, `check` and `top` at the same moment would each
            # mistake the other for a launch.
            fcntl.flock(config, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
