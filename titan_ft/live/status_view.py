# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Show the live status of a run: a table on a terminal, plain lines otherwise; and keep its lines in a file."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from titan_ft.live.run_status import RunStatus
from titan_ft.live.top_view import Screen, frame
from titan_ft.run.appender import FileAppender


class PlainView:
    """Print one line per change, and one on the progress every few seconds."""

    def __init__(self, progress_seconds: float = 5.0) -> None:
        self._progress_seconds = progress_seconds
        self._start = time.monotonic()
        self._next_progress = self._start
        self._shown = 0
        """Committed steps when the progress was shown last."""

    def line(self, text: str) -> None:
        """Show one change."""
        print(f"[{time.monotonic() - self._start:7.1f} s] {text}", flush=True)

    def update(self, run: RunStatus) -> None:
        """Show how far the run is, if that is due; called often. Once all groups have left, its last step is due."""
        now = time.monotonic()
        if run.step is None or run.fold.steps.num_committed == self._shown:
            return
        if now < self._next_progress and not run.all_left:
            return
        self._shown, self._next_progress = (
            run.fold.steps.num_committed,
            now + self._progress_seconds,
        )
        self.line(run.progress(time.time()) or "")

    def close(self) -> None:
        """Nothing is left to show."""


class TableView:
    """Keep what `titan-ft top` shows at the bottom of the terminal; changes scroll by above it."""

    def __init__(self, run: RunStatus) -> None:
        from rich.live import Live

        self._start = time.monotonic()
        self._live = Live(refresh_per_second=4)
        self.update(run)
        self._live.start()

    def line(self, text: str) -> None:
        self._live.console.print(
            f"[{time.monotonic() - self._start:7.1f} s] {text}", markup=False, highlight=False
        )

    def update(self, run: RunStatus) -> None:
        width, height = self._live.console.size
        screen = Screen(width, height, ascii_only=self._live.console.options.ascii_only)
        self._live.update(frame(run, "", time.time(), screen, history=False))

    def close(self) -> None:
        self._live.stop()


class LaunchView:
    """The launcher's lines: each is shown, and appended to a file with its date.

    A launcher's terminal may be gone when somebody asks why a run ended. The lines on the progress are shown only: in
    weeks of training they would bury the others.

    Args:
        run: what the view shows.
        log: the file; a full disk delays its lines, and does not end the launcher.
    """

    def __init__(self, run: RunStatus, log: Path) -> None:
        self._view = TableView(run) if sys.stdout.isatty() else PlainView()
        self._log = FileAppender(log)

    def line(self, text: str) -> None:
        """Show one change."""
        self._append(text)
        self._view.line(text)

    def error(self, text: str) -> None:
        """Report a failure on stderr."""
        self._append(f"error: {text}")
        print(f"titan-ft launch: {text}", file=sys.stderr, flush=True)

    def refuse(self, mistake: str) -> None:
        """Name a mistake of the user's on stderr, as every command does."""
        self._append(f"mistake: {mistake}")
        print(f"titan-ft: {mistake}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Show a line whole, which a terminal's width would cut; only after `close`."""
        self._append(text)
        print(text, flush=True)

    def update(self, run: RunStatus) -> None:
        """Show how far the run is; called often."""
        self._view.update(run)

    def close(self) -> None:
        """Stop updating the terminal; notes may follow."""
        self._view.close()

    def close_log(self) -> None:
        """Wait a moment for a file that cannot be written, and close it."""
        self._log.close(0.0)

    def _append(self, text: str) -> None:
        self._log.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode(errors="replace"))
