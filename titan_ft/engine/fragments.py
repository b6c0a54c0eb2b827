# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The fragments of Streaming DiLoCo (arXiv 2501.18512): which parameters are exchanged together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def cut(sizes: Mapping[str, int], num_fragments: int) -> list[int]:
    """Deal the blocks of a model out to fragments of about equal size.

    The largest block first, each to the fragment that has least so far: equal layers are dealt out in turn, as in the
    paper's strided fragments.

    Args:
        sizes: of each parameter, by its name, in the order of the model.

    Returns:
        The fragment of each parameter. Some fragments have none if there are too few blocks.
    """
    blocks: dict[str, int] = {}
    for name, size in sizes.items():
        blocks[block_of(name)] = blocks.get(block_of(name), 0) + size
    filled = [0] * num_fragments
    fragment_of = {}
    for block in sorted(blocks, key=lambda block: -blocks[block]):  # stable: equal ones in the model's order
        fragment_of[block] = fragment = filled.index(min(filled))
        filled[fragment] += blocks[block]
    return [fragment_of[block_of(name)] for name in sizes]


def block_of(name: str) -> str:
    """Return the module of a parameter that is cut no further: a numbered layer, or a child of the model."""
    parts = name.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: numbered + 1])


def find(names: Sequence[str], modules: Sequence[Sequence[str]]) -> list[int | None]:
    """Return the fragment of each parameter by the modules that each fragment has; None for one that is in none.

    Where both a module and a part of it are named, the part's counts.
    """
    fragment_of = {module: number for number, fragment in enumerate(modules) for module in fragment}
    return [next((fragment_of[each] for each in _modules_of(name) if each in fragment_of), None) for name in names]


def unknown(names: Sequence[str], modules: Sequence[Sequence[str]]) -> set[str]:
    """Return those of the modules that have none of these parameters."""
    known = {module for name in names for module in _modules_of(name)}
    return {module for fragment in modules for module in fragment} - known


def _modules_of(name: str) -> list[str]:
    """Return the names that a parameter is found under, its own first, the outermost module's last."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
