# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A network that is dead between some groups while all of them reach the lighthouse.

A group handles it in this order:

1. An exchange waits although all members send heartbeats. Each rank probes its links, and breaks
   the exchange off if one of them is dead (`watch`).
2. The ranks of the group vote "no", because of a dead link or twice in a row for any reason. Then
   they find out together which groups they cannot reach, and rank 0 writes these into the group's
   name at the lighthouse (`must_report`, `report_links`). The group at the other end of the link
   reads that name, and reports what state it holds as well.
3. All groups that read the names in the quorum find the same largest clique of groups that reach
   each other (`protocol.member.admit`).
4. A group outside the clique leaves the quorum and keeps its state. It probes its lost links until
   they work again, or until the groups at their other ends are gone. Then it comes back under a
   fresh name (`stay_outside`). On a leave request it leaves at once: the others need nothing of it.

See docs/failures.md.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

_GROUPS_PER_DELAY = 16  # for each so many groups, ranks wait once more before they probe
_PROBE_AFTER_FAILURES = 2  # votes in a row; any failure costs one
_PAGE_PAUSE_SECONDS = 0.02  # between two reads of the lighthouse's page
_PROBE_PAUSE_SECONDS = 1.0  # between two probes of a group that is outside
_MIN_GOOD_PROBES = 2  # in a row, before a group comes back; doubled after each relapse
_MAX_GOOD_PROBES = 60
_RELAPSE_SECONDS = 300.0  # a link that fails again within this time was not really back
_LEAVE = "leave"
"""The group's decision to leave, and a rank's word for it. No process has this unique name."""
_LEAVE_TOPIC = "outside/leave"
_LEAVE_CHECK_SECONDS = 0.1  # pause between two checks for a leave request


@dataclass(frozen=True)
class _DeadLinks:
    """The result of the watch in one exchange.

    Attributes:
        prefix: of the exchange.
        processes: unique names of the members that this rank cannot reach.
    """

    prefix: str
    processes: list[str]


