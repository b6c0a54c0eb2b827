# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A network that is dead between some groups while all of them reach the lighthouse: what a group does about it.

In the order in which it happens:

1. An exchange waits although everybody heartbeats: each rank looks at its links, and breaks the exchange off when one
   is dead (`watch`).
2. The ranks of the group have voted "no" (because of that, or twice in a row because of whatever): together they find
   out whom the group cannot reach and put it into the group's name at the lighthouse (`must_report`, `report_links`).
   The group at the other end of the link reads that there, and reports what state it holds too.
3. All who read the quorum's names come to the same largest clique of groups that reach each other (`member.admit`).
4. A group that is not in it leaves the quorum with its state, looks at its links until they are good, or until those
   at their other ends are gone, and comes back under a fresh name (`stay_outside`). Told to leave, it leaves at once:
   the others need nothing of it.

See docs/failures.md.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial

from titan_ft.config import FaultTolerance
from titan_ft.membership.control_tree import ControlTree
from titan_ft.membership.pulse import SILENT_BEATS, StatusPage, Watch
from titan_ft.membership.rendezvous import Rendezvous
from titan_ft.membership.seat import Seat
from titan_ft.protocol.errors import Leaving
from titan_ft.protocol.member import Admission, Member, known_members
from titan_ft.run.events import LinkBack, LinkDead, Outside
from titan_ft.run.lighthouse import LighthouseAddress
from titan_ft.run.log import EventLog
from titan_ft.system.threads import call_aside
from titan_ft.transfer.reach import Peer

logger = logging.getLogger(__name__)

_MANY = 16  # groups that are asked at each look at the links of an exchange that takes long; of more, more seldom
_PROBE_AFTER = 2  # votes in a row that failed; once is what any failure costs
_PAGE_PAUSE_SECONDS = 0.02  # between two looks at the lighthouse's page
_PROBE_PAUSE_SECONDS = 1.0  # between two looks of a group that is outside at the links it lost
_GOOD_LOOKS = 2  # in a row, until it comes back; twice as many each time that a link which was back has failed again
_MOST_GOOD_LOOKS = 60
_RELAPSE_SECONDS = 300.0  # a link that is lost again within this time after its return was not really back
# Among the names of processes that a rank cannot reach, and as the group's decision: leave. No process has this name.
_LEAVE = "leave"
_LEAVE_TOPIC = "outside/leave"
_POLL_SECONDS = 0.1  # between two checks whether a rank was told to leave


