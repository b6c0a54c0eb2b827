# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The cut of a model into fragments."""

from __future__ import annotations

from itertools import pairwise

import pytest

from titan_ft.engine.fragments import assign, block_of, find, find_unknown

LLAMA = {
    "tok_embeddings.weight": 70,
    **{
        f"layers.{layer}.{part}.weight": size
        for layer in range(6)
        for part, size in (("wq", 60), ("norm", 2))
    },
    "norm.weight": 2,
    "output.weight": 70,
}


@pytest.mark.parametrize("num_fragments", range(1, 9))
def test_fragments_are_of_whole_blocks_and_about_equal(num_fragments: int) -> None:
    """Two fragments differ by at most the largest block, and none is empty."""
    found = dict(zip(LLAMA, assign(LLAMA, num_fragments), strict=True))
    sizes = [
        sum(LLAMA[name] for name in LLAMA if found[name] == number)
        for number in range(num_fragments)
    ]
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) <= 70
    for one, other in pairwise(LLAMA):
        assert block_of(one) != block_of(other) or found[one] == found[other]


def test_equal_layers_are_dealt_out_in_turn() -> None:
    """As in the paper's strided fragments, each fragment has layers of all depths."""
    layers = {f"layers.{layer}.weight": 5 for layer in range(7)}
    assert assign(layers, 3) == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("layers.11.attention.wq.weight", "layers.11"),
        ("vision.layers.3.mlp.0.bias", "vision.layers.3"),
        ("norm.weight", "norm"),
        ("weight", "weight"),
    ],
)
def test_a_block_is_a_layer_or_a_child_of_the_model(name: str, block: str) -> None:
    """Numbers inside a layer's name do not cut it further."""
    assert block_of(name) == block


def test_modules_that_are_named() -> None:
    """A module has all of its parts, except for parts that are named themselves.

    A prefix of a name is no match.
    """
    names = ["layers.1.wq.weight", "layers.1.wo.weight", "layers.11.wq.weight", "norm.weight"]
    modules = [["layers.1"], ["layers.1.wo", "layers.11", "layers.2"]]
    assert find(names, modules) == [0, 1, 1, None]
    assert find_unknown(names, modules) == {"layers.2"}
