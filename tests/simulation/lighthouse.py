# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A model of torchft 0.2.0's lighthouse and manager.

`test_conformance.py` compares the model with the real ones. Their sources:
https://github.com/meta-pytorch/torchft, src/lighthouse.rs and src/manager.rs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tests.simulation.kernel import Kernel, Process, Task
from tests.simulation.network import LIGHTHOUSE, Network, Node


@dataclass(frozen=True)
class Requester:
    """A group that requests a quorum."""

    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    commit_failures: int


@dataclass(frozen=True)
class Formed:
    """A quorum; its members are in the order of their replica ids."""

    quorum_id: int
    members: tuple[Requester, ...]


@dataclass(frozen=True)
class QuorumResult:
    """The answer to one rank (torchft.coordination.QuorumResult)."""

    quorum_id: int
    replica_rank: int
    replica_world_size: int
    recover_src_manager_address: str
    recover_src_replica_rank: int | None
    recover_dst_replica_ranks: list[int]
    store_address: str
    max_step: int
    max_replica_rank: int | None
    max_world_size: int
    heal: bool
    replica_ids: list[str]


class _Heart:
    """Time of a manager's last heartbeat.

    A manager whose heartbeats go on was heard just now. So no event per heartbeat is needed.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.beats = False
        self.last = 0.0

    def age(self, now: float) -> float:
        return (now - self.last) % self.interval if self.beats else now - self.last


@dataclass
class _Asking:
    """A request that waits at the lighthouse."""

    requester: Requester
    reply: Callable[[Formed], None]
    fail: Callable[[], None]
    alive: Callable[[], bool]


@dataclass
class _Participant:
    requester: Requester
    joined: float


class Lighthouse:
    """Forms quorums of the requesting managers.

    Args:
        min_replicas, join_timeout, tick, heartbeat_timeout: torchft's options; times in seconds.
    """

    def __init__(
        self,
        kernel: Kernel,
        *,
        min_replicas: int = 1,
        join_timeout: float = 60.0,
        tick: float = 0.02,
        heartbeat_timeout: float = 0.5,
        address: str = "http://10.9.0.1:1",
    ) -> None:
        self._kernel, self._address = kernel, address
        self._min_replicas, self._join_timeout = min_replicas, join_timeout
        self._tick, self._heartbeat_timeout = tick, heartbeat_timeout
        self.listens = True
        self.on_formed: Callable[[Formed], None] = lambda formed: None
        self.on_start: dict[object, Callable[[], None]] = {}
        self._reset()

    def _reset(self) -> None:
        self._hearts: dict[str, _Heart] = {}
        self._participants: dict[str, _Participant] = {}
        self._asking: list[_Asking] = []
        self._previous: tuple[Requester, ...] | None = None
        self._quorum_id = 0
        self._began = self._kernel.now
        self._look_at = math.inf  # time of the next tick that looks

    def die(self) -> None:
        """Die: requests fail, and the lighthouse forgets everything."""
        self.listens = False
        asking = self._asking
        self._reset()
        for request in asking:
            request.fail()

    def start(self) -> None:
        """Listen again, without any memory of groups."""
        self.listens = True
        self._reset()
        for act in list(self.on_start.values()):
            act()

    def address(self) -> str:
        """Return its address, which the starting process sets."""
        return self._address

    def shutdown(self) -> None:
        """Stop listening."""
        self.die()

    def hear(self, replica_id: str, interval: float, beats: bool) -> None:
        """Note that a manager's heartbeats start or stop."""
        heart = self._hearts.get(replica_id)
        if heart is None:
            if not beats:
                return
            heart = self._hearts[replica_id] = _Heart(interval)
        now, heart.interval = self._kernel.now, interval
        if beats and not heart.beats:
            heart.last = now
        elif not beats and heart.beats:
            heart.last = now - heart.age(now)
        heart.beats = beats
        if self._participants:
            self._plan(now)

    def ask(self, request: _Asking) -> None:
        """Take a request, which is a heartbeat as well."""
        requester, now = request.requester, self._kernel.now
        heart = self._hearts.setdefault(requester.replica_id, _Heart(0.05))
        if not heart.beats:
            heart.last = now
        self._participants[requester.replica_id] = _Participant(requester, now)
        self._asking = [*(other for other in self._asking if other.alive()), request]
        self._look()

    def status(self) -> str:
        """Return the text of the status page.

        It lists heartbeats, the last quorum, and the requests for the next one.
        """
        now, healthy = self._kernel.now, self._healthy()
        asking = sum(name in self._participants for name in healthy)
        requests = f"[{asking}/{len(self._participants)} participants healthy]\n"
        members = "".join(
            f"  <b>{member.replica_id}</b> <br/>\n" for member in self._previous or ()
        )
        beats = "".join(
            f"    {name}: seen {heart.age(now):.6f}s ago\n" for name, heart in self._hearts.items()
        )
        return requests + members + beats

    @property
    def quorum(self) -> tuple[int, list[str]]:
        """Return id and names of the last quorum."""
        return self._quorum_id, [member.replica_id for member in self._previous or ()]

    def _healthy(self) -> list[str]:
        now, timeout = self._kernel.now, self._heartbeat_timeout
        return [
            name
            for name, heart in self._hearts.items()
            if heart.beats or now - heart.last < timeout
        ]

    def _look(self) -> None:
        """Form a quorum if possible.

        Otherwise plan the next look for the time at which the result can change.
        """
        healthy = self._healthy()
        present = [
            self._participants[name] for name in sorted(healthy) if name in self._participants
        ]
        if self._is_quorum(healthy, present):
            self._form(tuple(participant.requester for participant in present))
            return
        now, timeout = self._kernel.now, self._heartbeat_timeout
        moments = [heart.last + timeout for heart in self._hearts.values() if not heart.beats]
        moments += [
            participant.joined + self._join_timeout for participant in self._participants.values()
        ]
        later = [moment for moment in moments if moment > now]
        if later:
            self._plan(min(later))

    def _is_quorum(self, healthy: list[str], present: list[_Participant]) -> bool:
        names = {participant.requester.replica_id for participant in present}
        if self._previous is not None and all(
            member.replica_id in names for member in self._previous
        ):
            return True  # a fast quorum: all members of the last one are here
        if len(present) < self._min_replicas or len(present) <= len(healthy) // 2:
            return False
        first = min((participant.joined for participant in present), default=self._kernel.now)
        # A nanosecond less, because the look is planned for exactly this time.
        return len(present) == len(healthy) or self._kernel.now - first >= self._join_timeout - 1e-9

    def _form(self, members: tuple[Requester, ...]) -> None:
        former = (
            None if self._previous is None else [member.replica_id for member in self._previous]
        )
        if former != [member.replica_id for member in members] or any(
            member.commit_failures for member in members
        ):
            self._quorum_id += 1
        self._previous = members
        self._participants.clear()
        formed = Formed(self._quorum_id, members)
        names = {member.replica_id for member in members}
        asking, self._asking = self._asking, []
        for request in asking:
            if request.requester.replica_id in names:
                request.reply(formed)
            elif request.alive():  # the request waits for the next quorum
                self._participants[request.requester.replica_id] = _Participant(
                    request.requester, self._kernel.now
                )
                self._asking.append(request)
        self.on_formed(formed)
        if self._participants:
            self._plan(self._kernel.now)

    def _plan(self, moment: float) -> None:
        """Look at the first tick after `moment`, unless an earlier look is planned."""
        ticks = math.floor((moment - self._began) / self._tick) + 1
        at = self._began + ticks * self._tick
        if at >= self._look_at:
            return
        self._look_at = at

        def look() -> None:
            if self._look_at == at:
                self._look_at = math.inf
                if self.listens and self._participants:
                    self._look()

        self._kernel.after(max(0.0, at - self._kernel.now), look)


