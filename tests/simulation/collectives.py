# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Simulated collectives: those of the process group between the groups, and those within a group.

The process group between the groups fails as Gloo's or as NCCL's does. With Gloo, a rank notices a
closed connection only of a member that it sends to. In a ring it does not notice a failure farther
away, and it waits for a frozen or unreachable member. NCCL raises nothing: an operation hangs until
its timeout or an abort, and returns garbage. `errored` reports the error. In both, when a member
dies in the middle of an operation, some members already have their result and others do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from tests.simulation.kernel import Kernel, Process, Task
from tests.simulation.network import Network, Node


class _Operation:
    """One collective: the members' inputs, and the time at which each member has its result.

    Args:
        kind: "sum" and "gather" go around a ring; in an "exchange" each member sends a row to every
            other one.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.direct = kind == "exchange"
        self.inputs: dict[int, np.ndarray] = {}
        self.total: np.ndarray | None = None
        self.done_at: dict[int, float] = {}
        self.lost: set[int] = set()  # members that get no result, because a neighbour ended

    def sum(self) -> np.ndarray:
        if self.total is None:
            ranks = sorted(self.inputs)
            self.total = self.inputs[ranks[0]].copy()
            for rank in ranks[1:]:
                self.total += self.inputs[rank]
        return self.total

    def write_result(self, rank: int, target: np.ndarray) -> None:
        """Write the result of a member to `target`."""
        if self.kind == "sum":
            target[...] = self.sum()
            return
        for place, given in self.inputs.items():
            target[place] = given[rank] if self.direct else given


class Ring:
    """One configured process group: its members' ends and operations."""

    def __init__(self, kernel: Kernel, network: Network, size: int) -> None:
        self.kernel, self.network, self.size = kernel, network, size
        self.ends: dict[int, ProcessGroup] = {}
        self.closed: set[int] = set()
        self.reset: set[int] = set()  # members whose connection to a neighbour was reset
        self.operations: dict[int, _Operation] = {}
        self.waiting: list[tuple[Task, int]] = []
        network.on_change[self] = self.tell

    def tell(self) -> None:
        """Wake all members: something has changed."""
        for task, _ in self.waiting:
            self.kernel.wake(task)

    def wait(self, timeout: float, rank: int) -> None:
        """Block the member `rank` until `tell`, or until the time is over."""
        entry = (self.kernel.current, rank)
        self.waiting.append(entry)
        self.kernel.block(timeout)
        self.waiting.remove(entry)

    def neighbours(self, rank: int, operation: _Operation) -> set[int]:
        """Return the members to which a rank's part of an operation has connections."""
        others = (
            range(self.size)
            if operation.direct
            else ((rank - 1) % self.size, (rank + 1) % self.size)
        )
        return set(others) - {rank}

    def flows(self, operation: _Operation) -> bool:
        """Return True if all links of an operation work."""
        ends = self.ends
        return not self.reset and all(
            self.network.usable(ends[rank].node, ends[other].node)
            for rank in ends
            for other in self.neighbours(rank, operation)
            if other in ends
        )

    def late(self) -> list[float]:
        """Draw the seconds by which each member's result is late because packets were lost.

        A lost packet delays all members if it is one of the first, and only its receiver if it is
        the last.
        """
        seconds = [0.0] * self.size
        for rank in range(self.size):
            after = (rank + 1) % self.size
            resent = self.network.resend(self.ends[rank].node, self.ends[after].node)
            if resent and self.kernel.rng.random() < 0.5:
                seconds[after] += resent
            elif resent:
                seconds = [value + resent for value in seconds]
        return seconds

    def reset_connection(self, rank: int) -> None:
        """Break the connection of a member to the next one. Both notice; the others do not."""
        now, ends = self.kernel.now, {rank, (rank + 1) % self.size}
        self.reset |= ends
        for operation in self.operations.values():
            for end in sorted(ends):
                if operation.done_at.get(end, 0.0) > now and self.kernel.rng.random() < 0.5:
                    operation.lost.add(end)
        self.tell()

    def close(self, rank: int) -> None:
        """Close a member's connections. Its running operations may have reached some of the
        others.
        """
        if rank in self.closed:
            return
        self.closed.add(rank)
        now = self.kernel.now
        for operation in self.operations.values():
            if operation.done_at.get(rank, 0.0) <= now:
                continue  # this member had sent its whole part
            for other in sorted(self.neighbours(rank, operation)):
                if operation.done_at[other] > now and self.kernel.rng.random() < 0.5:
                    operation.lost.add(other)
        # The other members read the end of the stream a moment later.
        self.kernel.after(0.0005, self.tell)


