# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The exchange: sum gradients over the replica groups, and gather a report of each group.

Replica groups train the same model on different batches. In each step they average their gradients.
(With DiLoCo they average the changes of their weights over several steps. This module treats these
changes as gradients.) Rank i of all groups hold the same shard of the parameters, so rank i
exchanges with rank i of the other groups. These ranks are the *members* of one exchange.

Terms:

- A *bucket* is a flat tensor. It holds copies of the gradients of some parameters. The buckets have
  the same contents, in the same order, in all groups.
- The *facts* are a member's report: a *row* of numbers, such as its step and its tokens
  (`protocol/row.py`), and a *message* of bytes.

One exchange, in order of time:

1. The training thread launches the exchange. A thread of the exchange waits until the lighthouse
   has said which groups take part (the *quorum*).
2. During backward, autograd calls a hook for each gradient when it is final
   (`register_post_accumulate_grad_hook`; FSDP2 calls it for sharded parameters too). The hook
   copies the gradient into its bucket.
3. The exchange's thread sums each bucket over the members when the bucket and all buckets before it
   are full. Meanwhile backward still computes other gradients.
4. After the sums, the members gather each other's facts. The rows decide whether the sums become an
   update of the model (`protocol/decision.py`).

If a member dies meanwhile, the exchange breaks, and the other members repeat it. Until an update is
decided, the exchange only reads the local gradients, because their buckets are copies. So the
repetition computes nothing again.

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
"""Size of the largest tensor with which `rehearse` tries the collectives. The bucket of an
unsharded embedding has gigabytes, and the GPU may not have as much free memory again. A smaller
tensor suffices if NCCL chooses the same algorithm for it, as it should for all tensors above this
size."""


class HookCalls(enum.Enum):
    """How often autograd calls the hook of a gradient in one backward, apart from a fixed number.

    A gradient is final at the last of these calls, because each call adds to it.
    """

    ONE = enum.auto()  # the first call is the last one, and nothing is counted
    # The number is not known, and differs between parameters. The first backward only counts the
    # calls, and `finish` copies the gradients after it. In later backwards, the hook copies a
    # gradient at the last call.
    COUNTED = enum.auto()


@dataclass(frozen=True)
class ExchangeResult:
    """The result of one exchange.

    Attributes:
        quorum: the members. Each list below has one value for each member, in the quorum's order.
        rows: the members' rows. All of them have the same length.
        messages: the members' messages.
        nonfinite: True for a member whose gradients have an inf or a NaN.
        sums: the sums of the gradients. They are valid until the next exchange is launched, which
            uses the same buckets.
    """

    quorum: Quorum
    rows: list[list[float]]
    messages: list[bytes]
    nonfinite: list[bool]
    sums: Sums


