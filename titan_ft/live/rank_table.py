# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The table of a run's ranks in `titan-ft top`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from titan_ft.history.fold.group import GroupFold, RankFold
from titan_ft.history.fold.unit import Unit
from titan_ft.history.terminal import clock

if TYPE_CHECKING:
    from rich.text import Text

GAP = 2


def rank_lines(groups: Iterable[GroupFold], unit: Unit, now: float, max_rows: int) -> list[Text]:
    """Return the table of ranks as lines; if there are too many, late and silent ranks come first.

    Args:
        groups: the groups whose ranks are shown.
        unit: converts updates to torchtitan's steps.
        now: Unix seconds.
        max_rows: maximum number of lines, with the head; fewer than two leave the table out.
    """
    from rich.text import Text

    known = [(group.slot, rank) for group in groups for _, rank in sorted(group.ranks.items())]
    if max_rows < 2 or not known:
        return []
    shown: Sequence[tuple[int, RankFold]] = known
    if len(known) > max_rows - 1:
        urgent = sorted(
            known, key=lambda row: (not row[1].ended, row[1].step or -1, row[1].last.time)
        )
        chosen = {(slot, rank.rank) for slot, rank in urgent[: max_rows - 2]}
        shown = [(slot, rank) for slot, rank in known if (slot, rank.rank) in chosen]
    rows = [
        ("group", "rank", "step", "pid", "memory", "host", "last event"),
        *(_cells(*row, unit, now) for row in shown),
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    left = (5, 6)
    lines = []
    for number, row in enumerate(rows):
        cells = [
            text.ljust(width) if place in left else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        style = (
            "bold"
            if number == 0
            else "red"
            if shown[number - 1][1].ended not in ("", "ended")
            else ""
        )
        lines.append(Text((GAP * " ").join(cells).rstrip(), style=style, no_wrap=True))
    if len(shown) < len(known):
        lines.append(
            Text(
                f"and {len(known) - len(shown)} more ranks, not behind these",
                style="dim",
                no_wrap=True,
            )
        )
    return lines


def _cells(slot: int, rank: RankFold, unit: Unit, now: float) -> tuple[str, ...]:
    step = "-" if rank.step is None else str(unit.step_after(rank.step))
    memory = "-" if rank.memory_bytes is None else f"{rank.memory_bytes / 2**30:.1f} GiB"
    last = rank.ended if rank.ended else f"{rank.last.name} {clock(now - rank.last.time)} ago"
    return str(slot), str(rank.rank), step, str(rank.pid), memory, rank.host or "-", last
