# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The collectives of one exchange: all-reduce, all-to-all and all-gather over its members.

The exchange's thread (`flight.py`) makes these collectives. This module hides the differences
between the two transports:

- *Gloo* works in host memory. The thread waits for each operation, and runs up to three sums at the
  same time. Large payloads are cut into slices.
- *NCCL* works on the GPU. An operation is queued, and later work on the thread's stream waits for
  it. NCCL reports errors only when it is asked.

A collective that fails raises, and the exchange is broken. See docs/exchange.md and docs/gpu.md.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from titan_ft.gradients.turn import Turn
from titan_ft.membership.collectives import all_gather, all_reduce, all_to_all
from titan_ft.membership.membership import Membership
from titan_ft.protocol.member import Quorum

_SLICE_BYTES = 4 << 20
"""Largest input of one all-gather or all-to-all over Gloo.

Gloo waits for the whole input of a member, at most `process_group_timeout_ms`. On a slow link, a
large bucket would take longer than that. With slices, the timeout limits one slice. Smaller slices
would cost time, because each operation takes a round trip. All-reduces need no slices: in them,
Gloo waits for one MiB at a time."""
_IN_FLIGHT = 3
"""Number of sums over Gloo at the same time. Gloo's process group has two threads. A third sum is
queued, so that no thread is idle between two sums."""


class Operations:
    """Makes the collectives of one exchange over the members of its quorum.

    Threads: the exchange's thread calls all methods but `end`, which the training thread calls.

    With NCCL, an operation can hang: if one thread launches a collective while another thread
    aborts the communicator, torch keeps the first thread spinning until
    TORCH_NCCL_NONBLOCKING_TIMEOUT is over. (NCCLComm::getAsyncError finds no communicator any more,
    and C10D_NCCL_CHECK_TIMEOUT_BASE ignores that.) So each operation releases `turn`, and the
    training thread may abandon the exchange's thread there.
    """

    def __init__(self, membership: Membership, where: torch.device) -> None:
        self._membership = membership
        self._where = where
        if where.type == "cpu":
            # Gloo's operations end soon after an abort, so no thread needs to be abandoned in one.
            self.turn = Turn(None)
        else:
            self.turn = Turn(self._is_broken)
        # torch's handles of the all-reduces that nobody has waited for.
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
        """True if the process group was aborted, or has failed."""
        return self._membership.process_group.errored() is not None

    @property
    def _group(self) -> Any:
        """The process group for a collective. Read it before `turn.operation`, not inside.

        Inside an operation this thread may have been abandoned, and the process group may be that
        of the next quorum. There, a collective of this thread would be taken for one of the next
        exchange.
        """
        process_group = self._membership.process_group
        return process_group if self._where.type == "cpu" else process_group.current_group

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Gather a short vector of every member, shape [num_members, own.numel()].

        Over Gloo, each member sends its vector to all others at once (an all-to-all). Around a
        ring, a vector would take 2 (num_members - 1) hops, one after the other. That takes five
        times as long for 30 groups on two cores. It is also more likely that a member dies
        meanwhile, and that some of the others have the result and some do not.

        NCCL would need a connection between each pair of members for this. So it sums vectors that
        are zero everywhere but at the member's own row, which gives the same result.
        """
        assert self._quorum is not None
        if self._where.type == "cpu":
            if self.num_members == 1:
                return own.unsqueeze(0)
            return self.all_to_all(torch.stack([own] * self.num_members))
        gathered = own.new_zeros((self.num_members, own.numel()))
        gathered[self._quorum.rank] = own
        self.all_reduce(gathered)
        return gathered

    def read(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """Wait for all operations, and return flat copies of tensors in host memory.

        All copies get the widest of the tensors' dtypes. The host waits once for all of them.
        """
        self.await_works()
        flat = [tensor.reshape(-1) for tensor in tensors]
        joined = torch.cat(flat) if len(flat) > 1 else flat[0]
        with self.turn.operation():
            values = joined.cpu()
        # After a broken sum, the values are garbage. With them, this rank would make other
        # collectives than the other members.
        self._raise_nccl_error()
        return torch.split_with_sizes(values, [tensor.numel() for tensor in flat])

    def _raise_nccl_error(self) -> None:
        """Raise NCCL's error, if there is one. NCCL does not raise it by itself."""
        error = self._membership.process_group.errored()
        if error is not None:
            raise error

    def await_sums(self) -> None:
        """Wait for all sums over Gloo. NCCL's sums are queued on the GPU.

        Call this before the rows are gathered. A member that sends its row without having all sums
        may find its sums broken, while the others commit the update.
        """
        if self._where.type == "cpu":
            self.await_works()

    def await_works(self, max_left: int = 0) -> None:
        """Wait until at most `max_left` of the sums are under way. The oldest ones end first."""
        while len(self._works) > max_left:
            with self.turn.operation():
                self._works[0].wait()
            self._works.pop(0)

    def end(self) -> None:
        """Make later work on the current stream wait for all operations, even for aborted ones.

        The training thread calls this.
        """
        for work in self._works:
            # `wait` of an aborted operation may raise. The stream waits for the operation anyway.
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
        if self._where.type == "cpu":
            self.await_works(max_left=_IN_FLIGHT - 1)

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """Send one row to each member, and return the rows that all members send to this one.

        On a GPU the result is queued: later work on the current stream waits for it.
        """
        return self._in_slices(self._all_to_all_once, rows)

    def _all_to_all_once(self, rows: torch.Tensor) -> torch.Tensor:
        group = self._group
        with self.turn.operation():
            return all_to_all(group, rows, self._membership.timeout)

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        """Gather a vector of every member, shape [num_members, own.numel()].

        On a GPU the result is queued: later work on the current stream waits for it.
        """
        return self._in_slices(self._all_gather_once, own)

    def _all_gather_once(self, own: torch.Tensor) -> torch.Tensor:
        group = self._group
        with self.turn.operation():
            return all_gather(group, own, self.num_members, self._membership.timeout)

    def _in_slices(
        self,
        operation: Callable[[torch.Tensor], torch.Tensor],
        own: torch.Tensor,
    ) -> torch.Tensor:
        """Make an operation over Gloo in slices; see `_SLICE_BYTES`.

        NCCL needs no slices.

        Args:
            operation: makes one collective.
            own: this member's input. Its last dimension is cut.

        Returns:
            The joined results, shape [num_members, own.shape[-1]].
        """
        if self._where.type != "cpu" or own.nbytes <= _SLICE_BYTES:
            return operation(own)
        received = own.new_empty((self.num_members, own.shape[-1]))
        num_slices = math.ceil(own.nbytes / _SLICE_BYTES)
        received_slices = received.chunk(num_slices, -1)
        own_slices = own.chunk(num_slices, -1)
        for received_slice, own_slice in zip(received_slices, own_slices, strict=True):
            received_slice.copy_(operation(own_slice.contiguous()))
        return received
