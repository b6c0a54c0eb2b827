# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Digests of a saved state: they show whether a load restored the bytes that were saved.

DCP does not detect a changed byte or a zeroed block in a tensor. The manifest holds a digest of
each part of the state, taken from memory before the save. The load takes the digest again. Each
rank hashes its own shards, so two digests are comparable only if the same shards are on as many
ranks."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from titan_ft.protocol.row import fold48
from titan_ft.transfer.snapshot import hash_tensors

MODEL = "model"
"""The part that torchtitan flattens: its tensors have no name of their part before theirs."""
_LAYOUT_DIGITS = 12

Gather = Callable[[int], list[int]]
"""Gathers an integer of every rank of the group, in rank order."""


@torch.no_grad()
def take_digests(
    state: Mapping[str, Any], parts: Mapping[str, Any], gather: Gather
) -> dict[str, str]:
    """Return the digest of each part of a state, the same on all ranks. A collective.

    Args:
        state: as DCP saves it; the parts by name, and the tensors of the model.
        parts: the names of all parts, the same on all ranks.

    Returns:
        24 hex digits a part: 12 of the layout (names, types, shapes and ranks), 12 of the values.
    """
    digests = {}
    for name in sorted(parts):
        if name == MODEL:
            part = {key: value for key, value in state.items() if key not in parts}
        elif name in state:
            part = state[name]
        else:
            continue
        layout, values = _hash(part)
        digests[name] = f"{_join(layout, gather):012x}{_join(values, gather):012x}"
    return digests


def find_change(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the name of the first part whose values have changed; empty if none has.

    Parts of another layout (on other ranks, or of another dtype) are skipped.
    """
    for name, digest in now.items():
        earlier = then.get(name, "")
        if earlier[:_LAYOUT_DIGITS] == digest[:_LAYOUT_DIGITS] and earlier != digest:
            return name
    return ""


def _hash(part: Any) -> tuple[int, int]:
    """Return the hashes of layout and values of this rank's part of a state."""
    leaves = sorted(_leaves(part, ""), key=operator.itemgetter(0))
    tensors = [(name, leaf) for name, leaf in leaves if isinstance(leaf, torch.Tensor)]
    others = [(name, leaf) for name, leaf in leaves if not isinstance(leaf, torch.Tensor)]
    names, sums = hash_tensors(tensors)
    layout = [names, [(name, type(leaf).__name__) for name, leaf in others]]
    values = [sums, [leaf for _, leaf in others]]
    return fold48(json.dumps(layout)), fold48(json.dumps(values, default=_plain))


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _leaves(each, f"{name}/{number}")
    else:
        yield name, value


def _plain(value: Any) -> str:
    """Return bytes in hex; for any other object its type, because its text may contain an
    address.
    """
    return value.hex() if isinstance(value, bytes) else type(value).__name__


def _join(own: int, gather: Gather) -> int:
    return fold48(str(gather(own)))
