# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Schedules of faults keep the rules of the control tree, and each known defect breaks one."""

from __future__ import annotations

import pytest

from tests.replica.protocol.control.explore import explore
from tests.replica.protocol.control.mutations import MUTATIONS, Mutation, find


def test_every_rule_holds() -> None:
    assert explore(range(1000)).problems == {}


def test_a_parent_that_ends_when_it_wakes_refuses_who_dials() -> None:
    """It had accepted the attempt while it was frozen. The child would wait for it for ever."""
    assert explore([42012578]).problems == {}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_exploration_finds_it(mutation: Mutation) -> None:
    """A mutation breaks a rule within 1,000 schedules; most do within ten."""
    assert find(mutation) is not None, mutation.text
