# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The feed: reads batches of slots, on from where the ledger ends.

What was read and not committed is kept and used again. A loader's state is that of torchdata's
`StatefulDataLoader`, taken after each step's last batch: nothing that was consumed is read again.

A loader that is opened at a state may read other batches than one that was never closed. So each entry
says the checksum of the batch that follows on it, as far as that was read ahead, and whoever opens a
slot compares the first batch. An event says what came of it.

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

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]  # inputs, labels: as torchtitan's loaders yield them


@dataclass
class Reading:
    """The batches of one slot for one step.

    Attributes:
        entry: which they are, and the loader's state after them.
        checksum: CRC-32 over the bytes of their inputs and labels, hex: the same batches have the same.
        first: the first batch's `mark`.
    """

    entry: Entry
    batches: list[Batch]
    checksum: str
    first: str = ""

    def describe(self) -> Batches:
        """Return its description for events."""
        entry = self.entry
        return Batches(
            slot=entry.slot, first_batch=entry.first_batch, num_batches=entry.num_batches, checksum=self.checksum
        )


def merge(readings: Iterable[Reading]) -> list[Reading]:
    """Return what one update is made of: the readings of each slot, which follow on each other, as one.

    Without their batches: those of a long round would fill the memory.
    """
    of_slots: dict[int, Reading] = {}
    for reading in readings:
        slot = reading.entry.slot
        former = of_slots.get(slot)
        if former is None:
            of_slots[slot] = replace(reading, batches=[])
        else:
            of_slots[slot] = _join(former, reading)
    return list(of_slots.values())


def _join(former: Reading, reading: Reading) -> Reading:
    first, last = former.entry, reading.entry
    entry = replace(last, first_batch=first.first_batch, num_batches=first.num_batches + last.num_batches)
    return replace(former, entry=entry, checksum=checksum(reading.batches, former.checksum))


class Feed:
    """Reads for one rank.

    Args:
        ledger: knows the next batch of each slot.
        build: builds this rank's loader of a slot, from the slot's beginning.
        iterate: yields batches of a loader (torchtitan's `Trainer.batch_generator`).
        emit: takes the event of each opening of a slot.
    """

    def __init__(
        self,
        ledger: Ledger,
        build: Callable[[int], Any],
        iterate: Callable[[Iterable[Any]], Iterator[Batch]],
        emit: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._ledger, self._build, self._iterate, self._emit = ledger, build, iterate, emit
        self._readers: dict[int, _Reader] = {}

    def read(self, slot: int, num_batches: int, behind: int = 0) -> Reading:
        """Return the next `num_batches` of `slot` after those that are committed, and after `behind` more.

        Raises:
            DataloaderExhaustedError: the data is finite and at its end.
            LoaderStateError: the loader's state cannot be unpacked by other groups.
        """
        end = self._ledger.end(slot) + behind
        reader = self._readers.get(slot)
        if reader is not None and reader.can_go_on_at(end):
            return reader.read(end, num_batches)
        loader = self._open(slot, None if reader is None else reader.loader)
        reader = self._readers[slot] = _Reader(slot, end, loader, self._iterate(loader))
        reading = reader.read(end, num_batches)
        self._report_opening(slot, reading)
        return reading

    def read_ahead(self, readings: Iterable[Reading]) -> None:
        """Read what follows on these, the last of their slots, before it is asked for: while the device is at them.

        An error, also that the data is at its end, is raised by the `read` that asks for it.
        """
        for reading in readings:
            self._readers[reading.entry.slot].read_ahead(reading.entry.num_batches)

    def drop(self, slots: Collection[int]) -> None:
        """Close the loaders of all slots but `slots`."""
        for slot in [slot for slot in self._readers if slot not in slots]:
            del self._readers[slot]

    def _open(self, slot: int, loader: Any) -> Any:
        state = self._ledger.state(slot)
        if loader is None or state is None:  # a loader that has been read from cannot go back to its beginning
            loader = self._build(slot)
        if state is not None:
            load_loader(loader, state)
        return loader

    def _report_opening(self, slot: int, reading: Reading) -> None:
        """Emit whether the first batch is the one that follows on the committed ones."""
        first_batch, expected = reading.entry.first_batch, self._ledger.following(slot)
        exact: bool | None = None
        # A batch of another size is no sign: a resume may have changed the batch or the sequences.
        if _size_of(expected) == _size_of(reading.first) and first_batch == self._ledger.end(slot):
            exact = reading.first == expected
        if exact is False:
            logger.error(
                "slot %d was opened at batch %d, and this batch is not the one that follows there: the data loader "
                "does not go on where its state was saved. Batches are lost or repeated; titan-ft check --reread "
                "finds out which",
                slot,
                first_batch,
            )
        shard, num_shards = self._ledger.shard_of(slot)
        self._emit(DataOpened(slot=slot, shard=shard, num_shards=num_shards, first_batch=first_batch, exact=exact))


class _Reader:
    """One slot's open loader; `next_batch` is the number of the batch that it yields next."""

    def __init__(self, slot: int, next_batch: int, loader: Any, batches: Iterator[Batch]) -> None:
        self.loader = loader
        self._slot, self._next_batch, self._batches = slot, next_batch, batches
        self._readings: list[Reading] = []
        """The last one that was asked for, and what was read ahead of it."""
        self._error: Exception | None = None

    def can_go_on_at(self, end: int) -> bool:
        return end == self._next_batch or any(reading.entry.first_batch == end for reading in self._readings)

    def read(self, end: int, num_batches: int) -> Reading:
        while self._readings and self._readings[0].entry.first_batch != end:
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
        except Exception:  # noqa: BLE001  # raised again by the read that asks for these batches
            return
        current.entry = replace(current.entry, following=self._readings[-1].first)

    def _read_on(self, num_batches: int) -> None:
        if self._error is not None:
            raise self._error
        try:
            batches = [next(self._batches) for _ in range(num_batches)]
            entry = Entry(self._slot, self._next_batch, num_batches, save_loader(self.loader))
        except Exception as error:
            self._error = error  # batches are gone, and a generator that has raised ends
            raise
        self._next_batch = entry.end
        self._readings.append(Reading(entry, batches, checksum(batches), mark(batches[0])))


def mark(batch: Batch) -> str:
    """Return what a batch is recognized by: its checksum and the number of its labels."""
    return f"{checksum([batch])}/{batch[1].numel()}"


def _size_of(mark: str) -> str:
    return mark.partition("/")[2]


def checksum(batches: Iterable[Batch], former: str = "0") -> str:
    """Return the CRC-32 (hex) over the bytes of some batches, behind others whose checksum is `former`."""
    value = int(former, 16)
    for inputs, labels in batches:
        tensors = [inputs[name] for name in sorted(inputs) if isinstance(inputs[name], torch.Tensor)]
        for tensor in (*tensors, labels):
            octets = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            value = zlib.crc32(memoryview(octets.numpy()), value)  # type: ignore[arg-type]  # numpy arrays are buffers
    return f"{value:08x}"
