# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The worker processes of torchdata's loaders.

A rank may use `training.dataloader.num_workers` processes for each slot. They are forks of the
rank. At its start, each of them releases the rank's sockets, and copies the states that it sends.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from torchdata.stateful_dataloader import worker

from titan_ft.system.process import borrowed_socket, own_sockets


def prepare_workers(loader: Any) -> None:
    """Let each worker process of `loader` call `prepare_worker` at its start."""
    if getattr(loader, "num_workers", 0):
        loader.worker_init_fn = functools.partial(prepare_worker, loader.worker_init_fn)


def prepare_worker(init: Callable[[int], None] | None, number: int) -> None:
    """Prepare this worker process, then call the loader's own `init`.

    Slurm and Kubernetes send SIGTERM to all processes of a job. A group that leaves in order still
    reads batches, so its workers ignore the signal.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _release_connections()
    _copy_states()
    if init is not None:
        init(number)


def _copy_states() -> None:
    """Send a copy of the state right after each batch.

    torchdata/stateful_dataloader/worker.py: `try_to_serialize` returns the dataset's own objects,
    and the thread of the worker's queue pickles them while the worker reads on. torchtitan's text
    dataset changes its list of tokens in place, so a group that resumed from such a state trained
    tokens twice. Test: training/test_slot_loaders.py.
    """
    serialize = worker.try_to_serialize
    worker.try_to_serialize = lambda of: copy.deepcopy(serialize(of))


def _release_connections() -> None:
    """Replace the rank's network sockets in this fork.

    Otherwise peers of a dead rank would wait for connections that this process keeps open. The
    descriptors are not closed: the next file would get such a number, and torch still writes to it.
    """
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _inet_sockets():
        os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)


def _inet_sockets() -> list[int]:
    """Return the descriptors of this process's network sockets.

    Empty if the system does not list them.
    """
    found = []
    for descriptor, inode in own_sockets():
        with contextlib.suppress(OSError), borrowed_socket(descriptor, inode) as connection:
            if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
                found.append(descriptor)
    return found
