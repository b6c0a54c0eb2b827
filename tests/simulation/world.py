# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The simulated world: groups of ranks with their agent, lighthouse and network.

It also judges their behaviour.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import networkx  # type: ignore[import-untyped]  # it has no types of its own

from tests.simulation import standins
from tests.simulation.collectives import GroupCollective, GroupLink, ProcessGroup, Ring
from tests.simulation.control import SimulatedSockets
from tests.simulation.folder import Folder
from tests.simulation.kernel import Crash, Kernel, NotSimulatedError, Process
from tests.simulation.lighthouse import Lighthouse, ManagerClient, ManagerServer
from tests.simulation.network import LIGHTHOUSE, Network, Node, PrefixStore, Store, StoreServer
from tests.simulation.oracle import ROUNDED, Oracle, Rules
from tests.simulation.rank import Rank
from tests.simulation.semi_sync import RoundOracle, RoundRank
from tests.simulation.transfer import Transfers
from tests.simulation.waiting import WaitJudge
from titan_ft.config import FaultTolerance
from titan_ft.engine import drain
from titan_ft.engine import step as engine_step
from titan_ft.membership import seat
from titan_ft.protocol.control.link import START_SECONDS
from titan_ft.protocol.decision import Done, GiveUp, Wait
from titan_ft.protocol.errors import ReplicaError
from titan_ft.protocol.row import Standing
from titan_ft.round_settings import steps_per_round

if TYPE_CHECKING:
    from tests.simulation.faults import Fault
    from titan_ft.protocol.decision import Decision
    from titan_ft.protocol.position import Position
    from titan_ft.protocol.round import Broken, Round


# Time in which the lighthouse and the members of a round must take a newcomer in.
_MEETING_SECONDS = 1.0
# one line that names a peer, a field or a file
_CLEAR = r".*(group|fault_tolerance\.|lighthouse|host|checkpoint:).*"
# Pause of a manager between two attempts to reach its lighthouse, as torchft's has.
_RECONNECT_SECONDS, _RECONNECT_GROWTH = (0.1, 1.5)
_AGAIN_SECONDS = 2.0  # additional time after a disturbance
# Time in which a thawed group must see that the others have left its exchange.
_LEFT_OUT_SECONDS = 1.5
# Additional time after a missed rendezvous. Then the group asks the groups that it can reach.
_MISSED_SECONDS = 5.0
# least time that a group needs to end a step by itself when the others are gone
_BREAK_SECONDS = 4.0
_SETTLED_SECONDS = 5.0  # time in which the groups must get over a disturbance
# Time in which a group must choose a checkpoint from a folder that nobody changes.
_CHOICE_SECONDS = 5.0
# Steps without a commit that are allowed while a group heals: it replays, and an exchange is
# repeated.
_USUAL_STEPS = 3
# longest pause between two steps: a group hangs, and the others cannot know yet
_PAUSE_SECONDS = 2.0
_LATE_SECONDS = 0.5  # delay of a step beyond its own time: pauses, latencies and lags


@dataclass(frozen=True)
class Options:
    """The world of one schedule.

    Attributes:
        groups, ranks, steps: numbers of groups, of ranks in a group, and of updates.
        fault_tolerance: fields of the config, the same for all groups.
        absent: slots of groups that never start.
        late: seconds by which groups start later, by slot.
        lag: largest delay of a rank at a pause point; the ranks of a group start up to this far
            apart.
        latency: seconds of a message between groups.
        jitter: largest difference in seconds between the members' completions of an all-reduce;
            usually far less.
        transfer_seconds: shortest and longest transfer of a state.
        compute_seconds, apply_seconds: time of a batch and of the optimizer.
        restart_seconds: shortest and longest time from a group's death to its next start.
        build_seconds: shortest time from a group's start until it reaches the lighthouse.
        overlap: gradients are sent during the backward.
        skew: largest difference between the hosts' wall clocks, in seconds.
        drift: largest gain or loss of a monotonic clock in a second, in seconds.
        odd: slots of groups with another model.
        folder: groups read a checkpoint folder at their start.
        sight: largest delay of a host's view of that folder, in seconds.
        save_every: steps between two checkpoints of the job; 0 = it saves none.
        save_seconds: longest time that a rank takes to write its part.
        save_failures: probability that a rank's save fails. The save of the last step never fails.
        silent: the process group between the groups fails as NCCL does.
        store_survives: a group's store outlives its workers.
        min_replicas: of the lighthouse.
        coupling: dependence of gradients on weights. 0 where bits are flipped, so that only the
            flipped values differ.
        switch: probability that a pause point lets another task run.
        speeds: factor of each slot on `compute_seconds`; empty = 1 for all.
        last_steps: steps in the last round of a semi-synchronous method; 0 = as many as in the
            others.
        buffers: a forward may write a part of the state, so no group offers it between rounds.
        scarce: probability that a donor's host is short of memory, so that it copies a part.
        forgets: data loaders do not continue where their state was saved.
        probe_seconds: time that a group waits for a quorum before it probes the lighthouse.
        finish_seconds: time that finished groups wait for others.
        room: updates that fit the memory of the group's rank with least memory; 0 = unlimited.
    """

    groups: int
    ranks: int
    steps: int
    fault_tolerance: dict[str, Any]
    absent: tuple[int, ...] = ()
    late: dict[int, float] = field(default_factory=dict)
    lag: float = 0.0
    latency: float = 0.0005
    jitter: float = 0.03
    transfer_seconds: tuple[float, float] = (0.0, 0.5)
    compute_seconds: float = 0.1
    apply_seconds: float = 0.004
    restart_seconds: tuple[float, float] = (0.5, 2.0)
    build_seconds: float = 0.0
    overlap: bool = False
    skew: float = 0.0
    drift: float = 0.0
    odd: tuple[int, ...] = ()
    folder: bool = False
    sight: float = 0.0
    save_every: int = 0
    save_seconds: float = 0.1
    save_failures: float = 0.0
    silent: bool = False
    store_survives: bool = True
    min_replicas: int = 1
    coupling: float = 0.1
    switch: float = 0.3
    speeds: tuple[float, ...] = ()
    last_steps: int = 0
    buffers: bool = False
    room: int = 0
    scarce: float = 0.0
    forgets: bool = False
    probe_seconds: float = 20.0
    finish_seconds: float = 2.0

    @property
    def round_steps(self) -> int:
        """Number of steps that a group makes from one exchange to the next."""
        return steps_per_round(FaultTolerance(**self.fault_tolerance))

    @property
    def round_seconds(self) -> float:
        """Approximate time of the slowest group for these steps."""
        return self.round_steps * self.compute_seconds * max(self.speeds, default=1.0)

    def seconds_of(self, slot: int) -> float:
        """Return the approximate time of a group for a batch."""
        return self.compute_seconds * (self.speeds[slot] if self.speeds else 1.0)

    def steps_of(self, updates: int) -> int:
        """Return the number of steps in this many updates."""
        total = self.steps * self.round_steps - (
            self.round_steps - self.last_steps if self.last_steps else 0
        )
        return min(updates * self.round_steps, total)


@dataclass(frozen=True)
class Problem:
    """A broken promise."""

    at: float
    promise: str
    text: str


@dataclass
class _Armed:
    """A fault that waits for a moment of a group.

    Attributes:
        slot: of the group; -1 = any group.
        skip: number of such moments that pass first.
    """

    slot: int
    act: Callable[[Node], None]
    skip: int
    breaks: bool


class _Sequence:
    """The acts of a group's ranks, one after the other. All ranks must act alike."""

    def __init__(self, ranks: int) -> None:
        self._counts = [0] * ranks
        # For each place: the act, the rank that made it first, and the number of ranks that made
        # it.
        self._open: dict[int, tuple[dict[str, Any], int, int]] = {}

    def add(self, rank: int, what: dict[str, Any]) -> str:
        """Record a rank's next act.

        Returns:
            The difference from another rank's act at the same place; empty = there is none.
        """
        place = self._counts[rank]
        self._counts[rank] += 1
        other, first, seen = self._open.pop(place, (what, rank, 0))
        if other != what:
            differing = [name for name in what if what[name] != other[name]]
            return f"number {place}: " + "; ".join(
                f"{name} {what[name]} on r{rank}, {other[name]} on r{first}" for name in differing
            )
        if seen + 1 < len(self._counts):
            self._open[place] = (what, first, seen + 1)
        return ""


