# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The exploration can fail: each defect of `mutations.py`, put into the engine, is found."""

from __future__ import annotations

import pytest

import tests.simulation.standins  # noqa: F401  # imports torch and torchft, before processes are forked
from tests.simulation.mutations import MUTATIONS, Found, Mutation, find


@pytest.mark.slow  # a minute or two altogether
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "_"))
def test_exploration_finds_it(mutation: Mutation) -> None:
    """It breaks one of the promises that it is said to break, within 2,000 schedules."""
    found = find(mutation)
    assert isinstance(found, Found), f"{mutation.name}: {found}"
