# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The simulation's stand-ins reach every room of the engine."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import {module}
from tests.simulation import standins
with standins.installed():
    print(*standins.real_names())
"""
REAL = ["titan_ft.pinned.queue", "titan_ft.pinned.threading"]
"""Pinned memory exists on a GPU alone; the simulation never calls it."""


def real_names(module: str) -> list[str]:
    """Return the real clocks, threads and sockets that are left once `module` is loaded, in a process of its own."""
    process = subprocess.run([sys.executable, "-c", CODE.format(module=module)], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


def test_no_loaded_module_of_the_engine_has_real_time() -> None:
    """A room that moves out of `standins.PACKAGES` would get real time, threads and sockets silently."""
    assert real_names("tests.simulation.explore") == REAL


def test_a_module_outside_of_the_rooms_is_found() -> None:
    """The launcher's modules stand for a room that nobody named."""
    assert "titan_ft.launch.group.children.time" in real_names(
        "titan_ft.launch.group.children, tests.simulation.explore"
    )
