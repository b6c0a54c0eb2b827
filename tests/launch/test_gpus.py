# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""How many GPUs a launch counts, without torch."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from titan_ft.launch import gpus


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that was built for CUDA, on a host where all GPUs are visible."""
    monkeypatch.setattr(gpus, "_torch_uses_cuda", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("cuda")
def test_visible_devices_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `worker_env` deals them out; nothing in the variable hides all GPUs."""
    for listed, count in (("0,3", 2), ("GPU-1a", 1), ("", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        assert gpus.num_gpus() == count


@pytest.mark.usefixtures("cuda")
def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML counts the GPUs. If it is missing or fails, the number is unknown."""

    def count(pointer: Any) -> int:
        pointer._obj.value = 3
        return 0

    begun = []  # in the process that asks
    nvml = SimpleNamespace(nvmlInit_v2=lambda: begun.append(1) or 0, nvmlDeviceGetCount_v2=count)
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml if name else load(name))
    assert gpus.num_gpus() == 3
    assert not begun, "NVML has started a thread in this process, which makes no fork from now on"
    nvml.nvmlInit_v2 = lambda: 9  # the driver is not loaded
    assert gpus.num_gpus() is None

    def missing(name: str) -> Any:
        if not name:
            return load(name)
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert gpus.num_gpus() is None


def test_what_torch_was_built_for() -> None:
    """It is read without importing torch, and a torch for CPU uses no GPU, whatever the host
    has.
    """
    assert gpus._torch_uses_cuda() == (torch.version.cuda is not None)
    if torch.version.cuda is None:
        assert gpus.num_gpus() is None