class GradientExchange:
    """Makes exchanges for one rank.

    `Rounds` (`engine/round.py`) calls one of three methods to launch an exchange, and `finish` to
    complete it:

    - `launch_for_backward`, if the next backward computes the gradients;
    - `launch`, if the gradients are computed already, or if this rank has none;
    - `launch_with_facts`, if gradients and facts are known, and this rank trains on meanwhile.

    Threads: the training thread calls all methods but `rehearse`, and autograd calls the hooks
    while the training thread waits in the backward. The thread that sets up a new quorum calls
    `rehearse`. Each exchange makes its collectives on a thread of its own (`Flight`).

    After `ExchangeError` the process group is aborted and the local gradients are untouched. The
    exchange can then be launched again.

    Args:
        parameters: the trainable parameters, in the same order in every group.
        membership: provides the quorum and the process group.
        bucket_bytes: size of a bucket. A larger parameter has a bucket of its own.
        where: device of the buckets (`device.exchange_device`).
        overlap: copy the gradients in autograd's hooks, so that buckets are summed during backward.
            Without it, and with CPU offload, `finish` copies all gradients after backward. Set it
            only if no gradient changes after the last call of its hook.
        hook_calls: how often autograd calls a gradient's hook in one backward. In a pipeline
            without FSDP it is the number of microbatches. With FSDP, autograd calls the hook once
            for all microbatches.
        gradient_scale: factor from local gradients to gradients of the reported loss. It is not 1
            in a pipeline, where backward starts from the sum of the losses and not from their mean.
        fragments: for each parameter, the number of its fragment; empty = all parameters have
            fragment 0. A fragment is a part of the model. Streaming DiLoCo exchanges one fragment
            at a time (`set_fragment_weights`).
        quantize: encode gradients in 8 bits (`quantize.py`). The rounding error is added to this
            rank's next gradients. Counts stay exact.
        dtype: encode gradients in this dtype, fp32 or bfloat16 (`half.py`). Not with `quantize`.
        counts: buffers of whole numbers, in which the model counts the tokens of each expert. The
            count starts when the gradients are set to zero. The exchange sums the buffers with the
            gradients; the sums are exact up to 2**24. The buffers have the same order in every
            group.

    Attributes:
        copy_memory: memory for the copies of sums that this group makes while it heals
            (`Sums.copy`).
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
        # Fragments that this rank contributes, and their weights; see `set_fragment_weights`.
        self._fragment_weights: Mapping[int, float] = dict.fromkeys(parts, 1.0)
        self.copy_memory = CopyMemory(self._buckets, where)
        # The sums of the last exchange that worked. Before the first exchange, no bucket has any.
        self._sums = Sums(self._buckets, [None] * len(self._buckets), self.copy_memory)
        # True from `launch_for_backward` to `finish`. At other times the hooks do nothing: with
        # gradient accumulation, only the last backward of a step makes the gradients final.
        self._hooks_are_active = False
        # For each gradient, named by its bucket and its index there, the number of its hook calls
        # in the first backward; None before the end of that backward.
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

    def set_fragment_weights(self, weights: Mapping[int, float]) -> None:
        """Set the fragments that this rank contributes to the next exchanges.

        Call this before a launch. The mean of a fragment is the sum of the members' gradients,
        divided by the sum of the members' weights. Without a call, this rank contributes all
        fragments, each with a weight of 1.

        Args:
            weights: for each contributed fragment, this rank's part of the divisor. The caller has
                multiplied the gradients by it already.
        """
        self._fragment_weights = dict(weights)

    def launch_for_backward(self, newest_step: int) -> None:
        """Launch an exchange that the next backward fills; returns at once.

        Call this before the last backward of a step.

        Args:
            newest_step: number of updates that the most advanced member may hold
                (`Position.newest_step`). If the quorum shows a member with more updates, this
                rank's gradients belong to an old step, and it sends zeros.
        """
        self._launch(newest_step)
        self._hooks_are_active = True

    def launch(self, newest_step: int | None = None, *, may_update: bool = True) -> None:
        """Launch an exchange of the gradients of a finished backward; returns at once.

        `finish` copies the gradients. Only facts are exchanged if no member contributes gradients,
        or if all members pass `may_update=False`. If one member passes True, all members sum,
        because all of them must make the same collectives.

        Args:
            newest_step: see `launch_for_backward`; None = this rank contributes no gradients.
            may_update: False if this rank knows that no update can follow from the exchange.
        """
        self._launch(newest_step, may_update=may_update)

    def launch_with_facts(self, newest_step: int, facts: OwnFacts) -> None:
        """Launch an exchange whose gradients and facts are known already; returns at once.

        The exchange then runs on its own thread to its end, while this rank trains. `finish` waits
        for that end. `facts` must not change before, because the exchange's thread reads it.
        """
        flight = self._launch(newest_step)
        flight.report(facts)
        self._fill_all()

    @property
    def is_launched(self) -> bool:
        """True from a launch until `finish`."""
        return self._flight is not None

    @property
    def waits_for_members(self) -> bool:
        """True while the sums are incomplete: some member still computes its gradients."""
        return self._flight is not None and self._flight.is_summing

    def _launch(self, newest_step: int | None, *, may_update: bool = True) -> Flight:
        assert self._flight is None, "an exchange is under way already: finish() completes it"
        self._sums.expire()  # this exchange overwrites the last exchange's sums
        own_fragments = frozenset(self._fragment_weights)
        if newest_step is None:
            own_fragments = frozenset()
        flight = Flight(
            self._membership,
            self._buckets,
            self._where,
            own_fragments=own_fragments,
            num_fragments=self._num_fragments,
            newest_step=newest_step,
            may_update=may_update,
        )
        self._flight = flight
        for bucket in self._buckets:
            contributes = bucket.fragment in own_fragments
            bucket.start_exchange(contributes)
            if not contributes:
                # The bucket counts as full, because nothing is copied into it. The flight sets it
                # to zero, but not before the GPU has read the sums of the last exchange in it.
                bucket.ready_event = self._sums.last_read
                flight.hand_over(bucket)
        # Start the thread last: it reads the buckets that are set up above.
        flight.start()
        return flight

    # Completing

    def finish(self, facts: OwnFacts) -> ExchangeResult:
        """Complete the launched exchange, and return the facts of all members and the sums.

        Args:
            facts: this member's facts. Ignored after `launch_with_facts`, which has them already.

        Raises:
            ExchangeError: a member died or hung, or the process group could not be built. The
                process group is aborted, so that the other members notice at once.
        """
        flight = self._flight
        assert flight is not None, "no exchange is under way"
        if self._hooks_are_active and self._counted_calls is None:
            # The first backward with hooks is over, so the number of calls is known.
            self._counted_calls = self._count_calls()
        self._hooks_are_active = False
        is_written_after_abort = False
        try:
            # Copy the gradients that the hooks have not copied.
            self._fill_all()
            flight.report(facts)
            # The watch aborts the exchange if a member is silent or cannot be reached. Without it,
            # a collective would wait for that member until its timeout.
            with self._membership.watch_exchange(), self._deadline_after_quorum():
                gathered = flight.finish()
            return self._adopt_sums(gathered)
        except ExchangeError:
            self._membership.abort()
            # With Gloo, an aborted operation may still write to its bucket. With NCCL, only an
            # operation whose launch has not returned may (`flight.abandoned`).
            is_written_after_abort = self._where.type == "cpu"
            raise
        finally:
            flight.join()
            if is_written_after_abort or flight.abandoned:
                # The next exchange needs memory that no old operation writes to.
                for bucket in self._buckets:
                    bucket.reallocate()
            self._flight = None
            self._sent_bytes += flight.sent_bytes

    def _adopt_sums(self, gathered: Gathered) -> ExchangeResult:
        """Mark the buckets that were summed, and return the result of the exchange."""
        for bucket, weights in zip(self._buckets, gathered.weights, strict=True):
            was_summed = weights is not None
            if was_summed:
                bucket.mark_summed()
        # `previous`: a GPU may still read the last exchange's sums, which have the same memory.
        self._sums = Sums(
            self._buckets,
            gathered.weights,
            self.copy_memory,
            previous=self._sums,
        )
        return ExchangeResult(
            gathered.quorum,
            gathered.rows,
            gathered.messages,
            gathered.nonfinite,
            self._sums,
        )

    def _deadline_after_quorum(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that limits the duration of the exchange after the quorum.

        Gloo's operations have timeouts of their own, so its context does nothing. NCCL's operations
        have none. With NCCL, this method first waits for the quorum. That wait has no limit,
        because other groups may still compute. In the context, the process group's timeout ends the
        operations.
        """
        uses_gloo = self._where.type == "cpu"
        if uses_gloo:
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
        `membership/process_group.py` calls this method when it sets up a communicator, before the
        first exchange.

        Args:
            group: a process group of torch's.
            num_members: number of its members.
        """
        if num_members == 1 or not self._buckets:
            return
        timeout = self._membership.timeout
        largest = max(self._buckets, key=lambda bucket: bucket.num_bytes)
        num_values = min(largest.values.numel(), _MAX_REHEARSED_VALUES)
        num_exact = largest.exact.numel()  # values that are never rounded: counts and weights
        # NCCL uses all-reduces in every encoding, to gather the rows (`Operations.gather`).
        num_all_reduced = num_exact
        if largest.is_bfloat16:
            # An all-to-all sends each member its part of all gradients. The member adds this part
            # up in fp32, and an all-gather sends the sums to all members.
            values = largest.values.new_zeros(num_values)
            rows = half.cut(values, torch.zeros_like(largest.exact), num_members)
            received = all_to_all(group, rows, timeout)
            part, _ = half.add_up(received, num_exact)
            all_gather(group, part.view(torch.uint8), num_members, timeout)
        elif largest.is_quantized:
            # An all-gather sends the encoded gradients to all members.
            num_octets = payload_bytes(num_values, num_exact)
            payload = torch.zeros(num_octets, dtype=torch.uint8, device=self._where)
            all_gather(group, payload, num_members, timeout)
        else:
            # In fp32 the gradients are all-reduced too.
            num_all_reduced = num_values + num_exact
        rehearse_sums(group, num_all_reduced, self._where, timeout)

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
        """Return the hook of one gradient, which copies the gradient into its bucket.

        Args:
            index: index of the gradient among the bucket's parts.
        """

        def copy_gradient(parameter: torch.Tensor) -> None:
            if not self._hooks_are_active:
                return
            # FSDP computes gradients on several streams: on one for sharded parameters, and on
            # another one for parameters that are replicated too. The copy below runs on the current
            # stream, so this stream must wait for the streams of the bucket's earlier gradients.
            bucket.gradient_stream = device.join_stream(bucket.gradient_stream)
            bucket.final_parts.append(index)
            # On a host, copy each gradient at once, while it is in the cache. On a GPU, wait for
            # the last gradient of the bucket, because one kernel copies all of them.
            copies_each = self._where.type == "cpu"
            all_are_final = len(bucket.final_parts) == len(bucket.missing_parts)
            if copies_each or all_are_final:
                self._fill(bucket, bucket.final_parts)

        return copy_gradient

    def _run_at_last_call(
        self,
        bucket: Bucket,
        index: int,
        hook_calls: int | HookCalls,
        hook: Callable[[torch.Tensor], None],
    ) -> Callable[[torch.Tensor], None]:
        """Return a hook that counts its calls in a backward, and runs `hook` at the last call.

        The last call may never come: a zero-bubble schedule computes the gradients of weights
        separately, and calls no hooks. `finish` then copies the gradients.

        With torchtitan 0.3 the number of calls differs between parameters. torchtitan computes the
        loss in chunks, and runs their backward through the output layer before the backward of the
        rest of the model. If the output layer shares its weight with the embedding, the hook of
        this weight is called twice. The other hooks are called once.
        """

        def count_call(parameter: torch.Tensor) -> None:
            if not self._hooks_are_active:
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
        """Return the number of the last call of a gradient's hook in a backward; None = unknown."""
        if isinstance(hook_calls, int):
            return hook_calls
        if self._counted_calls is None:
            return None
        # A gradient whose hook was not called in the first backward has no entry.
        return self._counted_calls.get((bucket, index))

    def _count_calls(self) -> dict[tuple[Bucket, int], int]:
        """Return how often the hook of each gradient was called in the backward that has ended."""
        calls = {}
        for bucket in self._buckets:
            for index, number in bucket.calls.items():
                calls[bucket, index] = number
        return calls

    def _fill_all(self) -> None:
        """Copy all parts that are missing in the buckets."""
        for bucket in self._buckets:
            if bucket.state is BucketState.FILLING:
                self._fill(bucket, sorted(bucket.missing_parts))

    def _fill(self, bucket: Bucket, indices: Iterable[int]) -> None:
        """Copy parts into the bucket. Hand it to the flight when it is full."""
        # The bucket's memory has the sums of the last exchange, which a GPU may still read.
        self._sums.await_last_read()
        bucket.fill(indices, self._fragment_weights[bucket.fragment])
        if bucket.state is BucketState.FULL and self._flight is not None:
            bucket.ready_event = device.record_event()
            self._flight.hand_over(bucket)


def _order_parts(
    gradients: Sequence[Gradient],
    fragments: Sequence[int],
    counts: Iterable[torch.Tensor],
) -> dict[int, list[BucketPart]]:
    """Return the parts of each fragment, in the order in which they are exchanged.

    Gradients are in the reverse order of the model's parameters, because autograd finishes the last
    layers first. Counts come last, in fragment 0. They are complete only at the end of backward:
    with activation checkpointing the forward runs again during backward, and the router counts its
    tokens too.
    """
    fragment_of = fragments or [0] * len(gradients)
    fragments_with_counts = {*fragments, 0}
    parts: dict[int, list[BucketPart]] = {}
    for fragment in sorted(fragments_with_counts):
        parts[fragment] = []
    for gradient, fragment in zip(gradients, fragment_of, strict=True):
        parts[fragment].append(gradient)
    for fragment_parts in parts.values():
        fragment_parts.reverse()
    for buffer in counts:
        parts[0].append(CountBuffer(buffer))
    return parts
