# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Count the signals that ask this process to stop, instead of dying of them."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequests:
    """How often this process was asked to stop: once means in order, twice at once.

    Args:
        signums: the signals that ask for it; main thread only.
    """

    def __init__(self, *signums: signal.Signals) -> None:
        self.count = 0
        self._before = {signum: signal.signal(signum, self) for signum in signums}

    def __call__(self, signum: int = 0, frame: FrameType | None = None) -> None:
        self.count += 1

    def __bool__(self) -> bool:
        return self.count > 0

    def impatient(self) -> bool:
        return self.count > 1

    def close(self) -> None:
        """Count no more: the signals do again what they did before."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
