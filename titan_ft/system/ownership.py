# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Files that other users of the host, or of shared storage, can write: find them, and do not write through them."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

ROOT = 0
"""User whose files are no stranger's: an administrator can change every file anyway."""


def no_follow(path: str, flags: int) -> int:
    """Open a file that is no symbolic link; an `opener` of `open`.

    A link that somebody has planted at the name of a log would have this process overwrite a file
    of its own user, such as ~/.bashrc.

    Raises:
        OSError: the last part of the path is a link (ELOOP).
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def write_for_owner_only() -> None:
    """Make no file from now on that the group or others can write; child processes inherit this.

    With the umask 002, which is common, the whole group could change events, orders and checkpoints.
    """
    os.umask(os.umask(0o077) | 0o022)


def find_stranger(folder: Path) -> tuple[Path, int] | None:
    """Return a folder, or the first entry in it, that belongs to neither this user nor root, and its owner.

    A link counts as its owner's, and not as its target's.

    Raises:
        OSError: the folder cannot be read.
    """
    ours = {os.geteuid(), ROOT}
    owner = folder.stat().st_uid
    if owner not in ours:
        # A file server that maps root to nobody, or a user namespace, makes the files of this user
        # another one's. Then a new file is that one's as well.
        try:
            with tempfile.TemporaryFile(dir=folder) as own:
                ours.add(os.fstat(own.fileno()).st_uid)
        except OSError:  # such as PermissionError: only the entries of the other user's folder may be open to all
            return folder, owner
    if owner not in ours:
        return folder, owner
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            owner = entry.stat(follow_symlinks=False).st_uid
            if owner not in ours:
                return Path(entry), owner
    return None


def is_open_to_all(mode: int) -> bool:
    """True if every user may replace what is in a folder with this mode.

    With the sticky bit, as of /tmp, only its owner may replace a file.
    """
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX
