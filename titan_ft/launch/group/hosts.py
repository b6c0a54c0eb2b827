# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Lead a group that has several hosts: connect its agents, and keep the workers of all hosts.

Each host of the group has an agent, and all agents are started by the same command. It names
HOST:PORT on one of the hosts (--rendezvous). The agent that can listen there leads, and the other
agents follow it (`follower`). They proceed in these steps:

1. Each follower connects to the leader, and sends its host's name and number of ranks (`Hello`).
2. When all followers are connected, the leader starts an attempt. It serves the store at which the
   workers meet, and sends each follower the ranks to start (`StartOrder`).
3. Each follower reports the processes and ends of its workers whenever they change
   (`WorkersState`).
4. The leader ends the attempt on all hosts: at once (`EndOrder`), or in order (`LeaveOrder`).
5. If no attempt follows, the leader sends the followers the group's exit status (`GroupOver`).

The leader alone judges ends and decides on restarts, so the hosts of a group cannot disagree.

If the connection to a follower breaks, the follower or its host is gone, and its workers count as
killed. The leader then ends the attempt, and waits for another agent. If the leader is gone, the
followers end their workers and look for another leader: any agent that listens at the rendezvous.

`Followers` keeps the connections as long as the agent lives. `GroupWorkers` keeps the workers of
one attempt. `Agent` makes and calls both on its only thread.
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
_REAP_SECONDS = 15.0
"""Time for a follower to end and reap its workers, in addition to the grace time.

`LocalWorkers.end` takes at most 10 s.
"""
_CLOSE_SECONDS = 2.0
"""Time for the followers to read the end of the group."""
_REMINDER_SECONDS = 60.0
"""Pause between two lines about missing agents."""
_MAX_STRANGERS = 256
"""Connections that may be open before they have shown the token. At one more, a connection of the
host that has most of them is closed.
"""
_MAX_ACCEPTS_PER_POLL = 64
"""After so many new connections, the leader reads the messages of the other agents first."""
_POLL_SECONDS = 0.01
_SIGKILL = -9
"""Exit code that stands for an end that nobody saw."""
_CANNOT_LEAD_ERRNOS = (
    errno.EADDRINUSE,  # another agent of this host listens there
    errno.EADDRNOTAVAIL,  # the address is another host's
    errno.EAFNOSUPPORT,  # this host has no IPv6
    errno.ENODEV,  # a link-local address names an interface that this host lacks
)
"""Errors of a listen at an address at which this agent cannot lead."""


def listen_if_own_address(address: str) -> socket.socket | None:
    """Listen at HOST:PORT if HOST is this host, and no other agent listens there.

    The socket listens at all addresses of this host. The other hosts may resolve HOST to another
    address of this host than this host does.

    Returns:
        The listening socket; None if the address is another host's, or another agent listens there.

    Raises:
        ConfigError: this user may not listen at that port.
        OSError: the name is not known (yet).
    """
    host, port = split_address(address)
    for family, _, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        # `target` has two fields for IPv4, and four for IPv6. The scope among them is needed,
        # because a link-local address means nothing without it.
        numeric_address: Any = target
        try:
            # Try the exact address first. To listen at all addresses succeeds on any host.
            with socket.create_server(numeric_address, family=family):
                pass
            if target[0] in ("127.0.0.1", "::1"):
                return socket.create_server(numeric_address, family=family)
            if socket.has_dualstack_ipv6():
                return socket.create_server(
                    (ALL_HOSTS[socket.AF_INET6], port),
                    family=socket.AF_INET6,
                    dualstack_ipv6=True,
                )
            return socket.create_server((ALL_HOSTS[family], port), family=family)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                raise ConfigError(
                    f"--rendezvous must have a port at which this user may listen, got {address}; "
                    "take one above 1023"
                ) from error
            if error.errno not in _CANNOT_LEAD_ERRNOS:
                raise
    return None


