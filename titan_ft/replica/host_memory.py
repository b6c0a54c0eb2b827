# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What is left of this host's memory, and how many updates of it a joiner may queue."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from titan_ft.config import FaultTolerance

_NO_BOUND = 2**31  # updates


def free_bytes(root: Path = Path("/")) -> int | None:
    """Return how much memory this process can still take: what the host has, or its cgroups, if they allow less.

    Args:
        root: above proc and sys.

    Returns:
        Bytes, with caches that the kernel would drop counted as free; None where the machine does not tell.
    """
    return min((*_on_host(root), *_in_cgroups(root)), default=None)


def most_updates(config: FaultTolerance, free: int | None, num_ranks: int, update_bytes: int) -> int:
    """Return how many updates a rank may queue; at least 1.

    Args:
        free: bytes that the host has left; None = not known.
        num_ranks: ranks that share them.
        update_bytes: of one update.
    """
    # The other half is for the state itself, and for whatever else there is.
    room = config.catch_up_max_gb * 2**30 or (math.inf if free is None else free / 2 / num_ranks)
    return max(1, int(min(config.catch_up_max_steps or _NO_BOUND, room / max(1, update_bytes))))


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
