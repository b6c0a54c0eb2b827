# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The collectives of an exchange, in the form that torch's Gloo and NCCL both accept.

The exchange, the rehearsal in the set-up of a communicator and the tests make the same calls. So
the rehearsal uses exactly the algorithms of the exchange. See docs/exchange.md.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]  # exported at run time
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
)

_REHEARSED_FACTOR = 16
"""Ratio of two rehearsed sizes. NCCL has few algorithms for a sum, each for a range of sizes."""


def all_reduce(group: Any, tensor: torch.Tensor, timeout: timedelta) -> Any:
    """Start to replace `tensor` by the sum over all members. Return torch's work."""
    options = AllreduceOptions()
    options.timeout = timeout
    return group.allreduce([tensor], options)


def all_to_all(group: Any, rows: torch.Tensor, timeout: timedelta) -> torch.Tensor:
    """Send row `i` to member `i`, and return the rows that this member receives, in order.

    The split sizes are given on purpose. Without them torch's `all2all_single_equal_split` calls
    ncclAlltoAll, and takes its ncclInProgress on a non-blocking communicator for an error. Then no
    exchange in bfloat16 works over NCCL.

    Args:
        rows: shape [num_members, row length].
    """
    options = AllToAllOptions()
    options.timeout = timeout
    received = torch.empty_like(rows)
    sizes = [1] * len(rows)
    group.alltoall_base(received, rows, sizes, sizes, options).wait()
    return received


def all_gather(group: Any, own: torch.Tensor, num_members: int, timeout: timedelta) -> torch.Tensor:
    """Return the vectors of all members, shape [num_members, own.numel()]."""
    options = AllgatherOptions()
    options.timeout = timeout
    gathered = own.new_empty((num_members, own.numel()))
    group.allgather([list(gathered)], [own], options).wait()
    return gathered


def rehearse_sums(group: Any, max_numel: int, where: torch.device, timeout: timedelta) -> None:
    """Start sums of all sizes for which NCCL may choose different algorithms.

    The sums run on NCCL's stream in the order of the calls. torch keeps the tensors until its
    watchdog has seen the sums end.

    Args:
        max_numel: number of fp32 values in the largest sum of an exchange.
    """
    numel = max_numel
    while numel > 0:
        all_reduce(group, torch.zeros(numel, device=where), timeout)
        numel //= _REHEARSED_FACTOR
