# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure a job before its start: the model is built and cut as in a run, without memory or
peers.
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
from titan_ft.host.titan import TORCH_DTYPE_MAP, ParallelDims, build_parts
from titan_ft.round_settings import outer_optimizer, quantizes
from titan_ft.training.spec import token_counts
from titan_ft.transfer.snapshot import TrainState


@dataclass(frozen=True)
class RankSizes:
    """What one rank holds and moves, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    state: int
    """A copy of its state in host memory: what a donor keeps and a joiner fetches."""
    exchange: int
    """Its buckets: what each round sums over the groups, and what each queued update of a joiner
    takes.
    """
    sent: int
    """What it sends to the other groups for that, if all of them are there."""
    anchors: int
    """With a semi-synchronous method, in host memory: the weights that the groups agree on, in
    fp32. How far this group has moved from them takes as much again. Else 0."""
    momentum: int
    """Of the outer optimizer, in host memory."""


@dataclass(frozen=True)
class JobSizes:
    """What one replica group is made of."""

    num_parameters: int
    dims: ParallelDims
    accumulation: int
    """Microbatches of each data-parallel rank in a step."""
    stages: tuple[RankSizes, ...]
    """The first rank of each pipeline stage, which has the largest shards; one without a
    pipeline.
    """

    @property
    def largest(self) -> RankSizes:
        """Return the rank that holds most."""
        return max(self.stages, key=lambda rank: rank.state)

    @property
    def group_state(self) -> int:
        """Return the maximum bytes that a healing group fetches: its shards may differ by a row."""
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
    measured = [
        _measure_rank(config, num_ranks, stage * num_ranks // stages) for stage in range(stages)
    ]
    dims, num_parameters, _ = measured[0]
    sequences = config.training.local_batch_size * dims.dp_replicate * dims.dp_shard
    own = config.training.global_batch_size // max(config.fault_tolerance.group_size, 1)
    return JobSizes(
        num_parameters, dims, max(own // sequences, 1), tuple(rank for _, _, rank in measured)
    )


def _measure_rank(config: Any, num_ranks: int, rank: int) -> tuple[ParallelDims, int, RankSizes]:
    """Return the group's dimensions, the number of the model's parameters, and this rank's
    sizes.
    """
    with _fake_world(num_ranks, rank):
        dims, num_parameters, parts, optimizers = build_parts(config, num_ranks)
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
        None,  # type: ignore[arg-type]  # never asked: nothing is exchanged
        bucket_bytes=int(config.fault_tolerance.bucket_size_mb * 2**20),
        where=torch.device("meta"),
        overlap=False,
        quantize=quantizes(config.fault_tolerance),
        dtype=TORCH_DTYPE_MAP[config.fault_tolerance.exchange_dtype],
        counts=token_counts(parts),
    )
    gradients = sum(map(_num_bytes, trained))
    anchors = sum(map(_num_bytes, _parameters_of(outer))) if outer else 0
    state = TrainState(
        parts, [outer, *optimizers] if outer else optimizers, None, _NoCounters()
    ).payload_bytes
    return RankSizes(
        parameters=sum(map(_num_bytes, parameters)),
        gradients=gradients,
        optimizer=sum(map(_held_bytes, optimizers)),
        state=state - gradients + anchors
        if outer
        else state,  # the anchors are what it has of the weights
        exchange=exchange.num_bytes,
        sent=exchange.count_sent_bytes(config.fault_tolerance.group_size),
        anchors=anchors,
        momentum=_held_bytes(outer) if outer else 0,
    )


def _outer_optimizer(
    ft: FaultTolerance, trained: list[torch.nn.Parameter]
) -> torch.optim.Optimizer | None:
    """Return the outer optimizer after an update, over anchors of what is trained; None without
    one.
    """
    if ft.semi_sync_method is None:
        return None
    shapes = [local_shard(parameter).shape for parameter in trained]
    anchors = [
        torch.nn.Parameter(torch.empty(shape, dtype=torch.float32, device="meta"))
        for shape in shapes
    ]
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
    return sum(
        _num_bytes(value) for values in optimizer.state.values() for value in values.values()
    )


def _num_bytes(tensor: torch.Tensor) -> int:
    shard = local_shard(tensor)
    return shard.numel() * shard.element_size()


@contextlib.contextmanager
def _fake_world(num_ranks: int, rank: int) -> Iterator[None]:
    """Be one rank of a group without other ranks: collectives return at once, with arbitrary
    values.
    """
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
