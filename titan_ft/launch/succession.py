# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Decide which of a job's lighthouses serves: the one that a file in the run's folder names.

A lighthouse writes its announcement into the file before it serves. A serving lighthouse that reads
another announcement there steps down. So only one lighthouse goes on if two write at once, or if a
slow lighthouse returns after a standby has taken its place. Groups take no new members from a
lighthouse that is no longer announced (`membership/seat.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from titan_ft.run.lighthouse import Announcement, answers

SILENT_SECONDS = 0.8
"""A standby takes the place of the announced lighthouse after this time without an answer."""
_ANSWER_SECONDS = 0.5
"""Time for one answer."""
_MAX_POLL_SECONDS = _ANSWER_SECONDS + 0.2
"""One poll adds at most this much silence.

A standby that was stopped or starved between two polls did not ask meanwhile. Without this limit it
would take the place of a healthy lighthouse.
"""


class Succession:
    """Decides when this lighthouse serves, and when it steps down.

    The lighthouse's main thread makes the object, and calls `poll` until it returns False.

    Args:
        path: the file.
        own: announcement of this lighthouse.
        standby: True if this lighthouse waits while the announced one answers; False if it
            announces itself at once.
        token: the run's shared secret.
        ask: returns whether a lighthouse answers.

    Attributes:
        serves: whether this lighthouse has announced itself.
        other: the announced lighthouse, if it is another one; None if none is known.
    """

    def __init__(
        self,
        path: Path,
        own: Announcement,
        *,
        standby: bool,
        token: str = "",
        ask: Callable[[str, str, float], bool] = answers,
    ) -> None:
        self._path = path
        self._own = own
        self._standby = standby
        self._token = token
        self._ask = ask
        self._last_poll = time.monotonic()
        self._silent_seconds = 0.0
        """Time since the other lighthouse last answered or announced itself."""
        self.serves = False
        self.other: Announcement | None = None

    def poll(self) -> bool:
        """Read the file once, and announce this lighthouse if the place is free.

        Returns:
            False if another lighthouse has taken the place of this one, which must step down.

        Raises:
            OSError: the file cannot be written.
        """
        announced = Announcement.read(self._path)
        if self.serves:
            self.other = None
            if announced is not None and announced.id != self._own.id:
                self.other = announced
            return self.other is None
        is_alive = False
        if announced is not None:
            # A lighthouse that has just announced itself may not answer yet.
            is_alive = self.other is None or self.other.id != announced.id
            # Kept if the file cannot be read for a moment: the lighthouse may be healthy.
            self.other = announced
        if self._standby and self.other is not None:
            # An announcement at this address is of an earlier process, which started anew as this
            # one. This lighthouse must not wait for itself.
            is_own_address = self.other.address == self._own.address
            if not is_own_address and self._ask(self.other.address, self._token, _ANSWER_SECONDS):
                is_alive = True
        now = time.monotonic()
        if is_alive:
            self._silent_seconds = 0.0
        else:
            self._silent_seconds += min(now - self._last_poll, _MAX_POLL_SECONDS)
        self._last_poll = now
        if not self._standby or self._silent_seconds >= SILENT_SECONDS:
            self._own.write(self._path)
            self.serves = True
            self.other = None
        return True
