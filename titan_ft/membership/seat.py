# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One replica group's seat: its connection to the lighthouse, under the group's name.

A group's *name* is a text that the lighthouse shows to all groups (`protocol.member.Member`). It
contains the group's slot, a hash of its settings, and a report of the groups that it cannot reach.
While a group has a seat, heartbeats are sent under its name, and the other groups wait for it.

Rank 0 runs torchft's manager server, which sends these heartbeats. Only rank 0 asks the server for
quorums. The other ranks get the reply over the group's control tree. Suppose that each rank asked
the server. If one of them lost its connection, it would ask again. The server forgets its answers,
so this rank would get a later quorum than the other ranks.

- Opening the first seat: `enter`.
- Changing the name, for example to report a dead link: rank 0 opens another seat (`reopen`), then
  all ranks call `adopt_name`.
- Following the lighthouse to another address: rank 0 opens a seat there under the same name
  (`_move`, called by follow.py). The other ranks need not do anything.
- Leaving: `leave` until another seat is opened, `close` for good.

See docs/membership.md.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported at run time

from titan_ft.config import FaultTolerance
from titan_ft.membership.control_tree import ControlTree
from titan_ft.membership.follow import LighthouseFollower
from titan_ft.protocol.errors import LighthouseError, TokenRefusedError
from titan_ft.protocol.member import Member
from titan_ft.protocol.strategy import strategy_of
from titan_ft.run.lighthouse import LighthouseAddress, Place
from titan_ft.system.address import split_address
from titan_ft.system.process import shut_listener
from titan_ft.system.seal import add_seal
from titan_ft.system.threads import call_aside
from titan_ft.transfer.reach import address_key

logger = logging.getLogger(__name__)

# In a forked process, such as a data loader's worker, the garbage collector must not destroy a
# torchft client of the parent process. The client's destructor would wait for threads that exist
# only in the parent.
os.register_at_fork(after_in_child=gc.freeze)

_REQUEST_TIMEOUT = timedelta(days=30)
"""So a request never times out. The lighthouse would answer it even after the timeout, and the next
request would get that outdated answer."""

_LIGHTHOUSE_RETRIES = 10**8
"""torchft's server repeats a request that a restarted lighthouse has lost. Its pause before a
repetition is timeout / retries, and at least 0.1 s. With this many retries the pause is 0.1 s."""

_REPEAT_SECONDS = 0.1  # pause between two requests, or before the second try to open a seat
_MAX_REPEAT_SECONDS = 5.0  # longest pause between two tries to open a seat

CONNECT_SECONDS = 10.0
"""Limit for opening a connection to another process of the job. It is long because that process may
just start, and not listen yet. With a wrong address a start fails after this time."""

PROBE_SECONDS = 60.0
"""After this time without a quorum, the group checks whether the lighthouse answers. The limit
decides only how late a dead lighthouse is noticed, and how often a long wait is logged."""

# Heartbeats that a group sends in one heartbeat timeout. A few late ones must not make the group
# count as dead.
_BEATS_IN_TIMEOUT = 10
_MIN_BEATS_IN_TIMEOUT = 4
_GROUPS_AT_FULL_PACE = 64
"""Up to this number of groups, each sends `_BEATS_IN_TIMEOUT` heartbeats in a timeout. With more
groups, each sends fewer: a heartbeat costs the lighthouse and its gate together 0.05 ms of CPU
time."""


def beat_interval(config: FaultTolerance) -> timedelta:
    """Return the time from one heartbeat to the next.

    The time grows with the number of groups, which share one lighthouse, to a quarter of the
    timeout.
    """
    num_groups = max(config.group_size, _GROUPS_AT_FULL_PACE)
    num_beats = max(_BEATS_IN_TIMEOUT * _GROUPS_AT_FULL_PACE / num_groups, _MIN_BEATS_IN_TIMEOUT)
    return timedelta(milliseconds=config.heartbeat_timeout_ms) / num_beats


@dataclass(frozen=True)
class Reply:
    """The lighthouse's reply to a request for a quorum.

    Attributes:
        replica_ids: names of the quorum's members.
        max_step: largest number of committed updates that a member has reported.
        moved: the seat has moved to another lighthouse since the last reply.
        seconds: duration of the request. If it was repeated because the answer was outdated, this
            is the duration of the last request.
        received_at: monotonic time in seconds at which the reply reached this rank.
    """

    quorum_id: int
    replica_ids: Sequence[str]
    max_step: int
    moved: bool = False
    seconds: float = field(default=0.0, compare=False)
    received_at: float = field(default=0.0, compare=False)


