# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Show a run live in a terminal: `titan-ft top`."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from titan_ft.config import ConfigError, check_folder
from titan_ft.history.record.kept import follow
from titan_ft.live.run_status import RunStatus
from titan_ft.live.top_view import Screen, frame
from titan_ft.run.held import is_held
from titan_ft.run.paths import RunPaths

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

REFRESH_SECONDS = 0.5


class FollowedRun:
    """A run's status from its event files. `poll` brings it up to date.

    Raises:
        ConfigError: there is no such folder.
    """

    def __init__(self, run_dir: Path) -> None:
        check_folder("RUN_DIR", run_dir)
        self.run_dir = run_dir
        self.status = RunStatus()
        self._paths = RunPaths(run_dir)
        events, self._tail = follow(self._paths.events)
        for event in events:
            self.status.observe(event)

    def poll(self) -> RunStatus:
        """Take in the new events.

        Raises:
            ConfigError: the folder is gone.
        """
        for event in self._tail.poll():
            self.status.observe(event)
        self.status.observe_cut(self._tail.cut, time.monotonic())
        self.status.launcher_gone = self._launcher_is_gone()
        if not self.run_dir.is_dir():
            raise ConfigError(
                f"RUN_DIR must be the folder of a run, got {self.run_dir}; it has been removed"
            )
        return self.status

    def _launcher_is_gone(self) -> bool:
        """Return whether the launcher has ended without an event of its end."""
        if self.status.end or not self.status.fold.launched:
            return False
        # The lock alone proves nothing: some file systems show it only on the launcher's own host.
        return self.status.is_silent(time.time()) and is_held(self._paths) is False

    def render(self, screen: Screen) -> RenderableType:
        return frame(self.status, str(self.run_dir), time.time(), screen)


def top(run_dir: Path, *, once: bool = False) -> int:
    """Show a run until it is over, or until q or Ctrl-C; return 0.

    Without a terminal, or with `once`, the run is shown once. Ctrl-C raises KeyboardInterrupt,
    after the terminal has been restored.

    Raises:
        ConfigError: there is no such folder, or it was removed.
    """
    from rich.console import Console

    run = FollowedRun(run_dir)
    run.poll()
    console = Console(highlight=False, markup=False, emoji=False)
    live = console.is_terminal and not console.is_dumb_terminal and not once
    if not live and run.status.fold.first_event_time is None:
        # The job may have been submitted just now. A live view waits for its first event.
        print(f"{run_dir}: nothing has started yet (no events/*.jsonl)")
        return 0
    if live and not run.status.end and not _watch(run, console):
        return 0
    # Print on the ordinary screen, where the result stays.
    console.print(run.render(Screen(console.width, ascii_only=console.options.ascii_only)))
    return 0


def _watch(run: FollowedRun, console: Console) -> bool:
    """Show a run on a screen of its own; return True at its end, False if the user left."""
    from rich.live import Live

    with (
        _keys() as pressed,
        _end_in_order(),
        Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False) as live,
    ):
        ranks = explained = False
        while not run.poll().end:
            hint = "r ranks  ? columns  q leaves" if sys.stdin.isatty() else "Ctrl-C leaves"
            # Read the size each time: the user may have resized the window.
            screen = Screen(
                *console.size,
                ascii_only=console.options.ascii_only,
                hint=hint,
                ranks=ranks,
                help=explained,
            )
            live.update(run.render(screen), refresh=True)
            match pressed(REFRESH_SECONDS).lower():
                case "q":
                    return False
                case "r":
                    ranks = not ranks
                case "?" | "h":
                    explained = not explained
    return True


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits some seconds for a key, and returns the key or "".

    Inside the context the terminal sends single keys without echo. Afterwards it is restored.
    """
    if not sys.stdin.isatty():
        yield partial(_read_key, [])
        return
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    changed = termios.tcgetattr(descriptor)
    changed[3] &= ~(termios.ECHO | termios.ICANON)
    # Without this, Ctrl-Z would leave the shell on this screen with these settings.
    changed[6][termios.VSUSP] = b"\0"
    termios.tcsetattr(descriptor, termios.TCSADRAIN, changed)
    try:
        yield partial(_read_key, [descriptor])
    finally:
        termios.tcsetattr(descriptor, termios.TCSAFLUSH, before)


def _read_key(descriptors: list[int], seconds: float) -> str:
    ready, _, _ = select.select(descriptors, [], [], seconds)
    if not ready:
        return ""
    key = os.read(ready[0], 1)
    if not key:
        raise KeyboardInterrupt  # the terminal is gone
    return key.decode(errors="replace")


@contextlib.contextmanager
def _end_in_order() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit, so that the terminal is restored first."""

    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = {signum: signal.signal(signum, leave) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
