# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The sums of an exchange, and memory for copies of them. See docs/exchange.md."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from weakref import WeakSet

import torch

from titan_ft import device
from titan_ft.gradients.bucket import Bucket

logger = logging.getLogger(__name__)

_MOMENTS = 2  # of Adam, for each gradient


class Sums:
    """The sums of one exchange, by bucket. They belong to the update that is made of them.

    The sums lie in the memory of the exchange's buckets. The next exchange uses the same memory, so
    `GradientExchange` calls `expire` before it. A group that heals applies an update later, so it
    makes a copy of the sums (`copy`).

    Training thread only.

    Args:
        weights: for each bucket, one weight per part; None = the bucket was not exchanged.
        copy_memory: memory for copies.
        copied: one tensor per bucket, if this object is a copy.
        previous: the last exchange's sums. A device may still be reading them.

    Attributes:
        flats: for each bucket, a tensor like its `flat`; None = the bucket was not exchanged.
        is_copy: this is a copy. The group that applies it contributed nothing to the exchange.
        last_read: an event after the device's last read of the buckets' memory; None = nothing
            reads it. Nothing may write to the memory before that event.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        weights: Sequence[Sequence[float] | None],
        copy_memory: CopyMemory,
        copied: Sequence[torch.Tensor | None] | None = None,
        previous: Sums | None = None,
    ) -> None:
        self._buckets = buckets
        self._weights = weights
        self._copy_memory = copy_memory
        self.is_copy = copied is not None
        self.flats = _find_flats(buckets, weights) if copied is None else copied
        self.last_read: torch.Event | None = None if previous is None else previous.last_read
        self._is_expired = False

    def expire(self) -> None:
        """Give the buckets their memory back. The next exchange uses it."""
        self._is_expired = True
        self.flats = ()

    def await_last_read(self) -> None:
        """Order the next write to the buckets after `last_read`.

        A GPU waits by itself. The host waits in this call.
        """
        where = self._copy_memory.where
        device.wait_for(self.last_read, where)
        if where.type == "cpu":
            self.last_read = None  # The read is over: the next calls return at once.

    def copy(self) -> Sums:
        """Return a copy, which outlives the next exchange.

        On a GPU the copy may be unfinished on return. Read it through `write` only, which waits for
        it.
        """
        assert not self.is_copy, "these sums are a copy"
        assert not self._is_expired, "the next exchange has begun in the memory of these sums"
        memory = self._copy_memory.lend()
        copied: list[torch.Tensor | None] = []
        for bucket, flat, weights in zip(self._buckets, memory, self._weights, strict=True):
            if weights is None:
                copied.append(None)
                continue
            flat.copy_(bucket.flat, non_blocking=True)
            copied.append(flat)
        copy = Sums(self._buckets, self._weights, self._copy_memory, copied)
        if self._copy_memory.where.type != "cpu":
            copy.last_read = self.last_read = device.record_event()
        self._copy_memory.count_copy(copy, memory)
        return copy

    def write(self, scale: float | None = None) -> None:
        """Set each gradient to its sum times `scale`; None = to the groups' weighted mean.

        A parameter has no gradient afterwards if its bucket was not exchanged, or if no group used
        the parameter. Counts get the sum itself. Unless this is a copy, the rounding error of this
        group's gradients is carried to its next exchange.
        """
        assert not self._is_expired, "the next exchange has begun in the memory of these sums"
        on_host = all(bucket.on_host for bucket in self._buckets)
        if on_host and self.is_copy:
            device.synchronize([self.last_read])
        for bucket, flat, weights in zip(self._buckets, self.flats, self._weights, strict=True):
            if flat is None or weights is None:
                bucket.skip_update()
                continue
            # During a replay from a copy, the buckets may be in an exchange.
            if not self.is_copy:
                bucket.mark_applied()
            bucket.write(flat, weights, scale)
        self.last_read = device.record_event()
        if on_host and self._copy_memory.where.type != "cpu":
            # The optimizer reads these gradients on the host. A copy from the device into pinned
            # memory, as FSDP's CPU offload allocates it, does not make the host wait.
            device.synchronize([self.last_read])


def _find_flats(
    buckets: Sequence[Bucket],
    weights: Sequence[Sequence[float] | None],
) -> Sequence[torch.Tensor | None]:
    """Return the memory of the buckets that were exchanged."""
    flats: list[torch.Tensor | None] = []
    for bucket, bucket_weights in zip(buckets, weights, strict=True):
        flats.append(None if bucket_weights is None else bucket.flat)
    return flats


class CopyMemory:
    """Memory for the copies of sums that a group keeps while it heals.

    `Heal` calls `keep_on_device`, `prepare` and `drop`. `Sums.copy` calls `lend` and `count_copy`.
    All of them run on the training thread.

    A copy stays on the buckets' device if it fits (`keep_on_device`). Otherwise it goes to pinned
    host memory. Pinning takes time, so a thread allocates this memory ahead (`prepare`).
    """

    def __init__(self, buckets: Sequence[Bucket], where: torch.device) -> None:
        self._buckets = buckets
        self.where = where
        self._ahead: Future[list[torch.Tensor]] | None = None  # host memory for the next copy
        self._on_device = WeakSet[Sums]()  # copies on the device that are still referenced
        self._max_on_device = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of a copy of all buckets."""
        return sum(bucket.num_bytes for bucket in self._buckets)

    def keep_on_device(self) -> int:
        """Let copies stay on the device where they fit, until `drop`.

        Memory is reserved for this rank's gradients and Adam's moments, which may not be allocated
        yet. Copies use half of the rest: a new process group may need the other half.

        Returns:
            The number of copies that fit; 0 if the buckets are in host memory.
        """
        num_values = sum(bucket.values.numel() for bucket in self._buckets)
        reserved_bytes = (1 + _MOMENTS) * num_values * torch.float32.itemsize
        free_bytes = max(0, device.free_bytes(self.where) - reserved_bytes)
        self._max_on_device = free_bytes // (2 * max(1, self.num_bytes))
        return self._max_on_device

    @property
    def _next_stays_on_device(self) -> bool:
        """True if the next copy stays on the device."""
        return len(self._on_device) < self._max_on_device

    def prepare(self) -> None:
        """Start to allocate host memory for the next copy, unless the copy stays on the device."""
        if self._ahead is None and not self._next_stays_on_device:
            self._ahead = device.in_background(self._allocate, "titan_ft_room")

    def _allocate(self) -> list[torch.Tensor]:
        flats = [bucket.flat for bucket in self._buckets]
        return [device.empty_host(flat.numel(), flat.dtype, keep=True) for flat in flats]

    def lend(self) -> list[torch.Tensor]:
        """Return memory for a copy: one tensor per bucket, like the bucket's `flat`.

        The memory is free again when nothing refers to it.
        """
        if self._next_stays_on_device:
            memory = self._allocate_on_device()
            if memory is not None:
                return memory
        self.prepare()
        assert self._ahead is not None
        memory = self._ahead.result()
        self._ahead = None
        return memory

    def _allocate_on_device(self) -> list[torch.Tensor] | None:
        """Allocate memory for a copy on the device; None = the device no longer has enough."""
        try:
            return [torch.empty_like(bucket.flat) for bucket in self._buckets]
        except torch.OutOfMemoryError:
            logger.warning("the GPU has no room left for queued sums: they are kept in host memory")
            self._max_on_device = 0
            return None

    def count_copy(self, copy: Sums, memory: Sequence[torch.Tensor]) -> None:
        """Count a copy on the device for as long as something refers to it."""
        if any(flat.device.type != "cpu" for flat in memory):
            self._on_device.add(copy)

    def drop(self) -> None:
        """Free all memory at the end of a heal: no more copies are made."""
        if self._ahead is not None:
            self._ahead.add_done_callback(_free)
        self._ahead = None
        self._max_on_device = 0
        device.release_host_memory()


def _free(memory: Future[list[torch.Tensor]]) -> None:
    """Free memory that was allocated ahead for a copy which is not made."""
    if memory.exception() is None:
        memory.result().clear()  # the thread that allocated it may hold the list for longer
    device.release_host_memory()