def _never_outdated(names: Sequence[str]) -> bool:
    return False


class _MovedError(Exception):
    """The seat has moved to another lighthouse, so do not wait for the former one's answer."""


def _pause_before_retry(lighthouse: LighthouseAddress, seconds: float) -> None:
    """Wait for some seconds; end early if a file names another lighthouse.

    Without the early end, a lighthouse that announces itself in the file during the pause would
    stay unnoticed for up to `_MAX_REPEAT_SECONDS`.
    """
    if not lighthouse.is_file:
        time.sleep(seconds)  # Nothing is looked up meanwhile: a name server may take 5 s.
        return
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(_REPEAT_SECONDS)
        found = lighthouse.look()
        if found and found != lighthouse.place:
            return


class Seat:
    """One rank's end of its group's seat. Call `enter` first.

    `Membership` and `Partition` call it. Only rank 0 has a server, a client and a follower. Methods
    described as a collective must be called on all ranks of the group.

    Threads: the quorum thread calls `request`, `reopen`, `adopt_name` and `leave`. The follower's
    thread or the quorum thread calls `_move`. Any thread may call `close`.

    If `request` raises a `LighthouseError`, the group cannot continue. If `reopen` fails, the
    former seat stays open.

    Args:
        lighthouse: address of the lighthouse.
        store: the group's TCPStore, in which this rank publishes `address`.
        control: control tree of the group's ranks.
        address: host:port of this rank's state server.
        token: the run's shared secret.
        on_move: called on rank 0 after the lighthouse has moved. The arguments are the former url,
            the new url, and the Slurm job id of the new lighthouse.

    Attributes:
        member: the name that the group has at the lighthouse.
        closed: True if the group has left for good.
    """

    member: Member

    def __init__(
        self,
        config: FaultTolerance,
        *,
        lighthouse: LighthouseAddress,
        group_rank: int,
        store: TCPStore,
        control: ControlTree,
        address: str,
        token: str,
        on_move: Callable[[str, str, str], None],
    ) -> None:
        self._config = config
        self._lighthouse = lighthouse
        self._group_rank = group_rank
        self._store = store
        self._control = control
        self._address = address
        self._token = token
        self._on_move = on_move
        self._server: Any = None  # torchft's ManagerServer, on rank 0
        self._client: Any = None  # torchft's ManagerClient of this server, on rank 0
        self._names: Sequence[str] = ()  # the members' names in the last reply
        self._lock = threading.Lock()  # guards `closed` and `_server`
        # Held while a seat is opened. The quorum thread opens seats under new names, and the
        # follower's thread may move the seat at the same time.
        self._opening_lock = threading.RLock()
        self._opened_member: Member | None = None  # the name of the last seat that was opened
        self._pending_request = Future[Any]()
        self._follower: LighthouseFollower | None = None
        self._moved = False  # True if the seat has moved since the last reply
        self.closed = False

    def enter(self, make_name: Callable[[], Member]) -> None:
        """Open the group's first seat, and adopt its name. A collective.

        As soon as the seat is open, the other groups wait for this group. So the seat is opened
        only when all ranks of the group have called this method.

        Args:
            make_name: returns the group's first name; called on rank 0.

        Raises:
            TokenRefusedError, LighthouseError: see `_open_first`.
        """

        def open_first(_words: set[str]) -> str:
            return self._open_first(make_name())

        self.adopt_name(self._control.rank0_decides((), open_first))

    def _open_first(self, member: Member) -> str:
        """Open the group's first seat; on rank 0. Returns its name.

        The lighthouse's address may be given by a file on shared storage, which each new lighthouse
        overwrites. The lighthouse in the file may be gone, or belong to an earlier run. Also, while
        the lighthouse restarts, another run's lighthouse may listen at its port for some time, and
        refuse this group's token. So wait in both cases.

        Raises:
            TokenRefusedError: the token was refused for `start_timeout_seconds`.
            LighthouseError: the lighthouse does not answer.
        """
        limit_seconds = self._config.start_timeout_seconds
        deadline = time.monotonic() + limit_seconds
        pause = _REPEAT_SECONDS
        last_refusal = ""
        while True:
            found = self._lighthouse.look()
            if found:
                self._lighthouse.place = found
            try:
                opened = self.open(member)
                self._check_token()
            except LighthouseError as error:
                is_refused = isinstance(error, TokenRefusedError)
                if is_refused and f"{error}" != last_refusal:
                    last_refusal = f"{error}"
                    logger.warning(
                        "waiting up to %g s for another lighthouse: %s", limit_seconds, error
                    )
                may_wait = self._lighthouse.is_file or last_refusal
                if may_wait and time.monotonic() < deadline:
                    _pause_before_retry(self._lighthouse, pause)
                    # Only a gate that refuses sees a stranger in each attempt.
                    pause = min(2 * pause, _MAX_REPEAT_SECONDS) if is_refused else _REPEAT_SECONDS
                    continue
                if is_refused:
                    raise TokenRefusedError(
                        f"{error} (fault_tolerance.start_timeout_seconds = {limit_seconds:g} is "
                        "over)"
                    ) from None
                raise
            if self._lighthouse.may_change:
                slot = self._config.replica_id
                self._follower = LighthouseFollower(self._lighthouse, slot, self._move)
            return opened

    def _check_token(self) -> None:
        """Check that the lighthouse's gate accepts this group's token. If not, leave the seat.

        Raises:
            TokenRefusedError: the gate refuses the token.
        """
        if not self._lighthouse.refuses(CONNECT_SECONDS):
            return
        self.leave()
        raise TokenRefusedError(
            f"the lighthouse at {self._lighthouse} refuses this group's TITAN_FT_TOKEN; the "
            "lighthouse and all groups of a run must have the same one in their environment"
        )

    def _move(self, place: Place) -> bool:
        """Open the group's seat under the same name at another lighthouse.

        The follower calls this on its own thread, or on the quorum thread from `_is_valid`.

        Returns:
            False if the lighthouse does not answer, or if the group has left.
        """
        with self._opening_lock:
            if self.closed or self._opened_member is None:
                return False
            former = str(self._lighthouse)
            try:
                # Without a server the group has left its seat for the moment (`leave`). It opens
                # its next seat at the new place, because `_lighthouse.place` is set below.
                if self._server is not None:
                    self._open_at(place.url, self._opened_member)
            except LighthouseError as error:
                logger.warning("no seat at the lighthouse's new place yet: %s", error)
                return False
            self._moved = True
            # Still under the lock, so that no other thread opens a seat at the former place.
            self._lighthouse.place = place
            with contextlib.suppress(InvalidStateError):  # The answer has come just now.
                self._pending_request.set_exception(_MovedError())
        self._on_move(former, place.url, place.job)
        return True

    def open(self, member: Member) -> str:
        """Open a seat under the name `member`; on rank 0. From then on heartbeats are sent.

        Returns:
            The name as a text. All ranks must call `adopt_name` with it.

        Raises:
            LighthouseError: the lighthouse does not answer. The former seat stays open.
        """
        with self._opening_lock:
            return self._open_at(str(self._lighthouse), member)

    def _open_at(self, url: str, member: Member) -> str:
        from torchft.coordination import ManagerClient, ManagerServer

        config = self._config
        connect_timeout = timedelta(seconds=CONNECT_SECONDS)
        try:
            server = ManagerServer(
                replica_id=member.replica_id,
                lighthouse_addr=self._lighthouse.url_for_client(url),
                hostname="127.0.0.1",
                bind="127.0.0.1:0",  # Only this process asks the server.
                store_addr=member.store,
                world_size=1,  # The server has one client: rank 0 asks for the whole group.
                heartbeat_interval=beat_interval(config),
                connect_timeout=connect_timeout,
                quorum_retries=_LIGHTHOUSE_RETRIES,
            )
            self._client = ManagerClient(server.address(), connect_timeout=connect_timeout)
            # Wait until the server has accepted the client's connection, because the listener is
            # shut down below. A connection that has not been accepted by then would be reset. Any
            # answer shows that it is accepted, also the error that the server knows no such rank.
            with contextlib.suppress(RuntimeError):
                self._client._checkpoint_metadata(0, connect_timeout)
            # Otherwise any process on this host could connect to that port, and ask the server to
            # end this process.
            shut_listener(*split_address(server.address()))
        except Exception as error:  # noqa: BLE001  # torchft's errors have no common type
            # `from None`: the text of torchft's error may contain the secret.
            raise self._unreachable(CONNECT_SECONDS, error, url) from None
        self._replace_server(server)
        self._opened_member = member
        return member.replica_id

    def reopen(self, member: Member) -> str:
        """Open a seat under another name; on rank 0.

        Returns:
            The name as a text; empty if the lighthouse does not answer. Then the caller tries
            again.
        """
        try:
            return self.open(member)
        except LighthouseError as error:
            logger.warning("no seat under a new name yet: %s", error)
            return ""

    def adopt_name(self, name: str) -> None:
        """Use the name under which rank 0 has opened a seat, on every rank.

        Publishes the address of this rank's state server under the new name.
        """
        self.member = Member.parse(name, self._token)
        key = address_key(self.member.unique, self._group_rank)
        self._store.set(key, add_seal(self._token, key, self._address))

    def leave(self) -> None:
        """Stop the heartbeats, until another seat is opened."""
        self._replace_server(None)

    def close(self) -> None:
        """Stop the heartbeats for good; any thread."""
        with self._lock:
            self.closed = True  # From now on `_replace_server` stops each new server at once.
        if self._follower is not None:
            self._follower.close()
        self.leave()

    def request(
        self,
        step: int,
        failures: int,
        is_outdated: Callable[[Sequence[str]], bool] = _never_outdated,
    ) -> Reply:
        """Request a quorum, and wait for it without a limit. A collective.

        All ranks get the same reply, or the same error.

        Args:
            step: committed updates in this group's state.
            failures: sent as `commit_failures`. Above 0, the quorum gets a new id.
            is_outdated: called on rank 0 with the names in the quorum; may block. If it returns
                True, the quorum is requested again.

        Raises:
            LighthouseError: the lighthouse did not answer for `PROBE_SECONDS`, or this group has
                left.
        """
        if not self._names:
            # After the first reply each rank builds a process group, and the other groups wait only
            # a short time for that. So let all ranks come here before the first request.
            self._control.rank0_decides((), lambda _words: "all ranks are here")

        def ask() -> str:
            return self._ask_for_all(step, failures, is_outdated)

        announced = self._control.rank0_announces(ask)
        answer = json.loads(announced.text)
        if "error" in answer:
            raise LighthouseError(answer["error"])
        quorum_id, max_step, names, seconds, moved = answer["reply"]
        if names is not None:
            self._names = names
        return Reply(quorum_id, self._names, max_step, moved, seconds, announced.received_at)

    def _ask_for_all(
        self,
        step: int,
        failures: int,
        is_outdated: Callable[[Sequence[str]], bool],
    ) -> str:
        """Request a quorum, and encode the reply for the other ranks; on rank 0.

        Returns:
            JSON: {"reply": [quorum_id, max_step, names, seconds, moved]} or {"error": text}. If the
            names are those of the last reply, they are null.
        """
        moved = False
        try:
            while True:
                requested_at = time.monotonic()
                reply = self._ask_until_answered(step, failures)
                seconds = time.monotonic() - requested_at
                # Clear the flag only if it is set: the follower may set it at any moment. A move
                # during `is_outdated` belongs to the next reply.
                if self._moved:
                    self._moved = False
                    moved = True
                if not is_outdated(reply.replica_ids):
                    break
        except LighthouseError as error:
            return json.dumps({"error": str(error)})
        names: Sequence[str] | None = reply.replica_ids
        if names == self._names:
            # With many groups the names are long, and they seldom change.
            names = None
        return json.dumps({"reply": [reply.quorum_id, reply.max_step, names, seconds, moved]})

    def _ask_until_answered(self, step: int, failures: int) -> Any:
        """Repeat the request until the lighthouse gives a valid answer; on rank 0.

        After each `PROBE_SECONDS` without an answer, check that the lighthouse listens, and log the
        wait.

        Raises:
            LighthouseError: the lighthouse does not answer, or this group has left.
        """
        timeout = PROBE_SECONDS
        started = time.monotonic()
        next_log = started
        deadline = started + timeout  # A lighthouse may answer with errors until this time.
        answer = self._ask(step, failures)
        while not self.closed:
            try:
                error = answer.exception(timeout)
            except TimeoutError as waited:
                self._probe_lighthouse(timeout, waited)
                now = time.monotonic()
                if now >= next_log:
                    next_log = self._log_wait(step, now - started, now)
                deadline = now + timeout
                continue
            if isinstance(error, _MovedError):
                deadline = time.monotonic() + timeout
                answer = self._ask(step, failures)  # Without a pause, at the new place.
                continue
            if error is None:
                reply = answer.result()
                if self._is_valid(reply):
                    return reply
            elif time.monotonic() >= deadline:
                self._raise_unless_file(timeout, error)
                deadline = time.monotonic() + timeout
            time.sleep(_REPEAT_SECONDS)
            answer = self._ask(step, failures)
        raise LighthouseError("this group has left the job")

    def _is_valid(self, reply: Any) -> bool:
        """Return True if the reply comes from the lighthouse that is valid now.

        A new lighthouse may have replaced one that was only slow, and still answers. Then each of
        the two could give a quorum to some of the groups. Such a quorum has other members than the
        last one. So a reply with the same members needs no check.
        """
        if self._follower is None or not self._lighthouse.is_file:
            return True
        if list(reply.replica_ids) == list(self._names):
            return True
        return self._follower.check()

    def _raise_unless_file(self, seconds: float, error: BaseException) -> None:
        """Raise an error, because the lighthouse does not answer. With a file, log it instead.

        If a file gives the lighthouse's address, the group waits until a new lighthouse writes its
        address. Slurm may need minutes to start one, and a group that ended would lose its state.

        Raises:
            LighthouseError: the address is not given by a file.
        """
        lost = self._unreachable(seconds, error)
        if not self._lighthouse.is_file:
            raise lost from None
        logger.warning("%s; waiting for another one to announce itself", lost)

    def _ask(self, step: int, failures: int) -> Future[Any]:
        """Ask for a quorum once. The future gets torchft's reply, its error, or a `_MovedError`."""
        # Under the lock, so that the request is made either before a move, which then ends it, or
        # after the move with the new client.
        with self._opening_lock:
            ask = partial(
                self._client._quorum,
                group_rank=0,
                step=step,
                checkpoint_metadata="",
                shrink_only=False,
                timeout=_REQUEST_TIMEOUT,
                init_sync=False,
                commit_failures=failures,
            )
            self._pending_request = call_aside(ask, "titan_ft_ask")
            return self._pending_request

    def _replace_server(self, successor: Any) -> None:
        """Stop this rank's server and its heartbeats, and keep `successor` as the server."""
        with self._lock:
            stopped = [self._server]
            self._server = successor
            if self.closed:
                # The group has left meanwhile. Stop the new server as well, because its heartbeats
                # would make the other groups wait.
                stopped.append(successor)
                self._server = None
        for server in stopped:
            if server is not None:
                server.shutdown()

    def _probe_lighthouse(self, timeout: float, error: Exception) -> None:
        """Check that the lighthouse listens. If it does, it only waits for other groups.

        Raises:
            LighthouseError: see `_raise_unless_file`.
        """
        try:
            socket.create_connection(split_address(str(self._lighthouse)), CONNECT_SECONDS).close()
        except OSError as refused:
            self._raise_unless_file(timeout, refused)

    def _log_wait(self, step: int, seconds: float, now: float) -> float:
        """Log the wait for other groups. Return the earliest time of the next such line.

        Args:
            seconds: duration of the wait so far.
            now: the present monotonic time.
        """
        if not strategy_of(self._config).has_long_rounds:
            logger.warning(
                "no quorum after step %d for %.3g s: waiting for other groups",
                step,
                seconds,
            )
            return now
        # A round may take hours, and a group that has finished it early waits all that time.
        logger.warning(
            "no quorum after round %d for %.3g s: waiting for other groups, which may be in the "
            "middle of their round; logged again when the wait has doubled",
            step,
            seconds,
        )
        return now + seconds

    def _unreachable(self, seconds: float, error: BaseException, url: str = "") -> LighthouseError:
        # torchft's own text is long and helps nobody, so only the log gets it.
        logger.warning("the lighthouse did not answer: %s", self._lighthouse.conceal(str(error)))
        return LighthouseError(
            f"the lighthouse at {url or self._lighthouse} did not answer within {seconds:g} s; "
            "check that it runs, and that fault_tolerance.lighthouse / TORCHFT_LIGHTHOUSE name it"
        )
