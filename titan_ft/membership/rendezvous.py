# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The process group of the quorum in force: how its members meet and build it, and how it is broken off.

Built anew for each new set of members. Whatever goes wrong here costs one exchange: it fails at once and is repeated in
the next quorum.

The ranks with the same number in all groups are a column. Each column meets at the store of one group, its leader. All
ranks find the leader from the quorum's names. The columns are spread over the groups, so that no store serves all.

See docs/membership.md.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported at run time

from titan_ft.membership.control_tree import ControlTree
from titan_ft.protocol.errors import first_line
from titan_ft.protocol.member import Member
from titan_ft.system.address import split_address
from titan_ft.system.seal import add_seal, remove_seal
from titan_ft.system.threads import call_aside
from titan_ft.transfer.reach import check_listens, within

logger = logging.getLogger(__name__)

# See `find_limit`.
_LEAST_SECONDS = 2.0
_SECONDS_OF_A_GROUP = 0.01
_SECONDS_OF_A_RANK = 0.001

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
        self._drop_keys: Callable[[], None] | None = None  # of the last meeting, if it was at this group's store
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
        leader = find_leader(members, self._group_rank)
        limit = find_limit(len(members), self._group_world_size)
        if self._control.heard(_BROKEN + self.prefix) is not None:
            return "broke on another rank of this group before it began here"
        try:
            self.step = step
            if len(members) > 1:
                texts = self._exchange_addresses(leader, prefix, rank, len(members), step, limit)
                facts = [text.split(" ") for text in texts]
                self.peers = {peer: address for peer, (address, _) in enumerate(facts)}
                self.addresses = {members[peer].unique: address for peer, address in self.peers.items()}
                self.step = max(int(number) for _, number in facts)
            # A member that dies right here must not cost the timeout of a whole collective.
            self.process_group.set_timeout(timedelta(seconds=limit))
            self.process_group.configure(
                f"{leader.store}/{prefix}/pg",
                own.replica_id,
                rank,
                len(members),
                quorum_id,
                self._group_rank,
                self._group_world_size,
                [member.slot * self._group_world_size + self._group_rank for member in members],
            )
            if leader == own and self._kept is not None:
                self._drop_former_keys(partial(drop_keys, self._kept[1], prefix, len(members)))
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

    def _exchange_addresses(
        self, leader: Member, prefix: str, rank: int, world_size: int, step: int, limit: float
    ) -> list[str]:
        """Tell the members this rank's state server and step, learn theirs; shows at once when one is gone already.

        Args:
            limit: seconds for each of the store's answers.
        """
        timeout = timedelta(seconds=limit)

        def exchange() -> list[str]:
            # Kept: every new connection costs a reverse DNS lookup on both sides, even of numeric addresses. Not for
            # another process at the same address, though: the connection is to the one that died, and would break.
            before, self._kept = self._kept, None
            if before is not None and before[0].unique == leader.unique:
                kept = before[1]
                kept.set_timeout(timeout)
            else:
                check_listens(leader.store, limit)
                address = split_address(leader.store)
                kept = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
            store = PrefixStore(prefix, kept)
            store.set(str(rank), add_seal(leader.token, f"{prefix}/{rank}", f"{self._address} {step}"))
            # One request for all members: a read for each would be a request for each pair of them, in every column.
            found = store.multi_get([str(rank) for rank in range(world_size)])  # waits until all are there
            self._kept = leader, kept
            # Whoever reaches the store may write: a false step would make holders of the state joiners.
            return [
                remove_seal(leader.token, f"{prefix}/{peer}", text.decode(errors="replace"))
                for peer, text in enumerate(found)
            ]

        # The way there may be dead. Longer than what the store's own timeout ends, which says more.
        return within(2 * limit, exchange)

    def _drop_former_keys(self, drop: Callable[[], None]) -> None:
        """Drop the keys of the former meeting at this group's store, and later, with `drop`, those of this one.

        All members of this meeting have left the former one. Of 300 groups each meeting leaves 0.8 MB in the store.
        """
        former, self._drop_keys = self._drop_keys, drop
        if former is not None:
            call_aside(former, "titan_ft_drop_keys")  # two requests a member, and nobody waits for them

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


def drop_keys(store: TCPStore, prefix: str, num_members: int) -> None:
    """Drop what a meeting has left in a store: its members' addresses, and the addresses of Gloo's connections."""
    for rank in range(num_members):
        store.delete_key(f"{prefix}/{rank}")
        store.delete_key(f"{prefix}/pg/0/{rank}")  # as torch names it; NCCL leaves one key, of 128 bytes


def find_leader(members: Sequence[Member], group_rank: int) -> Member:
    """Return the member at whose store a column of ranks meets: the same one on all of them, without a message.

    It is the member with the largest hash of its name and the column (rendezvous hashing). So a death moves only the
    columns of the member that died, and the connections of all others last. The younger half of the members leads no
    column. Otherwise the other groups would have to connect to a member that has just come.

    The leader is not the member that the lighthouse's reply names, which claims the most updates.
    """
    by_age = sorted(members, key=lambda member: member.age)
    established = by_age[: (len(by_age) + 1) // 2]
    return max(established, key=lambda member: hashlib.sha256(f"{member.unique}/{group_rank}".encode()).digest())


def find_limit(num_groups: int, num_ranks: int) -> float:
    """Return the seconds that a rank waits for its column in each part of a meeting: addresses, then connections.

    All members got the quorum's reply at the same moment: one that is silent for longer is gone. A rank reads a line of
    each group and connects to each group. A group's store serves about as many ranks as a group has, in large groups.

    Args:
        num_ranks: of a group.
    """
    return _LEAST_SECONDS + _SECONDS_OF_A_GROUP * num_groups + _SECONDS_OF_A_RANK * num_ranks
