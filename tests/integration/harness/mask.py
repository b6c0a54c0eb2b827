# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A pattern of masked labels that gives the replica groups unequal numbers of valid tokens."""

from __future__ import annotations

import torch
from torchtitan.components.loss import IGNORE_INDEX

EMPTY = (1, 3)  # this data shard has not a single valid token in this batch


def mask_labels(labels: torch.Tensor, shard: int, batch: int) -> torch.Tensor:
    """Mask the first labels of each sequence, another number in each batch of each data shard."""
    length = labels.shape[1]
    masked = labels.clone()
    masked[:, : length if (shard, batch) == EMPTY else (7 + 11 * batch + 29 * shard) % length] = (
        IGNORE_INDEX
    )
    return masked
