# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What may import what."""

from __future__ import annotations

import subprocess
import sys

import pytest

PURE = (
    "titan_ft",
    "titan_ft.config",
    "titan_ft.history",
    "titan_ft.chaos.command",
    "titan_ft.chaos.faults",
    "titan_ft.chaos.plan",
    "titan_ft.chaos.runner",
    "titan_ft.chaos.schedule",
    "titan_ft.history.against",
    "titan_ft.history.check",
    "titan_ft.history.goodput",
    "titan_ft.history.report",
    "titan_ft.history.trajectory",
    "titan_ft.history.failures",
    "titan_ft.checkpoint_folder",
    "titan_ft.history.audit",
    "titan_ft.history.summary",
    "titan_ft.live.metrics",
    "titan_ft.run.paths",
    "titan_ft.live.status",
    "titan_ft.live.top",
    "titan_ft.run.events",
    "titan_ft.run.log",
    "titan_ft.run.tail",
)


@pytest.mark.parametrize("module", PURE)
def test_pure_layer_imports_no_torch(module: str) -> None:
    """Config, history and run paths load without torch, torchtitan and torchft, so that tools start at once."""
    code = (
        f"import sys, {module}\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'torchtitan', 'torchft'}))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == ""


def test_a_trainer_without_chaos_loads_nothing_that_breaks_things() -> None:
    """What injects faults into a worker is imported when `chaos = true` asks for it, and not before."""
    code = (
        "import sys, titan_ft.train\n"
        "import titan_ft.trainer\n"
        "print(*(name for name in sys.modules if name.startswith('titan_ft.chaos')))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == ""
