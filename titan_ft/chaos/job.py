# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The facts of a running job that faults need: contributors, processes, and effects of faults.

A view of the fold of the job's events (`titan_ft.history.fold`), with what only chaos asks: whether
the effect of a fault on a group is over.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from titan_ft.chaos.effect import Effect
from titan_ft.chaos.processes import Unreachable, Worker
from titan_ft.chaos.schedule import GroupView, View
from titan_ft.faults.fault import Ending, Fault, Need
from titan_ft.faults.outside import Signal
from titan_ft.history.fold.group import GroupFold
from titan_ft.history.fold.run import RunFold
from titan_ft.run.events import (
    Event,
    FaultInjected,
    GradientExcluded,
    HealFinished,
    LighthouseStarted,
    StepCommitted,
    Target,
    WorkerStarted,
)

_KEPT_DIGESTS = 8
"""Newest steps whose digests are compared."""


class Group:
    """What faults need to know of one group. A life is one start of its workers."""

    def __init__(self, fold: GroupFold) -> None:
        self.fold = fold
        self.effects: list[Effect] = []
        """Those of faults of which it has yet to show that they are over."""
        self.is_hit_by_others = False
        """Whether another chaos runner has hit the group since its last commit."""

    @property
    def life(self) -> int:
        """How often its workers were seen to start."""
        return self.fold.num_starts

    @property
    def attempt(self) -> int | None:
        """Number of its newest start; None before the first."""
        return self.fold.started_attempt

    @property
    def workers(self) -> dict[int, Worker]:
        """The workers of its newest start, by rank."""
        return {start.rank: _worker(start) for start in self.fold.workers}

    @property
    def agent(self) -> Worker | None:
        """The process that keeps its workers, if that is this project's."""
        start = self.fold.last_start
        if start is None or start.agent_pid is None:
            return None
        return Worker(f"the agent of group {self.fold.slot}", start.agent_pid, start.host, start.mono, start.slurm)

    @property
    def up(self) -> bool:
        """Whether it trains with the others, and nothing that was done to it shows any more."""
        return self._trains and not self.effects and not self.is_hit_by_others

    @property
    def _trains(self) -> bool:
        if self.attempt is None:
            return False  # its processes are not known, and an order needs the number of its attempt
        return self.fold.contributes and self.fold.state == "training" and not self.fold.is_ending

    def take_commit(self, event: StepCommitted) -> None:
        """Take a commit of its rank 0. Only a group's own commits show that it is up, not those of others."""
        if event.contributed and self._trains:
            self.is_hit_by_others = False
            self.effects = [effect for effect in self.effects if not effect.is_over(self.life, event.time)]


class Job:
    """A running job as its events show it. Events that come twice do no harm.

    Args:
        lighthouse_pid: returns the process of the job's lighthouse on this host, None while there is none.
    """

    def __init__(self, lighthouse_pid: Callable[[], int | None] = lambda: None) -> None:
        self._lighthouse_pid, self._had_lighthouse = lighthouse_pid, False
        self._run = RunFold()
        self._forget()

    def _forget(self) -> None:
        self.trained_together = False
        """A step to which all groups contributed has been committed."""
        self._groups: dict[int, Group] = {}
        self._digests: dict[int, dict[tuple[int, int], tuple[str, float]]] = {}

    @property
    def newest_lighthouse(self) -> LighthouseStarted | None:
        """The newest one that the launcher has started."""
        return self._run.lighthouse

    @property
    def ended(self) -> bool:
        """Tell whether its training is over, or being stopped: nothing that is broken now would be repaired."""
        run = self._run
        is_stopping = run.stopping is not None or run.launch_end is not None
        # Exit status 0 alone is no proof: a loader of the user's may end its process, and the others train on.
        finished = (group.state == "finished" and group.has_announced_end for group in run.groups.values())
        return is_stopping or any(finished)

    def view(self) -> View:
        """Return what faults are aimed by."""
        self._had_lighthouse = self._had_lighthouse or self._lighthouse_pid() is not None
        met = self._needs_met() | ({Need.LIGHTHOUSE} if self._had_lighthouse else set())
        replicas = sorted({*self._run.groups, *self._groups})
        num_ranks = self._num_ranks()
        groups = {replica: GroupView(replica, num_ranks, self.group(replica).up) for replica in replicas}
        return View(groups, frozenset(met))

    def _needs_met(self) -> set[Need]:
        start = self._run.worker
        if start is None or start.config is None:
            # Until the job says otherwise; an order may then find no taker.
            return {Need.AGENT, Need.CHECKPOINT, Need.KEEPER}
        told = {
            Need.AGENT: start.config.chaos,
            Need.CHECKPOINT: start.config.checkpoint,
            Need.KEEPER: self._run.launched or start.slurm is not None,
        }
        return {need for need, met in told.items() if met}

    def _num_ranks(self) -> int:
        least = self._run.num_ranks if self._run.launched else 1
        return max([least, *(rank + 1 for group in self._run.groups.values() for rank in group.ranks)])

    def everyone(self) -> list[Worker]:
        """Return all workers of the groups' newest lives."""
        return [worker for slot in self._run.groups for worker in self.group(slot).workers.values()]

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
        group = self._groups.setdefault(replica, Group(GroupFold(replica)))
        group.fold = self._run.groups.get(replica, group.fold)
        return group

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
        before = self._run.num_launches
        self._run.observe(event)
        if self._run.num_launches != before:  # a run directory may hold several launches
            self._forget()
        self._note_common_step(event)
        match event:
            case GradientExcluded():
                for slot in event.slots:
                    self._end_effects(slot, "excluded", event.time)
            case HealFinished() if event.attempt == self.group(event.replica).attempt:
                self._end_effects(event.replica, "healed", event.time)
            case FaultInjected() if event.attempt is None:
                self._note_other_runner(event)
            case StepCommitted() if event.attempt == self.group(event.replica).attempt:
                if event.digest:
                    self._compare(event.step, (event.replica, event.rank), event.digest, event.time)
                if event.rank == 0:
                    self.group(event.replica).take_commit(event)

    def _note_common_step(self, event: Event) -> None:
        run = self._run
        knows_all_groups = run.launched or run.worker is not None
        if run.commit is event and knows_all_groups and run.groups.keys() <= set(run.commit.participants):
            self.trained_together = True

    def _end_effects(self, slot: int, by: Ending, time: float) -> None:
        for effect in self.group(slot).effects:
            effect.end(by, time)

    def _compare(self, step: int, who: tuple[int, int], digest: str, time: float) -> None:
        """End the effect of a flipped bit once the group's digest equals another group's: the bit is gone."""
        digests = self._digests.setdefault(step, {})
        digests[who] = (digest, time)
        for old in sorted(self._digests)[:-_KEPT_DIGESTS]:
            del self._digests[old]
        for group in self._groups.values():
            slot = group.fold.slot
            mine, time = digests.get((slot, who[1]), ("", 0.0))
            others = [digest for (replica, rank), (digest, _) in digests.items() if replica != slot]
            for effect in group.effects:
                if mine in others and (effect.target.rank or 0) == who[1]:
                    effect.agree(step, time)

    def _note_other_runner(self, event: FaultInjected) -> None:
        """Note a fault that another runner injected; what this process injects is noted where it is done."""
        replica = event.target.replica
        if event.pid != os.getpid() and replica is not None:
            self.group(replica).is_hit_by_others = True


def _worker(start: WorkerStarted) -> Worker:
    return Worker(f"rank {start.rank} of group {start.replica}", start.pid, start.host, start.mono, start.slurm)
