# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Buckets: flat tensors in which the gradients are exchanged.

A bucket has *parts*, one for each parameter. Content and order of the buckets are the same in all
groups. See docs/exchange.md.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from titan_ft import device
from titan_ft.gradients import half
from titan_ft.gradients.quantize import Residual, payload_bytes

_EXACT_BYTES = torch.float32.itemsize  # of a value that is never rounded


class Gradient:
    """A parameter's gradient, as a part of a bucket."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self.shape = device.local_shard(parameter).shape

    def read(self) -> torch.Tensor | None:
        """Return this rank's shard of the gradient; None = this step did not use the parameter."""
        gradient = self.parameter.grad
        return None if gradient is None else _shard(gradient, self.parameter)

    def drop(self) -> None:
        """Remove the gradient. With one of zeros, the optimizer would decay the parameter."""
        self.parameter.grad = None

    def target(self) -> torch.Tensor:
        """Return the memory for this rank's shard of the mean gradient."""
        parameter = self.parameter
        if parameter.grad is None or _layout(parameter.grad) != _layout(parameter):
            parameter.grad = torch.zeros_like(parameter)
        return device.local_shard(parameter.grad)


class CountBuffer:
    """A buffer in which the model counts tokens per expert, as a part of a bucket."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = device.local_shard(buffer)
        self.shape = self.buffer.shape

    def read(self) -> torch.Tensor:
        """Return this rank's counts."""
        return self.buffer

    def drop(self) -> None:
        """Keep the local counts: no other group has added to them."""

    def target(self) -> torch.Tensor:
        """Return the memory for the sum."""
        return self.buffer


BucketPart = Gradient | CountBuffer


class BucketState(enum.Enum):
    """The owner and the contents of a bucket's memory.

    FILLING -> FULL -> SUMMED -> APPLIED -> FILLING ... `start_exchange` is allowed in every state:
    an exchange may break, and the sums of a round without an update are never applied.
    """

    FILLING = enum.auto()  # the training thread copies gradients in as they become final
    FULL = enum.auto()  # the exchange's thread sums the bucket
    SUMMED = enum.auto()  # an update owns the sums in the bucket (`Sums`)
    APPLIED = enum.auto()  # the update is applied, and the memory is free


