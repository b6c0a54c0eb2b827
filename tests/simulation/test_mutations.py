# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The exploration can fail: each defect of `mutations.py`, put into the engine, is found."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import tests.simulation.standins  # noqa: F401  # imports torch and torchft, before processes are forked
from tests.simulation.mutations import MUTATIONS, Found, Mutation, changed, find


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "_"))
def test_it_is_one_of_the_engine_as_it_is(mutation: Mutation) -> None:
    """The lines that it changes are there, once; exploring with it takes too long to see that each time."""
    for name in {change.name for change in mutation.changes}:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        changes = [change for change in mutation.changes if change.name == name]
        compile(changed(Path(spec.origin).read_text(), changes), spec.origin, "exec")


@pytest.mark.slow  # ten minutes altogether
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "_"))
def test_exploration_finds_it(mutation: Mutation) -> None:
    """It breaks one of the promises that it is said to break, within 2,000 schedules."""
    found = find(mutation)
    assert isinstance(found, Found), f"{mutation.name}: {found}"
