# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Show the live status of a run: a table on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from titan_ft.live.group_table import group_table
from titan_ft.live.status import DRAINED, FINISHED, Groups, describe_progress, initial

if TYPE_CHECKING:
    from rich.console import RenderableType


class PlainView:
    """Print one line per change, and one on the progress every few seconds."""

    def __init__(self, progress_seconds: float = 5.0) -> None:
        self._progress_seconds = progress_seconds
        self._start = time.monotonic()
        self._next_progress = self._start
        self._last = ""

    def line(self, text: str) -> None:
        """Show one change."""
        print(f"[{time.monotonic() - self._start:7.1f} s] {text}", flush=True)

    def update(self, groups: Groups) -> None:
        """Show how far the run is, if that is due; called often."""
        now = time.monotonic()
        text = describe_progress(groups)
        ended = all(group.state in (FINISHED, DRAINED) for group in groups.values())
        if text is None or ended or text == self._last or now < self._next_progress:
            return
        self._last, self._next_progress = text, now + self._progress_seconds
        self.line(text)

    def close(self) -> None:
        """Nothing is left to show."""


class TableView:
    """Keep a table of the groups at the bottom of the terminal; changes scroll by above it."""

    def __init__(self, num_replicas: int) -> None:
        from rich.live import Live

        self._start = time.monotonic()
        self._live = Live(refresh_per_second=4)
        self.update(initial(num_replicas))
        self._live.start()

    def line(self, text: str) -> None:
        self._live.console.print(f"[{time.monotonic() - self._start:7.1f} s] {text}", markup=False, highlight=False)

    def update(self, groups: Groups) -> None:
        self._live.update(self._shown(groups))

    def close(self) -> None:
        self._live.stop()

    def _shown(self, groups: Groups) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        title = f"{time.monotonic() - self._start:.0f} s  {describe_progress(groups) or 'starting'}"
        return Group(Text(title, style="italic"), group_table(groups, time.time(), self._live.console.width))


def make_view(num_replicas: int) -> TableView | PlainView:
    """Return where the launcher shows what happens, by what stdout is."""
    return TableView(num_replicas) if sys.stdout.isatty() else PlainView()
