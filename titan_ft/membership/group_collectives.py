# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Collectives among the ranks of one replica group, over the group's own process groups.

The ranks use them to agree on a fact that each rank knows differently, such as the time.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

_MASK_BITS = 62  # bits that `union` uses of an int64, which has a sign


class GroupCollectives:
    """Collectives among the ranks of this replica group.

    The trainer creates it. The training thread calls every method, and all ranks of the group call
    the same methods in the same order. If a rank is lost, the collective fails, and the process
    ends. For agreements on other threads there is the control tree (`control_tree.py`).

    Args:
        where: device of the collectives.
        loss_group: process group of the ranks whose losses add up (torchtitan's "loss" mesh); None
            = this rank alone.
    """

    def __init__(self, where: torch.device, loss_group: dist.ProcessGroup | None) -> None:
        self._where = where
        self._loss_group = loss_group

    @property
    def leads(self) -> bool:
        """True on the group's rank 0. Not a collective."""
        return dist.get_rank() == 0

    def gather_losses(self, values: Sequence[float]) -> torch.Tensor:
        """Gather values of the ranks whose losses add up.

        Returns:
            float64 [num_ranks, len(values)] on the CPU.
        """
        own = torch.tensor([values], dtype=torch.float64)
        if self._loss_group is None:
            return own
        return self._gather(own, self._loss_group)

    def gather(self, value: int) -> list[int]:
        """Gather an integer of every rank of the group, in rank order."""
        if dist.get_world_size() == 1:
            return [int(value)]
        own = torch.tensor([value], dtype=torch.int64)
        return [int(v) for v in self._gather(own, dist.group.WORLD).tolist()]

    def union(self, numbers: Collection[int]) -> set[int]:
        """Return the numbers that at least one rank has. Numbers are >= 0.

        Each gathered integer is a mask: its bits stand for `_MASK_BITS` numbers in a row.
        """
        found: set[int] = set()
        largest = max(self.gather(max(numbers, default=-1)))
        for first in range(0, largest + 1, _MASK_BITS):
            span = range(first, first + _MASK_BITS)
            mask = 0
            for number in span:
                if number in numbers:
                    mask |= 1 << (number - first)
            all_masks = self.gather(mask)
            for number in span:
                bit = 1 << (number - first)
                if any(other & bit for other in all_masks):
                    found.add(number)
        return found

    def clock(self) -> float:
        """Return the seconds of rank 0's monotonic clock, the same on all ranks.

        Decisions about time use this clock. If each rank used its own clock, two ranks could decide
        differently and call different collectives.
        """
        return self.gather(int(time.monotonic() * 1e6))[0] / 1e6

    def _gather(self, own: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        own = own.to(self._where, non_blocking=True)
        num_rows = dist.get_world_size(group) * own.shape[0]
        gathered = own.new_empty((num_rows, *own.shape[1:]))
        dist.all_gather_into_tensor(gathered, own, group=group)
        return gathered.cpu()
