# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The table of a run's groups, for the launcher's terminal and for `titan-ft top`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from titan_ft.history.terminal import format_clock
from titan_ft.live.status import (
    DIED,
    DRAINED,
    DRAINING,
    FAILED,
    FINISHED,
    HEALING,
    JOINED,
    LOST,
    STOPPED,
    TRAINING,
    Groups,
    GroupStatus,
)
from titan_ft.protocol import straggler

if TYPE_CHECKING:
    from rich.table import Table

COLORS = {
    TRAINING: "green",
    FINISHED: "bold green",
    HEALING: "yellow",
    DRAINING: "yellow",
    DRAINED: "cyan",
    STOPPED: "cyan",
    LOST: "bold red",
    DIED: "red",
    FAILED: "bold red",
}
SHOWN = {JOINED: "waiting", HEALING: "recovering", DRAINING: "leaving", DRAINED: "left"}
"""States by the words of a run's page; the others have the same word."""
_COLUMNS = {
    "group": 11,
    "state": 10,
    "step": 9,
    "own loss": 4,
    "own s": 6,
    "x others": 5,
    "restarts": 8,
    "donor": 3,
    "attempt": 2,
    "host": 1,
    "waits for": 7.5,
    "last fault": 7,
}
"""Heading and priority of each column. On a narrow terminal the lowest priorities go first."""
EXPLAINED = {
    "group": "number of the replica group",
    "state": (
        "training; waiting (for other groups); recovering (it fetches the state from another "
        "group); starting; lost (not heard of: dead, or its host is); died (about to be "
        "restarted); failed (not started again); leaving, left (asked to); finished; stopped (by "
        "the launcher or its agent)"
    ),
    "step": "last step that it committed",
    "own loss": "mean loss of its own tokens in that step",
    "own s": "seconds of that step without the exchange: computing and updating",
    "x others": "own s, as a multiple of the other groups' median; yellow: slow",
    "restarts": "how often it was started again in this launch",
    "donor": "group that it fetched the state from last",
    "attempt": "number of its start, from 0; logs are in logs/replica-GROUP/attempt-ATTEMPT",
    "host": "host of its rank 0",
    "waits for": (
        "group that it waited for longest in its last step, or waits for now; how long; what that "
        "group did"
    ),
    "last fault": "fault that was injected into it last, and how long ago",
}
"""The meaning of each column. `top` shows it after the key `?`."""
_LEFT = ("state", "host", "waits for", "last fault")
"""Columns of text; numbers are aligned to the right."""
_MAY_BE_EMPTY = ("waits for", "donor", "last fault")
"""Columns that are left out if no group has a value."""
_FLEXIBLE = "last fault"
"""The last column. It may be narrower than its text."""
MIN_FLEXIBLE = 16
"""Least width of the flexible column."""
GAP = 2
"""Blanks between two columns."""


def make_group_table(
    groups: Groups,
    now: float,
    width: int,
    shown: Sequence[GroupStatus] | None = None,
    *,
    ascii_only: bool = False,
) -> Table:
    """Return a table with a row per group.

    Args:
        now: Unix seconds.
        width: columns of the terminal.
        shown: groups that have a row; None shows all.
    """
    from rich.table import Table
    from rich.text import Text

    ratios = _compute_ratios(groups)
    if shown is None:
        shown = list(groups.values())
    rows = [_make_cells(group, ratios.get(group.slot), now) for group in shown]
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold underline")
    widths = _fit_columns(rows, width)
    for name, least in widths.items():
        table.add_column(
            name,
            justify="left" if name in _LEFT else "right",
            no_wrap=True,
            overflow="crop" if ascii_only else "ellipsis",
            min_width=least,
        )
    for group, row in zip(shown, rows, strict=True):
        styles = _choose_styles(group, ratios.get(group.slot))
        table.add_row(*(Text(row[name], style=styles.get(name, "")) for name in widths))
    return table


