# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The exchange: sum the local gradient shards and a row of facts over the replica groups, while backward goes on.

Gradients are copied into buckets of fixed content and order as autograd finishes them
(`register_post_accumulate_grad_hook`; FSDP2 calls it for sharded parameters too), and each bucket's all-reduce starts
as soon as it and its predecessors are full. The buckets are copies: the local gradients stay untouched until the step
is committed, so a broken exchange is repeated with the survivors and nothing is recomputed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import compress
from typing import Any
from weakref import WeakSet

import torch

from titan_ft import device
from titan_ft.gradients import half
from titan_ft.gradients.bucket import Bucket, Count, Gradient, Part, Sums, partition
from titan_ft.gradients.quantize import add_up, encode, left_behind, payload_bytes
from titan_ft.gradients.turn import Turn
from titan_ft.membership.collectives import all_gather, all_reduce, all_to_all, rehearse_sums
from titan_ft.membership.membership import Membership
from titan_ft.protocol.errors import first_line
from titan_ft.protocol.member import Quorum

logger = logging.getLogger(__name__)


class ExchangeError(RuntimeError):
    """The exchange broke; the local gradients are untouched and it can be repeated."""


OwnFacts = tuple[Sequence[float], bytes]  # a member's row and message

# The most that one all-gather or all-to-all of Gloo is given. It waits for all of a member's payload, where its
# all-reduce waits for a MiB at a time: so `process_group_timeout_ms` bounds a slice, and no bucket is too large for a
# slow link. Not smaller, because each operation costs a round trip.
_SLICE_BYTES = 4 << 20
_MOMENTS = 2  # of Adam, for each gradient
# Sums of buckets over Gloo: its process group has two threads, and the third one waits for the next that is free.
_IN_FLIGHT = 3
# Values. The bucket of an unsharded embedding has gigabytes, and as much again may be more than the GPU has left.
# For tensors above this size NCCL's choice of an algorithm should not change any more.
_MOST_REHEARSED = 64 << 20


@dataclass(frozen=True)
class Reduced:
    """The outcome of one exchange: its quorum, the members' rows, all of one width, and their messages.

    Attributes:
        spoiled: of each member, whether the gradients that it gave have an inf or a NaN.
    """

    quorum: Quorum
    rows: list[list[float]]
    messages: list[bytes]
    spoiled: list[bool]


