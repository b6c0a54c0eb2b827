# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The feed: reads the batches of slots, beginning after the last batch in the ledger.

The data is cut into *slots*, one for each replica group. The *ledger* has the number of the last
batch of each slot that is in a committed update (`protocol/ledger.py`). A group reads its own slot,
and perhaps slots of missing groups.

If the step of a batch is not committed, the feed keeps the batch, and returns it again. The loader
of a slot is torchdata's `StatefulDataLoader`. Its state is taken after the last batch of each step.

A loader that is opened at a state may read other batches than a loader that was never closed. The
feed looks for that. The *mark* of a batch is its checksum and the number of its labels. Each entry
of the ledger has the mark of the batch after it, if that batch was read ahead. When the feed opens
a slot, it compares the mark of the first batch, and emits an event with the result.

See docs/data.md.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from titan_ft.engine.loader_state import load_loader, save_loader
from titan_ft.protocol.ledger import Entry, Ledger
from titan_ft.run.events import Batches, DataOpened, Event

logger = logging.getLogger(__name__)

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Inputs and labels, as torchtitan's loaders yield them."""


@dataclass
class Reading:
    """The batches of one slot for one step.

    Attributes:
        entry: the numbers of the batches, and the loader's state after them.
        checksum: CRC-32 over the bytes of their inputs and labels, in hex.
        first: `mark` of the first batch.
    """

    entry: Entry
    batches: list[Batch]
    checksum: str
    first: str = ""

    def describe(self) -> Batches:
        """Return the description for events."""
        return Batches(
            slot=self.entry.slot,
            first_batch=self.entry.first_batch,
            num_batches=self.entry.num_batches,
            checksum=self.checksum,
        )


def merge(readings: Iterable[Reading]) -> list[Reading]:
    """Join the consecutive readings of each slot into one.

    The result has no batches: those of a long round would fill the memory.
    """
    by_slot: dict[int, Reading] = {}
    for reading in readings:
        slot = reading.entry.slot
        former = by_slot.get(slot)
        if former is None:
            by_slot[slot] = replace(reading, batches=[])
        else:
            by_slot[slot] = _join(former, reading)
    return list(by_slot.values())


def _join(former: Reading, reading: Reading) -> Reading:
    first, last = former.entry, reading.entry
    num_batches = first.num_batches + last.num_batches
    entry = replace(last, first_batch=first.first_batch, num_batches=num_batches)
    return replace(former, entry=entry, checksum=checksum(reading.batches, former.checksum))


