# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Membership: which groups take part in the next exchange, and whether the exchange worked.

An *exchange* is the all-reduce of gradients between the replica groups at the end of a step.
Before each exchange the groups must agree on its members, because a group may have died or come
back. After the exchange the ranks of a group must agree whether it worked, because a failure may
have hit only some of them. The order of events in each step is:

1. `request_quorum`: the group sends a request to the *lighthouse*, torchft's server for all groups.
   The lighthouse answers when all groups that send heartbeats have asked, or after a timeout
   (`join_timeout_ms`). Its answer is a *quorum*: the list of the groups that have asked.
2. The quorum thread builds a process group with the other groups of the quorum, unless the last
   quorum had the same members. `await_quorum` waits for this.
3. The caller makes the exchange, within `watch_exchange`.
4. `vote`: the ranks of the group agree whether the exchange worked on all of them.

The engine uses this module. This module uses:

- `Seat`: one group's connection to the lighthouse.
- `Rendezvous`: builds the process group with the other groups of a quorum.
- `Partition`: handles groups that are alive, but cannot reach each other.
- `Pulse`: looks for groups that fall silent during an exchange, on the lighthouse's status page.
  The page lists the groups, and the time of each group's last heartbeat.

The lighthouse client is built on `torchft.coordination` (ManagerServer, ManagerClient), and not on
`torchft.Manager`. The Manager couples the quorum to a heal of its own: it chooses a donor for each
rank, fetches on the quorum thread, and treats a joiner as up to date after its first vote. It also
swallows errors of the exchange. Here a group reports the step that it really holds. Facts that the
groups send in the exchange decide about heals, equally for all ranks of a group.

See docs/membership.md.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import itertools
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

from titan_ft import device
from titan_ft.config import FaultTolerance
from titan_ft.membership.control_tree import ControlTree
from titan_ft.membership.partition import Partition
from titan_ft.membership.pulse import (
    MAX_LOOKS_PER_INTERVAL,
    SILENT_BEATS,
    GroupAges,
    LighthouseStatus,
    Pulse,
    StatusPage,
    Watch,
    expects_former,
    find_ages,
    find_cut_off,
    find_living,
    find_outsiders,
)
from titan_ft.membership.rendezvous import Rendezvous
from titan_ft.membership.seat import Reply, Seat
from titan_ft.protocol.member import Admission, Member, Quorum, admit, known_members, members_of_job
from titan_ft.protocol.strategy import strategy_of
from titan_ft.run.events import ForeignMember, Joined, LeftOut, LighthouseMoved, PeerSilent
from titan_ft.run.lighthouse import LighthouseAddress
from titan_ft.run.log import EventLog
from titan_ft.system.address import join_address
from titan_ft.system.text import printable
from titan_ft.system.threads import call_for_each
from titan_ft.transfer.reach import Peer, Probe, look_up

logger = logging.getLogger(__name__)

VOTE_SECONDS = 60.0
"""Limit of a vote. The ranks of a group have just ended the same exchange, so they vote within
milliseconds. If a rank hangs, the other groups wait for this group, until this limit ends it."""

_MAX_REQUESTS_AFTER_RESTART = 20
"""A restarted lighthouse knows no group, and forms a quorum of the first groups that ask. So a
group repeats its request up to so many times, until all groups have sent heartbeats again."""
_REPEAT_PAUSE_SECONDS = 0.1  # before each repeated request

_MAX_REQUESTS_AFTER_MOVE = 100
"""The same for a lighthouse that has moved to another address. The groups read its address from
shared storage, and some of them see the new address seconds later than others."""

_NUM_FREQUENT_READERS = 4
"""So many groups, those with the lowest slots, read the lighthouse's page once in each heartbeat
timeout during an exchange. The others read it less often (`_watch_pulse`). So 1000 groups make
about 130 reads in a timeout."""

# A *lone* group is the only member of its quorum. While it computes, it looks for joiners on the
# page. The pause between two looks is the longer one of these two times.
_LONE_PAUSE_PER_TIMEOUT = 0.1  # share of a heartbeat timeout
_LONE_PAUSE_PER_STEP = 0.02  # share of a step

_CONNECTING_TIMES_IN_RESERVE = 2
"""A lone group admits a joiner during a step only if the time that remains of the step is at least
this many times the duration of its last connection to other groups."""

# A *stranger* is a name at the lighthouse that belongs to no group of this job.
_STRANGER_PAUSE_SECONDS = 600.0  # between two reports of strangers for the same reason
_MAX_NAME_LETTERS = 500  # A report shows so much of a stranger's name, which may have megabytes.


class _MissingKind(enum.StrEnum):
    """Whether a quorum lacks groups, according to the lighthouse's page."""

    NOTHING = "nothing"  # The quorum lacks no group.
    # The page does not show an expected group, or cannot be read. The lighthouse may have been
    # restarted, and not know this group yet.
    UNKNOWN = "unknown"
    # A group sends heartbeats and has not asked yet. It may be in a long semi-synchronous round.
    LIVING = "living"


@dataclass(frozen=True)
class _MissingGroups:
    """The groups that a quorum lacks."""

    kind: _MissingKind
    slots: list[int]


@dataclass(frozen=True)
class _LastQuorum:
    """The last quorum that this group has accepted.

    Attributes:
        quorum_id: the lighthouse's number of the quorum.
        names: all names in the quorum, including those of strangers.
        admission: the members of this group's job among these names.
    """

    quorum_id: int
    names: Sequence[str]
    admission: Admission


@dataclass(frozen=True)
class _AcceptedQuorum:
    """A quorum that lacks no group for which this group should wait.

    Attributes:
        reply: the lighthouse's reply with the quorum.
        admission: the members of this group's job in the quorum.
        requested_at: monotonic time in seconds of the group's first request. Further requests may
            have followed, because the quorum lacked groups.
    """

    reply: Reply
    admission: Admission
    requested_at: float


class Membership:
    """One rank's end of quorums and votes. Every rank of a group has one.

    `training/links.py` creates it when the group is ready for its first quorum. From then on the
    group sends heartbeats, and the other groups wait for it. `Rounds` and `GradientExchange` call
    it for each exchange, in this order: `request_quorum`, `need_quorum`, `await_quorum`, `vote`.

    Threads: the training thread makes these calls, in the same order on every rank of the group.
    `Flight`'s thread, which makes the exchange, may call `await_quorum` as well. Methods whose
    docstring says "any thread" may be called on any thread. The methods below "The quorum thread"
    run on the quorum thread. Watches run on threads of their own.

    After a failed exchange, every rank votes, and then requests the next quorum. After
    `RankLostError` or `LighthouseError` no further quorum is possible.

    Args:
        lighthouse: address of the lighthouse (see `LighthouseAddress`).
        host: numeric address at which other groups reach this rank.
        store: host and port of the group's TCPStore.
        control: control tree of the group's ranks, for agreements among them.
        config_digest: hex hash of the settings that must be equal in all groups.
        address: host:port of this rank's state server.
        token: the run's shared secret.
        probe: tests whether groups can be reached.
        leave_requested: returns True if this rank has got a leave request (SIGTERM).
        shape: further values that must be equal in all groups (see `titan_ft.protocol.shape`).
    """

    def __init__(
        self,
        config: FaultTolerance,
        *,
        process_group: Any,
        lighthouse: str,
        host: str,
        group_rank: int,
        group_world_size: int,
        store: tuple[str, int],
        control: ControlTree,
        config_digest: str,
        address: str,
        token: str,
        events: EventLog,
        probe: Probe,
        leave_requested: Callable[[], bool],
        shape: str = "",
    ) -> None:
        self._config = config
        self._group_rank = group_rank
        self._events = events
        self._probe = probe
        self._token = token
        self._leave_requested = leave_requested
        self._heartbeat_timeout = config.heartbeat_timeout_ms / 1000
        self._strategy = strategy_of(config)
        # The ranks agree on quorums on the quorum thread, and on votes on the training thread. The
        # two never overlap, so all ranks make the agreements of the tree in the same order.
        self._control = control
        lighthouse_address = LighthouseAddress(lighthouse, token)

        def report_move(former: str, new: str, job: str) -> None:
            events.emit(LighthouseMoved(address=new, former=former, job=job))

        self._seat = Seat(
            config,
            lighthouse=lighthouse_address,
            group_rank=group_rank,
            store=TCPStore(*store, is_master=False, wait_for_workers=False),
            control=control,
            address=address,
            token=token,
            on_move=report_move,
        )
        store_address = join_address(host, store[1])

        def make_first_name() -> Member:  # `Seat` calls this on rank 0, whose host has the store.
            return Member(
                config.replica_id,
                time.time(),
                uuid.uuid4().hex,
                config_digest,
                config.job_id,
                store_address,
                shape,
                token=token,
            )

        self._seat.enter(make_first_name)
        self._thread = ThreadPoolExecutor(
            1, "titan_ft_quorum", initializer=device.thread_initializer()
        )
        self._requested_quorum: Future[Quorum] | None = None  # None from `vote` to the next request
        # Set when this group has nothing left to compute before it needs the requested quorum.
        self._is_quorum_needed = threading.Event()
        self._requested_at = 0.0  # monotonic time of the last `request_quorum`
        # Duration of the last step, measured from `request_quorum(may_grow=True)` to `need_quorum`;
        # 0 = not known yet.
        self._computing_seconds = 0.0
        # Duration of the last set-up of a process group with other groups; infinite = not known.
        self._connecting_seconds = math.inf
        self._last_quorum = _LastQuorum(0, [], Admission(()))
        self._donors: tuple[int, ...] = ()  # see `remember_donors`
        # True if a quorum may lack the groups in `_donors`: this group has been in a quorum with
        # other groups, or has waited for the donors long enough.
        self._need_not_await_donors = False
        self._last_reports: dict[str, float] = {}  # time of the last report of strangers, by reason
        # This rank's counterparts: the ranks with the same group rank in the other groups of the
        # last quorum, by slot.
        self._counterparts: dict[int, Peer] = {}
        self._failures = 0  # failed votes in a row
        self._closed = False
        self._page = StatusPage(lighthouse_address)
        # `Rendezvous.prefix` of the exchange that the pulse looked at last. The pulse may call for
        # an abort late, when the next exchange has begun. The prefix restricts the abort to this
        # exchange.
        self._watched_exchange = ""
        self._rendezvous = Rendezvous(
            process_group,
            timedelta(milliseconds=config.process_group_timeout_ms),
            control=control,
            group_rank=group_rank,
            group_world_size=group_world_size,
            address=address,
        )
        self._partition = Partition(
            config,
            seat=self._seat,
            rendezvous=self._rendezvous,
            control=control,
            probe=probe,
            leave_requested=leave_requested,
            group_rank=group_rank,
            lighthouse=lighthouse_address,
            events=events,
        )
        self._watches: list[Watch] = []
        if group_rank == 0:
            # Only rank 0 has this watch. Its abort reaches the other ranks over the control tree.
            self._watches.append(self._watch_pulse())
        self._watches.append(self._partition.watch(self._find_others))

    @property
    def member(self) -> Member:
        """This group's name at the lighthouse."""
        return self._seat.member

    @property
    def process_group(self) -> Any:
        """The process group with the other groups of the quorum."""
        return self._rendezvous.process_group

    @property
    def timeout(self) -> timedelta:
        """Timeout of the process group's collectives."""
        return self._rendezvous.timeout

    def request_quorum(self, step: int, *, may_grow: bool = False) -> None:
        """Request the quorum of the next exchange. Returns at once.

        Args:
            step: committed updates in this group's state.
            may_grow: True if this group computes before it needs the quorum. If it is alone in the
                quorum, another group that comes before `need_quorum` is admitted to it.
        """
        assert self._requested_quorum is None, (
            "a quorum is requested already, and vote() has not used it"
        )
        self._requested_at = time.monotonic()
        self._is_quorum_needed.clear()
        if not may_grow:
            self._is_quorum_needed.set()
        self._requested_quorum = self._thread.submit(
            self._request_and_connect, step, self._failures
        )

    def need_quorum(self) -> None:
        """Note that this group needs the requested quorum now, so the quorum must not grow."""
        if not self._is_quorum_needed.is_set():
            self._computing_seconds = time.monotonic() - self._requested_at
            self._is_quorum_needed.set()

    @property
    def quorum_requested(self) -> bool:
        """True from `request_quorum` until `vote`."""
        return self._requested_quorum is not None

    @property
    def quorum_ready(self) -> bool:
        """True if `await_quorum` would return or raise without waiting."""
        return self._requested_quorum is not None and self._requested_quorum.done()

    def await_quorum_for(self, seconds: float) -> None:
        """Wait for the requested quorum for at most `seconds`. Without a request, sleep."""
        if self._requested_quorum is None:
            time.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            self._requested_quorum.exception(seconds)  # Waits, and leaves errors to `await_quorum`.

    def await_quorum(self) -> Quorum:
        """Wait for the requested quorum, and return it.

        If this group cannot reach some of the other groups and is left out for that, the wait lasts
        until it can reach them, or until those groups are gone.

        Raises:
            LighthouseError: the lighthouse did not answer for `seat.PROBE_SECONDS`.
            Leaving: this group has a leave request, and is left out of the quorum.
            RankLostError: a rank of this group is lost.
            ReplacedError, ConfigMismatchError, ForeignMemberError, UnknownTokenError: see
                `protocol.member.admit`.
        """
        assert self._requested_quorum is not None, "request_quorum() comes before await_quorum()"
        return self._requested_quorum.result()

    def vote(self, step: int, ok: bool) -> bool:
        """Agree within the group whether the exchange worked.

        If the exchange failed, the lighthouse gives the next quorum a new id. So all members build
        a new process group.

        Args:
            step: committed updates in this group's state.
            ok: True if the exchange worked on this rank.

        Returns:
            True if the exchange worked on every rank of the group.

        Raises:
            TimeoutError: not all ranks have voted within `VOTE_SECONDS`.
            RankLostError: a rank of this group is lost.
            LighthouseError: `close` was called meanwhile. A request raises the same error then.
        """
        self._partition.before_vote(ok)
        # Watch during the vote as well: another rank may still wait in its exchange, and this rank
        # then waits for that rank's vote.
        with self.watch_exchange():
            agreed = self._agree_on_outcome(step, ok)
        if agreed:
            # The exchange worked, so a link that seemed dead was only slow.
            self._partition.forget_dead_links()
            self._failures = 0
        else:
            self._failures += 1
        self._requested_quorum = None
        return agreed

    def _agree_on_outcome(self, step: int, ok: bool) -> bool:
        """Return True if the exchange worked on all ranks of the group."""
        own_objections = []
        if not ok:
            own_objections.append("no")

        def decide(objections: set[str]) -> str:
            if objections:
                return "no"
            return "yes"

        try:
            answer = self._control.rank0_decides(own_objections, decide, VOTE_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(
                f"the ranks of this group did not all vote after step {step} within "
                f"{VOTE_SECONDS:g} s: one of them hangs, or is far slower than the others"
            ) from error
        return answer == "yes"

    @contextlib.contextmanager
    def watch_exchange(self) -> Iterator[None]:
        """Watch the exchange while the block runs.

        A watch aborts the exchange if other members are silent, have left it, or cannot be reached.
        """
        with contextlib.ExitStack() as watches:
            for watch in self._watches:
                watches.enter_context(watch.watching())
            yield

    def find_outsiders(self, quorum: Quorum, step: int) -> list[int]:
        """Return the slots of groups that are alive and are not in `quorum`.

        On ranks other than 0 the result is empty. On rank 0 it has two kinds of groups:

        - groups that send heartbeats;
        - groups that were left out because they cannot reach other groups, if they hold more than
          `step` updates. Such a group stops its heartbeats and waits until its links work again. So
          it does not count as alive by its heartbeats, and is probed.
        """
        if self._group_rank != 0:
            return []
        status = self._page.read(self._heartbeat_timeout)
        if status is None:
            return []
        slots_by_peer: dict[Peer, int] = {}
        for member in find_cut_off(self.member, quorum.members, status, step):
            slots_by_peer[Peer(member.unique, member.store)] = member.slot
        outsiders = set(
            find_outsiders(self.member, quorum.members, status, self._heartbeat_timeout),
        )
        for peer in self._probe.find_answering(list(slots_by_peer)):
            outsiders.add(slots_by_peer[peer])
        return sorted(outsiders)

    def find_living(self, members: Collection[Member]) -> set[int]:
        """Return the slots of the members that send heartbeats.

        If the lighthouse does not answer, all members count as alive.
        """
        status = self._page.read(self._heartbeat_timeout)
        if status is None:
            return {member.slot for member in members}
        living = find_living(self.member, status, SILENT_BEATS * self._heartbeat_timeout)
        processes = {member.process for member in living}
        return {member.slot for member in members if member.process in processes}

    def find_ages(self) -> GroupAges | None:
        """Return how long ago each group sent its last heartbeat, and when its process started.

        Any thread. None = the lighthouse does not answer, or gets no heartbeats of this group.
        """
        status = self._page.read(self._heartbeat_timeout)
        if status is None:
            return None
        return find_ages(self.member, status, self._heartbeat_timeout)

    def find_holders(self) -> dict[int, Peer]:
        """Return this rank's counterparts whose state a heal can use, by slot; any thread.

        - After its first quorum, this group uses the members of the last quorum.
        - Before its first quorum, this group finds living groups on the lighthouse's page. Their
          state is useful only if it does not change soon. This is so in two cases: in
          semi-synchronous training, and if the exchange under way still expects the former process
          of this group. The latter exchange fails, and is repeated with this group.
        """
        if self._counterparts:
            return self._counterparts
        status = self._read_status()
        if self._strategy.has_long_rounds or expects_former(self.member, status):
            return self._find_peers(status)
        return {}

    def remember_donors(self, slots: Sequence[int]) -> None:
        """Remember the groups that offered the state which this group fetches.

        This matters only in semi-synchronous training, before this group's first quorum. The donors
        are in the middle of a long round then, and do not ask for a quorum yet. If this group got a
        quorum without them, it would commit alone, and their round would be lost. So its first
        quorum must include one of them, unless all of them are gone (`_find_expected_donors`).

        Args:
            slots: slots of these groups, the same on all ranks.
        """
        self._donors = tuple(slots)

    def find_addresses(self, slots: Sequence[int]) -> list[str]:
        """Return the addresses (host:port) of the state servers of this rank's counterparts.

        Any thread. The address is empty for a group that is gone or cannot be reached.

        Args:
            slots: slots of the counterparts' groups.

        Raises:
            OSError: all of these groups are gone or cannot be reached, or the lighthouse does not
                answer.
        """
        peers = self._counterparts
        if not peers:
            peers = self._find_peers(self._read_status())

        def find_address(slot: int) -> str:
            peer = peers.get(slot)
            if peer is None:
                return ""
            if peer.address:
                return peer.address
            with contextlib.suppress(KeyError, OSError, RuntimeError):
                return look_up(peer, self._group_rank, self._token)
            return ""

        addresses = call_for_each(find_address, slots, "titan_ft_addresses", len(slots))
        if not any(addresses):
            raise ConnectionError(f"none of groups {list(slots)} lives and can be reached")
        return addresses

    def _read_status(self) -> LighthouseStatus:
        """Read the lighthouse's page.

        Raises:
            OSError: the lighthouse does not answer.
        """
        status = self._page.read(self._heartbeat_timeout)
        if status is None:
            raise ConnectionError("the lighthouse's page cannot be read")
        return status

    def _find_peers(self, status: LighthouseStatus) -> dict[int, Peer]:
        """Return this rank's counterparts in the living groups, by slot; without addresses."""
        peers = {}
        for member in find_living(self.member, status, self._heartbeat_timeout):
            if member.slot != self.member.slot:
                peers[member.slot] = Peer(member.unique, member.store)
        return peers

    def abort(self) -> None:
        """Abort the exchange under way. The other groups notice that the connections are closed."""
        self._rendezvous.abort(self._rendezvous.prefix)

    def stop_heartbeats(self) -> None:
        """Stop this group's heartbeats for good, so that the other groups wait for it no longer.

        Rank 0 calls it, on any thread.
        """
        self._seat.close()

    def close(self) -> None:
        """Leave: stop the heartbeats and close the process group. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._is_quorum_needed.set()
        self._seat.close()
        for watch in self._watches:
            watch.close()
        self._control.end_agreements()
        self._rendezvous.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # The quorum thread

    def _request_and_connect(self, step: int, failures: int) -> Quorum:
        """Get a quorum that contains this group, and build the process group with its members.

        1. If exchanges have failed because of dead links, report the groups that this group cannot
           reach.
        2. Request quorums until one of them admits this group. A quorum leaves this group out while
           it cannot reach other groups.
        3. Build the process group, unless the last quorum was the same.

        Args:
            step: committed updates in this group's state.
            failures: number of failed votes in a row.
        """
        if self._partition.must_report(failures):
            self._partition.report_links(failures, step)
        accepted = self._request_until_complete(step, failures)
        while self.member not in accepted.admission.members:
            self._partition.stay_outside(accepted.admission)
            accepted = self._request_until_complete(step, failures)
        self._partition.note_quorum(accepted.admission)
        reply = accepted.reply
        members = accepted.admission.members
        # A restarted lighthouse numbers its quorums from the beginning. So the key contains the
        # members' names as well.
        unique_names = "/".join(member.unique for member in members)
        members_digest = hashlib.sha256(unique_names.encode()).hexdigest()[:16]
        key = f"{reply.quorum_id}/{members_digest}"
        error: str | None = None
        connected_at = reply.received_at
        if not accepted.admission.settled:
            # Do not raise: all groups of the quorum make this exchange, which fails at once. They
            # vote, and repeat the exchange in the next quorum.
            error = "groups that cannot reach each other have yet to report what they hold"
        elif key != self._rendezvous.key:
            error = self._rendezvous.configure(key, reply.quorum_id, members, self.member, step)
            connected_at = time.monotonic()
            if error is None:
                self._note_joined(accepted, step, connected_at)
        max_step = reply.max_step
        has_strangers = len(members) < len(reply.replica_ids)
        if has_strangers:
            # The lighthouse's maximum includes the steps of strangers, which may claim anything. So
            # take the maximum of the members' own steps. `Rendezvous` has read them when it built
            # the process group. Since then all members have committed the same updates as this
            # group.
            max_step = max(step, self._rendezvous.max_step)
        return Quorum(
            key,
            members.index(self.member),
            members,
            max_step,
            error=error,
            requested_at=accepted.requested_at,
            answered_at=reply.received_at,
            connected_at=connected_at,
        )

    def _note_joined(self, accepted: _AcceptedQuorum, step: int, connected_at: float) -> None:
        """Remember and report that a new process group is built."""
        members = accepted.admission.members
        received_at = accepted.reply.received_at
        if len(members) > 1:
            self._connecting_seconds = connected_at - received_at
        self._note_counterparts(members)
        self._events.emit(
            Joined(
                quorum=accepted.reply.quorum_id,
                participants=[member.slot for member in members],
                step=step,
                quorum_seconds=received_at - accepted.requested_at,
                rebuild_seconds=connected_at - received_at,
            )
        )

    def _note_counterparts(self, members: Sequence[Member]) -> None:
        """Remember where this rank's counterparts in the quorum serve their states.

        Not in semi-synchronous training: the next quorum may come an hour later, and a member may
        have been replaced by then.
        """
        if self._strategy.has_long_rounds:
            return
        addresses = self._rendezvous.addresses
        counterparts = {}
        for member in members:
            if member != self.member and member.unique in addresses:
                address = addresses[member.unique]
                counterparts[member.slot] = Peer(member.unique, member.store, address)
        self._counterparts = counterparts

    def _request_until_complete(self, step: int, failures: int) -> _AcceptedQuorum:
        """Request quorums until one of them contains every group that this group should wait for.

        A quorum may lack a living group for two reasons. A restarted lighthouse does not know all
        groups yet. Or the lighthouse did not wait for the group, because the group computes for
        longer than `join_timeout_ms`.

        For each reply:

        1. Find the members of the job in the quorum, and the members of the last quorum that are
           absent in this one.
        2. Find out whether the lighthouse was restarted or has moved.
        3. Read the lighthouse's page for groups that the quorum lacks.
        4. Accept the quorum, or repeat the request after a pause.

        Each test has the same result on all ranks of the group, so all ranks make equally many
        requests.
        """
        last = self._last_quorum
        requested_at = math.inf
        was_restarted = False
        waited_for_unknown = False
        max_repeats = _MAX_REQUESTS_AFTER_RESTART
        earlier_id, earlier_names = last.quorum_id, last.names
        for num_repeats in itertools.count():
            is_first = num_repeats == 0
            # Report failures only in the first request. Each report gives the next quorum a new id.
            # So another new id, in a later reply, shows that another group has reported a failure.
            reported_failures = 0
            if is_first:
                reported_failures = failures
            reply = self._seat.request(step, reported_failures, self._await_joiner)
            requested_at = min(requested_at, reply.received_at - reply.seconds)
            names = reply.replica_ids
            admission = last.admission
            if names != last.names:
                admission = admit(self.member, names, is_first=not last.names)
            self._report_strangers(admission)
            # Include groups that `admission` leaves out because of dead links: they have asked.
            present = {member.slot for member in members_of_job(self.member, names)}
            last_slots = [member.slot for member in last.admission.members]
            absent = [slot for slot in last_slots if slot not in present]
            # A restarted lighthouse numbers its quorums from the beginning.
            has_lower_id = reply.quorum_id < last.quorum_id
            reuses_id = reply.quorum_id == last.quorum_id and names != last.names
            if is_first and (has_lower_id or reuses_id):
                was_restarted = True
            if reply.moved:
                was_restarted = True
                max_repeats = _MAX_REQUESTS_AFTER_MOVE
            missing = self._find_missing_groups(present, absent)
            is_unknown = missing.kind is _MissingKind.UNKNOWN
            if is_unknown:
                was_restarted = True
                waited_for_unknown = True
            is_living = missing.kind is _MissingKind.LIVING
            if not is_living:  # Wait for a living group without a limit.
                missing_may_come = was_restarted and (bool(absent) or is_unknown)
                # Another member may not know of the restart. It accepts the quorum while this group
                # still waits here, and makes the exchange, which fails without this group. It
                # reports the failure, so the next quorum has the same names and a higher id. Then
                # accept that quorum, or the other member would fail again and again.
                another_failed = names == earlier_names and reply.quorum_id > earlier_id
                if not missing_may_come or another_failed or num_repeats >= max_repeats:
                    break
            earlier_id, earlier_names = reply.quorum_id, names
            if is_first:
                slots = missing.slots or absent
                logger.warning("waiting for groups %s, which the quorum lacks", slots)
            time.sleep(_REPEAT_PAUSE_SECONDS)
        self._last_quorum = _LastQuorum(reply.quorum_id, names, admission)
        # A group that is alone in the quorum, and has not waited for an unknown group, must still
        # wait for its donors in the next quorum: it may learn of them only later.
        if waited_for_unknown or len(admission.members) > 1:
            self._need_not_await_donors = True
        return _AcceptedQuorum(reply, admission, requested_at)

    def _await_joiner(self, names: Sequence[str]) -> bool:
        """If this group is alone in its quorum, wait for a joiner while the group computes.

        `Seat` calls this on rank 0, before it passes the quorum on to the other ranks.

        A lone group makes no collectives with other groups, so its quorum may still grow during the
        step. Then a joiner can fetch the state in this step already, and need not wait for the next
        quorum. The wait ends when this group needs the quorum, or when too little time is left to
        connect to a joiner within the step.

        Args:
            names: the names in the quorum.

        Returns:
            True if another group has asked, so that the quorum must be requested again.
        """
        slots = {member.slot for member in members_of_job(self.member, names)}
        if slots != {self.member.slot}:
            return False
        if names != self._last_quorum.names:
            # The quorum is new. Build its process group now: after the step it would cost time.
            return False
        pause_seconds = max(
            _LONE_PAUSE_PER_TIMEOUT * self._heartbeat_timeout,
            _LONE_PAUSE_PER_STEP * self._computing_seconds,
        )
        step_end = self._requested_at + self._computing_seconds
        deadline = step_end - _CONNECTING_TIMES_IN_RESERVE * self._connecting_seconds
        while time.monotonic() < deadline and not self._is_quorum_needed.wait(pause_seconds):
            if self._leave_requested():
                return False  # The time is needed to leave, and not to connect to a joiner.
            status = self._page.read(self._heartbeat_timeout)
            if status is None:
                return False  # Each further read could wait for its timeout as well.
            if status.num_asking == 0:
                continue
            if find_outsiders(self.member, [self.member], status, self._heartbeat_timeout):
                return not self._is_quorum_needed.is_set()
        return False

    def _find_missing_groups(
        self,
        present: Collection[int],
        absent: Collection[int],
    ) -> _MissingGroups:
        """Return the groups that a quorum lacks, by the lighthouse's page. A collective.

        Rank 0 reads the page, and announces the result to the other ranks. In semi-synchronous
        training the page is read for every quorum: a living group may be in a long round, and a
        commit without that group would make its round void.

        Args:
            present: slots of the groups that have asked for the quorum.
            absent: slots of the last quorum's members that have not asked.
        """
        if not absent and not self._strategy.has_long_rounds:
            return _MissingGroups(_MissingKind.NOTHING, [])

        def decide() -> str:
            """Return the kind and the slots, separated by blanks."""
            missing = self._find_missing_on_rank0(present, absent)
            if not missing.slots:
                return _MissingKind.NOTHING
            return " ".join([missing.kind, *map(str, missing.slots)])

        kind, *slots = self._control.rank0_announces(decide).text.split()
        return _MissingGroups(_MissingKind(kind), [int(slot) for slot in slots])

    def _find_missing_on_rank0(
        self,
        present: Collection[int],
        absent: Collection[int],
    ) -> _MissingGroups:
        """Read the lighthouse's page, and return the groups that a quorum lacks."""
        status = self._page.read(self._heartbeat_timeout)
        expected = set(absent)
        if not expected:
            expected = self._find_expected_donors(present)
        if status is None:
            if not self._strategy.has_long_rounds:
                # Do not repeat the request. Otherwise each death of a group would cost the time of
                # a second request.
                expected = set()
            return _MissingGroups(_MissingKind.UNKNOWN, sorted(expected))
        known = {member.slot for member in members_of_job(self.member, status.heartbeats)}
        if not known.issuperset(expected):
            return _MissingGroups(_MissingKind.UNKNOWN, sorted(expected - known))
        if not self._strategy.has_long_rounds:
            return _MissingGroups(_MissingKind.NOTHING, [])
        living = find_living(self.member, status, self._heartbeat_timeout)
        slots = {member.slot for member in living}
        return _MissingGroups(_MissingKind.LIVING, sorted(slots.difference(present)))

    def _find_expected_donors(self, present: Collection[int]) -> set[int]:
        """Return the donors that a newcomer's first quorum must wait for (see `remember_donors`).

        Empty if one of the donors has asked for this quorum.

        Only rank 0 calls this. The training thread may set the donors while the quorum thread waits
        for a reply, and does so at another moment on each rank. So the ranks could get different
        results.
        """
        if self._need_not_await_donors or not self._strategy.has_long_rounds:
            return set()
        donors = set(self._donors)
        if donors.intersection(present):
            return set()
        return donors

    def _report_strangers(self, admission: Admission) -> None:
        """Report strangers, at most one for each reason in ten minutes, on rank 0.

        A stranger may use a new name each time. A report of each name could fill the disk.
        """
        if self._group_rank != 0:
            return
        for name, reason in admission.strangers.items():
            now = time.monotonic()
            last_report = self._last_reports.get(reason, -math.inf)
            if now < last_report + _STRANGER_PAUSE_SECONDS:
                continue
            self._last_reports[reason] = now
            shown = printable(name, _MAX_NAME_LETTERS)
            logger.warning("left aside at the lighthouse: member %s, because %s", shown, reason)
            self._events.emit(ForeignMember(member=shown, reason=reason))

    # Members that fall silent, or go on without this group

    def _watch_pulse(self) -> Pulse:
        """Build the watch for groups that fall silent during an exchange, or leave it."""
        # The page has a line for each group, and every group reads it. So in a large job, most
        # groups read it less often: slots 0 to 3 once in a heartbeat timeout, 4 to 7 once in 2
        # timeouts, 8 to 15 in 3, 16 to 31 in 4, ...
        num_timeouts = 1 + (self._config.replica_id // _NUM_FREQUENT_READERS).bit_length()
        interval = self._heartbeat_timeout * num_timeouts
        first = interval
        patience = SILENT_BEATS * self._heartbeat_timeout
        on_leaver = None
        if self._config.process_group == "nccl":
            # NCCL does not show that a member has died. Look early: when the exchange begins, a
            # member may already have been silent for almost the whole patience.
            first = interval / MAX_LOOKS_PER_INTERVAL
            patience = self._heartbeat_timeout
            # Only with NCCL. Over Gloo, closed sockets show that a member has left. Also, a member
            # that asks for the next quorum may have completed the exchange, while its last bytes
            # still travel over a slow link for seconds.
            on_leaver = self._abort_for_leaver
        return Pulse(
            self._page,
            first=first,
            interval=interval,
            patience=patience,
            own=lambda: self.member,
            members=self._find_watched,
            on_silence=self._abort_for_silence,
            on_left_out=self._abort_if_left_out,
            on_leaver=on_leaver,
        )

    def _find_others(self) -> list[Member]:
        """Return the other members of the exchange under way; none if its quorum is not ready."""
        # A local variable, because the training thread sets the attribute to None after the vote.
        requested = self._requested_quorum
        if requested is None or not requested.done():
            return []
        if requested.cancelled() or requested.exception() is not None:
            return []
        return [member for member in requested.result().members if member != self.member]

    def _find_watched(self) -> list[str]:
        """Return the names of the exchange's other members, and remember which exchange it is."""
        self._watched_exchange = self._rendezvous.prefix
        return [member.replica_id for member in self._find_others()]

    def _abort_for_silence(self, silent: dict[str, float]) -> None:
        """Abort the exchange because members of it are silent.

        Args:
            silent: seconds since the last heartbeat, by the member's name.
        """
        # Abort before the event is written, because the write may fail on a full disk.
        self._rendezvous.abort(self._watched_exchange)
        slots = sorted(member.slot for member in known_members(silent, self._token))
        seconds = max(silent.values())
        logger.warning(
            "no heartbeat from groups %s for %.1f s: the exchange is broken off",
            slots,
            seconds,
        )
        self._events.emit(PeerSilent(slots=slots, seconds=seconds))

    def _abort_if_left_out(self, slots: list[int]) -> None:
        """Abort the exchange because other members have left it, and go on without this group."""
        self._rendezvous.abort(self._watched_exchange)
        logger.warning("groups %s have gone on without this one: the exchange is broken off", slots)
        self._events.emit(LeftOut(members=slots))

    def _abort_for_leaver(self) -> None:
        """Abort the exchange because a member has left it. The next quorum shows which one."""
        self._rendezvous.abort(self._watched_exchange)
        logger.warning(
            "a group of this exchange asks for the next quorum already: "
            "the exchange is broken off here too",
        )
