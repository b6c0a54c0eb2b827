# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One exchange under way, on a thread of its own.

The module uses the words of `gradients/exchange.py`: bucket, fragment, row, message. A fragment
*travels* if the members sum its buckets in this exchange. See docs/exchange.md.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from titan_ft import device
from titan_ft.gradients import half
from titan_ft.gradients.bucket import Bucket
from titan_ft.gradients.operations import Operations
from titan_ft.gradients.quantize import add_up, encode, find_rounding_error
from titan_ft.membership.membership import Membership
from titan_ft.protocol.errors import first_line
from titan_ft.protocol.member import Quorum


class ExchangeError(RuntimeError):
    """The exchange broke. The local gradients are untouched, and it can be repeated."""


class OwnFacts(Protocol):
    """This rank's facts, a part of which depends on the quorum (`protocol.report.RoundReport`)."""

    def complete(
        self,
        quorum: Quorum,
        gave: bool,
        ready_at: float,
    ) -> tuple[Sequence[float], bytes]:
        """Return this rank's row and message.

        Args:
            gave: this rank's gradients are in the sums.
            ready_at: monotonic seconds at which this rank's facts were ready.
        """


@dataclass(frozen=True)
class Gathered:
    """The rows and messages that the members sent with their sums.

    Attributes:
        quorum, rows, messages, nonfinite: see `exchange.Reduced`.
        weights: for each bucket, one weight per part, summed over the members; None = the bucket
            did not travel.
    """

    quorum: Quorum
    rows: list[list[float]]
    messages: list[bytes]
    nonfinite: list[bool]
    weights: list[list[float] | None]


