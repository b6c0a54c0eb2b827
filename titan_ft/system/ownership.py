# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Protection against files that other users of the host, or of shared storage, can write."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

MAX_NOTE_BYTES = 16 * 2**20
"""A larger file is no note (`read_note`)."""
ROOT = 0
"""The user root, whose files are trusted: an administrator can change every file anyway."""


def no_follow(path: str, flags: int) -> int:
    """Open a file, but not through a link that another user may have planted; an `opener` for
    `open`.

    Through a link with the name of a log this process would overwrite a file of its own user, such
    as ~/.bashrc.

    Raises:
        OSError: the last part of the path is a link, or another part is a link that `check_links`
            refuses (ELOOP).
    """
    check_links(Path(path).parent)
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)


def only_files(path: str, flags: int) -> int:
    """Open a regular file of a run, which another user may have made; an `opener` for `open`.

    The opening of a named pipe would wait for its writer for good. A device such as /dev/zero has
    no end.

    Raises:
        OSError: there is no file, or it is another kind of file.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    except BlockingIOError:
        # Another process holds a lease of the file, as a server of NFS does. Only regular files
        # have leases, so this open waits for the end of it and for nothing else.
        descriptor = os.open(path, flags | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        os.set_blocking(descriptor, True)
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "a pipe or a device", path)


def read_note(path: Path, errors: str = "strict") -> str:
    """Return the text of a small file of a run, which another user may have made.

    Args:
        errors: see `bytes.decode`.

    Raises:
        OSError: there is no file, it is another kind of file, or it is larger than
            `MAX_NOTE_BYTES`: such a file would fill this process's memory.
        UnicodeDecodeError: it is no text.
    """
    with open(path, "rb", opener=only_files) as file:
        data = file.read(MAX_NOTE_BYTES + 1)
    if len(data) > MAX_NOTE_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return data.decode(errors=errors)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, but not through a link that `check_links` refuses.

    Raises:
        OSError: there is such a link (ELOOP), or the folder cannot be made.
    """
    check_links(folder)
    folder.mkdir(parents=True, exist_ok=True)


def check_links(folder: Path) -> None:
    """Refuse a path through a link that another user has put into a folder of this user.

    Through a folder that is a link, new files would come into a folder that the other user has
    chosen, and replace files of the same name.

    A link in a folder of another user, such as /scratch or a link of a storage's administrator, is
    followed: the user chose this path, and that folder's owner decides about its links anyway.

    Raises:
        OSError: a part of the path is such a link (ELOOP).
    """
    for part in (folder, *folder.parents):
        if not part.is_symlink():
            continue
        if part.parent.stat().st_uid != os.geteuid():
            continue
        owner = part.lstat().st_uid
        if owner not in find_own_users(part.parent, owner):
            raise OSError(errno.ELOOP, f"a link that belongs to user {owner}", str(part))


def write_for_owner_only() -> None:
    """Set the umask so that the group and others cannot write new files.

    Child processes inherit the umask. With 002, which is common, the whole group could change
    events, orders and checkpoints.
    """
    os.umask(os.umask(0o077) | 0o022)


def find_own_users(folder: Path, owner: int) -> set[int]:
    """Return the users whose files in a folder are trusted: this process's user, and root.

    A file server that maps root to nobody, or a user namespace, shows this user's files under
    another user. A new file in the folder shows which user that is.

    Args:
        owner: owner of the file in question. If it is trusted already, no new file is made.
    """
    ours = {os.geteuid(), ROOT}
    if owner in ours:
        return ours
    try:
        with tempfile.TemporaryFile(dir=folder) as own:
            ours.add(os.fstat(own.fileno()).st_uid)
    except OSError:
        pass  # such as PermissionError: this user cannot make files there
    return ours


def find_stranger(folder: Path) -> tuple[Path, int] | None:
    """Return the folder or its first entry that belongs to another user, and that user.

    Returns None if everything belongs to this user or to root. For a link the owner of the link
    counts, and not only the owner of its target: the owner of a link can point it elsewhere.

    Raises:
        OSError: the folder cannot be read.
    """
    owner = folder.stat().st_uid
    ours = find_own_users(folder, owner)
    for found in (owner, folder.lstat().st_uid):
        if found not in ours:
            return folder, found
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            owner = entry.stat(follow_symlinks=False).st_uid
            if owner not in ours:
                return Path(entry), owner
    return None


def is_open_to_all(mode: int) -> bool:
    """True if every user may replace the files in a folder with this mode.

    If the folder has the sticky bit, as /tmp has, only the owner of a file may replace it.
    """
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX
