# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The collectives of one exchange. See docs/exchange.md and docs/gpu.md."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from titan_ft.gradients.turn import Turn
from titan_ft.membership.collectives import all_gather, all_reduce, all_to_all
from titan_ft.membership.membership import Membership
from titan_ft.protocol.member import Quorum

_SLICE_BYTES = 4 << 20
"""Largest input of one all-gather or all-to-all over Gloo.

Gloo's all-reduce waits for one MiB at a time. These two wait for all of a member's payload. With
slices, `process_group_timeout_ms` limits one slice, and no bucket is too large for a slow link.
Smaller slices would cost time, because each operation takes a round trip."""
_IN_FLIGHT = 3
"""Sums of buckets over Gloo at the same time. Its process group has two threads. A third sum is
queued, so that no thread is idle between two sums."""


class Operations:
    """Makes collectives over the members of one quorum.

    `Flight` has one. Its thread calls all methods, except for `end`, which the training thread
    calls. A collective that fails raises, and the exchange is broken.

    If one thread launches a collective while another thread aborts the communicator, torch keeps
    the first thread spinning until TORCH_NCCL_NONBLOCKING_TIMEOUT is over. NCCLComm::getAsyncError
    finds no communicator any more, and C10D_NCCL_CHECK_TIMEOUT_BASE ignores that. So each operation
    releases the exchange's `Turn`, and the training thread may abandon this thread there.
    """

    def __init__(self, membership: Membership, where: torch.device) -> None:
        self._membership = membership
        self._where = where
        # Gloo's operations end soon after an abort, so no thread is abandoned in one.
        self.turn = Turn(self._is_broken if where.type != "cpu" else None)
        self._works: list[Any] = []
        self._quorum: Quorum | None = None

    @property
    def quorum(self) -> Quorum | None:
        """The quorum; None before it is known."""
        return self._quorum

    def set_quorum(self, quorum: Quorum) -> None:
        """Make all collectives over the members of this quorum."""
        self._quorum = quorum

    @property
    def num_members(self) -> int:
        assert self._quorum is not None
        return len(self._quorum.members)

    def _is_broken(self) -> bool:
        return self._membership.process_group.errored() is not None

    @property
    def _group(self) -> Any:
        """The process group for a collective. Read it while the thread holds its turn.

        Inside an operation the thread may be abandoned, and the communicator may be that of the
        next quorum. A collective there would be taken for one of the next exchange.
        """
        process_group = self._membership.process_group
        return process_group if self._where.type == "cpu" else process_group.parent

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Gather a vector of every member, shape [num_members, own.numel()].

        Over Gloo, each member sends its vector to all others at once. Around a ring, a vector would
        take 2 (num_members - 1) hops, one after the other. For 30 groups on two cores this takes
        five times as long. If a member dies meanwhile, it is also more likely that some members
        have the result and others do not. Direct messages over NCCL would need a connection for
        each pair. So NCCL sums zero-padded vectors, which gives the same result.
        """
        assert self._quorum is not None
        if self._where.type == "cpu":
            if self.num_members == 1:
                return own[None]
            return self.all_to_all(torch.stack([own] * self.num_members))
        gathered = own.new_zeros((self.num_members, own.numel()))
        gathered[self._quorum.rank] = own
        self.all_reduce(gathered)
        return gathered

    def read(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return flat copies in host memory, in one dtype, after all operations in flight.

        The host waits once for all of them.
        """
        self.await_works()
        flat = [tensor.reshape(-1) for tensor in tensors]
        joined = torch.cat(flat) if len(flat) > 1 else flat[0]
        with self.turn.operation():
            values = joined.cpu()
        # Check now: with garbage of a broken sum, this rank would send buckets or messages while
        # the others send rows.
        self._raise_errored()
        return torch.split_with_sizes(values, [tensor.numel() for tensor in flat])

    def _raise_errored(self) -> None:
        """Raise NCCL's error, which NCCL reports on request. Without one, sums are complete."""
        error = self._membership.process_group.errored()
        if error is not None:
            raise error

    def await_sums(self) -> None:
        """Wait for all sums over Gloo. NCCL's sums are queued on the GPU.

        A member that lacks a sum must send no row: the others would commit without this member.
        """
        if self._where.type == "cpu":
            self.await_works()

    def await_works(self, but: int = 0) -> None:
        """Wait for the sums that are under way, except for the last `but`."""
        while len(self._works) > but:
            with self.turn.operation():
                self._works[0].wait()
            self._works.pop(0)

    def end(self) -> None:
        """Order later work on the current stream after all operations, broken off or not.

        The training thread calls this.
        """
        for work in self._works:
            # An aborted operation may raise. The stream waits for it nevertheless.
            with contextlib.suppress(RuntimeError):
                work.wait()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all members.

        The sum is complete after `await_works` or `read`.
        """
        if self.num_members == 1:
            return
        group = self._group
        with self.turn.operation():
            work = all_reduce(group, tensor, self._membership.timeout)
        self._works.append(work)
        if self._where.type == "cpu":  # NCCL queues its sums on the GPU
            self.await_works(but=_IN_FLIGHT - 1)

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Send one row to each member; return the rows that all members send to this one.

        On a GPU, later work on the current stream waits for them.
        """
        return self._in_slices(self._all_to_all_once, rows)

    def _all_to_all_once(self, rows: torch.Tensor) -> torch.Tensor:
        group = self._group
        with self.turn.operation():
            return all_to_all(group, rows, self._membership.timeout)

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Gather a vector of every member, shape [num_members, own.numel()].

        On a GPU, later work on the current stream waits for them.
        """
        return self._in_slices(self._all_gather_once, own)

    def _all_gather_once(self, own: torch.Tensor) -> torch.Tensor:
        group = self._group
        with self.turn.operation():
            return all_gather(group, own, self.num_members, self._membership.timeout)

    def _in_slices(
        self,
        operation: Callable[[torch.Tensor], torch.Tensor],
        given: torch.Tensor,
    ) -> torch.Tensor:
        """Make one operation for each slice of the columns of `given`, in the same order
        everywhere.

        Memory of a device is not cut.

        Returns:
            The joined results, shape [num_members, given.shape[-1]].
        """
        if self._where.type != "cpu" or given.nbytes <= _SLICE_BYTES:
            return operation(given)
        received = given.new_empty((self.num_members, given.shape[-1]))
        num_slices = -(-given.nbytes // _SLICE_BYTES)
        columns = zip(received.chunk(num_slices, -1), given.chunk(num_slices, -1), strict=True)
        for received_part, given_part in columns:
            received_part.copy_(operation(given_part.contiguous()))
        return received
