# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Count the signals that ask this process to stop, instead of dying of them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

_IN_WORDS = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "the end of its terminal (SIGHUP)"}


class StopRequests:
    """How often this process was asked to stop: once means in order, twice at once.

    Args:
        signums: the signals that ask for it; main thread only.
    """

    def __init__(self, *signums: signal.Signals) -> None:
        self.count = 0
        self.signum: signal.Signals | None = None
        """The first signal that came; None if there was none, or a plain call."""
        self.at_once: Callable[[], None] | None = None
        """Is called at each request, in the signal's handler; None while the requests are only counted."""
        self._before = {signum: signal.signal(signum, self) for signum in signums}

    def __call__(self, signum: int = 0, frame: FrameType | None = None) -> None:
        self.count += 1
        if signum and self.signum is None:
            self.signum = signal.Signals(signum)
        if self.at_once is not None:
            self.at_once()

    @property
    def status(self) -> int:
        """Exit status of a foreground command that was stopped, as a shell has it: 130 for Ctrl-C, 143 for SIGTERM."""
        return 0 if self.signum is None else 128 + self.signum

    @property
    def asked_by(self) -> str:
        """What stopped this process, in words."""
        if self.signum is None:
            return "this process itself"
        return _IN_WORDS.get(self.signum, self.signum.name)

    def __bool__(self) -> bool:
        return self.count > 0

    def impatient(self) -> bool:
        return self.count > 1

    def close(self) -> None:
        """Count no more: the signals do again what they did before."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
