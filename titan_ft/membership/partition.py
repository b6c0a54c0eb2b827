# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What a group does when it cannot reach some other groups, while all of them reach the lighthouse.

Such a network failure, a *partition*, does not show in the heartbeats. A *link* connects a rank
with its counterpart in another group. A dead link is handled in this order:

1. An exchange waits although all members send heartbeats. Each rank probes its links, and aborts
   the exchange if one of them is dead (`watch`).
2. The ranks of the group vote that the exchange failed. After a vote that failed because of a dead
   link, or after two failed votes in a row for any reason, they find out together which groups they
   cannot reach. Rank 0 writes these groups into the group's name at the lighthouse (`must_report`,
   `report_links`). The groups at the other ends of the links read that name in the next quorum.
   They report in their own names which step their state has.
3. All groups that read the names in the quorum compute the same set of members: the largest set of
   groups that all reach each other (`protocol.member.admit`).
4. A group outside of this set stops its heartbeats and keeps its state. It probes its dead links
   until they work again, or until the groups at their other ends are gone. Then it comes back with
   a new name (`stay_outside`). If it gets a leave request, it leaves at once, because the other
   groups do not wait for it.

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

# A rank waits before it probes: a fixed time, and once more this time for each so many groups.
_GROUPS_PER_EXTRA_WAIT = 16
# Failed votes in a row. A single failed vote is usual: a group has died.
_PROBE_AFTER_FAILED_VOTES = 2
_PAGE_PAUSE_SECONDS = 0.02  # between two reads of the lighthouse's page
_PROBE_PAUSE_SECONDS = 1.0  # between two probes of a group that is outside
# A group comes back after so many good probes in a row. If a link fails again soon after that (a
# *relapse*), the number is doubled.
_MIN_GOOD_PROBES = 2
_MAX_GOOD_PROBES = 60
_RELAPSE_SECONDS = 300.0
_LEAVE = "leave"
"""The word of a rank with a leave request, and rank 0's decision to leave. It stands among unique
names of processes, and no process has this name."""
_LEAVE_TOPIC = "outside/leave"
_LEAVE_CHECK_SECONDS = 0.1  # pause between two checks for a leave request


@dataclass(frozen=True)
class _DeadLinks:
    """The dead links that the watch has found in one exchange.

    Attributes:
        prefix: identifies the exchange (`Rendezvous.prefix`).
        processes: unique names of the members that this rank cannot reach.
    """

    prefix: str
    processes: list[str]


