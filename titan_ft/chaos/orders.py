# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The orders by which a runner tells the agents in the workers which fault to bring about: lines of a shared file."""

from __future__ import annotations

import errno
import os
import secrets
import time
from pathlib import Path

import msgspec

from titan_ft.system.ownership import no_follow

LIFETIME_SECONDS = 60.0
"""An agent ignores an order that is older than this: one that nobody took must not strike when nobody expects it."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the file: what the runner writes and the agents read."""

    id: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    time: float = msgspec.field(default_factory=time.time)
    """Unix seconds when it was given."""
    fault: str
    replica: int | None = None
    """The group that it is for; None means that whichever comes first takes it."""
    rank: int | None = None
    """The rank that it is for; None leaves the choice to the agents."""
    attempt: int | None = None
    """The only attempt of the group that may carry it out; None means any."""
    params: dict[str, int | float]
    seed: int
    shot: int
    """Number of the shot in the plan."""

    def give(self, path: Path) -> None:
        """Append it to the file that the agents of a run follow, which is made with its folder if it is missing.

        Raises:
            OSError: it could not be written whole.
        """
        line = msgspec.json.encode(self) + b"\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = no_follow(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            # One write: a reader never sees half an order behind a newline, and writers do not mix their lines.
            written = os.write(fd, line)
            if written != len(line):
                # The next order would be glued to it, and be none.
                os.ftruncate(fd, os.fstat(fd).st_size - written)
                raise OSError(errno.ENOSPC, f"the disk took only a part of the order {self.fault!r}", str(path))
        finally:
            os.close(fd)
