# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Signals that ask a foreground command to stop: they are counted instead of ending the process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

_IN_WORDS = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "the end of its terminal (SIGHUP)"}


class StopRequests:
    """Counts the requests to stop. One request means to end in order, two mean to end at once.

    The main thread creates it. Signal handlers run on the main thread as well.

    Args:
        signums: the signals that count as requests.
    """

    def __init__(self, *signums: signal.Signals) -> None:
        self.count = 0
        self.signum: signal.Signals | None = None
        """The first signal; None if there was none, or if only this process made requests."""
        self.on_request: Callable[[], None] | None = None
        """Called at each request, in the signal's handler; None = requests are only counted."""
        self._former_handlers = {signum: signal.signal(signum, self) for signum in signums}

    def __call__(self, signum: int = 0, frame: FrameType | None = None) -> None:
        self.count += 1
        if signum and self.signum is None:
            self.signum = signal.Signals(signum)
        if self.on_request is not None:
            self.on_request()

    @property
    def status(self) -> int:
        """Exit status by the shell's rule: 130 for Ctrl-C, 143 for SIGTERM; 0 without a signal."""
        if self.signum is None:
            return 0
        return 128 + self.signum

    @property
    def asked_by(self) -> str:
        """Reason of the stop, for people."""
        if self.signum is None:
            return "this process itself"
        return _IN_WORDS.get(self.signum, self.signum.name)

    def __bool__(self) -> bool:
        return self.count > 0

    def must_end_at_once(self) -> bool:
        """True after the second request."""
        return self.count > 1

    def close(self) -> None:
        """Restore the former handlers of the signals."""
        for signum, handler in self._former_handlers.items():
            signal.signal(signum, handler)
