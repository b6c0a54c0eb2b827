# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Shape of a control tree: rank 0 is the root, and each rank has up to `FAN_OUT` children."""

from __future__ import annotations

FAN_OUT = 16
"""Children of a rank. Four hops reach rank 0 from each of 8,192 ranks."""


def find_parent(rank: int, fan_out: int = FAN_OUT) -> int | None:
    """Return the parent of a rank; None for rank 0."""
    if rank == 0:
        return None
    return (rank - 1) // fan_out


def find_children(rank: int, num_ranks: int, fan_out: int = FAN_OUT) -> range:
    """Return the children of a rank."""
    first = rank * fan_out + 1
    return range(min(first, num_ranks), min(first + fan_out, num_ranks))


def find_depth(num_ranks: int, fan_out: int = FAN_OUT) -> int:
    """Return the number of hops from rank 0 to the farthest rank."""
    depth = 0
    parent = find_parent(num_ranks - 1, fan_out)
    while parent is not None:
        depth += 1
        parent = find_parent(parent, fan_out)
    return depth
