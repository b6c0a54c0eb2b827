# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The protocol under thousands of schedules of faults. `bash scripts/explore.sh` runs as many as are wanted."""

from __future__ import annotations

import sys
import threading
import time

from tests.simulation import standins
from tests.simulation.explore import run_all
from tests.simulation.schedule import KINDS, Schedule, draw

SCHEDULES = 2000


def test_every_promise_holds() -> None:
    """No schedule of the default ones breaks a promise."""
    broken: dict[str, tuple[int, str]] = {}
    for findings in run_all(0, SCHEDULES, KINDS, jobs=2):
        broken |= findings.first
    assert not broken, f"bash scripts/explore.sh --schedules {SCHEDULES} --shrink; {broken}"


def test_a_seed_replays() -> None:
    """The same seed gives the same trace, event for event, also after it was written down."""
    with standins.installed():
        schedule = draw(7, ("kill", "freeze"))
        first = schedule.run(traces=True)
        again = Schedule.decode(schedule.encode()).run(traces=True)
    assert first.trace
    assert first.trace == again.trace
    assert first.kernel.now == again.kernel.now


def test_the_real_world_is_back_afterwards() -> None:
    """Other tests of the process are untouched."""
    module = vars(sys.modules["titan_ft.replica.membership"])
    with standins.installed():
        assert module["time"] is not time
    assert module["time"] is time
    assert module["threading"] is threading