def _choose_styles(group: GroupStatus, ratio: float | None) -> dict[str, str]:
    """Return the colours of a group's row, by column."""
    styles = {"state": COLORS.get(group.state, "")}
    if describe_state(group) == "waiting":
        styles["state"] = "yellow"
    if ratio is not None and ratio > straggler.FACTOR:
        styles["x others"] = "yellow"
    return styles


def _make_cells(group: GroupStatus, ratio: float | None, now: float) -> dict[str, str]:
    """Return the text of each column.

    Args:
        ratio: the group's own seconds as a multiple of the other groups'; None if unknown.
    """
    own_loss = group.own_loss
    if own_loss is None:
        own_loss = group.loss
    step = None
    if group.step is not None:
        step = group.unit.step_after(group.step)
    fault = "-"
    if group.fault:
        # The age comes first, because a narrow column cuts off the end.
        fault = f"-{format_clock(now - group.fault_time)} {group.fault}"
    return {
        "group": str(group.slot),
        "state": describe_state(group),
        "step": format_number(step),
        "own loss": format_number(own_loss, ".4f"),
        "own s": format_number(group.own_seconds, ".3f"),
        "x others": format_number(ratio, ".2f"),
        "restarts": str(group.restarts),
        "donor": format_number(group.donor),
        "attempt": str(group.attempt),
        "host": group.host or "-",
        "waits for": _describe_wait(group),
        "last fault": fault,
    }


def describe_state(group: GroupStatus) -> str:
    """Return the state in words; for a lost group with its last step."""
    if group.state == LOST and group.step is not None:
        return f"lost since {group.unit.name(group.step)}"
    if group.state == TRAINING and group.waited is not None and not group.waited.seconds:
        # A wait of 0 s still goes on: the current step cannot be committed yet.
        return "waiting"
    return SHOWN.get(group.state, group.state)


def _describe_wait(group: GroupStatus) -> str:
    """Return the group that this group waited for in its last step, or waits for now."""
    waited = group.waited
    may_wait = group.state in (JOINED, TRAINING, DRAINING)
    if waited is None or not may_wait:
        return "-"
    seconds = f" {waited.seconds:.2f} s" if waited.seconds else ""
    return f"{waited.slot}{seconds} {waited.why.replace('_', ' ')}"


def _fit_columns(rows: Sequence[dict[str, str]], width: int) -> dict[str, int]:
    """Return the columns that fit into the width, in order, with the width that each needs."""
    needed = {}
    for name in _COLUMNS:
        lengths = [len(row[name]) for row in rows]
        needed[name] = max([len(name), *lengths])
    needed[_FLEXIBLE] = min(needed[_FLEXIBLE], MIN_FLEXIBLE)
    kept = []
    for name in sorted(_COLUMNS, key=lambda name: -_COLUMNS[name]):
        is_empty = all(row[name] == "-" for row in rows)
        if name in _MAY_BE_EMPTY and is_empty:
            continue
        kept.append(name)
    while len(kept) > 1:
        total = sum(needed[name] for name in kept) + GAP * (len(kept) - 1)
        if total <= width:
            break
        kept.pop()
    return {name: needed[name] for name in _COLUMNS if name in kept}


def _compute_ratios(groups: Groups) -> dict[int, float]:
    """Return each training group's own seconds as a multiple of the other groups' median.

    `titan_ft.protocol.straggler` computes the same ratio to name a slow group.
    """
    own = {}
    for slot, group in groups.items():
        if group.own_seconds and group.state in (TRAINING, DRAINING):
            own[slot] = group.own_seconds
    ratios = {}
    for slot, seconds in own.items():
        others = [own[other] for other in own if other != slot]
        if others:
            ratios[slot] = seconds / median(others)
    return ratios


def format_number(value: float | None, form: str = "") -> str:
    """Return a number in a format, or a dash where it is not known."""
    return "-" if value is None else format(value, form)
