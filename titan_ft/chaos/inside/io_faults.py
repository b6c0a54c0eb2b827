# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What goes wrong around a process: its network, the state that it sends, the disk that it writes to.

See `titan_ft.chaos.inside.faults` for how a fault is called.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from titan_ft.chaos.inside import blackhole
from titan_ft.chaos.inside.blackhole import Blackhole
from titan_ft.chaos.inside.link import Link
from titan_ft.chaos.inside.target_worker import TargetWorker
from titan_ft.chaos.inside.task import Task
from titan_ft.replica.state_server import Send

_RESCAN_SECONDS = 0.05  # until an outage takes in a new socket
_QUICK_RESCAN_SECONDS = 0.005


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