class Work:
    """Stands in for torch.distributed.Work."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._wait()
        return True


class ProcessGroup:
    """The reconfigurable process group of one rank.

    Args:
        rings: the world's process groups, by the address at which their members meet.
        silent: the process group fails as NCCL does, without an exception.
        jitter: largest difference in seconds between the members' completions of an operation;
            usually far less.
        report: called with promise and text if members make different operations, which breaks real
            ones, or send gradients although no member announced any.
        on_moment: called when the group is built and when an operation is about to complete.
    """

    def __init__(
        self,
        kernel: Kernel,
        network: Network,
        process: Process,
        node: Node,
        rings: dict[str, Ring],
        *,
        silent: bool,
        jitter: float,
        report: Callable[[str, str], None],
        on_moment: Callable[[str, Node], None],
    ) -> None:
        self._kernel, self._network, self._process, self.node = kernel, network, process, node
        self._rings, self._silent, self._report = rings, silent, report
        self._jitter, self._on_moment = jitter, on_moment
        self._timeout = 10.0
        self._ring: Ring | None = None
        self._rank = self._number = 0
        self._error: Exception | None = None
        # The operation that counts the members with gradients in the round under way.
        self._count: _Operation | None = None
        self.reduced = 0  # number of gradient values that this rank has summed with others
        process.on_end.append(self._close)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of `configure`, and of operations without one."""
        self._timeout = timeout.total_seconds()

    def configure(
        self,
        store_addr: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Connect to all members; each pair needs both ends."""
        kernel, network = self._kernel, self._network
        self._close()
        self._error, self._number, self._rank = None, 0, rank
        ring = self._rings.get(store_addr)
        if ring is None:
            ring = self._rings[store_addr] = Ring(kernel, network, world_size)
        if ring.size != world_size:
            self._report(
                "one trajectory",
                f"at {store_addr}: {world_size} members here, {ring.size} elsewhere",
            )
        self._ring = ring
        end = kernel.now + self._timeout
        kernel.sleep(0.001 + 0.004 * kernel.rng.random())
        ring.ends[rank] = self
        ring.tell()
        self._on_moment("rendezvous", self.node)
        while True:
            if self._ring is not ring:
                raise RuntimeError("aborted while it was being built")
            others = [ring.ends.get(other) for other in range(world_size) if other != rank]
            if all(other is not None and network.usable(self.node, other.node) for other in others):
                return
            if ring.closed and kernel.rng.random() < 0.5:
                self._close()
                raise RuntimeError("Gloo connectFullMesh failed: connection refused")
            if kernel.now >= end:
                self._close()
                raise RuntimeError("Gloo connectFullMesh failed: timed out")
            ring.wait(end - kernel.now, rank)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Work:
        """Start to sum a tensor over the members: gradients."""
        values = tensors[0].numpy()
        self._sends_gradients(values)
        return self._begin(values, values, options, "sum")

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any
    ) -> Work:
        """Start to gather a vector of each member: rounded gradients."""
        (rows,), (own,) = outputs, inputs
        values = own.numpy()
        self._sends_gradients(values)
        target = np.zeros((len(rows), *values.shape), values.dtype)
        work = self._begin(values, target, options, "gather")

        def wait() -> None:
            try:
                work.wait()
            finally:
                for row, gathered in zip(rows, target, strict=True):
                    np.copyto(row.numpy(), gathered)

        return Work(wait)

    def alltoall_base(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        options: Any,
    ) -> Work:
        """Start to send a row to each member: facts, or parts of rounded gradients."""
        work = self._begin(rows.numpy(), output.numpy(), options, "exchange")
        if rows.dtype == torch.int32:  # the count of the members that give gradients
            assert self._ring is not None
            self._count = self._ring.operations[self._number - 1]
        return work

    def _sends_gradients(self, values: np.ndarray) -> None:
        self.reduced += values.size
        if self._count is None or not self._count.done_at or not self._count.sum()[0, 0]:
            self._report(
                "no idle traffic",
                "sends gradients in a round to which nobody gives any, as far as it knows",
            )

    def _begin(self, given: np.ndarray, target: np.ndarray, options: Any, kind: str) -> Work:
        self._kernel.pause()
        if self._ring is None:
            raise RuntimeError("aborted: another rank of this group lost a peer")
        number, self._number = self._number, self._number + 1
        ring, what = self._ring, (kind, given.shape, given.dtype)
        operation = ring.operations.get(number)
        if operation is None:
            operation = ring.operations[number] = _Operation(kind)
            ring.operations.pop(number - 4, None)
        elif operation.inputs:
            other = next(iter(operation.inputs.values()))
            if what != (there := (operation.kind, other.shape, other.dtype)):
                self._report(
                    "one trajectory",
                    f"makes collective {number} of a ring: {what} here, {there} there",
                )
        operation.inputs[self._rank] = given.copy()
        timeout = options.timeout.total_seconds()
        return Work(lambda: self._finish(ring, operation, target, self._kernel.now + timeout))

    def abort(self, errored: bool = True) -> None:
        """Break off all operations. Afterwards `errored` is None, because nothing is under way."""
        self._kernel.pause()
        if errored and self._silent and self._ring is not None:
            self._error = RuntimeError("aborted")
        self._close()

    @property
    def is_connected(self) -> bool:
        """True if this rank is connected to all members, and has not aborted since."""
        return self._ring is not None and len(self._ring.ends) == self._ring.size

    def reset_connection(self) -> None:
        """Break the connection to the next member, as a middlebox does that forgets it.

        No process dies.
        """
        if self._ring is not None and self._ring.size > 1:
            self._ring.reset_connection(self._rank)

    def errored(self) -> Exception | None:
        """Return the error that NCCL has not raised, or None."""
        return self._error

    def _close(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.network.on_change.pop(ring, None) if len(ring.closed) >= ring.size - 1 else None
            ring.close(self._rank)
            ring.tell()

    def _finish(self, ring: Ring, operation: _Operation, tensor: np.ndarray, end: float) -> None:
        try:
            self._wait(ring, operation, end)
        except RuntimeError as error:
            tensor += tensor.dtype.type(3)  # a broken operation leaves garbage in its buffer
            if not self._silent:
                raise
            self._error = error
            # The first operation that runs out of time aborts the communicator. No other one waits.
            self._close()
        else:
            operation.write_result(self._rank, tensor)

    def _wait(self, ring: Ring, operation: _Operation, end: float) -> None:
        kernel, rank = self._kernel, self._rank
        if ring.size == 1:
            return
        while True:
            now = kernel.now
            if self._ring is not ring:
                raise RuntimeError("Application timeout caused pair closure")
            if (
                not operation.done_at
                and len(operation.inputs) == ring.size
                and ring.flows(operation)
            ):
                self._complete(ring, operation)
            done_at = operation.done_at.get(rank)
            if done_at is not None and rank not in operation.lost:
                if now >= done_at:
                    return
                if now < end:
                    ring.wait(min(done_at, end) - now, rank)
                    continue
            if not self._silent and (
                rank in operation.lost or ring.closed & ring.neighbours(rank, operation)
            ):
                raise RuntimeError("Connection closed by peer")
            if not self._silent and rank in ring.reset:
                raise RuntimeError("Connection reset by peer")
            if now >= end:
                raise RuntimeError("Timed out waiting for an operation to complete")
            ring.wait(end - now, rank)

    def _complete(self, ring: Ring, operation: _Operation) -> None:
        """Give each member the result after a moment, at different times."""
        kernel, rank = self._kernel, self._rank
        for member, late in enumerate(ring.late()):
            operation.done_at[member] = (
                kernel.now + late + 0.0004 + self._jitter * kernel.rng.random() ** 6
            )
        for task, place in ring.waiting:
            if place != rank:
                kernel.after(
                    operation.done_at[place] - kernel.now, functools.partial(kernel.wake, task)
                )
        for member in range(ring.size):
            self._on_moment("exchange", ring.ends[member].node)


class GroupLink:
    """The group's own process group: collectives among the ranks of one attempt of group `slot`."""

    def __init__(self, kernel: Kernel, network: Network, slot: int, size: int) -> None:
        self.kernel, self._network, self.slot, self.size = kernel, network, slot, size
        self._operations: dict[int, dict[int, np.ndarray]] = {}
        self._waiting: list[Task] = []

    def gather(self, number: int, rank: int, own: np.ndarray, timeout: float) -> list[np.ndarray]:
        """Return the input of every rank to operation `number`.

        Raises:
            RuntimeError: an input did not arrive in time.
        """
        kernel = self.kernel
        kernel.pause()
        operation = self._operations.setdefault(number, {})
        operation[rank] = own.copy()
        if len(operation) == self.size:
            self._operations.pop(number - 2, None)
            for task in self._waiting:
                kernel.wake(task)
            self._waiting.clear()
        end = kernel.now + timeout
        while len(operation) < self.size or not self.flows():
            if kernel.now >= end:
                raise RuntimeError("a collective of the group timed out")
            self._waiting.append(kernel.current)
            self._network.wait(end - kernel.now)
        return [operation[place] for place in range(self.size)]

    def flows(self) -> bool:
        """True if all ranks of the group can reach each other."""
        return self._network.all_usable([(self.slot, rank) for rank in range(self.size)])


class GroupCollective:
    """One rank's end of its group's collectives.

    Args:
        enter: called before each collective.
    """

    def __init__(self, link: GroupLink, rank: int, enter: Callable[[], None]) -> None:
        self._link, self.rank, self._enter = link, rank, enter
        self._number = 0

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self._link.size

    def gather(self, output: torch.Tensor, own: torch.Tensor) -> None:
        """Make an all_gather_into_tensor."""
        self._enter()
        self._number += 1
        parts = self._link.gather(self._number, self.rank, own.numpy(), 100.0)
        target = output.numpy()
        np.concatenate(parts, out=target) if own.ndim else np.stack(parts, out=target)
