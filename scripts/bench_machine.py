# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Say what machine and what versions the figures are from."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "torchtitan", "torchft", "torchdata")


def describe_machine() -> dict[str, str | int | float]:
    """Return CPU, cores that this process may use, memory, load when the benchmark began, and versions."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "memory_gib": round(memory_bytes / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }
