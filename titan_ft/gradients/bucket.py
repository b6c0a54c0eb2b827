# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Buckets: flat tensors in which the groups sum their gradients.

One collective for a large flat tensor is faster than one for each gradient. So the gradients of
some parameters are copied into a bucket, the bucket is summed over the groups, and the sums are
copied back. The buckets have the same contents, in the same order, in all groups.

A bucket consists of *parts*. Each part is the gradient of one parameter (`Gradient`), or a buffer
in which the model counts tokens (`CountBuffer`).

In each exchange, in order of time (`BucketState`):

1. `Bucket.start_exchange`: the bucket is empty.
2. `fill`: the training thread copies parts into the bucket.
3. The exchange's thread (`flight.py`) sums the bucket in place.
4. `write`: the training thread writes the sums to the gradients and buffers.

See docs/exchange.md.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from titan_ft import device
from titan_ft.gradients import half
from titan_ft.gradients.quantize import Residual, payload_bytes

_EXACT_BYTES = torch.float32.itemsize  # size of one exact value; see `Bucket`


class Gradient:
    """A parameter's gradient, as a part of a bucket; training thread only."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self.shape = device.local_shard(parameter).shape

    def read(self) -> torch.Tensor | None:
        """Return this rank's shard of the gradient; None = this step did not use the parameter.

        May be a collective within the group (`_shard`).
        """
        gradient = self.parameter.grad
        return None if gradient is None else _shard(gradient, self.parameter)

    def skip_update(self) -> None:
        """Make the optimizer skip the parameter, because no group has a gradient of it.

        With a gradient of zeros, the optimizer would still apply weight decay to the parameter.
        """
        self.parameter.grad = None

    def result_memory(self) -> torch.Tensor:
        """Return the memory for this rank's shard of the mean gradient."""
        parameter = self.parameter
        # This step may not have used the parameter, or tensor parallelism left the gradient with
        # another sharding.
        if parameter.grad is None or _layout(parameter.grad) != _layout(parameter):
            parameter.grad = torch.zeros_like(parameter)
        return device.local_shard(parameter.grad)


class CountBuffer:
    """A buffer in which the model counts tokens per expert, as a part of a bucket.

    Training thread only.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = device.local_shard(buffer)
        self.shape = self.buffer.shape

    def read(self) -> torch.Tensor:
        """Return this rank's counts."""
        return self.buffer

    def skip_update(self) -> None:
        """Do nothing: the buffer keeps the local counts, because no group has summed them."""

    def result_memory(self) -> torch.Tensor:
        """Return the memory for the sum of the groups' counts."""
        return self.buffer


BucketPart = Gradient | CountBuffer


class BucketState(enum.Enum):
    """The owner and the contents of a bucket's memory.

    FILLING -> FULL -> SUMMED -> APPLIED -> FILLING ... `start_exchange` is allowed in every state,
    because two kinds of exchanges do not get to APPLIED: those that break, and those whose sums
    become no update.
    """

    FILLING = enum.auto()  # the training thread copies the gradients that are final
    FULL = enum.auto()  # the exchange's thread sums the bucket
    SUMMED = enum.auto()  # the bucket has the sums, and an update owns them (`Sums`)
    APPLIED = enum.auto()  # the update is applied, and nobody needs the contents


