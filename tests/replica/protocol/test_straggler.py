# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The stragglers, step by step."""

from __future__ import annotations

import pytest

from titan_ft.protocol.straggler import StragglerChange, Stragglers


def slots(changes: list[StragglerChange]) -> list[int]:
    return [change.slot for change in changes]


def test_a_lasting_straggler_is_reported_once() -> None:
    """The report comes at the last of `steps` slow steps, with the ratio to the others."""
    stragglers = Stragglers(factor=1.5, steps=3)
    slow = {0: 1.0, 1: 3.0, 2: 2.0}
    assert stragglers.observe(slow) == []
    assert stragglers.observe(slow) == []
    assert stragglers.observe(slow) == [StragglerChange(slot=1, ratio=2.0, recovered=False)]
    assert stragglers.observe(slow) == []
    assert stragglers.ratios[1] == 2.0


def test_one_good_step_breaks_the_row() -> None:
    """Slow steps count only in a row. Exactly the factor is not slow."""
    stragglers = Stragglers(factor=1.5, steps=2)
    for own in (9.0, 1.5, 9.0, 1.0):
        assert stragglers.observe({0: 1.0, 1: own}) == []
    assert stragglers.observe({0: 1.0, 1: 9.0}) == []
    assert slots(stragglers.observe({0: 1.0, 1: 9.0})) == [1]


def test_a_straggler_recovers_after_as_many_good_steps() -> None:
    """A single good step changes nothing.

    After `steps` good steps in a row, the group can be reported again.
    """
    stragglers = Stragglers(factor=1.5, steps=2)
    slow, good = {0: 1.0, 1: 2.0}, {0: 1.0, 1: 1.0}
    told = [
        stragglers.observe(seconds) for seconds in (slow, slow, good, slow, good, good, slow, slow)
    ]
    assert [slots(changes) for changes in told] == [[], [1], [], [], [], [1], [], [1]]
    assert [change.recovered for changes in told for change in changes] == [False, True, False]


def test_an_absent_group_starts_anew() -> None:
    """An absent group has no slow steps in a row, and is no straggler when it is back."""
    stragglers = Stragglers(factor=1.5, steps=2)
    slow, absent = {0: 1.0, 1: 1.0, 2: 2.0}, {0: 1.0, 1: 1.0}
    told = [
        slots(stragglers.observe(seconds))
        for seconds in (slow, absent, slow, slow, absent, slow, slow)
    ]
    assert told == [[], [], [], [2], [], [], [2]]


def test_one_slow_group_of_many_does_not_hide_another() -> None:
    """Each group is compared with the others' median, which a single group does not move."""
    stragglers = Stragglers(factor=1.5, steps=1)
    assert slots(stragglers.observe({0: 1.0, 1: 1.0, 2: 1.1, 3: 2.0, 4: 50.0})) == [3, 4]


@pytest.mark.parametrize("seconds", [{}, {3: 7.0}, {0: 0.0, 1: 5.0}])
def test_without_a_comparison_there_is_no_straggler(seconds: dict[int, float]) -> None:
    """The group is alone, or a coarse clock shows times of zero."""
    assert Stragglers(factor=1.5, steps=1).observe(seconds) == []
