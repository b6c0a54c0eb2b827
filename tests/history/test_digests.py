# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The comparison of the groups' states."""

from __future__ import annotations

import pytest

from titan_ft.history.digests import compare_digests

Told = list[tuple[str, int, str | None]]


@pytest.mark.parametrize(
    ("told", "verdict", "num_compared", "differing"),
    [
        ([], "unknown", 0, set()),
        ([("a", 0, "x")], "unknown", 0, set()),
        ([("a", 0, "x"), ("a", 0, "y")], "unknown", 0, set()),
        ([("a", 0, "x"), ("a", 1, None)], "unknown", 0, set()),
        ([("a", 0, "x"), ("b", 1, "y")], "unknown", 0, set()),
        ([("a", 0, "x"), ("a", 1, "x"), ("b", 1, "y")], "equal", 1, set()),
        ([("a", 0, "x"), ("a", 1, "x"), ("b", 1, "y"), ("b", 2, "z")], "differ", 2, {"b"}),
    ],
)
def test_comparison(told: Told, verdict: str, num_compared: int, differing: set[str]) -> None:
    """A state that several groups report is compared; one that a single group reports proves
    nothing.
    """
    found = compare_digests(told)
    assert (found.verdict, len(found.compared), found.differing) == (
        verdict,
        num_compared,
        differing,
    )
