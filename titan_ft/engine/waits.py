# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Report how long this group waited for others before an update, for which group, and why.

An update may take several exchanges: one breaks, or the update is held back after it.

In an exchange, each group sends a row of facts about itself (`protocol/row.py`). The lighthouse
answers the quorum requests of all groups at the same moment. The row says how long before this
answer the group asked, how long after the answer it was ready for the exchange, and its activity
until then. From the rows, each group knows which group came last and by how many seconds. No common
clock and no further message is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from titan_ft.protocol.member import GroupProcess
from titan_ft.protocol.row import Row, Why
from titan_ft.run.events import Waited

MIN_WAIT_SECONDS = 0.01
"""A shorter wait is not reported."""


class GroupWait(NamedTuple):
    """How long this rank waited for one group, and why."""

    slot: int
    why: Why
    seconds: float


def find_waits(
    rows: Sequence[Row],
    own: int,
    began: float,
    connected: float,
    gone: Sequence[tuple[int, Why]] = (),
) -> Iterator[GroupWait]:
    """Yield the waits of this rank in an exchange that succeeded.

    The waits are charged in the order of time:

    1. The wait for the quorum, until every member has asked for it. After that the lighthouse waits
       only for the heartbeats of groups that are gone.
    2. The wait for new connections. It is charged in equal parts to the joiners and to the groups
       that are gone. Without any of them, as at the start of a job, it is charged to nobody.
    3. The wait for the exchange, until every member is ready for it.

    While this rank waits for both a group that trains and a joiner, the time is charged to the
    group that trains: without the joiner, the wait would have been as long.

    Args:
        rows: the rows of all members.
        own: index of this group's row.
        began: when this rank began to wait, in seconds after the lighthouse's answer; negative =
            before the answer.
        connected: when this rank was connected to the other members, in seconds after the answer.
        gone: slot and reason of each group that is missing here and was in the last exchange that
            succeeded, or in one that broke since then.
    """
    # First the wait for the quorum: until every member has asked for it.
    requests = []
    for row in rows:
        # With groups that are gone, the lighthouse answers when the last of their heartbeats is too
        # old. A joiner that asks until then delays nobody.
        if gone and row.reason.joins:
            continue
        requests.append((-row.asked_before_seconds, row))
    # This rank waits for the quorum once it is ready and its group has asked.
    quorum_wait_began = max(began, -rows[own].asked_before_seconds)
    yield from _charge(quorum_wait_began, requests)
    last_request = max([quorum_wait_began, *(time for time, _ in requests)])
    # From the last request on, the lighthouse waits only for groups that are gone.
    seconds_for_gone = -last_request
    if seconds_for_gone > 0:
        for slot, why in gone:
            yield GroupWait(slot, why, seconds_for_gone / len(gone))
    # Then the wait for new connections. All members make them, from the answer on, because groups
    # joined or are gone.
    connecting_began = max(began, 0.0)
    connecting_seconds = connected - connecting_began
    if connecting_seconds > 0:
        causes = [*gone, *_find_joiners(rows)]
        for slot, why in causes:
            yield GroupWait(slot, why, connecting_seconds / len(causes))
    # Then the wait for the exchange: until every member is ready for it. This rank was ready once
    # its gradients were there and the ranks of its group were connected.
    own_ready = max(began, rows[own].ready_after_seconds)
    arrivals = [(row.ready_after_seconds, row) for row in rows]
    # A group that was last because it connected longer is not charged for its activity before.
    connecting = {row.slot for row in rows if row.connecting}
    for wait in _charge(own_ready, arrivals):
        if wait.slot in connecting:
            wait = wait._replace(why=Why.CONNECTING)
        yield wait


def _find_joiners(rows: Sequence[Row]) -> list[tuple[int, Why]]:
    """Return slot and reason of every joiner."""
    return [(row.slot, row.reason) for row in rows if row.reason.joins]


def _charge(start: float, arrivals: Sequence[tuple[float, Row]]) -> Iterator[GroupWait]:
    """Charge the time from `start` to the last arrival.

    The time until the last group that trains arrives is charged to that group. The time after it is
    charged to the last joiner.
    """
    # The joiners' share begins when the last group that trains has come.
    for joins in (False, True):
        late = []
        for time, row in arrivals:
            if time > start and row.reason.joins is joins:
                late.append((time, row))
        if late:
            last, row = max(late, key=lambda arrival: arrival[0])
            yield GroupWait(row.slot, row.reason, last - start)
            start = last


