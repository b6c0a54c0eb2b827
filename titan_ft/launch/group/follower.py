# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The agent on a further host of a group: it starts and ends workers there as the leader says (see
`hosts`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from copy import copy

from titan_ft.launch.group.agent_connection import (
    AgentConnection,
    End,
    Hello,
    LeaveOrder,
    Message,
    Over,
    Ping,
    Start,
    WorkersState,
)
from titan_ft.launch.group.hosts import MEETING_SECONDS
from titan_ft.launch.group.worker_group import MeetingPoint, Share, WorkerGroup
from titan_ft.system.address import split_address
from titan_ft.system.process import node_name
from titan_ft.system.stop import StopRequests

_CONNECT_SECONDS = 2.0
_POLL_SECONDS = 0.02
STOPPED = 1
"""Exit status of a follower that was stopped. The caller may replace it by one that names the
signal.
"""


class Follower:
    """Follows one leader as long as the connection to it lasts. The agent's only thread runs it.

    Args:
        stop: counts the requests to stop.
        token: the run's secret.
        slot: slot of the group.
        num_ranks: number of ranks on this host.
        start: starts this host's workers of an attempt, by its number.
        drain_seconds: time for the workers to leave when this agent is stopped.
        grace_seconds: time for the workers to end when the leader is gone.
        say: prints a line.
    """

    def __init__(
        self,
        stop: StopRequests,
        token: str,
        slot: int,
        num_ranks: int,
        start: Callable[[int, Share, MeetingPoint], WorkerGroup],
        *,
        drain_seconds: float,
        grace_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self._stop = stop
        self._token = token
        self._slot = slot
        self._num_ranks = num_ranks
        self._start = start
        self._drain_seconds = drain_seconds
        self._grace_seconds = grace_seconds
        self._say = say
        self._line: AgentConnection | None = None
        self._group: WorkerGroup | None = None
        self._state = WorkersState(-1, {}, [], [], is_collected=True, answered=0)
        self._sent: WorkersState | None = None
        self._problem = ""
        """Why the last leader was lost; said once."""
        self.has_met = False
        """Whether the latest leader has given this host an attempt to start."""
        self._leave_by: float | None = None
        """Monotonic seconds until which the workers may leave; None if this agent was not asked to
        stop.
        """

    def descriptors(self) -> list[int]:
        """Return the descriptors that no fork of this process may keep."""
        return [] if self._line is None else [self._line.descriptor]

    def kill_workers(self) -> None:
        """Kill the workers at once."""
        if self._group is not None:
            self._group.kill()

    def follow(self, address: str) -> int | None:
        """Follow the leader at an address until it is gone, ends the group, or this agent is
        stopped.

        Returns:
            The exit status of this agent; None if there is no leader (any more).
        """
        self.has_met = False
        try:
            connection = socket.create_connection(split_address(address), _CONNECT_SECONDS)
        except OSError:
            return None
        self._line = AgentConnection(connection, self._token, self._slot, leads=False)
        self._line.send(Hello(node_name(), self._num_ranks))
        self._sent = None
        silent_until = time.monotonic() + MEETING_SECONDS
        try:
            while True:
                over = self._obey(self._line.poll())
                if not self._line.has_answered and time.monotonic() > silent_until:
                    raise ConnectionError("the other end says nothing")
                if over is not None:
                    return over.status
                self._report()
                if self._stop and self._has_left():
                    return STOPPED
                time.sleep(_POLL_SECONDS)
        except ConnectionError as error:
            problem = f"no agent leads this group at {address}: {error}"
            if problem != self._problem:
                self._say(problem)
            self._problem = problem
            return None
        finally:
            self._end(0.0 if self._stop.must_end_at_once() else self._grace_seconds)
            self._line.close()
            self._line = None

    def _obey(self, messages: Sequence[Message]) -> Over | None:
        """Do as the leader says; return its last message once the group is over."""
        for message in messages:
            match message:
                case Start():
                    self._start_workers(message)
                case LeaveOrder() if self._group is not None:
                    self._group.ask_to_leave()
                case End():
                    self._end(message.grace_seconds)
                case Ping():
                    self._state.answered = message.number
                case Over():
                    if message.reason:
                        self._say(message.reason)
                    return message
        return None

    def _start_workers(self, order: Start) -> None:
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

    def _report(self) -> None:
        """Send the state, if it has changed."""
        assert self._line is not None, "there is a leader"
        if self._group is not None:
            self._state.exits, self._state.raised = self._group.exits(), self._group.raised()
        state = copy(self._state)  # `_state` changes in place, and the line may send this one later
        if state != self._sent:
            self._line.send(state)
            self._sent = state

    def _has_left(self) -> bool:
        """Let the workers leave in order after a request to this agent; return whether the agent
        may end.
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
        self._report()
        return True

    def _end(self, grace_seconds: float) -> None:
        if self._group is not None:
            self._state.exits = self._group.end(grace_seconds)
            self._state.raised, self._state.is_collected = [], True
            self._group = None
