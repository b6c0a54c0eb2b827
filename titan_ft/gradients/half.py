# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Gradients in bfloat16: what travels of a bucket with `exchange_dtype = "bfloat16"`.

Each of n members adds up an n-th of the values: it gets the others' parts of it, rounded to bfloat16, adds them up in
fp32 in their order, and sends the sum, rounded once more, to all. So all have the same bytes, a joiner too, and
nothing is rounded more often with more members, as it would be on the way around a ring in bfloat16.

Rounding to nearest leaves at most u = 2**-8 of a value. So a sum of g_i is off by u (sum |g_i| + |sum of the rounded
g_i|) at most, which is less than 2**-7 (1 + u) sum |g_i|, besides what fp32 itself rounds.
"""

from __future__ import annotations

import torch


def part_numel(numel: int, num_members: int) -> int:
    """Return how many of `numel` values one member adds up: an even number, so that the last ones may get zeros."""
    return 2 * max(-(-numel // (2 * num_members)), 1)


def wire_bytes(numel: int, num_exact: int, num_members: int) -> int:
    """Return what each member sends for all to have the sums of `numel` values and `num_exact` that are not rounded."""
    part = 2 * part_numel(numel, num_members)
    return (num_members - 1) * (part + 4 * num_exact + part)


def cut(values: torch.Tensor, exact: torch.Tensor, num_members: int) -> torch.Tensor:
    """Return what each member gets of `values` (1D, bfloat16) and `exact` (1D, fp32), uint8 [num_members, bytes].

    It is the member's part of the values, and all that is exact.
    """
    numel = num_members * part_numel(values.numel(), num_members)
    parts = torch.nn.functional.pad(values, (0, numel - values.numel())).view(num_members, -1)
    return torch.cat([parts.view(torch.uint8), exact.view(torch.uint8).expand(num_members, -1)], 1)


def add_up(received: torch.Tensor, num_exact: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of what all members sent to this one, in their order: its part (bfloat16), and the exact ones."""
    octets, exact = received.split([received.shape[1] - 4 * num_exact, 4 * num_exact], 1)
    total = torch.zeros(octets.shape[1] // 2, dtype=torch.float32, device=received.device)
    exact_total = torch.zeros(num_exact, dtype=torch.float32, device=received.device)
    for values, numbers in zip(octets.contiguous(), exact.contiguous(), strict=True):
        total += values.view(torch.bfloat16)
        exact_total += numbers.view(torch.float32)
    return total.to(torch.bfloat16), exact_total