class WaitLog:
    """Adds up the waits of one rank since its last update.

    `Rounds` and `ReplicaDimension` call it, on the training thread. Ranks of a group may differ in
    their waits: each rank gets the rows of its counterparts in the other groups.
    """

    def __init__(self) -> None:
        self._seconds = defaultdict[tuple[int, Why], float](float)
        """Seconds since the last update, by awaited slot and reason."""
        self._last_members: frozenset[GroupProcess] = frozenset()
        """Members of the last exchange that succeeded."""
        self._broken = defaultdict[GroupProcess, float](float)
        """By member, seconds of the exchanges with it that broke after the last success."""
        self._held_back_for: tuple[Sequence[int], Why] | None = None
        """The groups for which the update is held back, and why (`decision.Wait`).

        Too few groups are here, or a joiner asked for time. None if the update is not held back."""
        self._began = 0.0
        """When the wait of the latest exchange began."""
        self._last_waits: list[GroupWait] = []
        """Waits of the latest exchange. `start_wait` adds them to `_seconds`.

        If the update is held back, `start_wait` replaces them first."""

    def start_wait(self, now: float) -> None:
        """Note that this rank is ready for an exchange."""
        if self._held_back_for is not None:
            # The update needed these groups, and this rank has only waited since the exchange
            # before it began. All of that is charged to them, nothing to the member that came last.
            slots, why = self._held_back_for
            seconds = (now - self._began) / len(slots)
            self._last_waits = [GroupWait(slot, why, seconds) for slot in slots]
        self._add_last_waits()
        self._held_back_for = None
        self._began = now

    def record_broken(self, members: Collection[GroupProcess], now: float) -> None:
        """Note that the exchange broke at `now`.

        Which member broke it is not known before the next exchange that succeeds: that member is
        not in it.
        """
        for process in members:
            self._broken[process] += now - self._began

    def record_success(
        self,
        rows: Sequence[Row],
        own: int,
        answered: float,
        connected: float,
        members: Collection[GroupProcess],
        left: Collection[int],
    ) -> None:
        """Note that the exchange succeeded.

        Args:
            rows: the rows of all members.
            own: index of this group's row.
            answered: when the lighthouse answered, by the clock of `start_wait`.
            connected: when this rank was connected to the other members, by the same clock.
            left: slots of groups that left after a SIGTERM. Other groups that are gone are lost.
        """
        gone = {*self._last_members, *self._broken}.difference(members)
        reasons = []
        broken_waits = []
        # Of a group that was restarted, the former process is gone, and the new one is a joiner.
        for process in gone:
            slot, _start_time = process
            why = Why.LOST
            if slot in left:
                why = Why.LEFT
            reasons.append((slot, why))
            broken_waits.append(GroupWait(slot, why, self._broken[process] / len(gone)))
        waits = find_waits(rows, own, self._began - answered, connected - answered, reasons)
        self._last_waits = [*waits, *broken_waits]
        self._last_members = frozenset(members)
        # Otherwise these groups would be charged again in every later exchange.
        self._broken.clear()

    def record_hold(self, slots: Sequence[int], why: Why) -> None:
        """Note that the update is held back for `slots`, from the last exchange to the next one."""
        self._held_back_for = None
        if slots:
            self._held_back_for = (slots, why)

    def discard(self) -> None:
        """Forget all waits: this group heals, and so makes no update after them."""
        self._broken.clear()
        self._clear()

    def pop_waits(self) -> list[Waited]:
        """Return the waits for the update that is made now, the longest first, and forget them."""
        self._add_last_waits()
        waits = []
        for (slot, why), seconds in self._seconds.items():
            if seconds >= MIN_WAIT_SECONDS:
                waits.append(Waited(slot=slot, seconds=round(seconds, 4), why=why.name.lower()))
        waits.sort(key=lambda wait: wait.seconds, reverse=True)
        self._clear()
        return waits

    def _clear(self) -> None:
        self._seconds.clear()
        self._held_back_for = None
        self._last_waits = []

    def _add_last_waits(self) -> None:
        for wait in self._last_waits:
            self._seconds[wait.slot, wait.why] += wait.seconds
        self._last_waits = []
