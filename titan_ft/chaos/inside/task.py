# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""An order at one worker: the fault starts once or is skipped, and either outcome is an event."""

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
from titan_ft.system.ownership import no_follow

PATIENCE_SECONDS = 120.0
"""Longest wait for an occasion, such as a checkpoint or a heal, which may need a restart first."""


class Task:
    """An order at one worker. Threads may share it; only the first `try_start` succeeds.

    The agent's thread makes and expires it. The thread that the fault acts on calls `try_start`.

    Args:
        worker: slot of the group, and rank.
        claim: file whose creation decides which of several workers acts; None = this worker acts.
    """

    def __init__(
        self, order: Order, events: EventLog, worker: tuple[int, int], claim: Path | None
    ) -> None:
        self.order = order
        self._events = events
        self._claim = claim
        self._target = Target(*worker)
        self._deadline = time.monotonic() + PATIENCE_SECONDS
        self._on_settled: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.waits = True
        """True until the fault has started or was skipped."""

    def on_settled(self, restore: Callable[[], None]) -> None:
        """Call `restore` when the fault has started or was skipped."""
        self._on_settled.append(restore)

    def try_start(self, **facts: Any) -> bool:
        """Announce the fault and return True if it may act now.

        Returns False if it has started before, if another worker took the order, or if it was
        skipped.

        Args:
            facts: further fields of `FaultInjected`.
        """
        order = self.order
        params: dict[str, int | float | str] = {**order.params}
        return self._settle(
            FaultInjected(**self._header(), seed=order.seed, params=params, **facts)
        )

    def skip(self, reason: str) -> None:
        """Give the order up, unless the fault has started."""
        self._settle(FaultSkipped(**self._header(), reason=reason, seed=self.order.seed))

    def report_undone(self) -> None:
        """Report that the fault's effect is over."""
        self._events.emit(FaultUndone(**self._header()))

    def expire(self) -> None:
        """Give the order up if it has waited too long for an occasion."""
        if self.waits and time.monotonic() > self._deadline:
            self.skip(f"there was no occasion for it within {PATIENCE_SECONDS:g} s")

    def _header(self) -> dict[str, Any]:
        return {"fault": self.order.fault, "target": self._target, "shot": self.order.shot}

    def _settle(self, event: FaultInjected | FaultSkipped) -> bool:
        with self._lock:
            if not self.waits:
                return False
            self.waits = False
            is_ours = self._take_claim()
            if is_ours:
                self._events.emit(event)
        for restore in self._on_settled:
            restore()
        return is_ours

    def _take_claim(self) -> bool:
        """Create the claim; False if another worker has created it."""
        if self._claim is None:
            return True
        try:
            claim = no_follow(str(self._claim), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        os.close(claim)
        return True
