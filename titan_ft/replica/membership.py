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
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported at run time

from titan_ft import device
from titan_ft.config import FaultTolerance
from titan_ft.history.events import EventLog
from titan_ft.replica.errors import LighthouseError
from titan_ft.replica.member import Admission, Member, Quorum, admit
from titan_ft.replica.pulse import Pulse

logger = logging.getLogger(__name__)

_RENDEZVOUS_SECONDS = 2.0  # all members got the quorum's reply at the same moment; one that is silent so long is gone
# torchft's server repeats a request that a restarted lighthouse lost, once for all ranks of the group.
_LIGHTHOUSE_RETRIES = 1000
# A lighthouse that was started again knows nobody and makes a quorum of whoever asks first. Together well above the
# time that all groups need to heartbeat again.
_REUNION_ASKS = 20
_REUNION_PAUSE_SECONDS = 0.1
_OFTEN = 4  # groups that look at the lighthouse's page in each heartbeat timeout; 1000 groups look 200 times a second
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
    ) -> None:
        from torchft.coordination import ManagerClient, ManagerServer

        self._config = config
        self._group_rank, self._group_world_size = group_rank, group_world_size
        self._address = address
        self._lighthouse = lighthouse
        self._events = events
        self.process_group = process_group
        self.timeout = timedelta(milliseconds=config.process_group_timeout_ms)
        self._store_host, self._store_port = store
        self._store = self._connect_store()
        self._server: Any = None
        if group_rank == 0:
            store_address = f"{_bracketed(host)}:{self._store_port}"  # rank 0 runs where the store is
            self.member = Member(
                config.replica_id, time.time(), uuid.uuid4().hex, config_digest, config.job_id, store_address, shape
            )
            try:
                self._server = ManagerServer(
                    replica_id=self.member.replica_id,
                    lighthouse_addr=lighthouse,
                    hostname=_bracketed(host),
                    bind=f"{_bracketed(config.bind_address or host)}:0",
                    store_addr=store_address,
                    world_size=group_world_size,
                    heartbeat_interval=timedelta(milliseconds=config.heartbeat_interval_ms),
                    connect_timeout=timedelta(seconds=config.connect_timeout_seconds),
                    quorum_retries=_LIGHTHOUSE_RETRIES,
                )
            except Exception as error:
                raise self._unreachable("connect", config.connect_timeout_seconds, error) from error
            self._store.set(f"titan_ft/server/{attempt}", f"{self._server.address()} {self.member.replica_id}")
        server, replica_id = self._store.get(f"titan_ft/server/{attempt}").decode().split(" ", 1)
        self.member = Member.parse(replica_id)
        self._client = ManagerClient(server, connect_timeout=timedelta(seconds=config.connect_timeout_seconds))
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
        self._closed = False
        self._abort_lock = threading.Condition()
        self._failures = 0
        self._pulse: Pulse | None = None
        self._looked_at = ""  # prefix of the quorum that the pulse has looked at
        if group_rank == 0:  # it tells the others
            beat = config.heartbeat_timeout_ms / 1000
            self._pulse = Pulse(
                lighthouse,
                # A page has a line for each group, and every group looks for itself: in large jobs more seldom.
                interval=beat * (1 + (config.replica_id // _OFTEN).bit_length()),
                patience=_SILENT_BEATS * beat,
                own=self.member.replica_id,
                members=self._exchanging,
                on_silence=self._break_off,
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
        """Wait for the quorum asked for.

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
        """Wait for an exchange: it is broken off when one of its members falls silent (see `Pulse`)."""
        with self._pulse.watching() if self._pulse is not None else contextlib.nullcontext():
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
        """Stop this group's heartbeats, so that the others go on without it; any thread of rank 0."""
        if self._server is not None:
            self._server.shutdown()

    def close(self) -> None:
        """Leave: stop the heartbeats and close the process group; a second call does nothing."""
        if self._closed:
            return
        self.fall_silent()
        if self._pulse is not None:
            self._pulse.close()
        with self._abort_lock:
            self.process_group.abort(errored=False)
            self._closed = True
            self._abort_lock.notify_all()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # The quorum thread

    def _ask(self, step: int, failures: int) -> Quorum:
        asked = time.monotonic()
        reply, members = self._find_members(step, failures)
        answered = time.monotonic()
        names = hashlib.sha256("/".join(member.unique for member in members).encode()).hexdigest()[:16]
        key = f"{reply.quorum_id}/{names}"
        rank = members.index(self.member)
        error = None
        if key != self._configured:
            # A restarted lighthouse counts quorum ids from the beginning, and stores keep what was written under a key.
            # The same processes were members each time that it came up, so that their counts agree. After a reply that
            # reached only some of them they do not: then they miss each other, and meet in the next quorum.
            self._builds[key] += 1
            error = self._configure(reply.quorum_id, members, step, key, f"titan_ft/{key}/{self._builds[key]}")
            if error is None:
                self._events.emit(
                    "joined",
                    quorum=reply.quorum_id,
                    participants=[member.slot for member in members],
                    step=step,
                    quorum_seconds=answered - asked,
                    rebuild_seconds=time.monotonic() - answered,
                )
        # With others in the quorum the largest step may be their claim.
        alone = len(members) == len(reply.replica_ids)
        max_step = reply.max_step if alone else max(step, self._peers_step)
        return Quorum(key, rank, members, max_step, behind=max_step > step, error=error)

    def _find_members(self, step: int, failures: int) -> tuple[Any, tuple[Member, ...]]:
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
        return reply, admission.members

    def _name_strangers(self, admission: Admission) -> None:
        """Tell of each stranger once, on one rank of the group."""
        for name in admission.strangers.keys() - self._named if self._group_rank == 0 else ():
            self._named.add(name)
            reason = admission.strangers[name]
            logger.warning("left aside at the lighthouse: member %r, because %s", name, reason)
            self._events.emit("foreign_member", member=name, reason=reason)

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
            self._peer_stores.pop(store, None)
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
        if address not in self._peer_stores:
            # Kept: every new connection costs a reverse DNS lookup on both sides, even of numeric addresses.
            self._peer_stores[address] = TCPStore(
                host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout
            )
        store = PrefixStore(prefix, self._peer_stores[address])
        store.set(str(rank), f"{self._address} {step}")
        store.wait([str(rank) for rank in range(world_size)], timeout)
        return [store.get(str(rank)).decode() for rank in range(world_size)]

    # Failures that no connection tells

    def _exchanging(self) -> list[str]:
        """Return the other members of the exchange under way."""
        self._looked_at, pending = self._prefix, self._pending
        if pending is None or not pending.done() or pending.cancelled() or pending.exception() is not None:
            return []
        return [member.replica_id for member in pending.result().members if member != self.member]

    def _break_off(self, silent: dict[str, float]) -> None:
        """Break off the exchange under way because members of it are silent."""
        slots = sorted(Member.parse(name).slot for name in silent)
        logger.warning("no heartbeat from groups %s for %.1f s: breaking off the exchange", slots, max(silent.values()))
        self._events.emit("peer_silent", slots=slots, seconds=max(silent.values()))
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
        return f"titan_ft/broken/{self.member.unique}/{quorum}"

    def _connect_store(self) -> TCPStore:
        return TCPStore(self._store_host, self._store_port, is_master=False, wait_for_workers=False)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
