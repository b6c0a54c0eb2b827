# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What each fault inside a worker does: it causes the real failure wherever that is possible, and imitates none.

A fault is called on the agent's thread (those of `AT_ONCE` on one of their own). It acts there, or installs a hook that
acts on the training thread, a donor's or a checkpoint's thread. `Task.begin` is called before anything is broken.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from titan_ft import device
from titan_ft.chaos.inside import blackhole
from titan_ft.chaos.inside.blackhole import Blackhole
from titan_ft.chaos.inside.link import Link
from titan_ft.chaos.inside.target_worker import TargetWorker
from titan_ft.chaos.inside.task import Task
from titan_ft.transfer.state_server import Send

Fault = Callable[[Task, TargetWorker], None]

_IMPOSSIBLE_BYTES = 1 << 60  # more than any address space
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_TRIES = 100  # to find an element that is not zero
_RESCAN_SECONDS = 0.05  # until an outage takes in a new socket
_QUICK_RESCAN_SECONDS = 0.005


# The process


def segfault(task: Task, worker: TargetWorker) -> None:
    """Read from address 0."""
    if task.begin():
        ctypes.string_at(0)


def abort_process_group(task: Task, worker: TargetWorker) -> None:
    """Abort the exchange between the groups under the training thread, as a watchdog of NCCL does."""
    if task.begin():
        worker.process_group.abort()


# The training thread


def deadlock(task: Task, worker: TargetWorker) -> None:
    """Wait for a lock that nobody gives back."""
    if not worker.hang_timeout_seconds:
        task.skip("fault_tolerance.hang_timeout_seconds is 0: nobody would end this worker")
        return

    def wait() -> None:
        if task.begin(step=worker.step):
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()

    worker.at_next_forward(wait)


def out_of_memory(task: Task, worker: TargetWorker) -> None:
    """Ask the device for more memory than there is."""

    def allocate() -> None:
        if task.begin(step=worker.step):
            where = next(worker.model_parts[0].parameters()).device
            torch.empty(_IMPOSSIBLE_BYTES, dtype=torch.uint8, device=where)

    worker.at_next_forward(allocate)


def exception(task: Task, worker: TargetWorker) -> None:
    """Raise what no code expects."""

    def fail() -> None:
        if task.begin(step=worker.step):
            raise RuntimeError("fault injection: an exception in forward")

    worker.at_next_forward(fail)


def slow_rank(task: Task, worker: TargetWorker) -> None:
    """Let each forward take `factor` times as long for `seconds`."""
    factor, seconds = task.order.params["factor"], task.order.params["seconds"]

    def install() -> None:
        if not task.begin(step=worker.step):
            return
        until = started = time.monotonic() + seconds

        def before(*_: Any) -> None:
            nonlocal started
            device.synchronize()
            started = time.monotonic()

        def after(*_: Any) -> None:
            device.synchronize()
            time.sleep(max(0.0, (factor - 1) * (time.monotonic() - started)))
            if time.monotonic() >= until:
                for handle in handles:
                    handle.remove()
                task.undone()

        model = worker.model_parts[0]
        handles = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]

    worker.between_steps.append(install)


def nan_gradient(task: Task, worker: TargetWorker) -> None:
    """Let the gradient of the next forward's output be NaN, and so those of all layers before it."""

    def install() -> None:
        def hook(_: Any, __: Any, output: Any) -> None:
            first = output if isinstance(output, torch.Tensor) else output[0]
            if first.requires_grad:  # else it is a validation
                handle.remove()
                first.register_hook(spoil)

        def spoil(gradient: torch.Tensor) -> torch.Tensor | None:
            return torch.full_like(gradient, math.nan) if task.begin(step=worker.step) else None

        handle = worker.model_parts[0].register_forward_hook(hook)

    worker.between_steps.append(install)


def flip_parameter(task: Task, worker: TargetWorker) -> None:
    """Flip a low bit of a parameter's mantissa: a millionth of its value."""
    worker.between_steps.append(lambda: _flip(task, worker, dict(_parameters(worker)), significance=20))


def flip_optimizer(task: Task, worker: TargetWorker) -> None:
    """Flip a high bit in an optimizer's state: moments decay, and a small change would be gone after some steps."""
    worker.between_steps.append(lambda: _flip(task, worker, dict(_moments(worker)), significance=5))


@torch.no_grad()
def _flip(task: Task, worker: TargetWorker, shards: Mapping[str, torch.Tensor], significance: int) -> None:
    """Flip one bit, of weight 2**-significance or the lowest, in one of the shards; the order's seed chooses where."""
    if not shards:
        task.skip("there is nothing to flip a bit of: this rank holds no such state yet")
        return
    chance = random.Random(task.order.seed)
    for _ in range(_TRIES):
        name = chance.choice(sorted(shards))
        place = tuple(chance.randrange(size) for size in shards[name].shape)
        element = shards[name][place]
        if element != 0:  # the smallest of all numbers would be lost in the next addition
            break
    mantissa_bits = round(-math.log2(torch.finfo(element.dtype).eps))
    bit = max(0, mantissa_bits - significance)
    if task.begin(step=worker.step, tensor=name, element=list(place), bit=bit):
        element.view(_INTEGERS[element.element_size()]).bitwise_xor_(1 << bit)


