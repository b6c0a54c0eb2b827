# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Who takes part in the step: quorum, process group and vote of one replica group.

Built on `torchft.coordination` (ManagerServer, ManagerClient), not on `torchft.Manager`: the Manager couples the
quorum to its own heal (it picks a donor per rank, fetches on the quorum thread, believes a joiner up to date after
its first vote) and swallows errors of the exchange. With the layer below, a group reports the step it really holds
and the heal is decided in the exchange, the same for all ranks of a group. What stays torchft's: lighthouse,
heartbeats, quorum, the vote within a group and the reconfigurable process groups.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported at run time

from titan_ft import device
from titan_ft.config import FaultTolerance
from titan_ft.replica.errors import LighthouseError
from titan_ft.replica.group_store import set_for_all
from titan_ft.replica.member import Admission, Member, Quorum, admit, known_members
from titan_ft.replica.pulse import Pulse, StatusPage, Watch
from titan_ft.replica.reach import Peer, address_key, within
from titan_ft.run.events import ForeignMember, Joined, LinkBack, LinkDead, Outside, PeerSilent
from titan_ft.run.log import EventLog

logger = logging.getLogger(__name__)

_RENDEZVOUS_SECONDS = 2.0  # all members got the quorum's reply at the same moment; one that is silent so long is gone
# torchft's server repeats a request that a restarted lighthouse lost, once for all ranks of the group.
_LIGHTHOUSE_RETRIES = 1000
# A lighthouse that was started again knows nobody and makes a quorum of whoever asks first. Together well above the
# time that all groups need to heartbeat again.
_REUNION_ASKS = 20
_REUNION_PAUSE_SECONDS = 0.1
_OFTEN = 4  # groups that look at the lighthouse's page in each heartbeat timeout; 1000 groups look 200 times a second
_MANY = 16  # groups that are asked at each look at the links of an exchange that takes long; of more, more seldom
_PROBE_AFTER = 2  # votes in a row that failed; once is what any failure costs
_PAGE_PAUSE_SECONDS = 0.02  # between two looks at the lighthouse's page
_PROBE_PAUSE_SECONDS = 1.0  # between two looks of a group that is outside at the links it lost
_GOOD_LOOKS = 2  # in a row, until it comes back; twice as many each time that a link which was back has failed again
_MOST_GOOD_LOOKS = 60
_RELAPSE_SECONDS = 300.0  # a link that is lost again this soon after it was back has only flickered
_SILENT_BEATS = 2  # heartbeat timeouts; one would be enough for the lighthouse, but breaking off costs a repetition


