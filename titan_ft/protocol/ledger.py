# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The ledger: how far each slot's data has been trained, so that every batch is trained once.

The job's data is cut into `group_size` shares, one for each replica group. As each group has a
*slot* (its number in the job), so has its share. A *reader* is a group that takes part in the next
update. It reads the data of its own slot, and perhaps of slots of absent groups.

1. In each exchange, a group sends *entries*: which batches of which slots its gradients are made
   of, and the states of the loaders after these batches.
2. After each committed update, every live group enters these batches in its ledger. Joiners get the
   ledger with the state, and checkpoints contain it.
3. So the next reader of a slot continues exactly after the last committed batch. It may be another
   group, if the slot's own group is absent.

Each rank of a group reads one part of a slot, its *shard*. A rank's ledger contains the loader
states of its own shard only, for all slots.

See docs/data.md.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from titan_ft.protocol.member import GroupProcess

_Reader = TypeVar("_Reader", bound=Hashable)


@dataclass(frozen=True)
class Entry:
    """Batches of one slot that a group's gradients are made of.

    Attributes:
        slot: the slot of the data.
        first_batch: number of the first batch in the slot, counted from 0 over the whole job.
        num_batches: number of batches.
        state: the data loader's state after the last batch (see `titan_ft.engine.loader_state`).
        following: hash of the batch after the last one (`feed.mark`); empty = that batch is not
            read yet. A reader that opens a loader at `state` checks its first batch with this hash.
    """

    slot: int
    first_batch: int
    num_batches: int
    state: bytes
    following: str = ""

    @property
    def end(self) -> int:
        """Number of the batch after the last one."""
        return self.first_batch + self.num_batches


def encode(entries: Iterable[Entry]) -> bytes:
    """Pack entries for a message: a JSON line, then the states, all compressed."""
    entries = list(entries)
    if not entries:
        return b""
    head = [
        # One array per entry; `decode` reads the fields in this order.
        (entry.slot, entry.first_batch, entry.num_batches, entry.following, len(entry.state))
        for entry in entries
    ]
    states = b"".join(entry.state for entry in entries)
    return zlib.compress(json.dumps(head).encode() + b"\n" + states, 1)


def decode(data: bytes) -> list[Entry]:
    """Unpack the entries that `encode` has packed."""
    if not data:
        return []
    head, _, states = zlib.decompress(data).partition(b"\n")
    entries, offset = [], 0
    for slot, first_batch, num_batches, following, size in json.loads(head):
        state = states[offset : offset + size]
        entries.append(Entry(slot, first_batch, num_batches, state, following))
        offset += size
    return entries


