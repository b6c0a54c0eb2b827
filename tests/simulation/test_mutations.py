# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The exploration finds each defect of `mutations.py`."""

from __future__ import annotations

import pytest

from tests.simulation.mutations import MUTATIONS, Found, Mutation, find


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_finds_its_names(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name that a mutation replaces exists.

    This is the quick check. An exploration with each mutation takes long.
    """
    mutation.apply(monkeypatch)


@pytest.mark.slow  # ten minutes altogether
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_exploration_finds_it(mutation: Mutation) -> None:
    """A mutation breaks one of its named promises within 2,000 schedules."""
    found = find(mutation)
    assert isinstance(found, Found), f"{mutation.name}: {found}"
