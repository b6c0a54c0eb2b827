# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The exchange: sum gradients over the replica groups, and gather their facts.

An exchange has two parts:

1. The gradients are summed, bucket by bucket, while backward still computes others. Autograd calls
   a hook for each gradient when it is final (`register_post_accumulate_grad_hook`; FSDP2 calls it
   for sharded parameters too). The hook copies the gradient into a *bucket*: a flat tensor. In all
   groups it holds the gradients of the same parameters, and has the same place in the order. The
   sum of a bucket starts when the bucket and all buckets before it are full.
2. Each member sends its facts: a *row* of numbers and a *message* of bytes. Every member gets those
   of all members (`protocol/row.py`, `protocol/ledger.py`).

A bucket is a copy. The local gradients stay untouched until the step is committed. So if an
exchange breaks, the survivors repeat it, and compute nothing again.

See docs/exchange.md.
"""

from __future__ import annotations

import contextlib
import enum
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

_MAX_REHEARSED_VALUES = 64 << 20
"""Largest tensor of a rehearsal. The bucket of an unsharded embedding has gigabytes, and the GPU
may not have as much memory again. NCCL should choose the same algorithm for all larger tensors."""


class HookCalls(enum.Enum):
    """How a hook finds the last call of a backward, where the number of calls is not given."""

    ONE = enum.auto()  # there is no pipeline: the first call is the last, and nothing is counted
    # The number differs between parameters. The first backward counts the calls, and its gradients
    # travel only after it. From then on, a gradient travels with its last call.
    COUNTED = enum.auto()


@dataclass(frozen=True)
class Reduced:
    """The outcome of one exchange.

    Attributes:
        quorum: the members. The lists below have one value for each member, in its order.
        rows: the members' rows. All of them have the same length.
        messages: the members' messages.
        nonfinite: True for a member whose gradients have an inf or a NaN.
        sums: the sums of the gradients, valid until the next exchange is launched.
    """

    quorum: Quorum
    rows: list[list[float]]
    messages: list[bytes]
    nonfinite: list[bool]
    sums: Sums


class GradientExchange:
    """Makes exchanges for one rank. Its members are the ranks of the same index in all groups.

    `Rounds` launches an exchange by one of `arm`, `launch` and `launch_with`, and completes it by
    `finish`.

    Threads: the training thread calls all methods but `rehearse`, which runs on the thread of the
    quorum. Autograd calls the hooks while the training thread waits in the backward. The
    collectives of each exchange run on a thread of its own (`Flight`).

    After `ExchangeError` the process group is aborted and the local gradients are untouched. The
    exchange can then be launched again.

    Args:
        parameters: the trainable parameters, in the same order in every group.
        membership: provides the quorum and the process group.
        bucket_bytes: size of a bucket. A larger parameter has a bucket of its own.
        where: device of the buckets (`device.exchange_device`).
        overlap: copy the gradients from autograd's hooks, so that buckets are summed during
            backward. Only if a gradient is final at the last call of its hook. Without it, and with
            CPU offload, `finish` copies all gradients after backward.
        hook_calls: how often autograd calls a gradient's hook in one backward: a number if known,
            else how to find the last call. In a pipeline without FSDP it is the number of
            microbatches. With FSDP, autograd calls the hook once for all of them.
        gradient_scale: factor from local gradients to gradients of the reported loss. It is not 1
            in a pipeline, where backward starts from the sum of the losses and not from their mean.
        fragments: for each parameter, the number of its fragment; empty = all parameters have
            fragment 0. A fragment is a part of the model that is exchanged by itself, as Streaming
            DiLoCo does (`give_fragments`).
        quantize: encode gradients in 8 bits (`quantize.py`). The rounding error is added to this
            rank's next gradients. Counts stay exact.
        dtype: encode gradients in this dtype, fp32 or bfloat16 (`half.py`). Not with `quantize`.
        counts: buffers with whole numbers, in which the model counts the tokens of each expert from
            the moment when the gradients are set to zero. The exchange sums them with the
            gradients. They have the same order in every group. Their sums are exact up to 2**24.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        membership: Membership,
        *,
        bucket_bytes: int,
        where: torch.device,
        overlap: bool,
        hook_calls: int | HookCalls = HookCalls.ONE,
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
        for fragment, fragment_parts in parts.items():
            for bucket_parts in partition(fragment_parts, bucket_bytes):
                bucket = Bucket(
                    bucket_parts,
                    fragment,
                    where,
                    dtype,
                    quantize=quantize,
                    gradient_scale=gradient_scale,
                )
                self._buckets.append(bucket)
        self._num_fragments = max(parts) + 1
        # The fragments that this rank gives, with their weights; see `give_fragments`.
        self._weights: Mapping[int, float] = dict.fromkeys(parts, 1.0)
        self.copy_memory = CopyMemory(self._buckets, where)
        # The sums of the last exchange that worked. Before the first exchange, no bucket has any.
        self._sums = Sums(self._buckets, [None] * len(self._buckets), self.copy_memory)
        self._takes_from_hooks = False  # the hooks copy gradients, from `arm` to `finish`
        # For each part of a bucket, the number of its hook calls in the first backward; None before
        # the end of that backward.
        self._counted_calls: dict[tuple[Bucket, int], int] | None = None
        self._flight: Flight | None = None
        self._sent_bytes = 0
        # With CPU offload, FSDP2 copies each gradient to host memory. If the parameters had hooks,
        # FSDP2 would wait for each copy (`foreach_reduce` in torch's _fsdp_collectives). Without
        # hooks it waits once, at the end of backward (`FSDPParamGroup.finalize_backward`).
        has_gpu = not device.on_cpu()
        offloads = has_gpu and all(bucket.on_host for bucket in self._buckets)
        if overlap and not offloads:
            self._register_hooks(hook_calls)

    def _register_hooks(self, hook_calls: int | HookCalls) -> None:
        for bucket in self._buckets:
            for index, part in enumerate(bucket.parts):
                if not isinstance(part, Gradient):
                    continue
                hook = self._make_hook(bucket, index)
                if hook_calls is not HookCalls.ONE:
                    hook = self._run_at_last_call(bucket, index, hook_calls, hook)
                part.parameter.register_post_accumulate_grad_hook(hook)

    # Launching

    def give_fragments(self, weights: Mapping[int, float]) -> None:
        """Set which fragments this rank gives in the next exchanges. Call this before a launch.

        The mean of a fragment is the sum of its gradients, divided by the sum of the members'
        weights. Without a call, this rank gives all fragments, each with a weight of 1.

        Args:
            weights: for each fragment that this rank gives, what it adds to the divisor. The caller
                has multiplied the gradients by it already.
        """
        self._weights = dict(weights)

    def arm(self, newest_step: int) -> None:
        """Launch an exchange that the next backward fills; returns at once.

        Call this before the last backward of a step.

        Args:
            newest_step: the most updates that a member of the quorum may hold. If one holds more,
                this group's gradients are of an old step, and it sends zeros. It is one more than
                this group's own updates: one member may have completed an exchange that broke for
                the others.
        """
        self._launch(newest_step)
        self._takes_from_hooks = True

    def launch(self, newest_step: int | None = None, *, may_update: bool = True) -> None:
        """Launch an exchange of the gradients of a finished backward; returns at once.

        `finish` copies the gradients. Only the facts are exchanged if no member gives gradients, or
        if all members pass `may_update=False`. With one True, all members sum: they must make the
        same collectives.

        Args:
            newest_step: see `arm`; None = this rank gives no gradients.
            may_update: False if this rank knows that the round cannot be an update.
        """
        self._launch(newest_step, may_update=may_update)

    def launch_with(self, newest_step: int, facts: OwnFacts) -> None:
        """Launch an exchange whose gradients and facts are known already; returns at once.

        The exchange then goes on by itself, while this rank trains. `finish` completes it. `facts`
        must not change before that, because the exchange's thread reads it.
        """
        self._launch(newest_step).report(facts)
        self._fill_all()

    @property
    def is_launched(self) -> bool:
        """True from a launch until `finish`."""
        return self._flight is not None

    @property
    def waits_for_members(self) -> bool:
        """True until the sums of all buckets are complete. Until then some member still computes."""
        return self._flight is not None and self._flight.is_summing

    def _launch(self, newest_step: int | None, *, may_update: bool = True) -> Flight:
        assert self._flight is None, "an exchange is under way already: finish() completes it"
        self._sums.expire()
        given = frozenset(self._weights)
        if newest_step is None:
            given = frozenset()  # this rank gives no gradients
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
            gives_bucket = bucket.fragment in given
            bucket.start_exchange(gives_bucket)
            if not gives_bucket:
                # The bucket is full from the start: nothing needs to be copied into it. A GPU may
                # still read the sums of the last exchange in it.
                bucket.ready = self._sums.last_read
                flight.hand_over(bucket)
        # Start the thread last: it reads the buckets that are set up above.
        flight.start()
        return flight

    # Completing

    def finish(self, facts: OwnFacts) -> Reduced:
        """Complete the launched exchange, and return the facts of all members and the sums.

        Args:
            facts: this member's facts. Not read after `launch_with`, which has them already.

        Raises:
            ExchangeError: a member died or hung, or the process group could not be built. The
                process group is aborted, so that the other members notice at once.
        """
        flight = self._flight
        assert flight is not None, "no exchange is under way"
        if self._takes_from_hooks and self._counted_calls is None:
            # The first backward with hooks is over, so the number of calls is known.
            self._counted_calls = self._count_calls()
        self._takes_from_hooks = False
        unsafe = False  # an operation that was broken off may still write to the buckets
        try:
            self._fill_all()
            flight.report(facts)
            with self._membership.watch_exchange(), self._deadline_after_quorum():
                gathered = flight.finish()
            return self._adopt_sums(gathered)
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
            self._sent_bytes += flight.sent_bytes

    def _adopt_sums(self, gathered: Gathered) -> Reduced:
        """Mark the buckets that were summed, and return the outcome of the exchange."""
        for bucket, weights in zip(self._buckets, gathered.weights, strict=True):
            # Without weights, the bucket's fragment was not exchanged.
            if weights is not None:
                bucket.mark_summed()
        # A GPU may still read the previous sums, which have the same memory.
        self._sums = Sums(
            self._buckets,
            gathered.weights,
            self.copy_memory,
            previous=self._sums,
        )
        return Reduced(
            gathered.quorum,
            gathered.rows,
            gathered.messages,
            gathered.nonfinite,
            self._sums,
        )

    def _deadline_after_quorum(self) -> contextlib.AbstractContextManager[None]:
        """With NCCL, wait for the quorum, and return a context that limits the exchange after it.

        The wait for the quorum has no limit, because other groups may still compute. In the
        context, the process group's timeout ends the operations. With Gloo, do nothing: its
        operations have timeouts of their own.
        """
        if self._where.type == "cpu":
            return contextlib.nullcontext()
        # Ignore the error of a quorum here: the exchange's thread gets the same error, and
        # `Flight.finish` raises it.
        with contextlib.suppress(Exception):
            self._membership.await_quorum()
        deadline: contextlib.AbstractContextManager[None] = self._membership.process_group.deadline(
            self._membership.timeout,
        )
        return deadline

    # Set-up and sizes

    def rehearse(self, group: Any, num_members: int) -> None:
        """Make each collective of an exchange once, in the size of the largest bucket.

        NCCL connects the members for an algorithm when the algorithm is first used
        (`ncclCollPreconnect`). An operation that waits for these connections cannot be aborted. So
        the set-up of a communicator rehearses them, before the first exchange
        (`membership/process_group.py`).

        Args:
            group: a process group of torch's.
            num_members: number of its members.
        """
        if num_members == 1 or not self._buckets:
            return
        timeout = self._membership.timeout
        largest = max(self._buckets, key=lambda bucket: bucket.num_bytes)
        num_values = min(largest.values.numel(), _MAX_REHEARSED_VALUES)
        num_exact = largest.exact.numel()
        # Always all-reduces, because NCCL gathers the rows by them (`Operations.gather`). In fp32 the
        # gradients are all-reduced too. `exact` has what is never rounded: counts and weights.
        num_summed = num_exact
        if largest.is_bfloat16:
            # An all-to-all gives each member its part of all gradients. It adds them up in fp32,
            # and an all-gather sends the sums to all.
            values = largest.values.new_zeros(num_values)
            rows = half.cut(values, torch.zeros_like(largest.exact), num_members)
            received = all_to_all(group, rows, timeout)
            part, _ = half.add_up(received, num_exact)
            all_gather(group, part.view(torch.uint8), num_members, timeout)
        elif largest.residual is not None:  # in 8 bits
            num_octets = payload_bytes(num_values, num_exact)
            payload = torch.zeros(num_octets, dtype=torch.uint8, device=self._where)
            all_gather(group, payload, num_members, timeout)
        else:
            num_summed = num_values + num_exact
        rehearse_sums(group, num_summed, self._where, timeout)

    def pop_sent_bytes(self) -> int:
        """Return the bytes of gradients that this rank has sent since the last call.

        Bytes of broken exchanges count as well.
        """
        sent = self._sent_bytes
        self._sent_bytes = 0
        return sent

    def count_sent_bytes(self, num_members: int) -> int:
        """Return the bytes that this rank sends in an exchange of all fragments."""
        return sum(bucket.count_sent_bytes(num_members) for bucket in self._buckets)

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

    def _make_hook(self, bucket: Bucket, index: int) -> Callable[[torch.Tensor], None]:
        """Return a hook that copies the gradient of a bucket's part when it is final.

        Args:
            index: of the part in the bucket.
        """

        def copy_gradient(parameter: torch.Tensor) -> None:
            if not self._takes_from_hooks:
                return
            # The current stream waits for that of the bucket's earlier gradients. FSDP has several:
            # one for sharded parameters, and another one for those that are replicated too.
            bucket.stream = device.join_stream(bucket.stream)
            bucket.final_parts.append(index)
            # On a GPU, one kernel copies all gradients of the bucket. On a host, each gradient is
            # copied while it is in the cache.
            all_are_final = len(bucket.final_parts) == len(bucket.missing_parts)
            if self._where.type == "cpu" or all_are_final:
                self._fill(bucket, bucket.final_parts)

        return copy_gradient

    def _run_at_last_call(
        self,
        bucket: Bucket,
        index: int,
        hook_calls: int | HookCalls,
        hook: Callable[[torch.Tensor], None],
    ) -> Callable[[torch.Tensor], None]:
        """Return a hook that counts its calls in a backward, and runs `hook` at the last one.

        If the last call does not come, `finish` copies the gradient. This happens with a schedule
        that computes the gradients of weights by themselves (zero bubble): it calls no hook for
        them.

        With torchtitan 0.3 the number of calls differs between parameters. It computes the loss in
        chunks, whose backward through the output layer runs apart from the rest of the model. If
        the output layer shares its weight with the embedding, the weight's hook is called twice,
        and the others once.
        """

        def count_call(parameter: torch.Tensor) -> None:
            if not self._takes_from_hooks:
                return
            bucket.calls[index] += 1
            last_call = self._find_last_call(bucket, index, hook_calls)
            if last_call is None:
                return
            assert bucket.calls[index] <= last_call, "a gradient was sent before it was final"
            if bucket.calls[index] == last_call:
                hook(parameter)

        return count_call

    def _find_last_call(
        self,
        bucket: Bucket,
        index: int,
        hook_calls: int | HookCalls,
    ) -> int | None:
        """Return which call of a part's hook is the last one in a backward; None = unknown."""
        if isinstance(hook_calls, int):
            return hook_calls
        if self._counted_calls is None:
            return None
        # A part whose hook was not called in the first backward has no entry.
        return self._counted_calls.get((bucket, index))

    def _count_calls(self) -> dict[tuple[Bucket, int], int]:
        """Return how often the hook of each part was called in the backward that has ended."""
        calls = {}
        for bucket in self._buckets:
            for index, number in bucket.calls.items():
                calls[bucket, index] = number
        return calls

    def _fill_all(self) -> None:
        for bucket in self._buckets:
            if bucket.state is BucketState.FILLING:
                self._fill(bucket, sorted(bucket.missing_parts))

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
    """Return the parts of each fragment, in the order in which they are exchanged.

    Gradients are in the reverse order of the model's parameters, because autograd finishes the last
    layers first. Counts come last, in fragment 0: with activation checkpointing the forward runs
    again during backward, and the router counts these tokens too. So they are complete only at the
    end of backward.
    """
    fragment_of = fragments or [0] * len(gradients)
    parts: dict[int, list[BucketPart]] = {}
    for fragment in sorted({*fragments, 0}):
        parts[fragment] = []
    for gradient, fragment in zip(gradients, fragment_of, strict=True):
        parts[fragment].append(gradient)
    for fragment_parts in parts.values():
        fragment_parts.reverse()
    for buffer in counts:
        parts[0].append(CountBuffer(buffer))
    return parts
