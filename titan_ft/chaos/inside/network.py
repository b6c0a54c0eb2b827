# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""An outage of a worker's network: packets of some connections are lost for some seconds."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager

from titan_ft.chaos.inside import blackhole
from titan_ft.chaos.inside.blackhole import Blackhole
from titan_ft.chaos.inside.task import Task

ACCEPT_SECONDS = 1.0
"""Time from the first removal of the filters to the second.

A connection that waits in its listener's queue inherits the filter. It has no descriptor yet, so
the first removal cannot reach it.
"""


class Outages:
    """The outages of one worker, one at a time, because a second filter would replace the first.

    `run` runs on a thread of each fault. `wait_until_over` runs on the thread that closes the chaos
    agent. After `run` no socket of the process has a filter, whatever the outage raised.

    Args:
        closing: set when the worker leaves the run; ends an outage early.
    """

    def __init__(self, closing: threading.Event) -> None:
        self._closing = closing
        self._one_at_a_time = threading.Lock()

    def run(
        self,
        task: Task,
        seconds: float,
        hole: Blackhole,
        rescan_seconds: float,
        while_lost: AbstractContextManager[None],
    ) -> None:
        """Lose the packets that `hole` takes for `seconds`; blocks.

        Args:
            rescan_seconds: longest time until a new socket loses packets.
            while_lost: entered for the time of the outage.
        """
        if not blackhole.supported():
            task.skip("this system has no socket filters; they are Linux's")
            return
        if not self._one_at_a_time.acquire(blocking=False):
            task.skip("another fault of the network is not over yet")
            return
        try:
            if task.try_start():
                self._lose_packets(task, seconds, hole, rescan_seconds, while_lost)
        finally:
            self._one_at_a_time.release()

    def wait_until_over(self) -> None:
        """Wait for an outage to end; set `closing` first.

        A removal of filters covers all sockets of the process. One that came late would also remove
        the filters of the outage after it.
        """
        with self._one_at_a_time:
            pass

    def _lose_packets(
        self,
        task: Task,
        seconds: float,
        hole: Blackhole,
        rescan_seconds: float,
        while_lost: AbstractContextManager[None],
    ) -> None:
        ends = time.monotonic() + seconds
        try:
            with while_lost:
                while True:
                    seconds_left = ends - time.monotonic()
                    if seconds_left <= 0:
                        break
                    hole.extend()
                    if self._closing.wait(min(rescan_seconds, seconds_left)):
                        break
        finally:
            hole.lift()
            task.report_undone()
        self._closing.wait(ACCEPT_SECONDS)
        hole.lift()
