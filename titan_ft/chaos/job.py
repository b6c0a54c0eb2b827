# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Fold the events of a running job into the facts that faults need: contributors, effects of faults, processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from titan_ft.chaos.effect import Effect
from titan_ft.chaos.processes import Unreachable, Worker
from titan_ft.chaos.schedule import GroupView, View
from titan_ft.faults.fault import Fault, Need
from titan_ft.faults.outside import Signal
from titan_ft.run.events import (
    AgentEnded,
    Drained,
    Event,
    FaultInjected,
    GradientExcluded,
    HealFinished,
    Hung,
    LaunchFinished,
    LaunchStarted,
    LaunchStopping,
    LighthouseStarted,
    RankSilent,
    ReplicaGaveUp,
    StepCommitted,
    Target,
    TrainingFinished,
    WorkerExited,
    WorkerStarted,
)

_KEPT_DIGESTS = 8
"""Newest steps whose digests are compared."""


@dataclass
class Group:
    """What is known of one group. A life is one start of its workers."""

    replica: int
    life: int = 0
    """How often its workers were seen to start."""
    attempt: int | None = None
    """Number of its newest start, as its workers tell it."""
    dead: bool = False
    """This life is over, or about to be."""
    contributes: bool = False
    left_out_of: int = -1
    """Newest step that others committed without it."""
    workers: dict[int, Worker] = field(default_factory=dict)
    agent: Worker | None = None
    """The process that keeps its workers, where that is this project's."""
    effects: list[Effect] = field(default_factory=list)
    """Those of faults of which it has yet to show that they are over."""

    @property
    def up(self) -> bool:
        return self.contributes and not self.dead and not self.effects


