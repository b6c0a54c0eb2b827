# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure a job before its start.

The model is built and cut as in a run, but on the meta device and without other ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_ft.config import FaultTolerance
from titan_ft.device import local_shard
from titan_ft.gradients.exchange import GradientExchange
from titan_ft.host.titan import TORCH_DTYPE_MAP, ParallelDims, build_parts_on_meta
from titan_ft.round_settings import outer_optimizer, quantizes
from titan_ft.training.spec import token_counts
from titan_ft.transfer.snapshot import TrainState


@dataclass(frozen=True)
class RankSizes:
    """The sizes of one rank, in bytes.

    Attributes:
        parameters: its shards of the parameters.
        gradients: its shards of the gradients.
        optimizer: the state of its optimizers.
        state: a copy of its state in host memory, which a donor keeps and a joiner fetches.
        exchange: its buckets, which each round sums over the groups. A queued update of a joiner
            has this size too.
        sent: bytes that it sends to the other groups in a round, if all of them are there.
        anchors: host memory of the weights that the groups agree on, in fp32. This group's distance
            from them takes as much again. 0 without a semi-synchronous method.
        momentum: host memory of the outer optimizer's state.
    """

    parameters: int
    gradients: int
    optimizer: int
    state: int
    exchange: int
    sent: int
    anchors: int
    momentum: int


@dataclass(frozen=True)
class JobSizes:
    """The sizes of one replica group.

    Attributes:
        num_parameters: parameters of the whole model.
        accumulation: microbatches of each data-parallel rank in a step.
        stages: the first rank of each pipeline stage, which has the largest shards. One entry
            without a pipeline.
    """

    num_parameters: int
    dims: ParallelDims
    accumulation: int
    stages: tuple[RankSizes, ...]

    @property
    def largest(self) -> RankSizes:
        """The rank with the largest state."""
        return max(self.stages, key=lambda rank: rank.state)

    @property
    def group_state(self) -> int:
        """Most bytes that a healing group fetches. Its shards may differ by a row."""
        ranks = self.dims.world_size // len(self.stages)
        return sum(stage.state for stage in self.stages) * ranks


def measure(config: Any, num_ranks: int) -> JobSizes:
    """Build the model of `config` for a group of `num_ranks` ranks on the meta device, and measure
    it.

    The measured objects are a worker's own: torchtitan's parallelization, the buckets of the
    exchange, the layout of a state. Compilation, activation checkpointing and converters are left
    out, because they change no parameter's size.

    Args:
        config: returned by `read_config` and checked by `check_divisions`.
    """
    stages = config.parallelism.pipeline_parallel_degree
    sizes = []
    for stage in range(stages):
        first_rank = stage * num_ranks // stages
        dims, num_parameters, rank_sizes = _measure_rank(config, num_ranks, first_rank)
        sizes.append(rank_sizes)
    sequences = config.training.local_batch_size * dims.dp_replicate * dims.dp_shard
    own_batch = config.training.global_batch_size // max(config.fault_tolerance.group_size, 1)
    accumulation = max(own_batch // sequences, 1)
    return JobSizes(num_parameters, dims, accumulation, tuple(sizes))


def _measure_rank(config: Any, num_ranks: int, rank: int) -> tuple[ParallelDims, int, RankSizes]:
    """Return the group's dimensions, the number of the model's parameters, and this rank's
    sizes.
    """
    with _fake_world(num_ranks, rank):
        dims, num_parameters, parts, optimizers = build_parts_on_meta(config, num_ranks)
        return dims, num_parameters, _sizes(config, parts, optimizers)


def _sizes(config: Any, parts: list[torch.nn.Module], optimizers: Any) -> RankSizes:
    parameters = [parameter for part in parts for parameter in part.parameters()]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step()
    outer = _outer_optimizer(config.fault_tolerance, trained)
    exchange = GradientExchange(
        _parameters_of(outer) if outer else parameters,
        None,  # type: ignore[arg-type]  # Unused: nothing is exchanged.
        bucket_bytes=int(config.fault_tolerance.bucket_size_mb * 2**20),
        where=torch.device("meta"),
        overlap=False,
        quantize=quantizes(config.fault_tolerance),
        dtype=TORCH_DTYPE_MAP[config.fault_tolerance.exchange_dtype],
        counts=token_counts(parts),
    )
    gradients = sum(map(_num_bytes, trained))
    anchors = 0
    every_optimizer = list(optimizers)
    if outer:
        anchors = sum(map(_num_bytes, _parameters_of(outer)))
        every_optimizer.insert(0, outer)
    state = TrainState(parts, every_optimizer, None, _NoCounters()).payload_bytes
    if outer:
        # The state has the anchors in place of the weights. A weight is as large as its gradient.
        state += anchors - gradients
    return RankSizes(
        parameters=sum(map(_num_bytes, parameters)),
        gradients=gradients,
        optimizer=sum(map(_held_bytes, optimizers)),
        state=state,
        exchange=exchange.num_bytes,
        sent=exchange.count_sent_bytes(config.fault_tolerance.group_size),
        anchors=anchors,
        momentum=_held_bytes(outer) if outer else 0,
    )


def _outer_optimizer(
    ft: FaultTolerance, trained: list[torch.nn.Parameter]
) -> torch.optim.Optimizer | None:
    """Return the outer optimizer after an update, over anchors of the trained parameters.

    None without a semi-synchronous method.
    """
    if ft.semi_sync_method is None:
        return None
    anchors = []
    for parameter in trained:
        shape = local_shard(parameter).shape
        empty = torch.empty(shape, dtype=torch.float32, device="meta")
        anchors.append(torch.nn.Parameter(empty))
    settings = outer_optimizer(ft)
    outer = torch.optim.SGD(
        anchors, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov
    )
    for anchor in anchors:
        anchor.grad = torch.zeros_like(anchor)
    outer.step()
    return outer


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _held_bytes(optimizer: torch.optim.Optimizer) -> int:
    num_bytes = 0
    for values in optimizer.state.values():
        num_bytes += sum(map(_num_bytes, values.values()))
    return num_bytes


def _num_bytes(tensor: torch.Tensor) -> int:
    shard = local_shard(tensor)
    return shard.numel() * shard.element_size()


@contextlib.contextmanager
def _fake_world(num_ranks: int, rank: int) -> Iterator[None]:
    """Stand in for the other ranks of a group: collectives return at once, with arbitrary
    values."""
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class _NoCounters:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass
