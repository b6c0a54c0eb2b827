# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Membership: which groups take part in the next exchange, and whether the exchange worked.

The *lighthouse* is torchft's server for all groups. Each group sends it heartbeats. A group that is
ready for an exchange asks it for a *quorum*: the list of the groups that have asked. After the
exchange, the ranks of each group *vote* whether it worked on all of them.

The engine uses this module only. The modules below it are:

- `Seat`: one group's connection to the lighthouse.
- `Rendezvous`: builds the process group with the other groups of a quorum.
- `Partition`: handles groups that cannot be reached.
- `Pulse`: looks for groups that fall silent during an exchange, on the lighthouse's status page.

The base is `torchft.coordination` (ManagerServer, ManagerClient), not `torchft.Manager`. The
Manager couples the quorum to a heal of its own: it chooses a donor for each rank, fetches on the
quorum thread, and treats a joiner as up to date after its first vote. It also swallows errors of
the exchange. Here a group reports the step that it really holds, and the rows of the exchange
decide about heals, equally for all ranks of a group.

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
    CLOSEST,
    SILENT_BEATS,
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
milliseconds. A rank that hangs would make the other groups wait, and the limit ends its group."""

_REUNION_REQUESTS = 20
"""Requests of a group to a lighthouse that was started again. Such a lighthouse knows no group, and
forms a quorum of the first groups that ask. During these requests, all groups have time to send
heartbeats again."""
_REUNION_PAUSE_SECONDS = 0.1  # between two of these requests

_MOVE_REQUESTS = 100
"""Requests of a group to a lighthouse that has moved. Shared storage shows the move to some groups
seconds later than to others."""

_NUM_FREQUENT_READERS = 4
"""While they wait in an exchange, the groups with the lowest slots read the lighthouse's page once
in each heartbeat timeout. The others read it less often (`_watch_pulse`). So 1000 groups make about
130 reads in a timeout."""

# While a lone group computes, it looks for a joiner on the page. It pauses for the longer one of
# these times.
_LONE_PAUSE_PER_TIMEOUT = 0.1  # share of a heartbeat timeout
_LONE_PAUSE_PER_STEP = 0.02  # share of a step

_CONNECTING_TIMES_IN_RESERVE = 2
"""A lone group admits a joiner in the middle of a step only if the rest of the step is this many
times as long as it last took to connect to other groups."""

# A *stranger* is a name at the lighthouse that belongs to no group of this job.
_STRANGER_PAUSE_SECONDS = 600.0  # between two reports of strangers for the same reason
_MAX_NAME_LETTERS = 500  # of a stranger's name in a report; the name may have four million


class _Lack(enum.StrEnum):
    """Why a quorum lacks groups, according to the lighthouse's page."""

    NOTHING = "nothing"  # it lacks none
    # The page does not show an expected group, or cannot be read: the lighthouse may be new.
    UNKNOWN = "unknown"
    # A group sends heartbeats, and has not asked yet: its semi-synchronous round may take long.
    LIVING = "living"


@dataclass(frozen=True)
class _Missing:
    """The groups that a quorum lacks."""

    lack: _Lack
    slots: list[int]


@dataclass(frozen=True)
class _LastQuorum:
    """The lighthouse's last quorum.

    Attributes:
        quorum_id: the lighthouse's number of the quorum.
        names: names of all members, strangers included.
        admission: the members of this group's job among them.
    """

    quorum_id: int
    names: Sequence[str]
    admission: Admission


@dataclass(frozen=True)
class _AcceptedQuorum:
    """A quorum for which this group waits no longer.

    Attributes:
        reply: the lighthouse's reply.
        admission: the members of this group's job in it.
        requested_at: monotonic time in seconds of the group's first request for it.
    """

    reply: Reply
    admission: Admission
    requested_at: float


