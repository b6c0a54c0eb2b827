# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One exchange under way, in a thread of its own.

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
from titan_ft.gradients.quantize import add_up, encode, left_behind
from titan_ft.membership.membership import Membership
from titan_ft.protocol.errors import first_line
from titan_ft.protocol.member import Quorum


class ExchangeError(RuntimeError):
    """The exchange broke; the local gradients are untouched and it can be repeated."""


class OwnFacts(Protocol):
    """What this rank reports in the exchange; see `titan_ft.protocol.report.RoundReport`."""

    def complete(self, quorum: Quorum, gave: bool, came: float) -> tuple[Sequence[float], bytes]:
        """Return this rank's row and message, which depend on the quorum.

        Args:
            gave: this rank's gradients are in the sums.
            came: monotonic seconds at which this rank's facts were there.
        """


@dataclass(frozen=True)
class Gathered:
    """What the members sent with their sums.

    Attributes:
        rows, messages: one of each member. All rows have the same length.
        spoiled: for each member, whether its gradients have an inf or a NaN.
        weights: for each bucket, one weight per part, summed over the members. None: the bucket did
            not travel.
    """

    quorum: Quorum
    rows: list[list[float]]
    messages: list[bytes]
    spoiled: list[bool]
    weights: list[list[float] | None]


