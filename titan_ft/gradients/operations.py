# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The collectives of one exchange, as its thread makes them; see docs/exchange.md and docs/gpu.md."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from titan_ft.gradients.turn import Turn
from titan_ft.membership.collectives import all_gather, all_reduce, all_to_all
from titan_ft.membership.membership import Membership
from titan_ft.protocol.member import Quorum

# The most that one all-gather or all-to-all of Gloo is given. It waits for all of a member's payload, where its
# all-reduce waits for a MiB at a time: so `process_group_timeout_ms` bounds a slice, and no bucket is too large for a
# slow link. Not smaller, because each operation costs a round trip.
_SLICE_BYTES = 4 << 20
# Sums of buckets over Gloo: its process group has two threads, and the third one waits for the next that is free.
_IN_FLIGHT = 3


class Operations:
    """Makes collectives over the members of one quorum. The exchange's thread calls them all.

    torch leaves a thread that launches one while another thread aborts the communicator waiting, at full load, until
    TORCH_NCCL_NONBLOCKING_TIMEOUT is over: NCCLComm::getAsyncError finds no communicator any more, and
    C10D_NCCL_CHECK_TIMEOUT_BASE ignores that. So each operation releases the exchange's `Turn`: the training thread may
    leave this one there.
    """

    def __init__(self, membership: Membership, where: torch.device) -> None:
        self._membership, self._where = membership, where
        # Gloo's operations end soon after an abort: nothing is left there.
        self.turn = Turn(self._is_broken if where.type != "cpu" else None)
        self._works: list[Any] = []
        self._quorum: Quorum | None = None

    @property
    def quorum(self) -> Quorum | None:
        """Return the members; None before they are known."""
        return self._quorum

    def begin(self, quorum: Quorum) -> None:
        """Let the collectives be those of this quorum."""
        self._quorum = quorum

    @property
    def num_members(self) -> int:
        """Return how many members there are."""
        assert self._quorum is not None
        return len(self._quorum.members)

    def _is_broken(self) -> bool:
        return self._membership.process_group.errored() is not None

    @property
    def _group(self) -> Any:
        """Return what to call for a collective; read while the thread has its turn.

        In an operation the thread may have been left, and the communicator in force be that of the next quorum: there
        its collective would be taken for one of the next exchange.
        """
        return self._membership.process_group if self._where.type == "cpu" else self._membership.process_group.parent

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Gather a vector of every member, shape [num_members, own.numel()].

        With Gloo each member sends its own to all others at once. Around a ring it would go in 2 (num_members - 1)
        hops, each after the one before: for 30 groups on two cores that takes five times as long, and a member that
        dies meanwhile parts the others more often into those that have the result and those that do not. NCCL would
        need a connection for each pair: there zero-padded vectors are summed, which are vectors gathered.
        """
        assert self._quorum is not None
        if self._where.type == "cpu":
            return self.all_to_all(torch.stack([own] * self.num_members)) if self.num_members > 1 else own[None]
        gathered = own.new_zeros((self.num_members, own.numel()))
        gathered[self._quorum.rank] = own
        self.all_reduce(gathered)
        return gathered

    def read(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return flat copies in host memory, in one dtype, after everything that is in flight: the host waits once."""
        self.await_works()
        flat = [tensor.reshape(-1) for tensor in tensors]
        joined = torch.cat(flat) if len(flat) > 1 else flat[0]
        with self.turn.operation():
            values = joined.cpu()
        # Only now: garbage of a broken sum would let this rank send buckets, or bytes, where the others send rows.
        self._raise_errored()
        return torch.split_with_sizes(values, [tensor.numel() for tensor in flat])

    def _raise_errored(self) -> None:
        """Raise the error that NCCL reports only when it is asked; without one its sums are complete."""
        if (error := self._membership.process_group.errored()) is not None:
            raise error

    def await_sums(self) -> None:
        """Wait for all sums over Gloo; NCCL's are queued on the GPU.

        A member that lacks a sum must send no row: the others would commit without it.
        """
        if self._where.type == "cpu":
            self.await_works()

    def await_works(self, but: int = 0) -> None:
        """Wait for the sums that are under way, except for the last so many."""
        while len(self._works) > but:
            with self.turn.operation():
                self._works[0].wait()
            self._works.pop(0)

    def end(self) -> None:
        """Let the current stream come after what is under way, broken off or not; the training thread's."""
        for work in self._works:
            with contextlib.suppress(RuntimeError):  # one that was aborted may say so; the stream waits all the same
                work.wait()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Make a tensor the sum of all members' ones; it is there after `await_works` or `read`."""
        if self.num_members > 1:
            group = self._group
            with self.turn.operation():
                work = all_reduce(group, tensor, self._membership.timeout)
            self._works.append(work)
            if self._where.type == "cpu":  # the wire is never idle; NCCL's queue up on the GPU
                self.await_works(but=_IN_FLIGHT - 1)

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Send a row to each member, and return what all send to this one, shaped alike; there for what follows."""
        return self._in_slices(self._all_to_all_once, rows)

    def _all_to_all_once(self, rows: torch.Tensor) -> torch.Tensor:
        group = self._group
        with self.turn.operation():
            return all_to_all(group, rows, self._membership.timeout)

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Gather a vector of every member, shape [num_members, own.numel()]; on a GPU it is there for what follows."""
        return self._in_slices(self._all_gather_once, own)

    def _all_gather_once(self, own: torch.Tensor) -> torch.Tensor:
        group = self._group
        with self.turn.operation():
            return all_gather(group, own, self.num_members, self._membership.timeout)

    def _in_slices(self, operation: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor) -> torch.Tensor:
        """Return what an operation of all members makes of `given`, shape [num_members, given.shape[-1]].

        From host memory it is one for each slice of the columns, in the same order on all members.
        """
        if self._where.type != "cpu" or given.nbytes <= _SLICE_BYTES:
            return operation(given)
        received = given.new_empty((self.num_members, given.shape[-1]))
        number = -(-given.nbytes // _SLICE_BYTES)
        for columns, part in zip(received.chunk(number, -1), given.chunk(number, -1), strict=True):
            columns.copy_(operation(part.contiguous()))
        return received