class Partition:
    """Finds this rank's dead links, reports them, and lets the group wait outside of the quorum.

    `Membership` owns it. The quorum thread calls `must_report`, `report_links`, `stay_outside` and
    `note_quorum`. The training thread calls `before_vote` and `forget_dead_links`. The watch has a
    thread of its own. Methods described as a collective must be called on all ranks of the group.

    Args:
        probe: returns the peers that cannot be reached, and why (see `reach.Probe`).
        leave_requested: returns True if this rank has got a leave request (SIGTERM).
        lighthouse: address of the lighthouse.
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
        self._members: tuple[Member, ...] = ()  # members of the last quorum
        self._accusers: tuple[Member, ...] = ()  # members that report a dead link to this group
        self._probed_prefix = ""  # prefix of the exchange whose links the watch probed last
        self._dead_links: _DeadLinks | None = None  # the last ones that the watch has found
        self._logged_unreachable: set[str] = set()  # processes without an answer in the last probe
        self._num_votes = 0  # number of votes of the group so far
        self._required_good_probes = _MIN_GOOD_PROBES  # before the group comes back the next time
        self._returned_at = -math.inf  # time at which the group came back the last time

    # 1. While an exchange is under way

    def watch(self, find_others: Callable[[], list[Member]]) -> Watch:
        """Return a watch that probes the links of an exchange that takes long.

        Args:
            find_others: returns the other members of the exchange under way.
        """
        # Probes also hit healthy peers that are merely slow. So probe seldom: each pause is twice
        # as long as the one before.
        return Watch(
            "titan_ft_link_watch",
            self._find_first_pause,
            2.0,
            partial(self._find_dead_links, find_others),
        )

    def _find_first_pause(self) -> float:
        """Return the seconds that an exchange may wait before this rank probes its links."""
        num_delays = 1 + len(self._members) // _GROUPS_PER_EXTRA_WAIT
        return SILENT_BEATS * self._heartbeat_timeout * num_delays

    def _find_dead_links(
        self,
        find_others: Callable[[], list[Member]],
    ) -> Callable[[], None] | None:
        """Probe the members of the exchange under way.

        Probes unreachable members a second time, because a busy peer may miss the first probe.

        Returns:
            The function that aborts the exchange, if some members are unreachable.
        """
        self._probed_prefix = self._rendezvous.prefix
        suspects = find_others()
        for _ in range(2):
            unreachable = self._probe_members(suspects)
            suspects = [member for member in suspects if member.unique in unreachable]
        if not suspects:
            return None
        return partial(self._abort_exchange, suspects)

    def _abort_exchange(self, unreachable: Sequence[Member]) -> None:
        """Abort the exchange because of dead links. The group reports them after the vote."""
        slots = sorted(member.slot for member in unreachable)
        logger.warning("no way to groups %s: breaking off the exchange", slots)
        processes = sorted(member.unique for member in unreachable)
        self._dead_links = _DeadLinks(self._probed_prefix, processes)
        self._rendezvous.abort(self._probed_prefix)

    # 2. After a failed vote

    def before_vote(self, ok: bool) -> None:
        """Before a vote, notify all ranks if the exchange failed here because of a dead link.

        Args:
            ok: True if the exchange worked on this rank.
        """
        self._num_votes += 1
        if not ok and self._find_dead_in_last_exchange() is not None:
            self._control.send_note(self._dead_link_topic())

    def forget_dead_links(self) -> None:
        """Forget the dead links that the watch has found, because the exchange worked after all."""
        self._dead_links = None

    def note_quorum(self, admission: Admission) -> None:
        """Remember the members of the quorum, and those that report a dead link to this group."""
        self._members = admission.members
        self._accusers = admission.accusers

    def must_report(self, failures: int) -> bool:
        """True if this group should find out which groups it cannot reach; the same on all ranks.

        Args:
            failures: failed votes in a row.
        """
        if self._accusers or failures >= _PROBE_AFTER_FAILED_VOTES:
            return True
        return failures > 0 and self._control.read_note(self._dead_link_topic()) is not None

    def report_links(self, failures: int, step: int) -> None:
        """Find out which groups this group cannot reach, and report them in the group's name.

        A collective.

        Args:
            failures: failed votes in a row.
            step: committed updates in the group's state.
        """
        peers = [member for member in self._members if member != self._seat.member]
        dead = self._find_dead_in_last_exchange()
        if dead is None and failures >= _PROBE_AFTER_FAILED_VOTES:
            # Do not probe the accusers: the report names them in any case.
            dead = self._probe_members([peer for peer in peers if peer not in self._accusers])
        # If `dead` is still None, another rank has found a dead link. It need not wait for a probe
        # of this rank.

        def report(all_dead: set[str]) -> str:
            return self._open_seat_with_report(peers, all_dead, step)

        server = self._control.rank0_decides(dead or (), report)
        if server:
            self._seat.adopt_name(server)

    def _find_dead_in_last_exchange(self) -> list[str] | None:
        """Return the processes that the watch found unreachable in the last exchange; None =
        none."""
        dead_links = self._dead_links
        if dead_links is None or dead_links.prefix != self._rendezvous.prefix:
            return None
        return dead_links.processes

    def _open_seat_with_report(self, peers: Sequence[Member], dead: set[str], step: int) -> str:
        """Open a seat whose name reports the dead links; on rank 0.

        Args:
            dead: unique names of the processes that a rank of this group cannot reach.

        Returns:
            The new name; empty if the group's name reports all of these links already.
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
        # A report replaces the group's former report. So repeat in it each group that reports a
        # dead link to this group. Otherwise two groups could in turn withdraw their reports of the
        # same link, and rename themselves without end.
        unreachable.extend(member for member in self._members if member.has_reported(own))
        if all(own.has_reported(peer) for peer in unreachable):
            return ""
        return self._seat.reopen(own.reporting(step, unreachable))

    def _dead_link_topic(self) -> str:
        # The topic contains the number of the vote. A rank that reads it late must not take the
        # note about the next vote for the note about this one.
        return f"lost/{self._num_votes}"

    # 4. Outside the largest clique

    def stay_outside(self, admission: Admission) -> None:
        """Wait until this group reaches the groups it is cut off from, or until they are gone.

        A collective. All ranks of the group keep their state meanwhile, and the training thread
        waits.

        Raises:
            Leaving: a rank of the group has got a leave request; raised on all ranks.
        """
        self._stop_heartbeats(admission)
        cut_off = admission.cut_off
        num_good_probes = 0  # in a row

        def decide(words: set[str]) -> str:
            """Return `_LEAVE`, the group's new name, or an empty text to probe once more.

            Args:
                words: the unreachable processes, and `_LEAVE` if a rank has a leave request.
            """
            nonlocal num_good_probes
            if _LEAVE in words:
                return _LEAVE
            num_good_probes += 1
            if self._find_living(words):
                # An unreachable process sends heartbeats, so its link is still dead.
                num_good_probes = 0
            all_unreachable = all(member.unique in words for member in cut_off)
            required = self._required_good_probes
            if all_unreachable:
                # If such a probe is good, all of these groups are gone. Then no link can relapse.
                required = _MIN_GOOD_PROBES
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

        A group outside of the quorum has no votes, after which a group leaves normally. And a probe
        of links that lose all packets may take longer than `drain_timeout_seconds`. Without the
        early end, this rank would be killed before it has left in order, and the other ranks would
        wait for its result.

        The leave request of one rank is enough here, because rank 0 decides for the group, and the
        request only ends the probe.

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

    def _stop_heartbeats(self, admission: Admission) -> None:
        """Stop the heartbeats, because the other groups wait for each group that sends
        heartbeats."""
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

        # As an agreement, so that rank 0 closes the seat only when all ranks have got the last
        # reply of the seat.
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
        """Return the unreachable processes that still send heartbeats; on rank 0.

        A process that has ended or is frozen cannot be reached either, but sends no heartbeat. If
        the lighthouse does not answer, returns all of `dead`.
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
                # A process that the page does not show stays undecided: a restarted lighthouse may
                # not have got a heartbeat from it yet.
                age = ages.get(unique)
                if age is None:
                    continue
                if age < elapsed:  # The process has sent a heartbeat since this search began.
                    living.add(unique)
                    undecided.discard(unique)
                elif age > self._heartbeat_timeout:
                    undecided.discard(unique)
            self._control.pause(_PAGE_PAUSE_SECONDS)
        return living

    def _find_heartbeat_ages(self, heartbeats: dict[str, float]) -> dict[str, float]:
        """Return the seconds since each process's last heartbeat, by its unique name.

        A process that has just changed its name stands on the page twice. The younger heartbeat
        counts.
        """
        ages: dict[str, float] = {}
        for name, seconds in heartbeats.items():
            for member in known_members([name], self._seat.member.token):
                ages[member.unique] = min(seconds, ages.get(member.unique, seconds))
        return ages
