# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks who may write to a run's folder.

Whoever writes there decides what the run trains, and may have it overwrite files of its user.
"""

from __future__ import annotations

import contextlib
import stat
import sys
from pathlib import Path

from titan_ft.config import ConfigError
from titan_ft.system.ownership import find_stranger, is_open_to_all


def check_run_folder(folder: Path, option: str = "--run-dir") -> None:
    """Refuse a folder of another user, and a folder that every user may write.

    Two weaker findings are lines on stderr. The group may write the folder: the umask 002 is
    common. Or every user may write a folder above it, and so replace it: an administrator or
    Kubernetes has made that folder, and this user cannot always choose another one.

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
        raise ConfigError(
            f"{rule}, where {path} belongs to user {owner}; give another folder, chown it, or run as that user",
        )
    if is_open_to_all(mode):
        mode_text = f"{stat.S_IMODE(mode):o}"
        raise ConfigError(f"{rule}, which every user may write (mode {mode_text}); chmod o-w it")
    if mode & stat.S_IWGRP:
        _warn(f"the group may write {folder}, and so change this run; chmod g-w it")
    for above in folder.resolve().parents:
        with contextlib.suppress(OSError):  # this user may pass through the folder, but not read it
            mode = above.stat().st_mode
            if is_open_to_all(mode):
                found = f"every user may write {above} (mode {stat.S_IMODE(mode):o})"
                _warn(f"{found}, and so replace this run's folder; chmod +t it")


def _warn(text: str) -> None:
    print(f"titan_ft: {text}", file=sys.stderr)
