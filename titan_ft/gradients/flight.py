# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One exchange under way, on a thread of its own.

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
from titan_ft.gradients.quantize import add_up, encode, find_rounding_error
from titan_ft.membership.membership import Membership
from titan_ft.protocol.errors import first_line
from titan_ft.protocol.member import Quorum


class ExchangeError(RuntimeError):
    """The exchange broke. The local gradients are untouched, and it can be repeated."""


class OwnFacts(Protocol):
    """This rank's report in the exchange; see `titan_ft.protocol.report.RoundReport`."""

    def complete(
        self,
        quorum: Quorum,
        gave: bool,
        ready_at: float,
    ) -> tuple[Sequence[float], bytes]:
        """Return this rank's row and message, which depend on the quorum.

        Args:
            gave: this rank's gradients are in the sums.
            ready_at: monotonic seconds at which this rank's facts were ready.
        """


@dataclass(frozen=True)
class Gathered:
    """The rows and messages that the members sent with their sums.

    Attributes:
        rows, messages: one of each member. All rows have the same length.
        nonfinite: for each member, True if its gradients have an inf or a NaN.
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

    `GradientExchange` makes one for each exchange, and calls all public methods on the training
    thread. The flight's thread waits for the quorum, so that backward and its hooks never do. It
    makes all collectives. It owns a bucket from `hand_over` until the thread ends. After an error,
    `finish` raises it, and the contents of the buckets are void.

    Args:
        given: fragments that this rank gives.
        newest_step: this rank's gradients count unless a member of the quorum has more updates;
            None = this rank gives no gradients.
        may_update: False if this rank knows that no update can follow.

    Attributes:
        travelling: fragments that are summed; the same on all members.
        wire_bytes: bytes of gradients that this rank has sent.
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
        self._full: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
        self._facts: queue.SimpleQueue[tuple[OwnFacts, float] | None] = queue.SimpleQueue()
        self._is_reported = False
        self.travelling: frozenset[int] = frozenset()
        self.wire_bytes = 0
        self._contributes = False  # this rank's gradients are in the sums
        # Recorded after the thread's own work on the device. The sums run on NCCL's stream:
        # `Operations.end` waits for them.
        self._queued: torch.Event | None = None
        # Set when all sums are there, or are queued on a GPU, and when the thread ends.
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
        self._full.put(bucket)

    def report(self, facts: OwnFacts) -> None:
        """Give the thread this rank's facts, which follow the sums. Only the first call counts."""
        if not self._is_reported:
            self._is_reported = True
            self._facts.put((facts, time.monotonic()))

    @property
    def abandoned(self) -> bool:
        """True if the thread was abandoned in an operation. It touches nothing afterwards."""
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
        self._full.put(None)
        self._operations.turn.wait(self._ended)
        if self.abandoned:
            raise ExchangeError("aborted, and an operation is still being launched")
        if self._error is not None:
            raise self._error
        assert self._gathered is not None
        return self._gathered

    def join(self) -> None:
        """End the thread, or abandon it in its operation. Then the buckets are free again.

        A broken sum writes to its bucket on the GPU until its abort is complete. Work that the
        caller queues next, such as a copy of gradients into the same buckets, waits for that on the
        GPU.
        """
        self._full.put(None)
        self._facts.put(None)
        self._operations.turn.wait(self._ended)
        if self.abandoned:
            with device.side_stream(self._where):
                self._queued = device.record_event()
        device.wait_for(self._queued, self._where)
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
            # A stream of its own. On this thread's default stream, which is that of the training,
            # the training would wait for the other members.
            with device.side_stream(self._where):
                try:
                    self._sum_and_gather(quorum)
                finally:
                    if not self.abandoned and self._where.type != "cpu":
                        self._queued = device.record_event()
        except Exception as error:  # noqa: BLE001  # `finish` raises it on the training thread
            self._error = self._classify(error)

    def _classify(self, error: Exception) -> Exception:
        """Return the error that `finish` raises."""
        # Without a quorum, nothing was exchanged. The membership's error ends the run.
        if self._operations.quorum is None:
            return error
        # A failed assertion is a defect, such as a bucket in the wrong state. A repetition of the
        # exchange would hide it.
        if isinstance(error, ExchangeError | AssertionError):
            return error
        return ExchangeError(first_line(error))

    def _sum_and_gather(self, quorum: Quorum) -> None:
        """Sum the buckets as they become full, then gather the rows."""
        full: set[int] = set()
        # Buckets without gradients do not travel. They would compete with the transfer of the state
        # that the round waits for.
        self.travelling = self._agree_on_fragments()
        for bucket in self._buckets:
            if bucket.fragment not in self.travelling:
                continue
            while id(bucket) not in full:
                handed_over = self._full.get()
                if handed_over is None:
                    return  # `finish` or `join` was called before the bucket was full
                full.add(id(handed_over))
            device.wait_for(bucket.ready, self._where)
            if self._contributes:
                if bucket.residual is not None:
                    bucket.residual.add_to(bucket.values)
                bucket.add_up()
            else:
                bucket.flat.zero_()
            self._sum(bucket)
        self._operations.await_sums()
        self._summed.set()
        reported = self._facts.get()
        if reported is None:
            return  # `join` was called: the exchange is given up
        facts, ready_at = reported
        row, message = facts.complete(quorum, self._contributes, ready_at)
        self._gathered = self._gather(quorum, row, message)

    def _agree_on_fragments(self) -> frozenset[int]:
        """Return the fragments that travel: all members with gradients give them.

        No fragment travels if these members give different ones: they are not at the same update,
        and the rows will show it. No fragment travels either if no member expects an update.
        """
        given = [fragment in self._given for fragment in range(self._num_fragments)]
        if not self._contributes:
            given = [False] * self._num_fragments
        own = torch.tensor([self._may_update, self._contributes, *given], dtype=torch.int32)
        gathered = self._operations.gather(own.to(self._where, non_blocking=True))
        (read,) = self._operations.read(gathered)
        num_expecting, num_contributing, *num_giving = read.view(gathered.shape).sum(0).tolist()
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
        self.wire_bytes += bucket.wire_bytes(num_members)
        if bucket.is_bfloat16 and num_members > 1:
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
            bucket.residual.note_error(None)
            return
        payload = encode(bucket.flat, num_exact)
        if self._contributes:
            bucket.residual.note_error(find_rounding_error(bucket.flat, payload, num_exact))
        add_up(operations.all_gather(payload), num_exact, bucket.flat)

    def _gather(self, quorum: Quorum, row: Sequence[float], message: bytes) -> Gathered:
        """Gather the rows and messages. Reads the weights of the sums in the same wait."""
        operations = self._operations
        # The vector that travels: the row, the length of the message, the total of the gradients.
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
