# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""How long this group waited in the exchanges of an update, for whom and why.

Each row says how long before the quorum's answer its group had asked for it, how long after the answer the group was
ready for the exchange, and what the group did until then. The answer reaches all members at the same moment. So
every member knows from the rows who came last and by how much, without a common clock and without a message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from titan_ft.replica.member import Process
from titan_ft.replica.row import Row, Why
from titan_ft.run.events import Waited

LEAST_SECONDS = 0.01
"""Shorter waits are not reported."""

Wait = tuple[int, Why, float]
"""Slot, reason and seconds of a wait."""


def find_waits(rows: Sequence[Row], own: int, began: float, gone: Sequence[tuple[int, Why]] = ()) -> Iterator[Wait]:
    """Yield what the member of rank `own` waited for in an exchange that worked.

    Time in which a group that trains and a joiner are both awaited is charged to the group that trains: without the
    joiner the exchange would not have been over sooner.

    Args:
        began: when that member began to wait, seconds after the quorum's answer; negative if it was before.
        gone: slots that were in the exchange before and are not in this one, each with the reason.
    """
    # Where groups are gone the lighthouse waits for their heartbeats to end, whenever a joiner asks meanwhile.
    asked = [(-row.asked, row) for row in rows if not (gone and Why(row.doing).joins)]
    first = max(began, -rows[own].asked)
    yield from _charge(first, asked)
    rest = -max([first, *(time for time, _ in asked)])
    if rest > 0:
        yield from ((slot, why, rest / len(gone)) for slot, why in gone)
    for slot, why, seconds in _charge(max(began, rows[own].came), [(row.came, row) for row in rows]):
        connecting = any(row.connecting for row in rows if row.slot == slot)
        yield slot, Why.CONNECTING if connecting else why, seconds


def _charge(start: float, arrivals: Sequence[tuple[float, Row]]) -> Iterator[Wait]:
    """Charge the time from `start` to the last arrival to those that came last: one that trains, then a joiner."""
    for joins in (False, True):
        late = [(time, row) for time, row in arrivals if time > start and Why(row.doing).joins is joins]
        if late:
            last, row = max(late, key=lambda one: one[0])
            yield row.slot, Why(row.doing), last - start
            start = last


class WaitLog:
    """Adds up what this rank has waited for since its last update. Training thread only."""

    def __init__(self) -> None:
        self._seconds = defaultdict[tuple[int, Why], float](float)
        self._met: frozenset[Process] = frozenset()  # members of the last exchange that worked
        self._broken = defaultdict[Process, float](float)  # seconds in exchanges that broke since, by member
        self._held: tuple[Sequence[int], Why] | None = None
        self._since = 0.0  # when the wait of the last exchange began
        self._last: list[Wait] = []  # of the last exchange

    def begin(self, now: float) -> None:
        """Begin the wait of an exchange: this rank's part of it is there."""
        if self._held is not None:
            slots, why = self._held
            self._last = [(slot, why, (now - self._since) / len(slots)) for slot in slots]
        self._count_last()
        self._held, self._since = None, now

    def broke(self, members: Collection[Process], now: float) -> None:
        """Note an exchange that broke at `now`; the next one that works says which of its members were lost."""
        for process in members:
            self._broken[process] += now - self._since

    def made(
        self, rows: Sequence[Row], own: int, answered: float, members: Collection[Process], left: Collection[int]
    ) -> None:
        """Note an exchange that worked.

        Args:
            answered: when the lighthouse answered, by the clock of `begin`.
            left: slots that have left in order.
        """
        gone = {*self._met, *self._broken}.difference(members)
        reasons = [(slot, Why.LEFT if slot in left else Why.LOST, process) for process in gone for slot in process[:1]]
        self._last = list(find_waits(rows, own, self._since - answered, [(slot, why) for slot, why, _ in reasons]))
        self._last += [(slot, why, self._broken[process] / len(gone)) for slot, why, process in reasons]
        self._met = frozenset(members)
        self._broken.clear()

    def hold(self, slots: Sequence[int], why: Why) -> None:
        """Note that the update waits for `slots`: all of the time until the next exchange is for them."""
        self._held = (slots, why) if slots else None

    def drop(self) -> None:
        """Forget what was waited for: no update of this group follows from it."""
        self._seconds.clear()
        self._held, self._last = None, []

    def take(self) -> list[Waited]:
        """Return what was waited for until the update that is made now, the longest first; and begin anew."""
        self._count_last()
        found = [
            Waited(slot=slot, seconds=round(seconds, 4), why=why.name.lower())
            for (slot, why), seconds in self._seconds.items()
            if seconds >= LEAST_SECONDS
        ]
        found.sort(key=lambda wait: -wait.seconds)
        self.drop()
        return found

    def _count_last(self) -> None:
        for slot, why, seconds in self._last:
            self._seconds[slot, why] += seconds
        self._last = []
