# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The learning rate of an update that was made without some of the groups."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

import torch


def lr_factor(policy: str, share: float) -> float:
    """Return the factor for the LR of an update that has `share` of the global batch."""
    if policy == "none":
        return 1.0
    if policy == "linear":
        return share
    assert policy == "sqrt", f"an unknown lr_policy: {policy!r}"
    return math.sqrt(share)  # FT-HSDP's rule (arXiv 2602.00277)


@contextlib.contextmanager
def scaled_lr(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> Iterator[None]:
    """Multiply the LR by `factor` inside the context, and restore it afterwards."""
    groups = []
    for optimizer in optimizers:
        groups += optimizer.param_groups
    rates = [group["lr"] for group in groups]
    if factor != 1.0:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
    yield
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
