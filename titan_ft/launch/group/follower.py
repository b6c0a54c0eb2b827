# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Follow the leading agent of a group on several hosts: start and end the workers of this host.

`hosts` describes the whole exchange between the agents. The follower's part is:

1. `Follower.follow` connects to the leader, and sends this host's name and number of ranks.
2. It carries out each order of the leader, and reports its workers whenever their state changes.
3. It ends its workers and returns when the leader sends the end of the group, when the connection
   breaks, or when this agent is asked to stop.

After a broken connection the agent looks for another leader, and calls `follow` again.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from copy import copy

from titan_ft.launch.group.agent_connection import (
    AgentConnection,
    EndOrder,
    GroupOver,
    Hello,
    LeaveOrder,
    Message,
    Ping,
    StartOrder,
    WorkersState,
)
from titan_ft.launch.group.hosts import MEETING_SECONDS
from titan_ft.launch.group.worker_group import LocalWorkers, MeetingPoint, Share
from titan_ft.system.address import split_address
from titan_ft.system.process import node_name
from titan_ft.system.stop import StopRequests

_CONNECT_SECONDS = 2.0
_POLL_SECONDS = 0.02
STOPPED_STATUS = 1
"""Exit status of a follower that was asked to stop. If a signal asked, `_AgentProcess` replaces it
by the signal's exit status.
"""


class Follower:
    """Follows one leader as long as the connection to the leader lasts.

    `_AgentProcess` makes the object, and calls all methods on the agent's only thread.
    `kill_workers` is safe from any thread. See docs/agents.md.

    Args:
        stop: counts the requests to stop.
        token: the run's secret.
        slot: slot of the group.
        num_ranks: number of ranks on this host.
        start: starts this host's workers. Gets the number of the attempt, the ranks of this host,
            and the address of the attempt's store.
        drain_seconds: time for the workers to leave when this agent is stopped.
        grace_seconds: time for the workers to end when the leader is gone.
        report: prints a line for people.
    """

    def __init__(
        self,
        stop: StopRequests,
        token: str,
        slot: int,
        num_ranks: int,
        start: Callable[[int, Share, MeetingPoint], LocalWorkers],
        *,
        drain_seconds: float,
        grace_seconds: float,
        report: Callable[[str], None],
    ) -> None:
        self._stop = stop
        self._token = token
        self._slot = slot
        self._num_ranks = num_ranks
        self._start = start
        self._drain_seconds = drain_seconds
        self._grace_seconds = grace_seconds
        self._report = report
        self._connection: AgentConnection | None = None
        self._workers: LocalWorkers | None = None
        """The workers of the running attempt; None between attempts."""
        no_attempt = -1
        self._state = WorkersState(
            no_attempt, pids={}, exits=[], raised_ranks=[], all_reaped=True, last_ping=0
        )
        """The state of the latest attempt, which the leader is told."""
        self._reported_state: WorkersState | None = None
        """The state that the present leader knows; None before the first report."""
        self._latest_problem = ""
        """Why the last leader was lost. A reason that repeats is printed once."""
        self.has_started_workers = False
        """Whether the latest leader has let this host start an attempt."""
        self._leave_deadline: float | None = None
        """Deadline for the workers to leave, in monotonic seconds. None before a request to stop
        this agent.
        """

    def descriptors(self) -> list[int]:
        """Return the descriptors that no fork of this process may keep."""
        return [] if self._connection is None else [self._connection.descriptor]

    def kill_workers(self) -> None:
        """Kill the workers at once."""
        if self._workers is not None:
            self._workers.kill()

    def follow(self, address: str) -> int | None:
        """Follow the leader at an address until the group is over, or the leader is lost.

        Also returns, after the workers have left, if this agent is asked to stop.

        Returns:
            The exit status of this agent. None if no leader is at the address, or if it was lost.
        """
        self.has_started_workers = False
        try:
            connection = socket.create_connection(split_address(address), _CONNECT_SECONDS)
        except OSError:
            return None
        self._connection = AgentConnection(connection, self._token, self._slot, leads=False)
        self._connection.send(Hello(node_name(), self._num_ranks))
        self._reported_state = None
        silent_until = time.monotonic() + MEETING_SECONDS
        try:
            while True:
                group_over = self._obey(self._connection.poll())
                is_silent = not self._connection.has_answered
                if is_silent and time.monotonic() > silent_until:
                    # Another program listens there.
                    raise ConnectionError("the other end says nothing")
                if group_over is not None:
                    return group_over.status
                self._report_state()
                if self._stop and self._let_workers_leave():
                    return STOPPED_STATUS
                time.sleep(_POLL_SECONDS)
        except ConnectionError as error:
            problem = f"no agent leads this group at {address}: {error}"
            if problem != self._latest_problem:
                self._report(problem)
            self._latest_problem = problem
            return None
        finally:
            self._end_workers(0.0 if self._stop.must_end_at_once() else self._grace_seconds)
            self._connection.close()
            self._connection = None

    def _obey(self, messages: Sequence[Message]) -> GroupOver | None:
        """Carry out the leader's orders.

        Returns:
            The leader's last message once the group is over; else None.
        """
        for message in messages:
            match message:
                case StartOrder():
                    self._start_workers(message)
                case LeaveOrder() if self._workers is not None:
                    self._workers.ask_to_leave()
                case EndOrder():
                    self._end_workers(message.grace_seconds)
                case Ping():
                    self._state.last_ping = message.number
                case GroupOver():
                    if message.reason:
                        self._report(message.reason)
                    return message
        return None

    def _start_workers(self, order: StartOrder) -> None:
        self._end_workers(0.0)
        self.has_started_workers = True
        self._latest_problem = ""
        share = Share(
            self._num_ranks, order.world_size, order.first_rank, order.host_index, order.num_hosts
        )
        self._workers = self._start(
            order.attempt, share, MeetingPoint(order.store_host, order.store_port)
        )
        self._state = WorkersState(
            order.attempt,
            pids=self._workers.pids,
            exits=[],
            raised_ranks=[],
            all_reaped=False,
            last_ping=0,
        )

    def _report_state(self) -> None:
        """Send the state of the workers to the leader, if it has changed."""
        assert self._connection is not None, "there is a leader"
        if self._workers is not None:
            self._state.exits = self._workers.exits()
            self._state.raised_ranks = self._workers.ranks_that_raised()
        # The connection may encode the message later, and `_state` changes in place meanwhile.
        state = copy(self._state)
        if state != self._reported_state:
            self._connection.send(state)
            self._reported_state = state

    def _let_workers_leave(self) -> bool:
        """Let the workers leave in order after a request to stop this agent; call it repeatedly.

        Returns:
            True once the workers have ended, so that this agent may end.
        """
        if self._workers is None:
            return True
        if self._leave_deadline is None:
            self._leave_deadline = time.monotonic() + self._drain_seconds
            if self._drain_seconds > 0:
                self._workers.ask_to_leave()
        has_time = time.monotonic() < self._leave_deadline and not self._stop.must_end_at_once()
        if has_time and len(self._workers.exits()) < self._num_ranks:
            return False
        self._end_workers(0.0)
        self._report_state()
        return True

    def _end_workers(self, grace_seconds: float) -> None:
        if self._workers is not None:
            self._state.exits = self._workers.end(grace_seconds)
            self._state.raised_ranks = []
            self._state.all_reaped = True
            self._workers = None
