# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The collectives of an exchange, as calls that torch's backends carry out alike.

The exchange, the rehearsal in the set-up of a communicator and the tests make the same calls.
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

_REHEARSED_FACTOR = 16  # between two sizes: NCCL has few algorithms for a sum, each for a range of sizes


def all_reduce(group: Any, tensor: torch.Tensor, timeout: timedelta) -> Any:
    """Begin to replace `tensor` by the sum over all members; returns torch's work."""
    options = AllreduceOptions()
    options.timeout = timeout
    return group.allreduce([tensor], options)


def all_to_all(group: Any, rows: torch.Tensor, timeout: timedelta) -> torch.Tensor:
    """Send a row to each member, and return the rows that the members send, in a tensor of the same shape.

    The split sizes are given. Without them torch's `all2all_single_equal_split` calls ncclAlltoAll, and takes its
    ncclInProgress on a non-blocking communicator for an error: no exchange in bfloat16 ever worked over NCCL.
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


def rehearse_sums(group: Any, most: int, where: torch.device, timeout: timedelta) -> None:
    """Begin sums of up to `most` values in fp32, of sizes for which NCCL may take different algorithms.

    Their order on NCCL's stream is that of the calls. torch keeps the tensors until its watchdog has seen the sums end.
    """
    numel = most
    while numel > 0:
        all_reduce(group, torch.zeros(numel, device=where), timeout)
        numel //= _REHEARSED_FACTOR
