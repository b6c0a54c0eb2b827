# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The hosts of a group, as the agent of its first host knows them. That agent leads; the others
follow (`follower`).

Every agent of a group is started by the same command, with the address of a port on one of the
group's hosts. The agent that can listen there leads. It alone judges ends and decides on restarts,
so the hosts of a group cannot disagree. It serves the store at which the workers meet, and gives
each follower its ranks.

A group is restarted as a whole. If the connection to a follower breaks, its agent or its host is
gone: the leader ends all other workers and waits for another agent. If the leader is gone, the
followers end their workers and wait for another leader, which any agent at the same address
becomes.
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
    End,
    Hello,
    LeaveOrder,
    Over,
    Ping,
    Start,
    WorkersState,
)
from titan_ft.launch.group.worker_exit import WorkerExit
from titan_ft.launch.group.worker_group import AttemptStore, Share, WorkerGroup
from titan_ft.system.address import ALL_HOSTS, split_address
from titan_ft.system.refusal import Refusal, Refusals, StrangerError

MEETING_SECONDS = 600.0
"""Time for the hosts of a group to meet, as in torchrun's rendezvous: a queue may start them one by
one.
"""
_COLLECT_SECONDS = 15.0
"""Time beyond the grace time for a follower to collect its workers; `WorkerGroup.end` takes 10 s at
most.
"""
_PARTING_SECONDS = 2.0
_MAX_STRANGERS = 256  # connections at once that have not shown the token yet
_ACCEPTED_AT_ONCE = 64  # then the other agents get their turn
_POLL_SECONDS = 0.01
_SIGKILL = -9
_NOT_HERE = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENODEV)
"""Another agent listens there, or the address is none of this host, which may have no IPv6."""


def claim(address: str) -> socket.socket | None:
    """Listen at a port if the address is one of this host, and no other agent listens there; else
    return None.

    The socket listens at all addresses of this host, because the name may resolve to another
    interface on the other hosts.

    Raises:
        ConfigError: this user may not listen at that port.
        OSError: the name is not known (yet).
    """
    host, port = split_address(address)
    for family, _, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        place: Any = target  # all of it: a link-local address is none without its scope
        try:
            with socket.create_server(place, family=family):
                pass
            if target[0] in ("127.0.0.1", "::1"):
                return socket.create_server(place, family=family)
            dual = socket.has_dualstack_ipv6()
            everywhere = socket.AF_INET6 if dual else family
            return socket.create_server(
                (ALL_HOSTS[everywhere], port), family=everywhere, dualstack_ipv6=dual
            )
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                raise ConfigError(
                    f"--rendezvous must have a port at which this user may listen, got {address}; take one above 1023"
                ) from error
            if error.errno not in _NOT_HERE:
                raise
    return None


@dataclass(eq=False)
class HostAgent:
    """The agent of another host of the group, as the leader knows it."""

    line: AgentConnection
    source: str
    """Numeric address of its host."""
    host: str = ""
    num_ranks: int = 0
    """0 until the agent has introduced itself (`Hello`)."""
    state: WorkersState | None = None
    """The latest."""
    lost_because: str = ""
    """Why the connection is gone; empty while it stands."""
    since: float = field(default_factory=time.monotonic)
    """Monotonic seconds at which it connected."""

    @property
    def is_present(self) -> bool:
        return self.num_ranks > 0 and not self.lost_because


