# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Values that the ranks of a group gather. The exploration tests the collectives themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from titan_ft.membership.group_collectives import GroupCollectives


@pytest.mark.parametrize(
    ("own", "siblings"),
    [([], []), ([3], [[]]), ([], [[0]]), ([0, 61], [[62, 63], [1000]]), ([61], [[61], [124, 0]])],
)
def test_a_union_has_the_numbers_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, own: list[int], siblings: list[list[int]]
) -> None:
    """One integer carries 62 numbers, so many numbers take several gathers."""
    group, calls = GroupCollectives(torch.device("cpu"), None), list[int]()
    others: Any = [iter(_told(sibling, [own, *siblings])) for sibling in siblings]

    def gather(value: int) -> list[int]:
        calls.append(value)
        assert -1 <= value < 2**63
        return [value, *map(next, others)]

    monkeypatch.setattr(group, "gather", gather)
    assert group.union(own) == {*own}.union(*siblings)


def _told(numbers: list[int], everybody: list[list[int]]) -> list[int]:
    """Return the values that a rank with these numbers gathers.

    The largest number comes first, and then masks of 62 numbers each.
    """
    largest = max((number for each in everybody for number in each), default=-1)
    masks = [
        sum(1 << n - first for n in numbers if 0 <= n - first < 62)
        for first in range(0, largest + 1, 62)
    ]
    return [max(numbers, default=-1), *masks]
