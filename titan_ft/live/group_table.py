# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The table of a run's groups, for the launcher's terminal and for `titan-ft top`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from titan_ft.history.terminal import clock
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
# Heading, and how much it matters: the least important columns go first where the width does not do
# for all.
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
EXPLAINED = {
    "group": "number of the replica group",
    "state": (
        "training; waiting (for other groups); recovering (it fetches the state from another group); starting; lost "
        "(not heard of: dead, or its host is); died (about to be restarted); failed (not started again); leaving, left "
        "(asked to); finished; stopped (by the launcher or its agent)"
    ),
    "step": "last step that it committed",
    "own loss": "mean loss of its own tokens in that step",
    "own s": "seconds of that step without the exchange: computing and updating",
    "x others": "own s, as a multiple of the other groups' median; yellow: slow",
    "restarts": "how often it was started again in this launch",
    "donor": "group that it fetched the state from last",
    "attempt": "number of its start, from 0; logs are in logs/replica-GROUP/attempt-ATTEMPT",
    "host": "host of its rank 0",
    "waits for": "group that it waited for longest in its last step, or waits for now; how long; what that group did",
    "last fault": "fault that was injected into it last, and how long ago",
}
"""What each column says, for whoever presses `?`."""
_LEFT = ("state", "host", "waits for", "last fault")
_FLEXIBLE = "last fault"
MIN_FLEXIBLE = 16
"""Least width of the last column, which takes what is left."""
GAP = 2


def group_table(
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

    ratios = _ratios(groups)
    shown = list(groups.values()) if shown is None else shown
    cells = [_cells(group, ratios.get(group.replica), now) for group in shown]
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold underline")
    names = _fitting(cells, width)
    for name, least in names.items():
        cut, side = ("crop" if ascii_only else "ellipsis"), ("left" if name in _LEFT else "right")
        table.add_column(name, justify=side, no_wrap=True, overflow=cut, min_width=least)  # type: ignore[arg-type]
    for group, row in zip(shown, cells, strict=True):
        slow = ratios.get(group.replica, 0.0) > straggler.FACTOR
        styles = {
            "state": "yellow" if shown_state(group) == "waiting" else COLORS.get(group.state, ""),
            "x others": "yellow" if slow else "",
        }
        table.add_row(*(Text(row[name], style=styles.get(name, "")) for name in names))
    return table


def _cells(group: GroupStatus, ratio: float | None, now: float) -> dict[str, str]:
    own_loss = group.own_loss if group.own_loss is not None else group.loss
    step = None if group.step is None else group.unit.step_after(group.step)
    # The age is never cut off.
    fault = f"-{clock(now - group.fault_time)} {group.fault}" if group.fault else "-"
    return {
        "group": str(group.replica),
        "state": shown_state(group),
        "step": number(step),
        "own loss": number(own_loss, ".4f"),
        "own s": number(group.own_seconds, ".3f"),
        "x others": number(ratio, ".2f"),
        "restarts": str(group.restarts),
        "donor": number(group.donor),
        "attempt": str(group.attempt),
        "host": group.host or "-",
        "waits for": _waits_for(group),
        "last fault": fault,
    }


def shown_state(group: GroupStatus) -> str:
    """Return the state in words: of a lost group, since when."""
    if group.state == LOST and group.step is not None:
        return f"lost since {group.unit.name(group.step)}"
    if group.state == TRAINING and group.waited is not None and not group.waited.seconds:
        return "waiting"  # the step under way cannot be committed
    return SHOWN.get(group.state, group.state)


def _waits_for(group: GroupStatus) -> str:
    """Return the group that a group waited for in its last step, or waits for now."""
    if group.waited is None or group.state not in (JOINED, TRAINING, DRAINING):
        return "-"
    waited = group.waited
    seconds = f" {waited.seconds:.2f} s" if waited.seconds else ""
    return f"{waited.slot}{seconds} {waited.why.replace('_', ' ')}"


def _fitting(cells: Sequence[dict[str, str]], width: int) -> dict[str, int]:
    """Return the columns that fit, in order, with their widths; the flexible one may be narrower
    than its text.
    """
    needed = {name: max([len(name), *(len(row[name]) for row in cells)]) for name in _COLUMNS}
    needed[_FLEXIBLE] = min(needed[_FLEXIBLE], MIN_FLEXIBLE)
    # A column in which no group has anything would only take room.
    empty = {
        name
        for name in ("waits for", "donor", "last fault")
        if all(row[name] == "-" for row in cells)
    }
    kept = sorted(_COLUMNS.keys() - empty, key=lambda name: -_COLUMNS[name])
    while len(kept) > 1 and sum(needed[name] + GAP for name in kept) - GAP > width:
        kept.pop()
    return {name: needed[name] for name in _COLUMNS if name in kept}


def _ratios(groups: Groups) -> dict[int, float]:
    """Return each training group's own seconds of its last step / median of the others', as for
    stragglers.
    """
    own = {
        r: g.own_seconds
        for r, g in groups.items()
        if g.own_seconds and g.state in (TRAINING, DRAINING)
    }
    others = {replica: [own[other] for other in own if other != replica] for replica in own}
    return {replica: own[replica] / median(values) for replica, values in others.items() if values}


def number(value: float | None, form: str = "") -> str:
    """Return a number in a format, or a dash where it is not known."""
    return "-" if value is None else format(value, form)
