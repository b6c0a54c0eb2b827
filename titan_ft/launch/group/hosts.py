# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A group on several hosts, as seen by the leading agent. The other agents follow (`follower`).

Every agent of a group is started by the same command, with the address of a port on one of the
group's hosts. The agent that can listen at that address leads. The leader alone judges ends and
decides on restarts, so the hosts of a group cannot disagree. The leader also serves the store at
which the workers meet, and gives each follower its ranks.

A group is restarted as a whole. If the connection to a follower breaks, the follower or its host is
gone. The leader then ends all other workers and waits for another agent. If the leader is gone, the
followers end their workers and wait for another leader: any agent that listens at the address.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_ft.config import ConfigError
from titan_ft.launch.group.agent_connection import (
    GONE_SECONDS,
    AgentConnection,
    EndOrder,
    GroupOver,
    Hello,
    LeaveOrder,
    Ping,
    StartOrder,
    WorkersState,
)
from titan_ft.launch.group.worker_exit import WorkerExit
from titan_ft.launch.group.worker_group import AttemptStore, LocalWorkers, Share
from titan_ft.system.address import ALL_HOSTS, split_address
from titan_ft.system.refusal import (
    Refusal,
    RefusalKind,
    Refusals,
    StrangerError,
    find_crowded,
)

MEETING_SECONDS = 600.0
"""Time for the hosts of a group to meet, as in torchrun's rendezvous.

A scheduler may start the hosts one by one.
"""
_COLLECT_SECONDS = 15.0
"""Time for a follower to collect its workers, in addition to the grace time.

`LocalWorkers.end` takes at most 10 s.
"""
_CLOSE_SECONDS = 2.0
"""Time for the followers to read the end of the group."""
_MAX_STRANGERS = 256
"""Connections that may be open before they have shown the token. At one more, the oldest is
closed.
"""
_ACCEPTED_AT_ONCE = 64
"""After so many accepted connections in a row, the leader reads the other agents' messages."""
_POLL_SECONDS = 0.01
_SIGKILL = -9
_OTHER_AGENT_OR_HOST = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENODEV)
"""Errors of a listen at an address of another agent or of another host.

A host without IPv6 has no IPv6 address.
"""


def listen_if_own_address(address: str) -> socket.socket | None:
    """Listen at HOST:PORT if HOST is this host, and no other agent listens there.

    The socket listens at all addresses of this host, because the name may resolve to another
    interface on the other hosts.

    Returns:
        The listening socket; None if the address is another host's, or another agent leads.

    Raises:
        ConfigError: this user may not listen at that port.
        OSError: the name is not known (yet).
    """
    host, port = split_address(address)
    for family, _, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        # With its scope: a link-local address has no meaning without one.
        full_address: Any = target
        try:
            with socket.create_server(full_address, family=family):
                pass
            if target[0] in ("127.0.0.1", "::1"):
                return socket.create_server(full_address, family=family)
            has_dualstack = socket.has_dualstack_ipv6()
            any_family = socket.AF_INET6 if has_dualstack else family
            return socket.create_server(
                (ALL_HOSTS[any_family], port), family=any_family, dualstack_ipv6=has_dualstack
            )
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                raise ConfigError(
                    f"--rendezvous must have a port at which this user may listen, got {address}; "
                    "take one above 1023"
                ) from error
            if error.errno not in _OTHER_AGENT_OR_HOST:
                raise
    return None


@dataclass(eq=False)
class RemoteAgent:
    """The agent of another host of the group, as the leader knows it."""

    connection: AgentConnection
    source: str
    """Numeric address of the agent's host."""
    host: str = ""
    num_ranks: int = 0
    """0 until the agent has introduced itself (`Hello`)."""
    state: WorkersState | None = None
    """The latest state that the agent reported; None before the first."""
    loss_reason: str = ""
    """Why the connection is gone; empty while it stands."""
    connected_at: float = field(default_factory=time.monotonic)
    """Monotonic seconds."""

    @property
    def is_lost(self) -> bool:
        return bool(self.loss_reason)

    @property
    def has_introduced_itself(self) -> bool:
        return self.num_ranks > 0

    @property
    def is_unproved(self) -> bool:
        """True if the other end may be a stranger: it has not shown the run's token yet."""
        return not self.has_introduced_itself and not self.is_lost

    @property
    def is_present(self) -> bool:
        return self.has_introduced_itself and not self.is_lost


