# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Finds the heaviest set of groups without a dead link between two of them. An exact search.

`member.largest_clique` uses it to choose the groups that continue when some of them cannot reach
each other. In terms of graphs, it is a maximum-weight independent set: the groups are the nodes,
the dead links are the edges, and the groups at the other ends of a group's dead links are its
*neighbours*.

1. Drop each group that one of its neighbours can replace in every set without a loss of weight.
2. Split the groups into *parts* that no dead link connects, and search each part by itself.
3. In a part, take the group with the most dead links, and compare the best set with this group and
   the best set without it.

Rings, switches and hosts that are cut off take a fraction of a second for 300 groups. Random dead
links between 100 groups take milliseconds up to 200 links, and seconds from 400 links on. The time
has no bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set


def find_heaviest(weights: Mapping[int, int], dead: Mapping[int, Set[int]]) -> list[int]:
    """Return the groups of the heaviest set that has no dead link inside.

    Of sets with the same weight, the result has the lowest numbers, compared one after the other.

    Args:
        weights: weight of each group, at least 1, by the number of the group.
        dead: neighbours of each group.
    """
    search = _Search(weights, dead)
    rest = frozenset(weights)
    weight = search.find_weight(rest)
    chosen = []
    for group in sorted(weights):
        if group not in rest:
            continue
        others = rest - {group} - dead[group]
        weight_of_others = search.find_weight(others)
        if weights[group] + weight_of_others == weight:
            chosen.append(group)
            rest = others
            weight = weight_of_others
        else:
            rest -= {group}
    return chosen


class _Search:
    def __init__(self, weights: Mapping[int, int], dead: Mapping[int, Set[int]]) -> None:
        self._weights = weights
        self._dead = dead
        # For each part that has been searched, the weight of the heaviest set within it.
        self._found: dict[frozenset[int], int] = {}

    def find_weight(self, groups: Set[int]) -> int:
        """Return the weight of the heaviest set within `groups`."""
        return sum(map(self._find_in_part, self._reduce(groups)))

    def _find_in_part(self, part: frozenset[int]) -> int:
        """Return the weight of the heaviest set within a part.

        Each turn of the loop takes one group out of the part. For the sets with this group, a
        recursion searches the other groups without its neighbours, which are few. For the sets
        without this group, the loop continues. A recursion for these would be as deep as there are
        groups, and 500 groups would exceed Python's limit.
        """
        if part in self._found:
            return self._found[part]
        weights_with_group: list[tuple[frozenset[int], int]] = []
        parts = [part]
        while len(parts) == 1 and parts[0] not in self._found:
            (part,) = parts
            group = max(part, key=lambda group: len(self._dead[group] & part))
            others = part - {group}
            with_group = self._weights[group] + self.find_weight(others - self._dead[group])
            weights_with_group.append((part, with_group))
            parts = self._reduce(others)
        # The loop has left a part with a known weight, several parts, or nothing.
        weight = sum(map(self._find_in_part, parts))
        for part, with_group in reversed(weights_with_group):
            weight = max(with_group, weight)
            self._found[part] = weight
        return weight

    def _reduce(self, groups: Set[int]) -> list[frozenset[int]]:
        """Drop needless groups (see `_find_needless`), and split the others into parts."""
        rest = set(groups)
        needless = self._find_needless(rest)
        while needless is not None:
            rest.discard(needless)
            needless = self._find_needless(rest)
        return list(self._split(rest))

    def _find_needless(self, rest: Set[int]) -> int | None:
        """Return a group that one of its neighbours can replace in every set; None = there is none.

        The neighbour is at least as heavy, and has no other neighbours than the group has.
        """
        for group in rest:
            ends = self._dead[group] & rest
            if len(ends) > 2:
                continue  # It seldom replaces a group, and the comparison would take long.
            for other in ends:
                is_as_heavy = self._weights[group] >= self._weights[other]
                if is_as_heavy and ends - {other} <= self._dead[other]:
                    return other
        return None

    def _split(self, rest: set[int]) -> Iterator[frozenset[int]]:
        """Yield the parts of `rest` that no dead link connects. Empties `rest`."""
        while rest:
            part = set()
            reached = {rest.pop()}
            while reached:
                group = reached.pop()
                part.add(group)
                new = self._dead[group] & rest
                rest -= new
                reached |= new
            yield frozenset(part)