class Ledger:
    """How far each slot is trained, and which group reads which slot next.

    Equal in all groups that hold the same state. On the training thread, `Feed` reads the ledger,
    and the trainer's counters advance it. If an update does not continue where the ledger ends,
    that is a bug: `advance` raises, and some slots may have advanced.

    Args:
        num_slots: `group_size`.
        shard: number of this rank's shard within a slot.
        num_shards: number of shards of a slot: the data-parallel degree within a group.
    """

    def __init__(self, num_slots: int, shard: int = 0, num_shards: int = 1) -> None:
        self.num_slots = num_slots
        self._shard = shard
        self._num_shards = num_shards
        self._ends: dict[int, int] = dict.fromkeys(range(num_slots), 0)
        self._states: dict[int, bytes] = {}
        self._following: dict[int, str] = {}
        self.readers: tuple[GroupProcess, ...] = ()
        """The groups that were ready at the last update; empty = each group reads its own slot.

        The readers share the slots of absent groups. A restarted group counts as absent, because it
        is another process, until it has been ready at an update.
        """

    def count_committed(self, slot: int) -> int:
        """Return the number of committed batches of `slot`."""
        return self._ends[slot]

    def loader_state(self, slot: int) -> bytes | None:
        """Return the loader's state after the last committed batch; None = there is no batch."""
        return self._states.get(slot)

    def next_mark(self, slot: int) -> str:
        """Return the hash of the batch after the last committed one of `slot`; empty = unknown."""
        return self._following.get(slot, "")

    def shard_of(self, slot: int) -> tuple[int, int]:
        """Return the number of this rank's shard in the whole job, and the number of shards."""
        return slot * self._num_shards + self._shard, self.num_slots * self._num_shards

    def advance(self, entries: Iterable[Entry], readers: Iterable[GroupProcess]) -> None:
        """Enter the batches of a committed update.

        Raises:
            ValueError: the entries do not continue where the ledger ends. This is a bug: groups of
                one lineage have the same ledger.
        """
        for entry in entries:
            slot, end = entry.slot, self._ends[entry.slot]
            if entry.first_batch != end:
                raise ValueError(
                    f"slot {slot} is trained up to batch {end}, not {entry.first_batch}",
                )
            self._ends[slot] = entry.end
            self._states[slot] = entry.state
            self._following[slot] = entry.following
        self.readers = tuple(readers)

    def shares(self) -> dict[GroupProcess, list[int]]:
        """Return which slots each reader trains in the next step.

        These are its own slot, and its share of the slots without a reader.
        """
        absent = set(range(self.num_slots)) - {slot for slot, _ in self.readers}
        shares = {}
        for reader, share in share_out(absent, self.readers).items():
            own_slot, _started = reader
            shares[reader] = [own_slot, *share]
        return shares

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger as JSON values."""
        states = {}
        for slot, state in self._states.items():
            states[str(slot)] = base64.b64encode(state).decode()
        return {
            "ends": list(self._ends.values()),
            "states": states,
            "following": {str(slot): mark for slot, mark in self._following.items()},
            "readers": list(self.readers),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the ledger's content by that of a `state_dict`."""
        self._ends = dict(enumerate(state_dict["ends"]))
        states, following = state_dict["states"], state_dict["following"]
        self._states = {int(slot): base64.b64decode(state) for slot, state in states.items()}
        self._following = {int(slot): mark for slot, mark in following.items()}
        self.readers = tuple((slot, started) for slot, started in state_dict["readers"])

    def shards(self) -> dict[str, dict[str, Any]]:
        """Return this rank's part of the ledger, by the number of the shard in the whole job.

        Checkpoints contain this form, because it does not depend on the number of groups and of
        ranks in a group: only their product, the number of all shards, must stay the same.
        """
        shards = {}
        for slot, end in self._ends.items():
            number, _num_shards = self.shard_of(slot)
            shards[str(number)] = {
                "batches": end,
                "state": self._states.get(slot, b""),
                "following": self.next_mark(slot),
            }
        return shards

    def load_shards(self, shards: dict[str, dict[str, Any]]) -> None:
        """Replace the ledger's content by the `shards` of a run with the same number of shards."""
        for slot in range(self.num_slots):
            number, _num_shards = self.shard_of(slot)
            found = shards[str(number)]
            self._ends[slot] = int(found["batches"])
            self._states.pop(slot, None)
            if found["state"]:
                self._states[slot] = bytes(found["state"])
            self._following[slot] = str(found["following"])


def share_out(slots: Iterable[int], readers: Sequence[_Reader]) -> dict[_Reader, list[int]]:
    """Deal `slots`, which have no reader of their own, out to `readers`.

    The result depends only on the arguments and their order, so it is the same in every group.
    """
    shares: dict[_Reader, list[int]] = {reader: [] for reader in readers}
    if not readers:
        return shares
    for number, slot in enumerate(sorted(slots)):
        reader = readers[number % len(readers)]
        shares[reader].append(slot)
    return shares


def deal_anew(
    shares: dict[GroupProcess, list[int]],
    present: Iterable[GroupProcess],
) -> dict[GroupProcess, list[int]]:
    """Deal the slots of readers that are gone out to the present readers.

    Args:
        shares: which slots each reader trains. This call updates it: readers that are gone are
            removed, and present readers get their additional slots.
        present: the groups in the quorum.

    Returns:
        The additional slots of each present reader.
    """
    slots_of_absent: list[int] = []
    for reader in shares.keys() - set(present):
        slots_of_absent += shares.pop(reader)
    dealt = share_out(slots_of_absent, sorted(shares))
    for reader, slots in dealt.items():
        shares[reader] += slots
    return dealt