class ManagerServer:
    """torchft's server of one group: heartbeats, one quorum request for all ranks, and their vote.

    Its threads are native: they run as long as the process, whatever its Python code does.
    """

    def __init__(
        self,
        kernel: Kernel,
        network: Network,
        lighthouse: Lighthouse,
        process: Process,
        node: Node,
        *,
        address: str,
        replica_id: str,
        store_addr: str,
        world_size: int,
        heartbeat_interval: timedelta,
        quorum_retries: int,
        **_: Any,
    ) -> None:
        self.kernel, self.network, self.lighthouse = kernel, network, lighthouse
        self.process, self.node = process, node
        self.replica_id = replica_id
        self._address, self._store_address, self._world_size = address, store_addr, world_size
        self._interval = heartbeat_interval.total_seconds()
        self._retries = quorum_retries
        self.running = True
        self._beating = False
        self._participants: dict[int, None] = {}
        self._quorums: list[_Call] = []
        self._count: set[int] = set()
        self._failures: set[int] = set()
        self._votes: list[_Call] = []
        self.waiting: list[Task] = []  # tasks to wake when the process ends
        process.on_change.append(self._look)
        network.on_change[self] = self._look
        lighthouse.on_start[self] = self._reconnect
        self._look()

    def address(self) -> str:
        """Return the server's address."""
        return self._address

    def shutdown(self) -> None:
        """Stop the heartbeats, and refuse new clients.

        The server still serves connected clients, as the real one does.
        """
        self.running = False
        self._look()
        self.network.on_change.pop(self, None)
        self.lighthouse.on_start.pop(self, None)

    # Heartbeats

    def _look(self) -> None:
        reaches = self.network.usable(self.node, LIGHTHOUSE)
        beats = self.running and self.process.runs and reaches and self.lighthouse.listens
        if beats != self._beating:
            self._beating = beats
            if self.lighthouse.listens:
                self.lighthouse.hear(self.replica_id, self._interval, beats)
        for task in self.waiting:
            self.kernel.wake(task)
        self.waiting.clear()

    def _reconnect(self) -> None:
        """Find a restarted lighthouse at the next try."""
        self._beating = False
        self.kernel.after(self.kernel.rng.random() * 0.2, self._look)

    # Quorum

    def quorum(self, call: _Call, step: int, failures: int, timeout: float) -> None:
        """Take one rank's request.

        When all ranks have asked, ask the lighthouse with the last rank's step.
        """
        self._quorums.append(call)
        self._participants[call.rank] = None
        if len(self._participants) == self._world_size:
            self._participants.clear()
            requester = Requester(
                self.replica_id,
                self._address,
                self._store_address,
                step,
                self._world_size,
                failures,
            )
            self._ask(requester, timeout, 0)

    def _ask(self, requester: Requester, timeout: float, retry: int) -> None:
        if self.process.dead:
            return
        state = {"over": False}

        def again() -> None:
            if state["over"] or self.process.dead:
                return
            state["over"] = True
            if retry < self._retries:
                pause = max(0.1, timeout / (self._retries + 1)) * (1 + self.kernel.rng.random())
                self.kernel.after(pause, lambda: self._ask(requester, timeout, retry + 1))

        def reply(formed: Formed) -> None:
            def arrive() -> None:
                if not state["over"]:
                    state["over"] = True
                    self._answer(formed)

            self._send(LIGHTHOUSE, self.node, arrive)

        def deliver() -> None:
            if state["over"]:
                return
            if self.lighthouse.listens:
                self.lighthouse.ask(
                    _Asking(
                        requester, reply, again, lambda: not (state["over"] or self.process.dead)
                    )
                )
            else:
                again()

        self._send(self.node, LIGHTHOUSE, deliver)
        self.kernel.after(timeout, again)

    def _send(self, source: Node, target: Node, act: Callable[[], None]) -> None:
        delay = self.network.delay(source, target)

        def arrive() -> None:
            if self.process.frozen:  # messages wait in the sockets of a frozen process
                self._when_thawed(lambda: self.network.when_usable(source, target, act))
            else:
                self.network.when_usable(source, target, act)

        self.kernel.after(delay, arrive)

    def _when_thawed(self, act: Callable[[], None]) -> None:
        done: list[bool] = []

        def look() -> None:
            if self.process.runs and not done:
                done.append(True)
                act()

        self.process.on_change.append(look)

    def _answer(self, formed: Formed) -> None:
        if self.process.dead:
            return
        calls, self._quorums = self._quorums, []
        for call in calls:
            call.settle(compute_result(self.replica_id, call.rank, formed))

    # Vote

    def vote(self, call: _Call, ok: bool) -> None:
        """Record one rank's vote; the last rank's vote settles the result."""
        if not ok:
            self._failures.add(call.rank)
        self._count.add(call.rank)
        self._votes.append(call)
        if len(self._count) == self._world_size:
            decision = not self._failures
            self._count, self._failures = set(), set()
            calls, self._votes = self._votes, []
            for waiting in calls:
                waiting.settle(decision)

    def drop(self, call: _Call) -> None:
        """Forget a call whose client no longer waits. Its request still counts."""
        self._quorums = [other for other in self._quorums if other is not call]
        self._votes = [other for other in self._votes if other is not call]


