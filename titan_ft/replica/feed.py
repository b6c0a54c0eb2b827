# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The feed: reads batches of slots, on from where the ledger ends.

What was read and not committed is kept and used again. A loader's state is that of torchdata's `StatefulDataLoader`,
taken after each step's last batch: nothing that was consumed is read again. It is packed by `torch.save` and unpacked
by `torch.load(weights_only=True)`, because it comes from other groups: plain values and tensors only.
"""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_ft.replica.ledger import Entry, Ledger
from titan_ft.run.events import Batches

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]  # inputs, labels: as torchtitan's loaders yield them


@dataclass(frozen=True)
class Reading:
    """The batches of one slot for one step.

    `checksum` is a CRC-32 over the bytes of their inputs and labels: the same batch read again must have the same.
    """

    entry: Entry
    batches: list[Batch]
    checksum: str

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
        of_slots[slot] = Reading(reading.entry, [], reading.checksum) if former is None else _join(former, reading)
    return list(of_slots.values())


def _join(former: Reading, reading: Reading) -> Reading:
    first, last = former.entry, reading.entry
    entry = Entry(first.slot, first.first_batch, first.num_batches + last.num_batches, last.state)
    return Reading(entry, [], _checksum(reading.batches, int(former.checksum, 16)))


class Feed:
    """Reads for one rank.

    Args:
        ledger: knows the next batch of each slot.
        build: builds this rank's loader of a slot, from the slot's beginning.
        iterate: yields batches of a loader (torchtitan's `Trainer.batch_generator`).
    """

    def __init__(
        self, ledger: Ledger, build: Callable[[int], Any], iterate: Callable[[Iterable[Any]], Iterator[Batch]]
    ) -> None:
        self._ledger, self._build, self._iterate = ledger, build, iterate
        self._readers: dict[int, _Reader] = {}

    def read(self, slot: int, num_batches: int, behind: int = 0) -> Reading:
        """Return the next `num_batches` of `slot` after those that are committed, and after `behind` more.

        Raises:
            DataloaderExhaustedError: the data is finite and at its end.
        """
        end = self._ledger.end(slot) + behind
        reader = self._readers.get(slot)
        if reader is None or not reader.can_go_on_at(end):
            loader = self._open(slot, None if reader is None else reader.loader)
            reader = self._readers[slot] = _Reader(slot, end, loader, self._iterate(loader))
        return reader.read(end, num_batches)

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
        if len(self._readings) == 1:
            with contextlib.suppress(Exception):  # told to whoever asks
                self._read_on(num_batches)

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
        self._readings.append(Reading(entry, batches, _checksum(batches)))


def save_loader(loader: Any) -> bytes:
    """Pack a loader's state.

    Raises:
        TypeError: it is of types that another group could not unpack safely.
    """
    # torchtitan's loader wraps the state in a pickle of its own, named after the rank; torchdata's is plain.
    state = StatefulDataLoader.state_dict(loader) if isinstance(loader, StatefulDataLoader) else loader.state_dict()
    file = io.BytesIO()
    torch.save(state, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def load_loader(loader: Any, packed: bytes) -> None:
    """Let a loader go on where `save_loader` found the other one."""
    state = torch.load(io.BytesIO(packed), weights_only=True)
    if isinstance(loader, StatefulDataLoader):
        StatefulDataLoader.load_state_dict(loader, state)
    else:
        loader.load_state_dict(state)


def _checksum(batches: Iterable[Batch], value: int = 0) -> str:
    for inputs, labels in batches:
        tensors = [inputs[name] for name in sorted(inputs) if isinstance(inputs[name], torch.Tensor)]
        for tensor in (*tensors, labels):
            octets = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            value = zlib.crc32(memoryview(octets.numpy()), value)  # type: ignore[arg-type]  # numpy arrays are buffers
    return f"{value:08x}"
