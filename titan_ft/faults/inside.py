# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The faults within a worker. Each fault causes the real failure and does not imitate symptoms.

The worker's chaos agent calls `start` on its own thread. The fault acts there, or installs a hook
that acts on another thread: the training thread, a donor's connection, a checkpoint.

A fault calls `Task.try_start` right before it breaks something, and must not act if the result is
False. A fault with a duration ends itself, because the runner may not reach a worker whose network
is gone. `TargetWorker` does everything that needs torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta

from titan_ft.config import ConfigError
from titan_ft.faults.fault import Ending, Fault, Need
from titan_ft.faults.schema import FINITE, PositiveNumber, TargetIndex

if TYPE_CHECKING:
    from titan_ft.chaos.inside.target_worker import TargetWorker
    from titan_ft.chaos.inside.task import Task

    SendBytes = Callable[[socket.socket, memoryview], None]

_IMPOSSIBLE_BYTES = 1 << 60
"""More memory than any address space has."""


class InWorker(Fault, frozen=True):
    """A fault that a worker inflicts on itself, by order of the chaos runner."""

    ends: ClassVar[Ending] = "settle"
    needs = frozenset({Need.AGENT})
    each_rank: ClassVar[bool] = False
    """True if every rank of the target injects the fault; False if a single matching rank does."""

    def start(self, task: Task, worker: TargetWorker) -> None:
        """Inject the fault in this worker, now or at the next occasion; on the agent's thread."""
        raise NotImplementedError


# The process


class Segfault(InWorker, frozen=True):
    """Invalid memory access in one rank."""

    name = "segfault"
    scope = "rank"
    outcome = "killed"
    category = "process killed"

    def start(self, task: Task, worker: TargetWorker) -> None:
        if task.try_start():
            ctypes.string_at(0)


class AbortProcessGroup(InWorker, frozen=True):
    """One rank aborts its process group between the groups."""

    name = "abort_process_group"
    scope = "rank"
    category = "error raised"
    ends = "at once"
    takes_down = False

    def start(self, task: Task, worker: TargetWorker) -> None:
        # On a new thread: NCCL's watchdog aborts from a thread, too, and the agent must not wait.
        if task.try_start():
            worker.run_aside(worker.process_group.abort)


# The training thread


class _InForward(InWorker, frozen=True):
    """A fault at the start of one rank's next forward pass."""

    scope = "rank"

    def start(self, task: Task, worker: TargetWorker) -> None:
        def strike() -> None:
            if task.try_start(step=worker.step):
                self.strike(worker)

        worker.at_next_forward(strike)

    def strike(self, worker: TargetWorker) -> None:
        """Cause the failure; on the training thread."""
        raise NotImplementedError


class Deadlock(_InForward, frozen=True):
    """One rank's training thread waits forever, until its watchdog ends the rank."""

    name = "deadlock"
    outcome = "hung"
    category = "stopped or slow"

    def start(self, task: Task, worker: TargetWorker) -> None:
        if not worker.hang_timeout_seconds:
            task.skip("fault_tolerance.hang_timeout_seconds is 0: nobody would end this worker")
            return
        super().start(task, worker)

    def strike(self, worker: TargetWorker) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


class OutOfMemory(_InForward, frozen=True):
    """Out of memory in one rank's forward pass."""

    name = "out_of_memory"
    outcome = "killed"
    category = "process killed"

    def strike(self, worker: TargetWorker) -> None:
        worker.allocate(_IMPOSSIBLE_BYTES)


class ExceptionInForward(_InForward, frozen=True):
    """Exception in one rank's forward pass."""

    name = "exception"
    outcome = "killed"
    category = "error raised"

    def strike(self, worker: TargetWorker) -> None:
        raise RuntimeError("fault injection: an exception in forward")


class SlowRank(InWorker, frozen=True):
    """One rank computes `factor` times slower for `seconds`."""

    name = "slow_rank"
    scope = "rank"
    category = "stopped or slow"
    ends = "undone"
    takes_down = False
    min_up = 1
    factor: Annotated[float, Meta(gt=1, le=FINITE, title="a number > 1")] = 3.0
    seconds: PositiveNumber = 20.0

    def start(self, task: Task, worker: TargetWorker) -> None:
        worker.between_steps.append(lambda: self._install(task, worker))

    def _install(self, task: Task, worker: TargetWorker) -> None:
        if not task.try_start(step=worker.step):
            return
        forward_started = time.monotonic()
        fault_ends = forward_started + self.seconds

        def before_forward(*_: Any) -> None:
            nonlocal forward_started
            worker.synchronize()
            forward_started = time.monotonic()

        def after_forward(*_: Any) -> None:
            worker.synchronize()
            forward_seconds = time.monotonic() - forward_started
            time.sleep((self.factor - 1) * forward_seconds)
            if time.monotonic() >= fault_ends:
                for handle in handles:
                    handle.remove()
                task.report_undone()

        model = worker.model_parts[0]
        handles = [
            model.register_forward_pre_hook(before_forward),
            model.register_forward_hook(after_forward),
        ]


