# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Compare hashes across groups: the one comparison of digests, for checks, summaries and
benchmarks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

K = TypeVar("K", bound=Hashable)
DigestVerdict = Literal["equal", "differ", "unknown"]


@dataclass(frozen=True)
class DigestComparison(Generic[K]):
    """Digests by key, such as (state, rank): equal keys must have equal digests in all groups.

    Attributes:
        groups: for each key, the groups that have a digest.
        compared: keys with digests of more than one group.
        differing: compared keys whose digests are not all equal.
        num_equal: other keys, known to have equal digests.
    """

    groups: dict[K, set[int]]
    compared: set[K]
    differing: set[K]
    num_equal: int = 0

    @property
    def num_compared(self) -> int:
        return len(self.compared) + self.num_equal

    @property
    def verdict(self) -> DigestVerdict:
        if self.differing:
            return "differ"
        if self.num_compared:
            return "equal"
        return "unknown"


def compare_digests(
    digests: Iterable[tuple[K, int, str | None]], num_equal: int = 0
) -> DigestComparison[K]:
    """Compare digests across groups.

    Args:
        digests: key, group and value of each digest; those with a value of None are left out.
        num_equal: keys that were compared before, with equal digests.
    """
    groups: dict[K, set[int]] = defaultdict(set)
    values: dict[K, set[str]] = defaultdict(set)
    for key, group, value in digests:
        if value:
            groups[key].add(group)
            values[key].add(value)
    compared = set()
    differing = set()
    for key, members in groups.items():
        if len(members) > 1:
            compared.add(key)
            if len(values[key]) > 1:
                differing.add(key)
    return DigestComparison(dict(groups), compared, differing, num_equal)