class Bucket:
    """A flat tensor that is summed as a whole, with one view per part.

    The memory has two ranges:

    1. the gradients, in fp32 or bfloat16, as they are sent;
    2. the *exact* values, which are never rounded and always fp32: the counts, and one weight for
       each part.

    The mean of a gradient is the sum of the groups' gradients, divided by the sum of their weights.
    A group without a gradient of a parameter has the weight 0.

    Threads: `GradientExchange` and `Sums` call the methods on the training thread, which makes all
    transitions of the state. The exchange's thread (`Flight`) calls `compute_total`. Only the owner
    that `BucketState` names may touch the memory. After an exchange that broke, the contents are
    void.

    Args:
        fragment: number of the fragment of the model whose gradients the bucket has.
        where: device of the bucket's memory.
        dtype: fp32 or bfloat16, for the gradients.
        quantize: the gradients are sent in 8 bits (`quantize.py`).
        gradient_scale: factor from local gradients to gradients of the reported loss.

    Attributes:
        state: see `BucketState`.
        on_host: the parameters are in host memory, because there is no GPU, or with CPU offload.
        flat: 1D, the whole memory.
        values: the gradients in `flat`.
        exact: the exact values in `flat`.
        views: views of `flat`, one per part.
        part_weights: the weights in `flat`, one per part.
        residual: rounding error of this group's gradients; None without quantization.
        missing_parts: indices of the parts that are not in the bucket yet.
        final_parts: indices of the missing parts whose gradients are final.
        calls: for each part, the number of hook calls since the launch. Only counted if a hook may
            be called more than once.
        gradient_stream: stream on which the last of the final gradients was computed. It waits for
            the streams of the other final gradients.
        weights: this rank's own weights, one per part.
        ready_event: event on the training's stream before which the exchange's thread may not use
            the memory. It comes after the copies into the bucket. If this rank contributes nothing,
            it comes after the last read of the former sums.
        total: sum of all values that this rank contributes; not finite if a value is not.
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
        gradients = [part for part in parts if isinstance(part, Gradient)]
        sizes = [part.shape.numel() for part in parts]
        # The counts are the last parts.
        self._gradient_sizes = sizes[: len(gradients)]
        count_sizes = sizes[len(gradients) :]
        num_weights = len(parts)
        self._exact_sizes = [*count_sizes, num_weights]
        self._gradient_scale = gradient_scale
        self.on_host = all(part.parameter.device.type == "cpu" for part in gradients)
        self.state = BucketState.APPLIED
        self.residual = Residual() if quantize else None
        self.total = torch.empty((), dtype=torch.float32, device=where)
        self.missing_parts: set[int] = set()
        self.final_parts: list[int] = []
        self.calls: Counter[int] = Counter()
        self.weights = [0.0] * len(self.parts)
        self.gradient_stream: torch.Stream | None = None
        self.ready_event: torch.Event | None = None
        self.reallocate()

    @property
    def is_bfloat16(self) -> bool:
        """True if the gradients travel in bfloat16."""
        return self._dtype is torch.bfloat16

    @property
    def is_quantized(self) -> bool:
        """True if the gradients travel in 8 bits."""
        return self.residual is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of the bucket's memory."""
        return self.flat.numel() * self.flat.element_size()

    def reallocate(self) -> None:
        """Allocate other memory. The contents of the bucket are lost."""
        # All sizes here are numbers of elements of `dtype`.
        exact_size = _EXACT_BYTES // self._dtype.itemsize
        # An fp32 view must start at a multiple of its element's size, so round up.
        exact_start = math.ceil(sum(self._gradient_sizes) / exact_size) * exact_size
        numel = exact_start + sum(self._exact_sizes) * exact_size
        self.flat = device.empty_bucket(numel, self._dtype, self._where)
        self.values, self.exact = self._split_in_two(self.flat)
        self.views, self.part_weights = self.split(self.flat)

    def _split_in_two(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the views of the gradients and of the exact values, which are at the end."""
        gradients = flat[: sum(self._gradient_sizes)]
        exact_bytes = sum(self._exact_sizes) * _EXACT_BYTES
        exact = flat.view(torch.uint8)[-exact_bytes:].view(torch.float32)
        return gradients, exact

    def split(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return views of a tensor with the bucket's layout: one per part, and one of the weights.

        Args:
            flat: `self.flat`, or a copy of it.
        """
        values, exact = self._split_in_two(flat)
        gradients = values.split_with_sizes(self._gradient_sizes)
        *counts, part_weights = exact.split_with_sizes(self._exact_sizes)
        views = []
        for flat_view, part in zip([*gradients, *counts], self.parts, strict=True):
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

    def start_exchange(self, contributes: bool) -> None:
        """Start an exchange.

        Args:
            contributes: this rank contributes all parts of the bucket; False = it contributes none,
                and the bucket counts as full.
        """
        if contributes:
            self.state = BucketState.FILLING
            self.missing_parts = set(range(len(self.parts)))
        else:
            self.state = BucketState.FULL
            self.missing_parts = set()
        self.final_parts = []
        self.gradient_stream = None
        self.calls = Counter()
        if self.residual is not None:
            self.residual.start_exchange()

    @torch.no_grad()
    def fill(self, indices: Iterable[int], weight: float) -> None:
        """Copy parts into the bucket. With the last missing part, the bucket becomes FULL.

        Args:
            indices: indices of the parts.
            weight: this rank's weight of the parts. A part without a gradient gets the weight 0.
        """
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
            # Copy the weights once: on a GPU, each copy is a kernel.
            weights = torch.tensor(self.weights, dtype=torch.float32)
            self.part_weights.copy_(weights, non_blocking=True)
            self.state = BucketState.FULL

    def mark_summed(self) -> None:
        """Note that the exchange worked: the bucket has the sums."""
        assert self.state is BucketState.FULL, f"a bucket is summed that is {self.state.name}"
        self.state = BucketState.SUMMED

    def skip_update(self) -> None:
        """Make the next update skip all parts, because the bucket was not exchanged."""
        for part in self.parts:
            part.skip_update()

    def mark_applied(self) -> None:
        """Note that the update which owns the sums is applied.

        From now on, the rounding error of this exchange is added to the next gradients.
        """
        assert self.state is BucketState.SUMMED, f"a bucket is applied that is {self.state.name}"
        self.state = BucketState.APPLIED
        if self.residual is not None:
            self.residual.commit()

    def compute_total(self) -> None:
        """Set `total` to the sum of all values. It is not finite if one of the values is not.

        Called before the bucket is summed over the members. On a GPU the sum is queued.
        """
        if self.is_bfloat16:
            self.total.copy_(self.values.sum(dtype=torch.float32) + self.exact.sum())
        else:
            self.total.copy_(self.flat.sum())

    @torch.no_grad()
    def write(self, flat: torch.Tensor, weights: Sequence[float], scale: float | None) -> None:
        """Write sums to the gradients and counts, in as few kernels as possible.

        Args:
            flat: the sums: `self.flat`, or a copy of it.
            weights: one per part, summed over the groups; 0 = no group has this part.
            scale: factor from the sums to the gradients, besides `gradient_scale`; None = divide
                each sum by its weight, which gives the weighted mean.
        """
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        factors: list[float] = []
        views = self.views if flat is self.flat else self.split(flat)[0]
        for part, total, weight in zip(self.parts, views, weights, strict=True):
            if weight == 0:
                part.skip_update()
                continue
            targets.append(part.result_memory())
            sources.append(total)
            if isinstance(part, Gradient):
                # Scale here, where the sums are copied anyway. Another pass over them would cost
                # time.
                mean_scale = 1 / weight if scale is None else scale
                factors.append(self._gradient_scale * mean_scale)
            else:
                factors.append(1.0)
        if not targets:
            return
        is_upload = sources[0].device.type == "cpu" and targets[0].device.type != "cpu"
        if is_upload:
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
    """Set each target to its source times its factor, all in host memory.

    One tensor after the other, because a tensor that was just read is in the cache.
    """
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
    """Set each target to its source times its factor. The product is rounded once."""
    must_scale = any(factor != 1.0 for factor in factors)
    is_fp32 = sources[0].dtype is torch.float32
    # The copy from a GPU to host memory is not complete when this method returns, so the host could
    # not multiply it. The sources' device makes the product then.
    is_download = sources[0].device != targets[0].device
    if must_scale and (is_fp32 or is_download):
        sources = list(torch._foreach_mul([source.float() for source in sources], factors))
        must_scale = False
    torch._foreach_copy_(targets, sources, non_blocking=True)
    if must_scale:
        # The sources are bfloat16. A product in bfloat16 would be rounded, and rounded again in the
        # target's dtype. So multiply after the copy, in the target's dtype.
        torch._foreach_mul_(targets, factors)


def _upload(targets: list[torch.Tensor], sources: list[torch.Tensor], factors: list[float]) -> None:
    """Copy tensors from host memory to the GPU, and multiply them there by their factors.

    The host does not wait if the sources are pinned. A product on the host would need as much
    memory again, and that memory would not be pinned.
    """
    copied: list[torch.Tensor] = []
    unscaled: list[torch.Tensor] = []  # targets that are multiplied after the copy
    unscaled_factors: list[float] = []
    for source, target, factor in zip(sources, targets, factors, strict=True):
        if source.dtype is not target.dtype:
            # Multiply in fp32 before the conversion, so that the product is rounded once.
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
    """Cut `parts` into the contents of buckets of at most `bucket_bytes`, in their order.

    The sizes count as fp32 in any encoding. A part that is larger than `bucket_bytes` has a bucket
    of its own.
    """
    buckets: list[list[BucketPart]] = []
    free_bytes = 0  # in the last bucket
    for part in parts:
        part_bytes = part.shape.numel() * _EXACT_BYTES
        if not buckets or part_bytes > free_bytes:
            buckets.append([])
            free_bytes = bucket_bytes
        buckets[-1].append(part)
        free_bytes -= part_bytes
    return buckets


def _layout(tensor: torch.Tensor) -> object:
    """Return how a tensor is sharded over the ranks of its group; None = it is no DTensor."""
    return tensor.placements if isinstance(tensor, DTensor) else None


def _shard(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of `gradient`, sharded as its parameter.

    Tensor parallelism leaves some gradients with another sharding. A collective within the group
    then changes the sharding.
    """
    if isinstance(gradient, DTensor) and _layout(gradient) != _layout(parameter):
        assert isinstance(parameter, DTensor)
        gradient = gradient.redistribute(placements=parameter.placements)
    return device.local_shard(gradient)
