# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""How long a group that heals has seen no holder of the job's state. After a while, older states
count.

See docs/heal.md.
"""

from __future__ import annotations

import logging

from titan_ft.engine.round import Rounds
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.protocol.position import Position
from titan_ft.protocol.round import Round

logger = logging.getLogger(__name__)


class Lookout:
    """Measures the time without a holder in sight, by the group's clock.

    `Heal` calls it, on the training thread. All ranks of a group call the same methods in the same
    order.
    """

    def __init__(self, position: Position, rounds: Rounds, group: GroupCollectives) -> None:
        self._position = position
        self._rounds = rounds
        self._group = group
        self._alone_since: float | None = None  # None = a holder is in sight
        self._outsiders: list[int] = []  # slots of groups that lived outside of the last round

    def reset(self) -> None:
        """Forget the former heal."""
        self._alone_since = None
        self._outsiders = []
        self._position.note_alone(0.0)

    def note(self, made: Round) -> None:
        """Take in a round."""
        if made.verdict.holders:
            self._alone_since = None
            self._position.note_alone(0.0)
            return
        now = self._group.clock()
        # A holder inside a long step is in no quorum until the step is made. So the time starts
        # again as long as a group lives outside of the quorum.
        if self._alone_since is None or any(self._group.gather(self._find_outsiders(made))):
            self._alone_since = now
        self._position.note_alone(now - self._alone_since)

    def _find_outsiders(self, made: Round) -> int:
        """Return how many groups live and are not in the quorum, as rank 0 sees it.

        Logs each set of such groups once.
        """
        slots = self._rounds.find_outsiders(made)
        if slots and slots != self._outsiders:
            logger.warning(
                "no group in the quorum holds the job's state; waiting for groups %s, which live",
                slots,
            )
        self._outsiders = slots
        return len(slots)
