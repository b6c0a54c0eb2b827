# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One replica group's seat: its connection to the lighthouse, under the group's name.

Rank 0 runs torchft's manager server, which sends heartbeats under this name. Rank 0 alone asks the
server for quorums, and the other ranks get the reply over the group's control tree. If each rank
asked the server, a rank that lost its connection would have to ask again. The server forgets its
answers, so this rank would get a later quorum than its siblings.

A group gets another name in two steps: rank 0 opens a seat under the new name, and then all ranks
adopt the name. When the lighthouse moves, rank 0 opens a seat there under the same name
(`follow.py`), and the other ranks need not do anything.

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

# A forked child, such as a data loader's worker, must not collect a dead torchft client. The
# client's destructor would wait for threads that the child lacks.
os.register_at_fork(after_in_child=gc.freeze)

_REQUEST_TIMEOUT = timedelta(days=30)
"""A request never times out. The lighthouse answers a request even after its client timed out, and
the next request would get that answer."""

_LIGHTHOUSE_RETRIES = 10**8
"""torchft's server repeats a request that a restarted lighthouse has lost. Its pause before a
repetition is timeout / retries, and at least 0.1 s. With this many retries the pause is 0.1 s."""

_REPEAT_SECONDS = 0.1  # pause between two requests, or before the second try to open a seat
_MAX_REPEAT_SECONDS = 5.0  # longest pause between two tries to open a seat

CONNECT_SECONDS = 10.0
"""Limit for opening a connection inside a job. It is long because a starting process may not listen
yet. A wrong address delays a failing start by no more than this."""

PROBE_SECONDS = 60.0
"""After this time without a quorum, the group checks whether the lighthouse answers. The limit
decides only how late a dead lighthouse is noticed, and how often a long wait is logged."""

