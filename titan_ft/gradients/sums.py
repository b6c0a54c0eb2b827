# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The sums of an exchange, and memory for copies of them.

An exchange leaves the sums of the groups' gradients in its buckets. If they become an update of the
model, the training thread writes them to the gradients (`Sums.write`), and the optimizer steps.

The next exchange overwrites the buckets. A group that heals cannot apply the update before that: it
still fetches the state that the update belongs to. So it copies the sums (`Sums.copy`), queues the
copies, and writes them when it has the state. `CopyMemory` provides the memory for these copies.

See docs/exchange.md.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from weakref import WeakSet

import torch

from titan_ft import device
from titan_ft.gradients.bucket import Bucket

logger = logging.getLogger(__name__)

_MOMENTS = 2  # Adam has two moments for each gradient


class Sums:
    """The sums of one exchange, by bucket.

    They are either in the memory of the buckets, or in a copy. In the buckets, they are valid until
    `GradientExchange` launches the next exchange (`expire`). A copy stays valid.

    Training thread only.

    Args:
        weights: for each bucket, one weight per part, summed over the groups; None = the bucket was
            not exchanged.
        copy_memory: memory for copies.
        copied: one tensor per bucket, if this object is a copy.
        previous: the last exchange's sums. A GPU may still be reading them.

    Attributes:
        flats: for each bucket, the tensor with its sums; None = the bucket was not exchanged.
        is_copy: this object is a copy. Only a group that heals makes copies, and it contributed
            nothing to the exchange.
        last_read: event after the GPU's last read of the memory of these sums; None = no read is
            under way. Nothing may write to the memory before this event.
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
        """Make these sums invalid, because the next exchange uses the buckets' memory."""
        self._is_expired = True
        self.flats = ()

    def await_last_read(self) -> None:
        """Let the next write to the buckets wait for `last_read`.

        If the buckets are on a GPU, the GPU waits. If they are in host memory, this call blocks.
        """
        where = self._copy_memory.where
        device.wait_for(self.last_read, where)
        if where.type == "cpu":
            self.last_read = None  # the read is over, so later calls return at once

    def copy(self) -> Sums:
        """Return a copy, which stays valid after the next exchange.

        On a GPU the copy may be incomplete when this method returns. Read it through `write` only,
        which waits for it.
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
        """Write the sums to the gradients and to the counts of the model.

        A parameter has no gradient afterwards if its bucket was not exchanged, or if no group used
        the parameter. Unless this is a copy, the rounding error of this group's gradients is
        carried over to its next exchange.

        Args:
            scale: factor from the sums to the gradients; None = set each gradient to the groups'
                weighted mean. Counts are not scaled.
        """
        assert not self._is_expired, "the next exchange has begun in the memory of these sums"
        offloads = all(bucket.on_host for bucket in self._buckets)  # or there is no GPU
        if offloads and self.is_copy:
            # The copy into host memory may be incomplete, and the host reads it now.
            device.synchronize([self.last_read])
        for bucket, flat, weights in zip(self._buckets, self.flats, self._weights, strict=True):
            if flat is None or weights is None:
                bucket.skip_update()
                continue
            # The sums of a copy are not in the bucket, which may be in the next exchange by now.
            if not self.is_copy:
                bucket.mark_applied()
            bucket.write(flat, weights, scale)
        self.last_read = device.record_event()
        if offloads and self._copy_memory.where.type != "cpu":
            # The optimizer reads the gradients on the host. FSDP's CPU offload has them in pinned
            # memory, so the copies from the GPU have not made the host wait. Wait now.
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

    A copy stays on the buckets' device if it fits (`keep_on_device`). Otherwise it goes to pinned
    host memory. Pinning takes time, so a thread of its own allocates this memory before it is
    needed (`prepare`).

    Threads: the training thread calls all methods. `Heal` calls `keep_on_device`, `prepare` and
    `drop`, and `Sums.copy` calls `lend` and `count_copy`.
    """

    def __init__(self, buckets: Sequence[Bucket], where: torch.device) -> None:
        self._buckets = buckets
        self.where = where
        # Host memory for the next copy, while a thread allocates it and afterwards.
        self._prepared: Future[list[torch.Tensor]] | None = None
        # The copies on the device. A copy leaves the set when nothing refers to it any more.
        self._on_device = WeakSet[Sums]()
        self._max_on_device = 0  # number of copies

    @property
    def num_bytes(self) -> int:
        """Bytes of a copy of all buckets."""
        return sum(bucket.num_bytes for bucket in self._buckets)

    def keep_on_device(self) -> int:
        """From now on, until `drop`, let copies stay on the device as long as they fit.

        This rank's gradients and Adam's moments may not be allocated yet, so their memory does not
        count as free. Copies use half of the free memory, because a new process group may need the
        other half.

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
        """True if the device has room for the next copy."""
        return len(self._on_device) < self._max_on_device

    def prepare(self) -> None:
        """Start to allocate host memory for the next copy, unless the copy stays on the device."""
        if self._prepared is None and not self._next_stays_on_device:
            self._prepared = device.in_background(self._allocate, "titan_ft_room")

    def _allocate(self) -> list[torch.Tensor]:
        flats = [bucket.flat for bucket in self._buckets]
        return [device.empty_host(flat.numel(), flat.dtype, keep=True) for flat in flats]

    def lend(self) -> list[torch.Tensor]:
        """Return memory for a copy: one tensor per bucket, with the size of the bucket's `flat`.

        The memory is free again when nothing refers to it. Waits for the thread of `prepare`.
        """
        if self._next_stays_on_device:
            memory = self._allocate_on_device()
            if memory is not None:
                return memory
        self.prepare()
        assert self._prepared is not None
        memory = self._prepared.result()
        self._prepared = None
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
        """Count a copy as long as something refers to it, if its memory is on the device."""
        if any(flat.device.type != "cpu" for flat in memory):
            self._on_device.add(copy)

    def drop(self) -> None:
        """Free the memory that `lend` has not given away. Called at the end of a heal."""
        if self._prepared is not None:
            self._prepared.add_done_callback(_free)
        self._prepared = None
        self._max_on_device = 0
        device.release_host_memory()


def _free(memory: Future[list[torch.Tensor]]) -> None:
    """Free memory that `prepare` has allocated, and no copy uses."""
    if memory.exception() is None:
        # Empty the list: the thread that made it may refer to it for longer.
        memory.result().clear()
    device.release_host_memory()