def _parameters(worker: TargetWorker) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the local shards of the parameters."""
    for name, parameter in worker.parameters.items():
        shard = device.local_shard(parameter.detach())
        if _has_bits(shard):
            yield name, shard


def _moments(worker: TargetWorker) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the local shards of the optimizers' state; not their counters."""
    for number, optimizer in enumerate(worker.optimizers):
        for index, (parameter, state) in enumerate(optimizer.state.items()):
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and key != "step":
                    shard = device.local_shard(value.detach())
                    if _has_bits(shard):
                        yield f"{number}/{index}/{key}", shard


def _has_bits(shard: torch.Tensor) -> bool:
    return shard.numel() > 0 and shard.is_floating_point() and shard.element_size() in _INTEGERS


# The network


def network_dead(task: Task, worker: TargetWorker) -> None:
    """Lose all that comes from other groups and the lighthouse for `seconds`."""
    _lose(task, worker, Blackhole(1.0, blackhole.all_but(worker.group_pids, [worker.store])), _RESCAN_SECONDS)


def network_slow(task: Task, worker: TargetWorker) -> None:
    """Lose a share of it; TCP sends it again, later and later."""
    hole = Blackhole(task.order.params["loss"], blackhole.all_but(worker.group_pids, [worker.store]))
    _lose(task, worker, hole, _RESCAN_SECONDS)


def link_dead(task: Task, worker: TargetWorker) -> None:
    """Lose all that comes from the group `peer`; that group does the same, so that nothing gets through either way."""
    link = Link(worker.folder, int(task.order.params["peer"]))
    if obstacle := link.obstacle():
        task.skip(obstacle)
        return
    hole = Blackhole(1.0, link.choose)
    # What connects there: a process group, which could make a small exchange at once, and a fetch of state.
    before_use = hole.looking_after((worker.process_group, "configure"), (socket.socket, "connect"))
    _lose(task, worker, hole, _QUICK_RESCAN_SECONDS, before_use)


def _lose(
    task: Task,
    worker: TargetWorker,
    hole: Blackhole,
    rescan_seconds: float,
    meanwhile: AbstractContextManager[None] | None = None,
) -> None:
    """Lose what the hole takes for `seconds`, unless another outage is under way; be in `meanwhile` for so long."""
    if not blackhole.supported():
        task.skip("this system has no socket filters; they are Linux's")
        return
    if not worker.outage.acquire(blocking=False):
        task.skip("another fault of the network is not over yet")
        return
    try:
        if not task.begin():
            return
        ends = time.monotonic() + task.order.params["seconds"]
        try:
            with meanwhile or contextlib.nullcontext():
                while (rest := ends - time.monotonic()) > 0:
                    hole.extend()
                    if worker.closing.wait(min(rescan_seconds, rest)):
                        break
        finally:
            hole.lift()
            task.undone()
        worker.closing.wait(1.0)
        hole.lift()  # connections that were accepted since then
    finally:
        worker.outage.release()


# The donor


def kill_donor(task: Task, worker: TargetWorker) -> None:
    """Die by SIGKILL after a chunk of the state was served."""

    def wrap(send: Send) -> Send:
        def send_and_die(connection: socket.socket, data: memoryview) -> None:
            send(connection, data)
            if task.begin():
                os.kill(os.getpid(), signal.SIGKILL)

        return send_and_die

    worker.wrap(task, worker.server, "send", wrap)


def corrupt_chunk(task: Task, worker: TargetWorker) -> None:
    """Send a chunk with a byte that is another than the one that its checksum was computed of."""

    def wrap(send: Send) -> Send:
        def send_corrupted(connection: socket.socket, data: memoryview) -> None:
            if data.nbytes and task.begin(bytes=data.nbytes):
                copy = bytearray(data)  # the snapshot itself stays sound
                copy[random.Random(task.order.seed).randrange(len(copy))] ^= 1
                data = memoryview(copy)
            send(connection, data)

        return send_corrupted

    worker.wrap(task, worker.server, "send", wrap)


# The disk


def disk_full(task: Task, worker: TargetWorker) -> None:
    """Let the next file of a checkpoint that this rank writes find no space."""

    def wrap(create_stream: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def create_full(files: FileSystem, path: Any, mode: str) -> Iterator[Any]:
            with create_stream(files, path, mode) as stream:
                if "w" in mode and task.begin():
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                yield stream

        return create_full

    worker.wrap(task, FileSystem, "create_stream", wrap)


AT_ONCE: Mapping[str, Fault] = {
    fault.__name__: fault for fault in (segfault, abort_process_group, network_dead, network_slow, link_dead)
}
"""Faults that act by themselves, and may take their time."""

IN_WAITING: Mapping[str, Fault] = {
    fault.__name__: fault
    for fault in (
        deadlock,
        out_of_memory,
        exception,
        slow_rank,
        nan_gradient,
        flip_parameter,
        flip_optimizer,
        kill_donor,
        corrupt_chunk,
        disk_full,
    )
}
"""Faults that another thread carries out when it comes by."""
