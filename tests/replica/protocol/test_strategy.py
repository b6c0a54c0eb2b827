# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The strategy of a job has all that depends on rounds of several steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ft.config import FaultTolerance
from titan_ft.protocol.strategy import EveryRound, EveryStep, strategy_of

PACKAGE = Path(__file__).parents[3] / "titan_ft"


@pytest.mark.parametrize("room", ["protocol", "gradients", "membership"])
def test_only_the_strategy_asks_for_the_method(room: str) -> None:
    """A check of the method elsewhere hides its reason.

    For a new method, all such checks would have to be found.
    """
    asking = [
        path.name
        for path in (PACKAGE / room).glob("*.py")
        if ".semi_sync_method" in path.read_text()
    ]
    assert asking == (["strategy.py"] if room == "protocol" else [])


def test_a_method_makes_rounds() -> None:
    """A round has `sync_steps` steps, or a part of them for each fragment.

    Without a method, an update is one step.
    """
    plain = strategy_of(FaultTolerance(sync_steps=8))
    assert (type(plain), plain.unit, plain.steps) == (EveryStep, "step", 1)
    for method, fragments, steps in (("local_sgd", 1, 8), ("diloco", 4, 2)):
        made = strategy_of(
            FaultTolerance(semi_sync_method=method, sync_steps=8, num_fragments=fragments)
        )
        assert (type(made), made.unit, made.steps) == (EveryRound, "round", steps)


def test_donors_of_a_joiner() -> None:
    """All holders, or `heal_donors` of them.

    With rounds only one: the moments of two groups do not fit together.
    """
    assert [
        strategy_of(FaultTolerance(heal_donors=most)).limit_donors(5) for most in (0, 2, 9)
    ] == [5, 2, 5]
    rounds = strategy_of(FaultTolerance(semi_sync_method="diloco", heal_donors=4))
    assert [rounds.limit_donors(holders) for holders in (0, 1, 5)] == [0, 1, 1]
