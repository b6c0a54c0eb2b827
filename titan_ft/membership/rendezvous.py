# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Rendezvous: how the members of a quorum build their process groups, and abort an exchange.

The ranks with the same number in all groups are a *column*. A column has a process group of its
own, and builds a new one for each quorum with other members:

1. Each rank finds the column's *leader* by the names in the quorum. The leader is one of the
   groups. Different columns have different leaders, so that no group's store serves all ranks.
2. The ranks *meet* at the TCPStore of the leader: each rank writes the address of its state server,
   and reads the addresses of all other ranks.
3. They connect their process groups, for which torch or NCCL uses the same store.

If one of these steps fails, the exchange fails at once, and is repeated in the next quorum.

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

# Terms of the time limit of a meeting; see `find_limit`.
_BASE_SECONDS = 2.0
_SECONDS_PER_GROUP = 0.01
_SECONDS_PER_RANK = 0.001

_ABORTED_TOPIC = "broken/"
"""A rank that aborts an exchange sends a note with this text and the exchange's prefix as topic."""

_ABORTED_EARLIER = "broke on another rank of this group before it began here"


class Rendezvous:
    """One rank's process group with its counterparts in the other groups.

    `Membership` owns it. Its quorum thread calls `configure`. The training thread and the
    exchange's thread use `process_group`. Any thread may call `abort`. After a failed `configure`
    the process group is unusable, until `configure` is called for the next quorum.

    Args:
        process_group: see `process_group.ReconfigurableProcessGroup`.
        timeout: limit of a collective.
        control: control tree of the group's ranks.
        address: host:port of this rank's state server.

    Attributes:
        key: name of the quorum that the process group was built for; empty before the first quorum.
        prefix: prefix of the last meeting's keys in the store. Each meeting of this process has
            another prefix, so the prefix also identifies the exchange.
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
        # The leader of the last meeting, and the connection to its store.
        self._leader_store: tuple[Member, TCPStore] | None = None
        # Drops the keys of the last meeting at this group's store.
        self._drop_last_keys: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._closed = False
        control.listen_for_notes(_ABORTED_TOPIC, self._handle_abort_note)

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
            key: name of the quorum.
            own: this group's name, one of `members`.
            step: committed updates in this group's state.
        """
        # A restarted lighthouse numbers its quorums from the beginning, so a key may come again.
        # The store still has the values of the earlier meeting. So the prefix also contains the
        # number of the meeting with this key. The members may count differently if a reply of the
        # lighthouse reached only some of them. Then they do not find each other here, and meet in
        # the next quorum.
        self._num_meetings[key] += 1
        with self._lock:
            if self._closed:
                # Do not connect: the peers would wait for a member that makes no exchange.
                return "this group has left the job"
            self.key = key
            self.prefix = f"titan_ft/{key}/{self._num_meetings[key]}"
        leader = find_leader(members, self._group_rank)
        limit = find_limit(len(members), self._group_world_size)
        if self._is_aborted():
            return _ABORTED_EARLIER
        try:
            self._meet(leader, members, own, step, limit)
            self._connect(leader, members, own, quorum_id, limit)
            if leader == own:
                self._drop_former_keys(len(members))
            if self._is_aborted():
                return _ABORTED_EARLIER
        except Exception as error:  # noqa: BLE001  # a member may die during the meeting
            self._leader_store = None  # Make a new connection for the next meeting.
            return first_line(error)
        finally:
            self.process_group.set_timeout(self.timeout)
        return None

    @property
    def _column_prefix(self) -> str:
        """Prefix of this column's keys in the leader's store."""
        return f"{self.prefix}/{self._group_rank}"

    def _is_aborted(self) -> bool:
        """True if a rank of this group has aborted the exchange of this quorum."""
        return self._control.read_note(_ABORTED_TOPIC + self.prefix) is not None

    def abort(self, prefix: str) -> None:
        """Abort the exchange under way, if it still is the exchange with this prefix; any thread.

        No other rank has to wait for a timeout after that: the counterparts notice the closed
        connections, and the other ranks of this group get a note over the control tree.
        """
        self._abort_here(prefix)
        if prefix and self._group_world_size > 1:
            self._control.send_note(_ABORTED_TOPIC + prefix)

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
        """Exchange the addresses of state servers, and the steps, with the counterparts.

        Raises an error of the store; at once if the leader is gone already.
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
        self.addresses = addresses  # One assignment, because other threads read the attribute.

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
                # Any process that reaches the store can write to it, so each text has a seal. A
                # false step would make holders of the job's state heal.
                sealed = text.decode(errors="replace")
                texts.append(remove_seal(leader.token, self._key_of(peer), sealed))
            return texts

        # torch's client waits without an end if the network to the store fails. This limit is
        # longer than the store's own timeout, because the store's error says more.
        return call_within(2 * limit, exchange)

    def _key_of(self, rank: int) -> str:
        """Return the full key of a member's text. The seal of the text covers the key."""
        return f"{self._column_prefix}/{rank}"

    def _connect_to_store(self, leader: Member, limit: float) -> TCPStore:
        """Return a connection to the leader's store.

        Uses the connection of the last meeting again if the leader is the same process, because a
        new connection costs a reverse DNS lookup on both sides, even for a numeric address.
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
        # If a member dies now, the others must not wait for it for the long timeout of a
        # collective.
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
            return  # A lone group has no meeting.
        former = self._drop_last_keys
        _, store = self._leader_store
        self._drop_last_keys = partial(drop_keys, store, self._column_prefix, num_members)
        if former is not None:
            # In the background: this takes two requests for each member.
            call_aside(former, "titan_ft_drop_keys")

    # Aborts

    def _handle_abort_note(self, prefix: str) -> None:
        """Abort the exchange that another rank of this group has aborted.

        Called on the control tree's thread, which must not wait. So the abort runs on another
        thread: with NCCL it may take a second.
        """
        call_aside(partial(self._abort_here, prefix), "titan_ft_abort")

    def _abort_here(self, prefix: str) -> None:
        with self._lock:
            if prefix != self.prefix:
                return
            try:
                self.process_group.abort()
            except Exception:
                # Raise no error, because the caller must still notify the other ranks.
                logger.exception(
                    "the exchange cannot be broken off here: it ends when its timeout is over",
                )


def drop_keys(store: TCPStore, prefix: str, num_members: int) -> None:
    """Drop the keys of a meeting from a store: the members' texts, and Gloo's addresses.

    NCCL's single key of 128 bytes stays.
    """
    for rank in range(num_members):
        store.delete_key(f"{prefix}/{rank}")
        store.delete_key(f"{prefix}/pg/0/{rank}")  # torch's name for the key of Gloo's address


def find_leader(members: Sequence[Member], group_rank: int) -> Member:
    """Return the leader of a column: the member at whose store its ranks meet.

    The leader is the member with the largest hash of its name and the column's number (rendezvous
    hashing). So all ranks of the column find the same leader without a message. After the death of
    a member, only its columns get another leader. All other connections to stores can be used
    again. The younger half of the members cannot be leaders: if a member that has just come were a
    leader, the other groups would need new connections to its store.

    The lighthouse's reply contains the address of a store, too. Do not use it: it is the store of a
    member that merely claims to have the most updates.
    """
    by_age = sorted(members, key=lambda member: member.age)
    established = by_age[: (len(by_age) + 1) // 2]

    def weight(member: Member) -> bytes:
        return hashlib.sha256(f"{member.unique}/{group_rank}".encode()).digest()

    return max(established, key=weight)


def find_limit(num_groups: int, num_ranks: int) -> float:
    """Return the time limit of each of two parts of a meeting: the addresses, and the connections.

    All members receive the quorum's reply at the same moment. So a member that takes longer than
    this limit is gone. The limit grows with the number of groups, because a rank reads a text of
    each group and connects to each group. It grows with the number of ranks, because a store serves
    about as many ranks as a group has.

    Args:
        num_groups: number of members.
        num_ranks: number of ranks in a group.
    """
    return _BASE_SECONDS + _SECONDS_PER_GROUP * num_groups + _SECONDS_PER_RANK * num_ranks
