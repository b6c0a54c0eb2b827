# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The roll call: a thread of rank 0 that reports which other groups are lost, or back.

`protocol/roll.py` decides which groups are lost. See docs/failures.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping

from titan_ft.config import FaultTolerance
from titan_ft.protocol.roll import MIN_SILENCE_SECONDS, Back, Lost, Roll
from titan_ft.run.events import GroupBack, GroupLost
from titan_ft.run.log import EventLog

logger = logging.getLogger(__name__)

_MIN_PAUSE_SECONDS = MIN_SILENCE_SECONDS / 4
"""Pause between two checks in the `_NUM_FREQUENT` groups with the lowest slots. A loss is reported
late by no more than this."""
_NUM_FREQUENT = 4


class RollCall:
    """Checks every few seconds which other groups are lost, on a thread of its own.

    `training/links.py` creates it on rank 0 of each group. The training thread calls `commit` and
    `close`. A check that fails is logged and repeated.

    Args:
        find_ages: reads the lighthouse's status page. Returns, by slot, the seconds since each
            group's last heartbeat, and the Unix seconds at which its newest process started.
            Returns None if the lighthouse does not answer.
        find_left: returns the slots of groups that left in order. Returns None if this group is
            leaving: others may leave at the same time, and would be taken for lost.
    """

    def __init__(
        self,
        config: FaultTolerance,
        events: EventLog,
        find_ages: Callable[[], tuple[Mapping[int, float], Mapping[int, float]] | None],
        find_left: Callable[[], Collection[int] | None],
    ) -> None:
        self._events = events
        self._find_ages = find_ages
        self._find_left = find_left
        self._pause = _pause_seconds(config.replica_id)
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards the roll and the step, which both threads use
        self._roll = Roll(config.replica_id, config.heartbeat_timeout_ms / 1000)
        self._step = 0
        # Only the thread of the checks uses the fields below.
        self._last_check = time.monotonic()
        # True if at the last check this process knew the heartbeats of the other groups.
        self._could_hear = True
        self._has_failed = False  # True if the last check failed
        threading.Thread(target=self._run, name="titan_ft_roll_call", daemon=True).start()

    def commit(self, step: int, slots: Collection[int], num_steps: int = 1) -> None:
        """Note the groups that took part in update `step`.

        Args:
            num_steps: number of local steps in the update.
        """
        with self._lock:
            self._step = step
            self._roll.commit(step, slots, time.monotonic(), num_steps)

    def close(self) -> None:
        """Stop reporting, because all groups fall silent at the end of training."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._pause):
            try:
                self._check()
            except Exception:
                # The thread must continue. Otherwise no lost group would be reported any more.
                self._could_hear = False
                # Log one traceback for several failures in a row, not one every few seconds.
                if not self._has_failed:
                    logger.exception("cannot check which groups are lost; the check is repeated")
                self._has_failed = True
            else:
                self._has_failed = False

    def _check(self) -> None:
        """Report the groups that are lost, or back, since the last check."""
        heartbeats = self._find_ages()
        left = self._find_left()
        now = time.monotonic()
        was_frozen = now - self._last_check > 2 * self._pause
        self._last_check = now
        if was_frozen or heartbeats is None or left is None:
            self._could_hear = False
        if heartbeats is None or left is None:
            return
        ages, started = heartbeats
        with self._lock:
            # A process that was frozen, or had no answer from the lighthouse, could hear no group.
            # Without new clocks it would report every other group as lost.
            if not self._could_hear:
                self._roll.restart_clocks(now)
            changes = self._roll.find_changes(ages, left, now, started)
            step = self._step
        self._could_hear = True
        for change in changes:
            if not self._closed.is_set():
                self._report(change, step)

    def _report(self, change: Lost | Back, step: int) -> None:
        """Log a change and write its event.

        Args:
            step: committed updates of this group.
        """
        slot = change.slot
        seconds = change.seconds
        if isinstance(change, Back):
            logger.warning("group %d is back: it was silent for %.1f s", slot, seconds)
            self._events.emit(GroupBack(slot=slot, seconds=seconds, step=step))
            return
        last_step = change.last_step
        took_part = "" if last_step is None else f"; the last step it took part in is {last_step}"
        logger.warning("group %d is lost: no heartbeat for %.1f s%s", slot, seconds, took_part)
        self._events.emit(GroupLost(slot=slot, seconds=seconds, step=step, last_step=last_step))


def _pause_seconds(slot: int) -> float:
    """Return the pause of a group between two checks.

    Each check reads the status page, which has a line for each group. If all groups checked equally
    often, the traffic would grow with the square of their number. So only slots 0 to 3 check often.
    Slots 4 to 7 pause twice as long, slots 8 to 15 three times as long, and so on.
    """
    factor = 1 + (slot // _NUM_FREQUENT).bit_length()
    return _MIN_PAUSE_SECONDS * factor
