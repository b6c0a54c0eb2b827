# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Heartbeats: a child that answers is never lost, and a silent child is.

A parent that did not run knows nothing.
"""

from __future__ import annotations

import math

import pytest

from titan_ft.protocol.control.heartbeat import PINGS, HeartbeatWatch
from titan_ft.protocol.control.link import START_SECONDS

PATIENCE = 1.0
INTERVAL = PATIENCE / PINGS


class Watched:
    """A watch over children 1 and 2, with a clock. The test looks at the right times."""

    def __init__(self) -> None:
        self.now = 100.0
        self.watch = HeartbeatWatch(PATIENCE)
        for child in (1, 2):
            self.watch.add(child, self.now)

    def look(self, *answering: int, late: float = 0.0) -> dict[int, float]:
        """Look at the next time. These children have answered just before."""
        self.now = self.watch.next_look + late
        for child in answering:
            self.watch.note_answer(child, self.now)
        return self.watch.look(self.now)


def test_children_that_answer() -> None:
    watched = Watched()
    assert [watched.look(1, 2) for _ in range(50)] == [{}] * 50


def test_a_silent_child_is_found_in_time() -> None:
    """It is found after the patience, at the first look."""
    watched = Watched()
    watched.look(1, 2)
    heard = watched.now
    while not (found := watched.look(1)):
        assert watched.now - heard <= PATIENCE
    assert found == {2: pytest.approx(watched.now - heard)}
    assert PATIENCE < watched.now - heard <= PATIENCE + INTERVAL + 1e-9


def test_a_parent_that_looks_late_begins_anew() -> None:
    """The parent was frozen, or a call kept Python's lock. So it could not read the answers."""
    watched = Watched()
    watched.look(1, 2)
    assert watched.look(late=10 * PATIENCE) == {}
    thawed = watched.now
    while not (found := watched.look(1)):
        assert watched.now - thawed <= PATIENCE
    assert set(found) == {2}
    assert watched.now - thawed > PATIENCE


def test_a_short_freeze_of_the_whole_group() -> None:
    """The freeze ends before a look is late.

    It leaves a child almost half of the patience to thaw after its parent.
    """
    watched = Watched()
    watched.look(1, 2)
    assert watched.look(late=0.33 * PATIENCE) == {}
    thawed = watched.now
    while watched.now - thawed < 0.4 * PATIENCE:
        assert watched.look() == {}


def test_a_child_that_has_never_answered() -> None:
    """The child has the time that a first connection may take."""
    watched = Watched()
    while not (found := watched.look(1)):
        assert watched.now - 100.0 <= START_SECONDS + INTERVAL
    assert set(found) == {2}
    assert watched.now - 100.0 > START_SECONDS


def test_nobody_is_watched() -> None:
    """No look is planned. A child that comes then is pinged at once."""
    watch = HeartbeatWatch(PATIENCE)
    assert watch.next_look == math.inf
    watch.add(1, 5.0)
    assert watch.next_look == 5.0
    watch.look(5.0)
    watch.remove(1)
    assert watch.next_look == math.inf
    watch.remove(1)
    watch.add(2, 99.0)
    assert watch.look(99.0) == {}
