# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""How long a group that heals has met no holder of the job's state.

After `decision.ALONE_SECONDS` without a holder, the job goes on from the latest state that is left.
See docs/heal.md, "When the holders die".
"""

from __future__ import annotations

import logging

from titan_ft.engine.round import Rounds
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.protocol.position import Position
from titan_ft.protocol.round import Round

logger = logging.getLogger(__name__)


class HolderWatch:
    """Measures the time since the last sign of a holder, by the group's clock.

    `Heal` calls it, on the training thread. All ranks of a group call the same methods in the same
    order. A round that breaks is no sign, and stops no clock.
    """

    def __init__(self, position: Position, rounds: Rounds, group: GroupCollectives) -> None:
        self._position = position
        self._rounds = rounds
        self._group = group
        # Time of the last sign; None = the last round had a holder.
        self._alone_since: float | None = None
        self._outsiders: list[int] = []  # slots of groups that lived outside of the last round

    def reset(self) -> None:
        """Forget the former heal."""
        self._alone_since = None
        self._outsiders = []
        self._position.set_alone_seconds(0.0)

    def look_for_holders(self, made: Round) -> None:
        """Look whether a round had a holder, and update the position's `alone_seconds`."""
        if made.verdict.holders:
            self._alone_since = None
            self._position.set_alone_seconds(0.0)
            return
        now = self._group.clock()
        # A group inside a long step is in no quorum before its end, and may be a holder. So any
        # living group outside of the quorum is a sign.
        if self._alone_since is None or any(self._group.gather(self._find_outsiders(made))):
            self._alone_since = now
        self._position.set_alone_seconds(now - self._alone_since)

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
