# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""How long a group that heals has met no holder of the job's state.

After `decision.SIGN_TIMEOUT_SECONDS` without a holder, the job goes on from the latest state that
is left. See docs/heal.md, "When the holders die".
"""

from __future__ import annotations

from titan_ft.engine.outsiders import OutsiderWatch
from titan_ft.engine.round import Rounds
from titan_ft.membership.group_collectives import GroupCollectives
from titan_ft.protocol.position import Position
from titan_ft.protocol.round import Round

_WAITS_FOR_OUTSIDERS = (
    "no group in the quorum holds the job's state; waiting for groups %s, which live"
)


class HolderWatch:
    """Measures the time since the last sign of a holder, by the group's clock.

    `Heal` calls it, on the training thread. All ranks of a group call the same methods in the same
    order. A round that breaks is no sign, and stops no clock.
    """

    def __init__(self, position: Position, rounds: Rounds, group: GroupCollectives) -> None:
        self._position = position
        self._group = group
        self._outsiders = OutsiderWatch(rounds, group, _WAITS_FOR_OUTSIDERS)
        # Time of the last sign; None = the last round had a holder.
        self._last_sign_at: float | None = None

    def reset(self) -> None:
        """Begin to measure anew, at the start of a heal."""
        self._last_sign_at = None
        self._outsiders.forget()
        self._position.set_no_holder_seconds(0.0)

    def look_for_holders(self, made: Round) -> None:
        """Look whether a round had a holder, and update the position's `no_holder_seconds`."""
        if made.verdict.holders:
            self._last_sign_at = None
            self._position.set_no_holder_seconds(0.0)
            return
        now = self._group.clock()
        # A living group outside of the quorum may be a holder, so it is a sign.
        if self._last_sign_at is None or self._outsiders.has_any(made):
            self._last_sign_at = now
        self._position.set_no_holder_seconds(now - self._last_sign_at)
