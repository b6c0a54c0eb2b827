# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""This host's memory: for the copies of a state, taken once and lent to one copy after the other; and what is left.

A GPU copies to pinned memory at the speed of its link, and beside whatever the host does. But to pin 10 GB takes
seconds, so a thread does it early, before a joiner has come.
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

_NO_BOUND = 2**31  # updates


class HostMemory:
    """One flat tensor of uint8, pinned where there is a GPU. `reserve` and `close` are for one thread.

    Args:
        num_ranks: that share the host's memory, and take as much.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self._num_ranks = num_ranks
        self._changing = threading.Lock()
        self._spare: torch.Tensor | None = None
        self._reserved: Future[torch.Tensor] | None = None  # becomes the spare when one is wanted

    def reserve(self, num_bytes: int) -> bool:
        """Begin to pin so much, on a thread of its own, and not on a CPU; returns False where memory is scarce.

        Then none is taken before a joiner comes: a healthy job is not to run out of it for one who may never do.
        """
        if (free := self._find_scarce(num_bytes)) is not None:
            logger.warning(
                "host memory for a copy of this rank's state (%s) is taken when a joiner comes, and not yet: for %d "
                "ranks it is more than half of what is left (%s); of several donors each copies a part then",
                size_text(num_bytes),
                self._num_ranks,
                size_text(free),
            )
            return False
        if not device.on_cpu():
            self._reserved = device.in_background(partial(_reserve, num_bytes), "titan_ft_pinning")
        return True

    def is_scarce(self, num_bytes: int) -> bool:
        """Say whether so much, on all ranks, is more than half of what the host has left, and not at hand here."""
        with self._changing:
            at_hand = self._reserved is not None or (self._spare is not None and self._spare.numel() == num_bytes)
        return not at_hand and self._find_scarce(num_bytes) is not None

    def _find_scarce(self, num_bytes: int) -> int | None:
        """Return what the host has left if that is scarce for so much on all ranks."""
        free = free_bytes()
        return free if free is not None and self._num_ranks * num_bytes > free / 2 else None

    def take(self, num_bytes: int) -> torch.Tensor:
        """Lend memory for a copy: what is at hand, if it is as large; waits for what is being pinned."""
        with self._changing:
            reserved, self._reserved = self._reserved, None
            memory, self._spare = self._spare, None
        if reserved is not None:
            memory = reserved.result()
        if memory is not None:
            if memory.numel() == num_bytes:
                return memory
            del memory, reserved  # before more is taken: the host may have no room for both
        return device.empty_host(num_bytes, torch.uint8)

    def give_back(self, memory: torch.Tensor) -> None:
        """Take back what was lent, and nobody reads any more. One is kept: the host may have no room for a second."""
        with self._changing:
            if self._spare is None:
                self._spare = memory

    def close(self) -> None:
        """Let go of the memory; waits for the thread."""
        reserved, self._reserved, self._spare = self._reserved, None, None
        if reserved is not None:
            reserved.result()


def _reserve(num_bytes: int) -> torch.Tensor:
    started = time.monotonic()
    memory = device.empty_host(num_bytes, torch.uint8)
    logger.info(
        "%s of host memory are kept for copies of this rank's state, which joiners fetch (taken in %.1f s)",
        size_text(num_bytes),
        time.monotonic() - started,
    )
    return memory


def size_text(num_bytes: int) -> str:
    """Return a number of bytes as text."""
    return f"{num_bytes / 1e9:.3g} GB"


def free_bytes(root: Path = Path("/")) -> int | None:
    """Return how much memory this process can still take: what the host has, or its cgroups, if they allow less.

    Args:
        root: above proc and sys.

    Returns:
        Bytes, with caches that the kernel would drop counted as free; None where the machine does not tell.
    """
    return min((*_on_host(root), *_in_cgroups(root)), default=None)


def most_updates(
    config: FaultTolerance, free: int | None, num_ranks: int, update_bytes: int, on_device: int = 0
) -> int:
    """Return how many updates a rank may queue; at least 1.

    Args:
        free: bytes that the host has left; None = not known.
        num_ranks: ranks that share them.
        update_bytes: of one update.
        on_device: updates that fit on the rank's GPU besides.
    """
    # The other half is for the state itself, and for whatever else there is.
    room = config.catch_up_max_gb * 2**30 or (math.inf if free is None else free / 2 / num_ranks)
    most = room / max(1, update_bytes) + (0 if config.catch_up_max_gb else on_device)
    return max(1, int(min(_NO_BOUND, most)))


def _on_host(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield 1024 * int(line.split()[1])


def _in_cgroups(root: Path) -> Iterator[int]:
    """Yield what the cgroups of this process, and those above them, have left of their limits."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _limits(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _limits(root / "sys/fs/cgroup/memory", path, *names)


def _limits(mount: Path, path: str, limit: str, usage: str, cache: str) -> Iterator[int]:
    # In a container the path may be that of the host, of which only the end is mounted: the mount's own files count.
    folder = mount / path.lstrip("/")
    for place in (folder, *folder.parents):
        if not place.is_relative_to(mount):
            return
        most, used = _read(place / limit).strip(), _read(place / usage).strip()
        if most.isdecimal() and used.isdecimal():  # "max": there is no limit
            facts = dict(line.split(" ", 1) for line in _read(place / "memory.stat").splitlines() if " " in line)
            yield max(0, int(most) - int(used) + int(facts.get(cache, 0)))


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8")
    return ""
