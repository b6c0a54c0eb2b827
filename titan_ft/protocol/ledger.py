# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The ledger: how far each slot's data has been trained, so that every batch is trained once.

`group_size` slots cut the data; slot r is replica group r's share of it. With each exchange a group says which batches
of which slots its gradients are made of, and the state of their loaders after those. What is committed goes into the
ledger of every live group; joiners get it with the state, and checkpoints hold it. So the group that reads a slot next,
its own after a restart or another one in its absence, goes on exactly behind the last committed batch.

A rank's ledger holds the loader states of ranks with its own index only: in every group the ranks of one index read the
same part of a slot.

See docs/data.md.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from titan_ft.protocol.member import Process

_Reader = TypeVar("_Reader", bound=Hashable)


@dataclass(frozen=True)
class Entry:
    """Batches of one slot that a group's gradients are made of.

    Attributes:
        slot: whose data.
        first_batch: number of the first one in the slot, counted from 0 over the whole job.
        num_batches: how many.
        state: the loader's state after the last one (see `titan_ft.engine.loader_state`).
        following: mark of the batch after the last one (see `feed.mark`); empty if it was not read yet. Whoever
            opens the loader's state compares the first batch with it.
    """

    slot: int
    first_batch: int
    num_batches: int
    state: bytes
    following: str = ""

    @property
    def end(self) -> int:
        """Return the number of the batch after the last one."""
        return self.first_batch + self.num_batches


def encode(entries: Iterable[Entry]) -> bytes:
    """Pack entries for the wire: a JSON line, then the states, all deflated."""
    entries = list(entries)
    if not entries:
        return b""
    head = [[entry.slot, entry.first_batch, entry.num_batches, entry.following, len(entry.state)] for entry in entries]
    return zlib.compress(json.dumps(head).encode() + b"\n" + b"".join(entry.state for entry in entries), 1)


def decode(data: bytes) -> list[Entry]:
    """Unpack what `encode` packed."""
    if not data:
        return []
    head, _, states = zlib.decompress(data).partition(b"\n")
    entries, offset = [], 0
    for slot, first_batch, num_batches, following, size in json.loads(head):
        entries.append(Entry(slot, first_batch, num_batches, states[offset : offset + size], following))
        offset += size
    return entries


class Ledger:
    """How far each slot is trained, and who reads what next. Equal in all groups that hold the same state.

    Args:
        num_slots: `group_size`.
        shard: this rank's part of a slot.
        num_shards: parts that a slot is cut into: the data-parallel degree within a group.
    """

    def __init__(self, num_slots: int, shard: int = 0, num_shards: int = 1) -> None:
        self.num_slots = num_slots
        self._shard, self._num_shards = shard, num_shards
        self._ends: dict[int, int] = dict.fromkeys(range(num_slots), 0)
        self._states: dict[int, bytes] = {}
        self._following: dict[int, str] = {}
        self.readers: tuple[Process, ...] = ()
        """The groups that were ready at the last update: who reads an absent group's data follows from it. A group that
        is started again is another process, which reads nothing before an update knows of it. None: each reads its own.
        """

    def end(self, slot: int) -> int:
        """Return how many batches of `slot` are committed."""
        return self._ends[slot]

    def state(self, slot: int) -> bytes | None:
        """Return the state of `slot`'s loader after its last committed batch; None = not begun."""
        return self._states.get(slot)

    def following(self, slot: int) -> str:
        """Return the mark of the batch after `slot`'s last committed one; empty if it is not known."""
        return self._following.get(slot, "")

    def shard_of(self, slot: int) -> tuple[int, int]:
        """Return the number of this rank's shard of `slot` in the whole job, and how many shards there are."""
        return slot * self._num_shards + self._shard, self.num_slots * self._num_shards

    def advance(self, entries: Iterable[Entry], readers: Iterable[Process]) -> None:
        """Take in what a committed update was made of.

        Raises:
            ValueError: the entries do not go on where the ledger ends: a bug, for the lineage says that they must.
        """
        for entry in entries:
            if entry.first_batch != self._ends[entry.slot]:
                raise ValueError(
                    f"slot {entry.slot} is trained up to batch {self._ends[entry.slot]}, not {entry.first_batch}"
                )
            self._ends[entry.slot], self._states[entry.slot] = entry.end, entry.state
            self._following[entry.slot] = entry.following
        self.readers = tuple(readers)

    def shares(self) -> dict[Process, list[int]]:
        """Return which slots each reader trains in the next step: its own, and its share of those that nobody reads."""
        absent = set(range(self.num_slots)) - {slot for slot, _ in self.readers}
        return {reader: [reader[0], *share] for reader, share in share_out(absent, self.readers).items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger as JSON values."""
        states = {str(slot): base64.b64encode(state).decode() for slot, state in self._states.items()}
        following = {str(slot): checksum for slot, checksum in self._following.items()}
        ends, readers = list(self._ends.values()), list(self.readers)
        return {"ends": ends, "states": states, "following": following, "readers": readers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Overwrite the ledger with what `state_dict` returned."""
        self._ends = dict(enumerate(state_dict["ends"]))
        self._states = {int(slot): base64.b64decode(state) for slot, state in state_dict["states"].items()}
        self._following = {int(slot): checksum for slot, checksum in state_dict["following"].items()}
        self.readers = tuple((slot, started) for slot, started in state_dict["readers"])

    def shards(self) -> dict[str, dict[str, Any]]:
        """Return this rank's part by the number of the shard in the whole job, which does not depend on the groups."""
        return {
            str(self.shard_of(slot)[0]): {
                "batches": end,
                "state": self._states.get(slot, b""),
                "following": self.following(slot),
            }
            for slot, end in self._ends.items()
        }

    def load_shards(self, shards: dict[str, dict[str, Any]]) -> None:
        """Overwrite the ledger with `shards()` of a run whose slots times parts made as many."""
        for slot in range(self.num_slots):
            found = shards[str(self.shard_of(slot)[0])]
            self._ends[slot] = int(found["batches"])
            self._states.pop(slot, None)
            if found["state"]:
                self._states[slot] = bytes(found["state"])
            self._following[slot] = str(found["following"])


def share_out(slots: Iterable[int], readers: Sequence[_Reader]) -> dict[_Reader, list[int]]:
    """Deal `slots` that nobody reads out to `readers`, the same way in every group."""
    shares: dict[_Reader, list[int]] = {reader: [] for reader in readers}
    for number, slot in enumerate(sorted(slots) if readers else ()):
        shares[readers[number % len(readers)]].append(slot)
    return shares


def deal_anew(shares: dict[Process, list[int]], present: Iterable[Process]) -> dict[Process, list[int]]:
    """Deal what readers that are not `present` were to train out to those that are.

    Args:
        shares: which slots each reader trains; holds the new ones afterwards, without the readers that are gone.

    Returns:
        The slots that each reader gets in addition.
    """
    lacking = [slot for reader in shares.keys() - set(present) for slot in shares.pop(reader)]
    dealt = share_out(lacking, sorted(shares))
    for reader, slots in dealt.items():
        shares[reader] += slots
    return dealt
