# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Write a small file whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Put a file in its place by a rename: a reader finds the former one, or all of the new one.

    Raises:
        OSError: it cannot be written, for example because the disk is full; nothing of it is left.
    """
    part = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