class Flight:
    """One exchange under way, on a thread of its own.

    The flight's thread waits for the quorum and makes all collectives, so that backward and its
    hooks wait for no other group (`_run` and the methods after it).

    `GradientExchange` makes a flight for each exchange. It calls all public methods, on the
    training thread, in this order: `start`, `hand_over` for each bucket, `report`, `finish`,
    `join`.

    The thread owns a bucket from `hand_over` until the thread ends. If an error ends the thread,
    `finish` raises the error, and the contents of the buckets are void.

    Args:
        given: fragments whose gradients this rank gives.
        num_fragments: number of fragments of the model.
        newest_step: this rank's gradients count unless a member of the quorum has more updates;
            None = this rank gives no gradients.
        may_update: False if this rank knows that the round cannot be an update.

    Attributes:
        travelling: fragments that are summed; the same on all members.
        sent_bytes: bytes of gradients that this rank has sent.
    """

    def __init__(
        self,
        membership: Membership,
        buckets: list[Bucket],
        where: torch.device,
        *,
        given: frozenset[int],
        num_fragments: int,
        newest_step: int | None,
        may_update: bool,
    ) -> None:
        self._membership = membership
        self._buckets = buckets
        self._where = where
        self._given = given
        self._num_fragments = num_fragments
        self._newest_step = newest_step
        self._may_update = may_update
        self._operations = Operations(membership, where)
        # From the training thread. None = nothing more comes.
        self._full_buckets: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
        self._facts: queue.SimpleQueue[tuple[OwnFacts, float] | None] = queue.SimpleQueue()
        self._is_reported = False
        self.travelling: frozenset[int] = frozenset()
        self.sent_bytes = 0
        self._contributes = False  # this rank's gradients are in the sums
        # An event on the device after the thread's own work. The sums are not included: they run on
        # NCCL's stream, and `Operations.end` waits for them.
        self._own_work: torch.Event | None = None
        # Set when all sums are complete (on a GPU: queued), and in any case when the thread ends.
        self._summed = threading.Event()
        self._ended = threading.Event()
        self._gathered: Gathered | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="titan_ft_exchange", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def hand_over(self, bucket: Bucket) -> None:
        """Give the thread a bucket that is full."""
        self._full_buckets.put(bucket)

    def report(self, facts: OwnFacts) -> None:
        """Give the thread this rank's facts. It sends them after the sums.

        Only the first call counts: `launch_with` reports before `finish` does.
        """
        if not self._is_reported:
            self._is_reported = True
            self._facts.put((facts, time.monotonic()))

    @property
    def abandoned(self) -> bool:
        """True if the thread was abandoned in a hung operation. The thread then ends without
        touching a bucket.
        """
        return self._operations.turn.abandoned

    @property
    def is_summing(self) -> bool:
        """True until the other members have given all of their sums."""
        return not self._summed.is_set()

    def finish(self) -> Gathered:
        """Wait for the thread's end.

        Raises:
            ExchangeError: the exchange broke.
            AssertionError: the exchange has a defect.
            Exception: there was no quorum; the error of the membership.
        """
        self._full_buckets.put(None)
        self._operations.turn.wait(self._ended)
        if self.abandoned:
            raise ExchangeError("aborted, and an operation is still being launched")
        if self._error is not None:
            raise self._error
        assert self._gathered is not None
        return self._gathered

    def join(self) -> None:
        """End the thread, or abandon it in a hung operation. Then the buckets are free again.

        A broken sum writes to its bucket on the GPU until its abort is complete. The caller may
        queue work on the buckets at once, such as a copy of gradients. On the GPU, this work waits
        for the end of the sum.
        """
        self._full_buckets.put(None)
        self._facts.put(None)
        self._operations.turn.wait(self._ended)
        if self.abandoned:
            with device.side_stream(self._where):
                self._own_work = device.record_event()
        device.wait_for(self._own_work, self._where)
        self._operations.end()

    def _run(self) -> None:
        try:
            with self._operations.turn.held():
                self._exchange()
        finally:
            self._summed.set()
            self._ended.set()

    def _exchange(self) -> None:
        try:
            quorum = self._membership.await_quorum()
            if quorum.error is not None:
                raise ExchangeError(quorum.error)
            self._operations.set_quorum(quorum)
            newest_step = self._newest_step
            self._contributes = newest_step is not None and quorum.max_step <= newest_step
            # The default stream of this thread is the training's. Without a stream of its own, the
            # thread's wait for the other members would stop the training.
            with device.side_stream(self._where):
                try:
                    self._sum_and_gather(quorum)
                finally:
                    if not self.abandoned and self._where.type != "cpu":
                        self._own_work = device.record_event()
        except Exception as error:  # noqa: BLE001  # `finish` raises it on the training thread
            self._error = self._classify(error)

    def _classify(self, error: Exception) -> Exception:
        """Return the error that `finish` raises."""
        # Without a quorum, nothing was exchanged. The membership's error ends the run.
        if self._operations.quorum is None:
            return error
        # A failed assertion is a defect of this code. As an `ExchangeError` it would be hidden,
        # because the exchange would be repeated.
        if isinstance(error, ExchangeError | AssertionError):
            return error
        return ExchangeError(first_line(error))

    def _sum_and_gather(self, quorum: Quorum) -> None:
        """Make the exchange.

        1. Agree on the fragments that travel. Sums of zeros would compete with the transfer of a
           state that the round may be waiting for.
        2. Sum their buckets in order, each as soon as the training thread has filled it.
        3. Gather the rows and messages.
        """
        full: set[int] = set()
        self.travelling = self._agree_on_fragments()
        for bucket in self._buckets:
            if bucket.fragment not in self.travelling:
                continue
            while id(bucket) not in full:
                handed_over = self._full_buckets.get()
                if handed_over is None:
                    return  # `finish` or `join` was called before the bucket was full
                full.add(id(handed_over))
            device.wait_for(bucket.ready, self._where)
            if self._contributes:
                if bucket.residual is not None:
                    bucket.residual.add_to(bucket.values)
                bucket.compute_total()
            else:
                bucket.flat.zero_()
            self._sum(bucket)
        self._operations.await_sums()
        self._summed.set()
        reported = self._facts.get()
        if reported is None:
            return  # `join` was called before `report`: the exchange is given up
        facts, ready_at = reported
        row, message = facts.complete(quorum, self._contributes, ready_at)
        self._gathered = self._gather(quorum, row, message)

    def _agree_on_fragments(self) -> frozenset[int]:
        """Return the fragments to sum: those that all members with gradients give.

        None is summed in two cases. If no member expects an update, no member would use the sums. If
        the members with gradients give different fragments, they are not at the same update, and the
        rows will show it.
        """
        given = [False] * self._num_fragments
        if self._contributes:
            # `_given` may name more fragments than this rank has: a stage of a pipeline may lack the
            # last ones.
            given = [fragment in self._given for fragment in range(self._num_fragments)]
        own = torch.tensor([self._may_update, self._contributes, *given], dtype=torch.int32)
        gathered = self._operations.gather(own.to(self._where, non_blocking=True))
        (read,) = self._operations.read(gathered)
        counts = read.view(gathered.shape).sum(0).tolist()
        num_expecting, num_contributing, *num_giving = counts
        if num_expecting == 0:
            return frozenset()
        if any(number not in (0, num_contributing) for number in num_giving):
            return frozenset()
        return frozenset(fragment for fragment, number in enumerate(num_giving) if number > 0)

    def _sum(self, bucket: Bucket) -> None:
        """Replace the bucket's contents by the sum over all members."""
        operations = self._operations
        num_exact = bucket.exact.numel()
        num_members = operations.num_members
        self.sent_bytes += bucket.count_sent_bytes(num_members)
        if bucket.is_bfloat16 and num_members > 1:
            # Each member sums one part of the values, and sends the sums to all members.
            rows = half.cut(bucket.values, bucket.exact, num_members)
            part, exact = half.add_up(operations.all_to_all(rows), num_exact)
            parts = operations.all_gather(part.view(torch.uint8)).view(torch.bfloat16)
            bucket.values.copy_(parts.view(-1)[: bucket.values.numel()])
            bucket.exact.copy_(exact)
            return
        if bucket.residual is None:
            operations.all_reduce(bucket.flat)
            return
        if num_members == 1:  # nothing is sent, so nothing is rounded
            bucket.residual.set_error(None)
            return
        # 8 bits: each member gets the encoded values of all members, and sums them itself.
        payload = encode(bucket.flat, num_exact)
        if self._contributes:
            bucket.residual.set_error(find_rounding_error(bucket.flat, payload, num_exact))
        add_up(operations.all_gather(payload), num_exact, bucket.flat)

    def _gather(self, quorum: Quorum, row: Sequence[float], message: bytes) -> Gathered:
        """Gather the rows and messages.

        On a GPU, the host waits once for the rows and for the weights of the sums.
        """
        operations = self._operations
        # The vector that is gathered: the row, the length of the message, the total of the
        # gradients.
        vector = torch.tensor([*row, len(message), 0.0], dtype=torch.float64)
        vector = vector.to(self._where, non_blocking=True)
        travelled = [bucket for bucket in self._buckets if bucket.fragment in self.travelling]
        if self._contributes and travelled:
            # The total is not finite if the total of one bucket is not. In float64 it cannot
            # overflow.
            totals = torch.stack([bucket.total for bucket in travelled])
            vector[-1] = totals.sum(dtype=torch.float64)
        gathered = operations.gather(vector)
        part_weights = [bucket.part_weights for bucket in travelled]
        read_vectors, *read_weights = operations.read(gathered, *part_weights)
        vectors: list[list[float]] = read_vectors.view(gathered.shape).tolist()
        weights_of = {}
        for bucket, weights in zip(travelled, read_weights, strict=True):
            weights_of[id(bucket)] = weights.tolist()
        sizes = [int(vector[-2]) for vector in vectors]
        return Gathered(
            quorum,
            rows=[vector[:-2] for vector in vectors],
            messages=self._gather_messages(message, sizes),
            nonfinite=[not math.isfinite(vector[-1]) for vector in vectors],
            weights=[weights_of.get(id(bucket)) for bucket in self._buckets],
        )

    def _gather_messages(self, message: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Gather the messages of all members, whose lengths are known by now."""
        longest = max(sizes)
        if longest == 0:
            return [b""] * len(sizes)
        padded = torch.frombuffer(bytearray(message.ljust(longest, b"\0")), dtype=torch.uint8)
        gathered = self._operations.gather(padded.to(self._where, non_blocking=True))
        (read,) = self._operations.read(gathered)
        lines = read.view(len(sizes), -1).numpy()
        return [line[:size].tobytes() for line, size in zip(lines, sizes, strict=True)]