class NanGradient(InWorker, frozen=True):
    """One rank's gradient is NaN in one step."""

    name = "nan_gradient"
    scope = "rank"
    category = "wrong numbers"
    ends = "excluded"
    takes_down = False

    def start(self, task: Task, worker: TargetWorker) -> None:
        def make_nan(gradient: Any) -> Any:
            if not task.try_start(step=worker.step):
                return None  # autograd keeps the gradient as it is
            return gradient * math.nan

        worker.at_next_gradient(make_nan)


class _Flip(InWorker, frozen=True):
    scope = "rank"
    category = "wrong numbers"
    ends = "healed"
    # Of two groups that differ, no majority shows the correct one.
    min_up = 3


class FlipParameter(_Flip, frozen=True):
    """One bit of one rank's parameters is flipped."""

    name = "flip_parameter"

    def start(self, task: Task, worker: TargetWorker) -> None:
        def flip() -> None:
            # A low bit of the mantissa changes the value by a millionth, so the loss stays finite.
            worker.flip_bit(task, worker.parameter_shards(), significance=20)

        worker.between_steps.append(flip)


class FlipOptimizer(_Flip, frozen=True):
    """One bit of one rank's optimizer state is flipped."""

    name = "flip_optimizer"

    def start(self, task: Task, worker: TargetWorker) -> None:
        def flip() -> None:
            # A high bit. Moments decay, so a small change would vanish within some steps.
            worker.flip_bit(task, worker.moment_shards(), significance=5)

        worker.between_steps.append(flip)


# The network


class _Outage(InWorker, frozen=True):
    category = "network"
    ends = "undone"
    each_rank = True


class NetworkDead(_Outage, frozen=True):
    """Nothing gets through between a group and the others."""

    name = "network_dead"
    scope = "group"
    seconds: PositiveNumber = 10.0

    def start(self, task: Task, worker: TargetWorker) -> None:
        worker.lose_packets(task, self.seconds, loss=1.0)


class NetworkSlow(_Outage, frozen=True):
    """The network between a group and the others loses the share `loss`."""

    name = "network_slow"
    scope = "group"
    takes_down = False
    loss: Annotated[float, Meta(gt=0, lt=1, title="a number > 0 and < 1")] = 0.05
    seconds: PositiveNumber = 20.0

    def start(self, task: Task, worker: TargetWorker) -> None:
        worker.lose_packets(task, self.seconds, loss=self.loss)


class CutLink(_Outage, frozen=True):
    """Nothing gets through between a group and the group `peer`; all else does."""

    name = "link_dead"
    scope = "link"
    seconds: PositiveNumber = 10.0
    peer: TargetIndex = None

    def groups_given(self, replica: int | None) -> list[int]:
        groups = super().groups_given(replica)
        if self.peer is not None:
            groups.append(self.peer)
        return groups

    def check_target(self, replica: int | None, rank: int | None, at: str) -> None:
        super().check_target(replica, rank, at)
        if replica is not None and self.peer == replica:
            rule = f"{at}.peer must be another group than the target, group {replica}"
            raise ConfigError(f"{rule}, got {replica}; leave it out for a random one")

    def start(self, task: Task, worker: TargetWorker) -> None:
        assert self.peer is not None, "the order for one end of a link names the other end"
        worker.cut_link(task, self.seconds, self.peer)


# The donor


class KillDonor(InWorker, frozen=True):
    """A group is killed, and the donor of its heal in mid-transfer."""

    name = "kill_donor"
    scope = "donor"
    outcome = "killed"
    category = "process killed"
    extra_down = 1

    def start(self, task: Task, worker: TargetWorker) -> None:
        def wrap(send: SendBytes) -> SendBytes:
            def send_and_die(connection: socket.socket, data: memoryview) -> None:
                send(connection, data)
                if task.try_start():
                    os.kill(os.getpid(), signal.SIGKILL)

            return send_and_die

        worker.wrap(task, worker.server, "send", wrap)


class CorruptChunk(InWorker, frozen=True):
    """A group is killed, and a chunk of the state that it gets is corrupted."""

    name = "corrupt_chunk"
    scope = "donor"
    category = "network"
    ends = "at once"

    def start(self, task: Task, worker: TargetWorker) -> None:
        def wrap(send: SendBytes) -> SendBytes:
            def send_corrupted(connection: socket.socket, data: memoryview) -> None:
                if data.nbytes and task.try_start(bytes=data.nbytes):
                    # A copy: the donor's snapshot itself must stay correct.
                    corrupted = bytearray(data)
                    position = random.Random(task.order.seed).randrange(len(corrupted))
                    corrupted[position] ^= 1
                    data = memoryview(corrupted)
                send(connection, data)

            return send_corrupted

        worker.wrap(task, worker.server, "send", wrap)


# The disk


class DiskFull(InWorker, frozen=True):
    """One rank's next checkpoint finds the disk full."""

    name = "disk_full"
    scope = "rank"
    category = "error raised"
    ends = "at once"
    takes_down = False
    min_up = 1
    needs = frozenset({Need.AGENT, Need.CHECKPOINT})

    def start(self, task: Task, worker: TargetWorker) -> None:
        def wrap(create_stream: Callable[..., Any]) -> Callable[..., Any]:
            @contextlib.contextmanager
            def create_full(files: Any, path: Any, mode: str) -> Iterator[Any]:
                with create_stream(files, path, mode) as stream:
                    if "w" in mode and task.try_start():
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                    yield stream

            return create_full

        worker.wrap(task, worker.checkpoint_files, "create_stream", wrap)
