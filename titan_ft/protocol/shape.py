# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The shape of a group: everything besides the config that must be equal in all groups.

Rank i of each group sums buffers with rank i of the others. With another number of ranks, another
sharding or another model, the buffers have other sizes, or the same sizes and other contents. Gloo
ends the process over other sizes, and nobody notices other contents. The config does not show the
difference: a shard degree of -1 means as many ranks as were started.

A shape is text, so that it can be part of a group's name at the lighthouse:
`4r.dp_shard2.tp2;torch=2.13.0;torchtitan=0.2.2;titan_ft=0.1.0;layout=0123456789ab`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_LAYOUT = "layout"
_DEGREE = re.compile(r"([a-z_]+)(\d+)")


@dataclass(frozen=True)
class Difference:
    """A difference of two shapes, in words.

    Attributes:
        own, other: what each of the two groups has.
        remedy: how to make them equal.
    """

    own: str
    other: str
    remedy: str


def describe_shape(
    num_ranks: int,
    degrees: Mapping[str, int],
    versions: Mapping[str, str],
    layout: int,
) -> str:
    """Return the shape of a group.

    Args:
        degrees: degree of each parallel dimension, by name.
        versions: versions of the packages that decide what a rank computes and sends, by name.
        layout: 48-bit hash of the parameters on all ranks of the group.
    """
    mesh = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
    ranks = ".".join([f"{num_ranks}r", *mesh])
    packages = [f"{name}={version}" for name, version in versions.items()]
    return ";".join([ranks, *packages, f"{_LAYOUT}={layout:012x}"])


def shape_differences(own: str, other: str, *, same_config: bool) -> list[Difference]:
    """Return the differences of two shapes.

    The list is empty if the shapes are the same, or if only the config makes them differ.
    """
    ranks, facts = _parse(own)
    other_ranks, other_facts = _parse(other)
    found = []
    if ranks != other_ranks:
        remedy = "as many ranks and the same [parallelism] degrees"
        found.append(Difference(_ranks_in_words(ranks), _ranks_in_words(other_ranks), remedy))
    for name in dict.fromkeys((*facts, *other_facts)):
        one, another = facts.get(name, "none"), other_facts.get(name, "none")
        if one != another and name != _LAYOUT:
            remedy = f"the same version of {name}"
            found.append(Difference(f"{name} {one}", f"{name} {another}", remedy))
    # Config, ranks, degrees and versions decide the layout. So it matters only if they are the
    # same.
    if found or not same_config:
        return found
    if own != other:
        layout, other_layout = facts.get(_LAYOUT), other_facts.get(_LAYOUT)
        details = "(names, sizes, dtypes and order on all ranks)"
        found.append(
            Difference(
                f"parameters of layout {layout} {details}",
                f"parameters of layout {other_layout}",
                "the same code of the model",
            ),
        )
    return found


def _parse(shape: str) -> tuple[str, dict[str, str]]:
    ranks, *settings = shape.split(";")
    facts = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if separator:
            facts[name] = value
    return ranks, facts


def _ranks_in_words(text: str) -> str:
    """Turn `4r.dp_shard2.tp2` into words."""
    ranks, *mesh = text.split(".")
    number = ranks.removesuffix("r")
    words = f"{number} ranks"
    if number == "1":
        words = "1 rank"
    if not mesh:
        return words
    degrees = ", ".join(_DEGREE.sub(r"\1 \2", degree) for degree in mesh)
    return f"{words} ({degrees})"
