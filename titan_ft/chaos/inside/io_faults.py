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
from titan_ft.chaos.inside.shot import Shot
from titan_ft.chaos.inside.victim import Victim
from titan_ft.chaos.inside.whereabouts import Link
from titan_ft.replica.state_server import Sender

_RESCAN_SECONDS = 0.05  # until an outage takes in a new socket
_QUICK_RESCAN_SECONDS = 0.005


# The network


def network_dead(shot: Shot, victim: Victim) -> None:
    """Lose all that comes from other groups and the lighthouse for `seconds`."""
    _lose(shot, victim, Blackhole(1.0, blackhole.all_but(victim.friends, [victim.store])), _RESCAN_SECONDS)


def network_slow(shot: Shot, victim: Victim) -> None:
    """Lose a share of it; TCP sends it again, later and later."""
    hole = Blackhole(shot.order.params["loss"], blackhole.all_but(victim.friends, [victim.store]))
    _lose(shot, victim, hole, _RESCAN_SECONDS)


def link_dead(shot: Shot, victim: Victim) -> None:
    """Lose all that comes from the group `peer`; that group does the same, so that nothing gets through either way."""
    link = Link(victim.folder, int(shot.order.params["peer"]))
    if obstacle := link.obstacle():
        shot.skip(obstacle)
        return
    hole = Blackhole(1.0, link.choose)
    # What connects there: a process group, which could make a small exchange at once, and a fetch of state.
    before_use = hole.looking_after((victim.process_group, "configure"), (socket.socket, "connect"))
    _lose(shot, victim, hole, _QUICK_RESCAN_SECONDS, before_use)


def _lose(
    shot: Shot,
    victim: Victim,
    hole: Blackhole,
    rescan_seconds: float,
    meanwhile: AbstractContextManager[None] | None = None,
) -> None:
    """Lose what the hole takes for `seconds`, unless another outage is under way; be in `meanwhile` for so long."""
    if not blackhole.supported():
        shot.skip("this system has no socket filters; they are Linux's")
        return
    if not victim.outage.acquire(blocking=False):
        shot.skip("another fault of the network is not over yet")
        return
    try:
        if not shot.begin():
            return
        ends = time.monotonic() + shot.order.params["seconds"]
        try:
            with meanwhile or contextlib.nullcontext():
                while (rest := ends - time.monotonic()) > 0:
                    hole.extend()
                    if victim.closing.wait(min(rescan_seconds, rest)):
                        break
        finally:
            hole.lift()
            shot.undone()
        victim.closing.wait(1.0)
        hole.lift()  # connections that were accepted since then
    finally:
        victim.outage.release()


# The donor


class _Sender:
    """A sender that is one function."""

    def __init__(self, send: Callable[[socket.socket, memoryview], None]) -> None:
        self.send = send


def kill_donor(shot: Shot, victim: Victim) -> None:
    """Die by SIGKILL after a chunk of the state was served."""

    def wrap(sender: Sender) -> Sender:
        def send_and_die(connection: socket.socket, data: memoryview) -> None:
            sender.send(connection, data)
            if shot.begin():
                os.kill(os.getpid(), signal.SIGKILL)

        return _Sender(send_and_die)

    victim.wrap(shot, victim.server, "sender", wrap)


def corrupt_chunk(shot: Shot, victim: Victim) -> None:
    """Send a chunk with a byte that is another than the one that its checksum was computed of."""

    def wrap(sender: Sender) -> Sender:
        def send_corrupted(connection: socket.socket, data: memoryview) -> None:
            if data.nbytes and shot.begin(bytes=data.nbytes):
                copy = bytearray(data)  # the snapshot itself stays sound
                copy[random.Random(shot.order.seed).randrange(len(copy))] ^= 1
                data = memoryview(copy)
            sender.send(connection, data)

        return _Sender(send_corrupted)

    victim.wrap(shot, victim.server, "sender", wrap)


# The disk


def disk_full(shot: Shot, victim: Victim) -> None:
    """Let the next file of a checkpoint that this rank writes find no space."""

    def wrap(create_stream: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def create_full(files: FileSystem, path: Any, mode: str) -> Iterator[Any]:
            with create_stream(files, path, mode) as stream:
                if "w" in mode and shot.begin():
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                yield stream

        return create_full

    victim.wrap(shot, FileSystem, "create_stream", wrap)
