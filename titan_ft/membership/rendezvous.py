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
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported at run time

from titan_ft.protocol.errors import first_line
from titan_ft.protocol.member import Member
from titan_ft.system.address import split_address
from titan_ft.transfer.reach import check_listens, within

logger = logging.getLogger(__name__)

_RENDEZVOUS_SECONDS = 2.0  # all members got the quorum's reply at the same moment; one that is silent so long is gone


class Rendezvous:
    """One rank's process group with its counterparts in the other groups.

    Args:
        process_group: a reconfigurable one of torchft's.
        timeout: of its collectives.
        connect: opens a connection to the group's store.
        process: names this group's process for as long as it lives.
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
        connect: Callable[[], TCPStore],
        store: TCPStore,
        process: str,
        group_rank: int,
        group_world_size: int,
        address: str,
    ) -> None:
        self.process_group, self.timeout = process_group, timeout
        self._connect, self._store, self._process = connect, store, process
        self._group_rank, self._group_world_size = group_rank, group_world_size
        self._address = address
        self.key = self.prefix = ""
        self.peers: dict[int, str] = {}
        self.addresses: dict[str, str] = {}
        self.step = 0
        self._builds: Counter[str] = Counter()  # how often a process group was built for each key
        self._kept: tuple[Member, TCPStore] | None = None  # whose store the members met at last, and the connection
        self._lock = threading.Condition()
        self._closed = False
        if group_world_size > 1:
            # Connected here: what opens while a process group is built counts as one of its sockets.
            watch = (connect(),)
            threading.Thread(target=self._watch, args=watch, name="titan_ft_abort_watch", daemon=True).start()

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
        if self.prefix and self._group_world_size > 1:
            self._store.set(self._broken_key(self.prefix), "1")  # lets the old quorum's watcher end
        with self._lock:
            if self._closed:  # the peers would wait for one that never exchanges
                return "this group has left the job"
            self.key, self.prefix = key, f"titan_ft/{key}/{self._builds[key]}"
            self._lock.notify_all()
        prefix, rank = f"{self.prefix}/{self._group_rank}", members.index(own)
        store = members[0].store  # not the reply's, which is that of the member that claims the most steps
        try:
            self.step = step
            if len(members) > 1:
                texts = self._exchange_addresses(members[0], prefix, rank, len(members), step)
                facts = [text.split(" ") for text in texts]
                self.peers = {peer: address for peer, (address, _) in enumerate(facts)}
                self.addresses = {members[peer].unique: address for peer, address in self.peers.items()}
                self.step = max(int(number) for _, number in facts)
            # A member that dies right here must not cost the timeout of a whole collective.
            self.process_group.set_timeout(timedelta(seconds=_RENDEZVOUS_SECONDS))
            self.process_group.configure(
                f"{store}/{prefix}/pg",
                own.replica_id,
                rank,
                len(members),
                quorum_id,
                self._group_rank,
                self._group_world_size,
                [member.slot * self._group_world_size + self._group_rank for member in members],
            )
            if self._group_world_size > 1 and self._store.check([self._broken_key(self.prefix)]):
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
        the other ranks of this group are told through the group's store.
        """
        self._abort_own(prefix)
        if prefix and self._group_world_size > 1:
            self._store.set(self._broken_key(prefix), "1")

    def close(self) -> None:
        """Close the process group for good."""
        with self._lock:
            self._closed = True
            self.process_group.abort(errored=False)
            self._lock.notify_all()

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
            store.wait([str(rank) for rank in range(world_size)], timeout)
            found = [store.get(str(rank)).decode() for rank in range(world_size)]
            self._kept = host, kept
            return found

        # The way there may be dead. Longer than what the store's own timeout ends, which says more.
        return within(2 * _RENDEZVOUS_SECONDS, exchange)

    def _watch(self, store: TCPStore) -> None:
        """Abort whenever another rank of this group reports the exchange of the quorum in force as broken."""
        watched = ""
        while not self._closed:
            with self._lock:
                self._lock.wait_for(lambda before=watched: self.prefix != before or self._closed)  # type: ignore[misc]  # bound by default
                watched = self.prefix
            try:
                store.wait([self._broken_key(watched)], timedelta(days=365))
            except RuntimeError:
                if (again := self._reconnect()) is None:
                    return
                store, watched = again, ""  # what was written meanwhile is there
            else:
                self._abort_own(watched)

    def _reconnect(self) -> TCPStore | None:
        """Connect to the group's store again; None if it has ended with the group: nothing is left to watch."""
        if self._closed:
            return None
        try:
            return self._connect()
        except RuntimeError:
            return None

    def _abort_own(self, prefix: str) -> None:
        with self._lock:
            if prefix != self.prefix:
                return
            try:
                self.process_group.abort()
            except Exception:  # the other ranks must be told, and later exchanges watched, all the same
                logger.exception("the exchange cannot be broken off here: it ends when its timeout is over")

    def _broken_key(self, prefix: str) -> str:
        return f"titan_ft/broken/{self._process}/{prefix}"