_BEATS_IN_TIMEOUT = 10  # so a few late heartbeats do not evict a group
_MIN_BEATS_IN_TIMEOUT = 4
_GROUPS_AT_FULL_PACE = 64
"""Groups that send `_BEATS_IN_TIMEOUT` heartbeats in a timeout. With more groups, each sends fewer:
a heartbeat costs the lighthouse and its gate 0.05 ms of CPU time together."""


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
        seconds: duration of the request. Requests with an outdated answer are not included.
        received_at: monotonic time in seconds at which the reply reached this rank.
    """

    quorum_id: int
    replica_ids: Sequence[str]
    max_step: int
    moved: bool = False
    seconds: float = field(default=0.0, compare=False)
    received_at: float = field(default=0.0, compare=False)


def _never(names: Sequence[str]) -> bool:
    return False


class _MovedError(Exception):
    """The seat has moved, so the request at the former lighthouse gets no answer."""


class Seat:
    """One rank's side of its group's seat. Call `enter` first.

    `Membership` and `Partition` call it. Server, client and follower exist on rank 0 only. A method
    that is called a collective must be called on all ranks of the group.

    Threads: the quorum thread calls `request`, `reopen`, `adopt_name` and `leave`. The follower's
    thread or the quorum thread calls `_move`. Any thread may call `close`.

    After a `LighthouseError` of `request` the group cannot go on. A failed `reopen` leaves the
    former seat open.

    Args:
        lighthouse: its address.
        store: the group's store.
        control: tree of the group's ranks.
        address: host:port of this rank's state server.
        token: the run's shared secret.
        on_move: called on rank 0 after a move, with the former url, the new url and the Slurm job
            id of the new lighthouse.

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
        self._client: Any = None  # of this server
        self._names: Sequence[str] = ()  # in the last reply
        self._lock = threading.Lock()  # guards `closed` and `_server`
        # Held to open a seat: the quorum thread opens seats under new names, and the follower's
        # thread may move the seat at the same time.
        self._opening = threading.RLock()
        self._opened_as: Member | None = None
        self._request = Future[Any]()  # the request under way
        self._follower: LighthouseFollower | None = None
        self._moved = False  # since the last reply
        self.closed = False

    def enter(self, name: Callable[[], Member]) -> None:
        """Open the group's first seat under the name that rank 0 makes. A collective.

        As soon as the seat is open, the other groups wait for this group. So the seat is opened
        only when all ranks of the group have called this method.

        Raises:
            TokenRefusedError, LighthouseError: see `_open_first`.
        """
        self.adopt_name(self._control.rank0_decides((), lambda _: self._open_first(name())))

    def _open_first(self, member: Member) -> str:
        """Open the group's first seat; on rank 0.

        If a file names the lighthouse, that lighthouse may be gone, or an earlier run's. And while
        the lighthouse restarts, another run's lighthouse may have its port for a while, and refuse
        this group's token. So wait in both cases.

        Raises:
            TokenRefusedError: the token is refused for `start_timeout_seconds`.
            LighthouseError: the lighthouse does not answer.
        """
        limit_seconds = self._config.start_timeout_seconds
        deadline = time.monotonic() + limit_seconds
        pause = _REPEAT_SECONDS
        last_refusal = ""
        while True:
            self._lighthouse.place = self._lighthouse.look() or self._lighthouse.place
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
                    time.sleep(pause)
                    pause = min(2 * pause, _MAX_REPEAT_SECONDS)
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
        """Leave the seat if the lighthouse's gate refuses this group's token.

        Raises:
            TokenRefusedError: it does.
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

        The follower calls this on its own thread, or on the quorum thread from `_is_valid`. Returns
        False if the lighthouse does not answer, or if the group has left.
        """
        with self._opening:
            if self.closed or self._opened_as is None:
                return False
            former = str(self._lighthouse)
            try:
                # Without a server the group is outside, and opens its next seat at the new place.
                if self._server is not None:
                    self._open_at(place.url, self._opened_as)
            except LighthouseError as error:
                logger.warning("no seat at the lighthouse's new place yet: %s", error)
                return False
            self._moved = True
            # Under the lock, so that no seat is opened at the former place from now on.
            self._lighthouse.place = place
            with contextlib.suppress(InvalidStateError):  # the answer has just come
                self._request.set_exception(_MovedError())
        self._on_move(former, place.url, place.job)
        return True

    def open(self, member: Member) -> str:
        """Send heartbeats as `member` from now on; on rank 0.

        Returns:
            The name. All ranks must `adopt_name`.

        Raises:
            LighthouseError: the lighthouse does not answer. The former seat stays open.
        """
        with self._opening:
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
                bind="127.0.0.1:0",  # only this process asks the server
                store_addr=member.store,
                world_size=1,  # the server has one client: rank 0 asks for the whole group
                heartbeat_interval=beat_interval(config),
                connect_timeout=connect_timeout,
                quorum_retries=_LIGHTHOUSE_RETRIES,
            )
            self._client = ManagerClient(server.address(), connect_timeout=connect_timeout)
            # The server answers that it knows no such rank. The answer shows that the server has
            # accepted the client's connection. A connection that still waits to be accepted would
            # be reset together with the listener.
            with contextlib.suppress(RuntimeError):
                self._client._checkpoint_metadata(0, connect_timeout)
            # Any other process on this host could end this process at that port.
            shut_listener(*split_address(server.address()))
        except Exception as error:  # noqa: BLE001  # torchft's errors have no common type
            # `from None`: the text of torchft's error may contain the secret.
            raise self._unreachable(CONNECT_SECONDS, error, url) from None
        self._replace_server(server)
        self._opened_as = member
        return member.replica_id

    def reopen(self, member: Member) -> str:
        """Open a seat under another name; on rank 0.

        Returns an empty text if the lighthouse does not answer. Then the caller tries again.
        """
        try:
            return self.open(member)
        except LighthouseError as error:
            logger.warning("no seat under a new name yet: %s", error)
            return ""

    def adopt_name(self, name: str) -> None:
        """Use the name under which rank 0 has opened a seat."""
        self.member = Member.parse(name, self._token)
        key = address_key(self.member.unique, self._group_rank)
        self._store.set(key, add_seal(self._token, key, self._address))

    def leave(self) -> None:
        """Stop this rank's server, and so the heartbeats. Another seat may be opened later."""
        self._replace_server(None)

    def close(self) -> None:
        """Stop the heartbeats for good; any thread."""
        with self._lock:
            self.closed = True  # `_replace_server` keeps no server from now on
        if self._follower is not None:
            self._follower.close()
        self.leave()

    def request(
        self,
        step: int,
        failures: int,
        is_outdated: Callable[[Sequence[str]], bool] = _never,
    ) -> Reply:
        """Ask for a quorum, and wait for it without a limit. A collective.

        All ranks get the same answer, or the same error. The wait ends early only if the lighthouse
        is gone or the group leaves.

        Args:
            step: committed updates of this group.
            failures: sent as `commit_failures`. Above 0, the quorum gets a new id.
            is_outdated: called on rank 0 with the names in the quorum; may block. If it returns
                True, the quorum is requested again.

        Raises:
            LighthouseError: the lighthouse did not answer for `PROBE_SECONDS`, or this group has
                left.
        """
        if not self._names:
            # After the first reply each rank builds a process group, and the other groups wait only
            # a short time for it. So all ranks must be here before the first request.
            self._control.rank0_decides((), lambda _: "all ranks are here")

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
        """Ask for a quorum, and encode the reply for the other ranks; on rank 0.

        Returns:
            JSON: {"reply": fields of a `Reply`}, where names = null stands for the former names; or
            {"error": text}.
        """
        moved = False
        try:
            while True:
                requested_at = time.monotonic()
                reply = self._ask_until_answered(step, failures)
                seconds = time.monotonic() - requested_at
                # Clear the flag only if it was seen: the follower may move the seat between two
                # lines. A move during `is_outdated` belongs to the next reply.
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
        """Repeat the request until the announced lighthouse answers; on rank 0.

        After each `PROBE_SECONDS` without an answer, probe the lighthouse and log the wait.

        Raises:
            LighthouseError: the lighthouse does not answer, or this group has left.
        """
        timeout = PROBE_SECONDS
        started = time.monotonic()
        next_log = started
        deadline = started + timeout  # for a lighthouse that answers with errors
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
                answer = self._ask(step, failures)  # at once, at the new place
                continue
            if error is None:
                reply = answer.result()
                if self._is_valid(reply):
                    return reply
            elif time.monotonic() >= deadline:
                self._give_up(timeout, error)
                deadline = time.monotonic() + timeout
            time.sleep(_REPEAT_SECONDS)
            answer = self._ask(step, failures)
        raise LighthouseError("this group has left the job")

    def _is_valid(self, reply: Any) -> bool:
        """True if the announced lighthouse gave the reply, or if its members are unchanged.

        A superseded lighthouse that was only slow still answers. It and its successor could each
        give a quorum to some of the groups. Such a quorum always has other members than the last
        one, so an unchanged reply needs no check.
        """
        if self._follower is None or not self._lighthouse.is_file:
            return True
        if list(reply.replica_ids) == list(self._names):
            return True
        return self._follower.check()

    def _give_up(self, seconds: float, error: BaseException) -> None:
        """Raise, because the lighthouse does not answer. If a file names it, only log that.

        With a file the group waits for a successor. A group that ended would take its state with
        it, and Slurm may need minutes to start another lighthouse.

        Raises:
            LighthouseError: no file names the lighthouse.
        """
        lost = self._unreachable(seconds, error)
        if not self._lighthouse.is_file:
            raise lost from None
        logger.warning("%s; waiting for another one to announce itself", lost)

    def _ask(self, step: int, failures: int) -> Future[Any]:
        """Ask for a quorum once. The future gets torchft's reply, its error, or a `_MovedError`."""
        with self._opening:  # so a request uses the client after a move, or `_move` ends it
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
            self._request = call_aside(ask, "titan_ft_ask")
            return self._request

    def _replace_server(self, successor: Any) -> None:
        """Stop the heartbeats of this rank's server, and keep `successor` as the server."""
        with self._lock:
            stopped = [self._server]
            self._server = successor
            if self.closed:
                # The group has left meanwhile. Stop the new server too: its heartbeats would make
                # the other groups wait.
                stopped.append(successor)
                self._server = None
        for server in stopped:
            if server is not None:
                server.shutdown()

    def _probe_lighthouse(self, timeout: float, error: Exception) -> None:
        """Check that a lighthouse listens. If one does, it only waits for other groups.

        Raises:
            LighthouseError: nothing listens at the address, and no file names the lighthouse.
        """
        try:
            socket.create_connection(split_address(str(self._lighthouse)), CONNECT_SECONDS).close()
        except OSError as refused:
            self._give_up(timeout, refused)

    def _log_wait(self, step: int, seconds: float, now: float) -> float:
        """Log the wait for other groups. Return the time of the next such line."""
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
