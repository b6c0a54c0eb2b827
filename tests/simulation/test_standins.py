# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The simulation's stand-ins reach every room of the engine."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import tests.simulation.explore
from tests.simulation import standins
with standins.installed():
    print(*standins.real_names())
import titan_ft.launch.group.children
with standins.installed():
    print(*standins.real_names())
"""
REAL = ["titan_ft.pinned.queue", "titan_ft.pinned.threading"]
"""Pinned memory exists on a GPU alone; the simulation never calls it."""


def test_no_loaded_module_of_the_engine_has_real_time() -> None:
    """A package that moves out of `standins.PACKAGES` would silently use real time and threads.

    The check runs in a process of its own. It loads a module of the launcher last, as an example of
    a missing package.
    """
    process = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    engine, others = process.stdout.splitlines()
    assert engine.split() == REAL
    assert "titan_ft.launch.group.children.time" in others.split()
