# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The exchange: sum gradient shards and gather rows over the replica groups, during backward.

Autograd finishes gradients one after the other (`register_post_accumulate_grad_hook`; FSDP2 calls
the hook for sharded parameters too). Hooks copy the gradients into buckets of fixed content and
order. The all-reduce of a bucket starts as soon as the bucket and its predecessors are full.

The buckets are copies. The local gradients stay untouched until the step is committed. So a broken
exchange is repeated with the survivors, and nothing is computed again.

See docs/exchange.md.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from titan_ft import device
from titan_ft.gradients import half
from titan_ft.gradients.bucket import (
    Bucket,
    BucketPart,
    BucketState,
    CountBuffer,
    Gradient,
    partition,
)
from titan_ft.gradients.flight import ExchangeError, Flight, Gathered, OwnFacts
from titan_ft.gradients.quantize import payload_bytes
from titan_ft.gradients.sums import CopyMemory, Sums
from titan_ft.membership.collectives import all_gather, all_to_all, rehearse_sums
from titan_ft.membership.membership import Membership
from titan_ft.protocol.member import Quorum

logger = logging.getLogger(__name__)

_MOST_REHEARSED = 64 << 20
"""Values. The bucket of an unsharded embedding has gigabytes, and the GPU may not have as much
again. For tensors above this size, NCCL's choice of an algorithm should no longer change."""


@dataclass(frozen=True)
class Reduced:
    """The outcome of one exchange.

    Attributes:
        rows, messages: one of each member. All rows have the same length.
        nonfinite: for each member, True if its gradients have an inf or a NaN.
        sums: of the gradients. They are valid until the next exchange is launched.
    """

    quorum: Quorum
    rows: list[list[float]]
    messages: list[bytes]
    nonfinite: list[bool]
    sums: Sums


