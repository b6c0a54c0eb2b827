# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks who may write to a run's folder.

Whoever writes there decides what the run trains, and may have it overwrite files of its user.
"""

from __future__ import annotations

import stat
import sys
from pathlib import Path

from titan_ft.config import ConfigError
from titan_ft.system.ownership import find_stranger, is_open_to_all


def check_run_folder(folder: Path, option: str = "--run-dir") -> None:
    """Refuse a folder of another user, and a folder that every user may write.

    If the group may write the folder, one line on stderr says so: the umask 002 is common.

    Args:
        option: names the folder's option in the error.

    Raises:
        ConfigError: the folder is refused.
    """
    try:
        mode = folder.stat().st_mode
        stranger = find_stranger(folder)
    except OSError:
        return  # the folder does not exist yet, or the first write reports the error
    rule = f"{option} must be yours alone, got {folder}"
    if stranger is not None:
        path, owner = stranger
        raise ConfigError(f"{rule}, where {path} belongs to user {owner}; give another folder, or chown it")
    if is_open_to_all(mode):
        mode_text = f"{stat.S_IMODE(mode):o}"
        raise ConfigError(f"{rule}, which every user may write (mode {mode_text}); chmod o-w it")
    if mode & stat.S_IWGRP:
        print(
            f"titan_ft: the group may write {folder}, and so change this run; chmod g-w it",
            file=sys.stderr,
        )