class Flight:
    """One exchange under way, on a thread of its own.

    The thread waits for the quorum, so that backward and its hooks never do. It makes all
    collectives. It owns a bucket from `hand_over` until the thread ends. The training thread calls
    all public methods.

    Args:
        given: fragments that this rank gives.
        newest_step: this rank's gradients count unless a member of the quorum holds more updates
            than this. None: this rank gives no gradients.
        due: False if this rank knows that no update can follow.

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
        due: bool,
    ) -> None:
        self._membership, self._buckets, self._where = membership, buckets, where
        self._given, self._num_fragments = given, num_fragments
        self._newest_step, self._due = newest_step, due
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
        """Give the thread this rank's facts. It sends them after the sums. Only the first call counts."""
        if not self._is_reported:
            self._is_reported = True
            self._facts.put((facts, time.monotonic()))

    @property
    def left(self) -> bool:
        """True if the thread was left in an operation; it touches nothing afterwards."""
        return self._operations.turn.left

    @property
    def is_summing(self) -> bool:
        """True until the other members have given all of their sums."""
        return not self._summed.is_set()

    def finish(self) -> Gathered:
        """Wait for the thread's end.

        Raises:
            ExchangeError: the exchange broke.
            AssertionError: the exchange has a defect.
            Exception: there was no quorum; the error is that of the membership.
        """
        self._full.put(None)
        self._operations.turn.wait(self._ended)
        if self.left:
            raise ExchangeError("aborted, and an operation is still being launched")
        if self._error is not None:
            raise self._error
        assert self._gathered is not None
        return self._gathered

    def join(self) -> None:
        """End the thread, or leave it in its operation. The buckets are free for the next exchange.

        A broken sum writes to its bucket on the GPU until its abort is complete. Work that the
        caller queues next, such as a copy of gradients into the same buckets, waits for that on the
        GPU.
        """
        self._full.put(None)
        self._facts.put(None)
        self._operations.turn.wait(self._ended)
        if self.left:
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
            self._operations.begin(quorum)
            self._contributes = self._newest_step is not None and quorum.max_step <= self._newest_step
            # On this thread's default stream, which is the training's, training would wait for the
            # other members.
            with device.side_stream(self._where):
                try:
                    self._sum_and_gather(quorum)
                finally:
                    if not self.left:
                        self._queued = device.record_event() if self._where.type != "cpu" else None
        except Exception as error:  # noqa: BLE001  # thread edge: finish() raises it on the training thread
            # Without a quorum nothing was exchanged: the error is that of the membership, and ends
            # the run. An assert is a defect, such as a bucket in the wrong state: a repetition
            # would hide it.
            is_final = self._operations.quorum is None or isinstance(error, (ExchangeError, AssertionError))
            self._error = error if is_final else ExchangeError(first_line(error))

    def _sum_and_gather(self, quorum: Quorum) -> None:
        """Sum the buckets as they become full, then gather the rows."""
        full: set[int] = set()
        # Buckets without gradients do not travel: they would compete with the state's transfer that
        # the round waits for.
        self.travelling = self._agree_on_fragments()
        for bucket in self._buckets:
            if bucket.fragment not in self.travelling:
                continue
            while id(bucket) not in full:
                handed_over = self._full.get()
                if handed_over is None:  # `finish` or `join` was called before the bucket was full
                    return
                full.add(id(handed_over))
            device.wait_for(bucket.full, self._where)
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
        if reported is not None:  # None: `join` was called, the exchange is given up
            facts, came = reported
            self._gathered = self._gather(quorum, *facts.complete(quorum, self._contributes, came))

    def _agree_on_fragments(self) -> frozenset[int]:
        """Return the fragments that travel: those that all members with gradients in this exchange give.

        No fragment travels if these members give different ones. Then they are not at the same
        update, which the rows will show. Nor does one if no member expects an update.
        """
        given = [self._contributes and fragment in self._given for fragment in range(self._num_fragments)]
        counts = torch.tensor([self._due, self._contributes, *given], dtype=torch.int32)
        gathered = self._operations.gather(counts.to(self._where, non_blocking=True))
        (counted,) = self._operations.read(gathered)
        due, num_givers, *users = map(sum, zip(*counted.view(gathered.shape).tolist(), strict=True))
        if not due or any(number not in (0, num_givers) for number in users):
            return frozenset()
        return frozenset(fragment for fragment, number in enumerate(users) if number)

    def _sum(self, bucket: Bucket) -> None:
        """Make the bucket the sum of all members' ones."""
        operations, num_exact = self._operations, bucket.exact.numel()
        num_members = operations.num_members
        self.wire_bytes += bucket.wire_bytes(num_members)
        if bucket.halves and num_members > 1:
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
            bucket.residual.leave(None)
            return
        payload = encode(bucket.flat, num_exact)
        if self._contributes:
            bucket.residual.leave(left_behind(bucket.flat, payload, num_exact))
        add_up(operations.all_gather(payload), num_exact, bucket.flat)

    def _gather(self, quorum: Quorum, row: Sequence[float], message: bytes) -> Gathered:
        """Gather the rows and messages. The host reads the sums' weights in the same wait for the device."""
        operations = self._operations
        own = torch.tensor([*row, len(message), 0.0], dtype=torch.float64).to(self._where, non_blocking=True)
        travelled = [bucket for bucket in self._buckets if bucket.fragment in self.travelling]
        if self._contributes and travelled:
            # The total is not finite if one of the buckets' totals is not. In float64 it cannot
            # overflow.
            own[-1] = torch.stack([bucket.total for bucket in travelled]).sum(dtype=torch.float64)
        gathered = operations.gather(own)
        facts, *weights = operations.read(gathered, *(bucket.used for bucket in travelled))
        rows: list[list[float]] = facts.view(gathered.shape).tolist()
        weights_of = {id(bucket): of_parts.tolist() for bucket, of_parts in zip(travelled, weights, strict=True)}
        sizes = [int(row[-2]) for row in rows]
        messages = [b""] * len(sizes)
        if any(sizes):  # a second collective: only now is the longest message known
            octets = torch.frombuffer(bytearray(message.ljust(max(sizes), b"\0")), dtype=torch.uint8)
            (padded,) = operations.read(operations.gather(octets.to(self._where, non_blocking=True)))
            lines = zip(padded.view(len(sizes), -1).numpy(), sizes, strict=True)
            messages = [line[:size].tobytes() for line, size in lines]
        return Gathered(
            quorum,
            [row[:-2] for row in rows],
            messages,
            [not math.isfinite(row[-1]) for row in rows],
            [weights_of.get(id(bucket)) for bucket in self._buckets],
        )
