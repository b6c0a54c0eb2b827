# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""How long this group waited for other groups in the exchanges of an update, for whom and why.

The lighthouse answers the quorum requests of all groups at the same moment. The row of each group
says how long before this answer the group asked, how long after the answer it was ready for the
exchange, and what it did meanwhile. From the rows, each group knows which group came last and by
how many seconds. No common clock and no further message is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from titan_ft.protocol.member import Process
from titan_ft.protocol.row import Row, Why
from titan_ft.run.events import Waited

MIN_WAIT_SECONDS = 0.01
"""A shorter wait is not reported."""

Wait = tuple[int, Why, float]
"""Slot of the awaited group, reason, and seconds."""


def find_waits(
    rows: Sequence[Row], own: int, began: float, connected: float, gone: Sequence[tuple[int, Why]] = ()
) -> Iterator[Wait]:
    """Yield the waits of this group in an exchange that succeeded.

    While a group that trains and a joiner are both awaited, the time is charged to the group that
    trains: the exchange would not have ended sooner without the joiner.

    The time in which all members connect to each other is charged in equal parts to the joiners and
    to the groups that are gone. It is charged to nobody where there are neither, as at the start of
    a job.

    Args:
        rows: the rows of all members. All times are seconds relative to the quorum's answer, and
            negative before it.
        own: index of this group's row.
        began: when this group began to wait.
        connected: when this rank was connected to the other members.
        gone: slots that took part in the exchange before and not in this one, with the reason.
    """
    # First the wait for the quorum: until every member has asked for it.
    requests = []
    for row in rows:
        # While groups are gone, the lighthouse waits for their heartbeats to stop. A joiner that
        # asks during that time delays nobody.
        if gone and Why(row.doing).joins:
            continue
        requests.append((-row.asked, row))
    quorum_wait_began = max(began, -rows[own].asked)
    yield from _charge(quorum_wait_began, requests)
    last_request = max([quorum_wait_began, *(time for time, _ in requests)])
    # From the last request on, the lighthouse waits only for groups that are gone.
    seconds_for_gone = -last_request
    if seconds_for_gone > 0:
        for slot, why in gone:
            yield slot, why, seconds_for_gone / len(gone)
    # Then the wait for new connections, which all members make because of those that came or went.
    connecting_seconds = connected - max(began, 0.0)
    if connecting_seconds > 0:
        causes = [*gone, *_find_joiners(rows)]
        for slot, why in causes:
            yield slot, why, connecting_seconds / len(causes)
    # Then the wait for the exchange: until every member is ready for it.
    arrivals = [(row.came, row) for row in rows]
    connecting = {row.slot for row in rows if row.connecting}
    for slot, why, seconds in _charge(max(began, rows[own].came), arrivals):
        yield slot, Why.CONNECTING if slot in connecting else why, seconds


def _find_joiners(rows: Sequence[Row]) -> list[tuple[int, Why]]:
    """Return the slot of each member that gets the state, and its reason."""
    joiners = []
    for row in rows:
        why = Why(row.doing)
        if why.joins:
            joiners.append((row.slot, why))
    return joiners


def _charge(start: float, arrivals: Sequence[tuple[float, Row]]) -> Iterator[Wait]:
    """Charge the time from `start` to the last arrival.

    The time until the last group that trains arrives is charged to that group. The time after it is
    charged to the last joiner.
    """
    for joins in (False, True):
        late = []
        for time, row in arrivals:
            if time > start and Why(row.doing).joins is joins:
                late.append((time, row))
        if late:
            last, row = max(late, key=lambda arrival: arrival[0])
            yield row.slot, Why(row.doing), last - start
            start = last


class WaitLog:
    """Adds up the waits of this rank since its last update. Training thread only."""

    def __init__(self) -> None:
        self._seconds = defaultdict[tuple[int, Why], float](float)
        """By awaited slot and reason, seconds since the last update."""
        self._last_members: frozenset[Process] = frozenset()
        """Members of the last exchange that succeeded."""
        self._broken = defaultdict[Process, float](float)
        """By member, seconds in the exchanges that broke since then."""
        self._held_back_for: tuple[Sequence[int], Why] | None = None
        """Slots for which the update is held back, and the reason; None if it is not held back."""
        self._began = 0.0
        """When the wait of the latest exchange began."""
        self._last_waits: list[Wait] = []
        """Waits of the latest exchange; added to `_seconds` later, or replaced if held back."""

    def start_wait(self, now: float) -> None:
        """Note that this rank is ready for an exchange."""
        if self._held_back_for is not None:
            # The update could not be made without these groups, so all of the time since the
            # exchange before is charged to them, and nothing to the member that came last.
            slots, why = self._held_back_for
            seconds = (now - self._began) / len(slots)
            self._last_waits = [(slot, why, seconds) for slot in slots]
        self._add_last_waits()
        self._held_back_for = None
        self._began = now

    def note_broken(self, members: Collection[Process], now: float) -> None:
        """Note that the exchange broke at `now`.

        Which member broke it is not known before the next exchange that succeeds: that member is
        not in it.
        """
        for process in members:
            self._broken[process] += now - self._began

    def note_success(
        self,
        rows: Sequence[Row],
        own: int,
        answered: float,
        ready: float,
        members: Collection[Process],
        left: Collection[int],
    ) -> None:
        """Note that the exchange succeeded.

        Args:
            rows: the rows of all members.
            own: index of this group's row.
            answered: when the lighthouse answered, by the clock of `start_wait`.
            ready: when this rank was connected to the other members, by the same clock.
            left: slots that have left in order.
        """
        gone = {*self._last_members, *self._broken}.difference(members)
        reasons = []
        broken_waits = []
        for process in gone:
            slot = process[0]
            why = Why.LEFT if slot in left else Why.LOST
            reasons.append((slot, why))
            broken_waits.append((slot, why, self._broken[process] / len(gone)))
        waits = find_waits(rows, own, self._began - answered, ready - answered, reasons)
        self._last_waits = [*waits, *broken_waits]
        self._last_members = frozenset(members)
        # Else the groups that are gone would be gone, and awaited, in each later exchange again.
        self._broken.clear()

    def note_held_back(self, slots: Sequence[int], why: Why) -> None:
        """Note that the update is held back for `slots`, from the last exchange to the next one."""
        self._held_back_for = (slots, why) if slots else None

    def discard(self) -> None:
        """Forget all waits: this group makes no update after them, because it heals."""
        self._seconds.clear()
        self._held_back_for = None
        self._last_waits = []

    def take_waits(self) -> list[Waited]:
        """Return the waits for the update that is made now, the longest first, and forget them."""
        self._add_last_waits()
        waits = []
        for (slot, why), seconds in self._seconds.items():
            if seconds >= MIN_WAIT_SECONDS:
                waits.append(Waited(slot=slot, seconds=round(seconds, 4), why=why.name.lower()))
        waits.sort(key=lambda wait: wait.seconds, reverse=True)
        self.discard()
        return waits

    def _add_last_waits(self) -> None:
        for slot, why, seconds in self._last_waits:
            self._seconds[slot, why] += seconds
        self._last_waits = []
