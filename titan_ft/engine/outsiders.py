# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Groups that live and were not in a round.

A group inside a long step is in no quorum before the step's end, and it may hold the job's state.
So the groups in the quorum wait for it before they give that state up. See docs/heal.md, "When the
holders die".
"""

from __future__ import annotations

import logging

from titan_ft.engine.round import Rounds
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.protocol.round import Round

logger = logging.getLogger(__name__)


class OutsiderWatch:
    """Looks for living groups that were not in a round, and logs each set of them once.

    `ReplicaDimension` and `HolderWatch` have one each, and call it on the training thread.

    Args:
        message: the line to log, with one %s for the slots of these groups.
    """

    def __init__(self, rounds: Rounds, group: GroupCollectives, message: str) -> None:
        self._rounds = rounds
        self._group = group
        self._message = message
        self._last_slots: list[int] = []  # of the last look; only rank 0 of the group finds any

    def forget(self) -> None:
        """Forget the last look: the next one is logged even if it finds the same groups."""
        self._last_slots = []

    def has_any(self, made: Round) -> bool:
        """Return True if a living group was not in the round. A collective of the group."""
        slots = self._rounds.find_outsiders(made)
        if slots and slots != self._last_slots:
            logger.warning(self._message, slots)
        self._last_slots = slots
        return any(self._group.gather(len(slots)))