class Hosts:
    """Accepts the agents of a group's other hosts, and exchanges messages with them.

    Args:
        listener: the socket at which they connect.
        num_hosts: number of hosts of the group, this one included.
        token: the run's secret.
        slot: the group's number in the job.
        say: prints a line.

    Attributes:
        on_refusal: takes the first refused stranger of each kind. The agent sets it.
    """

    def __init__(
        self,
        listener: socket.socket,
        num_hosts: int,
        token: str,
        slot: int,
        say: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self.num_hosts = num_hosts
        self._token = token
        self._slot = slot
        self._say = say
        self.on_refusal: Callable[[Refusal], None] = lambda refusal: None
        self._refusals = Refusals(GONE_SECONDS, lambda refusal: self.on_refusal(refusal))
        self._members: list[HostAgent] = []
        """In the order in which they came."""
        self._has_refused = False
        """Whether it was said that an agent was refused; a stranger who knocks without end must not
        fill the output.
        """
        self._is_over = False
        """Whether the agents were told to end."""

    def descriptors(self) -> list[int]:
        """Return the descriptors that no fork of this process may keep."""
        lines = [member.line.descriptor for member in self._members if not member.lost_because]
        return [self._listener.fileno(), *lines]

    def wait_for_all(self, is_stopped: Callable[[], bool]) -> list[HostAgent] | None:
        """Return the other hosts once all are connected; None if the group is stopped, or after
        `MEETING_SECONDS`.

        The latest connections count: that of a vanished host may still stand when the host is back.
        """
        wanted = self.num_hosts - 1
        deadline = time.monotonic() + MEETING_SECONDS
        remind_at = time.monotonic() + GONE_SECONDS
        while not is_stopped() and time.monotonic() < deadline:
            self.poll()
            present = [member for member in self._members if member.is_present]
            if len(present) >= wanted:
                return sorted(present[-wanted:], key=lambda member: member.host)
            if time.monotonic() >= remind_at:
                remind_at += 60.0
                self._say(
                    f"waits for the agents of {wanted - len(present)} of its {self.num_hosts} hosts"
                )
            time.sleep(_POLL_SECONDS)
        return None

    def poll(self) -> None:
        """Accept agents, read their messages, drop those that are gone. Does not block."""
        self._accept()
        for member in self._members:
            if not member.lost_because:
                self._read(member)
        self._drop_strangers()
        self._members = [member for member in self._members if not member.lost_because]

    def close(self, status: int, reason: str) -> None:
        """Let all followers end with this status, and wait for it: a scheduler may end a job with
        its first task.
        """
        self._is_over = True
        for member in self._members:
            member.line.send(Over(status, reason))
        deadline = time.monotonic() + _PARTING_SECONDS
        while any(member.is_present for member in self._members) and time.monotonic() < deadline:
            self.poll()
            time.sleep(_POLL_SECONDS)
        self._listener.close()
        for member in self._members:
            member.line.close()

    def _accept(self) -> None:
        # Nobody comes, has gone again, or there are too many open files.
        with contextlib.suppress(OSError):
            for _ in range(_ACCEPTED_AT_ONCE):
                connection, address = self._listener.accept()
                line = AgentConnection(connection, self._token, self._slot, leads=True)
                self._members.append(HostAgent(line, address[0]))

    def _drop_strangers(self) -> None:
        """Drop connections without the token, which would use up this process's open files."""
        strangers = [
            member for member in self._members if not (member.num_ranks or member.lost_because)
        ]
        too_many = strangers[:-_MAX_STRANGERS]
        for member in strangers:
            is_late = time.monotonic() - member.since > GONE_SECONDS
            if is_late or member in too_many:
                self._refusals.add("silent" if is_late else "crowd", member.source)
                member.lost_because = "it has not shown the run's token"
                member.line.close()

    def _read(self, member: HostAgent) -> None:
        try:
            for message in member.line.poll():
                if isinstance(message, Hello):
                    member.host, member.num_ranks = message.host, message.num_ranks
                elif isinstance(message, WorkersState):
                    member.state = message
        except ConnectionError as error:
            if isinstance(error, StrangerError) and not member.num_ranks:
                self._refusals.add("no_secret", member.source)
            self.give_up(member, str(error))

    def give_up(self, member: HostAgent, reason: str) -> None:
        """Close the connection to an agent, and report the loss; after `close` such an end is
        expected.
        """
        member.lost_because = reason
        member.line.close()
        if self._is_over:
            return
        if member.num_ranks:
            self._say(f"the agent of host {member.host} is gone: {reason}")
        elif not self._has_refused:
            self._has_refused = True
            self._say(f"an agent was refused: {reason}")


class _RemoteWorkers:
    """The workers of one attempt on another host."""

    def __init__(self, member: HostAgent, start: Start) -> None:
        self.member = member
        self._start = start
        self._ranks = range(start.first_rank, start.first_rank + member.num_ranks)
        member.line.send(start)

    @property
    def _state(self) -> WorkersState | None:
        """The latest state of this attempt; None before it is known."""
        state = self.member.state
        return state if state is not None and state.attempt == self._start.attempt else None

    @property
    def is_over(self) -> bool:
        """Whether all were collected, or are lost."""
        return bool(self.member.lost_because) or (
            self._state is not None and self._state.is_collected
        )

    def has_answered(self, number: int) -> bool:
        state = self._state
        return bool(self.member.lost_because) or (state is not None and state.answered >= number)

    def raised(self) -> list[int]:
        state = self._state
        return [] if state is None or self.member.lost_because else state.raised

    def exits(self) -> list[WorkerExit]:
        """List the workers that ended. A lost host's workers count as ended: they end with their
        agent.
        """
        state = self._state
        exits = [] if state is None else list(state.exits)
        if self.member.lost_because:
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
    """The workers of one attempt of a group, on all of its hosts. The leading agent owns it.

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
        local: WorkerGroup,
        hosts: Hosts | None,
        members: Sequence[HostAgent],
    ) -> None:
        self.num_ranks = share.world_size
        self._store = store
        self._local = local
        self._hosts = hosts
        self._remote: list[_RemoteWorkers] = []
        self._num_pings = 0
        point = store.meeting_point
        first_rank = share.num_ranks
        for number, member in enumerate(members, start=1):
            start = Start(
                attempt,
                number,
                share.num_hosts,
                first_rank,
                share.world_size,
                point.host,
                point.port,
            )
            self._remote.append(_RemoteWorkers(member, start))
            first_rank += member.num_ranks

    def exits(self) -> list[WorkerExit]:
        """List the workers that ended, those of other hosts as far as known here.

        They are not reaped: until `end` their process groups keep their ids.
        """
        self._poll()
        exits = self._local.exits()
        for workers in self._remote:
            exits += workers.exits()
        return sorted(exits, key=lambda exit: exit.rank)

    def settle(self, seconds: float) -> None:
        """Wait until ranks that raised an exception have ended, and until each other host has shown
        that it is there.

        The cause of a group's end must be known before it is announced. A rank that raised the
        first exception may end after a peer that only lost its connection. And if a host vanishes,
        the survivors fail before the kernel gives up the connection to its agent. Without the wait,
        a survivor's connection error would be announced as the cause. The wait for hosts costs
        nothing, because the group cannot start again before the host is known to be gone.
        """
        self._num_pings += 1
        for workers in self._remote:
            workers.member.line.send(Ping(self._num_pings))
        deadline = time.monotonic() + seconds
        last_deadline = deadline + GONE_SECONDS
        while time.monotonic() < last_deadline:
            self._poll()
            has_raised = bool(self._local.raised()) or any(
                workers.raised() for workers in self._remote
            )
            have_answered = all(workers.has_answered(self._num_pings) for workers in self._remote)
            if have_answered and (not has_raised or time.monotonic() >= deadline):
                return
            time.sleep(_POLL_SECONDS)

    def drain(self, seconds: float, impatient: Callable[[], bool]) -> None:
        """Ask all workers to finish their step and leave (SIGTERM), and wait `seconds` for it.

        Returns early when one of them failed, since the others cannot finish without it, or when
        `impatient` says so.
        """
        for workers in self._remote:
            workers.member.line.send(LeaveOrder())
        self._local.ask_to_leave()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not impatient():
            exits = self.exits()
            if len(exits) == self.num_ranks or any(exit.failed for exit in exits):
                return
            time.sleep(_POLL_SECONDS)

    def end(self, grace_seconds: float) -> list[WorkerExit]:
        """End the running workers, reap all, and return how each ended.

        Workers get SIGTERM, and SIGKILL after `grace_seconds`; with 0 they get SIGKILL at once.
        """
        for workers in self._remote:
            workers.member.line.send(End(grace_seconds))
        self._local.end(grace_seconds)
        deadline = time.monotonic() + grace_seconds + _COLLECT_SECONDS
        while not all(workers.is_over for workers in self._remote) and time.monotonic() < deadline:
            self._poll()
            time.sleep(_POLL_SECONDS)
        for workers in self._remote:
            if self._hosts is not None and not workers.is_over:
                # Its agent is stopped (SIGSTOP), or a worker cannot be killed. The group continues
                # without this host.
                self._hosts.give_up(workers.member, "it does not end its workers")
        exits = self.exits()
        self._store.close()
        return exits

    def kill(self) -> None:
        """Kill the workers of this host. Those of other hosts end when this agent's connections
        close.
        """
        self._local.kill()

    def _poll(self) -> None:
        if self._hosts is not None:
            self._hosts.poll()
