# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The learning rate of an update that was made without some of the groups."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator

import torch

_FACTORS: dict[str, Callable[[float], float]] = {
    "none": lambda share: 1.0,
    "sqrt": math.sqrt,  # FT-HSDP's rule (arXiv 2602.00277)
    "linear": lambda share: share,
}


def lr_factor(policy: str, share: float) -> float:
    """Return the factor for the LR of an update that has `share` of the global batch."""
    return _FACTORS[policy](share)


@contextlib.contextmanager
def scaled_lr(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> Iterator[None]:
    """Multiply the LR by `factor` inside the context, and restore it afterwards."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    if factor != 1.0:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
    yield
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
