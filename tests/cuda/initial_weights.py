# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Gives a model the same initial weights on every device; a module for
`--experimental.custom_import` of a worker.

With CPU offload, torch 2.13 does not return from `nn.init.trunc_normal_`. The weights are DTensors
in host memory on a mesh of GPUs: after each draw, DTensor restores the generator of the CPU
(`OffsetBasedRNGTracker._distribute_region`). So the loop that draws again for numbers outside the
bounds gets the same numbers forever.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import tests.cuda.host_waits  # noqa: F401  # counts the host's waits


def _draw(tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> torch.Tensor:
    """Fill this rank's shard from a generator of its own."""
    shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    generator = torch.Generator().manual_seed(1000 * torch.distributed.get_rank() + shard.numel())
    with torch.no_grad():
        shard.copy_(torch.randn(shard.shape, generator=generator).clamp(-2, 2) * std + mean)
    return tensor


nn.init.trunc_normal_ = nn.init.normal_ = _draw  # type: ignore[assignment]