class Job:
    """A running job as its events show it. Events that come twice do no harm.

    Args:
        lighthouse_pid: returns the process of the job's lighthouse on this host, None while there is none.
    """

    def __init__(self, lighthouse_pid: Callable[[], int | None] = lambda: None) -> None:
        self._lighthouse_pid, self._had_lighthouse = lighthouse_pid, False
        self._forget()

    def _forget(self) -> None:
        self._stopping = self._launched = False
        self._finished: set[int] = set()
        self.trained_together = False
        """A step to which all groups contributed has been committed."""
        self.newest_lighthouse: LighthouseStarted | None = None
        """The newest one that the launcher has started."""
        self._num_groups = 0
        self._num_ranks = 1
        self._groups: dict[int, Group] = {}
        # Until the job says otherwise; an order may then find no taker.
        self._meets = {Need.AGENT, Need.CHECKPOINT, Need.KEEPER}
        self._digests: dict[int, dict[tuple[int, int], tuple[str, float]]] = {}

    @property
    def ended(self) -> bool:
        """Tell whether its training is over, or being stopped: nothing that is broken now would be repaired."""
        return self._stopping or bool(self._finished)

    def view(self) -> View:
        """Return what faults are aimed by."""
        self._had_lighthouse = self._had_lighthouse or self._lighthouse_pid() is not None
        met = self._meets | ({Need.LIGHTHOUSE} if self._had_lighthouse else set())
        replicas = sorted({*range(self._num_groups), *self._groups})
        groups = {replica: GroupView(replica, self._num_ranks, self.group(replica).up) for replica in replicas}
        return View(groups, frozenset(met))

    def everyone(self) -> list[Worker]:
        """Return all workers of the groups' newest lives."""
        return [worker for group in self._groups.values() for worker in group.workers.values()]

    def processes(self, fault: Signal, target: Target) -> list[Worker]:
        """Return the processes of a target that a fault signals; those that are known.

        Raises:
            Unreachable: none is.
        """
        if fault.processes == "lighthouse":
            pid = self._lighthouse_pid()
            if pid is None:
                raise Unreachable("the lighthouse does not run right now")
            return [Worker("the lighthouse", pid, host="")]
        assert target.replica is not None, "only the lighthouse is in no group"
        group = self.group(target.replica)
        if fault.processes == "agent":
            if group.agent is None:
                raise Unreachable(f"the agent of group {target.replica} is not known")
            return [group.agent]
        known = [worker for rank, worker in sorted(group.workers.items()) if target.rank in (None, rank)]
        if not known:
            raise Unreachable(f"no worker of group {target.replica} has said where it runs")
        return known

    def group(self, replica: int) -> Group:
        """Return what is known of a group; of one that has said nothing yet, too."""
        return self._groups.setdefault(replica, Group(replica))

    def affect(self, fault: Fault, shot: int, target: Target) -> Effect:
        """Note that a fault is about to hit a target, which is not up until that is over."""
        if target.replica is None:
            return Effect(fault, shot, target, life=0)
        group = self.group(target.replica)
        group.effects.append(Effect(fault, shot, target, group.life))
        return group.effects[-1]

    def calm(self, effect: Effect) -> None:
        """Drop the effect of a fault that did not hit its target after all."""
        if effect.target.replica is not None:
            group = self.group(effect.target.replica)
            group.effects = [other for other in group.effects if other is not effect]

    def undo(self, replica: int, fault: str, shot: int | None, time: float) -> None:
        """Note that the effect of a shot on the group was undone."""
        for effect in self.group(replica).effects:
            if (effect.fault.name, effect.shot) == (fault, shot):
                effect.undo(time)

    def fold(self, event: Event) -> None:
        """Take in one event; they should come in order of time."""
        match event:
            case LaunchStarted():  # a run directory may hold several launches
                self._forget()
                self._launched = True
                self._num_groups, self._num_ranks = event.replicas, event.ranks_per_replica
            case LighthouseStarted():
                self.newest_lighthouse = event
            case LaunchStopping() | LaunchFinished():
                self._stopping = True
            case GradientExcluded():
                for slot in event.slots:
                    for effect in self.group(slot).effects:
                        effect.end("excluded", event.time)
            case FaultInjected() if event.attempt is None:
                self._note_other_runner(event)
        if event.replica is not None:
            self._fold_group(self.group(event.replica), event)

    def _fold_group(self, group: Group, event: Event) -> None:
        if isinstance(event, WorkerStarted):
            self._start(group, event)
        if event.attempt is None or event.attempt != group.attempt:
            return  # of workers that were replaced since, or of an agent about the next attempt
        match event:
            case StepCommitted():
                self._commit(group, event)
            case TrainingFinished():
                self._finished.add(group.replica)
            case WorkerExited() if event.rank in group.workers and event.worker_pid != group.workers[event.rank].pid:
                pass  # of a worker that was replaced since
            case WorkerExited() | AgentEnded() | Drained() | Hung() | RankSilent() | ReplicaGaveUp():
                group.dead, group.contributes = True, False
            case HealFinished():
                for effect in group.effects:
                    effect.end("healed", event.time)

    def _start(self, group: Group, event: WorkerStarted) -> None:
        """Note a worker; the first one of a new start ends what was known of the last."""
        rank, attempt = event.rank, event.attempt
        known = group.workers.get(rank)
        if attempt != group.attempt or (known is not None and known.pid != event.pid):
            group.life += 1
            group.attempt, group.workers = attempt, {}
            group.dead, group.contributes, group.left_out_of = False, False, -1
            self._finished.discard(group.replica)
        name = f"rank {rank} of group {group.replica}"
        group.workers[rank] = Worker(name, event.pid, event.host, event.mono, event.slurm)
        if event.agent_pid is not None:
            agent = f"the agent of group {group.replica}"
            group.agent = Worker(agent, event.agent_pid, event.host, event.mono, event.slurm)
        else:
            group.agent = None
        self._num_ranks = max(self._num_ranks, rank + 1)
        if event.config is not None:
            self._num_groups = self._num_groups or event.config.group_size
            told = {
                Need.AGENT: event.config.chaos,
                Need.CHECKPOINT: event.config.checkpoint,
                Need.KEEPER: self._launched or event.slurm is not None,
            }
            self._meets = {need for need, met in told.items() if met}

    def _commit(self, group: Group, event: StepCommitted) -> None:
        """Note who contributed to a step. Only a group's own commits show that it is up, not those of others."""
        step, participants = event.step, event.participants
        if event.digest:
            self._compare(step, (group.replica, event.rank), event.digest, event.time)
        if event.rank != 0:
            return
        if self._num_groups and all(replica in participants for replica in range(self._num_groups)):
            self.trained_together = True
        for other in self._groups.values():
            if other.replica not in participants:
                other.contributes, other.left_out_of = False, max(step, other.left_out_of)
        if group.replica in participants and not group.dead and step > group.left_out_of:
            group.effects = [one for one in group.effects if not one.is_over(group.life, event.time)]
            group.contributes = True

    def _compare(self, step: int, who: tuple[int, int], digest: str, time: float) -> None:
        """End the effect of a flipped bit once the group's digest equals another group's: the bit is gone."""
        digests = self._digests.setdefault(step, {})
        digests[who] = (digest, time)
        for old in sorted(self._digests)[:-_KEPT_DIGESTS]:
            del self._digests[old]
        for group in self._groups.values():
            mine, time = digests.get((group.replica, who[1]), ("", 0.0))
            others = [digest for (replica, rank), (digest, _) in digests.items() if replica != group.replica]
            for effect in group.effects:
                if mine in others and (effect.target.rank or 0) == who[1]:
                    effect.agree(step, time)

    def _note_other_runner(self, event: FaultInjected) -> None:
        """Note a fault that another runner injected; what this process injects is noted where it is done."""
        replica = event.target.replica
        if event.pid != os.getpid() and replica is not None:
            self.group(replica).contributes = False