class Membership:
    """The group's seat at the lighthouse. Every rank of the group holds one; rank 0 also runs torchft's server.

    Make it when the group is ready for its first quorum: from then on it heartbeats, and the others wait for it.
    `begin` and `vote` are called by the training thread, in the same order on every rank of the group; `wait` may be
    called by the exchange's thread as well.

    Args:
        host: the numeric address that other groups reach this rank at.
        store: host and port of the group's TCPStore.
        attempt: how often the group was started before; the store of torchrun's agent outlives an attempt.
        config_digest: hex hash of the settings that must be equal in all groups.
        address: host:port of this rank's state server.
        shape: what else must be equal in all groups (see `titan_ft.replica.shape`).
        probe: says which peers cannot be reached, and why (see `reach.Probe`); None = nobody asks.
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
        attempt: int,
        config_digest: str,
        address: str,
        events: EventLog,
        shape: str = "",
        probe: Callable[[Sequence[Peer]], dict[str, str]] | None = None,
    ) -> None:
        self._config = config
        self._group_rank, self._group_world_size = group_rank, group_world_size
        self._address = address
        self._lighthouse = lighthouse
        self._events = events
        self.process_group = process_group
        self.timeout = timedelta(milliseconds=config.process_group_timeout_ms)
        self._store_host, self._store_port = store
        self._host, self._attempt = host, attempt
        self._store = self._connect_store()
        self._server: Any = None
        self._closed = False
        self._seat_lock = threading.Lock()
        if group_rank == 0:
            store_address = f"{_bracketed(host)}:{self._store_port}"  # rank 0 runs where the store is
            member = Member(
                config.replica_id, time.time(), uuid.uuid4().hex, config_digest, config.job_id, store_address, shape
            )
            self._store.set(f"titan_ft/server/{attempt}", self._open_seat(member))
        self._pulse: Pulse | None = None
        self._take_seat(self._store.get(f"titan_ft/server/{attempt}").decode())
        self._process = self.member.unique
        self._thread = ThreadPoolExecutor(1, "titan_ft_quorum", initializer=device.for_thread())
        self._pending: Future[Quorum] | None = None
        self._configured = ""  # key of the quorum that the process group was built for
        self._prefix = ""  # of that quorum's keys in stores
        self._builds: Counter[str] = Counter()  # how often a process group was built for each key
        self._peers: dict[int, str] = {}
        self._peers_step = 0  # largest number of updates that a member of the process group had when it was built
        self._peer_stores: dict[str, TCPStore] = {}
        self._former: tuple[int, list[str], tuple[Member, ...]] = (0, [], ())  # the last quorum's id, names, members
        self._named: set[str] = set()  # strangers
        self._probe = probe
        self._unreached: set[str] = set()  # at the last look
        self._agreements = 0  # made among the ranks of this group
        self._addresses: dict[str, str] = {}  # of the peers' state servers, by the process's name
        self._accusers: tuple[Member, ...] = ()  # members of the last quorum that cannot reach this group
        self._page = StatusPage(lighthouse)
        self._good_looks = _GOOD_LOOKS  # that the next return from outside needs
        self._returned = -math.inf  # when this group came back from outside
        self._abort_lock = threading.Condition()
        self._failures = 0
        self._looked_at = ""  # prefix of the quorum that the pulse has looked at
        self._probed = ""  # and that whose links were looked at while its exchange was waited for
        # A quorum's prefix, and whom this rank could not reach while its exchange waited.
        self._lost: tuple[str | None, list[str]] = (None, [])
        if group_rank == 0:  # it tells the others
            beat = config.heartbeat_timeout_ms / 1000
            self._pulse = Pulse(
                lighthouse,
                # A page has a line for each group, and every group looks for itself: in large jobs more seldom.
                interval=beat * (1 + (config.replica_id // _OFTEN).bit_length()),
                patience=_SILENT_BEATS * beat,
                own=self.member.replica_id,
                members=self._find_exchanging,
                on_silence=self._break_off,
            )
        self._watches: list[Watch] = [self._pulse] if self._pulse is not None else []
        if probe is not None:
            # Peers that are slow are asked too: seldom, for they pay for it.
            self._watches.append(
                Watch("titan_ft_link_watch", self._look_after, 2.0, self._find_lost, self._break_off_lost)
            )
        if group_world_size > 1:
            # Connected here: what opens while a process group is built counts as one of its sockets.
            watch = (self._connect_store(),)
            threading.Thread(target=self._watch, args=watch, name="titan_ft_abort_watch", daemon=True).start()

    def begin(self, step: int) -> None:
        """Ask for the quorum of the next exchange, holding `step` committed updates; returns at once."""
        assert self._pending is None or self._pending.done(), "the previous quorum is still being asked for"
        self._pending = self._thread.submit(self._ask, step, self._failures)

    @property
    def asked(self) -> bool:
        """Say whether a quorum has been asked for and not been used by a vote yet."""
        return self._pending is not None

    def wait(self) -> Quorum:
        """Wait for the quorum asked for; if this group cannot reach all of the others, until it can or they are gone.

        Raises:
            LighthouseError: the lighthouse did not answer for `quorum_timeout_seconds`.
            ReplacedError, ConfigMismatchError, ForeignMemberError: see `titan_ft.replica.member.admit`.
        """
        assert self._pending is not None, "begin() comes before wait()"
        return self._pending.result()

    def vote(self, step: int, ok: bool) -> bool:
        """Agree within the group whether the exchange worked: true only if every rank of the group says so.

        After a "no" the lighthouse renews the quorum's id, so that all members build a new process group.
        """
        timeout = timedelta(seconds=self._config.vote_timeout_seconds)
        if not ok and self._lost[0] == self._prefix:
            set_for_all(self._store, self._lost_key())  # before the vote, so that all ranks find it after the vote
        with self.waiting():  # for a sibling whose exchange is not complete
            agreed = bool(self._client.should_commit(self._group_rank, step, ok, timeout))
        self._failures = 0 if agreed else self._failures + 1
        self._pending = None
        return agreed

    def peer_address(self, rank: int) -> str:
        """Return the state server's address (host:port) of the same group rank in member `rank`."""
        return self._peers[rank]

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for an exchange: it is broken off when a member falls silent (see `Pulse`) or cannot be reached."""
        with contextlib.ExitStack() as watches:
            for watch in self._watches:
                watches.enter_context(watch.watching())
            yield

    def abort(self, quorum: str | None = None) -> None:
        """Break off the exchange under way (if it is still `quorum`'s), here and, by closed connections, at the others.

        Ranks that saw nothing of the failure should not sit out a timeout: peers notice the closed connections, and
        the other ranks of this group are told through the group's store.
        """
        quorum = self._prefix if quorum is None else quorum
        self._abort_process_group(quorum)
        if quorum and self._group_world_size > 1:
            self._store.set(self._broken_key(quorum), "1")

    def fall_silent(self) -> None:
        """Stop this group's heartbeats for good, so that the others go on without it; any thread of rank 0."""
        with self._seat_lock:  # no other seat is taken from now on
            self._closed = True
        self._leave_seat()

    def close(self) -> None:
        """Leave: stop the heartbeats and close the process group; a second call does nothing."""
        if self._closed:
            return
        self.fall_silent()
        for watch in self._watches:
            watch.close()
        with self._abort_lock:
            self.process_group.abort(errored=False)
            self._abort_lock.notify_all()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # The quorum thread

    def _ask(self, step: int, failures: int) -> Quorum:
        if self._probe is not None and self._must_tell_reach(failures):
            self._tell_reach(failures, step)
        asked = time.monotonic()
        reply, admission = self._find_members(step, failures)
        while self.member not in admission.members:
            self._stay_outside(admission)
            asked = time.monotonic()
            reply, admission = self._find_members(step, failures)
        answered, members, self._accusers = time.monotonic(), admission.members, admission.accusers
        names = hashlib.sha256("/".join(member.unique for member in members).encode()).hexdigest()[:16]
        key = f"{reply.quorum_id}/{names}"
        rank = members.index(self.member)
        error = None
        if not admission.settled:
            error = "groups that cannot reach each other have yet to tell what they hold"
        elif key != self._configured:
            # A restarted lighthouse counts quorum ids from the beginning, and stores keep what was written under a key.
            # The same processes were members each time that it came up, so that their counts agree. After a reply that
            # reached only some of them they do not: then they miss each other, and meet in the next quorum.
            self._builds[key] += 1
            error = self._configure(reply.quorum_id, members, step, key, f"titan_ft/{key}/{self._builds[key]}")
            if error is None:
                self._events.emit(
                    Joined(
                        quorum=reply.quorum_id,
                        participants=[member.slot for member in members],
                        step=step,
                        quorum_seconds=answered - asked,
                        rebuild_seconds=time.monotonic() - answered,
                    )
                )
        # With others in the quorum the largest step may be their claim.
        alone = len(members) == len(reply.replica_ids)
        max_step = reply.max_step if alone else max(step, self._peers_step)
        return Quorum(key, rank, members, max_step, behind=max_step > step, error=error)

    def _find_members(self, step: int, failures: int) -> tuple[Any, Admission]:
        """Ask for a quorum and pick this group's own kind out of the reply.

        If the lighthouse was started again it may not know all groups yet. Who goes on then goes on without groups that
        are alive; so ask again, as often on each rank of the group, before they count as gone.
        """
        former_id, former_names, former = self._former
        restarted = False
        for again in range(_REUNION_ASKS + 1):
            reply = self._request(step, failures)
            admission = admit(self.member, reply.replica_ids)
            self._name_strangers(admission)
            slots = [member.slot for member in admission.members]
            missing = [member.slot for member in former if member.slot not in slots]
            if again == 0:
                restarted = reply.quorum_id < former_id
                restarted |= reply.quorum_id == former_id and reply.replica_ids != former_names
            if not (restarted and missing):
                break
            if again == 0:
                logger.warning("the lighthouse was started again; waiting for groups %s to reconnect", missing)
            time.sleep(_REUNION_PAUSE_SECONDS)
        self._former = reply.quorum_id, reply.replica_ids, admission.members
        return reply, admission

    def _name_strangers(self, admission: Admission) -> None:
        """Tell of each stranger once, on one rank of the group."""
        for name in admission.strangers.keys() - self._named if self._group_rank == 0 else ():
            self._named.add(name)
            reason = admission.strangers[name]
            logger.warning("left aside at the lighthouse: member %r, because %s", name, reason)
            self._events.emit(ForeignMember(member=name, reason=reason))

    def _request(self, step: int, failures: int) -> Any:
        """Ask until there is a quorum; gives up only when the lighthouse cannot be reached.

        One request lasts the whole timeout: the ranks of a group ask together, and one that asked again by itself
        would be counted for the next quorum already.
        """
        timeout = self._config.quorum_timeout_seconds
        deadline = time.monotonic() + timeout
        while not self._closed:
            try:
                return self._client._quorum(
                    group_rank=self._group_rank,
                    step=step,
                    checkpoint_metadata="",
                    shrink_only=False,
                    timeout=timedelta(seconds=timeout),
                    init_sync=False,
                    commit_failures=failures,
                )
            except TimeoutError as error:  # torchft's word for a dead lighthouse as well
                self._probe_lighthouse(timeout, error)
                logger.warning("no quorum after step %d for %g s; still waiting for other groups", step, timeout)
                deadline = time.monotonic() + timeout
            except Exception as error:  # torchft raises RuntimeError for every other gRPC status
                if time.monotonic() >= deadline:
                    raise self._unreachable("quorum", timeout, error) from error
                time.sleep(0.1)
        raise LighthouseError("this group has left the job")

    def _probe_lighthouse(self, timeout: float, error: Exception) -> None:
        """Raise if nobody listens at the lighthouse's address; else it only waits for other groups."""
        host, _, port = self._lighthouse.split("//", 1)[-1].rstrip("/").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), self._config.connect_timeout_seconds).close()
        except OSError as refused:
            raise self._unreachable("quorum", timeout, refused) from error

    def _unreachable(self, what: str, seconds: float, error: Exception) -> LighthouseError:
        return LighthouseError(
            f"the lighthouse at {self._lighthouse} did not answer within fault_tolerance.{what}_timeout_seconds "
            f"({seconds:g} s): {error}; check that it runs and that fault_tolerance.lighthouse / TORCHFT_LIGHTHOUSE "
            "name it"
        )

    def _configure(self, quorum_id: int, members: tuple[Member, ...], step: int, key: str, prefix: str) -> str | None:
        """Build the process group of a new quorum; returns what went wrong, or None."""
        if self._prefix and self._group_world_size > 1:
            self._store.set(self._broken_key(self._prefix), "1")  # lets the old quorum's watcher end
        with self._abort_lock:
            self._configured, self._prefix = key, prefix
            self._abort_lock.notify_all()
        prefix, rank = f"{prefix}/{self._group_rank}", members.index(self.member)
        store = members[0].store  # not the reply's, which is that of whoever claims the most steps
        try:
            self._peers_step = step
            if len(members) > 1:
                told = [text.split(" ") for text in self._exchange_addresses(store, prefix, rank, len(members), step)]
                self._peers = {peer: address for peer, (address, _) in enumerate(told)}
                self._addresses = {members[peer].unique: address for peer, address in self._peers.items()}
                self._peers_step = max(int(number) for _, number in told)
            # A member that dies right here must not cost the timeout of a whole collective.
            self.process_group.set_timeout(timedelta(seconds=_RENDEZVOUS_SECONDS))
            self.process_group.configure(
                f"{store}/{prefix}/pg",
                self.member.replica_id,
                rank,
                len(members),
                quorum_id,
                self._group_rank,
                self._group_world_size,
                [member.slot * self._group_world_size + self._group_rank for member in members],
            )
            if self._group_world_size > 1 and self._store.check([self._broken_key(self._prefix)]):
                return "broke on another rank of this group before it began here"
        except Exception as error:  # noqa: BLE001  # a member may die right here; the next quorum is without it
            self._peer_stores.pop(store, None)  # a new connection next time
            return f"{type(error).__name__}: {error}".split("\n", 1)[0]
        finally:
            self.process_group.set_timeout(self.timeout)
        return None

    def _exchange_addresses(self, address: str, prefix: str, rank: int, world_size: int, step: int) -> list[str]:
        """Tell the members this rank's state server and step, learn theirs; shows at once when one is gone already.

        Args:
            address: host:port of the store where they meet.
        """
        host, _, port = address.rpartition(":")
        timeout = timedelta(seconds=_RENDEZVOUS_SECONDS)

        def exchange() -> list[str]:
            # Kept: every new connection costs a reverse DNS lookup on both sides, even of numeric addresses.
            kept = self._peer_stores.pop(address, None) or TCPStore(
                host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout
            )
            store = PrefixStore(prefix, kept)
            store.set(str(rank), f"{self._address} {step}")
            store.wait([str(rank) for rank in range(world_size)], timeout)
            told = [store.get(str(rank)).decode() for rank in range(world_size)]
            self._peer_stores[address] = kept
            return told

        # The way there may be dead. Longer than what the store's own timeout ends, which says more.
        return within(2 * _RENDEZVOUS_SECONDS, exchange)

    # Groups that cannot reach each other

    def _must_tell_reach(self, failures: int) -> bool:
        """Say whether it is time to find out who can reach whom; the same on all ranks of the group."""
        known = failures > 0 and bool(self._store.check([self._lost_key()]))
        return known or failures >= _PROBE_AFTER or bool(self._accusers)

    def _tell_reach(self, failures: int, step: int) -> None:
        """Find out whom this group cannot reach, and tell it in the group's name; all ranks of the group do so."""
        peers = [member for member in self._former[2] if member != self.member]
        prefix, found = self._lost
        if prefix != self._prefix:  # else it was found while the exchange waited
            found = []
            if failures >= _PROBE_AFTER:  # else another rank has found something, and the others need not be waited for
                found = self._find_dead([peer for peer in peers if peer not in self._accusers])
        seat = self._agree(found, lambda dead: self._report(peers, dead, step))
        if seat:
            self._take_seat(seat)

    def _report(self, peers: Sequence[Member], dead: set[str], step: int) -> str:
        """Open the seat whose name tells whom this group cannot reach; none if there is nothing new to tell."""
        living = self._find_living(dead)
        lost = [peer for peer in peers if peer.unique in living]
        slots = [peer.slot for peer in lost if not self.member.names(peer)]
        if slots:
            logger.warning(
                "groups %s live and cannot be reached: see to the network between them and this group", slots
            )
            self._events.emit(LinkDead(slots=slots))
        lost.extend(self._accusers)
        if all(self.member.names(peer) for peer in lost):
            return ""
        return self._reopen_seat(self.member.telling(step, lost))

    def _stay_outside(self, admission: Admission) -> None:
        """Leave the others alone until this group reaches those that it is cut off from, or they are gone.

        All ranks of the group keep their state meanwhile, and the training thread waits.
        """
        relapsed = time.monotonic() - self._returned < _RELAPSE_SECONDS
        self._good_looks = min(2 * self._good_looks, _MOST_GOOD_LOOKS) if relapsed else _GOOD_LOOKS
        lost = admission.cut_off
        if self._group_rank == 0:
            members, slots = [member.slot for member in admission.members], [member.slot for member in lost]
            logger.warning(
                "groups %s go on without this one: it and groups %s cannot reach each other. It keeps its state, tries "
                "again and comes back by itself; see to the network between them",
                members,
                slots,
            )
            self._events.emit(Outside(members=members, unreached=slots))
        # Its heartbeats would make the others wait for it. Each rank has had the seat's last answer when it agrees.
        self._agree((), lambda _: self._leave_seat())
        good = 0

        def look(dead: set[str]) -> str:
            nonlocal good
            good = 0 if self._find_living(dead) else good + 1
            gone = all(member.unique in dead for member in lost)
            if good < (_GOOD_LOOKS if gone else self._good_looks):
                return ""
            return self._reopen_seat(self.member.afresh(uuid.uuid4().hex))

        seat = ""
        while not seat:
            self._pause(_PROBE_PAUSE_SECONDS)
            seat = self._agree(self._find_dead(lost), look)
        self._take_seat(seat)
        self._returned = time.monotonic()
        if self._group_rank == 0:
            logger.warning("groups %s can be reached again, or are gone: this group comes back", slots)
            self._events.emit(LinkBack(slots=slots))

    def _find_dead(self, members: Sequence[Member]) -> list[str]:
        """Return which of `members`, by their unique names, this rank cannot reach."""
        assert self._probe is not None
        # Not everybody the same one first: so many at a time is too much for it.
        members = sorted(members, key=lambda member: member.slot < self.member.slot)
        reasons = self._probe(
            [Peer(member.unique, member.store, self._addresses.get(member.unique, "")) for member in members]
        )
        for member in members:
            if member.unique in reasons.keys() - self._unreached:
                logger.warning(
                    "rank %d cannot reach group %d: %s", self._group_rank, member.slot, reasons[member.unique]
                )
        self._unreached = set(reasons)
        return sorted(reasons)

    def _find_living(self, dead: set[str]) -> set[str]:
        """Return those of whom the lighthouse hears although this group cannot reach them; all if it does not answer.

        A process that has ended cannot be reached either, and neither can one that is frozen. Both send no heartbeats.
        """
        beat, began = self._config.heartbeat_timeout_ms / 1000, time.monotonic()
        open_, living = set(dead), set[str]()
        while open_ and (now := time.monotonic()) - began < 2 * beat:
            page = self._page.read(beat)
            if page is None:
                return dead
            # A process that has just changed its name is there twice.
            youngest: dict[str, float] = {}
            for name, seconds in page.items():
                for member in known_members([name]):
                    youngest[member.unique] = min(seconds, youngest.get(member.unique, seconds))
            living |= {unique for unique in open_ if youngest.get(unique, now) < now - began}
            # Not those that are not listed: a lighthouse that was started again has yet to hear of them.
            open_ -= living | {unique for unique in open_ if youngest.get(unique, 0.0) > beat}
            self._pause(_PAGE_PAUSE_SECONDS)
        return living

    def _agree(self, found: Collection[str], decide: Callable[[set[str]], str]) -> str:
        """Let rank 0 decide, once, from what all ranks of the group have found; returns the decision on each of them.

        All ranks come here alike. Rank 0 alone looks at clocks and at the lighthouse, so that they cannot part.
        """
        self._agreements += 1
        keys = [f"titan_ft/agreed/{self._attempt}/{self._agreements}/{rank}" for rank in range(self._group_world_size)]
        if self._group_rank == 0:
            self._await(keys[1:])
            said = [self._store.get(key).decode().split() for key in keys[1:]]
            self._store.set(keys[0], f"={decide(set(found).union(*said))}")
        else:
            self._store.set(keys[self._group_rank], " ".join(found))
            self._await(keys[:1])
        return self._store.get(keys[0]).decode().removeprefix("=")

    def _await(self, keys: list[str]) -> None:
        """Wait until `keys` are in the group's store. One that died has its whole group restarted by torchrun."""
        pause = 0.001
        while keys and not self._store.check(keys):
            self._pause(pause)
            pause = min(2 * pause, 0.1)

    def _pause(self, seconds: float) -> None:
        with self._abort_lock:
            if self._abort_lock.wait_for(lambda: self._closed, seconds):
                raise LighthouseError("this group has left the job")

    # The seat: torchft's server on rank 0, and each rank's client of it

    def _open_seat(self, member: Member) -> str:
        """Heartbeat as `member` from now on, on rank 0; returns what `_take_seat` needs on all ranks.

        Raises:
            LighthouseError: the lighthouse does not answer, or this group is leaving; the former seat stays.
        """
        from torchft.coordination import ManagerServer

        config, host = self._config, _bracketed(self._host)
        try:
            server = ManagerServer(
                replica_id=member.replica_id,
                lighthouse_addr=self._lighthouse,
                hostname=host,
                bind=f"{_bracketed(config.bind_address or self._host)}:0",
                store_addr=member.store,
                world_size=self._group_world_size,
                heartbeat_interval=timedelta(milliseconds=config.heartbeat_interval_ms),
                connect_timeout=timedelta(seconds=config.connect_timeout_seconds),
                quorum_retries=_LIGHTHOUSE_RETRIES,
            )
        except Exception as error:
            raise self._unreachable("connect", config.connect_timeout_seconds, error) from error
        self._leave_seat(server)
        return f"{server.address()} {member.replica_id}"

    def _reopen_seat(self, member: Member) -> str:
        """Open a seat under another name; returns nothing if the lighthouse is away, then the group tries again."""
        try:
            return self._open_seat(member)
        except LighthouseError as error:
            logger.warning("no seat under a new name yet: %s", error)
            return ""

    def _take_seat(self, seat: str) -> None:
        """Ask and vote at the server that rank 0 has opened."""
        from torchft.coordination import ManagerClient

        address, replica_id = seat.split(" ", 1)
        self.member = Member.parse(replica_id)
        self._client = ManagerClient(address, connect_timeout=timedelta(seconds=self._config.connect_timeout_seconds))
        self._store.set(address_key(self.member.unique, self._group_rank), self._address)
        if self._pulse is not None:
            self._pulse.own = replica_id

    def _leave_seat(self, successor: Any = None) -> str:
        """Stop the heartbeats of this rank's server; `successor` is the server from now on."""
        with self._seat_lock:
            left, self._server = [self._server], successor
            if self._closed:  # meanwhile: nothing heartbeats any more
                left, self._server = [*left, successor], None
        for server in left:
            if server is not None:
                server.shutdown()
        return ""

    # Failures that no connection tells

    def _find_exchanging(self) -> list[str]:
        """Return the names of the other members of the exchange under way, and note which one it is."""
        self._looked_at = self._prefix
        return [member.replica_id for member in self._exchanging()]

    def _exchanging(self) -> list[Member]:
        pending = self._pending
        if pending is None or not pending.done() or pending.cancelled() or pending.exception() is not None:
            return []
        return [member for member in pending.result().members if member != self.member]

    def _look_after(self) -> float:
        """Return the seconds that an exchange may wait before this rank looks at its links."""
        return _SILENT_BEATS * self._config.heartbeat_timeout_ms / 1000 * (1 + len(self._former[2]) // _MANY)

    def _find_lost(self) -> dict[str, str]:
        """Return which members of the exchange under way this rank cannot reach, and why.

        A peer that is slow answers, and one that is busy does at the second time; only the network loses everything.
        """
        self._probed, members = self._prefix, self._exchanging()
        for _ in range(2):
            lost = self._find_dead(members)
            members = [member for member in members if member.unique in lost]
        return {member.unique: f"group {member.slot}" for member in members}

    def _break_off_lost(self, lost: dict[str, str]) -> None:
        """Break off the exchange under way because of links that are dead; the group tells of them after the vote."""
        logger.warning("no way to %s: breaking off the exchange", ", ".join(sorted(lost.values())))
        self._lost = self._probed, sorted(lost)
        self.abort(self._probed)

    def _break_off(self, silent: dict[str, float]) -> None:
        """Break off the exchange under way because members of it are silent."""
        slots = sorted(Member.parse(name).slot for name in silent)
        logger.warning("no heartbeat from groups %s for %.1f s: breaking off the exchange", slots, max(silent.values()))
        self._events.emit(PeerSilent(slots=slots, seconds=max(silent.values())))
        self.abort(self._looked_at)

    # Failures seen by another rank of this group

    def _watch(self, store: TCPStore) -> None:
        """Abort whenever another rank of this group reports the exchange of the quorum in force as broken."""
        try:
            watched = ""
            while not self._closed:
                with self._abort_lock:
                    self._abort_lock.wait_for(lambda before=watched: self._prefix != before or self._closed)  # type: ignore[misc]  # bound by default
                    watched = self._prefix
                store.wait([self._broken_key(watched)], timedelta(days=365))
                self._abort_process_group(watched)
        except Exception:  # noqa: BLE001  # thread edge: the store ended with the group, nothing is left to watch
            return

    def _abort_process_group(self, quorum: str) -> None:
        with self._abort_lock:
            if quorum == self._prefix:
                self.process_group.abort()

    def _broken_key(self, quorum: str) -> str:
        return f"titan_ft/broken/{self._process}/{quorum}"

    def _lost_key(self) -> str:
        return f"titan_ft/lost/{self._process}/{self._prefix}"

    def _connect_store(self) -> TCPStore:
        return TCPStore(self._store_host, self._store_port, is_master=False, wait_for_workers=False)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
