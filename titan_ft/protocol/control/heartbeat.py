# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Heartbeats: which children of a rank in the control tree do not answer pings. No clock, no
socket.

`Pings` (membership/control_pings.py) pings the children, and notes their answers here. At regular
times it calls `look`, which returns the children without an answer for longer than the *patience*.
"""

from __future__ import annotations

import math

from titan_ft.protocol.control.link import START_SECONDS

PINGS = 5
"""Number of pings, and of looks, in the time of the patience."""

_LATE_SHARE = 1 / 3
"""If a look is late by more than this share of the patience, this rank did not run (a *freeze*).

After a shorter freeze of the whole group, which goes unnoticed, no healthy child may count as
silent. Its last answer is then as old as the freeze plus the time between two looks: 1/3 + 1/5 of
the patience. The rest of the patience is for the child to run again and answer."""


class HeartbeatWatch:
    """Finds silent children by the times of their last answers.

    The tree's own thread calls it.

    Args:
        patience: seconds without an answer after which a child is silent; math.inf = it never is.

    Attributes:
        next_look: time of the next call of `look`; math.inf = nobody is watched.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        # By child, the time of its last answer. Before its first answer, the time at which the
        # child was added.
        self._answered_at: dict[int, float] = {}
        self._unanswered: set[int] = set()  # children that have not answered yet
        self.next_look = math.inf

    def add(self, child: int, now: float) -> None:
        if not self._answered_at:
            self.next_look = now
        self._answered_at[child] = now
        self._unanswered.add(child)

    def remove(self, child: int) -> None:
        self._answered_at.pop(child, None)
        self._unanswered.discard(child)
        if not self._answered_at:
            self.next_look = math.inf

    def note_answer(self, child: int, now: float) -> None:
        self._answered_at[child] = now
        self._unanswered.discard(child)

    def look(self, now: float) -> dict[int, float]:
        """Return the seconds of silence of each silent child.

        Call it at `next_look`, after all answers that have arrived are noted.
        """
        is_late = now - self.next_look > self._patience * _LATE_SHARE
        self.next_look = now + self._patience / PINGS
        if is_late:
            # This rank was frozen, or a call held Python's lock. If the whole group was frozen, its
            # ranks run again one after the other. So give every child the whole patience again.
            self._answered_at = dict.fromkeys(self._answered_at, now)
        silent: dict[int, float] = {}
        for child, answered_at in self._answered_at.items():
            patience = self._patience
            if child in self._unanswered:
                # Of thousands of connections that are made at once, some lose their first packets.
                patience = max(patience, START_SECONDS)
            if now - answered_at > patience:
                silent[child] = now - answered_at
        return silent