class GradientExchange:
    """Sums gradients over the groups. One per rank; ranks of the same index in each group exchange with each other.

    Args:
        parameters: the trainable parameters, in the same order in every group.
        membership: provides quorum and process group.
        bucket_bytes: size of a bucket; a larger parameter gets a bucket of its own.
        where: device of the buckets (`device.exchange_device`).
        overlap: launch buckets during backward. Needs gradients that are final when autograd's hook runs. With CPU
            offload `finish` launches them, after backward.
        microbatches: of a pipeline's schedule, where autograd's hook runs behind each: a gradient is final with the
            last of so many calls. 1 where FSDP makes the calls, once behind all of them. 0 = there is no pipeline.
        gradient_scale: what the local gradients are yet to be multiplied with to be those of the losses that are told;
            not 1 where backward starts from another loss, as a pipeline's does.
        fragments: for each parameter the fragment that it is of; all are of fragment 0 if there is none. Only what the
            groups `give` travels.
        quantize: let gradients travel in 8 bits (`quantize.py`), and add what that leaves behind to this rank's next
            ones. Not with counts, which would be rounded too.
        dtype: that gradients travel in: fp32, or bfloat16 (`half.py`). Not with `quantize`.
        counts: buffers in which the model counts what it trains since the gradients were zero, as whole numbers. They
            are summed with the gradients, in the same order in every group, and get the sums where these do. The sums
            are exact up to 2**24.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        membership: Membership,
        *,
        bucket_bytes: int,
        where: torch.device,
        overlap: bool,
        microbatches: int = 0,
        gradient_scale: float = 1.0,
        fragments: Sequence[int] = (),
        quantize: bool = False,
        dtype: torch.dtype = torch.float32,
        counts: Iterable[torch.Tensor] = (),
    ) -> None:
        self._membership = membership
        self._where = where
        self._gradient_scale = gradient_scale
        # Autograd finishes the last layers first; counts are complete only behind all of it (recomputation counts too).
        gradients = [Gradient(parameter) for parameter in parameters if parameter.requires_grad]
        parts: dict[int, list[Part]] = {fragment: [] for fragment in sorted({*fragments, 0})}
        for gradient, fragment in zip(gradients, fragments or [0] * len(gradients), strict=True):
            parts[fragment].insert(0, gradient)
        parts[0] += map(Count, counts)
        self._buckets = [
            Bucket(run, fragment, where, dtype, quantize=quantize)
            for fragment, own in parts.items()
            for run in partition(own, bucket_bytes)
        ]
        self._num_fragments = max(parts) + 1
        self._on_host = all(gradient.parameter.device.type == "cpu" for gradient in gradients)
        self._weights: Mapping[int, float] = dict.fromkeys(parts, 1.0)
        self._used: list[list[float] | None] = [None] * len(self._buckets)  # of those that the last exchange has summed
        self._armed = False
        self._flight: _Flight | None = None
        self.spoiled = False  # whether what this rank gave to the last exchange, if that worked, was not finite
        self.came = math.inf
        """When this rank's part of the exchange under way, or the last one, was there; by this process's clock."""
        self._wire_bytes = 0
        self._read: torch.Event | None = None  # when the sums have been copied out of the buckets
        self._room: Future[list[torch.Tensor]] | None = None  # host memory for the next copy of them
        self._on_device = WeakSet[Sums]()  # the copies there that somebody still has
        self._most_on_device = 0
        # With CPU offload no gradient is taken before the end of backward. FSDP2 copies each gradient to host memory,
        # and with a hook on the parameter it would wait for each copy (`foreach_reduce` in torch's _fsdp_collectives).
        # Without hooks it waits once, at the end of backward (`FSDPParamGroup.finalize_backward`).
        offloads = self._on_host and not device.on_cpu()
        if overlap and not offloads:
            for bucket in self._buckets:
                for index, part in enumerate(bucket.parts):
                    if isinstance(part, Gradient):
                        take = self._hook(bucket, index)
                        take = self._on_last_call(bucket, index, microbatches, take) if microbatches else take
                        part.parameter.register_post_accumulate_grad_hook(take)

    def give(self, weights: Mapping[int, float]) -> None:
        """Say which fragments this rank gives from now on, each with its weight in the mean; before a launch.

        Without it all are given, with a weight of 1, which counts the groups that have a gradient.
        """
        self._weights = dict(weights)

    def arm(self, contributes: Callable[[Quorum], bool]) -> None:
        """Let the backward that follows launch the exchange: call it before the step's last backward.

        `contributes` is asked once the quorum is known whether this group's gradients count; if not, zeros are sent.
        """
        self._launch(contributes)
        self._armed = True

    def launch_empty(self) -> None:
        """Launch an exchange to which this rank adds nothing; returns at once, and `finish` completes it."""
        self._launch(lambda quorum: False, gives=False)

    def send(self, contributes: Callable[[Quorum], bool], describe: Callable[[Quorum], OwnFacts]) -> None:
        """Launch a whole exchange, rows and messages too; returns at once, and `finish` completes it.

        What `describe` says must hold until then. It is called on another thread.
        """
        self._launch(contributes, describe)
        self.came = time.monotonic()  # before the last bucket is full: the other thread describes it then
        self._fill_all()

    @property
    def sent(self) -> bool:
        """Say whether one is under way."""
        return self._flight is not None

    @property
    def under_way(self) -> bool:
        """Say whether what was launched goes on by itself: the other members have not given all of their sums yet."""
        return self._flight is not None and self._flight.is_summing

    def finish(self, gives: bool, describe: Callable[[Quorum], OwnFacts], *, due: bool = True) -> Reduced:
        """Complete the exchange and return the rows and messages of all members; the buckets then hold the sums.

        Completes the exchange that was launched or sent. Without one it makes a whole one, in which the local
        gradients, which are only read, take part if this rank `gives` them. Gradients travel only if a member gives
        some, and an update may follow for all that a member knows.

        Args:
            describe: builds this member's row and message once the quorum is known.
            due: whether an update may follow for all that this one knows; of one that was launched it may.

        Raises:
            ExchangeError: a member died or hung, or the process group could not be built. The process group has been
                aborted, so that the other members see it at once.
        """
        flight = self._flight or self._launch(lambda quorum: gives, gives=gives, due=due)
        self._armed = self.spoiled = False
        unsafe = False  # whether an operation that was broken off may still touch the buckets
        try:
            self._fill_all()
            self.came = min(self.came, time.monotonic())
            with self._membership.waiting(), self._bounded():
                reduced = flight.finish(describe)
            self._used = flight.used
            self.spoiled = reduced.spoiled[reduced.quorum.rank]
            return reduced
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

    def _bounded(self) -> contextlib.AbstractContextManager[None]:
        """Let an exchange that this thread waits for take no longer than the process group's timeout.

        Its quorum may: that waits for groups which compute. The exchange's thread waits for the other members too, for
        the number of givers, and may have begun long before: it is broken off with this one, which waits for it. Gloo's
        operations have timeouts of their own.
        """
        if self._where.type == "cpu":
            return contextlib.nullcontext()
        with contextlib.suppress(Exception):  # the exchange's thread gets the same, and this one raises it from there
            self._membership.wait()
        deadline: contextlib.AbstractContextManager[None] = self._membership.process_group.deadline(
            self._membership.timeout
        )
        return deadline

    def rehearse(self, group: Any, num_members: int) -> None:
        """Make each collective of an exchange once, as large as that of the largest bucket; part of NCCL's set-up.

        NCCL connects the members for an algorithm when it is first used (`ncclCollPreconnect`). Without this the first
        exchange of each communicator would wait for that, and could not be aborted meanwhile.

        Args:
            group: a process group of torch's.
        """
        if num_members == 1 or not self._buckets:
            return
        timeout, largest = self._membership.timeout, max(self._buckets, key=lambda bucket: bucket.num_bytes)
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

    @property
    def update_bytes(self) -> int:
        """Return the bytes of host memory that the copy of an update takes at most."""
        return self.num_bytes

    @property
    def contributed(self) -> bool:
        """Say whether this rank's gradients are in the exchange under way; to be asked by `finish`'s `describe`."""
        return self._flight is not None and self._flight.contributed

    def keep_on_device(self) -> int:
        """Let copies of the reduced gradients stay on the device where they fit, until `drop_room`; returns how many.

        Of what the device has left, this rank's gradients and moments may yet take their part, and half of the rest is
        for a process group that is built meanwhile. None if the buckets are in host memory.
        """
        trained = sum(bucket.values.numel() for bucket in self._buckets) * torch.float32.itemsize
        free = device.free_bytes(self._where) - (1 + _MOMENTS) * trained
        self._most_on_device = max(0, free) // (2 * max(1, self.num_bytes))
        return self._most_on_device

    @property
    def _stays(self) -> bool:
        """Say whether the next copy stays on the device."""
        return len(self._on_device) < self._most_on_device

    def make_room(self) -> None:
        """Begin to allocate host memory for the next copy of the reduced gradients, unless that stays on the device.

        To pin memory takes time: a thread does it.
        """
        if self._room is None and not self._stays:
            self._room = device.in_background(self._allocate, "titan_ft_room")

    def _allocate(self) -> list[torch.Tensor]:
        return [device.empty_host(bucket.flat.numel(), bucket.flat.dtype, keep=True) for bucket in self._buckets]

    def drop_room(self) -> None:
        """Let go of that memory, and of what copies had: none is made any more."""
        if self._room is not None:
            self._room.add_done_callback(_give_up)
        self._room, self._most_on_device = None, 0
        device.release_host_memory()

    def reduced(self) -> Sums:
        """Copy the reduced gradients.

        From a GPU the copy may still be under way then: only `write_gradients` may read it, which comes behind.
        """
        room = self._room_on_device() if self._stays else None
        stays = room is not None
        if room is None:
            self.make_room()
            assert self._room is not None
            room, self._room = self._room.result(), None
        travelled = [used is not None for used in self._used]
        for bucket, flat in zip(compress(self._buckets, travelled), compress(room, travelled), strict=True):
            flat.copy_(bucket.flat, non_blocking=True)
        copied = None
        if self._where.type != "cpu":
            copied = self._read = device.record_event()
        kept = Sums([flat if was else None for flat, was in zip(room, travelled, strict=True)], self._used, copied)
        if stays:
            self._on_device.add(kept)
        return kept

    def _room_on_device(self) -> list[torch.Tensor] | None:
        """Allocate what the next copy takes there; None if there is less left than there was."""
        try:
            return [torch.empty_like(bucket.flat) for bucket in self._buckets]
        except torch.OutOfMemoryError:
            logger.warning("the GPU has no room for the sums that were to stay there: they go to host memory")
            self._most_on_device = 0
            return None

    def write_gradients(self, kept: Sums | None, scale: float | None) -> None:
        """Make a copy of the reduced gradients (None = those in the buckets) times `scale` the parameters' gradients.

        With a scale of None they become the means by the weights that the groups gave them. The counts become the sums
        as they are. If it is the buckets, this rank's gradients are in the update: what rounding left of them counts.
        """
        if kept is not None and self._on_host:
            device.synchronize([kept.copied])
        # A replay leaves the buckets alone: an exchange may be under way in them.
        sums = Sums([bucket.flat for bucket in self._buckets], self._used) if kept is None else kept
        for bucket, flat, weights in zip(self._buckets, sums.flats, sums.weights, strict=True):
            if flat is None or weights is None:
                bucket.drop()
                continue
            if kept is None:
                bucket.settle()
            bucket.write(flat, weights, scale, self._gradient_scale)
        self._read = device.record_event()
        if self._on_host and self._where.type != "cpu":
            # The optimizer reads these gradients on the host. A copy from the device into pinned memory, as FSDP's CPU
            # offload allocates it, does not make the host wait.
            device.synchronize([self._read])

    def _launch(
        self,
        contributes: Callable[[Quorum], bool],
        describe: Callable[[Quorum], OwnFacts] | None = None,
        *,
        gives: bool = True,
        due: bool = True,
    ) -> _Flight:
        assert self._flight is None, "an exchange is under way already: finish() completes it before the next launch"
        given = frozenset(self._weights) if gives else frozenset()
        self.came = math.inf
        self._flight = flight = _Flight(
            self._membership, self._buckets, self._where, contributes, given, self._num_fragments, describe, due
        )
        for bucket in self._buckets:
            bucket.begin(bucket.fragment in given)
            if not bucket.missing:
                bucket.full = self._read
                flight.hand_over(bucket)
        flight.start()  # only now: it asks this object of itself
        return flight

    def _hook(self, bucket: Bucket, index: int) -> Callable[[torch.Tensor], None]:
        def take_gradient(parameter: torch.Tensor) -> None:
            if self._armed:
                # FSDP has several streams for gradients: one that is sharded, another that is replicated too.
                bucket.stream = device.join_stream(bucket.stream)
                bucket.final.append(index)
                # One kernel for all that are in it; on a host each is copied while it is in the cache.
                if self._where.type == "cpu" or len(bucket.final) == len(bucket.missing):
                    self._fill(bucket, bucket.final)

        return take_gradient

    def _on_last_call(
        self, bucket: Bucket, index: int, number: int, take_gradient: Callable[[torch.Tensor], None]
    ) -> Callable[[torch.Tensor], None]:
        """Return a hook that takes the gradient with the last of so many calls; with fewer, `finish` takes it.

        A schedule that computes the gradients of weights by themselves (zero bubble) calls no hook for those.
        """

        def count_call(parameter: torch.Tensor) -> None:
            if self._armed:
                bucket.calls[index] += 1
                assert bucket.calls[index] <= number, "a gradient was sent before it was final: a step of other bytes"
                if bucket.calls[index] == number:
                    take_gradient(parameter)

        return count_call

    def _fill_all(self) -> None:
        for bucket in self._buckets:
            if bucket.missing:
                self._fill(bucket, sorted(bucket.missing))

    def _fill(self, bucket: Bucket, indices: Iterable[int]) -> None:
        """Copy parts into the bucket; hands it to the flight when it is full."""
        # The device may still copy the last sums out of it; into memory of its own the host writes at once.
        device.wait_for(self._read, self._where)
        if self._where.type == "cpu":
            self._read = None  # now it has: not for each of the others
        if bucket.fill(indices, self._weights[bucket.fragment]) and self._flight is not None:
            bucket.full = device.record_event()
            self._flight.hand_over(bucket)


class _Flight:
    """One exchange under way. Its thread waits for the quorum, so that neither backward nor a hook ever does.

    The thread makes all of the collectives. torch leaves a thread that launches one while another thread aborts the
    communicator waiting, at full load, until TORCH_NCCL_NONBLOCKING_TIMEOUT is over: NCCLComm::getAsyncError finds no
    communicator any more, and C10D_NCCL_CHECK_TIMEOUT_BASE ignores that. So the training thread may leave this one.

    Attributes:
        left: the thread was left in an operation; it touches nothing afterwards.
    """

    def __init__(
        self,
        membership: Membership,
        buckets: list[Bucket],
        where: torch.device,
        contributes: Callable[[Quorum], bool],
        given: frozenset[int],
        num_fragments: int,
        describe: Callable[[Quorum], OwnFacts] | None,
        due: bool,
    ) -> None:
        self._membership, self._buckets, self._where = membership, buckets, where
        self._contributes, self._describe = contributes, describe
        self._given, self._num_fragments, self._due = given, num_fragments, due
        self._full: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
        self._works: list[Any] = []
        self.contributed = False  # whether this rank's gradients are in it; known when the thread has ended
        self.used: list[list[float] | None] = []  # the parts' weights in each bucket; None = it did not travel
        self._queued: torch.Event | None = None  # behind what the thread has queued, but for the sums
        self.wire_bytes = 0  # of gradients, that this rank has sent
        self.travelling: frozenset[int] = frozenset()  # fragments that are summed; the same on all members
        self._quorum: Quorum | None = None
        self._facts: queue.SimpleQueue[OwnFacts | None] = queue.SimpleQueue()  # this member's, of the training thread
        self._summed = threading.Event()  # the thread has made all sums, or has ended
        self._ended = threading.Event()
        self._turn = Turn(self._is_broken if where.type != "cpu" else None)  # Gloo's operations end soon after an abort
        self._rows: Reduced | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="titan_ft_exchange", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def left(self) -> bool:
        return self._turn.left

    def _is_broken(self) -> bool:
        return self._membership.process_group.errored() is not None

    @property
    def _group(self) -> Any:
        """Return what to call for a collective; read while the thread has its turn.

        In an operation the thread may have been left, and the communicator in force be that of the next quorum: there
        its collective would be taken for one of the next exchange.
        """
        return self._membership.process_group if self._where.type == "cpu" else self._membership.process_group.parent

    @property
    def is_summing(self) -> bool:
        return not self._summed.is_set()

    def hand_over(self, bucket: Bucket) -> None:
        self._full.put(bucket)

    def finish(self, describe: Callable[[Quorum], OwnFacts]) -> Reduced:
        self._full.put(None)
        self._turn.wait(self._summed)
        if self._error is None and self._describe is None and not self.left:
            assert self._quorum is not None
            try:
                self._facts.put(describe(self._quorum))
            except Exception as error:
                raise _broken(error) from error
        self._turn.wait(self._ended)
        if self.left:
            raise ExchangeError("aborted, and an operation is still being launched")
        if self._error is not None:
            raise self._error
        assert self._rows is not None
        return self._rows

    def _gather_rows(self, row: Sequence[float], message: bytes) -> Reduced:
        """Gather the rows and messages; with them the host reads whatever else it must know of the sums."""
        assert self._quorum is not None
        own = torch.tensor([*row, len(message), 0.0], dtype=torch.float64).to(self._where, non_blocking=True)
        travelled = [bucket for bucket in self._buckets if bucket.fragment in self.travelling]
        if self.contributed and travelled:  # not finite if one of them is not; float64 has room for all of them
            own[-1] = torch.stack([bucket.total for bucket in travelled]).sum(dtype=torch.float64)
        gathered = self._gather(own)
        facts, *used = self._read(gathered, *(bucket.used for bucket in travelled))
        rows: list[list[float]] = facts.view(gathered.shape).tolist()
        weights = iter(used)
        self.used = [next(weights).tolist() if bucket.fragment in self.travelling else None for bucket in self._buckets]
        sizes = [int(row[-2]) for row in rows]
        messages = [b""] * len(sizes)
        if any(sizes):  # a second collective, for they vary in length
            octets = torch.frombuffer(bytearray(message.ljust(max(sizes), b"\0")), dtype=torch.uint8)
            (padded,) = self._read(self._gather(octets.to(self._where, non_blocking=True)))
            lines = zip(padded.view(len(sizes), -1).numpy(), sizes, strict=True)
            messages = [line[:size].tobytes() for line, size in lines]
        return Reduced(self._quorum, [row[:-2] for row in rows], messages, [not math.isfinite(row[-1]) for row in rows])

    def _gather(self, own: torch.Tensor) -> torch.Tensor:
        """Gather a vector of every member, shape [num_members, own.numel()].

        With Gloo each member sends its own to all others at once. Around a ring it would go in 2 (num_members - 1)
        hops, each behind the one before: for 30 groups on two cores that takes five times as long, and a member that
        dies meanwhile parts the others more often into those that have the result and those that do not. NCCL would
        need a connection for each pair: there zero-padded vectors are summed, which are vectors gathered.
        """
        assert self._quorum is not None
        num_members = len(self._quorum.members)
        if self._where.type == "cpu":
            return self._all_to_all(torch.stack([own] * num_members)) if num_members > 1 else own[None]
        gathered = own.new_zeros((num_members, own.numel()))
        gathered[self._quorum.rank] = own
        self._all_reduce(gathered)
        return gathered

    def _read(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return flat copies in host memory, in one dtype, behind everything that is in flight: the host waits once."""
        self._await_works()
        flat = [tensor.reshape(-1) for tensor in tensors]
        joined = torch.cat(flat) if len(flat) > 1 else flat[0]
        with self._turn.operation():
            values = joined.cpu()
        # Only now: garbage of a broken sum would let this rank send buckets, or bytes, where the others send rows.
        self._raise_errored()
        return torch.split_with_sizes(values, [tensor.numel() for tensor in flat])

    def join(self) -> None:
        """End the thread, or leave it; in either case it does not touch the buckets, which the next exchange writes.

        Nor does what it has queued: on a GPU, sums that were broken off write until their abort is through, and what
        is queued next on this stream, such as gradients into the same buckets, comes behind them.
        """
        self._full.put(None)
        self._facts.put(None)
        self._turn.wait(self._ended)
        if self.left:
            with device.side_stream(self._where):
                self._queued = device.record_event()
        device.wait_for(self._queued, self._where)
        for work in self._works:
            with contextlib.suppress(RuntimeError):  # one that was aborted may say so; the stream waits all the same
                work.wait()

    def _run(self) -> None:
        try:
            with self._turn.held():
                self._exchange()
        finally:
            self._summed.set()
            self._ended.set()

    def _exchange(self) -> None:
        try:
            quorum = self._membership.wait()
            if quorum.error is not None:
                raise ExchangeError(quorum.error)
            self._quorum = quorum
            self.contributed = self._contributes(quorum)
            # All of it: this thread's own stream is that of the training, which would wait for the other members.
            with device.side_stream(self._where):
                try:
                    self._send()
                finally:
                    if not self.left:
                        self._queued = device.record_event() if self._where.type != "cpu" else None
        except Exception as error:  # noqa: BLE001  # thread edge: finish() raises it on the training thread
            # Without a quorum nothing was exchanged: the error is that of the membership, and ends the run.
            known = isinstance(error, ExchangeError) or self._quorum is None
            self._error = error if known else _broken(error)

    def _send(self) -> None:
        """Sum the buckets as they become full, then gather the rows."""
        full: set[int] = set()
        # Rounds without gradients are rows only: they must not compete with the transfer that they wait for.
        self.travelling = self._agree_on_fragments()
        for bucket in self._buckets:
            if bucket.fragment not in self.travelling:
                continue
            while id(bucket) not in full:
                if (handed_over := self._full.get()) is None:
                    return
                full.add(id(handed_over))
            device.wait_for(bucket.full, self._where)
            if self.contributed:
                if bucket.residual is not None:
                    bucket.residual.add_to(bucket.values)
                bucket.add_up()
            else:
                bucket.flat.zero_()
            self._sum(bucket)
        # Over Gloo all of them, here. Who lacks a sum must send no row: the others would commit without it. And this
        # thread is at it until the other members have given theirs (`under_way`).
        self._await_works(but=0 if self._where.type == "cpu" else len(self._works))
        if self._describe is not None:
            assert self._quorum is not None
            self._rows = self._gather_rows(*self._describe(self._quorum))
            return
        self._summed.set()
        if (facts := self._facts.get()) is not None:
            self._rows = self._gather_rows(*facts)

    def _agree_on_fragments(self) -> frozenset[int]:
        """Return the fragments that the members whose gradients are in this exchange give, all of them alike.

        None if they give different ones: they are not at the same update, which the rows will show. And none if no
        member knows of an update that may follow.
        """
        given = [self.contributed and fragment in self._given for fragment in range(self._num_fragments)]
        counts = torch.tensor([self._due, self.contributed, *given], dtype=torch.int32)
        gathered = self._gather(counts.to(self._where, non_blocking=True))
        (counted,) = self._read(gathered)
        due, num_givers, *users = map(sum, zip(*counted.view(gathered.shape).tolist(), strict=True))
        if not due or any(number not in (0, num_givers) for number in users):
            return frozenset()
        return frozenset(fragment for fragment, number in enumerate(users) if number)

    def _sum(self, bucket: Bucket) -> None:
        """Make the bucket the sum of all members' ones."""
        assert self._quorum is not None
        num_members, num_exact = len(self._quorum.members), bucket.exact.numel()
        self.wire_bytes += bucket.wire_bytes(num_members)
        if bucket.halves and num_members > 1:
            part, exact = half.add_up(self._all_to_all(half.cut(bucket.values, bucket.exact, num_members)), num_exact)
            parts = self._all_gather(part.view(torch.uint8)).view(torch.bfloat16)
            bucket.values.copy_(parts.view(-1)[: bucket.values.numel()])
            bucket.exact.copy_(exact)
            return
        if bucket.residual is None:
            self._all_reduce(bucket.flat)
            return
        if num_members == 1:  # there is nobody to send it to: it counts as it is
            bucket.residual.leave(None)
            return
        payload = encode(bucket.flat, num_exact)
        if self.contributed:
            bucket.residual.leave(left_behind(bucket.flat, payload, num_exact))
        add_up(self._all_gather(payload), num_exact, bucket.flat)

    def _raise_errored(self) -> None:
        """Raise the error that NCCL reports only when it is asked; without one its sums are complete."""
        if (error := self._membership.process_group.errored()) is not None:
            raise error

    def _await_works(self, but: int = 0) -> None:
        while len(self._works) > but:
            with self._turn.operation():
                self._works[0].wait()
            self._works.pop(0)

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        assert self._quorum is not None
        if len(self._quorum.members) > 1:
            group = self._group
            with self._turn.operation():
                work = all_reduce(group, tensor, self._membership.timeout)
            self._works.append(work)
            if self._where.type == "cpu":  # the wire is never idle; NCCL's queue up on the GPU
                self._await_works(but=_IN_FLIGHT - 1)

    def _all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Send a row to each member, and return what all send to this one, shaped alike; there for what follows."""
        return self._in_slices(self._all_to_all_once, rows)

    def _all_to_all_once(self, rows: torch.Tensor) -> torch.Tensor:
        group = self._group
        with self._turn.operation():
            return all_to_all(group, rows, self._membership.timeout)

    def _all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Gather a vector of every member, shape [num_members, own.numel()]; on a GPU it is there for what follows."""
        return self._in_slices(self._all_gather_once, own)

    def _all_gather_once(self, own: torch.Tensor) -> torch.Tensor:
        assert self._quorum is not None
        group = self._group
        with self._turn.operation():
            return all_gather(group, own, len(self._quorum.members), self._membership.timeout)

    def _in_slices(self, operation: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor) -> torch.Tensor:
        """Return what an operation of all members makes of `given`, shape [num_members, given.shape[-1]].

        From host memory it is one for each slice of the columns, in the same order on all members.
        """
        if self._where.type != "cpu" or given.nbytes <= _SLICE_BYTES:
            return operation(given)
        assert self._quorum is not None
        received = given.new_empty((len(self._quorum.members), given.shape[-1]))
        number = -(-given.nbytes // _SLICE_BYTES)
        for columns, part in zip(received.chunk(number, -1), given.chunk(number, -1), strict=True):
            columns.copy_(operation(part.contiguous()))
        return received


def _give_up(room: Future[list[torch.Tensor]]) -> None:
    """Give memory back that was allocated for a copy which nobody makes."""
    if room.exception() is None:
        room.result().clear()  # the thread that made it may hold the list for longer
    device.release_host_memory()


def _broken(error: Exception) -> ExchangeError:
    if isinstance(error, AssertionError):  # torchft's way to say that the process group was aborted
        return ExchangeError("aborted: another rank of this group lost a peer")
    return ExchangeError(first_line(error))
