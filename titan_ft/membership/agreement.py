# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Agreement among the ranks of one replica group, over the group's store.

For what is decided while the training threads are busy or wait: `group.Group` agrees by collectives, which only those
may make.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import TypeVar

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]  # exported at run time

from titan_ft.protocol.errors import LighthouseError, first_line
from titan_ft.system.threads import call_aside

logger = logging.getLogger(__name__)
T = TypeVar("T")

_AS_LONG_AS_IT_TAKES = timedelta(days=365)
_RECONNECT_PAUSE_SECONDS = 0.1


class Agreement:
    """Lets rank 0 decide for the group from what all of its ranks have found.

    Each rank has one, and makes one agreement after the other. What is said stays in the store until all have read it,
    under the number of the agreement: a rank that loses its connection asks again for the same one.

    Args:
        connect: opens a connection to the group's store; a group of one rank needs none.
        key: prefix of the keys in it, unique to this attempt of the group.
    """

    def __init__(self, connect: Callable[[], TCPStore], key: str, *, group_rank: int, group_world_size: int) -> None:
        self._connect, self._key = connect, key
        self._group_rank, self._group_world_size = group_rank, group_world_size
        # Of its own: another request on it would wait until the agreement under way is there.
        self._store = connect() if group_world_size > 1 else None
        self._left = threading.Condition()
        self._closed = False
        self.number = 0
        """How many were made."""

    def rank0_decides(
        self, found: Collection[str], decide: Callable[[set[str]], str], timeout: float | None = None
    ) -> str:
        """Return on all ranks what `decide`, called on rank 0 alone, returns. A collective.

        Whatever depends on a clock or on the lighthouse belongs into `decide`: two ranks that looked for themselves
        could go different ways.

        Args:
            found: words that this rank has found; `decide` gets those of all ranks.
            timeout: seconds that the others may take.

        Raises:
            LighthouseError: this group has left the job meanwhile.
            TimeoutError: the others took longer.
            DistNetworkError: the group's store is gone.
        """
        self.number += 1
        number = self.number
        if self._store is None:
            return decide(set(found))
        if self._group_rank > 0:
            return self._wait(lambda store: self._ask(store, number, found), timeout)
        said = self._wait(lambda store: self._gather(store, number), timeout)
        decision = decide(set(found).union(*said))
        self._keep_trying(lambda store: self._tell(store, number, decision))
        return decision

    def pause(self, seconds: float) -> None:
        """Sleep.

        Raises:
            LighthouseError: this group has left the job meanwhile.
        """
        with self._left:
            self._left.wait_for(lambda: self._closed, seconds)
            self._check_left()

    def close(self) -> None:
        """End all waiting."""
        with self._left:
            self._closed = True
            self._left.notify_all()

    # What the ranks say to each other; each can be said again

    def _ask(self, store: TCPStore, number: int, found: Collection[str]) -> str:
        """Tell rank 0 what this rank has found, and wait for its decision."""
        store.set(self._name(number, self._group_rank), " ".join(found))
        store.delete_key(self._name(number - 1, self._group_rank))  # rank 0 has read it: it has decided since
        return self._read(store, [self._name(number, 0)])[0]

    def _gather(self, store: TCPStore, number: int) -> list[list[str]]:
        """Wait for what the other ranks have found."""
        names = [self._name(number, rank) for rank in range(1, self._group_world_size)]
        return [words.split() for words in self._read(store, names)]

    def _tell(self, store: TCPStore, number: int, decision: str) -> None:
        """Tell the others what was decided."""
        store.set(self._name(number, 0), decision)
        store.delete_key(self._name(number - 1, 0))  # all have read it: they have come to the next one since

    def _read(self, store: TCPStore, names: list[str]) -> list[str]:
        """Wait for keys. If a rank dies, its agent starts the whole group again."""
        store.wait(names, _AS_LONG_AS_IT_TAKES)
        return [value.decode() for value in store.multi_get(names)]

    def _name(self, number: int, rank: int) -> str:
        return f"{self._key}/{number}/{rank}"

    # How

    def _wait(self, act: Callable[[TCPStore], T], timeout: float | None) -> T:
        """Do what may take long, until this group leaves."""

        def notify(_: Future[T]) -> None:
            with self._left:
                self._left.notify_all()

        answer = call_aside(partial(self._keep_trying, act), "titan_ft_agreement")  # nothing ends the wait for a key
        answer.add_done_callback(notify)
        with self._left:
            self._left.wait_for(lambda: answer.done() or self._closed, timeout)
            self._check_left()
        return answer.result(0)

    def _keep_trying(self, act: Callable[[TCPStore], T]) -> T:
        """Act over a new connection to the store if the one that there is breaks."""
        while True:
            try:
                assert self._store is not None
                return act(self._store)
            except DistNetworkError as error:
                logger.warning("connecting to this group's store again: %s", first_line(error))
                self.pause(_RECONNECT_PAUSE_SECONDS)
                self._store = self._connect()

    def _check_left(self) -> None:
        if self._closed:
            raise LighthouseError("this group has left the job")
