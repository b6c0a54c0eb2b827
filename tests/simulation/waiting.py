# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The reported waits of an exchange's members, compared with the virtual times of their arrivals.

The engine compares seconds of unrelated clocks. The simulation knows when each member really
arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_ft.engine.waits import GroupWait
from titan_ft.protocol.row import Why
from titan_ft.run.events import Waited

if TYPE_CHECKING:
    from tests.simulation.rank import Rank
    from titan_ft.protocol.round import Round

_SLACK = 0.05
"""Seconds that members may hear of one quorum apart, and that may pass between two pauses of a
rank.
"""


@dataclass(frozen=True)
class Arrival:
    """A member's arrival at an exchange, in virtual seconds.

    Attributes:
        began: time at which the member began to wait.
        asked: time of its quorum request.
        ready: time at which it was ready for the exchange.
        connecting: duration in which it only connected to the other members.
        joins: the member lacked the state.
    """

    began: float
    asked: float
    ready: float
    connecting: float
    joins: bool


class WaitJudge:
    """Records the arrivals at each exchange, and judges the reported waits.

    Args:
        report: called with promise and text if a reported wait is wrong.
        lag: largest delay of a thread of this world.
    """

    def __init__(self, report: Callable[[str, str], None], lag: float) -> None:
        self._report, self._slack = report, _SLACK + 10 * lag
        self._arrivals: dict[tuple[str, int, int], dict[int, Arrival]] = {}
        self._numbers = Counter[tuple[str, int, int]]()
        self.judged = Counter[Why]()
        """Waits that were judged, by their reason."""
        self.committed: list[tuple[int, Waited]] = []
        """What the groups said with their updates, each with its slot."""

    def comes(self, rank: Rank, key: str, arrival: Arrival) -> None:
        """Note when a rank arrived at an exchange in the quorum `key`."""
        number = self._numbers[key, rank.slot, rank.number]
        self._arrivals.setdefault((key, rank.number, number), {})[rank.slot] = arrival

    def judge(self, rank: Rank, made: Round, waits: Sequence[GroupWait]) -> None:
        """Compare a rank's reported waits in an exchange with the arrivals."""
        key = made.quorum.key
        number = self._numbers[key, rank.slot, rank.number]
        self._numbers[key, rank.slot, rank.number] += 1
        arrivals = self._arrivals.get((key, rank.number, number), {})
        if len(arrivals) < len(made.rows):
            return  # a member died before its arrival was noted
        own = arrivals[rank.slot]
        who = f"g{rank.slot} r{rank.number} in the exchange after step {rank.position.step}"
        charged = [
            (slot, why, seconds) for slot, why, seconds in waits if why not in (Why.LOST, Why.LEFT)
        ]
        for slot, why, seconds in charged:
            self.judged[why] += 1
            # The charged group asked, or arrived, this much later than this rank. A joiner is
            # compared with all groups that train as well.
            there = arrivals[slot]
            rest = [
                each
                for other, each in arrivals.items()
                if other != slot and why.joins and not each.joins
            ]
            later = max(there.asked - max([own.began, *(each.asked for each in rest)]), 0.0)
            later += max(there.ready - max([own.began, *(each.ready for each in rest)]), 0.0)
            if there.joins:  # for a joiner, all members make new connections
                later += own.connecting
            if seconds > later + self._slack:
                self._report(
                    "waits",
                    f"{who} waited {seconds:.3f} s for g{slot}, which came {later:.3f} s later",
                )
            if why.joins is not there.joins and why is not Why.CONNECTING:
                self._report("waits", f"{who} says that g{slot} was {why.name}")
        said = sum(seconds for _, _, seconds in charged)
        waited = max(each.ready for each in arrivals.values()) - own.ready
        if said < waited - self._slack:
            self._report("waits", f"{who} waited {waited:.3f} s for others and says {said:.3f} s")
        has_cause = len(charged) < len(waits) or any(each.joins for each in arrivals.values())
        said = sum(seconds for _, _, seconds in waits)
        # A group that heals forgets its waits.
        if has_cause and not own.joins and said < own.connecting - self._slack:
            self._report(
                "waits", f"{who} was connecting for {own.connecting:.3f} s and says {said:.3f} s"
            )
