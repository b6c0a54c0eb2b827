# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Orders from a chaos runner to the chaos agents in the workers: lines of a shared file."""

from __future__ import annotations

import errno
import os
import secrets
import time
from pathlib import Path

import msgspec

from titan_ft.system.ownership import make_folder, no_follow

LIFETIME_SECONDS = 60.0
"""Agents ignore older orders. An order that no agent took must not strike at an unexpected time."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the file. The runner writes it, and the agents read it."""

    id: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    time: float = msgspec.field(default_factory=time.time)
    """Unix seconds of the order."""
    fault: str
    replica: int | None = None
    """Slot of the target group; None = the first agent that reads the order takes it."""
    rank: int | None = None
    """Rank of the target; None = the agents choose."""
    attempt: int | None = None
    """The only attempt of the group that may act; None = any."""
    params: dict[str, int | float]
    seed: int
    shot: int
    """Number of the shot in the plan."""

    def append_to(self, path: Path) -> None:
        """Append the order to the file that the agents of a run follow. Makes file and folder.

        Raises:
            OSError: the order could not be written whole.
        """
        line = msgspec.json.encode(self) + b"\n"
        make_folder(path.parent)
        fd = no_follow(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            # With one write a reader never sees half an order before a newline, and the lines of
            # two writers never mix.
            written = os.write(fd, line)
            if written != len(line):
                # The next order would continue this half line, and both would be lost.
                os.ftruncate(fd, os.fstat(fd).st_size - written)
                message = f"the disk took only a part of the order {self.fault!r}"
                raise OSError(errno.ENOSPC, message, str(path))
        finally:
            os.close(fd)
