# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Agreement of a group's ranks through one TCPStore, as up to c6a0967: what the control tree is
measured against.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

from titan_ft.system.threads import call_aside

T = TypeVar("T")

_AS_LONG_AS_IT_TAKES = timedelta(days=365)


class StoreAgreement:
    """Lets rank 0 decide for the group: the requests and the threads are those of the former
    product.

    Args:
        connect: opens a connection to the group's store.
        key: prefix of the keys in it.
    """

    def __init__(
        self, connect: Callable[[], TCPStore], key: str, *, group_rank: int, group_world_size: int
    ) -> None:
        self._store = connect()
        self._key, self._group_rank, self._group_world_size = key, group_rank, group_world_size
        self.number = 0
        """Number of agreements that were made."""

    def rank0_decides(self, found: Collection[str], decide: Callable[[set[str]], str]) -> str:
        """Return on all ranks what `decide`, called on rank 0 alone, returns. A collective."""
        self.number += 1
        number = self.number
        if self._group_rank > 0:
            return self._wait(partial(self._ask, number, found))
        said = self._wait(partial(self._gather, number))
        decision = decide(set(found).union(*said))
        self._store.set(self._name(number, 0), decision)
        self._store.delete_key(self._name(number - 1, 0))
        return decision

    def _ask(self, number: int, found: Collection[str]) -> str:
        self._store.set(self._name(number, self._group_rank), " ".join(found))
        self._store.delete_key(self._name(number - 1, self._group_rank))
        return self._read([self._name(number, 0)])[0]

    def _gather(self, number: int) -> list[list[str]]:
        names = [self._name(number, rank) for rank in range(1, self._group_world_size)]
        return [words.split() for words in self._read(names)]

    def _read(self, names: list[str]) -> list[str]:
        self._store.wait(names, _AS_LONG_AS_IT_TAKES)
        return [value.decode() for value in self._store.multi_get(names)]

    def _name(self, number: int, rank: int) -> str:
        return f"{self._key}/{number}/{rank}"

    @staticmethod
    def _wait(act: Callable[[], T]) -> T:
        answer: Future[T] = call_aside(act, "titan_ft_agreement")
        return answer.result()
