# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Changes in 8 bits: the encoding of a bucket with `should_quantize`, and its rounding error.

Values are cut into blocks of 256. Each block has a scale in fp32. Each value travels as the nearest
whole multiple of its scale, from -127 to 127. Every member gets the payloads of all others and adds
them up in the same order, so all members have the same bytes. Around a ring, each hop would round
the sum once more.

Error feedback: the rounding error of a change is added to the group's next change, so no part of a
change is lost for good (1-bit SGD, Seide et al., Interspeech 2014; arXiv 1901.09847 shows why this
converges).
"""

from __future__ import annotations

import torch

BLOCK = 256
"""Values with one scale: 4 bytes of scale for 256 bytes of values."""
_LARGEST = 127
"""Largest multiple of a scale. Without -128, a negated block is rounded the same way."""
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""A smaller scale is no normal number: it has lost most of its digits."""


def payload_bytes(numel: int, num_exact: int) -> int:
    """Return the length of a payload of `encode`.

    Args:
        numel: number of values that are rounded.
        num_exact: number of values that are not.
    """
    return 4 * num_exact + (4 + BLOCK) * _num_blocks(numel)


def encode(flat: torch.Tensor, num_exact: int) -> torch.Tensor:
    """Return the payload of `flat` (1D, fp32), a vector of uint8.

    The last `num_exact` values are not rounded. A block with an inf or a NaN is decoded as NaNs.
    """
    numel = flat.numel() - num_exact
    blocks = torch.zeros((_num_blocks(numel), BLOCK), dtype=torch.float32, device=flat.device)
    blocks.view(-1)[:numel] = flat[:numel]
    scales = (blocks.abs().amax(1, keepdim=True) / _LARGEST).clamp_(min=_LEAST_SCALE)
    # Without `nan_to_num_`, the integer that a NaN becomes depends on the processor.
    multiples = blocks.div_(scales).nan_to_num_(nan=0.0).round_().to(torch.int8)
    # The multiples come last: the fp32 values before them must lie at a multiple of 4 bytes.
    parts = (flat[numel:], scales, multiples)
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


def decode(payload: torch.Tensor, num_exact: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded values of a payload, up to the last block's end, and the exact ones."""
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
    """The rounding error of one bucket's changes, which this group adds to its next change.

    The error of an exchange counts only after its update is applied. If the exchange breaks, it is
    repeated with the same values, and must send the same bytes.

    Threads: the exchange's thread calls `add_to` and `set_error`. The training thread calls the
    other methods.
    """

    def __init__(self) -> None:
        # None = there is no error.
        self._error: torch.Tensor | None = None
        self._next_error: torch.Tensor | None = None  # after the update of the exchange under way

    def start_exchange(self) -> None:
        """Start an exchange. Unless `set_error` follows, the error stays the same."""
        self._next_error = self._error

    def add_to(self, values: torch.Tensor) -> None:
        """Add the error of earlier changes to the values that this group gives now."""
        if self._error is not None:
            values += self._error

    def set_error(self, error: torch.Tensor | None) -> None:
        """Set the rounding error of the values that this group gives to the exchange."""
        self._next_error = error

    def commit(self) -> None:
        """Let the error of the last exchange count: its update is applied."""
        self._error = self._next_error

    def drop(self) -> None:
        """Forget the error: it belongs to a state that this group no longer has."""
        self._error = None
        self._next_error = None


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)
