# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Count the GPUs of this host without torch, whose import would cost each launch seconds."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from importlib.machinery import PathFinder

from titan_ft.launch.group.forks import call_in_fork


def listed_gpus() -> list[str] | None:
    """Return the GPUs in CUDA_VISIBLE_DEVICES; None without that variable: all are visible."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return None
    return [name for name in listed.split(",") if name]


def num_gpus() -> int | None:
    """Return the number of NVIDIA GPUs that the workers would see.

    None if torch was not built for CUDA, or if the number is unknown.

    A fork asks NVML, which starts a thread (seen with driver 580). An agent with that thread could
    no longer fork, and each restart of a worker would take the 16 s of its imports.
    """
    if not _torch_uses_cuda():
        return None
    listed = listed_gpus()
    if listed is not None:
        return len(listed)
    answer = call_in_fork(_count_by_nvml)
    return int(answer) if answer else None


def _count_by_nvml() -> str:
    """Return the number of GPUs in digits; empty if NVML does not report a number."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        # The library comes with the driver, so there is none.
        return ""
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return ""
    return str(count.value)


def _torch_uses_cuda() -> bool:
    """True if torch was built for CUDA. Only the module `torch.version` is loaded."""
    package = importlib.util.find_spec("torch")
    if package is None:
        return False
    spec = PathFinder.find_spec("torch.version", package.submodule_search_locations)
    if spec is None or spec.loader is None:
        return False
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, "cuda", None) is not None
