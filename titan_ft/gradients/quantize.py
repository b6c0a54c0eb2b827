# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Changes in 8 bits: what a group sends of a bucket with `should_quantize`, and what rounding leaves behind.

Values are cut into blocks of 256. Each block has a scale in fp32, and each of its values travels as the nearest whole
multiple of that, -127 to 127. Every member gets every other's payload and adds them up in the same order, so that all
have the same bytes: a sum of rounded sums, as a ring would make it, would be rounded once more at each hop.

Error feedback: what rounding has left of a change is added to the group's next one, so that nothing is lost for good
(1-bit SGD, Seide et al., Interspeech 2014; arXiv 1901.09847 shows why it converges).
"""

from __future__ import annotations

import torch

BLOCK = 256  # values with one scale: 4 bytes of it for 256 of theirs
_LARGEST = 127  # multiple of a scale; -128 is left out, so that a block rounds alike with its sign turned
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # a smaller one is no normal number: it has lost most of its digits


def payload_bytes(numel: int, num_exact: int) -> int:
    """Return the bytes that `encode` makes of `numel` values and `num_exact` that are not to be rounded."""
    return 4 * num_exact + (4 + BLOCK) * _num_blocks(numel)


def encode(flat: torch.Tensor, num_exact: int) -> torch.Tensor:
    """Return what travels of `flat` (1D, fp32), whose last `num_exact` values are not rounded: a vector of uint8.

    A block with an inf or a NaN comes out as NaNs.
    """
    numel = flat.numel() - num_exact
    blocks = torch.zeros((_num_blocks(numel), BLOCK), dtype=torch.float32, device=flat.device)
    blocks.view(-1)[:numel] = flat[:numel]
    scales = (blocks.abs().amax(1, keepdim=True) / _LARGEST).clamp_(min=_LEAST_SCALE)
    # What a NaN is as a whole number is the processor's to say.
    multiples = blocks.div_(scales).nan_to_num_(nan=0.0).round_().to(torch.int8)
    # The whole multiples come last: what else is there must lie at a multiple of 4 bytes.
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in (flat[numel:], scales, multiples)])


def decode(payload: torch.Tensor, num_exact: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a payload of `encode` stands for: the rounded values, to the last block's end, and the exact ones."""
    num_blocks = (payload.numel() - 4 * num_exact) // (4 + BLOCK)
    exact, scales, multiples = payload.split([4 * num_exact, 4 * num_blocks, BLOCK * num_blocks])
    blocks = multiples.view(torch.int8).view(num_blocks, BLOCK).to(torch.float32)
    return blocks.mul_(scales.view(torch.float32)[:, None]).view(-1), exact.view(torch.float32)


def add_up(payloads: torch.Tensor, num_exact: int, total: torch.Tensor) -> None:
    """Make `total` (1D, fp32) the sum of the payloads [num_members, bytes], added up in their order."""
    numel = total.numel() - num_exact
    total.zero_()
    for payload in payloads:
        values, exact = decode(payload, num_exact)
        total[:numel] += values[:numel]
        total[numel:] += exact


def left_behind(flat: torch.Tensor, payload: torch.Tensor, num_exact: int) -> torch.Tensor:
    """Return how far the values of `flat` are from those that its payload stands for.

    Of a block that is not finite nothing is left: there is nothing that could be made good.
    """
    values = flat[: flat.numel() - num_exact]
    return values.sub(decode(payload, num_exact)[0][: values.numel()]).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


class Residual:
    """What rounding has left behind of one bucket's changes, until it is sent: this group's own.

    What an exchange leaves behind counts when its update is made, and not before: an exchange that broke is repeated
    from the same values, and must send the same bytes.
    """

    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None  # None = nothing
        self._next: torch.Tensor | None = None  # what is left when the update of the exchange under way is made

    def begin(self) -> None:
        """Begin an exchange, to which nothing has been given yet."""
        self._next = self._kept

    def add_to(self, values: torch.Tensor) -> None:
        """Add what is left of earlier changes to the values that this group gives now."""
        if self._kept is not None:
            values += self._kept

    def leave(self, left: torch.Tensor | None) -> None:
        """Note what the values that this group gives to the exchange leave behind, these ones included."""
        self._next = left

    def settle(self) -> None:
        """The update of the last exchange is made."""
        self._kept = self._next

    def drop(self) -> None:
        """Forget what is left: it is of a state that this group has no more."""
        self._kept = self._next = None


def _num_blocks(numel: int) -> int:
    return -(-numel // BLOCK)