class Feed:
    """Reads batches for one rank. Training thread only.

    The group's own training calls `read` and `read_ahead`, the trainer `close_all_but`. After an
    error, `read` raises it at each call: a generator that has raised yields no more batches.

    Args:
        ledger: has the number of the next batch of each slot.
        build: builds this rank's loader of a slot, at the slot's beginning.
        iterate: yields the batches of a loader (torchtitan's `Trainer.batch_generator`).
        emit: takes the event of each opening of a slot.
    """

    def __init__(
        self,
        ledger: Ledger,
        build: Callable[[int], Any],
        iterate: Callable[[Iterable[Any]], Iterator[Batch]],
        emit: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._ledger = ledger
        self._build = build
        self._iterate = iterate
        self._emit = emit
        self._readers: dict[int, _Reader] = {}

    def read(self, slot: int, num_batches: int, skip: int = 0) -> Reading:
        """Return the next `num_batches` of `slot` after the committed ones and `skip` more.

        Raises:
            DataloaderExhaustedError: the data is finite and at its end.
            LoaderStateError: other groups cannot unpack the loader's state.
        """
        first_batch = self._ledger.count_committed(slot) + skip
        reader = self._readers.get(slot)
        if reader is not None and reader.can_read_at(first_batch):
            return reader.read(first_batch, num_batches)
        former_loader = None
        if reader is not None:
            former_loader = reader.loader
        loader = self._open(slot, former_loader)
        reader = _Reader(slot, first_batch, loader, self._iterate(loader))
        self._readers[slot] = reader
        reading = reader.read(first_batch, num_batches)
        self._report_opening(slot, reading)
        return reading

    def read_ahead(self, readings: Iterable[Reading]) -> None:
        """Read the batches after these ones, while the device trains on these.

        An error, the end of the data included, is raised by the `read` that asks for the batches.

        Args:
            readings: the last reading of each slot.
        """
        for reading in readings:
            self._readers[reading.entry.slot].read_ahead(reading.entry.num_batches)

    def close_all_but(self, slots: Collection[int]) -> None:
        """Close the loaders of all slots but `slots`."""
        for slot in self._readers.keys() - set(slots):
            del self._readers[slot]

    def _open(self, slot: int, loader: Any) -> Any:
        state = self._ledger.loader_state(slot)
        # A loader that has yielded batches cannot go back to its beginning.
        if loader is None or state is None:
            loader = self._build(slot)
        if state is not None:
            load_loader(loader, state)
        return loader

    def _report_opening(self, slot: int, reading: Reading) -> None:
        """Emit an event: is the first batch the one that follows the committed ones?"""
        first_batch = reading.entry.first_batch
        expected = self._ledger.next_mark(slot)
        follows_committed = first_batch == self._ledger.count_committed(slot)
        # A batch of another size proves nothing: a resume may have changed the batch or the
        # sequence length.
        has_same_size = _size_of(expected) == _size_of(reading.first)
        exact: bool | None = None  # None = not known
        if follows_committed and has_same_size:
            exact = reading.first == expected
        if exact is False:
            logger.error(
                "slot %d was opened at batch %d, and this batch is not the one that follows there: "
                "the data loader does not go on where its state was saved. Batches are lost or "
                "repeated; titan-ft check --reread finds out which",
                slot,
                first_batch,
            )
        shard, num_shards = self._ledger.shard_of(slot)
        self._emit(
            DataOpened(
                slot=slot,
                shard=shard,
                num_shards=num_shards,
                first_batch=first_batch,
                exact=exact,
            ),
        )


class _Reader:
    """The open loader of one slot.

    Args:
        next_batch: number of the batch that the loader yields next.
    """

    def __init__(self, slot: int, next_batch: int, loader: Any, batches: Iterator[Batch]) -> None:
        self.loader = loader
        self._slot = slot
        self._next_batch = next_batch
        self._batches = batches
        self._readings: list[Reading] = []
        """The reading that was last asked for, and the one that was read ahead."""
        self._error: Exception | None = None

    def can_read_at(self, first_batch: int) -> bool:
        if first_batch == self._next_batch:
            return True
        return any(reading.entry.first_batch == first_batch for reading in self._readings)

    def read(self, first_batch: int, num_batches: int) -> Reading:
        while self._readings and self._readings[0].entry.first_batch != first_batch:
            del self._readings[0]
        if not self._readings:
            self._read_on(num_batches)
        return self._readings[0]

    def read_ahead(self, num_batches: int) -> None:
        if len(self._readings) != 1:
            return
        (current,) = self._readings
        try:
            self._read_on(num_batches)
        except Exception:  # noqa: BLE001  # the `read` that asks for these batches raises it again
            return
        current.entry = replace(current.entry, following=self._readings[-1].first)

    def _read_on(self, num_batches: int) -> None:
        if self._error is not None:
            raise self._error
        try:
            batches = [next(self._batches) for _ in range(num_batches)]
            entry = Entry(self._slot, self._next_batch, num_batches, save_loader(self.loader))
        except Exception as error:
            self._error = error  # batches are lost, and a generator that has raised ends
            raise
        self._next_batch = entry.end
        reading = Reading(entry, batches, checksum(batches), mark(batches[0]))
        self._readings.append(reading)


def mark(batch: Batch) -> str:
    """Return the text that identifies a batch: its checksum and the number of its labels."""
    return f"{checksum([batch])}/{batch[1].numel()}"


def _size_of(mark: str) -> str:
    return mark.partition("/")[2]


def checksum(batches: Iterable[Batch], former: str = "0") -> str:
    """Return the CRC-32 (hex) over the bytes of batches.

    Args:
        former: checksum of the batches before them.
    """
    value = int(former, 16)
    for inputs, labels in batches:
        values = [inputs[name] for name in sorted(inputs)]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        for tensor in (*tensors, labels):
            octets = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            value = zlib.crc32(memoryview(octets), value)  # type: ignore[arg-type]  # a buffer
    return f"{value:08x}"
