# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One exchange under way, on a thread of its own: the *flight*.

`gradients/exchange.py` launches an exchange on the training thread, and copies gradients into
buckets. A *bucket* is a flat tensor with the gradients of some parameters. Other groups may need
seconds until their gradients are ready. So a thread of the exchange makes all collectives, and
backward does not wait for them.

The thread, in order of time:

1. Wait until the lighthouse has said which groups take part (the *quorum*). The ranks of equal
   number in these groups are the *members* of the exchange.
2. Agree with the other members on the fragments to sum. A *fragment* is a part of the model that
   can be exchanged without the rest.
3. Sum the buckets of these fragments, each as soon as the training thread has filled it.
4. Gather the *row* (numbers) and the *message* (bytes) with which each member describes its part of
   the exchange.

If a member dies, a collective fails or is aborted, and `Flight.finish` raises `ExchangeError`. A
thread that hangs in an aborted collective is abandoned (`turn.py`).

See docs/exchange.md.
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
from titan_ft.gradients.quantize import Residual, add_up, encode, find_rounding_error
from titan_ft.membership.membership import Membership
from titan_ft.protocol.errors import first_line
from titan_ft.protocol.member import Quorum


class ExchangeError(RuntimeError):
    """The exchange broke. The local gradients are untouched, and the exchange can be repeated."""


class OwnFacts(Protocol):
    """This rank's facts, which become a row and a message when the quorum is known.

    `protocol.report.RoundReport` implements this protocol.
    """

    def complete(
        self,
        quorum: Quorum,
        gave: bool,
        ready_at: float,
    ) -> tuple[Sequence[float], bytes]:
        """Return this rank's row and message; on the exchange's thread.

        Args:
            gave: this rank's gradients are in the sums.
            ready_at: monotonic seconds at which this rank's facts were ready.
        """


@dataclass(frozen=True)
class Gathered:
    """The result of a flight, apart from the sums, which are in the buckets.

    Attributes:
        quorum, rows, messages, nonfinite: see `exchange.ExchangeResult`.
        weights: for each bucket, one weight per part, summed over the members; None = the bucket
            was not summed.
    """

    quorum: Quorum
    rows: list[list[float]]
    messages: list[bytes]
    nonfinite: list[bool]
    weights: list[list[float] | None]


