# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The exchange: sum the local gradient shards and a row of facts over the replica groups, while backward goes on.

Gradients are copied into buckets of fixed content and order as autograd finishes them
(`register_post_accumulate_grad_hook`; FSDP2 calls it for sharded parameters too), and each bucket's
all-reduce starts as soon as it and its predecessors are full. The buckets are copies: the local
gradients stay untouched until the step is committed, so a broken exchange is repeated with the
survivors and nothing is recomputed.

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
from titan_ft.gradients.bucket import Bucket, BucketState, Count, Gradient, Part, partition
from titan_ft.gradients.flight import ExchangeError, Flight, Gathered, OwnFacts
from titan_ft.gradients.quantize import payload_bytes
from titan_ft.gradients.sums import Room, Sums
from titan_ft.membership.collectives import all_gather, all_to_all, rehearse_sums
from titan_ft.membership.membership import Membership
from titan_ft.protocol.member import Quorum

logger = logging.getLogger(__name__)

# Values. The bucket of an unsharded embedding has gigabytes, and as much again may be more than the
# GPU has left. For tensors above this size NCCL's choice of an algorithm should not change any
# more.
_MOST_REHEARSED = 64 << 20


@dataclass(frozen=True)
class Reduced:
    """The outcome of one exchange.

    Attributes:
        rows, messages: of each member; the rows have one width.
        spoiled: of each member, whether the gradients that it gave have an inf or a NaN.
        sums: of the gradients. They last until the next exchange is launched.
    """

    quorum: Quorum
    rows: list[list[float]]
    messages: list[bytes]
    spoiled: list[bool]
    sums: Sums


