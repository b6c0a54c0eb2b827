# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Meeting of all ranks of a quorum at one TCPStore, as up to c6a0967.

The meeting by columns is measured against it.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported at run time

from titan_ft.protocol.member import Member
from titan_ft.system.address import split_address
from titan_ft.system.threads import call_within


class StoreMeeting:
    """One rank's meetings by one store, with the requests and threads of an earlier version.

    Args:
        limit: seconds for each of the store's answers.
        address: host:port of this rank's state server.
    """

    def __init__(self, limit: float, *, group_rank: int, address: str) -> None:
        self._limit = limit
        self._group_rank, self._address = group_rank, address
        self._kept: tuple[Member, TCPStore] | None = (
            None  # whose store the members met at last, and the connection
        )
        self.addresses: dict[str, str] = {}
        """State servers of the members, by their unique names."""

    def configure(
        self, key: str, quorum_id: int, members: tuple[Member, ...], own: Member, step: int
    ) -> str | None:
        """Meet the members of a quorum; returns nothing went wrong, or raises."""
        prefix, rank = f"titan_ft/{key}/{quorum_id}/{self._group_rank}", members.index(own)
        found = call_within(
            2 * self._limit, lambda: self._exchange(members[0], prefix, rank, len(members), step)
        )
        self.addresses = {
            member.unique: text.split(" ")[0] for member, text in zip(members, found, strict=True)
        }
        return None

    def _exchange(
        self, host: Member, prefix: str, rank: int, world_size: int, step: int
    ) -> list[str]:
        timeout = timedelta(seconds=self._limit)
        before, self._kept = self._kept, None
        if before is not None and before[0].unique == host.unique:
            kept = before[1]
        else:
            kept = TCPStore(
                *split_address(host.store), is_master=False, wait_for_workers=False, timeout=timeout
            )
        store = PrefixStore(prefix, kept)
        store.set(str(rank), f"{self._address} {step}")
        store.wait([str(rank) for rank in range(world_size)], timeout)
        found = [store.get(str(rank)).decode() for rank in range(world_size)]
        self._kept = host, kept
        return found
