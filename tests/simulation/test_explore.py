# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The protocol under thousands of schedules of faults. `bash scripts/explore.sh` runs as many as are wanted."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from tests.simulation import standins
from tests.simulation.schedule import Schedule, draw

SCHEDULES = 2000
ROOT = Path(__file__).parents[2]


def test_every_promise_holds() -> None:
    """No schedule of the default ones breaks a promise."""
    # A process of its own: the order of sets of strings is part of what a seed decides.
    command = [sys.executable, "-m", "tests.simulation.explore", "--seed", "0", "--schedules", str(SCHEDULES)]
    environ = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    explored = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert explored.returncode == 0, explored.stdout[-4000:] + explored.stderr[-2000:]
    assert f"{SCHEDULES} schedules" in explored.stdout


@pytest.mark.parametrize("kinds", [("kill", "freeze"), ("checkpoint", "flip"), ("shape", "late")], ids="-".join)
def test_a_seed_replays(kinds: tuple[str, ...]) -> None:
    """The same seed gives the same trace, event for event, also after it was written down."""
    with standins.installed():
        schedule = draw(7, kinds)
        first = schedule.run(traces=True)
        again = Schedule.decode(schedule.encode()).run(traces=True)
    assert first.trace
    assert first.trace == again.trace
    assert first.kernel.now == again.kernel.now


def test_a_world_goes_when_it_is_dropped() -> None:
    """Nothing of a schedule stays in memory: thousands are run in a process."""
    with standins.installed():
        schedule = draw(7, ("kill", "freeze"))
        overlapping = dataclasses.replace(schedule, options=dataclasses.replace(schedule.options, overlap=True))
        world = weakref.ref(overlapping.run())
    gc.collect()
    assert world() is None


def test_the_real_world_is_back_afterwards() -> None:
    """Other tests of the process are untouched."""
    module = vars(sys.modules["titan_ft.replica.seat"])
    with standins.installed():
        assert module["time"] is not time
    assert module["time"] is time
    assert module["threading"] is threading
