# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Call the roll while this group trains, and announce which other groups are lost, or back (see `roll`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping

from titan_ft.config import FaultTolerance
from titan_ft.replica.roll import LEAST_SECONDS, Lost, Roll
from titan_ft.run.events import GroupBack, GroupLost
from titan_ft.run.log import EventLog

logger = logging.getLogger(__name__)

_CALLS = 4
"""Calls in the time after which a silent group is lost."""
_OFTEN = 4
"""Groups that read the lighthouse's page at each call; those above them read it seldom: it has a line a group."""


class RollCall:
    """Rank 0's watch over the other groups, from a thread of its own.

    Args:
        find_ages: returns the seconds since each group's last heartbeat, and the Unix seconds at which its newest
            process began; None while the lighthouse does not say.
        find_left: returns the groups that left in order; None while this group leaves itself: it sees others go.
    """

    def __init__(
        self,
        config: FaultTolerance,
        events: EventLog,
        find_ages: Callable[[], tuple[Mapping[int, float], Mapping[int, float]] | None],
        find_left: Callable[[], Collection[int] | None],
    ) -> None:
        self._events, self._find_ages, self._find_left = events, find_ages, find_left
        self._roll = Roll(config.replica_id, config.heartbeat_timeout_ms / 1000)
        self._step = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._pause = LEAST_SECONDS / _CALLS * (1 + (config.replica_id // _OFTEN).bit_length())
        threading.Thread(target=self._run, name="titan_ft_roll_call", daemon=True).start()

    def commit(self, step: int, slots: Collection[int], num_steps: int = 1) -> None:
        """Note the groups that took part in an update, which is one of `num_steps` steps; training thread."""
        with self._lock:
            self._step = step
            self._roll.commit(step, slots, time.monotonic(), num_steps)

    def close(self) -> None:
        """Call no more: the groups end, and are silent for good."""
        self._closed.set()

    def _run(self) -> None:
        missed = False
        called = time.monotonic()
        while not self._closed.wait(self._pause):
            known, left, now = self._find_ages(), self._find_left(), time.monotonic()
            # This process was frozen, or nobody answered: the others had no chance to be heard.
            missed = missed or now - called > 2 * self._pause
            called = now
            if known is None or left is None:
                missed = True
                continue
            with self._lock:
                if missed:
                    self._roll.begin_anew(now)
                missed = False
                ages, started = known
                found = self._roll.call(ages, left, now, started)
            for each in found:
                if not self._closed.is_set():
                    self._announce(each.slot, each.seconds, each)

    def _announce(self, slot: int, seconds: float, found: object) -> None:
        if isinstance(found, Lost):
            last = "" if found.last_step is None else f"; the last step it took part in is {found.last_step}"
            logger.warning("group %d is lost: no heartbeat for %.1f s%s", slot, seconds, last)
            self._events.emit(GroupLost(slot=slot, seconds=seconds, step=self._step, last_step=found.last_step))
        else:
            logger.warning("group %d is back: it was silent for %.1f s", slot, seconds)
            self._events.emit(GroupBack(slot=slot, seconds=seconds, step=self._step))