@dataclass(eq=False)
class RemoteAgent:
    """The other end of a connection to the leader: an agent of another host, or a stranger."""

    connection: AgentConnection
    source: str
    """Numeric address of the other end."""
    host: str = ""
    """Name of the host, from `Hello`."""
    num_ranks: int = 0
    """Number of ranks on the host, from `Hello`; 0 before."""
    state: WorkersState | None = None
    """The latest state that the agent reported; None before the first."""
    loss_reason: str = ""
    """Why the connection is closed; empty while it stands."""
    connected_at: float = field(default_factory=time.monotonic)
    """Monotonic seconds."""

    @property
    def is_lost(self) -> bool:
        return bool(self.loss_reason)

    @property
    def has_said_hello(self) -> bool:
        """Whether the other end has sent `Hello`, which needs the run's token."""
        return self.num_ranks > 0

    @property
    def is_follower(self) -> bool:
        """Whether the other end is an agent with the token, and the connection stands."""
        return self.has_said_hello and not self.is_lost

    @property
    def may_be_stranger(self) -> bool:
        """Whether the connection stands, and the other end has not shown the token yet."""
        return not self.has_said_hello and not self.is_lost


class Followers:
    """Accepts the agents of a group's other hosts, and reads their messages.

    The leading agent owns the object and calls all methods, on its only thread. Only `wait_for_all`
    and `close` block. An agent whose connection broke is dropped. Its host counts again when
    another agent connects from there. See docs/agents.md.

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
        self._agents: list[RemoteAgent] = []
        """The open connections, of agents and of strangers, in the order of their start."""
        self._has_reported_refusal = False
        """Whether a refused agent was reported. A stranger that connects again and again must not
        fill the output.
        """
        self._is_closing = False
        """Whether the agents were told to end, so that a lost connection is no failure."""

    def descriptors(self) -> list[int]:
        """Return the descriptors that no fork of this process may keep."""
        open_connections = [agent.connection for agent in self._agents if not agent.is_lost]
        return [self._listener.fileno(), *(each.descriptor for each in open_connections)]

    def wait_for_all(self, is_stopped: Callable[[], bool]) -> list[RemoteAgent] | None:
        """Wait until the agents of all other hosts are connected.

        If more agents than hosts are connected, the latest connections count: when a vanished host
        is back, the connection of its former agent may still stand for `GONE_SECONDS`.

        Returns:
            The agents, sorted by host name; None if the group was stopped, or after
            `MEETING_SECONDS`.
        """
        num_others = self.num_hosts - 1
        deadline = time.monotonic() + MEETING_SECONDS
        next_reminder = time.monotonic() + GONE_SECONDS
        while not is_stopped() and time.monotonic() < deadline:
            self.poll()
            followers = [agent for agent in self._agents if agent.is_follower]
            if len(followers) >= num_others:
                latest = followers[-num_others:]
                return sorted(latest, key=lambda agent: agent.host)
            if time.monotonic() >= next_reminder:
                next_reminder += _REMINDER_SECONDS
                num_missing = num_others - len(followers)
                self._report(f"waits for the agents of {num_missing} of its {self.num_hosts} hosts")
            time.sleep(_POLL_SECONDS)
        return None

    def poll(self) -> None:
        """Accept connections, read messages, drop lost agents and strangers. Does not block."""
        self._accept()
        for agent in self._agents:
            if not agent.is_lost:
                self._read(agent)
        self._drop_strangers()
        self._agents = [agent for agent in self._agents if not agent.is_lost]

    def close(self, status: int, reason: str) -> None:
        """Send all followers the group's exit status, and wait until they have ended.

        A scheduler may end a whole job when its first task ends. So this process must not end
        before the followers have read the message.

        Args:
            reason: line for the followers to print; empty if the group finished.
        """
        self._is_closing = True
        for agent in self._agents:
            agent.connection.send(GroupOver(status, reason))
        deadline = time.monotonic() + _CLOSE_SECONDS
        while any(agent.is_follower for agent in self._agents) and time.monotonic() < deadline:
            self.poll()
            time.sleep(_POLL_SECONDS)
        self._listener.close()
        for agent in self._agents:
            agent.connection.close()

    def disconnect(self, agent: RemoteAgent, reason: str) -> None:
        """Close the connection to an agent, and report the loss unless this group is closing."""
        agent.loss_reason = reason
        agent.connection.close()
        if self._is_closing:
            return
        if agent.has_said_hello:
            self._report(f"the agent of host {agent.host} is gone: {reason}")
        elif not self._has_reported_refusal:
            self._has_reported_refusal = True
            self._report(f"an agent was refused: {reason}")

    def _accept(self) -> None:
        # The errors mean that no connection waits, that the other end has closed again, or that
        # this process has too many open files.
        with contextlib.suppress(OSError):
            for _ in range(_MAX_ACCEPTS_PER_POLL):
                accepted, address = self._listener.accept()
                connection = AgentConnection(accepted, self._token, self._slot, leads=True)
                self._agents.append(RemoteAgent(connection, source=address[0]))

    def _drop_strangers(self) -> None:
        """Drop connections without the token, which would use up this process's open files."""
        strangers = [agent for agent in self._agents if agent.may_be_stranger]
        for stranger in list(strangers):
            if time.monotonic() - stranger.connected_at > GONE_SECONDS:
                strangers.remove(stranger)
                self._refuse(stranger, "silent")
        while len(strangers) > _MAX_STRANGERS:
            stranger = find_crowded(strangers, lambda stranger: stranger.source)
            strangers.remove(stranger)
            self._refuse(stranger, "crowd")

    def _refuse(self, stranger: RemoteAgent, kind: RefusalKind) -> None:
        self._refusals.add(kind, stranger.source)
        stranger.loss_reason = "it has not shown the run's token"
        stranger.connection.close()

    def _read(self, agent: RemoteAgent) -> None:
        try:
            for message in agent.connection.poll():
                if isinstance(message, Hello):
                    agent.host = message.host
                    agent.num_ranks = message.num_ranks
                elif isinstance(message, WorkersState):
                    agent.state = message
        except ConnectionError as error:
            if isinstance(error, StrangerError) and not agent.has_said_hello:
                self._refusals.add("no_secret", agent.source)
            self.disconnect(agent, str(error))


