# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The look of a report's figures: one colour per state of a group, one mark per category of fault."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# Inks of the images; on the page, CSS of page.html sets those of the figures, so that they follow its theme.
INK, MUTED, GRID, PAPER = "#1c2127", "#5f6873", "#e4e7eb", "#fefefe"


class Look(NamedTuple):
    """How a state is shown, and what it means in words."""

    label: str
    colour: str
    meaning: str


# One colour per state, in the order in which they are stacked: blues train, warm colours stall, purples waste, greens
# catch up, browns start, greys do nothing. Neighbours differ in lightness, so that they differ in print and to the
# colour-blind. The meanings are those of titan_ft/history/timeline.py.
STATES: dict[str, Look] = {
    "productive": Look("training", "#3d78b4", "Forward, backward and update of steps that count."),
    "overhead": Look("between steps", "#7f9fbe", "Digests, logging, checkpoints, validation."),
    "exchange_wait": Look("exchange wait", "#a9d1f2", "Waits for gradients of the others, in an exchange that works."),
    "detection": Look("detection", "#c8321f", "An exchange is broken, and nobody has noticed yet."),
    "quorum": Look("quorum", "#ef8a3c", "Waits for the lighthouse to say who takes part, also while it is down."),
    "rebuild": Look("rebuild", "#f8cd9c", "Builds the process group anew."),
    "wasted": Look("wasted", "#6c2f6f", "Computed what was thrown away: killed in mid-step, or not the job's state."),
    "hung": Look("hung", "#cf8fc4", "Alive and doing nothing: stopped or deadlocked."),
    "heal": Look("heal", "#0d7f6d", "Fetches the state from another group, which trains on."),
    "replay": Look("replay", "#7cc7b2", "Applies the updates that were made meanwhile."),
    "restart": Look("restart", "#54423a", "Dead, until its next process asks to join."),
    "start": Look("start", "#b09a8b", "Its first process starts: imports, model, data."),
    "wait_for_groups": Look("waiting for groups", "#dcc95c", "The job has too few groups, or waits for a joiner."),
    "idle": Look("idle", "#b6bdc5", "Finished, left, or given up."),
    "unknown": Look("not told", "#e6e8eb", "No event tells."),
}
ACCENT = STATES["productive"].colour
FAULT, MIDDLE = "#d23f31", "#87909b"  # both to be seen on a light page and on a dark one

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
GLYPHS = {"v": "▼", "X": "✖", "s": "■", "D": "◆", "P": "✚", "*": "★", "o": "●"}
"""The marks as text, for a legend."""


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
