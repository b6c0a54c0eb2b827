# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients in bfloat16: the encoding of a bucket with `exchange_dtype = "bfloat16"`.

A *bucket* is a flat tensor with the gradients of some parameters (`bucket.py`). The n members of an
exchange sum it as follows:

1. Each member rounds its gradients to bfloat16, and sends the k-th of n parts to member k (`cut`,
   and an all-to-all).
2. Each member adds up the parts that it got, in fp32 and in the members' order (`add_up`).
3. It rounds the sums to bfloat16, and sends them to all members (an all-gather).

So all members have the same bytes, and each value is rounded twice for any number of members. In an
all-reduce around a ring, each of the n - 1 hops would round once.

Rounding to nearest changes a value by at most u = 2**-8 of it. So the error of a sum of g_i is at
most u (sum |g_i| + |sum of the rounded g_i|). This is less than 2**-7 (1 + u) sum |g_i|. The
rounding of fp32 adds to this error.
"""

from __future__ import annotations

import math

import torch


def part_numel(numel: int, num_members: int) -> int:
    """Return how many of `numel` values one member adds up.

    All parts have this size. The last parts are padded with zeros. The number is even, so that a
    part has a multiple of 4 bytes: in `cut`, fp32 values follow it.
    """
    return 2 * max(math.ceil(numel / (2 * num_members)), 1)


def count_sent_bytes(numel: int, num_exact: int, num_members: int) -> int:
    """Return the bytes that each member sends for one sum.

    Args:
        numel: number of values that are rounded.
        num_exact: number of values that are not rounded.
    """
    part_bytes = 2 * part_numel(numel, num_members)
    exact_bytes = 4 * num_exact
    to_each_member = part_bytes + exact_bytes  # in the all-to-all
    sums_to_each_member = part_bytes  # in the all-gather
    return (num_members - 1) * (to_each_member + sums_to_each_member)


def cut(values: torch.Tensor, exact: torch.Tensor, num_members: int) -> torch.Tensor:
    """Return the row of bytes for each member: its part of `values`, and all of `exact`.

    Every member adds up all exact values, because they are few.

    Args:
        values: 1D, bfloat16.
        exact: 1D, fp32.

    Returns:
        uint8, shape [num_members, bytes].
    """
    numel = num_members * part_numel(values.numel(), num_members)
    parts = torch.nn.functional.pad(values, (0, numel - values.numel())).view(num_members, -1)
    return torch.cat([parts.view(torch.uint8), exact.view(torch.uint8).expand(num_members, -1)], 1)


def add_up(received: torch.Tensor, num_exact: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up the rows that all members sent to this one, in their order.

    Returns:
        The sums of this member's part (bfloat16), and of the exact values (fp32).
    """
    exact_bytes = 4 * num_exact
    part_bytes = received.shape[1] - exact_bytes
    parts, exacts = received.split([part_bytes, exact_bytes], 1)
    total = torch.zeros(part_bytes // 2, dtype=torch.float32, device=received.device)
    exact_total = torch.zeros(num_exact, dtype=torch.float32, device=received.device)
    for part, exact in zip(parts.contiguous(), exacts.contiguous(), strict=True):
        total += part.view(torch.bfloat16)
        exact_total += exact.view(torch.float32)
    return total.to(torch.bfloat16), exact_total