class Partition:
    """One rank's part in finding out whom its group cannot reach, in telling it, and in staying outside.

    Args:
        probe: says which peers cannot be reached, and why (see `reach.Probe`).
        leave_requested: says whether this rank was.
        lighthouse: its address.
    """

    def __init__(
        self,
        config: FaultTolerance,
        *,
        seat: Seat,
        rendezvous: Rendezvous,
        control: ControlTree,
        probe: Callable[[Sequence[Peer]], dict[str, str]],
        leave_requested: Callable[[], bool],
        group_rank: int,
        lighthouse: LighthouseAddress,
        events: EventLog,
    ) -> None:
        self._beat = config.heartbeat_timeout_ms / 1000
        self._seat, self._rendezvous, self._control = seat, rendezvous, control
        self._probe, self._group_rank = probe, group_rank
        self._leave_requested = leave_requested
        self._page, self._events = StatusPage(lighthouse), events
        self._members: tuple[Member, ...] = ()  # of the last quorum
        self._accusers: tuple[Member, ...] = ()  # those of them that cannot reach this group
        self._probed = ""  # prefix of the quorum whose links were looked at while its exchange was waited for
        # A quorum's prefix, and whom this rank could not reach while its exchange waited.
        self._lost: tuple[str | None, list[str]] = (None, [])
        self._unreached: set[str] = set()  # at the last look
        self._num_votes = 0
        self._good_looks = _GOOD_LOOKS  # that the next return from outside needs
        self._returned = -math.inf  # when this group came back from outside

    # 1. While an exchange is waited for

    def watch(self, others: Callable[[], list[Member]]) -> Watch:
        """Start to look at the links of exchanges that take long.

        Args:
            others: returns the other members of the exchange under way.
        """
        # Peers that are slow are asked too: seldom, for they pay for it.
        look = partial(self._find_lost, others)
        return Watch("titan_ft_link_watch", self._look_after, 2.0, look)

    def _look_after(self) -> float:
        """Return the seconds that an exchange may wait before this rank looks at its links."""
        return SILENT_BEATS * self._beat * (1 + len(self._members) // _MANY)

    def _find_lost(self, others: Callable[[], list[Member]]) -> Callable[[], None] | None:
        """Look which members of the exchange under way this rank cannot reach; returns what to do if there are some.

        A peer that is slow answers, and one that is busy does at the second time; only the network loses everything.
        """
        self._probed, members = self._rendezvous.prefix, others()
        for _ in range(2):
            lost = self._find_dead(members)
            members = [member for member in members if member.unique in lost]
        return partial(self._break_off, members) if members else None

    def _break_off(self, lost: Sequence[Member]) -> None:
        """Break off the exchange under way because of links that are dead; the group reports them after the vote."""
        logger.warning("no way to groups %s: breaking off the exchange", sorted(member.slot for member in lost))
        self._lost = self._probed, sorted(member.unique for member in lost)
        self._rendezvous.abort(self._probed)

    # 2. After a vote that failed

    def before_vote(self, ok: bool) -> None:
        """Tell all ranks of the group, before the vote, that this one votes "no" because of a link."""
        self._num_votes += 1
        if not ok and self._lost[0] == self._rendezvous.prefix:
            self._control.say(self._lost_topic())

    def forget(self) -> None:
        """Forget what the watch has found: the exchange worked all the same."""
        self._lost = (None, [])

    def note_quorum(self, admission: Admission) -> None:
        """Note who is in the quorum, and who of them cannot reach this group."""
        self._members, self._accusers = admission.members, admission.accusers

    def must_report(self, failures: int) -> bool:
        """Say whether this group should find out whom it can reach; the same on all of its ranks.

        Args:
            failures: votes in a row that failed.
        """
        known = failures > 0 and self._control.heard(self._lost_topic()) is not None
        return known or failures >= _PROBE_AFTER or bool(self._accusers)

    def report_links(self, failures: int, step: int) -> None:
        """Find out whom this group cannot reach, and report it in the group's name. A collective of the group.

        Args:
            step: committed updates that the group holds.
        """
        peers = [member for member in self._members if member != self._seat.member]
        prefix, found = self._lost
        if prefix != self._rendezvous.prefix:  # else it was found while the exchange waited
            found = []
            if failures >= _PROBE_AFTER:  # else another rank has found something, and the others need not be waited for
                found = self._find_dead([peer for peer in peers if peer not in self._accusers])
        server = self._control.rank0_decides(found, lambda dead: self._report(peers, dead, step))
        if server:
            self._seat.take(server)

    def _report(self, peers: Sequence[Member], dead: set[str], step: int) -> str:
        """Open the server whose name says whom this group cannot reach; returns nothing if all of that is known."""
        own, living = self._seat.member, self._find_living(dead)
        lost = [peer for peer in peers if peer.unique in living]
        slots = [peer.slot for peer in lost if not own.has_reported(peer)]
        if slots:
            logger.warning(
                "groups %s live and cannot be reached: see to the network between them and this group", slots
            )
            self._events.emit(LinkDead(slots=slots))
        # A report replaces the one before. So it names each dead link, also those that only the other group has
        # reported. Otherwise two groups could each withdraw the other's answer, and rename themselves without end.
        lost.extend(member for member in self._members if member.has_reported(own))
        if all(own.has_reported(peer) for peer in lost):
            return ""
        return self._seat.reopen(own.reporting(step, lost))

    def _lost_topic(self) -> str:
        # A rank that looks late, after one vote, must not find what another rank says before the next one.
        return f"lost/{self._num_votes}"

    # 4. Outside of the largest clique

    def stay_outside(self, admission: Admission) -> None:
        """Leave the others alone until this group reaches those that it is cut off from, or they are gone.

        All ranks of the group keep their state meanwhile, and the training thread waits.

        Raises:
            Leaving: a rank of the group was told to leave; on all of them.
        """
        self._leave_quorum(admission)
        lost, good = admission.cut_off, 0

        def come_back(dead: set[str]) -> str:
            nonlocal good
            if _LEAVE in dead:
                return _LEAVE
            good = 0 if self._find_living(dead) else good + 1
            gone = all(member.unique in dead for member in lost)
            if good < (_GOOD_LOOKS if gone else self._good_looks):
                return ""
            return self._seat.reopen(self._seat.member.renamed(uuid.uuid4().hex))

        decision = ""
        while not decision:
            decision = self._control.rank0_decides(self._look_outside(lost), come_back)
        if decision == _LEAVE:
            raise Leaving
        self._seat.take(decision)
        self._returned = time.monotonic()
        if self._group_rank == 0:
            slots = [member.slot for member in lost]
            logger.warning("groups %s can be reached again, or are gone: this group comes back", slots)
            self._events.emit(LinkBack(slots=slots))

    def _look_outside(self, lost: Sequence[Member]) -> list[str]:
        """Look at the links to `lost` after a pause; returns as soon as a rank of this group was told to leave.

        There is no vote to leave after, and the time that leaving may take (`drain_timeout_seconds`) can be shorter
        than a look at links that lose everything: the rank would end without having left in order, and its siblings
        would wait for what it has found.

        One rank's word is enough, because rank 0 decides for the group, and the word only ends the look early.
        `Drain.stops_waiting` needs the words of all ranks, because nobody decides there: the round that it waits for
        reaches each rank at a time of its own.
        """

        def look() -> list[str]:
            self._control.pause(_PROBE_PAUSE_SECONDS)
            return self._find_dead(lost)

        looked = call_aside(look, "titan_ft_outside_look")
        while not looked.done():
            if self._leave_requested():
                self._control.say(_LEAVE_TOPIC)
            if self._control.heard(_LEAVE_TOPIC) is not None:
                return [_LEAVE]
            self._control.pause(_POLL_SECONDS)
        return looked.result()

    def _leave_quorum(self, admission: Admission) -> None:
        """Stop the heartbeats, which would make the others wait for this group."""
        relapsed = time.monotonic() - self._returned < _RELAPSE_SECONDS
        self._good_looks = min(2 * self._good_looks, _MOST_GOOD_LOOKS) if relapsed else _GOOD_LOOKS
        if self._group_rank == 0:
            members = [member.slot for member in admission.members]
            slots = [member.slot for member in admission.cut_off]
            logger.warning(
                "groups %s go on without this one: it and groups %s cannot reach each other. It keeps its state, tries "
                "again and comes back by itself; see to the network between them",
                members,
                slots,
            )
            self._events.emit(Outside(members=members, unreached=slots))

        def leave(_: set[str]) -> str:
            self._seat.leave()
            return ""

        # Each rank has had the server's last answer when it agrees.
        self._control.rank0_decides((), leave)

    # Who can be reached, and who lives

    def _find_dead(self, members: Sequence[Member]) -> list[str]:
        """Return which of `members`, by their unique names, this rank cannot reach."""
        # Each group begins with other peers: all groups' probes at once would be too many for one peer.
        members = sorted(members, key=lambda member: member.slot < self._seat.member.slot)
        addresses = self._rendezvous.addresses
        reasons = self._probe(
            [Peer(member.unique, member.store, addresses.get(member.unique, "")) for member in members]
        )
        for member in members:
            if member.unique in reasons.keys() - self._unreached:
                logger.warning(
                    "rank %d cannot reach group %d: %s", self._group_rank, member.slot, reasons[member.unique]
                )
        self._unreached = set(reasons)
        return sorted(reasons)

    def _find_living(self, dead: set[str]) -> set[str]:
        """Return those of `dead` that still heartbeat; all of them if the lighthouse does not answer.

        A process that has ended cannot be reached either, and neither can one that is frozen. Both send no heartbeats.
        """
        beat, began = self._beat, time.monotonic()
        open_, living = set(dead), set[str]()
        while open_ and (now := time.monotonic()) - began < 2 * beat:
            page = self._page.read(beat)
            if page is None:
                return dead
            # A process that has just changed its name is there twice.
            youngest: dict[str, float] = {}
            for name, seconds in page.heartbeats.items():
                for member in known_members([name], self._seat.member.token):
                    youngest[member.unique] = min(seconds, youngest.get(member.unique, seconds))
            living |= {unique for unique in open_ if youngest.get(unique, now) < now - began}
            # Not those that are not listed: a lighthouse that was started again has yet to hear of them.
            open_ -= living | {unique for unique in open_ if youngest.get(unique, 0.0) > beat}
            self._control.pause(_PAGE_PAUSE_SECONDS)
        return living