class Followers:
    """Accepts the agents of a group's other hosts, and exchanges messages with them.

    The agent that leads owns the object and calls all methods, on its only thread. Nothing blocks
    except `wait_for_all` and `close`. A lost agent stays out: its host counts again when another
    agent connects. See docs/agents.md.

    Args:
        listener: the socket to which the other agents connect.
        num_hosts: number of hosts of the group, this one included.
        token: the run's secret.
        slot: slot of the group.
        report: prints a line.

    Attributes:
        on_refusal: takes the first refused stranger of each kind. The agent sets it.
    """

    def __init__(
        self,
        listener: socket.socket,
        num_hosts: int,
        token: str,
        slot: int,
        report: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self.num_hosts = num_hosts
        self._token = token
        self._slot = slot
        self._report = report
        self.on_refusal: Callable[[Refusal], None] = lambda refusal: None
        self._refusals = Refusals(GONE_SECONDS, lambda refusal: self.on_refusal(refusal))
        self._members: list[RemoteAgent] = []
        """Agents in the order in which they connected."""
        self._has_reported_refusal = False
        """Whether a refused agent was reported. A stranger that connects again and again must not
        fill the output.
        """
        self._is_closing = False
        """Whether the agents were told to end, so that a lost connection is no failure."""

    def descriptors(self) -> list[int]:
        """Return the descriptors that no fork of this process may keep."""
        connected = [member for member in self._members if not member.is_lost]
        return [self._listener.fileno(), *(member.connection.descriptor for member in connected)]

    def wait_for_all(self, is_stopped: Callable[[], bool]) -> list[RemoteAgent] | None:
        """Wait until the agents of all other hosts are connected.

        The latest connections count: the former connection of a vanished host may still stand when
        the host is back.

        Returns:
            The agents, sorted by host name; None if the group was stopped, or after
            `MEETING_SECONDS`.
        """
        num_others = self.num_hosts - 1
        deadline = time.monotonic() + MEETING_SECONDS
        next_reminder = time.monotonic() + GONE_SECONDS
        while not is_stopped() and time.monotonic() < deadline:
            self.poll()
            present = [member for member in self._members if member.is_present]
            if len(present) >= num_others:
                return sorted(present[-num_others:], key=lambda member: member.host)
            if time.monotonic() >= next_reminder:
                next_reminder += 60.0
                num_missing = num_others - len(present)
                self._report(f"waits for the agents of {num_missing} of its {self.num_hosts} hosts")
            time.sleep(_POLL_SECONDS)
        return None

    def poll(self) -> None:
        """Accept agents, read their messages, drop lost agents. Does not block."""
        self._accept()
        for member in self._members:
            if not member.is_lost:
                self._read(member)
        self._drop_strangers()
        self._members = [member for member in self._members if not member.is_lost]

    def close(self, status: int, reason: str) -> None:
        """Tell all followers to end with this status, and wait for their ends.

        A scheduler may end a whole job with its first task. So this process must not end before the
        followers have read the message.
        """
        self._is_closing = True
        for member in self._members:
            member.connection.send(GroupOver(status, reason))
        deadline = time.monotonic() + _CLOSE_SECONDS
        while any(member.is_present for member in self._members) and time.monotonic() < deadline:
            self.poll()
            time.sleep(_POLL_SECONDS)
        self._listener.close()
        for member in self._members:
            member.connection.close()

    def _accept(self) -> None:
        # Errors: no connection waits, the other end has closed again, or this process has too many
        # open files.
        with contextlib.suppress(OSError):
            for _ in range(_ACCEPTED_AT_ONCE):
                accepted, address = self._listener.accept()
                connection = AgentConnection(accepted, self._token, self._slot, leads=True)
                self._members.append(RemoteAgent(connection, address[0]))

    def _drop_strangers(self) -> None:
        """Drop connections without the token, which would use up this process's open files."""
        strangers = [member for member in self._members if member.is_unproved]
        for member in list(strangers):
            if time.monotonic() - member.connected_at > GONE_SECONDS:
                strangers.remove(member)
                self._drop(member, "silent")
        while len(strangers) > _MAX_STRANGERS:
            member = find_crowded(strangers, lambda member: member.source)
            strangers.remove(member)
            self._drop(member, "crowd")

    def _drop(self, stranger: RemoteAgent, kind: RefusalKind) -> None:
        self._refusals.add(kind, stranger.source)
        stranger.loss_reason = "it has not shown the run's token"
        stranger.connection.close()

    def _read(self, member: RemoteAgent) -> None:
        try:
            for message in member.connection.poll():
                if isinstance(message, Hello):
                    member.host = message.host
                    member.num_ranks = message.num_ranks
                elif isinstance(message, WorkersState):
                    member.state = message
        except ConnectionError as error:
            if isinstance(error, StrangerError) and not member.num_ranks:
                self._refusals.add("no_secret", member.source)
            self.give_up(member, str(error))

    def give_up(self, member: RemoteAgent, reason: str) -> None:
        """Close the connection to an agent, and report the loss unless this group is closing."""
        member.loss_reason = reason
        member.connection.close()
        if self._is_closing:
            return
        if member.has_introduced_itself:
            self._report(f"the agent of host {member.host} is gone: {reason}")
        elif not self._has_reported_refusal:
            self._has_reported_refusal = True
            self._report(f"an agent was refused: {reason}")


class _RemoteWorkers:
    """The workers of one attempt on another host, as far as its agent has reported them."""

    def __init__(self, member: RemoteAgent, start: StartOrder) -> None:
        self.member = member
        self._start = start
        self._ranks = range(start.first_rank, start.first_rank + member.num_ranks)
        member.connection.send(start)

    @property
    def _state(self) -> WorkersState | None:
        """The latest state of this attempt; None before the first report on it."""
        state = self.member.state
        if state is None or state.attempt != self._start.attempt:
            return None
        return state

    @property
    def have_ended(self) -> bool:
        """True if all workers were collected, or their host is lost."""
        if self.member.is_lost:
            return True
        return self._state is not None and self._state.is_collected

    def has_answered(self, number: int) -> bool:
        """True if the agent has answered this `Ping`, or is lost, so that no answer can come."""
        if self.member.is_lost:
            return True
        return self._state is not None and self._state.answered >= number

    def ranks_that_raised(self) -> list[int]:
        """List the ranks that still run although an exception has ended their training."""
        if self._state is None or self.member.is_lost:
            return []
        return self._state.raised

    def exits(self) -> list[WorkerExit]:
        """List the workers that ended. Those of a lost host count: they end with their agent."""
        state = self._state
        exits = [] if state is None else list(state.exits)
        if self.member.is_lost:
            pids = {} if state is None else state.pids
            seen = {exit.rank for exit in exits}
            for rank in self._ranks:
                if rank not in seen:
                    pid = pids.get(rank, 0)
                    exits.append(
                        WorkerExit(rank, pid, _SIGKILL, host=self.member.host, is_lost=True)
                    )
        return exits


class GroupWorkers:
    """The workers of one attempt of a group, on all of its hosts.

    `Agent` makes it for each attempt and calls all methods on the agent's only thread; `kill` is
    safe from any thread. After `end` all workers were collected or are lost, also if one failed.

    Args:
        share: the ranks of this host.
        store: store of the attempt; closed with this object.
        local: the workers of this host.
        hosts: connections to the other hosts; None if there are none.
        members: the agents of the other hosts.
    """

    def __init__(
        self,
        attempt: int,
        share: Share,
        store: AttemptStore,
        local: LocalWorkers,
        hosts: Followers | None,
        members: Sequence[RemoteAgent],
    ) -> None:
        self.num_ranks = share.world_size
        self._store = store
        self._local = local
        self._hosts = hosts
        self._remote_workers: list[_RemoteWorkers] = []
        self._num_pings = 0
        point = store.meeting_point
        first_rank = share.num_ranks
        for number, member in enumerate(members, start=1):
            start = StartOrder(
                attempt,
                number,
                share.num_hosts,
                first_rank,
                share.world_size,
                point.host,
                point.port,
            )
            self._remote_workers.append(_RemoteWorkers(member, start))
            first_rank += member.num_ranks

    def exits(self) -> list[WorkerExit]:
        """List the workers that ended, those of other hosts as far as their agents reported them.

        The workers are not reaped: until `end` their process groups keep their ids.
        """
        self._poll()
        exits = self._local.exits()
        for workers in self._remote_workers:
            exits += workers.exits()
        return sorted(exits, key=lambda exit: exit.rank)

    def wait_for_cause(self, seconds: float) -> None:
        """Wait until the cause of the group's end can be known.

        That is when ranks that raised an exception have ended, or `seconds` are over, and each
        other host has shown that it is there.

        The cause of a group's end must be known before it is announced. A rank that raised the
        first exception may end after a peer that only lost its connection. And if a host vanishes,
        the survivors fail before the kernel gives up the connection to its agent. Without the wait,
        a survivor's connection error would be announced as the cause. The wait for hosts costs
        nothing, because the group cannot start again before the host is known to be gone.
        """
        self._num_pings += 1
        for workers in self._remote_workers:
            workers.member.connection.send(Ping(self._num_pings))
        deadline = time.monotonic() + seconds
        last_deadline = deadline + GONE_SECONDS
        while time.monotonic() < last_deadline:
            self._poll()
            has_raised = bool(self._local.ranks_that_raised())
            have_answered = True
            for workers in self._remote_workers:
                has_raised = has_raised or bool(workers.ranks_that_raised())
                have_answered = have_answered and workers.has_answered(self._num_pings)
            is_settled = not has_raised or time.monotonic() >= deadline
            if have_answered and is_settled:
                return
            time.sleep(_POLL_SECONDS)

    def drain(self, seconds: float, must_end_at_once: Callable[[], bool]) -> None:
        """Ask all workers to finish their step and leave (SIGTERM), and wait up to `seconds`.

        Returns early when a worker failed, because the others cannot finish without it, or when
        `must_end_at_once` returns True.
        """
        for workers in self._remote_workers:
            workers.member.connection.send(LeaveOrder())
        self._local.ask_to_leave()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not must_end_at_once():
            exits = self.exits()
            if len(exits) == self.num_ranks or any(exit.failed for exit in exits):
                return
            time.sleep(_POLL_SECONDS)

    def end(self, grace_seconds: float) -> list[WorkerExit]:
        """End the running workers, reap all, and return how each ended.

        Workers get SIGTERM, and SIGKILL after `grace_seconds`; with 0 they get SIGKILL at once. A
        host whose agent does not collect its workers in time counts as lost.
        """
        for workers in self._remote_workers:
            workers.member.connection.send(EndOrder(grace_seconds))
        self._local.end(grace_seconds)
        deadline = time.monotonic() + grace_seconds + _COLLECT_SECONDS
        while time.monotonic() < deadline:
            if all(workers.have_ended for workers in self._remote_workers):
                break
            self._poll()
            time.sleep(_POLL_SECONDS)
        for workers in self._remote_workers:
            if self._hosts is not None and not workers.have_ended:
                # The agent there is stopped (SIGSTOP), or a worker cannot be killed. Waiting longer
                # would keep the whole group from starting again.
                self._hosts.give_up(workers.member, "it does not end its workers")
        exits = self.exits()
        self._store.close()
        return exits

    def kill(self) -> None:
        """Kill the workers of this host.

        The workers of other hosts end when the connections of this agent close.
        """
        self._local.kill()

    def _poll(self) -> None:
        if self._hosts is not None:
            self._hosts.poll()