class GroupRun:
    """One attempt of one group.

    Attributes:
        told: ranks with a leave request.
        comes_back: the group restarts after it has left.
        entered: time at which it reached the lighthouse; None = it has not yet.
        met_from: time at which it last reached the lighthouse without a group in sight that it
            knows it cannot reach.
        ended_at: time at which the first end of a process was noticed that was not in order.
        heals_since: time at which it began to heal; None = it does not heal.
        others_wait: the others wait for its transfer, because its queue is full.
        was_outside: it was outside the largest clique once.
        rolled_back: it continued from its own state once, because the others' state was lost.
        missed: number of rounds without it since its arrival; None after its first part in a round.
        failed_heals: number of failed fetches.
        heal_broke, former_heal_broke: an exchange broke for it during this heal, and during the
            previous one.
    """

    def __init__(self, world: World, slot: int, attempt: int) -> None:
        self.world, self.slot, self.attempt = world, slot, attempt
        kernel, options = world.kernel, world.options
        self.link = GroupLink(kernel, world.network, slot, options.ranks)
        self.sequences: dict[str, _Sequence] = collections.defaultdict(
            lambda: _Sequence(options.ranks)
        )
        self.told: set[int] = set()
        self.comes_back = False
        self.entered: float | None = None
        self.met_from = math.inf
        self.ended_at: float | None = None
        self.heals_since: float | None = None
        self.others_wait = False
        self.missed: int | None = 0
        self.was_outside = self.rolled_back = False
        self.failed_heals = 0
        self.heal_broke = self.former_heal_broke = False
        self.delays = [
            options.build_seconds + kernel.rng.random() * (0.02 + options.lag)
            for _ in range(options.ranks)
        ]
        self.began = kernel.now
        self.over = False
        self.members: frozenset[GroupRun] = frozenset()  # the groups of its last quorum
        self.ranks: list[Rank] = []
        for number in range(options.ranks):
            process = world.new_process(
                f"g{slot}r{number}" + (f"a{attempt}" if attempt else ""), (slot, number)
            )
            self.ranks.append(world.make_rank(world, self, number, process))
            process.on_end.append(lambda: world.process_ended(self))
        for rank in self.ranks:
            world.ranks[rank.process] = rank
            collective = GroupCollective(
                self.link, rank.number, functools.partial(world.enters, rank, "gather")
            )
            world.collectives[rank.process] = collective
            kernel.spawn(rank.main, "main", rank.process)

    @property
    def alive(self) -> bool:
        """True if all its ranks live."""
        return not self.over and all(not rank.process.dead for rank in self.ranks)

    @property
    def runs(self) -> bool:
        """True if all its ranks live, reach each other, and neither are frozen nor hang."""
        at_work = all(rank.process.runs and not rank.hangs for rank in self.ranks)
        return self.alive and at_work and self.link.flows()

    @property
    def ended(self) -> str:
        """How all its ranks ended in order: "finished" or "drained".

        Empty if they did not.
        """
        how = {rank.ended.how if rank.ended else "" for rank in self.ranks}
        return how.pop() if len(how) == 1 else ""

    @property
    def chooses(self) -> bool:
        """True if one of its ranks has not chosen a checkpoint yet."""
        return any(rank.found is None for rank in self.ranks)

    @property
    def ready(self) -> bool:
        """True if all its ranks hold a committed state."""
        return self.alive and all(rank.ready for rank in self.ranks)

    @property
    def stays(self) -> bool:
        """True if all its ranks hold a committed state, or have ended in order."""
        return all(rank.ready and (rank.ended or not rank.process.dead) for rank in self.ranks)