class _Call:
    """One rank's call, until it is answered."""

    def __init__(self, kernel: Kernel, rank: int) -> None:
        self._kernel, self.rank = kernel, rank
        self._task = kernel.current
        self.settled = False
        self.value: Any = None

    def settle(self, value: Any) -> None:
        self.value, self.settled = value, True
        self._kernel.wake(self._task)


class ManagerClient:
    """torchft's client; each rank has one.

    Raises:
        TimeoutError: a call took longer than its timeout.
        RuntimeError: any other failure, as in torchft.
    """

    def __init__(self, node: Node, server: ManagerServer | None) -> None:
        if server is None or server.process.dead or not server.running:
            raise RuntimeError("cannot connect to the manager")
        self._node, self._server = node, server

    def _quorum(
        self,
        group_rank: int,
        step: int,
        checkpoint_metadata: str,
        shrink_only: bool,
        timeout: timedelta,
        commit_failures: int,
        init_sync: bool = True,
    ) -> QuorumResult:
        assert not shrink_only, "only what the engine asks for has a model"
        assert not init_sync, "only what the engine asks for has a model"
        seconds = timeout.total_seconds()
        return self._call(
            group_rank,
            seconds,
            lambda call: self._server.quorum(call, step, commit_failures, seconds),
        )

    def _checkpoint_metadata(self, rank: int, timeout: timedelta) -> str:
        raise RuntimeError("rank not found")  # no rank has metadata, and no time passes

    def should_commit(
        self, group_rank: int, step: int, should_commit: bool, timeout: timedelta
    ) -> bool:
        """Vote; return True if all ranks voted yes."""
        return bool(
            self._call(
                group_rank,
                timeout.total_seconds(),
                lambda call: self._server.vote(call, should_commit),
            )
        )

    def _call(self, rank: int, timeout: float, act: Callable[[_Call], None]) -> Any:
        server = self._server
        kernel, network = server.kernel, server.network
        end = kernel.now + timeout
        try:
            network.call(self._node, server.node, server.process, timeout)
        except ConnectionError as error:
            raise (TimeoutError if kernel.now >= end else RuntimeError)(str(error)) from None
        call = _Call(kernel, rank)
        while server.process.frozen:  # a frozen server reads no request
            if kernel.now >= end:
                raise TimeoutError("deadline exceeded")
            server.waiting.append(kernel.current)
            kernel.block(end - kernel.now)
        act(call)
        with network.calling(self._node) as is_lost:
            while not call.settled:
                if server.process.dead:
                    raise RuntimeError("transport error: connection closed")
                if is_lost():
                    server.drop(call)
                    raise RuntimeError("transport error: connection reset")
                if kernel.now >= end:
                    server.drop(call)
                    raise TimeoutError("deadline exceeded")
                server.waiting.append(kernel.current)
                kernel.block(end - kernel.now)
                if kernel.current in server.waiting:
                    server.waiting.remove(kernel.current)
        lag = kernel.process.lag
        if lag and kernel.rng.random() < 0.5:
            # The ranks of a group get an answer at different times.
            kernel.sleep(lag * kernel.rng.random())
        return call.value


