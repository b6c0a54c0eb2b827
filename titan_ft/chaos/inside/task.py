# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""An order in the hands of one worker: it begins once or is skipped, and every outcome is an event."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_ft.chaos.orders import Order
from titan_ft.run.events import FaultInjected, FaultSkipped, FaultUndone, Target
from titan_ft.run.log import EventLog

PATIENCE_SECONDS = 120.0
"""How long a fault waits for its occasion, such as a transfer or a checkpoint; a heal may take a restart to come."""


class Task:
    """What one worker makes of an order. Threads may share it; only the first `begin` succeeds.

    Args:
        worker: replica and rank.
        claim: file whose creation decides which of several workers acts; None = this one does.
    """

    def __init__(self, order: Order, events: EventLog, worker: tuple[int, int], claim: Path | None) -> None:
        self.order = order
        self._events, self._claim = events, claim
        self._target = Target(*worker)
        self._deadline = time.monotonic() + PATIENCE_SECONDS
        self._restore: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.waits = True
        """Whether it has neither begun nor been skipped."""

    def at_end(self, restore: Callable[[], None]) -> None:
        """Call `restore` when it waits no more."""
        self._restore.append(restore)

    def begin(self, **facts: Any) -> bool:
        """Say whether to act now, and announce it; false if it has begun before, or elsewhere, or is over.

        Args:
            facts: further fields of `FaultInjected`.
        """
        order = self.order
        return self._end_wait(FaultInjected(**self._header(), seed=order.seed, params={**order.params}, **facts))

    def skip(self, reason: str) -> None:
        """Give it up before it began."""
        self._end_wait(FaultSkipped(**self._header(), reason=reason, seed=self.order.seed))

    def undone(self) -> None:
        """Announce that its effect is over."""
        self._events.emit(FaultUndone(**self._header()))

    def expire(self) -> None:
        """Give it up when there was no occasion for too long."""
        if self.waits and time.monotonic() > self._deadline:
            self.skip(f"there was no occasion for it within {PATIENCE_SECONDS:g} s")

    def _header(self) -> dict[str, Any]:
        return {"fault": self.order.fault, "target": self._target, "shot": self.order.shot}

    def _end_wait(self, event: FaultInjected | FaultSkipped) -> bool:
        with self._lock:
            if not self.waits:
                return False
            self.waits = False
            mine = self._take()
            if mine:
                self._events.emit(event)
        for restore in self._restore:
            restore()
        return mine

    def _take(self) -> bool:
        """Be the first to create the claim."""
        if self._claim is None:
            return True
        try:
            os.close(os.open(self._claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        except FileExistsError:
            return False
        return True
