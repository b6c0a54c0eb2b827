# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The fragments of Streaming DiLoCo (arXiv 2501.18512): which parameters are exchanged together.

A fragment consists of whole *blocks*: numbered layers, or other children of the model.

See docs/semi_sync.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def assign(sizes: Mapping[str, int], num_fragments: int) -> list[int]:
    """Assign the blocks of a model to fragments of about equal size.

    The largest block comes first, and each block goes to the smallest fragment so far. So equal
    layers are assigned in turn, as in the paper's strided fragments.

    Args:
        sizes: size of each parameter, by its name, in the order of the model.

    Returns:
        The fragment of each parameter. If there are too few blocks, some fragments are empty.
    """
    block_sizes: dict[str, int] = {}
    for name, size in sizes.items():
        block = block_of(name)
        block_sizes[block] = block_sizes.get(block, 0) + size
    # The sort is stable: blocks of the same size stay in the order of the model.
    largest_first = sorted(block_sizes, key=lambda block: -block_sizes[block])
    fragment_sizes = [0] * num_fragments
    fragment_of = {}
    for block in largest_first:
        fragment = fragment_sizes.index(min(fragment_sizes))
        fragment_of[block] = fragment
        fragment_sizes[fragment] += block_sizes[block]
    return [fragment_of[block_of(name)] for name in sizes]


def block_of(name: str) -> str:
    """Return the block of a parameter: its numbered layer, or else its child of the model.

    Fragments do not cut blocks.
    """
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return parts[0]


def find(names: Sequence[str], modules: Sequence[Sequence[str]]) -> list[int | None]:
    """Return the fragment of each parameter; None = the parameter is in no fragment.

    If both a module and a part of it are named, the fragment of the part counts.

    Args:
        modules: of each fragment, the names of its modules.
    """
    fragment_of = {}
    for fragment, names_of_modules in enumerate(modules):
        for module in names_of_modules:
            fragment_of[module] = fragment
    found: list[int | None] = []
    for name in names:
        number = None
        for module in _modules_of(name):
            if module in fragment_of:
                number = fragment_of[module]
                break
        found.append(number)
    return found


def find_unknown(names: Sequence[str], modules: Sequence[Sequence[str]]) -> set[str]:
    """Return the modules that have none of these parameters."""
    unknown: set[str] = set()
    for fragment in modules:
        unknown.update(fragment)
    for name in names:
        unknown.difference_update(_modules_of(name))
    return unknown


def _modules_of(name: str) -> list[str]:
    """Return the name of a parameter and those of its modules, the innermost first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
