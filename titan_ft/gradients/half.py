# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients in bfloat16: the encoding of a bucket with `exchange_dtype = "bfloat16"`.

Each of n members adds up one n-th of the values. It receives this part from every other member,
rounded to bfloat16, and adds the parts up in fp32 in the members' order. Then it sends the sum,
rounded once more, to all members. So all members have the same bytes, joiners included, and values
are rounded twice for any number of members. Around a ring in bfloat16, each hop would round once.

Rounding to nearest changes a value by at most u = 2**-8 of it. So the error of a sum of g_i is at
most u (sum |g_i| + |sum of the rounded g_i|). This is less than 2**-7 (1 + u) sum |g_i|. The
rounding of fp32 comes on top.
"""

from __future__ import annotations

import torch


def part_numel(numel: int, num_members: int) -> int:
    """Return how many of `numel` values one member adds up: an even number.

    All parts have this size. The last ones are padded with zeros.
    """
    return 2 * max(-(-numel // (2 * num_members)), 1)


def count_sent_bytes(numel: int, num_exact: int, num_members: int) -> int:
    """Return the bytes that each member sends for one sum.

    Args:
        numel: number of values that are rounded.
        num_exact: number of values that are not.
    """
    part_bytes = 2 * part_numel(numel, num_members)
    exact_bytes = 4 * num_exact
    bytes_per_member = (part_bytes + exact_bytes) + part_bytes  # to add up, and the sum back
    return (num_members - 1) * bytes_per_member


def cut(values: torch.Tensor, exact: torch.Tensor, num_members: int) -> torch.Tensor:
    """Return the row of bytes that each member gets: its part of `values`, and all of `exact`.

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
    octets, exact = received.split([received.shape[1] - 4 * num_exact, 4 * num_exact], 1)
    total = torch.zeros(octets.shape[1] // 2, dtype=torch.float32, device=received.device)
    exact_total = torch.zeros(num_exact, dtype=torch.float32, device=received.device)
    for values, numbers in zip(octets.contiguous(), exact.contiguous(), strict=True):
        total += values.view(torch.bfloat16)
        exact_total += numbers.view(torch.float32)
    return total.to(torch.bfloat16), exact_total