class Bucket:
    """A flat tensor that is summed as a whole, with one view per part: gradients, then counts.

    The gradients are fp32 or bfloat16, as they are sent. After them come the values that are never
    rounded, always in fp32: the counts, and one weight per part. A group without a gradient of a
    part has weight 0. The sum of gradients / the sum of weights is the mean.

    `GradientExchange` and `Sums` call the methods on the training thread, which makes all
    transitions of the state. `Flight`'s thread calls `compute_total`. Only the owner that
    `BucketState` names may touch the memory. After an exchange that broke, the contents are void.

    Attributes:
        state: see `BucketState`.
        on_host: the gradients outside of the bucket are in host memory.
        flat: 1D, the whole memory.
        values: the gradients in `flat`.
        exact: the values in `flat` that are never rounded.
        views: of `flat`, one per part.
        part_weights: the weights in `flat`, one per part.
        residual: rounding error of this group's gradients; None without quantization.
        missing_parts: indices of the parts that are not in the bucket yet.
        final_parts: indices of the missing parts whose gradients are final.
        calls: number of hook calls of each part since the launch; counted with a pipeline only.
        stream: stream on which the last of the final gradients became final. It waits for all
            others.
        weights: this rank's weights of the parts, before the sum.
        ready: event after which the device may read the bucket, or write to it if this rank gives
            nothing.
        total: sum of all values that this rank gives; not finite if one of the values is not.
    """

    def __init__(
        self,
        parts: Sequence[BucketPart],
        fragment: int,
        where: torch.device,
        dtype: torch.dtype,
        *,
        quantize: bool,
        gradient_scale: float = 1.0,
    ) -> None:
        self.parts = list(parts)
        self.fragment = fragment
        self._where = where
        self._dtype = dtype
        sizes = [part.shape.numel() for part in parts]
        gradients = [part for part in parts if isinstance(part, Gradient)]
        self._sizes = sizes[: len(gradients)]
        self._exact_sizes = [*sizes[len(gradients) :], len(sizes)]
        self._gradient_scale = gradient_scale
        self.on_host = all(part.parameter.device.type == "cpu" for part in gradients)
        self.state = BucketState.APPLIED
        self.residual = Residual() if quantize else None
        self.total = torch.empty((), dtype=torch.float32, device=where)
        self.missing_parts: set[int] = set()
        self.final_parts: list[int] = []
        self.calls: Counter[int] = Counter()
        self.weights = [0.0] * len(self.parts)
        self.stream: torch.Stream | None = None
        self.ready: torch.Event | None = None
        self.reallocate()

    @property
    def is_bfloat16(self) -> bool:
        """True if the gradients travel in bfloat16."""
        return self._dtype is torch.bfloat16

    @property
    def num_bytes(self) -> int:
        """Bytes of the bucket's memory."""
        return self.flat.numel() * self.flat.element_size()

    def reallocate(self) -> None:
        """Take other memory. The contents of the bucket are lost."""
        per_exact = _EXACT_BYTES // self._dtype.itemsize
        # Exact values lie at a multiple of their size.
        exact_start = -(-sum(self._sizes) // per_exact) * per_exact
        numel = exact_start + sum(self._exact_sizes) * per_exact
        self.flat = device.empty_bucket(numel, self._dtype, self._where)
        self.values, self.exact = self._cut(self.flat)
        self.views, self.part_weights = self.split(self.flat)

    def _cut(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        exact_bytes = sum(self._exact_sizes) * _EXACT_BYTES
        exact = flat.view(torch.uint8)[-exact_bytes:].view(torch.float32)
        return flat[: sum(self._sizes)], exact

    def split(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the views of a tensor like the bucket's `flat`: one per part, and the weights."""
        values, exact = self._cut(flat)
        *counts, part_weights = exact.split_with_sizes(self._exact_sizes)
        views = []
        for flat_view, part in zip(
            [*values.split_with_sizes(self._sizes), *counts],
            self.parts,
            strict=True,
        ):
            views.append(flat_view.view(part.shape))
        return views, part_weights

    def count_sent_bytes(self, num_members: int) -> int:
        """Return the bytes that each member sends for one sum of this bucket."""
        num_values, num_exact = self.values.numel(), self.exact.numel()
        num_others = num_members - 1
        if self.is_bfloat16:
            return half.count_sent_bytes(num_values, num_exact, num_members)
        if self.residual is None:
            # An all-reduce around a ring: each member sends an n-th of the bucket to the next
            # member, n - 1 times to sum it, and n - 1 times to pass the sums on.
            return 2 * num_others * self.num_bytes // num_members
        # An all-gather around a ring: each member sends or passes on n - 1 payloads.
        return num_others * payload_bytes(num_values, num_exact)

    def start_exchange(self, gives: bool) -> None:
        """Start an exchange.

        Args:
            gives: this rank gives all parts of the bucket; False = it gives none.
        """
        self.state = BucketState.FILLING if gives else BucketState.FULL
        self.missing_parts = set(range(len(self.parts))) if gives else set()
        self.final_parts = []
        self.stream = None
        self.calls = Counter()
        if self.residual is not None:
            self.residual.start_exchange()

    @torch.no_grad()
    def fill(self, indices: Iterable[int], weight: float) -> None:
        """Copy parts into the bucket, with their weight. With the last part, the bucket is FULL."""
        assert self.state is BucketState.FILLING, f"a bucket is filled that is {self.state.name}"
        views, shards = [], []
        for index in indices:
            shard = self.parts[index].read()
            if shard is None:
                self.weights[index] = 0.0
                self.views[index].zero_()
            else:
                self.weights[index] = weight
                views.append(self.views[index])
                shards.append(shard)
        if views:
            torch._foreach_copy_(views, shards, non_blocking=True)
        self.missing_parts.difference_update(indices)
        self.final_parts.clear()
        if not self.missing_parts:
            weights = torch.tensor(self.weights, dtype=torch.float32)
            self.part_weights.copy_(weights, non_blocking=True)
            self.state = BucketState.FULL

    def mark_summed(self) -> None:
        """Note that the exchange worked, and that the bucket has the sums."""
        assert self.state is BucketState.FULL, f"a bucket is summed that is {self.state.name}"
        self.state = BucketState.SUMMED

    def drop(self) -> None:
        """Drop all parts: the bucket did not travel."""
        for part in self.parts:
            part.drop()

    def mark_applied(self) -> None:
        """Note that the update which owns the sums is applied. The rounding error counts now."""
        assert self.state is BucketState.SUMMED, f"a bucket is applied that is {self.state.name}"
        self.state = BucketState.APPLIED
        if self.residual is not None:
            self.residual.commit()

    def compute_total(self) -> None:
        """Queue the sum of all values on the device. It shows an inf or a NaN in any of them."""
        if self.is_bfloat16:
            self.total.copy_(self.values.sum(dtype=torch.float32) + self.exact.sum())
        else:
            self.total.copy_(self.flat.sum())

    @torch.no_grad()
    def write(self, flat: torch.Tensor, weights: Sequence[float], scale: float | None) -> None:
        """Write sums to the gradients and counts, in as few kernels as possible.

        Args:
            flat: the sums, a tensor like the bucket's `flat`.
            weights: of the parts; 0 = no group has this part.
            scale: factor of the gradients, besides `gradient_scale`; None = 1 / weight, which gives
                the weighted mean.
        """
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        factors: list[float] = []
        views = self.views if flat is self.flat else self.split(flat)[0]
        for part, total, weight in zip(self.parts, views, weights, strict=True):
            if weight == 0:
                part.drop()
                continue
            targets.append(part.target())
            sources.append(total)
            if isinstance(part, Gradient):
                # Scaled here, where the sums are copied anyway, without another pass over them.
                factors.append(self._gradient_scale * (1 / weight if scale is None else scale))
            else:
                factors.append(1.0)
        if not targets:
            return
        if sources[0].device.type == "cpu" and targets[0].device.type != "cpu":
            _upload(targets, sources, factors)
        elif self._where.type == "cpu":
            _multiply_on_host(targets, sources, factors)
        else:
            _multiply(targets, sources, factors)


def _multiply_on_host(
    targets: list[torch.Tensor],
    sources: list[torch.Tensor],
    factors: list[float],
) -> None:
    """Set targets to sources times factors, each while it is in the cache."""
    if all(factor == 1.0 for factor in factors):
        torch._foreach_copy_(targets, sources)
        return
    for target, source, factor in zip(targets, sources, factors, strict=True):
        is_fp32 = target.dtype is torch.float32 and source.dtype is torch.float32
        if factor != 1.0 and is_fp32:
            torch.mul(source, factor, out=target)  # in one pass, without memory for the product
        else:
            _multiply([target], [source], [factor])


def _multiply(
    targets: list[torch.Tensor],
    sources: list[torch.Tensor],
    factors: list[float],
) -> None:
    """Set targets to sources times factors, rounded once."""
    must_scale = any(factor != 1.0 for factor in factors)
    # If the sources are on another device, that device makes the product: its copy to host memory
    # is not complete when the host could multiply it.
    is_elsewhere = sources[0].device != targets[0].device
    if must_scale and (sources[0].dtype is torch.float32 or is_elsewhere):
        sources = list(torch._foreach_mul([source.float() for source in sources], factors))
        must_scale = False
    torch._foreach_copy_(targets, sources, non_blocking=True)
    if must_scale:
        # A product in bfloat16 would be rounded twice. So the product is made in the target's
        # dtype.
        torch._foreach_mul_(targets, factors)


def _upload(targets: list[torch.Tensor], sources: list[torch.Tensor], factors: list[float]) -> None:
    """Write tensors of the host, times factors, to the device. The host waits for no pinned tensor.

    The product is made on the device, from the same two numbers. On the host it would take as much
    memory again, and that memory would not be pinned. A source of another dtype than its target is
    scaled before it is converted.
    """
    copied: list[torch.Tensor] = []
    unscaled: list[torch.Tensor] = []  # targets that are multiplied after the copy
    unscaled_factors: list[float] = []
    for source, target, factor in zip(sources, targets, factors, strict=True):
        if source.dtype is not target.dtype:
            moved = source.to(target.device, non_blocking=True)
            copied.append(moved.float().mul_(factor))
            continue
        copied.append(source)
        if factor != 1.0:
            unscaled.append(target)
            unscaled_factors.append(factor)
    torch._foreach_copy_(targets, copied, non_blocking=True)
    if unscaled:
        torch._foreach_mul_(unscaled, unscaled_factors)


def partition(parts: Sequence[BucketPart], bucket_bytes: int) -> list[list[BucketPart]]:
    """Cut `parts` into runs of at most `bucket_bytes` of fp32, in their order.

    A run has at least one part, even if the part is larger.
    """
    runs: list[list[BucketPart]] = []
    room = 0
    for part in parts:
        size = part.shape.numel() * _EXACT_BYTES
        if not runs or size > room:
            runs.append([])
            room = bucket_bytes
        runs[-1].append(part)
        room -= size
    return runs


def _layout(tensor: torch.Tensor) -> object:
    return tensor.placements if isinstance(tensor, DTensor) else None


def _shard(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `gradient`, sharded as its parameter.

    Tensor parallelism leaves some gradients with another sharding.
    """
    if isinstance(gradient, DTensor) and _layout(gradient) != _layout(parameter):
        assert isinstance(parameter, DTensor)
        gradient = gradient.redistribute(placements=parameter.placements)
    return device.local_shard(gradient)
