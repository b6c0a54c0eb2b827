# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The look of a report's figures: one colour per state of a group, one mark per category of fault."""

from __future__ import annotations

from collections.abc import Iterable

# Inks of the figures; the page replaces them by its CSS variables of the same name, so that figures follow its theme.
INK, MUTED, GRID, PAPER = "#1c2127", "#5f6873", "#e4e7eb", "#fefefe"

# One colour per state, in the order in which they are stacked: blues train, warm colours stall, purples waste, greens
# catch up, browns start, greys do nothing. Neighbours differ in lightness, so that they differ in print and to the
# colour-blind.
STATES: dict[str, tuple[str, str]] = {
    "productive": ("training", "#3d78b4"),
    "overhead": ("between steps", "#7f9fbe"),
    "exchange_wait": ("exchange wait", "#a9d1f2"),
    "detection": ("detection", "#c8321f"),
    "quorum": ("quorum", "#ef8a3c"),
    "rebuild": ("rebuild", "#f8cd9c"),
    "wasted": ("wasted", "#6c2f6f"),
    "hung": ("hung", "#cf8fc4"),
    "heal": ("heal", "#0d7f6d"),
    "replay": ("replay", "#7cc7b2"),
    "restart": ("restart", "#54423a"),
    "start": ("start", "#b09a8b"),
    "wait_for_groups": ("waiting for groups", "#dcc95c"),
    "idle": ("idle", "#b6bdc5"),
    "unknown": ("not told", "#e6e8eb"),
}
ACCENT = STATES["productive"][1]
FAULT = "#b3261e"

# Category of a fault: its mark in the figures, and the faults in it.
CATEGORIES: dict[str, tuple[str, frozenset[str]]] = {
    "process killed": (
        "v",
        frozenset({"kill_rank", "kill_group", "kill_groups", "kill_donor", "term_group", "segfault", "out_of_memory"}),
    ),
    "error raised": ("X", frozenset({"exception", "abort_process_group", "disk_full"})),
    "stopped or slow": ("s", frozenset({"stop_rank", "stop_group", "deadlock", "slow_rank"})),
    "network": ("D", frozenset({"network_dead", "network_slow", "link_dead", "corrupt_chunk"})),
    "wrong numbers": ("P", frozenset({"nan_gradient", "flip_parameter", "flip_optimizer"})),
    "lighthouse killed": ("*", frozenset({"kill_lighthouse"})),
}
OTHER = ("other", "o")


def state_order(states: set[str]) -> list[str]:
    """Return states in the order in which they are stacked."""
    return [state for state in STATES if state in states]


def category(kind: str) -> tuple[str, str]:
    """Return the category of a kind of fault, and its mark."""
    return next(((name, mark) for name, (mark, kinds) in CATEGORIES.items() if kind in kinds), OTHER)


def categories(kinds: Iterable[str]) -> list[tuple[str, str]]:
    """Return the categories that kinds of faults are in, each once, in their own order."""
    found = {category(kind) for kind in kinds}
    return [known for known in [*((name, mark) for name, (mark, _) in CATEGORIES.items()), OTHER] if known in found]
