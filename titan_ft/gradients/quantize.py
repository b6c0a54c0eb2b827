# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Changes in 8 bits: the encoding of a bucket with `should_quantize`, and its rounding error.

With DiLoCo the groups exchange the changes of their weights over several steps. A *bucket* is a
flat tensor with the changes of some parameters (`bucket.py`). To send it in 8 bits:

1. `Residual.add_to` adds the rounding error of the last exchange to the changes.
2. `encode` cuts the values into blocks of 256. Each block has a scale in fp32. Each value becomes
   the nearest whole multiple of its scale, from -127 to 127. The result is the *payload*.
3. The members of the exchange gather the payloads of all members.
4. `add_up` decodes the payloads, and adds them up in the same order everywhere. So all members have
   the same bytes. (Around a ring, each hop would round the sum once more.)

The rounding error is kept for the next change, so no part of a change is lost for good. This is
called error feedback: 1-bit SGD, Seide et al., Interspeech 2014. arXiv 1901.09847 shows why it
converges.
"""

from __future__ import annotations

import math

import torch

BLOCK = 256
"""Number of values with one scale: 4 bytes of scale for 256 bytes of values."""
_MAX_MULTIPLE = 127
"""Largest multiple of a scale. -128 is not used, so that values and their negatives are rounded the
same way."""
_MIN_SCALE = torch.finfo(torch.float32).tiny
"""Smallest normal number. A smaller scale would have lost most of its digits."""


def payload_bytes(numel: int, num_exact: int) -> int:
    """Return the length of a payload of `encode`.

    Args:
        numel: number of values that are rounded.
        num_exact: number of values that are not rounded.
    """
    return 4 * num_exact + (4 + BLOCK) * _num_blocks(numel)


def encode(flat: torch.Tensor, num_exact: int) -> torch.Tensor:
    """Return the payload of `flat` (1D, fp32), a vector of uint8.

    It has the exact values, the scales, and the multiples, in this order. A block with an inf or a
    NaN is decoded as NaNs.

    Args:
        num_exact: number of exact values, which are at the end of `flat` and are not rounded.
    """
    numel = flat.numel() - num_exact
    blocks = torch.zeros((_num_blocks(numel), BLOCK), dtype=torch.float32, device=flat.device)
    blocks.view(-1)[:numel] = flat[:numel]
    scales = (blocks.abs().amax(1, keepdim=True) / _MAX_MULTIPLE).clamp_(min=_MIN_SCALE)
    # Without `nan_to_num_`, the integer that a NaN becomes depends on the processor.
    multiples = blocks.div_(scales).nan_to_num_(nan=0.0).round_().to(torch.int8)
    # The multiples come last: the fp32 values before them must lie at a multiple of 4 bytes.
    parts = (flat[numel:], scales, multiples)
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


def decode(payload: torch.Tensor, num_exact: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded values of a payload, padded to whole blocks, and the exact values."""
    num_blocks = (payload.numel() - 4 * num_exact) // (4 + BLOCK)
    exact, scales, multiples = payload.split([4 * num_exact, 4 * num_blocks, BLOCK * num_blocks])
    blocks = multiples.view(torch.int8).view(num_blocks, BLOCK).to(torch.float32)
    return blocks.mul_(scales.view(torch.float32)[:, None]).view(-1), exact.view(torch.float32)


def add_up(payloads: torch.Tensor, num_exact: int, total: torch.Tensor) -> None:
    """Set `total` (1D, fp32) to the sum of the payloads [num_members, bytes], in their order."""
    numel = total.numel() - num_exact
    total.zero_()
    for payload in payloads:
        values, exact = decode(payload, num_exact)
        total[:numel] += values[:numel]
        total[numel:] += exact


def find_rounding_error(
    flat: torch.Tensor,
    payload: torch.Tensor,
    num_exact: int,
) -> torch.Tensor:
    """Return the difference between the values of `flat` and those of its payload.

    The error of a block that is not finite counts as 0: no later change can correct it.
    """
    values = flat[: flat.numel() - num_exact]
    rounded, _ = decode(payload, num_exact)
    error = values - rounded[: values.numel()]
    return error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


class Residual:
    """The rounding error of one bucket, which this group adds to its next change.

    The error of an exchange counts only after its update is applied (`commit`). If the exchange
    breaks, it is repeated with the same values and the former error, so that it sends the same
    bytes.

    Threads: the exchange's thread calls `add_to` and `set_error`. The training thread calls the
    other methods.
    """

    def __init__(self) -> None:
        self._error: torch.Tensor | None = None  # None = there is no error
        # The error after the update of the exchange under way.
        self._next_error: torch.Tensor | None = None

    def start_exchange(self) -> None:
        """Start an exchange. Unless `set_error` follows, the error stays the same."""
        self._next_error = self._error

    def add_to(self, values: torch.Tensor) -> None:
        """Add the error of earlier changes to the values that this group sends now."""
        if self._error is not None:
            values += self._error

    def set_error(self, error: torch.Tensor | None) -> None:
        """Set the rounding error of the exchange under way."""
        self._next_error = error

    def commit(self) -> None:
        """Take over the error of the last exchange, because its update is applied."""
        self._error = self._next_error

    def drop(self) -> None:
        """Forget the error, because this group has replaced its state."""
        self._error = None
        self._next_error = None


def _num_blocks(numel: int) -> int:
    return math.ceil(numel / BLOCK)
