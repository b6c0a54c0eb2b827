# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Who takes part in the step: quorum, process group and vote of one replica group.

Uses `Seat` (the group at the lighthouse), `Rendezvous` (its process group with the other groups) and `Partition` (what
it does when it cannot reach some of them); the rest of the engine sees only this module.

Built on `torchft.coordination` (ManagerServer, ManagerClient), not on `torchft.Manager`: the Manager couples the
quorum to its own heal (it picks a donor per rank, fetches on the quorum thread, believes a joiner up to date after
its first vote) and swallows errors of the exchange. With the layer below, a group reports the step it really holds
and the heal is decided in the exchange, the same for all ranks of a group. What stays torchft's: lighthouse,
heartbeats, quorum and the reconfigurable process groups.

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
    Pulse,
    Status,
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
"""That the ranks of a group wait for each other in a vote. They have just ended the same exchange, so that they vote
within milliseconds; a rank that hangs would make the other groups wait, and this ends its group."""

# A lighthouse that was started again knows nobody, and forms a quorum of the first groups that ask. The product is well
# above the time that all groups need to heartbeat again.
_REUNION_ASKS = 20
_REUNION_PAUSE_SECONDS = 0.1
_FOLLOW_ASKS = 100  # of one at another place: shared storage tells some groups seconds later than others
# Groups that look at the lighthouse's page in each heartbeat timeout, while they wait in an exchange; 1000 groups look
# 200 times a second. With NCCL each looks once more, soon after it has begun to wait.
_OFTEN = 4
# Pause between two looks of a lone group at the page, for groups that ask: the longer one of these two.
_LOOK_TIMEOUTS = 0.1  # heartbeat timeouts
_LOOK_SHARE = 0.02  # of a step
_STRANGER_PAUSE_SECONDS = 600.0  # between two reports of strangers for the same reason
_NAME_LETTERS = 500  # of a stranger's name that are reported; it may have four million
_CONNECTING_TIMES_IN_RESERVE = 2  # admit a joiner only if this many times of the last connecting remain in the step


class _Lack(enum.StrEnum):
    """Which groups a quorum lacks, by the lighthouse's page."""

    NOTHING = "nothing"
    UNKNOWN = "unknown"  # the page does not list one that must be known: the lighthouse was started again
    LIVING = "living"  # with rounds of several steps, one that heartbeats