def compute_result(replica_id: str, group_rank: int, formed: Formed) -> QuorumResult:
    """Compute the manager's answer to a rank about a quorum.

    As torchft's `compute_quorum_results` does, without init_sync.
    """
    members = sorted(formed.members, key=lambda member: member.replica_id)
    rank = [member.replica_id for member in members].index(replica_id)
    max_step = max(member.step for member in members)
    foremost = [member for member in members if member.step == max_step]
    behind = [place for place, member in enumerate(members) if member.step != max_step]
    ahead = [place for place, member in enumerate(members) if member.step == max_step]
    sources = {
        place: ahead[(number + group_rank) % len(ahead)] for number, place in enumerate(behind)
    }
    source = sources.get(rank)
    names = [member.replica_id for member in foremost]
    return QuorumResult(
        quorum_id=formed.quorum_id,
        replica_rank=rank,
        replica_world_size=len(members),
        recover_src_manager_address="" if source is None else members[source].address,
        recover_src_replica_rank=source,
        recover_dst_replica_ranks=[place for place in behind if sources[place] == rank],
        store_address=foremost[group_rank % len(foremost)].store_address,
        max_step=max_step,
        max_replica_rank=names.index(replica_id) if replica_id in names else None,
        max_world_size=len(foremost),
        heal=source is not None,
        replica_ids=[member.replica_id for member in members],
    )
