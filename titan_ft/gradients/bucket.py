# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Buckets: flat tensors of fixed content and order in which gradients travel, and the way into and out of them."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from titan_ft import device
from titan_ft.gradients import half
from titan_ft.gradients.quantize import Residual, payload_bytes

_EXACT_BYTES = torch.float32.itemsize  # of a number that is never rounded


class Gradient:
    """A parameter's gradient, as a part of a bucket."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter = parameter
        self.shape = device.local_shard(parameter).shape

    def read(self) -> torch.Tensor | None:
        """Return this rank's shard of the gradient; None for a parameter that this step did not use."""
        gradient = self.parameter.grad
        return None if gradient is None else _shard(gradient, self.parameter)

    def drop(self) -> None:
        """Let the parameter have no gradient: an optimizer skips it, one of zeros would make it decay."""
        self.parameter.grad = None

    def target(self) -> torch.Tensor:
        """Return where this rank's shard of the new gradient is to be written."""
        parameter = self.parameter
        if parameter.grad is None or _layout(parameter.grad) != _layout(parameter):
            parameter.grad = torch.zeros_like(parameter)
        return device.local_shard(parameter.grad)


class Count:
    """A buffer in which the model counts what it trains, as a part of a bucket."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = device.local_shard(buffer)
        self.shape = self.buffer.shape

    def read(self) -> torch.Tensor:
        """Return what this rank has counted."""
        return self.buffer

    def drop(self) -> None:
        """Leave what is counted: nobody has counted more."""

    def target(self) -> torch.Tensor:
        """Return where the sum is to be written."""
        return self.buffer


Part = Gradient | Count


class BucketState(enum.Enum):
    """The owner of a bucket's memory, and what is in it.

    FILLING -> FULL -> SUMMED -> APPLIED -> FILLING ... `begin` is allowed in every state: an exchange may break, and a
    round that is no update leaves sums that nobody applies.
    """

    FILLING = enum.auto()  # the training thread copies gradients in, as they become final
    FULL = enum.auto()  # the exchange's thread sums it
    SUMMED = enum.auto()  # an update owns the sums in it (`Sums`)
    APPLIED = enum.auto()  # the update is made, and nobody needs the memory


class Bucket:
    """What travels together: a flat tensor and one view per part, gradients before counts, in a fixed order.

    Its gradients are kept as they travel, fp32 or bfloat16. Behind them come the numbers that are never rounded, in
    fp32 always: the counts, and one for each part, the weights of the groups that have a gradient of it, added up.

    Attributes:
        state: see `BucketState`.
        on_host: the gradients that it is filled from, and written to, are in host memory.
        flat: 1D, of the dtype that gradients travel in; `values` are the gradients in it, `exact` the other numbers.
        views: of `flat`, one per part; `used` are the weights.
        residual: with quantization, what rounding has left behind of this group's gradients; else None.
        missing: parts that are not in it yet.
        final: those of them whose gradients are final.
        calls: of autograd's hook for each part, since the launch; counted with a pipeline only.
        stream: of the device, where the last of these became so; behind those of all others.
        weights: of the parts that are in it.
        full: the bucket may be read, or be overwritten by who gives nothing, from there on.
        total: sum of all that this rank gives.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        fragment: int,
        where: torch.device,
        dtype: torch.dtype,
        *,
        quantize: bool,
        gradient_scale: float = 1.0,
    ) -> None:
        self.parts, self.fragment, self._where, self._dtype = list(parts), fragment, where, dtype
        sizes = [part.shape.numel() for part in parts]
        num_gradients = sum(isinstance(part, Gradient) for part in parts)
        self._sizes, self._exact_sizes = sizes[:num_gradients], [*sizes[num_gradients:], len(sizes)]
        self._gradient_scale = gradient_scale
        self.on_host = all(part.parameter.device.type == "cpu" for part in parts if isinstance(part, Gradient))
        self.state = BucketState.APPLIED
        self.residual = Residual() if quantize else None
        self.total = torch.empty((), dtype=torch.float32, device=where)
        self.missing: set[int] = set()
        self.final: list[int] = []
        self.calls: Counter[int] = Counter()
        self.weights = [0.0] * len(self.parts)
        self.stream: torch.Stream | None = None
        self.full: torch.Event | None = None
        self.renew()

    @property
    def halves(self) -> bool:
        """Say whether its gradients are in bfloat16."""
        return self._dtype is torch.bfloat16

    @property
    def num_bytes(self) -> int:
        """Return its memory."""
        return self.flat.numel() * self.flat.element_size()

    def renew(self) -> None:
        """Take other memory; what is in the bucket is lost."""
        per_exact = _EXACT_BYTES // self._dtype.itemsize
        before = -(-sum(self._sizes) // per_exact) * per_exact  # what is exact lies at a multiple of its bytes
        self.flat = device.empty_bucket(before + sum(self._exact_sizes) * per_exact, self._dtype, self._where)
        self.values, self.exact = self._cut(self.flat)
        self.views, self.used = self.split(self.flat)

    def _cut(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        exact = flat.view(torch.uint8)[-sum(self._exact_sizes) * _EXACT_BYTES :].view(torch.float32)
        return flat[: sum(self._sizes)], exact

    def split(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the views of a flat tensor like the bucket's: one per part, and their weights."""
        values, exact = self._cut(flat)
        *counts, used = exact.split_with_sizes(self._exact_sizes)
        views = [*values.split_with_sizes(self._sizes), *counts]
        return [view.view(part.shape) for view, part in zip(views, self.parts, strict=True)], used

    def wire_bytes(self, num_members: int) -> int:
        """Return what each of so many members sends for all of them to have the sum."""
        num_values, num_exact, others = self.values.numel(), self.exact.numel(), num_members - 1
        if self.halves:
            return half.wire_bytes(num_values, num_exact, num_members)
        if self.residual is None:  # a ring adds up and passes on, each an n-th of it at a time
            return 2 * others * self.num_bytes // num_members
        return others * payload_bytes(num_values, num_exact)  # a ring passes all payloads on

    def begin(self, gives: bool) -> None:
        """Begin an exchange, to which this rank `gives` all parts, or none."""
        self.state = BucketState.FILLING if gives else BucketState.FULL
        self.missing = set(range(len(self.parts))) if gives else set()
        self.final, self.stream, self.calls = [], None, Counter()
        if self.residual is not None:
            self.residual.begin()

    @torch.no_grad()
    def fill(self, indices: Iterable[int], weight: float) -> None:
        """Copy parts into the bucket, with their weight; with the last of them it is FULL."""
        assert self.state is BucketState.FILLING, f"gradients come into a bucket that is {self.state.name}"
        given, own = [], []
        for index in indices:
            shard = self.parts[index].read()
            self.weights[index] = 0.0 if shard is None else weight
            if shard is None:
                self.views[index].zero_()
            else:
                given.append(self.views[index])
                own.append(shard)
        if given:
            torch._foreach_copy_(given, own, non_blocking=True)
        self.missing.difference_update(indices)
        self.final.clear()
        if not self.missing:
            self.used.copy_(torch.tensor(self.weights, dtype=torch.float32), non_blocking=True)
            self.state = BucketState.FULL

    def end_sum(self) -> None:
        """The exchange worked, and the bucket has the sums."""
        assert self.state is BucketState.FULL, f"a bucket is summed that is {self.state.name}"
        self.state = BucketState.SUMMED

    def drop(self) -> None:
        """Let its parts have no sums: it did not travel."""
        for part in self.parts:
            part.drop()

    def apply(self) -> None:
        """The update that owns the sums is made: what rounding left of this rank's gradients counts from now on."""
        assert self.state is BucketState.SUMMED, f"an update is made of a bucket that is {self.state.name}"
        self.state = BucketState.APPLIED
        if self.residual is not None:
            self.residual.settle()

    def add_up(self) -> None:
        """Queue the sum of all that is in it: an inf or a NaN shows there. One cheap pass."""
        if self.halves:
            self.total.copy_(self.values.sum(dtype=torch.float32) + self.exact.sum())
        else:
            self.total.copy_(self.flat.sum())

    @torch.no_grad()
    def write(self, flat: torch.Tensor, weights: Sequence[float], scale: float | None) -> None:
        """Write the sums in `flat`, which is like the bucket's, to where its parts are, in as few kernels as there are.

        Args:
            weights: of the parts; no group has one whose weight is 0.
            scale: factor of the gradients, beside the bucket's `gradient_scale`; None = they become the means by the
                weights.
        """
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        factors: list[float] = []
        views = self.views if flat is self.flat else self.split(flat)[0]
        for part, total, weight in zip(self.parts, views, weights, strict=True):
            if weight:
                targets.append(part.target())
                sources.append(total)
                # Here, where the sums are copied anyway: no further pass over the gradients. A count is no mean.
                mean = isinstance(part, Gradient)
                factors.append(self._gradient_scale * (1 / weight if scale is None else scale) if mean else 1.0)
            else:
                part.drop()
        if not targets:
            return
        if sources[0].device.type == "cpu" and targets[0].device.type != "cpu":
            _upload(targets, sources, factors)
        elif self._where.type == "cpu":
            _multiply_on_host(targets, sources, factors)
        else:
            _multiply(targets, sources, factors)


def _multiply_on_host(targets: list[torch.Tensor], sources: list[torch.Tensor], factors: list[float]) -> None:
    """Make targets the sources times factors, each while it is in the cache."""
    if all(factor == 1.0 for factor in factors):
        torch._foreach_copy_(targets, sources)
        return
    for target, source, factor in zip(targets, sources, factors, strict=True):
        if factor != 1.0 and target.dtype is source.dtype is torch.float32:
            torch.mul(source, factor, out=target)  # in one pass, without memory for the product
        else:
            _multiply([target], [source], [factor])


def _multiply(targets: list[torch.Tensor], sources: list[torch.Tensor], factors: list[float]) -> None:
    """Make targets the sources times factors, rounded once. A device that has the sources makes the product."""
    changes = any(factor != 1.0 for factor in factors)
    # What a device brings to host memory is not there yet when the host could multiply it.
    if changes and (sources[0].dtype is torch.float32 or sources[0].device != targets[0].device):
        sources = list(torch._foreach_mul([source.float() for source in sources], factors))
        changes = False
    torch._foreach_copy_(targets, sources, non_blocking=True)
    if changes:  # a product in bfloat16 is rounded, unless it is made where it is to be
        torch._foreach_mul_(targets, factors)


def _upload(targets: list[torch.Tensor], sources: list[torch.Tensor], factors: list[float]) -> None:
    """Write tensors of the host, times factors, to the device; the host waits for none that is pinned.

    The product is made on the device, of the same two numbers: on the host it would take as much memory again, which is
    not pinned. What has another dtype there is brought to it when it has been scaled.
    """
    alike = [target.dtype is source.dtype for source, target in zip(sources, targets, strict=True)]
    moved = [
        source if same else source.to(target.device, non_blocking=True).float().mul_(factor)
        for source, target, factor, same in zip(sources, targets, factors, alike, strict=True)
    ]
    torch._foreach_copy_(targets, moved, non_blocking=True)
    scaled = [index for index, same in enumerate(alike) if same and factors[index] != 1.0]
    if scaled:
        torch._foreach_mul_([targets[index] for index in scaled], [factors[index] for index in scaled])


def partition(parts: Sequence[Part], bucket_bytes: int) -> list[list[Part]]:
    """Cut `parts` into runs of at most `bucket_bytes` of fp32 (at least one part each), keeping the order."""
    runs: list[list[Part]] = []
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
    """Return this rank's shard of `gradient`, sharded as its parameter; tensor parallelism leaves some otherwise."""
    if isinstance(gradient, DTensor) and _layout(gradient) != _layout(parameter):
        gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]  # a DTensor too
    return device.local_shard(gradient)
