# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Heartbeats: which children of a rank do not answer its pings. No clock, no socket."""

from __future__ import annotations

import math

from titan_ft.protocol.control.link import START_SECONDS

PINGS = 5
"""Pings, and looks at the answers, in the time after which a child is silent."""

_LATE_SHARE = 1 / 3
"""Share of that time. A look that is later than this shows that this rank did not run.

A shorter freeze of the whole group goes unnoticed, and no healthy child may be silent after it. The
last answer is then as old as this delay and the time between two looks: 1/3 + 1/5 of the time after
which a child is silent. The rest is for the child to thaw."""


class HeartbeatWatch:
    """Times of the children's last answers.

    The tree's own thread calls it.

    Args:
        patience: seconds without an answer after which a child is silent; math.inf = it never is.

    Attributes:
        next_look: time of the next call of `look`; math.inf = nobody is watched.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._heard: dict[int, float] = {}  # time of the last answer, by child
        self._unmet: set[int] = set()  # children that have not answered yet
        self.next_look = math.inf

    def add(self, child: int, now: float) -> None:
        if not self._heard:
            self.next_look = now
        self._heard[child] = now
        self._unmet.add(child)

    def remove(self, child: int) -> None:
        self._heard.pop(child, None)
        self._unmet.discard(child)
        if not self._heard:
            self.next_look = math.inf

    def note_answer(self, child: int, now: float) -> None:
        self._heard[child] = now
        self._unmet.discard(child)

    def look(self, now: float) -> dict[int, float]:
        """Return the children that are silent, and for how many seconds each of them is.

        Call it at `next_look`, after the answers that have come are noted.
        """
        is_late = now - self.next_look > self._patience * _LATE_SHARE
        self.next_look = now + self._patience / PINGS
        if is_late:
            # This rank was frozen, or a call held Python's lock. A group that was frozen as a whole
            # thaws rank by rank. So every child gets the whole time again.
            self._heard = dict.fromkeys(self._heard, now)
        silent: dict[int, float] = {}
        for child, heard in self._heard.items():
            patience = self._patience
            if child in self._unmet:
                # Of thousands of connections that are made at once, some lose their first packets.
                patience = max(patience, START_SECONDS)
            if now - heard > patience:
                silent[child] = now - heard
        return silent
