# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Agreement among the ranks of one replica group, over the group's own process groups."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

_MASK_BITS = 62  # of numbers that `gather` carries: an int64 has a sign


class Group:
    """The ranks of this replica group. Every method is a collective: all ranks call it in the same order.

    Args:
        where: device of the group's collectives.
        loss_group: process group of the ranks whose losses add up (torchtitan's "loss" mesh); None = this rank alone.
    """

    def __init__(self, where: torch.device, loss_group: dist.ProcessGroup | None) -> None:
        self._where = where
        self._loss_group = loss_group

    @property
    def leads(self) -> bool:
        """Say whether this rank is the group's rank 0; no collective."""
        return dist.get_rank() == 0

    def gather_losses(self, values: Sequence[float]) -> torch.Tensor:
        """Gather `values` of the ranks whose losses add up: float64 [num_ranks, len(values)] on CPU."""
        own = torch.tensor([values], dtype=torch.float64)
        return own if self._loss_group is None else self._gather(own, self._loss_group)

    def gather(self, value: int) -> list[int]:
        """Gather an integer of every rank of the group, in rank order."""
        if dist.get_world_size() == 1:
            return [int(value)]
        own = torch.tensor([value], dtype=torch.int64)
        return [int(v) for v in self._gather(own, dist.group.WORLD).tolist()]

    def union(self, numbers: Collection[int]) -> set[int]:
        """Return the numbers, from 0, that at least one rank of the group has."""
        found: set[int] = set()
        for first in range(0, max(self.gather(max(numbers, default=-1))) + 1, _MASK_BITS):
            span = range(first, first + _MASK_BITS)
            own = sum(1 << (number - first) for number in span if number in numbers)
            mask = functools.reduce(operator.or_, self.gather(own))
            found.update(number for number in span if mask >> (number - first) & 1)
        return found

    def clock(self) -> float:
        """Return the group's time in seconds: that of rank 0's clock, the same on all ranks.

        What a rank decides by its own clock its siblings may decide otherwise, and the ranks of a group part for good.
        """
        return self.gather(int(time.monotonic() * 1e6))[0] / 1e6

    def _gather(self, own: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        own = own.to(self._where, non_blocking=True)
        gathered = own.new_empty((dist.get_world_size(group) * own.shape[0], *own.shape[1:]))
        dist.all_gather_into_tensor(gathered, own, group=group)
        return gathered.cpu()