class GradientExchange:
    """Sums gradients over the groups.

    One object per rank. Ranks of the same index in all groups exchange with each other. `Rounds`
    calls it. Training thread only; each exchange has a thread of its own (`Flight`). After
    `ExchangeError` the process group is aborted, the local gradients are untouched, and the
    exchange can be launched again.

    Args:
        parameters: the trainable parameters, in the same order in every group.
        membership: provides the quorum and the process group.
        bucket_bytes: size of a bucket. A larger parameter has a bucket of its own.
        where: device of the buckets (`device.exchange_device`).
        overlap: launch buckets during backward. A gradient must be final when autograd's hook runs.
            With CPU offload, `finish` launches the buckets after backward.
        microbatches: number of hook calls in a pipeline's step. Autograd calls the hook after each
            microbatch, and a gradient is final with the last call. 1 if FSDP calls the hook once,
            after all microbatches. 0 = there is no pipeline. None = unknown: the first backward
            counts the calls of each parameter, and its gradients leave when that backward has
            ended.
        gradient_scale: factor from local gradients to gradients of the reported loss. It is not 1
            if backward starts from another loss, as a pipeline's does.
        fragments: number of each parameter's fragment; empty = all have fragment 0. Only fragments
            that the groups give travel (`give_fragments`).
        quantize: gradients travel in 8 bits (`quantize.py`). The rounding error is added to this
            rank's next gradients. Not with counts, which would be rounded too.
        dtype: gradients travel in this dtype: fp32, or bfloat16 (`half.py`). Not with `quantize`.
        counts: buffers with whole numbers, in which the model counts what it trains since the
            gradients were zero. They are summed with the gradients, in the same order in every
            group, and get the sums when the gradients do. The sums are exact up to 2**24.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        membership: Membership,
        *,
        bucket_bytes: int,
        where: torch.device,
        overlap: bool,
        microbatches: int | None = 0,
        gradient_scale: float = 1.0,
        fragments: Sequence[int] = (),
        quantize: bool = False,
        dtype: torch.dtype = torch.float32,
        counts: Iterable[torch.Tensor] = (),
    ) -> None:
        self._membership = membership
        self._where = where
        gradients = [Gradient(parameter) for parameter in parameters if parameter.requires_grad]
        parts = _order_parts(gradients, fragments, counts)
        self._buckets: list[Bucket] = []
        for fragment, own in parts.items():
            for run in partition(own, bucket_bytes):
                bucket = Bucket(
                    run,
                    fragment,
                    where,
                    dtype,
                    quantize=quantize,
                    gradient_scale=gradient_scale,
                )
                self._buckets.append(bucket)
        self._num_fragments = max(parts) + 1
        self._weights: Mapping[int, float] = dict.fromkeys(parts, 1.0)
        self.copy_memory = CopyMemory(self._buckets, where)
        # Of the last exchange that worked. Before the first one, no bucket has travelled.
        self._sums = Sums(self._buckets, [None] * len(self._buckets), self.copy_memory)
        self._armed = False
        # Number of hook calls of each part in a backward; None = not known.
        self._calls: dict[tuple[Bucket, int], int] | None = None
        self._flight: Flight | None = None
        self._wire_bytes = 0
        # With CPU offload no gradient is taken before the end of backward. FSDP2 copies each
        # gradient to host memory, and with a hook on the parameter it would wait for each copy
        # (`foreach_reduce` in torch's _fsdp_collectives). Without hooks it waits once, at the end
        # of backward (`FSDPParamGroup.finalize_backward`).
        offloads = not device.on_cpu() and all(bucket.on_host for bucket in self._buckets)
        if overlap and not offloads:
            self._register_hooks(microbatches)

    def _register_hooks(self, microbatches: int | None) -> None:
        for bucket in self._buckets:
            for index, part in enumerate(bucket.parts):
                if not isinstance(part, Gradient):
                    continue
                take = self._hook(bucket, index)
                if microbatches != 0:
                    take = self._on_last_call(bucket, index, microbatches, take)
                part.parameter.register_post_accumulate_grad_hook(take)

    # Launching

    def give_fragments(self, weights: Mapping[int, float]) -> None:
        """Set which fragments this rank gives from now on. Call this before a launch.

        Before the first call, this rank gives all fragments with a weight of 1. The weights then
        count the groups that have a gradient.

        Args:
            weights: weight in the mean, by fragment.
        """
        self._weights = dict(weights)

    def arm(self, newest_step: int) -> None:
        """Launch an exchange that the next backward fills. Call this before the last backward.

        Args:
            newest_step: this group's gradients count unless a member of the quorum has more
                updates. If they do not count, the group sends zeros.
        """
        self._launch(newest_step)
        self._armed = True

    def launch(self, newest_step: int | None = None, *, may_update: bool = True) -> None:
        """Launch an exchange of the local gradients, which are only read; returns at once.

        Gradients travel only if a member gives some, and if any member expects an update.

        Args:
            newest_step: see `arm`; None = this rank gives nothing.
            may_update: False if this rank knows that no update can follow.
        """
        self._launch(newest_step, may_update=may_update)

    def launch_with(self, newest_step: int, facts: OwnFacts) -> None:
        """Launch an exchange whose facts are known already; returns at once.

        `finish` completes it. `facts` must not change until `finish` returns, because the exchange's
        thread fills in the rest.
        """
        self._launch(newest_step).report(facts)
        self._fill_all()

    @property
    def is_launched(self) -> bool:
        """True from a launch until `finish`."""
        return self._flight is not None

    @property
    def waits_for_members(self) -> bool:
        """True while other members have not given all of their sums yet."""
        return self._flight is not None and self._flight.is_summing

    def _launch(self, newest_step: int | None, *, may_update: bool = True) -> Flight:
        assert self._flight is None, "an exchange is under way already: finish() completes it"
        self._sums.expire()
        given = frozenset[int]() if newest_step is None else frozenset(self._weights)
        flight = Flight(
            self._membership,
            self._buckets,
            self._where,
            given=given,
            num_fragments=self._num_fragments,
            newest_step=newest_step,
            may_update=may_update,
        )
        self._flight = flight
        for bucket in self._buckets:
            bucket.start_exchange(bucket.fragment in given)
            if bucket.state is BucketState.FULL:
                bucket.ready = self._sums.last_read
                flight.hand_over(bucket)
        # Last: the thread reads the buckets set up above.
        flight.start()
        return flight

    # Completing

    def finish(self, facts: OwnFacts) -> Reduced:
        """Complete the launched exchange, and return the facts of all members and the sums.

        Args:
            facts: of this member; ignored after `launch_with`.

        Raises:
            ExchangeError: a member died or hung, or the process group could not be built. The
                process group is aborted, so that the other members notice at once.
        """
        flight = self._flight
        assert flight is not None, "no exchange is under way"
        if self._armed and self._calls is None:
            self._calls = self._count_calls()
        self._armed = False
        unsafe = False  # an operation that was broken off may still write to the buckets
        try:
            self._fill_all()
            flight.report(facts)
            with self._membership.watch_exchange(), self._bounded():
                gathered = flight.finish()
            return self._take_sums(gathered)
        except ExchangeError:
            self._membership.abort()
            # With Gloo, any aborted operation may still write to the buckets. With NCCL, only an
            # operation whose launch has not returned may (`flight.abandoned`).
            unsafe = self._where.type == "cpu"
            raise
        finally:
            flight.join()
            if unsafe or flight.abandoned:
                for bucket in self._buckets:
                    bucket.reallocate()
            self._flight = None
            self._wire_bytes += flight.wire_bytes

    def _take_sums(self, gathered: Gathered) -> Reduced:
        for bucket, weights in zip(self._buckets, gathered.weights, strict=True):
            if weights is not None:
                bucket.mark_summed()
        self._sums = Sums(
            self._buckets,
            gathered.weights,
            self.copy_memory,
            after=self._sums,
        )
        return Reduced(
            gathered.quorum,
            gathered.rows,
            gathered.messages,
            gathered.nonfinite,
            self._sums,
        )

    def _bounded(self) -> contextlib.AbstractContextManager[None]:
        """Limit this thread's wait for the exchange to the process group's timeout.

        The quorum is awaited before, without a limit, because other groups may still compute. The
        deadline ends the operations of the exchange's thread as well. Gloo needs no deadline: its
        operations have timeouts of their own.
        """
        if self._where.type == "cpu":
            return contextlib.nullcontext()
        # The exchange's thread gets the same error, and `Flight.finish` raises it.
        with contextlib.suppress(Exception):
            self._membership.await_quorum()
        deadline: contextlib.AbstractContextManager[None] = self._membership.process_group.deadline(
            self._membership.timeout,
        )
        return deadline

    # Set-up and sizes

    def rehearse(self, group: Any, num_members: int) -> None:
        """Make each collective of an exchange once, in the size of the largest bucket.

        A part of NCCL's set-up. NCCL connects the members for an algorithm when it is first used
        (`ncclCollPreconnect`). Otherwise the first exchange of each communicator would wait for
        that, and could not be aborted meanwhile.

        Args:
            group: a process group of torch's.
        """
        if num_members == 1 or not self._buckets:
            return
        timeout = self._membership.timeout
        largest = max(self._buckets, key=lambda bucket: bucket.num_bytes)
        num_values = min(largest.values.numel(), _MOST_REHEARSED)
        num_exact = largest.exact.numel()
        num_summed = num_exact  # rows travel by sums, whatever the encoding of gradients
        if largest.is_bfloat16:
            values = largest.values.new_zeros(num_values)
            rows = half.cut(values, torch.zeros_like(largest.exact), num_members)
            part, _ = half.add_up(all_to_all(group, rows, timeout), num_exact)
            all_gather(group, part.view(torch.uint8), num_members, timeout)
        elif largest.residual is not None:
            num_octets = payload_bytes(num_values, num_exact)
            payload = torch.zeros(num_octets, dtype=torch.uint8, device=self._where)
            all_gather(group, payload, num_members, timeout)
        else:
            num_summed = num_values + num_exact
        rehearse_sums(group, num_summed, self._where, timeout)

    def take_wire_bytes(self) -> int:
        """Return the bytes of gradients that this rank has sent since the last call.

        Bytes of broken exchanges count as well.
        """
        taken = self._wire_bytes
        self._wire_bytes = 0
        return taken

    def wire_bytes(self, num_members: int) -> int:
        """Return the bytes that this rank sends in an exchange of all fragments."""
        return sum(bucket.wire_bytes(num_members) for bucket in self._buckets)

    def drop_residuals(self) -> None:
        """Forget the rounding errors of earlier gradients: this group has another state now."""
        for bucket in self._buckets:
            if bucket.residual is not None:
                bucket.residual.drop()

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's buckets."""
        return sum(bucket.num_bytes for bucket in self._buckets)

    # Filling the buckets

    def _hook(self, bucket: Bucket, index: int) -> Callable[[torch.Tensor], None]:
        def take_gradient(parameter: torch.Tensor) -> None:
            if not self._armed:
                return
            # FSDP has several streams for gradients: one for sharded parameters, and another one
            # for parameters that are replicated too.
            bucket.stream = device.join_stream(bucket.stream)
            bucket.final.append(index)
            # On a GPU, one kernel copies all gradients of the bucket. On a host, each is copied
            # while it is in the cache.
            is_last = len(bucket.final) == len(bucket.missing)
            if self._where.type == "cpu" or is_last:
                self._fill(bucket, bucket.final)

        return take_gradient

    def _on_last_call(
        self,
        bucket: Bucket,
        index: int,
        number: int | None,
        take_gradient: Callable[[torch.Tensor], None],
    ) -> Callable[[torch.Tensor], None]:
        """Return a hook that takes the gradient at its last call. After fewer calls, `finish` does.

        A schedule that computes the gradients of weights by themselves (zero bubble) calls no hook
        for them. torchtitan 0.3's loss goes backward through the output layer by itself, so the
        hook of a weight that is the embedding too is called twice.

        Args:
            number: the last call; None = the number of calls in the first backward. A part without
                a call in it has no last call.
        """

        def count_call(parameter: torch.Tensor) -> None:
            if not self._armed:
                return
            bucket.calls[index] += 1
            last = self._find_last_call(bucket, index, number)
            if last == 0:
                return
            assert bucket.calls[index] <= last, "a gradient was sent before it was final"
            if bucket.calls[index] == last:
                take_gradient(parameter)

        return count_call

    def _find_last_call(self, bucket: Bucket, index: int, number: int | None) -> int:
        if number is not None:
            return number
        if self._calls is None:
            return 0
        return self._calls.get((bucket, index), 0)

    def _count_calls(self) -> dict[tuple[Bucket, int], int]:
        calls = {}
        for bucket in self._buckets:
            for index, number in bucket.calls.items():
                calls[bucket, index] = number
        return calls

    def _fill_all(self) -> None:
        for bucket in self._buckets:
            if bucket.state is BucketState.FILLING:
                self._fill(bucket, sorted(bucket.missing))

    def _fill(self, bucket: Bucket, indices: Iterable[int]) -> None:
        """Copy parts into the bucket. Hand it to the flight when it is full."""
        self._sums.await_last_read()
        bucket.fill(indices, self._weights[bucket.fragment])
        if bucket.state is BucketState.FULL and self._flight is not None:
            bucket.ready = device.record_event()
            self._flight.hand_over(bucket)


def _order_parts(
    gradients: Sequence[Gradient],
    fragments: Sequence[int],
    counts: Iterable[torch.Tensor],
) -> dict[int, list[BucketPart]]:
    """Return the parts of each fragment, in the order in which they travel.

    Autograd finishes the last layers first. Counts come last: they are complete only after all of
    backward, because a recomputation counts too.
    """
    parts: dict[int, list[BucketPart]] = {fragment: [] for fragment in sorted({*fragments, 0})}
    for gradient, fragment in zip(gradients, fragments or [0] * len(gradients), strict=True):
        parts[fragment].append(gradient)
    for own in parts.values():
        own.reverse()
    parts[0] += map(CountBuffer, counts)
    return parts