class Membership:
    """The group's part in quorums, exchanges and votes. Every rank of the group holds one.

    Make it when the group is ready for its first quorum: from then on it heartbeats, and the others wait for it.
    `begin` and `vote` are called by the training thread, in the same order on every rank of the group; `wait` may be
    called by the exchange's thread as well.

    Args:
        lighthouse: its address (see `LighthouseAddress`).
        host: the numeric address that other groups reach this rank at.
        store: host and port of the group's TCPStore.
        control: tree of the group's ranks.
        config_digest: hex hash of the settings that must be equal in all groups.
        address: host:port of this rank's state server.
        token: the run's shared secret.
        leave_requested: says whether this rank was.
        shape: what else must be equal in all groups (see `titan_ft.protocol.shape`).
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
        self._config, self._group_rank, self._events, self._probe = config, group_rank, events, probe
        self._token = token
        self._strategy = strategy_of(config)
        # Agrees on quorums, by the quorum thread, and on the votes between them, by the training thread.
        self._control = control
        found = LighthouseAddress(lighthouse, token)
        self._seat = Seat(
            config,
            lighthouse=found,
            group_rank=group_rank,
            store=TCPStore(*store, is_master=False, wait_for_workers=False),
            control=control,
            address=address,
            token=token,
            on_move=lambda former, address, job: events.emit(LighthouseMoved(address=address, former=former, job=job)),
        )
        where = join_address(host, store[1])  # of the store: on rank 0's host
        self._seat.enter(
            lambda: Member(
                config.replica_id,
                time.time(),
                uuid.uuid4().hex,
                config_digest,
                config.job_id,
                where,
                shape,
                token=token,
            )
        )
        self._thread = ThreadPoolExecutor(1, "titan_ft_quorum", initializer=device.for_thread())
        self._pending: Future[Quorum] | None = None
        self._needed = threading.Event()  # the group waits for the quorum that it has asked for
        self._asked_at = 0.0
        self._computing_seconds = 0.0  # from the last request ahead until the group needed the quorum; 0 = unknown
        self._connecting_seconds = math.inf  # of the last process group with others
        self._leave_requested = leave_requested
        self._former: tuple[int, Sequence[str], Admission] = (0, [], Admission(()))  # of the last quorum: id and names
        self._has_met = False  # other groups in a quorum, or waited in vain for those in `_donors`
        self._donors: tuple[int, ...] = ()  # slots of the groups that offered the state which this group fetches
        self._stranger_times: dict[str, float] = {}  # of the last report of each reason
        self._counterparts: dict[int, Peer] = {}  # of this rank in the last quorum, by slot
        self._failures = 0  # votes in a row that failed
        self._closed = False
        self._page = StatusPage(found)
        self._looked_at = ""  # prefix of the quorum that the pulse has looked at
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
            lighthouse=found,
            events=events,
        )
        # Of the group rank 0 alone reads the lighthouse's page: its abort reaches the other ranks.
        self._watches: list[Watch] = [self._watch_pulse()] if group_rank == 0 else []
        self._watches.append(self._partition.watch(self._find_others))

    @property
    def member(self) -> Member:
        """Return this group's name at the lighthouse."""
        return self._seat.member

    @property
    def process_group(self) -> Any:
        """Return the process group with the members of the quorum."""
        return self._rendezvous.process_group

    @property
    def timeout(self) -> timedelta:
        """Return the timeout of the process group's collectives."""
        return self._rendezvous.timeout

    def begin(self, step: int, *, ahead: bool = False) -> None:
        """Ask for the quorum of the next exchange, holding `step` committed updates; returns at once.

        Args:
            ahead: this group computes until it calls `need`. If it is alone in the quorum, a group that comes until
                then is admitted to the same exchange.
        """
        assert self._pending is None, "a quorum is asked for already: vote() uses it up before the next begin()"
        self._asked_at = time.monotonic()
        self._needed.clear()
        if not ahead:
            self._needed.set()
        self._pending = self._thread.submit(self._ask, step, self._failures)

    def need(self) -> None:
        """Let the quorum that was asked for ahead be the one of the exchange: this group has nothing left to do."""
        if not self._needed.is_set():
            self._computing_seconds = time.monotonic() - self._asked_at
            self._needed.set()

    @property
    def asked(self) -> bool:
        """Say whether a quorum has been asked for and not been used by a vote yet."""
        return self._pending is not None

    @property
    def answered(self) -> bool:
        """Say whether the quorum asked for is there, or why there is none."""
        return self._pending is not None and self._pending.done()

    def wait_briefly(self, seconds: float) -> None:
        """Wait for it, no longer than so."""
        if self._pending is None:
            time.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            self._pending.exception(seconds)

    def wait(self) -> Quorum:
        """Wait for the quorum asked for; if this group cannot reach all of the others, until it can or they are gone.

        Raises:
            LighthouseError: the lighthouse did not answer for `seat.PROBE_SECONDS`.
            Leaving: the group was told to leave, and cannot reach the others anyway.
            RankLostError: a rank of this group is lost.
            ReplacedError, ConfigMismatchError, ForeignMemberError: see `titan_ft.protocol.member.admit`.
        """
        assert self._pending is not None, "begin() comes before wait()"
        return self._pending.result()

    def vote(self, step: int, ok: bool) -> bool:
        """Agree within the group whether the exchange worked: true only if every rank of the group says so.

        After a "no" the lighthouse renews the quorum's id, so that all members build a new process group.

        Raises:
            TimeoutError: not all ranks have voted within `VOTE_SECONDS`.
            RankLostError: a rank of this group is lost.
            LighthouseError: this group has left.
        """
        self._partition.before_vote(ok)
        with self.waiting():  # for a sibling whose exchange is not complete
            agreed = self._agree_on(step, ok)
        if agreed:
            self._partition.forget_dead_links()
        self._failures = 0 if agreed else self._failures + 1
        self._pending = None
        return agreed

    def _agree_on(self, step: int, ok: bool) -> bool:
        try:
            answer = self._control.rank0_decides(
                () if ok else ("no",), lambda said: "no" if said else "yes", VOTE_SECONDS
            )
        except TimeoutError as error:
            raise TimeoutError(
                f"the ranks of this group did not all vote after step {step} within {VOTE_SECONDS:g} s: "
                "one of them hangs, or is far slower than the others"
            ) from error
        return answer == "yes"

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for an exchange: broken off when members are silent, have left it (`Pulse`) or cannot be reached."""
        with contextlib.ExitStack() as watches:
            for watch in self._watches:
                watches.enter_context(watch.watching())
            yield

    def find_outsiders(self, quorum: Quorum, step: int) -> list[int]:
        """Return the slots of groups that live and are not in `quorum`, as rank 0 sees it; none on other ranks.

        Also of those with more than `step` updates that are outside because of dead links. These are silent, and come
        back only when the links do, or when the groups at the other ends are gone.
        """
        beat = self._config.heartbeat_timeout_ms / 1000
        status = self._page.read(beat) if self._group_rank == 0 else None
        if status is None:
            return []
        cut_off = {Peer(m.unique, m.store): m.slot for m in find_cut_off(self.member, quorum.members, status, step)}
        answering = {cut_off[peer] for peer in self._probe.find_answering([*cut_off])}
        return sorted(answering.union(find_outsiders(self.member, quorum.members, status, beat)))

    def find_living(self, members: Collection[Member]) -> set[int]:
        """Return the slots of those of `members` that heartbeat; of all, if the lighthouse does not answer."""
        beat = self._config.heartbeat_timeout_ms / 1000
        status = self._page.read(beat)
        if status is None:
            return {member.slot for member in members}
        living = {member.process for member in find_living(self.member, status, SILENT_BEATS * beat)}
        return {member.slot for member in members if member.process in living}

    def find_ages(self) -> tuple[dict[int, float], dict[int, float]] | None:
        """Return the seconds since each group's last heartbeat, and when its process began, by slot; any thread.

        None if nobody can say.
        """
        beat = self._config.heartbeat_timeout_ms / 1000
        status = self._page.read(beat)
        return None if status is None else find_ages(self.member, status, beat)

    def find_holders(self) -> dict[int, Peer]:
        """Return this rank's counterparts whose state a joiner can use, by slot; any thread.

        They are those of the last quorum, if there was one. A newcomer without a quorum finds them on the lighthouse's
        page. It can use their state only if their exchange counts on the former process of its group: that exchange
        breaks, and is made again with the newcomer. Otherwise the newcomer would miss the next update. In a round of
        several steps the state stays as it is for long, and any group that lives can be asked.
        """
        if self._counterparts:
            return self._counterparts
        status = self._read_status()
        if not (self._strategy.is_long or expects_former(self.member, status)):
            return {}
        return self._find_peers(status)

    def expect(self, slots: Sequence[int]) -> None:
        """Note which groups offered the state that this group fetches; called alike on all ranks.

        With rounds of several steps, a newcomer's first quorum must include one of these groups while one of them
        lives. They are in the round that starts from the offered state. A newcomer that committed without them would
        make that round void.
        """
        self._donors = tuple(slots)

    def find_addresses(self, slots: Sequence[int]) -> list[str]:
        """Return the state servers' addresses (host:port) of this rank's counterparts in these groups; any thread.

        The address is empty of a group that does not live any more, or cannot be reached.

        Raises:
            OSError: that is so of all of them, or the lighthouse does not answer.
        """
        peers = self._counterparts or self._find_peers(self._read_status())

        def find(slot: int) -> str:
            with contextlib.suppress(KeyError, OSError, RuntimeError):
                return peers[slot].address or look_up(peers[slot], self._group_rank, self._token)
            return ""

        addresses = call_for_each(find, slots, "titan_ft_addresses", len(slots))
        if not any(addresses):
            raise ConnectionError("none of them lives and can be reached")
        return addresses

    def _read_status(self) -> Status:
        """Read the lighthouse's page.

        Raises:
            OSError: it does not answer.
        """
        if (status := self._page.read(self._config.heartbeat_timeout_ms / 1000)) is None:
            raise ConnectionError("the lighthouse's page cannot be read")
        return status

    def _find_peers(self, status: Status) -> dict[int, Peer]:
        living = find_living(self.member, status, self._config.heartbeat_timeout_ms / 1000)
        return {member.slot: Peer(member.unique, member.store) for member in living if member.slot != self.member.slot}

    def abort(self) -> None:
        """Break off the exchange under way, here and, by closed connections, at the others."""
        self._rendezvous.abort(self._rendezvous.prefix)

    def fall_silent(self) -> None:
        """Stop this group's heartbeats for good, so that the others go on without it; any thread of rank 0."""
        self._seat.close()

    def close(self) -> None:
        """Leave: stop the heartbeats and close the process group; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._needed.set()
        self._seat.close()
        for watch in self._watches:
            watch.close()
        self._control.end_agreements()
        self._rendezvous.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # The quorum thread

    def _ask(self, step: int, failures: int) -> Quorum:
        if self._partition.must_report(failures):
            self._partition.report_links(failures, step)
        reply, admission, asked = self._find_members(step, failures)
        while self.member not in admission.members:
            self._partition.stay_outside(admission)
            reply, admission, asked = self._find_members(step, failures)
        answered, members = reply.at, admission.members
        self._partition.note_quorum(admission)
        names = hashlib.sha256("/".join(member.unique for member in members).encode()).hexdigest()[:16]
        key = f"{reply.quorum_id}/{names}"
        error, ready = None, answered
        if not admission.settled:
            error = "groups that cannot reach each other have yet to report what they hold"
        elif key != self._rendezvous.key:
            error = self._rendezvous.configure(key, reply.quorum_id, members, self.member, step)
            ready = time.monotonic()
            if error is None:
                if len(members) > 1:
                    self._connecting_seconds = ready - answered
                self._note_counterparts(members)
                self._events.emit(
                    Joined(
                        quorum=reply.quorum_id,
                        participants=[member.slot for member in members],
                        step=step,
                        quorum_seconds=answered - asked,
                        rebuild_seconds=ready - answered,
                    )
                )
        # With others in the quorum the largest step may be their claim.
        alone = len(members) == len(reply.replica_ids)
        max_step = reply.max_step if alone else max(step, self._rendezvous.max_step)
        rank = members.index(self.member)
        return Quorum(key, rank, members, max_step, error=error, asked=asked, answered=answered, ready=ready)

    def _note_counterparts(self, members: Sequence[Member]) -> None:
        """Remember where this rank's counterparts in the quorum serve their states.

        Not with rounds of several steps: in the hour until the next quorum a member may be replaced.
        """
        if self._strategy.is_long:
            return
        addresses = self._rendezvous.addresses
        others = [member for member in members if member != self.member and member.unique in addresses]
        self._counterparts = {
            member.slot: Peer(member.unique, member.store, addresses[member.unique]) for member in others
        }

    def _find_members(self, step: int, failures: int) -> tuple[Reply, Admission, float]:
        """Ask for a quorum; return the reply, the members of this group's job in it, and when the group asked first.

        Two kinds of quorums lack groups that live. A lighthouse that was started again does not know all groups yet.
        And a lighthouse forms a quorum without a group that computes for longer than `join_timeout_ms`, or that a
        restarted lighthouse heard of too late. So ask again, as often on each rank of the group.
        """
        former_id, former_names, former = self._former
        asked = math.inf
        restarted, earlier, most = False, self._former[:2], _REUNION_ASKS
        waited_for_unknown = False
        for again in itertools.count():
            # Failures give the quorum a new id: reported once, so that another new id shows others' failures.
            reply = self._seat.request(step, 0 if again else failures, self._await_others)
            asked = min(asked, reply.at - reply.seconds)
            names = reply.replica_ids
            # The same names, and this group's is one of them, say the same as in the step before.
            admission = former if names == former_names else admit(self.member, names)
            self._report_strangers(admission)
            # Who has asked is there, also one that others cannot reach and that is no member.
            there = {member.slot for member in members_of_job(self.member, names)}
            missing = [member.slot for member in former.members if member.slot not in there]
            if again == 0:
                restarted = reply.quorum_id < former_id
                restarted |= reply.quorum_id == former_id and names != former_names
            if reply.moved:
                restarted, most = True, _FOLLOW_ASKS
            lack, lacking = self._look_for_others(there, missing)
            if lack is _Lack.UNKNOWN:
                restarted = waited_for_unknown = True
            # A member that knows of no restart goes on to its exchange, which fails as long as this group waits here.
            another_broke = names == earlier[1] and reply.quorum_id > earlier[0]
            may_come = restarted and (bool(missing) or lack is _Lack.UNKNOWN)
            if not (lack is _Lack.LIVING or (may_come and not another_broke and again < most)):
                break
            earlier = reply.quorum_id, names
            if again == 0:
                logger.warning("waiting for groups %s, which the quorum lacks", lacking or missing)
            time.sleep(_REUNION_PAUSE_SECONDS)
        self._former = reply.quorum_id, names, admission
        # Not after each restart: a newcomer may have met nobody there, and hear of an offer later.
        self._has_met |= waited_for_unknown or len(admission.members) > 1
        return reply, admission, asked

    def _await_others(self, names: Sequence[str]) -> bool:
        """Wait until another group asks, if this one is alone in its quorum and computes; True if one asks. Rank 0.

        The exchange of a lone group makes no collectives. So its quorum can still grow while the group computes, and a
        joiner fetches the state in this step. In the next quorum it would come one step later.

        The wait ends early enough for the connections to a joiner: the group would wait for these after its step.
        """
        slots = {member.slot for member in members_of_job(self.member, names)}
        if slots != {self.member.slot}:
            return False
        # The process group of a new quorum is yet to be made. That must not wait until the step is over.
        if names != self._former[1]:
            return False
        beat = self._config.heartbeat_timeout_ms / 1000
        pause_seconds = max(_LOOK_TIMEOUTS * beat, _LOOK_SHARE * self._computing_seconds)
        step_end = self._asked_at + self._computing_seconds
        latest = step_end - _CONNECTING_TIMES_IN_RESERVE * self._connecting_seconds
        while time.monotonic() < latest and not self._needed.wait(pause_seconds):
            if self._leave_requested():
                return False  # a joiner's set-up would take of the time that this group has to leave
            status = self._page.read(beat)
            if status is None:
                return False  # each further look could keep the group waiting for its timeout
            if status.num_asking and find_outsiders(self.member, [self.member], status, beat):
                return not self._needed.is_set()
        return False

    def _look_for_others(self, there: Collection[int], missing: Collection[int]) -> tuple[_Lack, list[int]]:
        """Return whether and which groups a quorum lacks, as rank 0 reads the lighthouse's page. A collective.

        With rounds of several steps a group that lives outside may be in the midst of its round for long. A commit
        without it would make that round void.

        Args:
            there: slots of the groups that have asked for the quorum.
            missing: slots of the last quorum's members that have not asked.
        """
        if not (missing or self._strategy.is_long):
            return _Lack.NOTHING, []

        def decide() -> str:
            beat = self._config.heartbeat_timeout_ms / 1000
            status = self._page.read(beat)
            expected = set(missing) or self._find_awaited_donors(there)
            if status is None:
                # Without rounds of several steps, nobody waits for a page that does not come: a death would cost more.
                return _name(_Lack.UNKNOWN, expected if self._strategy.is_long else ())
            known = {member.slot for member in members_of_job(self.member, status.heartbeats)}
            if not known.issuperset(expected):
                return _name(_Lack.UNKNOWN, expected - known)
            if not self._strategy.is_long:
                return _Lack.NOTHING
            living = {member.slot for member in find_living(self.member, status, beat)}
            return _name(_Lack.LIVING, living.difference(there))

        kind, *slots = self._control.rank0_announces(decide).text.split()
        return _Lack(kind), [int(slot) for slot in slots]

    def _find_awaited_donors(self, there: Collection[int]) -> set[int]:
        """Return the groups that a newcomer waits for (see `expect`); none if one of them has asked. Rank 0.

        The training thread notes donors while a request is under way, on each rank at a time of its own.
        """
        if self._has_met or not self._strategy.is_long:
            return set()
        donors = set(self._donors)
        return set() if donors.intersection(there) else donors

    def _report_strangers(self, admission: Admission) -> None:
        """Report one stranger for each reason in ten minutes, on one rank of the group.

        A stranger may come under a new name each time. One line for each name would fill the disk.
        """
        if self._group_rank != 0:
            return
        for name, reason in admission.strangers.items():
            now = time.monotonic()
            if now < self._stranger_times.get(reason, -math.inf) + _STRANGER_PAUSE_SECONDS:
                continue
            self._stranger_times[reason] = now
            shown = printable(name, _NAME_LETTERS)
            logger.warning("left aside at the lighthouse: member %s, because %s", shown, reason)
            self._events.emit(ForeignMember(member=shown, reason=reason))

    # Members that fall silent, or go on without this group

    def _watch_pulse(self) -> Pulse:
        beat = self._config.heartbeat_timeout_ms / 1000
        # A page has a line for each group, and every group looks for itself: in large jobs more seldom.
        interval = beat * (1 + (self._config.replica_id // _OFTEN).bit_length())
        nccl = self._config.process_group == "nccl"
        return Pulse(
            self._page,
            # Gloo notices a death by itself. NCCL does not, and whoever is waited for may be silent for long already.
            first=interval / CLOSEST if nccl else interval,
            interval=interval,
            patience=beat if nccl else SILENT_BEATS * beat,
            own=lambda: self.member,
            members=self._find_exchanging,
            on_silence=self._leave_silent,
            on_left_out=self._leave_abandoned,
            # Gloo's sockets tell of a member that leaves. And over a slow link they bring what is still missing for
            # seconds after the sender has completed the exchange and asks for the next quorum.
            on_leaver=self._follow_leaver if nccl else None,
        )

    def _find_others(self) -> list[Member]:
        """Return the other members of the exchange under way; none as long as its quorum is not there."""
        pending = self._pending  # the training thread drops it after the vote
        if pending is None or not pending.done() or pending.cancelled() or pending.exception() is not None:
            return []
        return [member for member in pending.result().members if member != self.member]

    def _find_exchanging(self) -> list[str]:
        """Return the names of the other members of the exchange under way, and note which one it is."""
        self._looked_at = self._rendezvous.prefix
        return [member.replica_id for member in self._find_others()]

    def _leave_silent(self, silent: dict[str, float]) -> None:
        """Break off the exchange under way because members of it are silent."""
        self._rendezvous.abort(self._looked_at)  # first: the event's disk may be full
        slots = sorted(member.slot for member in known_members(silent, self._token))
        logger.warning(
            "no heartbeat from groups %s for %.1f s: the exchange is broken off", slots, max(silent.values())
        )
        self._events.emit(PeerSilent(slots=slots, seconds=max(silent.values())))

    def _leave_abandoned(self, slots: list[int]) -> None:
        """Break off the exchange under way because the others have left it."""
        self._rendezvous.abort(self._looked_at)
        logger.warning("groups %s have gone on without this one: the exchange is broken off", slots)
        self._events.emit(LeftOut(members=slots))

    def _follow_leaver(self) -> None:
        """Break off the exchange under way because a member has done so; the next quorum shows which."""
        self._rendezvous.abort(self._looked_at)
        logger.warning("a group of this exchange asks for the next quorum already: the exchange is broken off here too")


def _name(lack: _Lack, slots: Collection[int]) -> str:
    """Return a text that names what is lacking, and the groups; nothing lacks without a group."""
    if not slots:
        return _Lack.NOTHING
    return " ".join([lack, *map(str, sorted(slots))])
