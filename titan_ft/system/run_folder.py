# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Whose a run's folder is: who writes there decides what the run trains, and overwrites files of its user."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

from titan_ft.config import ConfigError
from titan_ft.system.ownership import find_stranger, is_open_to_all


def check_run_folder(folder: Path, option: str = "--run-dir") -> None:
    """Refuse a folder that another user has made, or that every user may write.

    A folder that the group may write is one line on stderr: with the umask 002 that is common.

    Raises:
        ConfigError: it is refused.
    """
    try:
        mode = folder.stat().st_mode
        stranger = find_stranger(folder)
    except OSError:
        return  # it is made anew, or cannot be used, which the first write reports
    rule = f"{option} must be yours alone, got {folder}"
    if stranger is not None:
        path, owner = stranger
        raise ConfigError(f"{rule}, where {path} belongs to user {owner}; give another folder, or chown it")
    if is_open_to_all(mode):
        raise ConfigError(f"{rule}, which every user may write (mode {stat.S_IMODE(mode):o}); chmod o-w it")
    if mode & stat.S_IWGRP:
        print(f"titan_ft: the group may write {folder}, and so change this run; chmod g-w it", file=sys.stderr)