class _RemoteWorkers:
    """The workers of one attempt on another host, as far as its agent has reported them.

    The constructor orders the agent to start the workers.
    """

    def __init__(self, agent: RemoteAgent, order: StartOrder) -> None:
        self.agent = agent
        self._attempt = order.attempt
        self._ranks = range(order.first_rank, order.first_rank + agent.num_ranks)
        agent.connection.send(order)

    @property
    def _state(self) -> WorkersState | None:
        """The latest state of this attempt; None before the first report.

        The agent's latest report may still be on its former attempt.
        """
        state = self.agent.state
        if state is None or state.attempt != self._attempt:
            return None
        return state

    @property
    def are_over(self) -> bool:
        """Whether all workers ended and were reaped, or their host is lost."""
        if self.agent.is_lost:
            return True
        return self._state is not None and self._state.all_reaped

    def has_answered_ping(self, number: int) -> bool:
        """True if the agent has answered this `Ping`, or is lost, so that no answer can come."""
        if self.agent.is_lost:
            return True
        return self._state is not None and self._state.last_ping >= number

    def ranks_that_raised(self) -> list[int]:
        """List the ranks that still run although an exception has ended their training."""
        if self._state is None or self.agent.is_lost:
            return []
        return self._state.raised_ranks

    def exits(self) -> list[WorkerExit]:
        """List the workers that ended.

        All workers of a lost host count as killed, because workers end with their agent.
        """
        state = self._state
        exits = [] if state is None else list(state.exits)
        if not self.agent.is_lost:
            return exits
        pids = {} if state is None else state.pids
        seen = {exit.rank for exit in exits}
        for rank in self._ranks:
            if rank not in seen:
                pid = pids.get(rank, 0)  # 0 if the agent was lost before it reported the pid
                exits.append(WorkerExit(rank, pid, _SIGKILL, host=self.agent.host, is_lost=True))
        return exits


