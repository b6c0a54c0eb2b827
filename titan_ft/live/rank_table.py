# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The ranks of a run, as their own events show them, and the table of them in `titan-ft top`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_ft.history.attempts import is_of_worker
from titan_ft.history.terminal import clock
from titan_ft.history.unit import STEP, Unit
from titan_ft.run import events as ev

if TYPE_CHECKING:
    from rich.text import Text

GAP = 2


@dataclass
class RankStatus:
    """What is known of one rank of a group, in the latest of its attempts."""

    group: int
    rank: int
    attempt: int = 0
    pid: int = 0
    host: str = ""
    unit: Unit = STEP
    step: int | None = None
    """Last step, or round, that it committed."""
    memory_bytes: int | None = None
    event: str = ""
    """Name of its last event."""
    time: float = 0.0
    """Unix seconds of that."""
    ended: str = ""
    """What ended its process; empty while it lives."""


class RanksSoFar:
    """The ranks of a run, from the events so far."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], RankStatus] = {}

    def observe(self, event: ev.Event) -> None:
        """Take the next event."""
        if isinstance(event, ev.WorkerExited):
            self._take_exit(event)
            return
        if event.replica is None or event.rank is None or not is_of_worker(event):
            return
        key, attempt = (event.replica, event.rank), event.attempt or 0
        rank = self.known.get(key)
        if rank is None or attempt > rank.attempt or isinstance(event, ev.WorkerStarted):
            rank = self.known[key] = RankStatus(*key, attempt, event.pid)
        if attempt < rank.attempt:
            return
        rank.event, rank.time = event.name, event.time
        match event:
            case ev.WorkerStarted():
                rank.host, rank.unit = event.node, Unit.of(event.config)
            case ev.StepCommitted():
                rank.step, rank.memory_bytes = event.step, event.memory_bytes

    def _take_exit(self, event: ev.WorkerExited) -> None:
        rank = self.known.get((event.replica, event.rank))
        if rank is not None and rank.attempt == event.attempt:
            rank.ended = event.cause or "ended"


def rank_lines(ranks: RanksSoFar, groups: Collection[int], now: float, max_rows: int) -> list[Text]:
    """Return the table of ranks as lines; of too many those that are behind or silent come first.

    Args:
        groups: those whose ranks are shown.
        now: Unix seconds.
        max_rows: lines at most, with the head; fewer than two leave the table out.
    """
    from rich.text import Text

    known = [rank for _, rank in sorted(ranks.known.items()) if rank.group in groups]
    if max_rows < 2 or not known:
        return []
    shown: Sequence[RankStatus] = known
    if len(known) > max_rows - 1:
        urgent = sorted(known, key=lambda rank: (not rank.ended, rank.step or -1, rank.time))
        chosen = {id(rank) for rank in urgent[: max_rows - 2]}
        shown = [rank for rank in known if id(rank) in chosen]
    rows = [("group", "rank", "step", "pid", "memory", "host", "last event"), *(_cells(rank, now) for rank in shown)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    left = (5, 6)
    lines = []
    for number, row in enumerate(rows):
        cells = [
            text.ljust(width) if place in left else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        style = "bold" if number == 0 else "red" if shown[number - 1].ended not in ("", "ended") else ""
        lines.append(Text((GAP * " ").join(cells).rstrip(), style=style, no_wrap=True))
    if len(shown) < len(known):
        lines.append(Text(f"and {len(known) - len(shown)} more ranks, not behind these", style="dim", no_wrap=True))
    return lines


def _cells(rank: RankStatus, now: float) -> tuple[str, ...]:
    step = "-" if rank.step is None else str(rank.unit.step_after(rank.step))
    memory = "-" if rank.memory_bytes is None else f"{rank.memory_bytes / 2**30:.1f} GiB"
    last = rank.ended if rank.ended else f"{rank.event} {clock(now - rank.time)} ago"
    return str(rank.group), str(rank.rank), step, str(rank.pid), memory, rank.host or "-", last