class World(standins.World):
    """Runs one schedule.

    Args:
        seed: determines everything random.
        faults: each with its time.
        traces: record a trace for people.
    """

    def __init__(
        self, seed: int, options: Options, faults: list[Fault], traces: bool = False
    ) -> None:
        self.seed, self.options, self.faults = seed, options, faults
        self.kernel = Kernel(seed, options.switch)
        self.kernel.on_crash = self._crashed
        kernel = self.kernel
        config = self.config = _config(options)
        self.network = Network(kernel, options.latency)
        self.lighthouse = Lighthouse(
            kernel,
            min_replicas=options.min_replicas,
            join_timeout=config["join_timeout_ms"] / 1000,
            heartbeat_timeout=config["heartbeat_timeout_ms"] / 1000,
        )
        self.transfers = Transfers(kernel, self.network, options.transfer_seconds)
        self.transfers.node_of = lambda process: self.ranks[process].node
        self.transfers.on_moment = self.moment
        look = lambda: self.moment("listing", self.ranks[kernel.process].node)  # noqa: E731
        self.folder = Folder(kernel, options.ranks, options.sight, look) if options.folder else None
        self.armed: dict[str, list[_Armed]] = {}
        not_finite = any(fault.spoils for fault in faults)
        rules = Rules(
            options.groups,
            config["batch_policy"],
            config["lr_policy"],
            config["min_replica_size"],
            options.coupling,
            not_finite,
            ROUNDED if config["exchange_dtype"] == "bfloat16" else 0.0,
        )
        self.make_rank: Callable[..., Rank] = RoundRank if config["semi_sync_method"] else Rank
        self.oracle = (
            RoundOracle(
                rules, self.report, FaultTolerance(**options.fault_tolerance), options.steps_of
            )
            if config["semi_sync_method"]
            else Oracle(rules, self.report)
        )
        self.waits = WaitJudge(self.report, options.lag)
        self.traces = traces
        self.trace: list[tuple[float, str, str]] = []
        self.problems: list[Problem] = []
        self.processes: dict[int, Process] = {}
        self.ranks: dict[Process, Rank] = {}
        self.collectives: dict[Process, GroupCollective] = {}
        self.groups: dict[int, GroupRun] = {}
        # All groups that have reached the lighthouse, including those that are gone.
        self.entered: list[GroupRun] = []
        self.stores: dict[tuple[str, int], StoreServer] = {}
        # by the address to which children connect
        self.trees: dict[tuple[str, int], SimulatedSockets] = {}
        self.rings: dict[str, Ring] = {}
        self.managers: dict[str, ManagerServer] = {}
        self.gone: dict[int, str] = {}  # slots that do not come back, each with the reason
        # For a joiner: the groups that showed sound bytes when its donor was named, if they were
        # enough, and the donor's slot.
        self.sound: dict[Rank, tuple[list[int], int]] = {}
        # For each host: error of its wall clock, and rate of its monotonic clock.
        self.clocks: dict[Node, tuple[float, float]] = {}
        self.flipped: set[int] = set()  # slots of groups in which a bit has flipped
        # for each slot, the time at which one of its ranks was last thawed
        self.thawed: dict[int, float] = {}
        self.changed = 0.0  # time of the last event in the world
        self.disturbed = 0.0  # the same, or the last time at which training could not go on
        # Steps that were first committed since then, while training could go on.
        self.undisturbed_steps = 0
        self.calm_since = 0.0  # time of the first of them
        # Since when each step could be followed by a save, and the time of the last such step.
        self._saves_since = self._judged_saves = 0.0
        # Time at which a step was last committed for the first time, or a heal began or ended.
        self.progressed = 0.0
        self.stepped = 0.0  # time at which a step was last committed for the first time
        self.furthest = 0
        self.commits = 0
        self.due: dict[int, float] = {}  # steps to be saved, and the time from which each is due
        self.last_fault = max((fault.ends for fault in faults), default=0.0)
        # The groups of the quorum in which the first group finished.
        self.final: set[GroupRun] | None = None
        # First and last leave request of the groups that leave together.
        self.told_first = self.told_last = -math.inf
        self.left = 0  # largest step of a group that has left with them
        self.struck = -math.inf  # time of the last event other than a leave request
        self._pids = 100

    # Running

    def run(self) -> list[Problem]:
        """Run until all groups have ended or a promise is broken.

        Returns:
            The broken promises.
        """
        kernel = self.kernel
        standins.enter(kernel, self)
        former = seat.PROBE_SECONDS, engine_step.FINISH_SECONDS
        seat.PROBE_SECONDS, engine_step.FINISH_SECONDS = (
            self.options.probe_seconds,
            self.options.finish_seconds,
        )
        try:
            for slot in range(self.options.groups):
                if slot not in self.options.absent:
                    kernel.after(
                        self.options.late.get(slot, 0.0), functools.partial(self._start, slot, 0)
                    )
            for fault in self.faults:
                kernel.after(fault.at, functools.partial(self._inject, fault))
            self._watch()
            limit = max(self.last_fault, *self.options.late.values(), 0.0) + self.bound * 4 + 60.0
            limit += (
                3 * self.options.steps * self.options.round_seconds
                if self.config["semi_sync_method"]
                else 0.0
            )
            went_on = kernel.run(limit)
            if kernel.missing:
                self._problem("simulation", kernel.missing[0])
            elif not self.problems and not kernel.stopped and (self._viable() or self._job_over()):
                text = (
                    "groups wait for ever"
                    if not went_on
                    else f"groups have not ended after {kernel.now:.0f} s"
                )
                self._problem("liveness", f"{text}: {self._describe()}")
            if self.traces and any(problem.promise == "liveness" for problem in self.problems):
                for task, place in kernel.waits():
                    self.say(task, f"waits at {place}")
        finally:
            kernel.close()
            standins.enter(None, None)
            seat.PROBE_SECONDS, engine_step.FINISH_SECONDS = former
            for rank in self.ranks.values():
                rank.state.forget_hooks()
        return self.problems

    @property
    def bound(self) -> float:
        """Seconds within which a step must be committed while nothing happens to the world."""
        config = self.config
        waits = (
            config["join_timeout_ms"]
            + config["process_group_timeout_ms"]
            + config["heartbeat_timeout_ms"]
        )
        rounds = 3 * self.options.round_seconds if config["semi_sync_method"] else 0.0
        return (
            30.0
            + rounds
            + waits / 1000
            + config["start_timeout_seconds"]
            + self.options.finish_seconds
        )

    def say(self, who: str, text: str) -> None:
        """Write a line of the trace."""
        if self.traces:
            self.trace.append((self.kernel.now, who, text))

    def report(self, promise: str, text: str) -> None:
        """Report a broken promise. The first one ends the run."""
        self._problem(promise, text)
        self.kernel.stop()

    def _problem(self, promise: str, text: str) -> None:
        self.say("PROBLEM", f"{promise}: {text}")
        self.problems.append(Problem(self.kernel.now, promise, text))

    def _inject(self, fault: Fault) -> None:
        if not self._job_over():
            self.say("fault", str(fault))
            self.disturb()
            self.struck = self.struck if fault.only_leaves else self.kernel.now
            fault.inject(self)

    def disturb(self) -> None:
        """Note that something happens to the world."""
        self.changed = self.disturbed = self.kernel.now
        self.undisturbed_steps = 0

    def when(
        self, moment: str, slot: int, act: Callable[[Node], None], *, breaks: bool = True
    ) -> None:
        """Call `act` at a group's next moment of a kind ("exchange", "vote", ...).

        Args:
            slot: of the group; -1 = any group.
            breaks: the act does more than send leave requests.
        """
        # An exchange has several collectives. The fault strikes in one of them.
        skip = self.kernel.rng.randrange(3 * self.options.groups) if moment == "exchange" else 0
        self.armed.setdefault(moment, []).append(_Armed(slot, act, skip, breaks))

    def moment(self, moment: str, node: Node) -> None:
        """Inject the faults that wait for this moment, within a few milliseconds."""
        armed = self.armed.get(moment)
        if not armed:
            return
        for entry in list(armed):
            if entry.slot not in (-1, node[0]):
                continue
            entry.skip -= 1
            if entry.skip < 0:
                armed.remove(entry)
                # A flip at this moment comes at once: before the shown bytes are served.
                late = 0.0 if moment == "naming" else 0.006 * self.kernel.rng.random() ** 2
                self.kernel.after(late, functools.partial(self._strike, entry, node))

    def _strike(self, entry: _Armed, node: Node) -> None:
        self.disturb()
        self.struck = self.kernel.now if entry.breaks else self.struck
        entry.act(node)

    def _start(self, slot: int, attempt: int) -> None:
        if slot in self.gone or self._job_over():
            return
        self.say("launch", f"starts group {slot}" + (f", attempt {attempt}" if attempt else ""))
        self.disturb()
        group = self.groups[slot] = GroupRun(self, slot, attempt)
        if self.folder is not None:
            self.kernel.after(1.0, lambda: self._judge_choice(group))

    def _job_over(self) -> bool:
        finished = any(group.ended == "finished" for group in self.groups.values())
        # After this error a person must choose a checkpoint.
        return finished or "DivergedError" in self.gone.values()

    # Calls of stand-ins

    def new_process(self, name: str, node: Node) -> Process:
        """Make a process with the clocks of its host. Each rank has a host of its own."""
        self._pids += 1
        rng, lag = self.kernel.rng, self.options.lag
        process = Process(self.kernel, name, pid=self._pids)
        process.lag = lag * rng.random()
        process.clock = 1000.0 * rng.random()
        if node not in self.clocks:
            error = (lag + self.options.skew) * (rng.random() - 0.5)
            self.clocks[node] = error, 1 + self.options.drift * (2 * rng.random() - 1)
        process.wall, process.rate = self.clocks[node]
        self.processes[process.pid] = process
        return process

    @staticmethod
    def host(node: Node) -> str:
        """Return the numeric address of a node."""
        return f"10.0.{node[0]}.{node[1]}"

    def host_of(self, process: Process) -> str:
        """Return the name of a process's host."""
        return f"host-{self.ranks[process].slot}"

    def store_address(self, slot: int) -> tuple[str, int]:
        """Return host and port of a group's store. Makes the store if there is none."""
        address = (self.host((slot, 0)), 29500)
        server = self.stores.get(address)
        if server is None or server.gone:
            owner = None if self.options.store_survives else self.groups[slot].ranks[0].process
            self.stores[address] = StoreServer(self.kernel, (slot, 0), owner)
        return address

    def connect_store(self, host: str, port: int, timeout: float) -> Store:
        """Connect the running process to a store."""
        server = self.stores.get((host, port))
        node = self.ranks[self.kernel.process].node
        return Store(self.network, node, None if server is None or server.gone else server, timeout)

    def prefix_store(self, prefix: str, store: Any) -> PrefixStore:
        """Put a prefix before all keys."""
        return PrefixStore(prefix, store)

    def process_group(self, rank: Rank) -> ProcessGroup:
        """Make one rank's process group between the groups."""
        return ProcessGroup(
            self.kernel,
            self.network,
            rank.process,
            rank.node,
            self.rings,
            silent=self.options.silent,
            jitter=self.options.jitter,
            report=lambda promise, text: self.report(promise, f"{rank.process.name} {text}"),
            on_moment=self.moment,
        )

    def manager_server(self, **options: Any) -> ManagerServer:
        """Start a manager in the running process."""
        process = self.kernel.process
        node = self.ranks[process].node
        lighthouse = self.lighthouse
        # The manager's name has this time, however long it waits for the lighthouse.
        came = self.kernel.now
        end, pause = came + options["connect_timeout"].total_seconds(), _RECONNECT_SECONDS
        while not (lighthouse.listens and self.network.usable(node, LIGHTHOUSE)):
            if self.kernel.now >= end:
                raise RuntimeError("lighthouse: transport error")
            self.kernel.sleep(min(pause, end - self.kernel.now))
            pause *= _RECONNECT_GROWTH
        group = self.ranks[process].group
        if group.entered is None:
            group.entered, group.met_from = came, self.kernel.now
            self.entered.append(group)
        address = f"http://{self.host(node)}:{len(self.managers) + 1000}"
        server = ManagerServer(
            self.kernel, self.network, lighthouse, process, node, address=address, **options
        )
        self.managers[address] = server
        return server

    def manager_client(self, address: str) -> ManagerClient:
        """Connect the running process to a manager."""
        return ManagerClient(self.ranks[self.kernel.process].node, self.managers.get(address))

    def connect(self, host: str, port: int, timeout: float) -> None:
        """Open a connection to the lighthouse, a group's store or a rank's state server.

        Raises:
            OSError: nothing listens there, or it cannot be reached.
        """
        node = self.ranks[self.kernel.process].node
        if host == "10.9.0.1":
            self.network.call(node, LIGHTHOUSE, None, timeout)
            if not self.lighthouse.listens:
                raise ConnectionRefusedError("connection refused")
            return
        there = tuple(int(part) for part in host.split(".")[2:])
        self.network.call(node, (there[0], there[1]), None, timeout)
        server = self.stores.get((host, port))
        if server is None or server.gone:
            raise ConnectionRefusedError("connection refused")

    def round_trip(
        self, address: str, token: str, seconds: float, size: int, back: str = ""
    ) -> None:
        """Send bytes to a rank's state server and back.

        Raises:
            OSError: it cannot be reached.
        """
        node, server = self.ranks[self.kernel.process].node, self.transfers.servers.get(address)
        if server is None or server.process.dead or server.closed:
            raise ConnectionRefusedError("connection refused")
        self.network.call(node, server.node, server.process, seconds)
        if server.process.frozen:
            self.kernel.sleep(seconds)
            raise TimeoutError("timed out")

    def read_status(self, timeout: float) -> str:
        """Return the lighthouse's status page.

        Raises:
            OSError: the lighthouse is down, or cannot be reached.
        """
        self.network.call(self.ranks[self.kernel.process].node, LIGHTHOUSE, None, timeout)
        if not self.lighthouse.listens:
            raise ConnectionRefusedError("connection refused")
        return self.lighthouse.status()

    def files(self) -> dict[str, str]:
        """Return the checkpoint files as the running process sees them."""
        if self.folder is None:
            raise NotSimulatedError("this world has no folder of checkpoints")
        return self.folder.files(self.ranks[self.kernel.process].node)

    def group_collective(self) -> GroupCollective:
        """Return the collectives of the running process."""
        return self.collectives[self.kernel.process]

    def fetch(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch a state for the running process."""
        return self.transfers.fetch(*args, **kwargs)

    def free_bytes(self) -> int:
        """Return the free memory of the running process's host.

        The ranks of a group see different values.
        """
        rank, ranks = self.ranks[self.kernel.process], self.options.ranks
        room = self.options.room + (rank.slot + rank.number) % ranks if self.options.room else 2**31
        return 2 * ranks * room * rank.update_bytes

    def ask_offer(self, *args: Any, **kwargs: Any) -> Any:
        """Ask for an offer for the running process."""
        return self.transfers.ask_offer(*args, **kwargs)

    # Reports of ranks

    def chose(self, rank: Rank, step: int) -> None:
        """Compare a rank's chosen checkpoint with those of the group's other ranks."""
        self._compare(rank, "calls", ("choice of a checkpoint", step))
        assert self.folder is not None
        if max(step, 0) < (lasting := self.folder.lasting(rank.group.began)):
            self.report(
                "no work lost",
                f"{rank.process.name} chooses step {step} although {lasting} was there all the time",
            )
        self.moment("chosen", rank.node)
        self._stop_if_over()

    def loaded(self, rank: Rank) -> None:
        """Compare a rank's loaded checkpoint with those of the group's other ranks."""
        self._compare(rank, "calls", ("load of step and lineage", *rank.held))

    def _judge_choice(self, group: GroupRun) -> None:
        """Report a group that still looks for a checkpoint although nothing changes the folder."""
        assert self.folder is not None
        if group.over or not group.chooses:
            return
        since = max(group.began, self.folder.settled, self.thawed.get(group.slot, 0.0))
        if group.runs and self.kernel.now - since > _CHOICE_SECONDS:
            self.report(
                "liveness",
                f"g{group.slot} has looked for a checkpoint for {self.kernel.now - since:.0f} s",
            )
        self.kernel.after(1.0, lambda: self._judge_choice(group))

    def told_to_drain(self, rank: Rank) -> bool:
        """Return True if a starting rank has a leave request already."""
        return rank.number in rank.group.told

    def enters(self, rank: Rank, call: str) -> None:
        """Compare a call that all ranks of a group must make alike with the other ranks' calls."""
        frame = sys._getframe(4)
        while frame.f_back is not None and frame.f_code.co_filename.endswith("group.py"):
            frame = frame.f_back
        what = (call, frame.f_code.co_name, frame.f_lineno) if call == "gather" else (call,)
        self._compare(rank, "calls", what)

    def votes(self, rank: Rank) -> None:
        """Compare a vote with the other ranks' acts."""
        rank.votes()
        others = (other for group in self.groups.values() if group.alive for other in group.ranks)
        if (
            "naming" in self.armed
            and rank.ready
            and any(other.position.standing is Standing.BEHIND for other in others)
        ):
            self.moment("naming", rank.node)  # the moment of a donor; this rank may be one
        rank.voted = True
        self._compare(rank, "calls", ("vote",))

    def decided(self, position: Position, outcome: Round | Broken, decision: Decision) -> None:
        """Compare a rank's decision after a round with those of the group's other ranks.

        The grounds of the decision are compared as well.
        """
        rank = self.ranks[self.kernel.process]
        if self.options.ranks == 1:
            return
        what: object = type(decision.error) if isinstance(decision, GiveUp) else decision
        if position.standing is Standing.FINISHED and isinstance(decision, Wait | Done):
            # Ranks may have heard of different groups that left in order. They agree on it later.
            what = "ends or waits"
        facts = {
            **vars(position),
            "left": None,
            "outcome": type(outcome).__name__,
            "decision": what,
        }
        self._compare_all(rank, "decides", facts)

    def agreed(self, rank: Rank, answer: str) -> None:
        """Compare the result of an agreement with the results on the group's other ranks."""
        self._compare(rank, "agrees on", answer)

    def asks(self, rank: Rank, step: int) -> None:
        """Compare a quorum request with those of the group's other ranks."""
        self._compare(rank, "asks for a quorum with step", step)
        self.moment("asking", rank.node)

    def _compare(self, rank: Rank, kind: str, what: object) -> None:
        self._compare_all(rank, kind, {"it is": what})

    def _compare_all(self, rank: Rank, kind: str, what: dict[str, Any]) -> None:
        """Compare the next act of a kind with those of the group's other ranks."""
        if self.options.ranks > 1 and (apart := rank.group.sequences[kind].add(rank.number, what)):
            self.report("ranks never part", f"g{rank.slot} {kind}, {apart}")

    def saw(self, rank: Rank, event: str, fields: dict[str, Any]) -> None:
        """Note an event of the engine."""
        if self.traces:
            told = " ".join(
                f"{name}={_short(value)}"
                for name, value in fields.items()
                if not name.endswith("seconds")
            )
            self.say(rank.process.name, f"{event} {told}")
        if event == "joined":
            rank.group.members = frozenset(self.groups[slot] for slot in fields["participants"])
        if event == "exchange_failed":
            rank.group.heal_broke |= rank.group.heals_since is not None
            self._judge_break(rank)
            self.moment("broke", rank.node)
        rank.group.rolled_back |= event == "rolled_back"
        rank.group.failed_heals += event == "heal_failed" and rank.number == 0
        if event == "outside":
            rank.group.was_outside = True
            rank.group.met_from = math.inf
            self.moment("outside", rank.node)
        if event == "link_back":
            rank.group.met_from = self.kernel.now
        rank.told_why |= event in ("hung", "rank_silent") or (
            event == "drained" and not fields["in_order"]
        )
        if event in ("heal_started", "heal_finished"):
            self.progressed = self.kernel.now
        if event in ("heal_started", "heal_failed", "catch_up_waiting"):
            rank.group.others_wait = event == "catch_up_waiting"
        if event in ("catch_up_waiting", "catch_up_renewed"):
            self._judge_full_queue(rank, event, fields["reason"])
        if event == "drained":
            self._judge_abandoned(rank, fields["reason"])
        if event == "rolled_back":
            if lost := rank.unreplayed:
                self.report(
                    "no state given up",
                    f"{rank.process.name} rolls back with {lost} updates not replayed",
                )
            self._judge_loss(rank, int(fields["step"]), event)
        elif event == "digest_mismatch":
            self._judge_mismatch(rank, fields)

    def _judge_full_queue(self, rank: Rank, event: str, reason: str) -> None:
        """Judge the end of a joiner's queue.

        A joiner may let others wait, or fetch a newer state once, only if its queue is full or its
        replay is slow.
        """
        most = self.options.room or math.inf
        slow = "to replay" in reason and rank.unreplayed > 1
        if not slow and rank.queued < most:
            self.report(
                "no stall for a joiner", f"{rank.process.name}: {event} with {rank.queued} updates"
            )
        if event == "catch_up_renewed":
            rank.renewals += 1
            if rank.renewals > 1:
                self.report(
                    "no stall for a joiner",
                    f"{rank.process.name} fetches a newer state again and again",
                )
        if self.options.ranks > 1:
            self._compare(rank, "ends its queue by", event)

    def _judge_break(self, rank: Rank) -> None:
        """Report a joined group that trains and breaks an exchange in which others wait for it."""
        # A quorum is requested one step ahead. A member may have gone since.
        step = 1.6 * self.options.compute_seconds * max(self.options.speeds, default=1.0)
        quiet = (
            self.kernel.now - self.disturbed
            > self.config["process_group_timeout_ms"] / 1000 + step + 2.0
        )
        at_work = all(group.runs for group in self.groups.values() if not group.over)
        # The effect of a broken connection, or of a NaN, shows in the next exchange, which may come
        # much later.
        ends_only = all(
            type(fault).__name__ in ("Kill", "KillGroups", "DrainGroup") for fault in self.faults
        )
        if self.config["semi_sync_method"] and quiet and at_work and ends_only:
            self.report(
                "no stall for a joiner",
                f"an exchange of {rank.process.name} breaks though nothing has happened",
            )

    def tell_to_leave(self, group: GroupRun, ranks: Collection[int], comes_back: bool) -> None:
        """Send SIGTERM to these ranks of a group, some milliseconds apart."""
        self.disturb()
        # Groups whose requests come soon after each other leave together. After a longer time, a
        # group is judged by itself.
        if self.kernel.now - self.told_last > self.config["drain_timeout_seconds"]:
            self.told_first, self.left = self.kernel.now, 0
        self.told_last = self.kernel.now
        group.told |= set(ranks)
        group.comes_back = comes_back
        for number in ranks:
            self.kernel.after(
                0.05 * self.kernel.rng.random(),
                functools.partial(self._terminate, group.ranks[number]),
            )

    def _terminate(self, rank: Rank) -> None:
        rank.voted_when_told = rank.voted
        if rank.drain is not None and not rank.process.dead:
            self.kernel.spawn(rank.drain.request, "signals", rank.process)
        seconds = self.config["drain_timeout_seconds"] + 3.0
        self.kernel.after(seconds, functools.partial(self._judge_leaving, rank, self.kernel.now))

    def _judge_leaving(self, rank: Rank, since: float) -> None:
        """Report a rank that has not ended some time after its leave request."""
        thawed = self.thawed.get(rank.slot, 0.0) >= since
        if rank.process.runs and not thawed:
            seconds = self.kernel.now - since
            self.report(
                "liveness",
                f"{rank.process.name} is there {seconds:.0f} s after it was told to leave",
            )

    def _judge_abandoned(self, rank: Rank, reason: str) -> None:
        """Judge a group that has ended without having left in order.

        After a leave request a group first finishes its step, unless something prevents it.
        """
        group = rank.group
        if "another rank" in reason:
            fair = any(
                other.abandoned or other.process.dead for other in group.ranks if other is not rank
            )
        elif "had not begun" in reason:
            fair = not rank.voted_when_told  # the rank may vote during its final calls
        else:
            # A lone group needs an answer of the lighthouse. A group outside of the quorum gets
            # none.
            lonely = sum(other.runs for other in self.groups.values()) < self.options.min_replicas
            lately = (
                self.kernel.now - self.changed
                < self.config["drain_timeout_seconds"] - _BREAK_SECONDS
            )
            fair = (
                lately
                or lonely
                or self._waits_for_last_steps(rank)
                or not group.runs
                or not self._reaches(group)
            )
        rank.abandoned = True
        if not fair:
            self.report(
                "no work lost", f"{rank.process.name} ends without having left in order: {reason}"
            )

    def _waits_for_last_steps(self, rank: Rank) -> bool:
        """Return True if a group waits in the exchange for others that make their last, long step.

        The others requested the quorum at the beginning of this step. If the group left the
        exchange, they would have to repeat it all the same.
        """
        options, left = (
            self.options,
            (1 - drain.WAITING_SHARE) * self.config["drain_timeout_seconds"],
        )
        longest = 1.2 * options.compute_seconds * max(options.speeds, default=1.0)
        return bool(self.config["semi_sync_method"]) and rank.in_exchange and longest > left

    def started(self, rank: Rank, step: int) -> None:
        """Record that a rank begins to train, at step 0 or after a checkpoint."""
        rank.ready = True
        self.undisturbed_steps = 0
        if rank.group.attempt > 0 or self.furthest > 0:
            self._judge_loss(rank, step, "started anew")

    def committed(self, rank: Rank, step: int, participants: list[int]) -> None:
        """Note a commit."""
        if self.traces:
            self.say(
                rank.process.name,
                f"commits step {step} of groups {participants}, {rank.state.peek()[:8]}",
            )
        self.commits += 1
        if self.folder is not None and not rank.state.tainted:
            self.folder.keep(rank.number, rank.state.copy(*rank.held))
        if step > self.furthest:
            self.furthest, self.progressed = step, self.kernel.now
            self.stepped = self.kernel.now
            if not self.undisturbed_steps:
                self.calm_since = self.kernel.now
            self.undisturbed_steps += 1
            self._judge_saves(step)
            if self.config["semi_sync_method"]:
                self._judge_joiners(participants)

    def _judge_joiners(self, participants: Collection[int]) -> None:
        """Judge how soon a group takes part in a round after its arrival.

        It must do so in the second round, unless a fault strikes or its transfer is long. The first
        round is the one under way at its arrival. A holder serves one joiner after the other. A
        state offered in the middle of a round may be gone at the round's end, before it is fetched.
        """
        options = self.options
        fetch = options.transfer_seconds[1] + 0.5 + 8 * options.lag
        # The others request their quorum at the beginning of their last step. From then on they
        # wait for a joiner. It arrives after the first steps of their round, which were made during
        # an exchange. A deadline may end the round earlier, even after its first step.
        limit = self.config["sync_deadline_seconds"] or math.inf
        in_time = math.ceil(min(limit / options.compute_seconds, options.round_steps))
        steps = in_time - 1 - self.config["fragment_sync_delay"]
        fits = fetch < min(steps * options.compute_seconds, limit)
        # Rounds that the fetch takes.
        fetching = (
            0
            if fits
            else 1 + int(fetch / min(options.round_steps * options.compute_seconds, limit))
        )
        short = self.furthest == options.steps and options.last_steps > 0
        joining = sum(group.missed is not None and group.runs for group in self.groups.values())
        for group in self.groups.values():
            if group.slot in participants:
                group.missed = None
            if group.missed is None or group.entered is None or not group.runs or group.ended:
                continue
            group.missed += 1
            quiet = (
                not short
                and self.disturbed <= group.entered
                and self.network.calm
                and self.lighthouse.listens
            )
            # A group whose bytes are not the agreed ones asks again, one round later.
            quiet &= not self.flipped
            if quiet and group.missed > (1 + fetching) * joining + group.failed_heals:
                text = f"g{group.slot} has had no part in the {group.missed} rounds since it came"
                self.report("no stall for a joiner", text)

    def save_failed(self, rank: Rank, step: int) -> None:
        """Note that a group could not save a step."""
        self.say(rank.process.name, f"could not save step {step}")
        self.due.pop(step, None)  # the group tries again when the next save is due
        self.disturb()

    def publishes(self, rank: Rank, step: int) -> None:
        """Note that a group is about to publish a checkpoint."""
        self.say(rank.process.name, f"publishes the checkpoint of step {step}")
        self._judge_replaced(rank, step, "replaces", rank.position.saved_corrupt)

    def withdraws(self, rank: Rank, step: int) -> None:
        """Note that a group is about to withdraw a checkpoint."""
        self.say(rank.process.name, f"withdraws the checkpoint of step {step}")
        self.disturb()
        self._judge_replaced(rank, step, "withdraws", True)

    def _judge_replaced(self, rank: Rank, step: int, what: str, is_void: bool) -> None:
        """Report a checkpoint of another group that is replaced by a state that is not the
        job's.
        """
        assert self.folder is not None
        writer = self.folder.writer(step)
        if is_void and writer not in (-1, rank.slot):
            text = f"g{rank.slot} {what} the checkpoint of step {step}, which g{writer} has saved"
            self.report("no work lost", text)

    def _judge_saves(self, step: int) -> None:
        """Report a checkpoint that was due and is missing although no fault strikes."""
        every, folder = self.options.save_every, self.folder
        if not every or folder is None:
            return
        # After a hang, the group that takes the saves over does so at a commit.
        if self.kernel.now - self._judged_saves > _PAUSE_SECONDS:
            self._saves_since = self.kernel.now
        self._judged_saves = self.kernel.now
        if step % every == 0:
            self.due[step] = self.kernel.now
        # The group may have been busy with an earlier save. It sees the end of that save at its
        # next commit.
        patience = 2 * self.options.save_seconds + 0.2 + 8 * self.options.lag
        for due, since in self.due.items():
            late = self.kernel.now - max(since, self.calm_since, self._saves_since) > patience
            if folder.latest < due <= step - 3 and self.undisturbed_steps > 3 and late:
                self.report(
                    "no work lost",
                    f"nobody has saved step {due}, due for {self.kernel.now - since:.1f} s",
                )

    def heals(self, rank: Rank, computed: bool) -> None:
        """Record that a rank is behind.

        Args:
            computed: it discards the gradients of a step.
        """
        self.moment("healing", rank.node)
        if (
            computed
            and rank.ready
            and not rank.state.tainted
            and not self.config["semi_sync_method"]
        ):
            self._judge_lost_work(rank)
        rank.ready = False
        if rank.group.heals_since is None:
            rank.group.heals_since = self.kernel.now
            rank.group.former_heal_broke, rank.group.heal_broke = rank.group.heal_broke, False
            self.kernel.after(
                self._patience, functools.partial(self._judge_stall, rank.group, self.kernel.now)
            )

    def lost_steps(self, rank: Rank, number: int, ahead: bool, before: int) -> None:
        """Judge why a healed rank's steps of the current round are in no update.

        A group's failure must not cost another group a step. A loss is fair if the group itself is
        the cause (it was stopped, slow or cut off, or its bytes or gradients were bad), and in
        these cases of the design:

        - A group whose exchange was complete while it broke for more others returns to their state,
        without its change. - A joiner received the state before an exchange that broke for it and
        others. It is behind if a group continues for which the exchange was complete. - A group
        returns to its own state because the others' state is lost with them. - A group was outside
        the largest clique, for instance because it could not reach a frozen group. - A group's
        change is in an update that only others made, on the state of lineage `before`, which the
        group had as well: it gave up its own update for theirs, and theirs is lost with them.
        """
        now = {id(update) for update in self.oracle.path(rank.held[1])}
        forsaken = any(
            update.parent == before
            and rank.slot in (update.participants or ())
            and id(update) not in now
            for update in self.oracle.chain.values()
        )
        own = rank.slot in self.thawed or any(fault.concerns(rank.slot) for fault in self.faults)
        own |= rank.group.was_outside or rank.group.rolled_back or rank.group.former_heal_broke
        self.say(rank.process.name, f"has lost {number} steps" + (", was ahead" if ahead else ""))
        if not (
            own or ahead or forsaken or rank.slot in self.flipped or rank.group.missed is not None
        ):
            self.report(
                "no work lost", f"{rank.process.name} heals and loses {number} steps of its round"
            )

    @property
    def _patience(self) -> float:
        """Seconds within which a step must be committed if only heals delay the groups."""
        options = self.options
        slots = options.groups if self.config["batch_policy"] == "constant" else 1
        usual = slots * 1.6 * options.round_seconds + options.apply_seconds + 4 * options.jitter
        return _USUAL_STEPS * (usual + 4 * options.lag) + _LATE_SECONDS

    def _judge_stall(self, group: GroupRun, heal: float) -> None:
        """Report a heal during which the others do not train on, however long its transfer takes.

        Args:
            heal: time at which the heal began.
        """
        now = self.kernel.now
        if (
            group.over
            or group.heals_since != heal
            or self._job_over()
            or self.furthest >= self.options.steps
        ):
            return
        if group.others_wait or not self._trains_on():
            self.undisturbed_steps = 0
        # The first step after a disturbance may have been complete before it. The second one shows
        # that the groups are past it.
        since = max(heal, self.stepped) if self.undisturbed_steps > 1 else now
        if now - since >= self._patience - 1e-6:
            text = f"g{group.slot} heals, and the others commit nothing for {now - since:.1f} s"
            self.report("no stall for a joiner", text)
        again = max(since + self._patience - now, 0.01)
        self.kernel.after(again, functools.partial(self._judge_stall, group, heal))

    def _trains_on(self) -> bool:
        """Return True if enough groups hold the job's state, and nothing slows a group or a
        link.
        """
        groups = [group for group in self.groups.values() if not group.over and not group.ended]
        ready = sum(group.ready and group.heals_since is None for group in groups)
        at_work = all(
            group.runs and not any(rank.slowness for rank in group.ranks) for group in groups
        )
        return (
            at_work
            and ready >= self.config["min_replica_size"]
            and self.lighthouse.listens
            and self.network.calm
        )

    def _judge_lost_work(self, rank: Rank) -> None:
        """Report a group whose work is lost because of a minority that is one step ahead.

        One group ahead must not cost the work of several that are ready one step behind it, except
        at the very end.
        """
        # The groups of the round, including those that have died since. A group that cannot reach
        # all of the others is in the lighthouse's quorum, and outside of the round.
        members = [group for slot, group in self.groups.items() if slot in rank.met]
        # A group that has loaded a checkpoint and has yet to begin counts as well: its row claims
        # that state.
        holders = [
            group
            for group in members
            if all(
                other.ready or other.position.standing is Standing.READY for other in group.ranks
            )
        ]
        held = [group.ranks[rank.number].held for group in holders]
        # A group that has healed for this very round has computed nothing yet.
        rear = sum(
            group.runs
            and group.ranks[rank.number].computed
            and group.ranks[rank.number].held == rank.held
            for group in holders
        )
        ahead = sum(step == rank.held[0] + 1 for step, _ in held)
        if (
            rear > ahead > 0
            and held.count(rank.held) + ahead == len(held)
            and rank.held[0] + 1 < self.options.steps
        ):
            self.report(
                "no work lost", f"g{rank.slot} heals, one of {rear} groups one step behind {ahead}"
            )

    def made_round(self, rank: Rank, made: Round) -> None:
        """Record a round that succeeded on all ranks of a group, before its consequences."""
        rank.met = made.quorum.slots
        own = made.rows[made.quorum.rank]
        rank.ahead = own.has_state and own.step > made.verdict.step
        rank.tied = rank.tied and made.verdict.tie
        # A group with steps left may give changes of earlier rounds, and no token of this one.
        if rank.sent and not any(
            (row.valid_tokens or row.unfinished) and not row.holding_back for row in made.rows
        ):
            self.report(
                "no idle traffic",
                f"{rank.process.name} has sent gradients in a round to which nobody gave any",
            )
        verdict = made.verdict
        # of the state that the group asks for, or fetches
        is_shown = own.donor < 0 or own.from_step == verdict.step
        if not own.has_state and verdict.verified and is_shown:
            # If fewer than half of the holders show sound bytes, nobody can tell which bytes are
            # right.
            held = [row.slot for row in made.rows if row.has_state and row.step == verdict.step]
            groups = [self.groups[slot] for slot in held]
            sound = [
                group.slot for group in groups if not any(rank.state.shown for rank in group.ranks)
            ]
            self.sound[rank] = (sound if 2 * len(sound) >= len(held) else [], own.donor)

    def silenced(self, group: GroupRun, ranks: list[Rank], seconds: float) -> None:
        """Check later whether a group still seems alive although one of its hosts is silent.

        Its first host hears nothing of that host.
        """
        if (
            not group.ready
            or group.ranks[0] in ranks
            or not all(rank.is_built for rank in group.ranks)
        ):
            return
        since, patience = self.kernel.now, 2 * self.config["heartbeat_timeout_ms"] / 1000

        def look() -> None:
            first = group.ranks[0]
            looks_alive = (
                not group.over
                and first.process.runs
                and not any(rank.ended for rank in group.ranks)
            )
            thawed = self.thawed.get(group.slot, 0.0) >= since
            if looks_alive and not thawed:
                self.report(
                    "liveness",
                    f"g{group.slot} still beats {longest:.0f} s after one of its hosts fell silent",
                )

        # The host is found silent at the next look after the whole patience, and some looks may
        # come late. A rank that has not answered its first ping yet has longer
        # (`HeartbeatWatch.look`).
        longest = 3 * patience + 0.5
        if since - group.began < patience:
            longest += START_SECONDS
        if seconds > longest:
            self.kernel.after(longest, look)

    def thaws(self, group: GroupRun) -> None:
        """Check later whether a thawed group with a state is with the others again."""
        since = self.thawed[group.slot] = self.kernel.now
        self.disturb()

        def look() -> None:
            quiet = (
                self.disturbed == since
                and self.network.calm
                and self.lighthouse.listens
                and not self._job_over()
            )
            # The others get no new quorum while they are in an exchange with a group that hangs.
            at_work = quiet and not any(
                rank.slowness or rank.hangs or rank.process.frozen
                for other in self.groups.values()
                for rank in other.ranks
            )
            met = group.runs and not group.ended and not group.told and group.met_from < since
            names = self.lighthouse.quorum[1]
            if (
                at_work
                and met
                and names
                and not any(int(name.split("/")[1]) == group.slot for name in names)
            ):
                text = f"g{group.slot} is left out of the others' quorum {self.kernel.now - since:.0f} s after it thawed"
                self.report("liveness", text)

        if group.ready and group.heals_since is None:
            missed = 0.0 if all(rank.is_connected for rank in group.ranks) else _MISSED_SECONDS
            self.kernel.after(_LEFT_OUT_SECONDS + missed + self._patience, look)

    def _is_tainted(self, slot: int) -> bool:
        return any(rank.state.tainted for rank in self.groups[slot].ranks)

    def healed(self, rank: Rank) -> None:
        """Note that a rank has the job's state."""
        self.say(rank.process.name, f"has step {rank.held[0]}, {rank.state.peek()[:8]}")
        self.undisturbed_steps = 0  # before that, too few groups may have held the state
        rank.group.heals_since, rank.group.others_wait = None, False
        sound, donor = self.sound.pop(rank, ([], -1))
        if (
            sound
            and rank.state.inherited
            and self.oracle.is_corrupt(rank.number, rank.state, donor in sound)
        ):
            self.report(
                "one trajectory",
                f"g{rank.slot} has a corrupt state from its donor, {sound} had shown a sound one",
            )

    def rank_ended(self, rank: Rank) -> None:
        """Note that a rank ended in order. Stop if all has been seen."""
        ended = rank.ended
        assert ended is not None
        self.say(rank.process.name, f"{ended.how} at step {ended.step}, {ended.digest[:8]}")
        if ended.how == "finished" and ended.step != self.options.steps:
            self.report(
                "counters",
                f"{rank.process.name} has finished at step {ended.step} of {self.options.steps}",
            )
        group = rank.group
        self._compare(rank, "ends", (ended.how, ended.step, ended.lineage))
        if group.ended == "drained" and not group.comes_back:
            self.gone[group.slot] = "drained"
        if group.ended == "drained":
            self._judge_left(group)
        if self.final is None and group.ended == "finished":
            # The first group to finish has given up each group that was not in its last round, or
            # that it cannot reach. Those come too late. So does a group that arrived after that
            # round, which may be long ago if the finishing group was frozen.
            self.final = {
                other for other in group.members if other.stays and self._linked(group, other)
            }
            self.final.add(group)
        self._judge_end(rank)

    def _judge_left(self, group: GroupRun) -> None:
        """Report a job's state that is in no checkpoint after the last groups with it have left in
        order.

        The checkpoint may be missing if a fault struck since the first of them got its leave
        request. A group that was to save may have died, or the others may not have seen it.
        """
        if self.folder is None or not self.options.save_every:
            return
        self.left = max(self.left, min(rank.held[0] for rank in group.ranks))
        others = [other for other in self.groups.values() if other.alive and not other.ended]
        at_work = all(
            other.runs and not any(rank.slowness for rank in other.ranks) for other in others
        )
        quiet = (
            self.struck < self.told_first - _SETTLED_SECONDS
            and self.network.calm
            and self.lighthouse.listens
        )
        odd = group.was_outside or any(rank.state.tainted for rank in group.ranks)
        if any(other.ready for other in others) or odd or not (at_work and quiet):
            return
        if self.folder.latest < self.left:
            text = f"g{group.slot} was the last to leave, step {self.left} was made, and step {self.folder.latest}"
            self.report("no work lost", f"{text} is the latest that is saved")

    def _late(self, group: GroupRun) -> bool:
        return self.final is not None and group not in self.final

    def process_ended(self, group: GroupRun) -> None:
        """Let the agent see that a process of a group has ended."""
        if group.over:
            return
        dead = [rank for rank in group.ranks if rank.process.dead]
        for rank in dead:
            if rank.process.exited and not (rank.ended or rank.told_why):
                self.report(
                    "nothing silent", f"{rank.process.name} ends itself and has not told why"
                )
        left = [rank.number for rank in group.ranks if rank.ended]
        stuck = [rank.number for rank in dead if rank.process.exited and not rank.ended]
        if left and stuck:
            self.report(
                "ranks never part",
                f"g{group.slot}: ranks {left} have left in order, {stuck} had to end",
            )
        # A rank with the final state may still be killed, or may find at its end that a sibling is
        # silent.
        if not all(rank.returned for rank in dead):
            group.ended_at = self.kernel.now
            self.say("launch", f"sees an end in group {group.slot}")
            group.over = True
            self.kernel.after(
                0.02 + 0.2 * self.kernel.rng.random(), lambda: self._end_others(group)
            )
        elif len(dead) == len(group.ranks):
            group.over = True
            if group.ended == "drained" and group.slot not in self.gone:
                self._restart(group)
        self.disturb()
        self._stop_if_over()

    def _end_others(self, group: GroupRun) -> None:
        for rank in group.ranks:
            rank.process.end()
        self._restart(group)
        self._stop_if_over()

    def _restart(self, group: GroupRun) -> None:
        if self.groups.get(group.slot) is not group or group.slot in self.gone:
            return
        low, high = self.options.restart_seconds
        self.kernel.after(
            low + (high - low) * self.kernel.rng.random(),
            lambda: self._start(group.slot, group.attempt + 1),
        )

    # Judging

    def _crashed(self, crash: Crash) -> None:
        process, error = crash.task.process, crash.error
        self.say(
            process.name, f"{crash.task.name} ends by {type(error).__name__}: {str(error)[:160]}"
        )
        rank = self.ranks[process]
        if self._may_end(rank, crash):
            if isinstance(error, ReplicaError) and not re.fullmatch(_CLEAR, str(error)):
                self.report(
                    "nothing silent",
                    f"{process.name} ends by {type(error).__name__}: {str(error)!r}",
                )
            if not getattr(crash.error, "restart", True):
                self.gone[rank.slot] = type(crash.error).__name__
            process.end()
            self._stop_if_over()
        else:
            self.report(
                "no state given up",
                f"{process.name} ({crash.task.name}) ends by {type(error).__name__}: {error}",
            )

    def _may_end(self, rank: Rank, crash: Crash) -> bool:
        name = type(crash.error).__name__
        if rank.group.over:
            return True  # a sibling has ended, so the agent ends this rank as well
        if any(fault.excuses(name, rank, self) for fault in self.faults):
            return True
        if name == "LoadError" and self.folder is not None:
            # The chosen checkpoint is gone. It was removed, replaced, or withdrawn by a group whose
            # update no other group has made. After a restart the group chooses again.
            return max(self.folder.missed, self.folder.replaced) >= rank.group.began
        if name == "GaveUpError" and "start_timeout" in str(crash.error):
            # Nothing is lost: the group holds the initial state, or that of a checkpoint.
            return not rank.position.training and self._too_few(rank)
        if name == "ConfigMismatchError":
            return self._is_later_kind(rank.group)
        if name == "JobLostError":
            return not self._holders(rank.held[0] + 1, rank.group)
        return False

    def _too_few(self, rank: Rank) -> bool:
        """Return True if a rank that waits for the first step met too few groups.

        There were no others to meet.
        """
        least = self.config["min_replica_size"]
        others = [
            group
            for group in self.groups.values()
            if group is not rank.group and self._can_be_met(group)
        ]
        return (
            len(rank.met) < least
            and self._how_many_go_on([rank.group, *others], rank.group) < least
        )

    def _can_be_met(self, group: GroupRun) -> bool:
        """Return True if nothing has kept a group from meeting others for a while."""
        came = max(group.met_from, self.thawed.get(group.slot, 0.0), self.disturbed)
        there = group.runs and not group.ended and self._reaches(group)
        # After an event, such as a restart of the lighthouse or a cut of the link to it, a group
        # may first have a request that fails and is repeated, or a member that it must find silent.
        again = _AGAIN_SECONDS if self.disturbed > group.met_from else 0.0
        return there and self.kernel.now - came > _MEETING_SECONDS + again

    def _how_many_go_on(self, groups: Sequence[GroupRun], own: GroupRun | None = None) -> int:
        """Return how many of these groups continue if some cannot reach each other.

        As in the engine (docs/failures.md): as many holders of the job's state as possible, then as
        many groups. A larger part without that state could only start the job anew. A tie decides
        which groups continue, not how many.

        Args:
            own: only parts with this group count; None = all parts.
        """
        claims = {
            group: min(rank.position.claimed_step for rank in group.ranks) for group in groups
        }
        latest = max(claims.values(), default=0)
        holders = {group for group in groups if claims[group] >= max(latest - 1, min(latest, 1))}
        reach = networkx.Graph()
        reach.add_nodes_from(groups)
        reach.add_edges_from(
            pair for pair in itertools.combinations(groups, 2) if self._linked(*pair)
        )
        parts = [part for part in networkx.find_cliques(reach) if own is None or own in part]
        return max(
            ((len(holders.intersection(part)), len(part)) for part in parts), default=(0, 0)
        )[1]

    def _reaches(self, group: GroupRun) -> bool:
        return self.lighthouse.listens and self.network.usable((group.slot, 0), LIGHTHOUSE)

    def _is_later_kind(self, group: GroupRun) -> bool:
        """Return True if groups of another shape may have reached the lighthouse before this one.

        Their clocks count. The group that was there first defines the job's shape.
        """
        odd, came = group.slot in self.options.odd, group.entered
        clocks = self.options.lag + self.options.skew + 0.05
        heard = self.config["heartbeat_timeout_ms"] / 1000 + 1.0
        return came is not None and any(
            (other.slot in self.options.odd) is not odd
            and other.entered is not None
            and other.entered <= came + clocks
            and (other.ended_at is None or other.ended_at > came - heard)
            for other in self.entered
        )

    def _holders(self, step: int, but: GroupRun | None = None) -> list[GroupRun]:
        """Return the live groups with at least `step` commits.

        They have been reachable for a while.
        """
        return [
            group
            for group in self.groups.values()
            if group is not but
            and group.ready
            and group.runs
            and not group.ended
            and min(rank.held[0] for rank in group.ranks) >= step
            and self._reaches_lighthouse(group)
        ]

    def _reaches_lighthouse(self, group: GroupRun) -> bool:
        settled = self.kernel.now - self.disturbed > self.config["start_timeout_seconds"] + 3.0
        return settled and self.network.usable((group.slot, 0), LIGHTHOUSE)

    def _judge_loss(self, rank: Rank, step: int, what: str) -> None:
        holders = self._holders(step + 1, rank.group)
        if holders and not self._job_over():
            slots = [group.slot for group in holders]
            self.report(
                "no state given up",
                f"{rank.process.name}: {what} at step {step} while groups {slots} hold more",
            )

    def _judge_mismatch(self, rank: Rank, fields: dict[str, Any]) -> None:
        """Report an unchanged state that is outvoted by a corrupted one."""
        minority = set(fields.get("minority", ()))
        lineages = fields.get("lineages", {})
        tainted = {
            slot: self._is_tainted(slot)
            for slot in fields.get("digests", {})
            if slot in self.groups
        }
        rank.tied = len(minority) == len(tainted) and any(
            2 * len(corrupt) >= len(alike)
            for corrupt, alike in self._split(fields, tainted)
            if corrupt
        )
        for slot in minority:
            majority = [
                other
                for other in tainted
                if other not in minority and lineages.get(other) == lineages.get(slot)
            ]
            if not tainted.get(slot, True) and any(tainted[other] for other in majority):
                self.report(
                    "one trajectory", f"g{slot} is sound, and outvoted by corrupt groups {majority}"
                )

    def _split(
        self, fields: dict[str, Any], tainted: dict[int, bool]
    ) -> Iterator[tuple[set[int], set[int]]]:
        """Yield the corrupt groups, and all that showed a digest, for groups with the same last
        update.

        A group is corrupt by a fault, or because it loaded a corrupt group's save. A donor must not
        make a group corrupt.
        """
        lineages, digests = fields.get("lineages", {}), fields.get("digests", {})
        for lineage in sorted(set(lineages.values())):
            shown = {
                slot for slot in tainted if lineages.get(slot) == lineage and int(digests[slot], 16)
            }
            # A group that has yet to begin has its state from a checkpoint. Beside groups that
            # train, it is a witness only for bytes that none of them shows.
            ready = {slot for slot in shown if all(rank.ready for rank in self.groups[slot].ranks)}
            told = {digests[slot] for slot in ready}
            loaded = {digests[slot]: slot for slot in shown - ready if digests[slot] not in told}
            alike = ready | set(loaded.values()) if ready else shown
            yield {slot for slot in alike - (ready - self.flipped) if tainted[slot]}, alike

    def _judge_end(self, rank: Rank) -> None:
        """Compare the final states. End when all groups that can end have ended."""
        ended = rank.ended
        assert ended is not None
        finished = [
            other
            for group in self.groups.values()
            for other in group.ranks
            if other.ended and other.ended.how == "finished" and not self._late(group)
        ]
        if self._late(rank.group):
            return
        for other in finished:
            assert other.ended is not None
            if (
                ended.how == "finished"
                and other.number == rank.number
                and other.ended.digest != ended.digest
            ):
                self.report(
                    "one trajectory",
                    f"g{rank.slot} and g{other.slot} have finished with other bytes",
                )
        if (
            ended.how == "finished"
            and self.oracle.is_corrupt(rank.number, rank.state)
            and not self._corruption_wins()
        ):
            self.report("one trajectory", f"{rank.process.name} has finished with a corrupt state")
        self._stop_if_over()

    def _stop_if_over(self) -> None:
        """Stop if no event can show anything more."""
        started = self.options.groups - len(self.options.absent)
        if "DivergedError" in self.gone.values() or (
            (self._job_over() or len(self.gone) == started) and self._all_ended()
        ):
            self.kernel.stop()

    def _corruption_wins(self) -> bool:
        """Return True if no group in the quorum has a sound state.

        Then the right bytes cannot be determined.
        """
        here = {int(name.split("/")[1]) for name in self.lighthouse.quorum[1]}
        groups = [group for group in self.groups.values() if group.alive and group.slot in here]
        return all(any(rank.state.tainted for rank in group.ranks) for group in groups)

    def _all_ended(self) -> bool:
        left = [
            group
            for group in self.groups.values()
            if not (group.over or group.ended or group.slot in self.gone)
            and (not self._late(group) or group.told or (self.folder is not None and group.chooses))
        ]
        # Fewer groups than the lighthouse's minimum wait for ever (docs/limits.md).
        return len(left) < self.options.min_replicas

    def _watch(self) -> None:
        """Check periodically that training progresses while nothing prevents it."""
        now = self.kernel.now
        if self._viable():
            if now - max(self.progressed, self.disturbed) > self.bound:
                since = now - max(self.progressed, self.disturbed)
                self.report("liveness", f"no step committed for {since:.0f} s: {self._describe()}")
                return
        elif not self._job_over():
            self.disturbed = max(self.disturbed, now - 1.0)
        self.kernel.after(5.0, self._watch)

    def _viable(self) -> bool:
        """Return True if enough groups run, reach the lighthouse, and reach each other."""
        if self._job_over() or self.furthest >= self.options.steps or not self.lighthouse.listens:
            return False
        running = [
            group
            for group in self.groups.values()
            if group.runs and not group.ended and self.network.usable((group.slot, 0), LIGHTHOUSE)
        ]
        if any(not group.runs and group.alive for group in self.groups.values()):
            return False
        least = max(self.config["min_replica_size"], self.options.min_replicas)
        return self._how_many_go_on(running) >= least

    def _linked(self, a: GroupRun, b: GroupRun) -> bool:
        pairs = [pair for i in range(self.options.ranks) for pair in ((i, i), (i, 0), (0, i))]
        return all(self.network.sound((a.slot, i), (b.slot, j)) for i, j in pairs)

    def _describe(self) -> str:
        words = []
        for slot, group in sorted(self.groups.items()):
            for rank in group.ranks:
                state = (
                    "dead" if rank.process.dead else "frozen" if rank.process.frozen else "lives"
                )
                if rank.ended:
                    state = rank.ended.how
                words.append(f"g{slot}r{rank.number} {state} at {rank.held[0]}")
        return ", ".join(words)


def _config(options: Options) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(FaultTolerance(**options.fault_tolerance))


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
