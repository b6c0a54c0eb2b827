# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Writing a small file completely or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from titan_ft.system.ownership import check_links, no_follow


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, and rename it to its place. A reader sees the former or the new content.

    Raises:
        OSError: the file cannot be written, for example because the disk is full, or its folder is
            another user's link. No part is left.
    """
    # Before the `try`: its clean-up must not go through a link that is refused.
    check_links(path.parent)
    part = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with open(part, "wb", opener=no_follow) as file:
            file.write(data)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
