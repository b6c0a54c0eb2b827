# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The look of a report's figures: one colour for each of five states of a group, one mark per fault
category.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Look(NamedTuple):
    """Name, colour and meaning of a state."""

    label: str
    colour: str
    meaning: str


# The states that a reader tells apart, in the order in which they are stacked. `phases.py` folds
# the finer states of titan_ft/history/timing/timeline.py into them. Every pair differs in lightness
# as well as in hue, so that the states differ in print and to the colour-blind (a test simulates
# both).
STATES: dict[str, Look] = {
    "training": Look(
        "training",
        "#2b66ab",
        "Computes a step or exchanges its gradients; also the work between two steps.",
    ),
    "waiting": Look(
        "waiting", "#f5cf4e", "Cannot go on because of another group, or without the lighthouse."
    ),
    "recovering": Look(
        "recovering",
        "#2fb18c",
        "Fetches the state from another group and applies the updates since.",
    ),
    "starting": Look(
        "starting", "#cdb7ea", "A new process imports, builds the model, and asks to join."
    ),
    "lost": Look("lost", "#9c1c12", "Dead or frozen: nothing runs in its place yet."),
    "ended": Look("finished or left", "#b6bdc5", "Finished, or left in order."),
    "unknown": Look("unknown", "#e2e5e9", "No event covers this time."),
}
# The meanings of the finer states, for the texts under the pointer and for the table of states.
DETAILS: dict[str, str] = {
    "productive": "forward, backward, update",
    "overhead": "between steps",
    "exchange_wait": "exchange of gradients",
    "wasted": "computed in vain",
    "detection": "a broken exchange is not noticed yet",
    "quorum": "the lighthouse's answer",
    "rebuild": "new connections between the groups",
    "wait_for_groups": "too few groups, or a joiner",
    "heal": "state from another group",
    "replay": "updates made meanwhile",
    "start": "first start",
    "restart": "restart",
    "hung": "frozen or deadlocked",
    "idle": "",
    "unknown": "",
}
ACCENT = STATES["training"].colour
FAULT, MIDDLE = "#d23f31", "#87909b"  # both to be seen on a light page and on a dark one

# Category of a fault (`titan_ft.faults.fault.Category`): its mark in the figures, as Plotly calls
# it.
MARKS = {
    "process killed": "triangle-down",
    "error raised": "x",
    "stopped or slow": "square",
    "network": "diamond",
    "wrong numbers": "cross",
    "lighthouse killed": "star",
}
OTHER = ("other failure", "circle")
GLYPHS = {
    "triangle-down": "▼",
    "x": "✖",
    "square": "■",
    "diamond": "◆",
    "cross": "✚",
    "star": "★",
    "circle": "●",
}
"""The marks as text, for a legend."""


def state_order(states: set[str]) -> list[str]:
    """Return states in the order in which they are stacked."""
    return [state for state in STATES if state in states]


def mark_of(category: str | None) -> tuple[str, str]:
    """Return the name and the mark of a category (`Incident.category`)."""
    return OTHER if category is None else (category, MARKS[category])


def sorted_marks(categories: Iterable[str | None]) -> list[tuple[str, str]]:
    """Return the names and the marks of categories, each once, in their own order."""
    found = {mark_of(category) for category in categories}
    return [known for known in [*MARKS.items(), OTHER] if known in found]