class Partition:
    """One rank's part in finding dead links, reporting them, and staying outside.

    `Membership` owns it. The quorum thread calls `must_report`, `report_links`, `stay_outside` and
    `note_quorum`. The training thread calls `before_vote` and `forget_dead_links`. The watch has a
    thread of its own. Methods called a collective must be called on all ranks of the group.

    Args:
        probe: returns the peers that cannot be reached, and why (see `reach.Probe`).
        leave_requested: returns True if this rank has been asked to leave.
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
        self._heartbeat_timeout = config.heartbeat_timeout_ms / 1000
        self._seat = seat
        self._rendezvous = rendezvous
        self._control = control
        self._probe = probe
        self._group_rank = group_rank
        self._leave_requested = leave_requested
        self._page = StatusPage(lighthouse)
        self._events = events
        self._members: tuple[Member, ...] = ()  # of the last quorum
        self._accusers: tuple[Member, ...] = ()  # members that report a dead link to this group
        self._probed_prefix = ""  # of the exchange whose links the watch probed last
        self._dead_links: _DeadLinks | None = None  # found by the watch
        self._logged_unreachable: set[str] = set()  # at the last probe
        self._num_votes = 0
        self._required_good_probes = _MIN_GOOD_PROBES  # for the next return
        self._returned_at = -math.inf

    # 1. While an exchange is under way

    def watch(self, find_others: Callable[[], list[Member]]) -> Watch:
        """Return a watch that probes the links of an exchange that takes long.

        Args:
            find_others: returns the other members of the exchange under way.
        """
        # A probe also costs a healthy peer that is merely slow. So each pause is twice the one
        # before.
        return Watch(
            "titan_ft_link_watch",
            self._find_first_pause,
            2.0,
            partial(self._find_dead_links, find_others),
        )

    def _find_first_pause(self) -> float:
        """Return the seconds that an exchange may wait before this rank probes its links."""
        num_delays = 1 + len(self._members) // _GROUPS_PER_DELAY
        return SILENT_BEATS * self._heartbeat_timeout * num_delays

    def _find_dead_links(
        self,
        find_others: Callable[[], list[Member]],
    ) -> Callable[[], None] | None:
        """Probe the members of the exchange under way. Return the action if some are unreachable.

        Two probes: a slow peer answers the first one, a busy peer answers the second one, and only
        a dead network loses both.
        """
        self._probed_prefix = self._rendezvous.prefix
        suspects = find_others()
        for _ in range(2):
            unreachable = self._probe_members(suspects)
            suspects = [member for member in suspects if member.unique in unreachable]
        if not suspects:
            return None
        return partial(self._break_off, suspects)

    def _break_off(self, unreachable: Sequence[Member]) -> None:
        """Break off the exchange because of dead links. The group reports them after the vote."""
        slots = sorted(member.slot for member in unreachable)
        logger.warning("no way to groups %s: breaking off the exchange", slots)
        processes = sorted(member.unique for member in unreachable)
        self._dead_links = _DeadLinks(self._probed_prefix, processes)
        self._rendezvous.abort(self._probed_prefix)

    # 2. After a failed vote

    def before_vote(self, ok: bool) -> None:
        """Before a vote, notify all ranks if this rank votes "no" because of a dead link."""
        self._num_votes += 1
        if not ok and self._find_known_dead() is not None:
            self._control.send_note(self._dead_link_topic())

    def forget_dead_links(self) -> None:
        """Forget the findings of the watch: the exchange worked nevertheless."""
        self._dead_links = None

    def note_quorum(self, admission: Admission) -> None:
        """Remember the members of the quorum, and those that report a dead link to this group."""
        self._members = admission.members
        self._accusers = admission.accusers

    def must_report(self, failures: int) -> bool:
        """True if this group should find out which groups it can reach; the same on all ranks.

        Args:
            failures: failed votes in a row.
        """
        if self._accusers or failures >= _PROBE_AFTER_FAILURES:
            return True
        return failures > 0 and self._control.read_note(self._dead_link_topic()) is not None

    def report_links(self, failures: int, step: int) -> None:
        """Find out which groups this group cannot reach, and report them in the group's name.

        A collective.

        Args:
            failures: failed votes in a row.
            step: committed updates that the group holds.
        """
        peers = [member for member in self._members if member != self._seat.member]
        dead = self._find_known_dead()
        if dead is None and failures >= _PROBE_AFTER_FAILURES:
            dead = self._probe_members([peer for peer in peers if peer not in self._accusers])
        # After one failed vote another rank has found a dead link, and need not wait for a probe
        # of this rank.

        def report(all_dead: set[str]) -> str:
            return self._report(peers, all_dead, step)

        server = self._control.rank0_decides(dead or (), report)
        if server:
            self._seat.adopt_name(server)

    def _find_known_dead(self) -> list[str] | None:
        """Return the processes that the watch found unreachable in the last exchange.

        None if the watch found no dead link in it.
        """
        dead_links = self._dead_links
        if dead_links is None or dead_links.prefix != self._rendezvous.prefix:
            return None
        return dead_links.processes

    def _report(self, peers: Sequence[Member], dead: set[str], step: int) -> str:
        """Open a seat whose name contains the dead links; on rank 0.

        Returns an empty text if the group's name contains all of them already.
        """
        own = self._seat.member
        living = self._find_living(dead)
        unreachable = [peer for peer in peers if peer.unique in living]
        new_slots = [peer.slot for peer in unreachable if not own.has_reported(peer)]
        if new_slots:
            logger.warning(
                "groups %s live and cannot be reached: see to the network between them and this group",
                new_slots,
            )
            self._events.emit(LinkDead(slots=new_slots))
        # A report replaces the former report. So it also names the links that only the other group
        # has reported. Otherwise two groups could each withdraw the other's answer, and rename
        # themselves without end.
        unreachable.extend(member for member in self._members if member.has_reported(own))
        if all(own.has_reported(peer) for peer in unreachable):
            return ""
        return self._seat.reopen(own.reporting(step, unreachable))

    def _dead_link_topic(self) -> str:
        # The topic has the vote's number. A rank that reads the note of one vote late must not find
        # another rank's note about the next vote.
        return f"lost/{self._num_votes}"

    # 4. Outside the largest clique

    def stay_outside(self, admission: Admission) -> None:
        """Wait outside until this group reaches the groups it is cut off from, or they are gone.

        A collective. All ranks of the group keep their state meanwhile, and the training thread
        waits.

        Raises:
            Leaving: a rank of the group has been asked to leave; on all ranks.
        """
        self._leave_quorum(admission)
        cut_off = admission.cut_off
        num_good_probes = 0  # in a row

        def decide(words: set[str]) -> str:
            nonlocal num_good_probes
            if _LEAVE in words:
                return _LEAVE
            num_good_probes += 1
            if self._find_living(words):  # words are the unreachable processes
                num_good_probes = 0
            all_gone = all(member.unique in words for member in cut_off)
            required = _MIN_GOOD_PROBES if all_gone else self._required_good_probes
            if num_good_probes < required:
                return ""
            return self._seat.reopen(self._seat.member.renamed(uuid.uuid4().hex))

        decision = ""
        while not decision:
            decision = self._control.rank0_decides(self._probe_outside(cut_off), decide)
        if decision == _LEAVE:
            raise Leaving
        self._seat.adopt_name(decision)
        self._returned_at = time.monotonic()
        if self._group_rank == 0:
            slots = [member.slot for member in cut_off]
            logger.warning(
                "groups %s can be reached again, or are gone: this group comes back",
                slots,
            )
            self._events.emit(LinkBack(slots=slots))

    def _probe_outside(self, cut_off: Sequence[Member]) -> list[str]:
        """Probe the links to `cut_off` after a pause. A leave request of any rank ends it early.

        Outside there is no vote after which the group could leave. A probe of links that lose
        everything may take longer than `drain_timeout_seconds`. Without the early end, this rank
        would end without having left in order, and its siblings would wait for its result.

        One rank's word suffices: rank 0 decides for the group, and the word only ends the probe.
        `Drain.stops_waiting` needs the words of all ranks, because no rank decides there, and the
        round that it waits for reaches each rank at another time.

        Returns:
            The words of this rank for the decision: unreachable processes, or `_LEAVE`.
        """

        def probe() -> list[str]:
            self._control.pause(_PROBE_PAUSE_SECONDS)
            return self._probe_members(cut_off)

        probing = call_aside(probe, "titan_ft_outside_look")
        while not probing.done():
            if self._leave_requested():
                self._control.send_note(_LEAVE_TOPIC)
            if self._control.read_note(_LEAVE_TOPIC) is not None:
                return [_LEAVE]
            self._control.pause(_LEAVE_CHECK_SECONDS)
        return probing.result()

    def _leave_quorum(self, admission: Admission) -> None:
        """Stop the heartbeats, because the others would wait for a group that sends some."""
        relapsed = time.monotonic() - self._returned_at < _RELAPSE_SECONDS
        if relapsed:
            self._required_good_probes = min(2 * self._required_good_probes, _MAX_GOOD_PROBES)
        else:
            self._required_good_probes = _MIN_GOOD_PROBES
        if self._group_rank == 0:
            members = [member.slot for member in admission.members]
            slots = [member.slot for member in admission.cut_off]
            logger.warning(
                "groups %s go on without this one: it and groups %s cannot reach each other. It "
                "keeps its state, tries again and comes back by itself; see to the network between "
                "them",
                members,
                slots,
            )
            self._events.emit(Outside(members=members, unreached=slots))

        def leave(_: set[str]) -> str:
            self._seat.leave()
            return ""

        # An agreement: when a rank joins it, that rank has had the last answer of the seat.
        self._control.rank0_decides((), leave)

    # Reachable and living members

    def _probe_members(self, members: Sequence[Member]) -> list[str]:
        """Return the unique names of the members that this rank cannot reach, and log new ones."""
        # Each group begins with the slots above its own. If all groups began with the same peer,
        # that peer would get too many probes at once.
        members = sorted(members, key=lambda member: member.slot < self._seat.member.slot)
        peers = []
        for member in members:
            address = self._rendezvous.addresses.get(member.unique, "")
            peers.append(Peer(member.unique, member.store, address))
        reasons = self._probe(peers)
        for member in members:
            if member.unique in reasons.keys() - self._logged_unreachable:
                reason = reasons[member.unique]
                logger.warning(
                    "rank %d cannot reach group %d: %s",
                    self._group_rank,
                    member.slot,
                    reason,
                )
        self._logged_unreachable = set(reasons)
        return sorted(reasons)

    def _find_living(self, dead: set[str]) -> set[str]:
        """Return the processes in `dead` that still send heartbeats; on rank 0.

        A process that has ended or is frozen cannot be reached either, but sends no heartbeat. All
        of `dead` are returned if the lighthouse does not answer.
        """
        started = time.monotonic()
        undecided = set(dead)
        living: set[str] = set()
        while undecided:
            elapsed = time.monotonic() - started
            if elapsed >= 2 * self._heartbeat_timeout:
                break
            page = self._page.read(self._heartbeat_timeout)
            if page is None:
                return dead
            ages = self._find_heartbeat_ages(page.heartbeats)
            for unique in list(undecided):
                # A process without a line stays undecided: a lighthouse that was started again may
                # not have heard from it yet.
                age = ages.get(unique)
                if age is None:
                    continue
                if age < elapsed:  # it has sent a heartbeat since this search started
                    living.add(unique)
                    undecided.discard(unique)
                elif age > self._heartbeat_timeout:
                    undecided.discard(unique)
            self._control.pause(_PAGE_PAUSE_SECONDS)
        return living

    def _find_heartbeat_ages(self, heartbeats: dict[str, float]) -> dict[str, float]:
        """Return the seconds since each process's last heartbeat, by its unique name.

        A process that has just changed its name has two lines, of which the younger one counts.
        """
        ages: dict[str, float] = {}
        for name, seconds in heartbeats.items():
            for member in known_members([name], self._seat.member.token):
                ages[member.unique] = min(seconds, ages.get(member.unique, seconds))
        return ages