class Flight:
    """One exchange under way.

    Threads: `GradientExchange` makes a flight for each exchange. It calls all public methods on the
    training thread, in this order: `start`, `hand_over` for each bucket, `report`, `finish`,
    `join`. The flight's own thread runs `_run` and the methods after it.

    The flight's thread owns a bucket from `hand_over` until the thread ends. If an error ends the
    thread, `finish` raises the error, and the contents of the buckets are void.

    Args:
        own_fragments: fragments whose gradients this rank contributes.
        num_fragments: number of fragments of the model.
        newest_step: number of updates that the most advanced member may hold. If a member has more,
            this rank's gradients belong to an old step, and it sends zeros. None = this rank
            contributes no gradients.
        may_update: False if this rank knows that no update can follow from the exchange.

    Attributes:
        summed_fragments: fragments that the members sum in this exchange; the same on all members.
        sent_bytes: bytes of gradients that this rank has sent.
    """

    def __init__(
        self,
        membership: Membership,
        buckets: list[Bucket],
        where: torch.device,
        *,
        own_fragments: frozenset[int],
        num_fragments: int,
        newest_step: int | None,
        may_update: bool,
    ) -> None:
        self._membership = membership
        self._buckets = buckets
        self._where = where
        self._own_fragments = own_fragments
        self._num_fragments = num_fragments
        self._newest_step = newest_step
        self._may_update = may_update
        self._operations = Operations(membership, where)
        # Both queues bring something from the training thread to this thread. None ends the queue.
        self._full_buckets: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
        # The facts, and the monotonic seconds at which they were ready.
        self._facts: queue.SimpleQueue[tuple[OwnFacts, float] | None] = queue.SimpleQueue()
        self._is_reported = False
        self.summed_fragments: frozenset[int] = frozenset()
        self.sent_bytes = 0
        self._contributes = False  # this rank's gradients are in the sums
        # The last kernel that this thread has queued on its own stream of the GPU. The sums run on
        # NCCL's stream, and `Operations.end` waits for them.
        self._last_own_kernel: torch.Event | None = None
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
        """Give the flight's thread a bucket that is full."""
        self._full_buckets.put(bucket)

    def report(self, facts: OwnFacts) -> None:
        """Give the flight's thread this rank's facts. The thread sends them after the sums.

        Later calls are ignored. `GradientExchange.launch_with_facts` reports early, and
        `GradientExchange.finish` reports in any case.
        """
        if not self._is_reported:
            self._is_reported = True
            self._facts.put((facts, time.monotonic()))

    @property
    def abandoned(self) -> bool:
        """True if the flight's thread was abandoned, because it hung in an aborted operation.

        The thread ends without touching a bucket when the operation returns.
        """
        return self._operations.turn.abandoned

    @property
    def is_summing(self) -> bool:
        """True until all sums are complete; on a GPU, until all of them are queued.

        For this, the other members must have launched their sums, and have computed their
        gradients.
        """
        return not self._summed.is_set()

    def finish(self) -> Gathered:
        """Wait for the end of the flight's thread, and return the result.

        Raises:
            ExchangeError: the exchange broke.
            AssertionError: the exchange has a defect.
            Exception: there was no quorum; the error of the membership.
        """
        self._end_buckets()
        self._operations.turn.wait(self._ended)
        if self.abandoned:
            raise ExchangeError("aborted, and an operation is still being launched")
        if self._error is not None:
            raise self._error
        assert self._gathered is not None
        return self._gathered

    def join(self) -> None:
        """End the flight's thread, or abandon it in a hung operation. This frees the buckets.

        On a GPU, a broken sum writes to its bucket until its abort is complete. The caller may
        queue work on the buckets at once, such as a copy of gradients: the GPU starts this work
        after the sum has ended.
        """
        self._end_buckets()
        self._facts.put(None)
        self._operations.turn.wait(self._ended)
        if self.abandoned:
            # The abandoned thread has recorded no event, so record it here, on the thread's stream.
            with device.side_stream(self._where):
                self._last_own_kernel = device.record_event()
        # Later work of training waits for this thread's kernels, and for the collectives.
        device.wait_for(self._last_own_kernel, self._where)
        self._operations.end()

    def _end_buckets(self) -> None:
        """Say that no more buckets are handed over, so that the flight's thread waits for none."""
        self._full_buckets.put(None)

    # On the flight's thread

    def _run(self) -> None:
        try:
            # `Operations` releases the turn during each operation. Only there can the training
            # thread abandon this thread.
            with self._operations.turn.held():
                self._exchange()
        finally:
            self._summed.set()
            self._ended.set()

    def _exchange(self) -> None:
        try:
            quorum = self._membership.await_quorum()
            if quorum.error is not None:  # the process group could not be built
                raise ExchangeError(quorum.error)
            self._operations.set_quorum(quorum)
            if self._newest_step is not None:
                self._contributes = quorum.max_step <= self._newest_step
            # By default, this thread would use the same stream as training. The waits for the other
            # members, which this thread queues, would then stop training.
            with device.side_stream(self._where):
                try:
                    self._sum_and_gather(quorum)
                finally:
                    # An abandoned thread may end much later. `join` has recorded the event then.
                    if not self.abandoned and self._where.type != "cpu":
                        self._last_own_kernel = device.record_event()
        except Exception as error:  # noqa: BLE001  # `finish` raises it on the training thread
            self._error = self._classify(error)

    def _classify(self, error: Exception) -> Exception:
        """Return the error that `finish` raises."""
        # There was no quorum, so there is no exchange to repeat. The membership's error ends the
        # run.
        if self._operations.quorum is None:
            return error
        # A failed assertion is a defect of this code. As an `ExchangeError` it would be hidden,
        # because the exchange would be repeated.
        if isinstance(error, ExchangeError | AssertionError):
            return error
        return ExchangeError(first_line(error))

    def _sum_and_gather(self, quorum: Quorum) -> None:
        """Sum the buckets, and gather the rows and messages (steps 2 to 4 of the module's head)."""
        full: set[int] = set()  # ids of the buckets that were handed over
        self.summed_fragments = self._agree_on_fragments()
        # All members must sum the buckets in the same order. They may fill them in another order.
        for bucket in self._buckets:
            if bucket.fragment not in self.summed_fragments:
                continue
            while id(bucket) not in full:
                handed_over = self._full_buckets.get()
                if handed_over is None:
                    return  # `finish` or `join` was called before the bucket was full
                full.add(id(handed_over))
            device.wait_for(bucket.ready_event, self._where)
            if self._contributes:
                if bucket.residual is not None:
                    # Add the rounding error of this group's last gradients.
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
        """Return the fragments to sum, the same on all members.

        These are the fragments of all members that contribute gradients. No fragment is summed in
        two cases:

        - No member expects an update, so no member would use the sums. Sums of zeros would slow
          down the transfer of a state to a joiner, for which such a round may be made.
        - The contributing members have different fragments. They are at different updates then, and
          the rows will show it.
        """
        contributes_fragment = [False] * self._num_fragments
        if self._contributes:
            # In a pipeline, this rank's stage may lack the last fragments of the model. Iterate
            # over all fragments, because the vectors of all members must have the same length.
            for fragment in range(self._num_fragments):
                contributes_fragment[fragment] = fragment in self._own_fragments
        own = torch.tensor(
            [self._may_update, self._contributes, *contributes_fragment],
            dtype=torch.int32,
        )
        gathered = self._operations.gather(own.to(self._where, non_blocking=True))
        (read,) = self._operations.read(gathered)
        counts = read.view(gathered.shape).sum(0).tolist()
        num_expecting_update, num_contributing, *num_contributing_fragment = counts
        if num_expecting_update == 0:
            return frozenset()
        fragments = set()
        for fragment, number in enumerate(num_contributing_fragment):
            if number == 0:
                continue
            if number < num_contributing:
                return frozenset()  # only some of the contributing members have this fragment
            fragments.add(fragment)
        return frozenset(fragments)

    def _sum(self, bucket: Bucket) -> None:
        """Replace the bucket's contents by the sum over all members."""
        num_members = self._operations.num_members
        self.sent_bytes += bucket.count_sent_bytes(num_members)
        if bucket.is_bfloat16 and num_members > 1:
            self._sum_in_bfloat16(bucket)
        elif bucket.residual is not None:
            self._sum_in_8_bits(bucket, bucket.residual)
        else:
            self._operations.all_reduce(bucket.flat)

    def _sum_in_bfloat16(self, bucket: Bucket) -> None:
        """Sum a bucket over the members. Each member adds up one part, and sends it to the rest."""
        operations = self._operations
        num_exact = bucket.exact.numel()
        rows = half.cut(bucket.values, bucket.exact, operations.num_members)
        part, exact = half.add_up(operations.all_to_all(rows), num_exact)
        parts = operations.all_gather(part.view(torch.uint8)).view(torch.bfloat16)
        # The last part is padded.
        bucket.values.copy_(parts.view(-1)[: bucket.values.numel()])
        bucket.exact.copy_(exact)

    def _sum_in_8_bits(self, bucket: Bucket, residual: Residual) -> None:
        """Sum a bucket over the members. Each member adds up the encoded values of all members."""
        operations = self._operations
        if operations.num_members == 1:
            # Nothing is sent, so nothing is rounded.
            residual.set_error(None)
            return
        num_exact = bucket.exact.numel()
        payload = encode(bucket.flat, num_exact)
        if self._contributes:
            residual.set_error(find_rounding_error(bucket.flat, payload, num_exact))
        add_up(operations.all_gather(payload), num_exact, bucket.flat)

    def _gather(self, quorum: Quorum, row: Sequence[float], message: bytes) -> Gathered:
        """Gather the rows and messages.

        On a GPU, the host waits once for both the rows and the weights of the sums.
        """
        operations = self._operations
        summed = [bucket for bucket in self._buckets if bucket.fragment in self.summed_fragments]
        # One vector for each member: the row, the length of the message, and the total of the
        # gradients.
        vector = torch.tensor([*row, len(message), 0.0], dtype=torch.float64)
        vector = vector.to(self._where, non_blocking=True)
        if self._contributes and summed:
            # The total is not finite if the total of one bucket is not. In float64, a sum of finite
            # totals cannot overflow.
            totals = torch.stack([bucket.total for bucket in summed])
            vector[-1] = totals.sum(dtype=torch.float64)
        gathered = operations.gather(vector)
        part_weights = [bucket.part_weights for bucket in summed]
        read_vectors, *read_weights = operations.read(gathered, *part_weights)
        rows: list[list[float]] = []
        message_sizes: list[int] = []
        nonfinite: list[bool] = []
        vectors: list[list[float]] = read_vectors.view(gathered.shape).tolist()
        for *member_row, message_size, total in vectors:
            rows.append(member_row)
            message_sizes.append(int(message_size))
            nonfinite.append(not math.isfinite(total))
        weights_of_bucket = {}
        for bucket, weights in zip(summed, read_weights, strict=True):
            weights_of_bucket[id(bucket)] = weights.tolist()
        return Gathered(
            quorum,
            rows,
            self._gather_messages(message, message_sizes),
            nonfinite,
            weights=[weights_of_bucket.get(id(bucket)) for bucket in self._buckets],
        )

    def _gather_messages(self, message: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Gather the messages of all members.

        Args:
            message: this member's message.
            sizes: lengths of the members' messages.
        """
        longest = max(sizes)
        if longest == 0:
            return [b""] * len(sizes)
        # A collective needs vectors of equal length.
        padded = torch.frombuffer(bytearray(message.ljust(longest, b"\0")), dtype=torch.uint8)
        gathered = self._operations.gather(padded.to(self._where, non_blocking=True))
        (read,) = self._operations.read(gathered)
        padded_messages = read.view(len(sizes), -1).numpy()
        messages = []
        for padded_message, size in zip(padded_messages, sizes, strict=True):
            messages.append(padded_message[:size].tobytes())
        return messages
