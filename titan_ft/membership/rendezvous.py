# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Rendezvous: how the members of a quorum meet, connect their process groups, and break off.

The ranks with the same number in all groups are a *column*. They have one process group together,
and a new one for each new set of members:

1. Each rank finds the column's *leader* from the names in the quorum. The leader is one of the
   groups. The leaders of the columns are spread over the groups, so that no store serves all ranks.
2. The ranks *meet* at the leader's store: each writes the address of its state server, and reads
   those of all others.
3. They connect their process groups by the same store.

If a step fails, the exchange fails at once, and is repeated in the next quorum.

See docs/membership.md, "Meeting of groups".
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
from titan_ft.system.threads import call_aside, call_within
from titan_ft.transfer.reach import check_listens

logger = logging.getLogger(__name__)

# The limit of a meeting; see `find_limit`.
_BASE_SECONDS = 2.0
_SECONDS_PER_GROUP = 0.01
_SECONDS_PER_RANK = 0.001

_BROKEN = "broken/"
"""Prefix of a note's topic. The prefix of the exchange that is broken off follows."""

_BROKEN_EARLIER = "broke on another rank of this group before it began here"


class Rendezvous:
    """One rank's process group with its counterparts in the other groups.

    `Membership` owns it. Its quorum thread calls `configure`. The training thread and the exchange
    use `process_group`. Any thread may call `abort`. After a failed `configure` the process group
    is unusable, and the next quorum's `configure` builds another one.

    Args:
        process_group: see `process_group.ReconfigurableProcessGroup`.
        timeout: limit of a collective.
        control: tree of the group's ranks.
        address: host:port of this rank's state server.

    Attributes:
        key: name of the quorum that the process group was built for; empty before the first quorum.
        prefix: prefix of this meeting's keys in stores. Each meeting of this process has another
            one, so it also names the exchange.
        addresses: addresses (host:port) of the members' state servers, by unique name.
        max_step: largest number of updates that a member held when the process group was built.
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
        self.process_group = process_group
        self.timeout = timeout
        self._control = control
        self._group_rank = group_rank
        self._group_world_size = group_world_size
        self._address = address
        self.key = ""
        self.prefix = ""
        self.addresses: dict[str, str] = {}
        self.max_step = 0
        self._num_meetings: Counter[str] = Counter()  # by quorum key
        # The leader at whose store the last meeting was, and the connection to that store.
        self._leader_store: tuple[Member, TCPStore] | None = None
        # Drops the last meeting's keys if that meeting was at this group's store.
        self._drop_last_keys: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._closed = False
        control.listen_for_notes(_BROKEN, self._abort_with_group)

    def configure(
        self,
        key: str,
        quorum_id: int,
        members: tuple[Member, ...],
        own: Member,
        step: int,
    ) -> str | None:
        """Build the process group of a new quorum. Return the reason if that failed, else None.

        Args:
            key: names the quorum.
            own: this group's name, one of `members`.
            step: committed updates that this group holds.
        """
        # A restarted lighthouse counts quorum ids from the beginning, and a store still has the
        # values of an earlier meeting. So the prefix also counts the meetings with the same key.
        # The counts of the members may differ if a reply reached only some of them. Then the
        # members miss each other here, and meet in the next quorum.
        self._num_meetings[key] += 1
        with self._lock:
            if self._closed:
                # The peers would wait for a member that makes no exchange.
                return "this group has left the job"
            self.key = key
            self.prefix = f"titan_ft/{key}/{self._num_meetings[key]}"
        leader = find_leader(members, self._group_rank)
        limit = find_limit(len(members), self._group_world_size)
        if self._is_broken():
            return _BROKEN_EARLIER
        try:
            self._meet(leader, members, own, step, limit)
            self._connect(leader, members, own, quorum_id, limit)
            if leader == own:
                self._drop_former_keys(len(members))
            if self._is_broken():
                return _BROKEN_EARLIER
        except Exception as error:  # noqa: BLE001  # a member may die during the meeting
            self._leader_store = None  # connect anew next time
            return first_line(error)
        finally:
            self.process_group.set_timeout(self.timeout)
        return None

    @property
    def _column_prefix(self) -> str:
        """Prefix of this column's keys in the leader's store."""
        return f"{self.prefix}/{self._group_rank}"

    def _is_broken(self) -> bool:
        """True if another rank of this group has broken off the exchange of this quorum."""
        return self._control.read_note(_BROKEN + self.prefix) is not None

    def abort(self, prefix: str) -> None:
        """Break off the exchange under way, if it still is the exchange of `prefix`; any thread.

        Then no other rank has to wait for a timeout: counterparts notice the closed connections,
        and the other ranks of this group get a note over the control tree.
        """
        self._abort_own(prefix)
        if prefix and self._group_world_size > 1:
            self._control.send_note(_BROKEN + prefix)

    def close(self) -> None:
        """Close the process group for good."""
        with self._lock:
            self._closed = True
            self.process_group.abort(errored=False)

    # The meeting of the column

    def _meet(
        self,
        leader: Member,
        members: Sequence[Member],
        own: Member,
        step: int,
        limit: float,
    ) -> None:
        """Exchange state servers' addresses and steps with the counterparts.

        Raises an error of the store, at once if a member is already gone.
        """
        self.max_step = step
        if len(members) == 1:
            return
        texts = self._exchange_texts(leader, members.index(own), len(members), step, limit)
        addresses = {}
        for member, text in zip(members, texts, strict=True):
            address, member_step = text.split(" ")
            addresses[member.unique] = address
            self.max_step = max(self.max_step, int(member_step))
        self.addresses = addresses  # in one piece: other threads read it

    def _exchange_texts(
        self,
        leader: Member,
        rank: int,
        num_members: int,
        step: int,
        limit: float,
    ) -> list[str]:
        """Write this rank's text to the leader's store, and return the texts of all members.

        Args:
            limit: seconds for each answer of the store.
        """

        def exchange() -> list[str]:
            store = self._connect_to_store(leader, limit)
            column = PrefixStore(self._column_prefix, store)
            sealed = add_seal(leader.token, self._key_of(rank), f"{self._address} {step}")
            column.set(str(rank), sealed)
            # Read the texts of all members in one request. The store answers when all keys are
            # there. With one request for each member, the number of requests would grow with the
            # square of the number of groups.
            found = column.multi_get([str(peer) for peer in range(num_members)])
            self._leader_store = leader, store
            texts = []
            for peer, text in enumerate(found):
                # Any process that reaches the store may write to it. A false step would turn
                # holders of the state into joiners, so each text has a seal.
                sealed = text.decode(errors="replace")
                texts.append(remove_seal(leader.token, self._key_of(peer), sealed))
            return texts

        # torch's client waits without end if the network to the store dies. The limit is longer
        # than the store's own timeout, whose error says more.
        return call_within(2 * limit, exchange)

    def _key_of(self, rank: int) -> str:
        """Return the full key of a member's text, which its seal covers."""
        return f"{self._column_prefix}/{rank}"

    def _connect_to_store(self, leader: Member, limit: float) -> TCPStore:
        """Return a connection to the leader's store.

        The connection of the last meeting is used again if it leads to the same process: a new
        connection costs a reverse DNS lookup on both sides, even for a numeric address.
        """
        timeout = timedelta(seconds=limit)
        former = self._leader_store
        self._leader_store = None
        if former is not None and former[0].unique == leader.unique:
            former[1].set_timeout(timeout)
            return former[1]
        check_listens(leader.store, limit)
        host, port = split_address(leader.store)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)

    def _connect(
        self,
        leader: Member,
        members: Sequence[Member],
        own: Member,
        quorum_id: int,
        limit: float,
    ) -> None:
        """Connect the process group's members."""
        # If a member dies now, the wait for it must not take the timeout of a collective.
        self.process_group.set_timeout(timedelta(seconds=limit))
        size = self._group_world_size
        global_ranks = [member.slot * size + self._group_rank for member in members]
        self.process_group.configure(
            f"{leader.store}/{self._column_prefix}/pg",
            members.index(own),
            len(members),
            quorum_id,
            self._group_rank,
            self._group_world_size,
            global_ranks,
        )

    def _drop_former_keys(self, num_members: int) -> None:
        """Drop the keys of the former meeting at this group's store, and remember those of this
        one.

        A meeting of 300 groups leaves 0.8 MB in the store. Nobody reads the keys of the former
        meeting any more, because all members have come to this one.
        """
        if self._leader_store is None:
            return  # a lone group has no meeting
        former = self._drop_last_keys
        _, store = self._leader_store
        self._drop_last_keys = partial(drop_keys, store, self._column_prefix, num_members)
        if former is not None:
            # In the background: this takes two requests for each member.
            call_aside(former, "titan_ft_drop_keys")

    # Breaking off

    def _abort_with_group(self, prefix: str) -> None:
        """Break off the exchange that another rank of this group has broken off.

        On a thread of its own: NCCL's abort may take a second, and the control tree's thread must
        not wait for it.
        """
        call_aside(partial(self._abort_own, prefix), "titan_ft_abort")

    def _abort_own(self, prefix: str) -> None:
        with self._lock:
            if prefix != self.prefix:
                return
            try:
                self.process_group.abort()
            except Exception:
                # The caller must still notify the other ranks, and its watch must go on.
                logger.exception(
                    "the exchange cannot be broken off here: it ends when its timeout is over",
                )


