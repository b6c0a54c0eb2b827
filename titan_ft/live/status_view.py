# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The launcher's output: a table on a terminal, plain lines elsewhere, and a file of all lines."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from titan_ft.live.run_status import RunStatus
from titan_ft.live.top_view import Screen, frame
from titan_ft.run.appender import FileAppender


class PlainView:
    """Prints a line for each change, and every few seconds a line with the progress."""

    def __init__(self, progress_seconds: float = 5.0) -> None:
        self._progress_seconds = progress_seconds
        self._start = time.monotonic()
        self._next_progress = self._start
        self._shown = 0
        """Number of committed steps in the last line with the progress."""

    def line(self, text: str) -> None:
        """Show one change."""
        print(f"[{time.monotonic() - self._start:7.1f} s] {text}", flush=True)

    def update(self, run: RunStatus) -> None:
        """Print the progress if it is due: after some seconds, or once all groups have left."""
        now = time.monotonic()
        if run.step is None or run.fold.steps.num_committed == self._shown:
            return
        if now < self._next_progress and not run.all_left:
            return
        self._shown = run.fold.steps.num_committed
        self._next_progress = now + self._progress_seconds
        self.line(run.progress(time.time()) or "")

    def close(self) -> None:
        """Do nothing: every line has been printed already."""


class TableView:
    """Keeps the frame of `titan-ft top` at the bottom of the terminal; changes scroll above it."""

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
    """The launcher's lines: each is shown on the terminal, and appended with its date to a file.

    The launcher calls it from its main thread. The file outlives the terminal, and still says why
    a run ended. Lines with the progress are shown only: in weeks of training they would bury the
    other lines of the file.

    Args:
        run: status that the view shows.
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
        """Report a mistake of the user on stderr, in the form that every command uses."""
        self._append(f"mistake: {mistake}")
        print(f"titan-ft: {mistake}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Show a whole line, which the table would cut at the width. Only after `close`."""
        self._append(text)
        print(text, flush=True)

    def update(self, run: RunStatus) -> None:
        """Show the progress of the run; called often."""
        self._view.update(run)

    def close(self) -> None:
        """Stop updating the terminal; notes may follow."""
        self._view.close()

    def close_log(self) -> None:
        """Close the file without waiting: a full disk must not delay the end of the launcher."""
        self._log.close(0.0)

    def _append(self, text: str) -> None:
        self._log.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode(errors="replace"))
