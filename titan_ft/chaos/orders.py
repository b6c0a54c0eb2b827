# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Tell the agents in the workers which fault to bring about."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

LIFETIME_SECONDS = 60.0
"""An agent ignores an order that is older than this: one that nobody took must not strike when nobody expects it."""


class Orders:
    """Append orders to the file that the agents of a run follow; several writers may do so at once.

    Args:
        path: the file, made with its folder by the first order.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def send(
        self,
        fault: str,
        *,
        replica: int | None,
        rank: int | None = None,
        attempt: int | None = None,
        params: Mapping[str, object],
        seed: int,
        shot: int,
    ) -> str:
        """Write one order and return its id.

        Args:
            replica: the group that it is for; None means that whichever comes first takes it.
            rank: the rank that it is for; None leaves the choice to the agents.
            attempt: the only attempt of the group that may obey; None means any.

        Raises:
            OSError: the order could not be written whole.
        """
        order = {
            "id": secrets.token_hex(8),
            "time": time.time(),
            "fault": fault,
            "replica": replica,
            "rank": rank,
            "attempt": attempt,
            "params": dict(params),
            "seed": seed,
            "shot": shot,
        }
        line = (json.dumps(order, allow_nan=False) + "\n").encode()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            # One write: a reader never sees half an order behind a newline, and writers do not mix their lines.
            if os.write(fd, line) != len(line):
                raise OSError(f"the order {fault!r} was written only in part to {self._path}; is the disk full?")
        finally:
            os.close(fd)
        return str(order["id"])
