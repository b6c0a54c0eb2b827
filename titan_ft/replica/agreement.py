# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Agreement among the ranks of one replica group, over the group's store.

For what is decided while the training threads are busy or wait: `group.Group` agrees by collectives, which only those
may make.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

from titan_ft.replica.errors import LighthouseError


class Agreement:
    """Lets rank 0 decide for the group from what all of its ranks have found.

    Args:
        store: the group's.
        key: prefix of the keys in it, unique to this attempt of the group.
    """

    def __init__(self, store: TCPStore, key: str, *, group_rank: int, group_world_size: int) -> None:
        self._store, self._key = store, key
        self._group_rank, self._group_world_size = group_rank, group_world_size
        self._left = threading.Condition()
        self._closed = False
        self.number = 0
        """How many were made."""

    def rank0_decides(self, found: Collection[str], decide: Callable[[set[str]], str]) -> str:
        """Return on all ranks what `decide`, called on rank 0 alone, returns. A collective.

        Whatever depends on a clock or on the lighthouse belongs into `decide`: two ranks that looked for themselves
        could go different ways.

        Args:
            found: words that this rank has found; `decide` gets those of all ranks.
        """
        self.number += 1
        keys = [f"{self._key}/{self.number}/{rank}" for rank in range(self._group_world_size)]
        if self._group_rank == 0:
            self._await(keys[1:])
            said = [self._store.get(key).decode().split() for key in keys[1:]]
            self._store.set(keys[0], f"={decide(set(found).union(*said))}")
        else:
            self._store.set(keys[self._group_rank], " ".join(found))
            self._await(keys[:1])
        return self._store.get(keys[0]).decode().removeprefix("=")

    def pause(self, seconds: float) -> None:
        """Sleep.

        Raises:
            LighthouseError: this group has left the job meanwhile.
        """
        with self._left:
            if self._left.wait_for(lambda: self._closed, seconds):
                raise LighthouseError("this group has left the job")

    def close(self) -> None:
        """End all waiting."""
        with self._left:
            self._closed = True
            self._left.notify_all()

    def _await(self, keys: list[str]) -> None:
        """Wait until `keys` are in the group's store. One that died has its whole group restarted by torchrun."""
        pause = 0.001
        while keys and not self._store.check(keys):
            self.pause(pause)
            pause = min(2 * pause, 0.1)