class Membership:
    """One rank's part in quorums, exchanges and votes. Every rank of a group has one.

    `training/links.py` creates it when the group is ready for its first quorum. From then on the
    group sends heartbeats, and the other groups wait for it. `Rounds` and `GradientExchange` call
    it once for each exchange, in this order: `request_quorum`, `need_quorum`, `await_quorum`,
    `vote`.

    Threads: the training thread makes these calls, in the same order on every rank of the group.
    The exchange's thread may call `await_quorum` as well. Methods whose docstring says "any thread"
    may be called on any thread. The quorum thread asks the lighthouse and builds the process group
    (`_find_quorum` and the methods after it). Watches run on threads of their own.

    After a failed exchange, every rank votes, and then requests the next quorum. After
    `RankLostError` or `LighthouseError` no further quorum is possible.

    Args:
        lighthouse: its address (see `LighthouseAddress`).
        host: numeric address at which other groups reach this rank.
        store: host and port of the group's TCPStore.
        control: tree of the group's ranks.
        config_digest: hex hash of the settings that must be equal in all groups.
        address: host:port of this rank's state server.
        token: the run's shared secret.
        leave_requested: returns True if this rank has been asked to leave.
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
        # Over this tree the ranks of the group agree about quorums (on the quorum thread) and about
        # votes (on the training thread). The two never overlap.
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

        def make_first_name() -> Member:  # called on rank 0, whose host has the store
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
        self._pending: Future[Quorum] | None = None  # the requested quorum; None after its vote
        # Set while the group has nothing left to compute before the quorum.
        self._is_needed = threading.Event()
        self._requested_at = 0.0
        # Time from the last `request_quorum(may_grow=True)` to its `need_quorum`; 0 = none yet.
        self._computing_seconds = 0.0
        # Time that the last set-up of a process group with other groups took; infinite before it.
        self._connecting_seconds = math.inf
        self._last_quorum = _LastQuorum(0, [], Admission(()))
        # This group has been in a quorum with other groups, or has waited for those in `_donors`
        # long enough.
        self._has_met_others = False
        self._donors: tuple[int, ...] = ()  # slots that offered the state which this group fetches
        self._last_reports: dict[str, float] = {}  # time of the last report of strangers, by reason
        # The ranks of this index in the other groups of the last quorum, by slot.
        self._counterparts: dict[int, Peer] = {}
        self._failures = 0  # failed votes in a row
        self._closed = False
        self._page = StatusPage(lighthouse_address)
        # `Rendezvous.prefix` of the exchange that the pulse looked at last. An abort of that
        # exchange must not hit the next one.
        self._watched_prefix = ""
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
            # Rank 0 alone has this watch. Its abort reaches the other ranks over the control tree.
            self._watches.append(self._watch_pulse())
        self._watches.append(self._partition.watch(self._find_others))

    @property
    def member(self) -> Member:
        """This group's name at the lighthouse."""
        return self._seat.member

    @property
    def process_group(self) -> Any:
        """The process group with the members of the quorum."""
        return self._rendezvous.process_group

    @property
    def timeout(self) -> timedelta:
        """Timeout of the process group's collectives."""
        return self._rendezvous.timeout

    def request_quorum(self, step: int, *, may_grow: bool = False) -> None:
        """Request the quorum of the next exchange. Returns at once.

        Args:
            step: committed updates that this group holds.
            may_grow: this group computes before it needs the quorum. If it is alone in the quorum,
                a group that comes before `need_quorum` is admitted to it.
        """
        assert self._pending is None, "a quorum is requested already, and vote() has not used it"
        self._requested_at = time.monotonic()
        self._is_needed.clear()
        if not may_grow:
            self._is_needed.set()
        self._pending = self._thread.submit(self._find_quorum, step, self._failures)

    def need_quorum(self) -> None:
        """Stop the growth of the requested quorum: this group has nothing left to compute."""
        if not self._is_needed.is_set():
            self._computing_seconds = time.monotonic() - self._requested_at
            self._is_needed.set()

    @property
    def quorum_requested(self) -> bool:
        """True from `request_quorum` until `vote`."""
        return self._pending is not None

    @property
    def quorum_ready(self) -> bool:
        """True if `await_quorum` returns or raises at once."""
        return self._pending is not None and self._pending.done()

    def await_quorum_for(self, seconds: float) -> None:
        """Wait for the requested quorum for at most `seconds`. Without a request, sleep."""
        if self._pending is None:
            time.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            self._pending.exception(seconds)  # only waits: `await_quorum` raises an error

    def await_quorum(self) -> Quorum:
        """Wait for the requested quorum, and return it.

        If this group cannot reach all of the others, the wait lasts until it can, or until those
        groups are gone.

        Raises:
            LighthouseError: the lighthouse did not answer for `seat.PROBE_SECONDS`.
            Leaving: the group has been asked to leave, and cannot reach the others anyway.
            RankLostError: a rank of this group is lost.
            ReplacedError, ConfigMismatchError, ForeignMemberError, UnknownTokenError: see
                `protocol.member.admit`.
        """
        assert self._pending is not None, "request_quorum() comes before await_quorum()"
        return self._pending.result()

    def vote(self, step: int, ok: bool) -> bool:
        """Agree within the group whether the exchange worked.

        If it did not, the lighthouse gives the next quorum a new id, so all members build a new
        process group.

        Args:
            step: committed updates that this group holds.
            ok: the exchange worked on this rank.

        Returns:
            True if the exchange worked on every rank of the group.

        Raises:
            TimeoutError: not all ranks have voted within `VOTE_SECONDS`.
            RankLostError: a rank of this group is lost.
            LighthouseError: `close` was called meanwhile. A request raises the same error then.
        """
        self._partition.before_vote(ok)
        with self.watch_exchange():  # the exchange of another rank may still be waiting
            agreed = self._agree_on(step, ok)
        if agreed:
            # The exchange worked, so a link that seemed dead was only slow.
            self._partition.forget_dead_links()
            self._failures = 0
        else:
            self._failures += 1
        self._pending = None
        return agreed

    def _agree_on(self, step: int, ok: bool) -> bool:
        """Return True if all ranks of the group say that the exchange worked."""
        own_objections = () if ok else ("no",)

        def decide(objections: set[str]) -> str:
            return "no" if objections else "yes"

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
        """Watch an exchange during the block.

        The exchange is broken off if members are silent, have left it, or cannot be reached.
        """
        with contextlib.ExitStack() as watches:
            for watch in self._watches:
                watches.enter_context(watch.watching())
            yield

    def find_outsiders(self, quorum: Quorum, step: int) -> list[int]:
        """Return the slots of groups that live and are not in `quorum`.

        Rank 0 finds them. On other ranks the result is empty.

        The result has two kinds of groups:

        - groups that send heartbeats;
        - groups outside of the quorum because of dead links, if they hold more than `step` updates.
          They send no heartbeats, and come back only when the links work again, or when the groups
          at the other ends are gone.
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

        Returns all slots if the lighthouse does not answer.
        """
        status = self._page.read(self._heartbeat_timeout)
        if status is None:
            return {member.slot for member in members}
        living = find_living(self.member, status, SILENT_BEATS * self._heartbeat_timeout)
        processes = {member.process for member in living}
        return {member.slot for member in members if member.process in processes}

    def find_ages(self) -> tuple[dict[int, float], dict[int, float]] | None:
        """Return each group's seconds since its last heartbeat, and the start of its process.

        Any thread. None if the lighthouse does not answer, or does not hear this group.
        """
        status = self._page.read(self._heartbeat_timeout)
        if status is None:
            return None
        return find_ages(self.member, status, self._heartbeat_timeout)

    def find_holders(self) -> dict[int, Peer]:
        """Return this rank's counterparts whose state it can use, by slot; any thread.

        1. After a quorum: the counterparts in it.
        2. A newcomer without a quorum asks the lighthouse's page. It may use the living groups only
           if the exchange under way expects its group's former process: that exchange breaks, and
           is repeated with the newcomer. An exchange that can complete would make the fetched state
           one update old.
        3. In semi-synchronous training the state stays the same for long. So the newcomer can use
           the state of any living group.
        """
        if self._counterparts:
            return self._counterparts
        status = self._read_status()
        if self._strategy.has_long_rounds or expects_former(self.member, status):
            return self._find_peers(status)
        return {}

    def remember_donors(self, slots: Sequence[int]) -> None:
        """Remember the groups that offered the state which this group fetches.

        All ranks call it with the same slots. It matters in semi-synchronous training alone: there
        the donors are in the middle of a long round, and do not ask for a quorum yet. A newcomer
        that got a quorum without them would commit alone, and make their round void. So its first
        quorum must include one of them, unless all of them are gone (`_find_expected_donors`).
        """
        self._donors = tuple(slots)

    def find_addresses(self, slots: Sequence[int]) -> list[str]:
        """Return the state servers' addresses of this rank's counterparts in these groups.

        Any thread. The address (host:port) of a group that is gone or cannot be reached is empty.

        Raises:
            OSError: all of them are gone or cannot be reached, or the lighthouse does not answer.
        """
        peers = self._counterparts or self._find_peers(self._read_status())

        def find(slot: int) -> str:
            peer = peers.get(slot)
            if peer is None:
                return ""
            with contextlib.suppress(KeyError, OSError, RuntimeError):
                return peer.address or look_up(peer, self._group_rank, self._token)
            return ""

        addresses = call_for_each(find, slots, "titan_ft_addresses", len(slots))
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
        """Break off the exchange under way. The other groups notice the closed connections."""
        self._rendezvous.abort(self._rendezvous.prefix)

    def stop_heartbeats(self) -> None:
        """Stop this group's heartbeats for good, so that the others go on; any thread of rank 0."""
        self._seat.close()

    def close(self) -> None:
        """Leave: stop the heartbeats and close the process group. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._is_needed.set()
        self._seat.close()
        for watch in self._watches:
            watch.close()
        self._control.end_agreements()
        self._rendezvous.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # The quorum thread

    def _find_quorum(self, step: int, failures: int) -> Quorum:
        """Ask for a quorum that contains this group, and build its process group.

        1. Report the groups that cannot be reached, after failed exchanges.
        2. Ask for quorums until one of them contains this group. It may be left out because it
           cannot reach others.
        3. Build the process group, unless the last one has the same members.
        """
        if self._partition.must_report(failures):
            self._partition.report_links(failures, step)
        answer = self._find_members(step, failures)
        while self.member not in answer.admission.members:
            self._partition.stay_outside(answer.admission)
            answer = self._find_members(step, failures)
        self._partition.note_quorum(answer.admission)
        reply = answer.reply
        members = answer.admission.members
        # A lighthouse that was started again counts quorums from the beginning. So the key names
        # the members as well.
        unique_names = "/".join(member.unique for member in members)
        members_digest = hashlib.sha256(unique_names.encode()).hexdigest()[:16]
        key = f"{reply.quorum_id}/{members_digest}"
        error: str | None = None
        ready_at = reply.received_at
        if not answer.admission.settled:
            # Not raised: the ranks still make this exchange, which fails at once, and vote. The
            # next quorum repeats it.
            error = "groups that cannot reach each other have yet to report what they hold"
        elif key != self._rendezvous.key:
            error = self._rendezvous.configure(key, reply.quorum_id, members, self.member, step)
            ready_at = time.monotonic()
            if error is None:
                self._note_joined(answer, step, ready_at)
        max_step = reply.max_step
        if len(members) < len(reply.replica_ids):
            # A stranger in the quorum may claim any step. So only the members' own steps count.
            # They were read when the process group was built. If the members are the same since,
            # all of them have committed the same updates as this group.
            max_step = max(step, self._rendezvous.max_step)
        return Quorum(
            key,
            members.index(self.member),
            members,
            max_step,
            error=error,
            asked=answer.requested_at,
            answered=reply.received_at,
            ready=ready_at,
        )

    def _note_joined(self, answer: _AcceptedQuorum, step: int, ready_at: float) -> None:
        """Remember and report a new process group."""
        members = answer.admission.members
        received_at = answer.reply.received_at
        if len(members) > 1:
            self._connecting_seconds = ready_at - received_at
        self._note_counterparts(members)
        self._events.emit(
            Joined(
                quorum=answer.reply.quorum_id,
                participants=[member.slot for member in members],
                step=step,
                quorum_seconds=received_at - answer.requested_at,
                rebuild_seconds=ready_at - received_at,
            )
        )

    def _note_counterparts(self, members: Sequence[Member]) -> None:
        """Remember where this rank's counterparts in the quorum serve their states.

        Not with rounds of several steps: until the next quorum, an hour later, a member may have
        been replaced.
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

    def _find_members(self, step: int, failures: int) -> _AcceptedQuorum:
        """Request quorums until one of them contains every group that this group should wait for.

        A quorum may lack living groups in two cases. A lighthouse that was started again does not
        know all groups yet. Or the lighthouse did not wait for a group, because the group computes
        for longer than `join_timeout_ms`. All ranks of the group ask equally often.

        For each reply:

        1. Find the members of the job in it, and those of the last quorum that are absent.
        2. Find out whether the lighthouse was started again or has moved.
        3. Read the lighthouse's page for groups that the quorum lacks.
        4. Stop, or ask again after a pause.
        """
        last = self._last_quorum
        requested_at = math.inf
        was_restarted = False
        waited_for_unknown = False
        max_repeats = _REUNION_REQUESTS
        earlier_id, earlier_names = last.quorum_id, last.names
        for num_repeats in itertools.count():
            is_first = num_repeats == 0
            # A failure gives the quorum a new id. So report failures once: a further new id then
            # shows the failures of other groups.
            reported_failures = failures if is_first else 0
            reply = self._seat.request(step, reported_failures, self._await_joiner)
            requested_at = min(requested_at, reply.received_at - reply.seconds)
            names = reply.replica_ids
            admission = last.admission
            if names != last.names:
                admission = admit(self.member, names, is_first=not last.names)
            self._report_strangers(admission)
            # Each group that has asked is present, even if others cannot reach it.
            present = {member.slot for member in members_of_job(self.member, names)}
            last_slots = [member.slot for member in last.admission.members]
            absent = [slot for slot in last_slots if slot not in present]
            # A lighthouse that was started again counts quorums from the beginning.
            counts_anew = reply.quorum_id < last.quorum_id
            uses_id_again = reply.quorum_id == last.quorum_id and names != last.names
            if is_first and (counts_anew or uses_id_again):
                was_restarted = True
            if reply.moved:
                was_restarted = True
                max_repeats = _MOVE_REQUESTS
            missing = self._look_for_others(present, absent)
            is_unknown = missing.lack is _Lack.UNKNOWN
            if is_unknown:
                was_restarted = True
                waited_for_unknown = True
            # Stop only if no living group is missing: for that one, wait without a limit.
            if missing.lack is not _Lack.LIVING:
                may_come = was_restarted and (bool(absent) or is_unknown)
                # While this group waits here, a member that does not know of the restart may go
                # on to the exchange, which fails without this group. The member reports that
                # failure, and the next quorum has the same names and a higher id. Then stop.
                another_failed = names == earlier_names and reply.quorum_id > earlier_id
                if not may_come or another_failed or num_repeats >= max_repeats:
                    break
            earlier_id, earlier_names = reply.quorum_id, names
            if is_first:
                slots = missing.slots or absent
                logger.warning("waiting for groups %s, which the quorum lacks", slots)
            time.sleep(_REUNION_PAUSE_SECONDS)
        self._last_quorum = _LastQuorum(reply.quorum_id, names, admission)
        # From here on this group need not wait for its donors (`_find_expected_donors`): it has met
        # a group, or has waited for the donors in vain. A wait for anything else proves neither,
        # because the donors may become known later.
        if waited_for_unknown or len(admission.members) > 1:
            self._has_met_others = True
        return _AcceptedQuorum(reply, admission, requested_at)

    def _await_joiner(self, names: Sequence[str]) -> bool:
        """If this group is alone in its quorum and computes, wait until another group asks.

        `Seat` calls this on rank 0.

        The exchange of a lone group has no collectives. So its quorum can still grow while the
        group computes, and a joiner can fetch the state in this step. Otherwise the joiner would
        have to wait for the next quorum, and come one step later. This wait ends early enough to
        connect to a joiner within the step.

        Args:
            names: the names in the quorum.

        Returns:
            True if another group asks, so that the quorum must be requested again.
        """
        slots = {member.slot for member in members_of_job(self.member, names)}
        if slots != {self.member.slot}:
            return False
        if names != self._last_quorum.names:
            # The quorum is new. Its process group must be built now, and not after the step.
            return False
        pause_seconds = max(
            _LONE_PAUSE_PER_TIMEOUT * self._heartbeat_timeout,
            _LONE_PAUSE_PER_STEP * self._computing_seconds,
        )
        step_end = self._requested_at + self._computing_seconds
        deadline = step_end - _CONNECTING_TIMES_IN_RESERVE * self._connecting_seconds
        while time.monotonic() < deadline and not self._is_needed.wait(pause_seconds):
            if self._leave_requested():
                return False  # this group needs its time to leave, not to connect to a joiner
            status = self._page.read(self._heartbeat_timeout)
            if status is None:
                return False  # each further read could wait for a timeout as well
            if status.num_asking == 0:
                continue
            if find_outsiders(self.member, [self.member], status, self._heartbeat_timeout):
                return not self._is_needed.is_set()
        return False

    def _look_for_others(self, present: Collection[int], absent: Collection[int]) -> _Missing:
        """Return the groups that a quorum lacks, by the lighthouse's page. A collective.

        Rank 0 reads the page and tells the other ranks. With rounds of several steps, a living
        group may have to finish a long round before it asks. A commit without that group would make
        its round void.

        Args:
            present: slots of the groups that have asked for the quorum.
            absent: slots of the last quorum's members that have not asked.
        """
        if not absent and not self._strategy.has_long_rounds:
            return _Missing(_Lack.NOTHING, [])

        def decide() -> str:
            missing = self._find_missing(present, absent)
            if not missing.slots:
                return _Lack.NOTHING
            return " ".join([missing.lack, *map(str, missing.slots)])

        lack, *slots = self._control.rank0_announces(decide).text.split()
        return _Missing(_Lack(lack), [int(slot) for slot in slots])

    def _find_missing(self, present: Collection[int], absent: Collection[int]) -> _Missing:
        """Read the lighthouse's page, and return the groups that a quorum lacks; on rank 0."""
        status = self._page.read(self._heartbeat_timeout)
        expected = set(absent) or self._find_expected_donors(present)
        if status is None:
            if not self._strategy.has_long_rounds:
                # Do not ask a second time: each death of a group would cost this time.
                expected = set()
            return _Missing(_Lack.UNKNOWN, sorted(expected))
        known = {member.slot for member in members_of_job(self.member, status.heartbeats)}
        if not known.issuperset(expected):
            return _Missing(_Lack.UNKNOWN, sorted(expected - known))
        if not self._strategy.has_long_rounds:
            return _Missing(_Lack.NOTHING, [])
        living = find_living(self.member, status, self._heartbeat_timeout)
        slots = {member.slot for member in living}
        return _Missing(_Lack.LIVING, sorted(slots.difference(present)))

    def _find_expected_donors(self, present: Collection[int]) -> set[int]:
        """Return the donors that a newcomer's quorum must wait for (see `remember_donors`).

        Empty if one of the donors has asked for this quorum.

        Only rank 0 uses the donors. The training thread may set them while the quorum thread waits
        for a reply, on each rank at another moment.
        """
        if self._has_met_others or not self._strategy.has_long_rounds:
            return set()
        donors = set(self._donors)
        if donors.intersection(present):
            return set()
        return donors

    def _report_strangers(self, admission: Admission) -> None:
        """Report one stranger for each reason in ten minutes, on rank 0.

        A stranger may come under a new name each time. One line for each name would fill the disk.
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
        # A page has a line for each group, and every group reads it. So in a large job, most groups
        # read it less often: slots 0 to 3 once in a heartbeat timeout, 4 to 7 once in 2 timeouts,
        # 8 to 15 in 3, 16 to 31 in 4, ...
        factor = 1 + (self._config.replica_id // _NUM_FREQUENT_READERS).bit_length()
        interval = self._heartbeat_timeout * factor
        first = interval
        patience = SILENT_BEATS * self._heartbeat_timeout
        on_leaver = None
        if self._config.process_group == "nccl":
            # NCCL shows no death. Look early: when the exchange begins, a member may already have
            # been silent for almost the whole patience.
            first = interval / CLOSEST
            patience = self._heartbeat_timeout
            # With NCCL only. Over Gloo, closed sockets show that a member has left, and a member that
            # asks for the next quorum may just have finished: its bytes arrive for seconds over a
            # slow link.
            on_leaver = self._follow_leaver
        return Pulse(
            self._page,
            first=first,
            interval=interval,
            patience=patience,
            own=lambda: self.member,
            members=self._find_watched,
            on_silence=self._break_off_silent,
            on_left_out=self._break_off_left_out,
            on_leaver=on_leaver,
        )

    def _find_others(self) -> list[Member]:
        """Return the other members of the exchange under way; none before its quorum is ready."""
        pending = self._pending  # a local: the training thread drops it after the vote
        if pending is None or not pending.done():
            return []
        if pending.cancelled() or pending.exception() is not None:
            return []
        return [member for member in pending.result().members if member != self.member]

    def _find_watched(self) -> list[str]:
        """Return the names of the exchange's other members, and remember the exchange's prefix."""
        self._watched_prefix = self._rendezvous.prefix
        return [member.replica_id for member in self._find_others()]

    def _break_off_silent(self, silent: dict[str, float]) -> None:
        """Break off the exchange because members of it are silent."""
        self._rendezvous.abort(self._watched_prefix)  # first: the event's disk may be full
        slots = sorted(member.slot for member in known_members(silent, self._token))
        seconds = max(silent.values())
        logger.warning(
            "no heartbeat from groups %s for %.1f s: the exchange is broken off",
            slots,
            seconds,
        )
        self._events.emit(PeerSilent(slots=slots, seconds=seconds))

    def _break_off_left_out(self, slots: list[int]) -> None:
        """Break off the exchange because the others have left it."""
        self._rendezvous.abort(self._watched_prefix)
        logger.warning("groups %s have gone on without this one: the exchange is broken off", slots)
        self._events.emit(LeftOut(members=slots))

    def _follow_leaver(self) -> None:
        """Break off the exchange because a member has done so. The next quorum shows which one."""
        self._rendezvous.abort(self._watched_prefix)
        logger.warning(
            "a group of this exchange asks for the next quorum already: "
            "the exchange is broken off here too",
        )