def drop_keys(store: TCPStore, prefix: str, num_members: int) -> None:
    """Drop the keys of a meeting from a store: the members' texts, and the addresses of Gloo.

    NCCL leaves one key of 128 bytes, which stays.
    """
    for rank in range(num_members):
        store.delete_key(f"{prefix}/{rank}")
        store.delete_key(f"{prefix}/pg/0/{rank}")  # torch's name for the key of Gloo


def find_leader(members: Sequence[Member], group_rank: int) -> Member:
    """Return the member at whose store a column of ranks meets.

    All ranks of the column find the same member without a message: the member with the largest hash
    of its name and the column (rendezvous hashing). So after a death, only the columns of the dead
    member get another leader, and all other connections to stores can be used again. The younger
    half of the members leads no column: the other groups would need new connections to a member
    that has just come.

    The lighthouse's reply names a store as well. It is not used, because it is that of a member
    which merely claims the most updates.
    """
    by_age = sorted(members, key=lambda member: member.age)
    established = by_age[: (len(by_age) + 1) // 2]

    def weight(member: Member) -> bytes:
        return hashlib.sha256(f"{member.unique}/{group_rank}".encode()).digest()

    return max(established, key=weight)


def find_limit(num_groups: int, num_ranks: int) -> float:
    """Return the seconds that a rank waits in each part of a meeting: addresses, then connections.

    All members receive the quorum's reply at the same moment. So a member that is silent for longer
    is gone. The limit grows with the number of groups, because a rank reads a text of each group
    and connects to each group. It grows with the number of ranks, because a store serves about as
    many ranks as a group has.

    Args:
        num_groups: number of members.
        num_ranks: number of ranks in a group.
    """
    return _BASE_SECONDS + _SECONDS_PER_GROUP * num_groups + _SECONDS_PER_RANK * num_ranks
