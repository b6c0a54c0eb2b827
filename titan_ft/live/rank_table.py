# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The table of a run's ranks in `titan-ft top`; `top_view` calls it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from titan_ft.history.fold.group import GroupFold, RankFold
from titan_ft.history.fold.unit import Unit
from titan_ft.history.terminal import format_clock

if TYPE_CHECKING:
    from rich.text import Text

GAP = 2
"""Blanks between two columns."""
_HEAD = ("group", "rank", "step", "pid", "memory", "host", "last event")
_LEFT = ("host", "last event")
"""Columns of text; numbers are aligned to the right."""


class _GroupRank(NamedTuple):
    """A rank of a group, by its events so far."""

    slot: int
    fold: RankFold


def make_rank_lines(
    groups: Iterable[GroupFold], unit: Unit, now: float, max_rows: int
) -> list[Text]:
    """Return the table of ranks as lines. If there are too many ranks, the latest are left out.

    Args:
        groups: groups whose ranks are shown.
        unit: converts updates to torchtitan's steps.
        now: Unix seconds.
        max_rows: maximum number of lines, with the head; fewer than two leave the table out.
    """
    known = []
    for group in groups:
        for _, fold in sorted(group.ranks.items()):
            known.append(_GroupRank(group.slot, fold))
    if max_rows < 2 or not known:
        return []
    shown = _choose(known, max_rows)
    rows: list[tuple[str, ...]] = [_HEAD]
    rows += [_make_cells(rank, unit, now) for rank in shown]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [_make_line(_HEAD, widths, "bold")]
    for rank, row in zip(shown, rows[1:], strict=True):
        # "ended" alone is an end in order.
        has_failed = rank.fold.ended not in ("", "ended")
        lines.append(_make_line(row, widths, "red" if has_failed else ""))
    num_hidden = len(known) - len(shown)
    if num_hidden:
        text = f"and {num_hidden} more ranks, not behind these"
        lines.append(_make_text(text, "dim"))
    return lines


def _choose(known: Sequence[_GroupRank], max_rows: int) -> Sequence[_GroupRank]:
    """Return the ranks that get a row: all, or the ones that ended, lag or are silent first."""
    if len(known) < max_rows:
        return known
    urgent = sorted(known, key=_urgency)
    # The head and the line about the hidden ranks need two of the lines.
    chosen = {(rank.slot, rank.fold.rank) for rank in urgent[: max_rows - 2]}
    return [rank for rank in known if (rank.slot, rank.fold.rank) in chosen]


def _urgency(rank: _GroupRank) -> tuple[bool, int, float]:
    """Return the sort key by which the ranks that need attention come first."""
    step = rank.fold.step or -1
    return not rank.fold.ended, step, rank.fold.last.time


def _make_cells(rank: _GroupRank, unit: Unit, now: float) -> tuple[str, ...]:
    fold = rank.fold
    step = "-"
    if fold.step is not None:
        step = str(unit.step_after(fold.step))
    memory = "-"
    if fold.memory_bytes is not None:
        memory = f"{fold.memory_bytes / 2**30:.1f} GiB"
    last = fold.ended
    if not last:
        last = f"{fold.last.name} {format_clock(now - fold.last.time)} ago"
    host = fold.host or "-"
    return str(rank.slot), str(fold.rank), step, str(fold.pid), memory, host, last


def _make_line(row: Sequence[str], widths: Sequence[int], style: str) -> Text:
    cells = []
    for name, text, width in zip(_HEAD, row, widths, strict=True):
        cells.append(text.ljust(width) if name in _LEFT else text.rjust(width))
    return _make_text((GAP * " ").join(cells).rstrip(), style)


def _make_text(text: str, style: str) -> Text:
    from rich.text import Text

    return Text(text, style=style, no_wrap=True)