class GroupWorkers:
    """The workers of one attempt of a group, on all of its hosts.

    `Agent` makes the object for each attempt, and calls all methods on its only thread. `kill` is
    safe from any thread. After `end`, every worker was reaped, or counts as lost with its host.

    Args:
        share: the ranks of this host.
        store: store of the attempt; closed with this object.
        local: the workers of this host.
        followers: connections to the other hosts' agents; None if there is one host.
        agents: the agents of the other hosts. They are ordered to start the further ranks.
    """

    def __init__(
        self,
        attempt: int,
        share: Share,
        store: AttemptStore,
        local: LocalWorkers,
        followers: Followers | None,
        agents: Sequence[RemoteAgent],
    ) -> None:
        self.num_ranks = share.world_size
        self._store = store
        self._local = local
        self._followers = followers
        self._remote_workers: list[_RemoteWorkers] = []
        self._num_pings = 0
        first_rank = share.num_ranks
        for host_index, agent in enumerate(agents, start=1):
            order = StartOrder(
                attempt=attempt,
                host_index=host_index,
                num_hosts=share.num_hosts,
                first_rank=first_rank,
                world_size=share.world_size,
                store_host=store.meeting_point.host,
                store_port=store.meeting_point.port,
            )
            self._remote_workers.append(_RemoteWorkers(agent, order))
            first_rank += agent.num_ranks

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
        """Wait after a worker's failure until the root cause can be known.

        Two waits protect against the announcement of a consequence as the cause:

        - For ranks that raised an exception to end, at most `seconds`. The rank that raised the
          first exception may end after a peer that only lost its connection to that rank.
        - For each other host to answer a `Ping`, or to be lost after `GONE_SECONDS`. If a host
          vanishes, its peers fail before the kernel breaks the connection to its agent. This wait
          costs nothing, because the group cannot start again before the host is known to be gone.
        """
        self._num_pings += 1
        for workers in self._remote_workers:
            workers.agent.connection.send(Ping(self._num_pings))
        exceptions_deadline = time.monotonic() + seconds
        pings_deadline = exceptions_deadline + GONE_SECONDS
        while time.monotonic() < pings_deadline:
            self._poll()
            ranks_that_raised = self._local.ranks_that_raised()
            have_answered = True
            for workers in self._remote_workers:
                ranks_that_raised += workers.ranks_that_raised()
                if not workers.has_answered_ping(self._num_pings):
                    have_answered = False
            waits_for_exits = ranks_that_raised and time.monotonic() < exceptions_deadline
            if have_answered and not waits_for_exits:
                return
            time.sleep(_POLL_SECONDS)

    def drain(self, seconds: float, must_end_at_once: Callable[[], bool]) -> None:
        """Ask all workers to finish their step and leave (SIGTERM), and wait up to `seconds`.

        Returns early when a worker failed, because the others cannot finish without it, or when
        `must_end_at_once` returns True.
        """
        for workers in self._remote_workers:
            workers.agent.connection.send(LeaveOrder())
        self._local.ask_to_leave()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not must_end_at_once():
            exits = self.exits()
            if len(exits) == self.num_ranks or any(exit.failed for exit in exits):
                return
            time.sleep(_POLL_SECONDS)

    def end(self, grace_seconds: float) -> list[WorkerExit]:
        """End the running workers, reap all, and return how each ended.

        Workers get SIGTERM, and SIGKILL after `grace_seconds`; with 0 they get SIGKILL at once. If
        an agent does not reap its workers in time, its connection is closed, and they count as
        killed.
        """
        for workers in self._remote_workers:
            workers.agent.connection.send(EndOrder(grace_seconds))
        self._local.end(grace_seconds)
        deadline = time.monotonic() + grace_seconds + _REAP_SECONDS
        while time.monotonic() < deadline:
            if all(workers.are_over for workers in self._remote_workers):
                break
            self._poll()
            time.sleep(_POLL_SECONDS)
        for workers in self._remote_workers:
            if self._followers is not None and not workers.are_over:
                # The agent there is stopped (SIGSTOP), or a worker cannot be killed. Waiting longer
                # would keep the whole group from starting again.
                self._followers.disconnect(workers.agent, "it does not end its workers")
        exits = self.exits()
        self._store.close()
        return exits

    def kill(self) -> None:
        """Kill the workers of this host.

        The workers of other hosts end when the connections of this agent close.
        """
        self._local.kill()

    def _poll(self) -> None:
        if self._followers is not None:
            self._followers.poll()