class GradientExchange:
    """Sums gradients over the groups. One per rank; ranks of the same index in each group exchange with each other.

    Args:
        parameters: the trainable parameters, in the same order in every group.
        membership: provides quorum and process group.
        bucket_bytes: size of a bucket; a larger parameter gets a bucket of its own.
        where: device of the buckets (`device.exchange_device`).
        overlap: launch buckets during backward. Needs gradients that are final when autograd's hook
            runs. With CPU offload `finish` launches them, after backward.
        microbatches: of a pipeline's schedule, where autograd's hook runs behind each: a gradient
            is final with the last of so many calls. 1 where FSDP makes the calls, once behind all
            of them. 0 = there is no pipeline. None = the calls are not known: the first backward
            counts those of each parameter, and its gradients leave when it has ended.
        gradient_scale: factor from local gradients to gradients of the reported loss. It is 1
            unless backward starts from another loss, as a pipeline's does.
        fragments: of each parameter, the fragment that it belongs to; empty = all to fragment 0.
            Only fragments that the groups `give` travel.
        quantize: let gradients travel in 8 bits (`quantize.py`), and add what that leaves behind to
            this rank's next ones. Not with counts, which would be rounded too.
        dtype: that gradients travel in: fp32, or bfloat16 (`half.py`). Not with `quantize`.
        counts: buffers in which the model counts what it trains since the gradients were zero, as
            whole numbers. They are summed with the gradients, in the same order in every group, and
            get the sums where these do. The sums are exact up to 2**24.
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
        # Autograd finishes the last layers first; counts are complete only after all of it
        # (recomputation counts too).
        gradients = [Gradient(parameter) for parameter in parameters if parameter.requires_grad]
        parts: dict[int, list[Part]] = {fragment: [] for fragment in sorted({*fragments, 0})}
        for gradient, fragment in zip(gradients, fragments or [0] * len(gradients), strict=True):
            parts[fragment].insert(0, gradient)
        parts[0] += map(Count, counts)
        self._buckets = [
            Bucket(run, fragment, where, dtype, quantize=quantize, gradient_scale=gradient_scale)
            for fragment, own in parts.items()
            for run in partition(own, bucket_bytes)
        ]
        self._num_fragments = max(parts) + 1
        self._weights: Mapping[int, float] = dict.fromkeys(parts, 1.0)
        self.room = Room(self._buckets, where)
        self._sums = Sums(self._buckets, [None] * len(self._buckets), self.room)  # of the last exchange that worked
        self._armed = False
        self._calls: dict[tuple[Bucket, int], int] | None = None  # of each part's hook in a backward; None = not known
        self._flight: Flight | None = None
        self._wire_bytes = 0
        # With CPU offload no gradient is taken before the end of backward. FSDP2 copies each
        # gradient to host memory, and with a hook on the parameter it would wait for each copy
        # (`foreach_reduce` in torch's _fsdp_collectives). Without hooks it waits once, at the end
        # of backward (`FSDPParamGroup.finalize_backward`).
        offloads = not device.on_cpu() and all(bucket.on_host for bucket in self._buckets)
        if overlap and not offloads:
            for bucket in self._buckets:
                for index, part in enumerate(bucket.parts):
                    if isinstance(part, Gradient):
                        take = self._hook(bucket, index)
                        if microbatches != 0:
                            take = self._on_last_call(bucket, index, microbatches, take)
                        part.parameter.register_post_accumulate_grad_hook(take)

    def give(self, weights: Mapping[int, float]) -> None:
        """Say which fragments this rank gives from now on, each with its weight in the mean; before a launch.

        Without it all are given, with a weight of 1, which counts the groups that have a gradient.
        """
        self._weights = dict(weights)

    def arm(self, newest_step: int) -> None:
        """Launch an exchange, and let the backward that follows fill it: call it before the step's last backward.

        Args:
            newest_step: this group's gradients count unless a member of the quorum has more
                updates. If they do not, the group sends zeros.
        """
        self._launch(newest_step)
        self._armed = True

    def launch(self, newest_step: int | None = None, *, due: bool = True) -> None:
        """Launch an exchange of the local gradients, which are only read; returns at once.

        Gradients travel only if a member gives some, and an update may follow for all that a member
        knows.

        Args:
            newest_step: see `arm`; None = this rank gives nothing.
            due: an update may follow, as far as this rank knows.
        """
        self._launch(newest_step, due=due)

    def send(self, newest_step: int, facts: OwnFacts) -> None:
        """Launch a whole exchange, with the facts too; returns at once, and `finish` completes it.

        The thread of the exchange completes the facts, so they must hold until then.
        """
        self._launch(newest_step).report(facts)
        self._fill_all()

    @property
    def sent(self) -> bool:
        """Say whether an exchange is under way."""
        return self._flight is not None

    @property
    def under_way(self) -> bool:
        """Say whether the exchange goes on by itself: the other members have not given all of their sums yet."""
        return self._flight is not None and self._flight.is_summing

    def finish(self, facts: OwnFacts) -> Reduced:
        """Complete the exchange that was launched, and return the facts of all members and the sums.

        Args:
            facts: this member's, unless they were sent.

        Raises:
            ExchangeError: a member died or hung, or the process group could not be built. The
                process group has been aborted, so that the other members see it at once.
        """
        flight = self._flight
        assert flight is not None, "no exchange is under way"
        if self._armed and self._calls is None:
            self._calls = {
                (bucket, index): number for bucket in self._buckets for index, number in bucket.calls.items()
            }
        self._armed = False
        unsafe = False  # an operation that was broken off may still touch the buckets
        try:
            self._fill_all()
            flight.report(facts)
            with self._membership.watch_exchange(), self._bounded():
                gathered = flight.finish()
            return self._take_sums(gathered)
        except ExchangeError:
            self._membership.abort()
            unsafe = self._where.type == "cpu"  # every one of Gloo's; of NCCL's one that is still being launched
            raise
        finally:
            flight.join()
            if unsafe or flight.left:
                for bucket in self._buckets:
                    bucket.renew()
            self._flight = None
            self._wire_bytes += flight.wire_bytes

    def _take_sums(self, gathered: Gathered) -> Reduced:
        for bucket, weights in zip(self._buckets, gathered.weights, strict=True):
            if weights is not None:
                bucket.end_sum()
        self._sums = Sums(self._buckets, gathered.weights, self.room, after=self._sums)
        return Reduced(gathered.quorum, gathered.rows, gathered.messages, gathered.spoiled, self._sums)

    def _bounded(self) -> contextlib.AbstractContextManager[None]:
        """Let an exchange that this thread waits for take no longer than the process group's timeout.

        Its quorum may: that waits for groups which compute. The exchange's thread waits for the
        other members too, for the number of givers, and may have begun long before: it is broken
        off with this one, which waits for it. Gloo's operations have timeouts of their own.
        """
        if self._where.type == "cpu":
            return contextlib.nullcontext()
        with contextlib.suppress(Exception):  # the exchange's thread gets the same, and this one raises it from there
            self._membership.await_quorum()
        deadline: contextlib.AbstractContextManager[None] = self._membership.process_group.deadline(
            self._membership.timeout
        )
        return deadline

    def rehearse(self, group: Any, num_members: int) -> None:
        """Make each collective of an exchange once, as large as that of the largest bucket; part of NCCL's set-up.

        NCCL connects the members for an algorithm when it is first used (`ncclCollPreconnect`).
        Without this the first exchange of each communicator would wait for that, and could not be
        aborted meanwhile.

        Args:
            group: a process group of torch's.
        """
        if num_members == 1 or not self._buckets:
            return
        timeout, largest = (
            self._membership.timeout,
            max(self._buckets, key=lambda bucket: bucket.num_bytes),
        )
        num_values, num_exact = min(largest.values.numel(), _MOST_REHEARSED), largest.exact.numel()
        summed = num_exact  # facts travel by sums in any case
        if largest.halves:
            rows = half.cut(largest.values.new_zeros(num_values), torch.zeros_like(largest.exact), num_members)
            part, _ = half.add_up(all_to_all(group, rows, timeout), num_exact)
            all_gather(group, part.view(torch.uint8), num_members, timeout)
        elif largest.residual is not None:
            payload = torch.zeros(payload_bytes(num_values, num_exact), dtype=torch.uint8, device=self._where)
            all_gather(group, payload, num_members, timeout)
        else:
            summed = num_values + num_exact
        rehearse_sums(group, summed, self._where, timeout)

    def take_wire_bytes(self) -> int:
        """Return the bytes of gradients that this rank has sent since it was asked last, in broken exchanges too."""
        taken, self._wire_bytes = self._wire_bytes, 0
        return taken

    def wire_bytes(self, num_members: int) -> int:
        """Return what an exchange of all fragments between so many members makes this rank send."""
        return sum(bucket.wire_bytes(num_members) for bucket in self._buckets)

    def drop_residuals(self) -> None:
        """Forget what rounding has left behind of earlier gradients: this group has another state now."""
        for bucket in self._buckets:
            if bucket.residual is not None:
                bucket.residual.drop()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of this rank's buckets: what each step reduces."""
        return sum(bucket.num_bytes for bucket in self._buckets)

    def _launch(self, newest_step: int | None, *, due: bool = True) -> Flight:
        assert self._flight is None, "an exchange is under way already: finish() completes it before the next launch"
        self._sums.expire()
        given = frozenset[int]() if newest_step is None else frozenset(self._weights)
        self._flight = flight = Flight(
            self._membership,
            self._buckets,
            self._where,
            given=given,
            num_fragments=self._num_fragments,
            newest_step=newest_step,
            due=due,
        )
        for bucket in self._buckets:
            bucket.begin(bucket.fragment in given)
            if bucket.state is BucketState.FULL:
                bucket.full = self._sums.read
                flight.hand_over(bucket)
        flight.start()
        return flight

    def _hook(self, bucket: Bucket, index: int) -> Callable[[torch.Tensor], None]:
        def take_gradient(parameter: torch.Tensor) -> None:
            if self._armed:
                # FSDP has several streams for gradients: one that is sharded, another that is
                # replicated too.
                bucket.stream = device.join_stream(bucket.stream)
                bucket.final.append(index)
                # One kernel for all that are in it; on a host each is copied while it is in the
                # cache.
                if self._where.type == "cpu" or len(bucket.final) == len(bucket.missing):
                    self._fill(bucket, bucket.final)

        return take_gradient

    def _on_last_call(
        self, bucket: Bucket, index: int, number: int | None, take_gradient: Callable[[torch.Tensor], None]
    ) -> Callable[[torch.Tensor], None]:
        """Return a hook that takes the gradient with the last of so many calls; with fewer, `finish` takes it.

        A schedule that computes the gradients of weights by themselves (zero bubble) calls no hook
        for those. torchtitan 0.3's loss goes backward through the output layer by itself, so that a
        weight which is the embedding too has its hook called twice.

        Args:
            number: None = as many as the first backward has made. A part without a call in it has
                no last call.
        """

        def count_call(parameter: torch.Tensor) -> None:
            if not self._armed:
                return
            bucket.calls[index] += 1
            last = number if number is not None else (self._calls or {}).get((bucket, index), 0)
            if not last:
                return
            assert bucket.calls[index] <= last, "a gradient was sent before it was final: a step of other bytes"
            if bucket.calls[index] == last:
                take_gradient(parameter)

        return count_call

    def _fill_all(self) -> None:
        for bucket in self._buckets:
            if bucket.state is BucketState.FILLING:
                self._fill(bucket, sorted(bucket.missing))

    def _fill(self, bucket: Bucket, indices: Iterable[int]) -> None:
        """Copy parts into the bucket; hands it to the flight when it is full."""
        self._sums.await_read()
        bucket.fill(indices, self._weights[bucket.fragment])
        if bucket.state is BucketState.FULL and self._flight is not None:
            bucket.full = device.record_event()
            self._flight.hand_over(bucket)
