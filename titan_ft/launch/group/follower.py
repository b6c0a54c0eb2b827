# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The agent on a further host of a group: it starts and ends the workers there on the leader's
orders (see `hosts`).
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
"""Exit status of a follower that was stopped. The caller may replace it by one that names the
signal.
"""


class Follower:
    """Follows one leader as long as the connection to it lasts.

    The agent's only thread calls all methods; `kill_workers` is safe from any thread. When the
    leader is lost, `follow` ends the workers and returns None, and the caller looks for another
    leader. See docs/agents.md.

    Args:
        stop: counts the requests to stop.
        token: the run's secret.
        slot: slot of the group.
        num_ranks: number of ranks on this host.
        start: starts this host's workers of an attempt, by its number.
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
        self._group: LocalWorkers | None = None
        self._state = WorkersState(-1, {}, [], [], is_collected=True, answered=0)
        self._sent: WorkersState | None = None
        self._problem = ""
        """Why the last leader was lost. A reason that repeats is printed once."""
        self.has_met = False
        """Whether the latest leader has given this host an attempt to start."""
        self._leave_by: float | None = None
        """Monotonic seconds; the deadline for the workers to leave. None before a request to stop
        this agent.
        """

    def descriptors(self) -> list[int]:
        """Return the descriptors that no fork of this process may keep."""
        return [] if self._connection is None else [self._connection.descriptor]

    def kill_workers(self) -> None:
        """Kill the workers at once."""
        if self._group is not None:
            self._group.kill()

    def follow(self, address: str) -> int | None:
        """Follow the leader at an address until it is gone, ends the group, or this agent is
        stopped.

        Returns:
            The exit status of this agent; None if no leader is at the address, or it was lost.
        """
        self.has_met = False
        try:
            connection = socket.create_connection(split_address(address), _CONNECT_SECONDS)
        except OSError:
            return None
        self._connection = AgentConnection(connection, self._token, self._slot, leads=False)
        self._connection.send(Hello(node_name(), self._num_ranks))
        self._sent = None
        silent_until = time.monotonic() + MEETING_SECONDS
        try:
            while True:
                group_over = self._obey(self._connection.poll())
                if not self._connection.has_answered and time.monotonic() > silent_until:
                    raise ConnectionError("the other end says nothing")
                if group_over is not None:
                    return group_over.status
                self._send_state()
                if self._stop and self._has_left():
                    return STOPPED_STATUS
                time.sleep(_POLL_SECONDS)
        except ConnectionError as error:
            problem = f"no agent leads this group at {address}: {error}"
            if problem != self._problem:
                self._report(problem)
            self._problem = problem
            return None
        finally:
            self._end(0.0 if self._stop.must_end_at_once() else self._grace_seconds)
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
                case LeaveOrder() if self._group is not None:
                    self._group.ask_to_leave()
                case EndOrder():
                    self._end(message.grace_seconds)
                case Ping():
                    self._state.answered = message.number
                case GroupOver():
                    if message.reason:
                        self._report(message.reason)
                    return message
        return None

    def _start_workers(self, order: StartOrder) -> None:
        self._end(0.0)
        self.has_met, self._problem = True, ""
        share = Share(
            self._num_ranks, order.world_size, order.first_rank, order.host, order.num_hosts
        )
        self._group = self._start(
            order.attempt, share, MeetingPoint(order.store_host, order.store_port)
        )
        self._state = WorkersState(
            order.attempt, self._group.pids, [], [], is_collected=False, answered=0
        )

    def _send_state(self) -> None:
        """Send the state to the leader, if it has changed."""
        assert self._connection is not None, "there is a leader"
        if self._group is not None:
            self._state.exits = self._group.exits()
            self._state.raised = self._group.ranks_that_raised()
        # The connection may encode the message later, and `_state` changes in place meanwhile.
        state = copy(self._state)
        if state != self._sent:
            self._connection.send(state)
            self._sent = state

    def _has_left(self) -> bool:
        """Let the workers leave in order after a request to stop this agent.

        Returns:
            True once the workers have ended, so that this agent may end.
        """
        if self._group is None:
            return True
        if self._leave_by is None:
            self._leave_by = time.monotonic() + self._drain_seconds
            if self._drain_seconds > 0:
                self._group.ask_to_leave()
        has_time = time.monotonic() < self._leave_by and not self._stop.must_end_at_once()
        if has_time and len(self._group.exits()) < self._num_ranks:
            return False
        self._end(0.0)
        self._send_state()
        return True

    def _end(self, grace_seconds: float) -> None:
        if self._group is not None:
            self._state.exits = self._group.end(grace_seconds)
            self._state.raised, self._state.is_collected = [], True
            self._group = None
