# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Host memory for the copies of a state, and how much memory the host has left.

A rank copies its state to host memory when a joiner, a group that lacks the state, asks for it
(`snapshot.py`). A GPU copies to pinned memory at the full speed of its link, while the host does
other work. But pinning 10 GB takes seconds. So a thread pins the memory before a joiner comes, and
all copies use this memory, one after the other.

The copies of all ranks of a host may be too large for its memory. Memory is *scarce* if they would
take more than half of what the host has free. Then nothing is pinned ahead, and each of several
donors copies only a part of the state.

See docs/heal.md and docs/gpu.md.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch

from titan_ft import device
from titan_ft.config import FaultTolerance

logger = logging.getLogger(__name__)

_MAX_UPDATES = 2**31
"""Limit of the queued updates if the free memory is not known."""


class HostMemory:
    """Memory for one copy at a time: a flat tensor of uint8, pinned if there is a GPU.

    `TrainState` owns it.

    Threads: the training thread calls `reserve` and `close`. The other methods may also be called
    by the threads of the state server's connections.

    Args:
        num_ranks: number of ranks that share the host's memory. Each needs as much as this one.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self._num_ranks = num_ranks
        self._lock = threading.Lock()  # guards the fields below
        self._spare: torch.Tensor | None = None  # memory that was given back
        # Memory for the first copy, while a thread pins it and afterwards.
        self._reserved: Future[torch.Tensor] | None = None

    def reserve(self, num_bytes: int) -> bool:
        """Start to pin memory for the first copy, on a thread of its own. On a CPU, do nothing.

        Returns:
            False if memory is scarce. Then nothing is pinned: a healthy job must not run out of
            memory because of a joiner that may never come.
        """
        free = self._find_free_if_scarce(num_bytes)
        if free is not None:
            logger.warning(
                "no host memory is reserved for a copy of this rank's state (%s): for %d ranks "
                "that would be more than half of the free memory (%s); memory is taken when a "
                "joiner comes, and of several donors each then copies a part",
                size_text(num_bytes),
                self._num_ranks,
                size_text(free),
            )
            return False
        if not device.on_cpu():
            self._reserved = device.in_background(partial(_reserve, num_bytes), "titan_ft_pinning")
        return True

    def is_scarce(self, num_bytes: int) -> bool:
        """True if a copy of this size on every rank would take more than half of the free memory.

        False if this object has memory for the copy already.
        """
        with self._lock:
            if self._reserved is not None:
                return False
            if self._spare is not None and self._spare.numel() == num_bytes:
                return False
        return self._find_free_if_scarce(num_bytes) is not None

    def _find_free_if_scarce(self, num_bytes: int) -> int | None:
        """Return the host's free bytes if memory is scarce, else None."""
        free = free_bytes()
        if free is None or self._num_ranks * num_bytes <= free / 2:
            return None
        return free

    def lend(self, num_bytes: int) -> torch.Tensor:
        """Return memory for a copy: reserved or spare memory of the right size, else new memory.

        Waits for a thread that is still pinning.
        """
        with self._lock:
            reserved, self._reserved = self._reserved, None
            memory, self._spare = self._spare, None
        if reserved is not None:
            memory = reserved.result()
        if memory is not None:
            if memory.numel() == num_bytes:
                return memory
            # Free the memory of another size first: the host may have no room for both.
            del memory, reserved
        return device.empty_host(num_bytes, torch.uint8)

    def give_back(self, memory: torch.Tensor) -> None:
        """Take back memory that nobody reads any more, for the next copy.

        One tensor is kept. A second one is freed, because the host may have no room for both.
        """
        with self._lock:
            if self._spare is None:
                self._spare = memory

    def close(self) -> None:
        """Free the memory. Waits for a thread that is still pinning."""
        reserved, self._reserved, self._spare = self._reserved, None, None
        if reserved is not None:
            reserved.result()


def _reserve(num_bytes: int) -> torch.Tensor:
    """Allocate memory, and log its size; on the thread of `HostMemory.reserve`."""
    started = time.monotonic()
    memory = device.empty_host(num_bytes, torch.uint8)
    logger.info(
        "%s of host memory are kept for copies of this rank's state, which joiners fetch "
        "(taken in %.1f s)",
        size_text(num_bytes),
        time.monotonic() - started,
    )
    return memory


def size_text(num_bytes: int) -> str:
    """Return a number of bytes as text, in GB."""
    return f"{num_bytes / 1e9:.3g} GB"


def free_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still allocate.

    This is the free memory of the host, or less if a limit of the process's cgroups is lower.
    Caches that the kernel would drop count as free.

    Args:
        root: folder that contains proc and sys; tests use another one than /.

    Returns:
        None if the system does not show it.
    """
    return min((*_find_free_on_host(root), *_find_free_in_cgroups(root)), default=None)


def most_updates(
    config: FaultTolerance,
    free: int | None,
    num_ranks: int,
    update_bytes: int,
    on_device: int = 0,
) -> int:
    """Return how many updates a rank may queue while it fetches a state; at least 1.

    Args:
        free: free bytes of the host; None = not known.
        num_ranks: number of ranks that share these bytes.
        update_bytes: size of one queued update.
        on_device: number of further updates that fit on the rank's GPU.
    """
    if config.catch_up_max_gb:
        max_updates = config.catch_up_max_gb * 2**30 / max(1, update_bytes)
    elif free is None:
        max_updates = math.inf
    else:
        # Half of the free bytes. The other half is for the state itself, and for other processes.
        max_updates = free / 2 / num_ranks / max(1, update_bytes) + on_device
    return max(1, int(min(_MAX_UPDATES, max_updates)))


def _find_free_on_host(root: Path) -> Iterator[int]:
    """Yield the host's free bytes, if the system shows them."""
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield 1024 * int(line.split()[1])


def _find_free_in_cgroups(root: Path) -> Iterator[int]:
    """Yield the free bytes of each cgroup above this process that has a limit."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # cgroup v2
            mount = root / "sys/fs/cgroup"
            yield from _find_free(mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            yield from _find_free(mount, path, *files, "total_inactive_file")


def _find_free(
    mount: Path,
    path: str,
    limit_file: str,
    usage_file: str,
    cache_field: str,
) -> Iterator[int]:
    """Yield the free bytes of a cgroup and of its parents, for those that have a limit.

    In a container, `path` may be the path on the host, while only the container's own cgroup is
    mounted. Then the folders of `path` do not exist, and the files of the mount itself count.

    Args:
        mount: folder at which the hierarchy of the cgroups is mounted.
        path: path of the process's cgroup in the hierarchy.
        cache_field: field of memory.stat with the bytes of caches.
    """
    cgroup = mount / path.lstrip("/")
    for folder in (cgroup, *cgroup.parents):
        if not folder.is_relative_to(mount):
            return
        limit = _read(folder / limit_file).strip()
        usage = _read(folder / usage_file).strip()
        if not limit.isdecimal() or not usage.isdecimal():
            continue  # the limit is "max", or there is no such file
        cached = 0
        for line in _read(folder / "memory.stat").splitlines():
            name, _, value = line.partition(" ")
            if name == cache_field:
                cached = int(value)
        yield max(0, int(limit) - int(usage) + cached)


def _read(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8")
    return ""
