# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The process group of the quorum in force: how its members meet and build it, and how it is broken off.

Built anew for each new set of members. Whatever goes wrong here costs one exchange: it fails at once and is repeated in
the next quorum.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported at run time

from titan_ft.membership.control_tree import ControlTree
from titan_ft.protocol.errors import first_line
from titan_ft.protocol.member import Member
from titan_ft.system.address import split_address
from titan_ft.system.threads import call_aside
from titan_ft.transfer.reach import check_listens, within

logger = logging.getLogger(__name__)

_RANKS_OF_A_STORE = 256  # that meet at it; with more ranks in the quorum, they meet at the stores of more members
_RENDEZVOUS_SECONDS = 2.0  # all members got the quorum's reply at the same moment; one that is silent so long is gone

_BROKEN = "broken/"  # a note's topic begins so; the prefix of the exchange that is broken off follows


class Rendezvous:
    """One rank's process group with its counterparts in the other groups.

    Args:
        process_group: a reconfigurable one of torchft's.
        timeout: of its collectives.
        control: tree of the group's ranks.
        address: host:port of this rank's state server.

    Attributes:
        key: of the quorum that the process group was built for; empty before the first.
        prefix: of that quorum's keys in stores; never twice the same.
        peers: state servers (host:port) of its members, by rank.
        addresses: the same by the member's unique name.
        step: largest number of updates that a member had when it was built.
    """

    def __init__(
        self,
        process_group: Any,
        timeout: timedelta,
        *,
        control: ControlTree,
        group_rank: int,
        group_world_size: int,
        address: str,
    ) -> None:
        self.process_group, self.timeout = process_group, timeout
        self._control = control
        self._group_rank, self._group_world_size = group_rank, group_world_size
        self._address = address
        self.key = self.prefix = ""
        self.peers: dict[int, str] = {}
        self.addresses: dict[str, str] = {}
        self.step = 0
        self._builds: Counter[str] = Counter()  # how often a process group was built for each key
        self._kept: tuple[Member, TCPStore] | None = None  # whose store the members met at last, and the connection
        self._lock = threading.Lock()
        self._closed = False
        control.listen(_BROKEN, self._follow_abort)

    def configure(self, key: str, quorum_id: int, members: tuple[Member, ...], own: Member, step: int) -> str | None:
        """Build the process group of a new quorum; returns what went wrong, or None.

        Args:
            key: names the quorum.
            own: this group's name among `members`.
            step: committed updates that it holds.
        """
        # A restarted lighthouse counts quorum ids from the beginning, and stores keep what was written under a key.
        # The same processes were members each time that it came up, so that their counts agree. After a reply that
        # reached only some of them they do not: then they miss each other, and meet in the next quorum.
        self._builds[key] += 1
        with self._lock:
            if self._closed:  # the peers would wait for one that never exchanges
                return "this group has left the job"
            self.key, self.prefix = key, f"titan_ft/{key}/{self._builds[key]}"
        prefix, rank = f"{self.prefix}/{self._group_rank}", members.index(own)
        host = find_host(members, self._group_rank, self._group_world_size)
        if self._control.heard(_BROKEN + self.prefix) is not None:
            return "broke on another rank of this group before it began here"
        try:
            self.step = step
            if len(members) > 1:
                texts = self._exchange_addresses(host, prefix, rank, len(members), step)
                facts = [text.split(" ") for text in texts]
                self.peers = {peer: address for peer, (address, _) in enumerate(facts)}
                self.addresses = {members[peer].unique: address for peer, address in self.peers.items()}
                self.step = max(int(number) for _, number in facts)
            # A member that dies right here must not cost the timeout of a whole collective.
            self.process_group.set_timeout(timedelta(seconds=_RENDEZVOUS_SECONDS))
            self.process_group.configure(
                f"{host.store}/{prefix}/pg",
                own.replica_id,
                rank,
                len(members),
                quorum_id,
                self._group_rank,
                self._group_world_size,
                [member.slot * self._group_world_size + self._group_rank for member in members],
            )
            if self._control.heard(_BROKEN + self.prefix) is not None:
                return "broke on another rank of this group before it began here"
        except Exception as error:  # noqa: BLE001  # a member may die right here; the next quorum is without it
            self._kept = None  # a new connection next time
            return first_line(error)
        finally:
            self.process_group.set_timeout(self.timeout)
        return None

    def abort(self, prefix: str) -> None:
        """Break off the exchange under way, if it is still that of `prefix`.

        Ranks that saw nothing of the failure should not sit out a timeout: peers notice the closed connections, and
        the other ranks of this group hear of it through the control tree.
        """
        self._abort_own(prefix)
        if prefix and self._group_world_size > 1:
            self._control.say(_BROKEN + prefix)

    def close(self) -> None:
        """Close the process group for good."""
        with self._lock:
            self._closed = True
            self.process_group.abort(errored=False)

    def _exchange_addresses(self, host: Member, prefix: str, rank: int, world_size: int, step: int) -> list[str]:
        """Tell the members this rank's state server and step, learn theirs; shows at once when one is gone already.

        Args:
            host: the member at whose store they meet.
        """
        timeout = timedelta(seconds=_RENDEZVOUS_SECONDS)

        def exchange() -> list[str]:
            # Kept: every new connection costs a reverse DNS lookup on both sides, even of numeric addresses. Not for
            # another process at the same address, though: the connection is to the one that died, and would break.
            before, self._kept = self._kept, None
            if before is not None and before[0].unique == host.unique:
                kept = before[1]
            else:
                check_listens(host.store, _RENDEZVOUS_SECONDS)
                address = split_address(host.store)
                kept = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
            store = PrefixStore(prefix, kept)
            store.set(str(rank), f"{self._address} {step}")
            # One request for all members: a read for each would be a request for each pair of them, in every column.
            found = store.multi_get([str(rank) for rank in range(world_size)])  # waits until all are there
            self._kept = host, kept
            return [text.decode() for text in found]

        # The way there may be dead. Longer than what the store's own timeout ends, which says more.
        return within(2 * _RENDEZVOUS_SECONDS, exchange)

    def _follow_abort(self, prefix: str) -> None:
        """Break off the exchange that another rank of this group has broken off.

        On a thread of its own: NCCL's abort may take a second, and the control tree's thread must not wait for it.
        """
        call_aside(partial(self._abort_own, prefix), "titan_ft_abort")

    def _abort_own(self, prefix: str) -> None:
        with self._lock:
            if prefix != self.prefix:
                return
            try:
                self.process_group.abort()
            except Exception:  # the other ranks must be told, and later exchanges watched, all the same
                logger.exception("the exchange cannot be broken off here: it ends when its timeout is over")


def find_host(members: Sequence[Member], group_rank: int, group_world_size: int) -> Member:
    """Return the member at whose store a rank meets its counterparts: the same one for all of them.

    It is not the member that the lighthouse names, which claims the most updates. In small quorums all ranks meet at
    the first member, so that the connections to its store last when other members come and go.
    """
    num_stores = 1 + group_world_size * len(members) // _RANKS_OF_A_STORE
    return members[group_rank % min(num_stores, len(members))]
