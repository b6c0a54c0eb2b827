# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The sums of an exchange: an update owns them, and writes them to the gradients of the parameters."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import compress
from weakref import WeakSet

import torch

from titan_ft import device
from titan_ft.gradients.bucket import Bucket

logger = logging.getLogger(__name__)

_MOMENTS = 2  # of Adam, for each gradient


class Sums:
    """The sums of one exchange, by bucket. The update that is made of them owns them.

    The sums lie in the memory of the exchange's buckets. The next exchange begins in the same memory, so it calls
    `expire` first. A healing group applies the updates that it missed later, so it keeps a copy of each (`keep`).
    Training thread only.

    Args:
        weights: per bucket, one weight for each of its parts; None for a bucket that did not travel.
        room: memory for copies.
        kept: one tensor per bucket, if this object is a copy.
        after: the last exchange's sums, which a device may still be reading.

    Attributes:
        flats: per bucket, a tensor like its `flat`; None for a bucket that did not travel.
        is_kept: this is a copy; the group that applies it contributed nothing to the exchange.
        read: an event after the device's last read of the buckets' memory. Nothing may write there before.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        weights: Sequence[Sequence[float] | None],
        room: Room,
        kept: Sequence[torch.Tensor | None] | None = None,
        after: Sums | None = None,
    ) -> None:
        self._buckets, self._weights, self._room = buckets, weights, room
        self.is_kept = kept is not None
        self.flats = kept if kept is not None else _lend(buckets, weights)
        self.read: torch.Event | None = None if after is None else after.read
        self._is_expired = False

    def expire(self) -> None:
        """Give the buckets their memory back: the next exchange begins in it."""
        self._is_expired, self.flats = True, ()

    def await_read(self) -> None:
        """Order the next write to the buckets after `read`. A GPU waits by itself; a host waits here."""
        device.wait_for(self.read, self._room.where)
        if self._room.where.type == "cpu":
            self.read = None  # It has happened: the calls for the other buckets return at once.

    def keep(self) -> Sums:
        """Return a copy, which outlives the next exchange.

        On a GPU the copy may be unfinished on return. Read it through `write` only, which waits for it.
        """
        assert not self.is_kept, "these sums are a copy"
        assert not self._is_expired, "the next exchange has begun in the memory of these sums"
        kept = self._room.take()
        travelled = [weights is not None for weights in self._weights]
        for bucket, flat in zip(compress(self._buckets, travelled), compress(kept, travelled), strict=True):
            flat.copy_(bucket.flat, non_blocking=True)
        flats = [flat if was else None for flat, was in zip(kept, travelled, strict=True)]
        copy = Sums(self._buckets, self._weights, self._room, flats)
        if self._room.where.type != "cpu":
            copy.read = self.read = device.record_event()
        self._room.note(copy, kept)
        return copy

    def write(self, scale: float | None = None) -> None:
        """Set each parameter's gradient to its sum times `scale`, or by default to the groups' weighted mean.

        A parameter whose bucket did not travel, or that no group used, has no gradient afterwards. Counts get the plain
        sum. Unless this is a copy, the rounding error of this group's gradients is carried to its next exchange.
        """
        assert not self._is_expired, "the next exchange has begun in the memory of these sums"
        on_host = all(bucket.on_host for bucket in self._buckets)
        if on_host and self.is_kept:
            device.synchronize([self.read])
        for bucket, flat, weights in zip(self._buckets, self.flats, self._weights, strict=True):
            if flat is None or weights is None:
                bucket.drop()
                continue
            if not self.is_kept:  # a replay leaves the buckets alone: an exchange may be under way in them
                bucket.apply()
            bucket.write(flat, weights, scale)
        self.read = device.record_event()
        if on_host and self._room.where.type != "cpu":
            # The optimizer reads these gradients on the host. A copy from the device into pinned memory, as FSDP's CPU
            # offload allocates it, does not make the host wait.
            device.synchronize([self.read])


def _lend(buckets: Sequence[Bucket], weights: Sequence[Sequence[float] | None]) -> Sequence[torch.Tensor | None]:
    """Return the memory of the buckets that have travelled."""
    return [None if own is None else bucket.flat for bucket, own in zip(buckets, weights, strict=True)]


class Room:
    """Memory for the copies of sums that a group keeps while it heals. Training thread only.

    Copies stay on the buckets' device where they fit (`keep_on_device`). The others go to host memory, which a thread
    allocates ahead (`prepare`): to pin memory takes time.
    """

    def __init__(self, buckets: Sequence[Bucket], where: torch.device) -> None:
        self._buckets, self.where = buckets, where
        self._ahead: Future[list[torch.Tensor]] | None = None  # host memory for the next copy
        self._on_device = WeakSet[Sums]()  # the copies there that somebody still has
        self._most_on_device = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes that a copy takes at most."""
        return sum(bucket.num_bytes for bucket in self._buckets)

    def keep_on_device(self) -> int:
        """Let copies stay on the device where they fit, until `drop`; return how many.

        Reserve memory for this rank's gradients and Adam's moments, which may not be allocated yet. Use half of the
        rest: a new process group may need the other half. Return 0 if the buckets are in host memory.
        """
        gradient_bytes = sum(bucket.values.numel() for bucket in self._buckets) * torch.float32.itemsize
        free = device.free_bytes(self.where) - (1 + _MOMENTS) * gradient_bytes
        self._most_on_device = max(0, free) // (2 * max(1, self.num_bytes))
        return self._most_on_device

    @property
    def _stays(self) -> bool:
        """True if the next copy stays on the device."""
        return len(self._on_device) < self._most_on_device

    def prepare(self) -> None:
        """Begin to allocate host memory for the next copy, unless that stays on the device."""
        if self._ahead is None and not self._stays:
            self._ahead = device.in_background(self._allocate, "titan_ft_room")

    def _allocate(self) -> list[torch.Tensor]:
        return [device.empty_host(bucket.flat.numel(), bucket.flat.dtype, keep=True) for bucket in self._buckets]

    def take(self) -> list[torch.Tensor]:
        """Return memory for a copy, a tensor like each bucket's."""
        room = self._allocate_on_device() if self._stays else None
        if room is None:
            self.prepare()
            assert self._ahead is not None
            room, self._ahead = self._ahead.result(), None
        return room

    def _allocate_on_device(self) -> list[torch.Tensor] | None:
        """Allocate a copy's memory there; None if the device no longer has the room that `keep_on_device` found."""
        try:
            return [torch.empty_like(bucket.flat) for bucket in self._buckets]
        except torch.OutOfMemoryError:
            logger.warning("the GPU has no room left for queued sums: they are kept in host memory")
            self._most_on_device = 0
            return None

    def note(self, copy: Sums, memory: Sequence[torch.Tensor]) -> None:
        """Count a copy that stays on the device for as long as it is there."""
        if any(flat.device.type != "cpu" for flat in memory):
            self._on_device.add(copy)

    def drop(self) -> None:
        """Free the memory that was allocated ahead, and that of past copies: no more copies will be made."""
        if self._ahead is not None:
            self._ahead.add_done_callback(_give_up)
        self._ahead, self._most_on_device = None, 0
        device.release_host_memory()


def _give_up(room: Future[list[torch.Tensor]]) -> None:
    """Give memory back that was allocated for a copy which nobody makes."""
    if room.exception() is None:
        room.result().clear()  # the thread that made it may hold the list for longer
    device.release_host_memory()
