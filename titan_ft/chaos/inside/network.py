# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""An outage of a worker's network: packets of some of its connections are lost for some seconds."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager

from titan_ft.chaos.inside import blackhole
from titan_ft.chaos.inside.blackhole import Blackhole
from titan_ft.chaos.inside.task import Task

ACCEPT_SECONDS = 1.0
"""A connection that waited in its listener's queue has the filter too: filters are lifted again so much later."""


class Outages:
    """The outages of one worker, one at a time: one filter would replace the other.

    Args:
        closing: set when the worker's part in the run ends, which ends an outage.
    """

    def __init__(self, closing: threading.Event) -> None:
        self._closing, self._lock = closing, threading.Lock()

    def lose(
        self,
        task: Task,
        seconds: float,
        hole: Blackhole,
        rescan_seconds: float,
        meanwhile: AbstractContextManager[None],
    ) -> None:
        """Lose what the hole takes for so many seconds; on a thread of its own.

        Args:
            rescan_seconds: time until a new socket loses packets.
            meanwhile: entered for the time of the outage.
        """
        if not blackhole.supported():
            task.skip("this system has no socket filters; they are Linux's")
            return
        if not self._lock.acquire(blocking=False):
            task.skip("another fault of the network is not over yet")
            return
        try:
            if not task.begin():
                return
            ends = time.monotonic() + seconds
            try:
                with meanwhile:
                    while (rest := ends - time.monotonic()) > 0:
                        hole.extend()
                        if self._closing.wait(min(rescan_seconds, rest)):
                            break
            finally:
                hole.lift()
                task.undone()
            self._closing.wait(ACCEPT_SECONDS)
            hole.lift()
        finally:
            self._lock.release()
