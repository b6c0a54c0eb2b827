# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The facts of a running job that faults need: contributors, processes, and effects of faults.

A view of the fold of the job's events (`titan_ft.history.fold`). It adds one question that only
chaos asks: whether the effect of a fault on a group is over.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from titan_ft.chaos.effect import Effect
from titan_ft.chaos.processes import RunProcess, Unreachable
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
"""Number of newest steps whose digests are compared."""


class RunningGroup:
    """The facts of one group that faults need."""

    def __init__(self, fold: GroupFold) -> None:
        self.fold = fold
        self.effects: list[Effect] = []
        """Effects of faults that are not over yet."""
        self.is_hit_by_others = False
        """True if another chaos runner has hit the group since its last commit."""

    @property
    def num_starts(self) -> int:
        """Number of starts of its workers so far."""
        return self.fold.num_starts

    @property
    def attempt(self) -> int | None:
        """Number of its newest attempt; None before the first."""
        return self.fold.started_attempt

    @property
    def workers(self) -> dict[int, RunProcess]:
        """Workers of its newest attempt, by rank."""
        return {start.rank: _worker(start) for start in self.fold.workers}

    @property
    def agent(self) -> RunProcess | None:
        """The process that keeps its workers; None if that process is not titan_ft's."""
        start = self.fold.last_start
        if start is None or start.agent_pid is None:
            return None
        name = f"the agent of group {self.fold.slot}"
        return RunProcess(name, start.agent_pid, start.host, start.mono, start.slurm)

    @property
    def up(self) -> bool:
        """True if the group trains with the others, and no effect of a fault is left."""
        return self._trains and not self.effects and not self.is_hit_by_others

    @property
    def _trains(self) -> bool:
        # Without an attempt its processes are not known, and an order needs the attempt's number.
        if self.attempt is None:
            return False
        return self.fold.contributes and self.fold.state == "training" and not self.fold.is_ending

    def take_commit(self, event: StepCommitted) -> None:
        """End effects at a commit of the group's own rank 0; another group's commit proves nothing."""
        if event.contributed and self._trains:
            self.is_hit_by_others = False
            self.effects = [e for e in self.effects if not e.is_over(self.num_starts, event.time)]


class RunningJob:
    """A running job as its events show it. An event that comes twice changes nothing.

    `ChaosRunner` and `JobFollower` call it, on one thread. A new launch in the same folder starts
    it anew.

    Args:
        lighthouse_pid: returns the process of the job's lighthouse on this host; None = there is none.
    """

    def __init__(self, lighthouse_pid: Callable[[], int | None] = lambda: None) -> None:
        self._lighthouse_pid = lighthouse_pid
        self._had_lighthouse = False
        self._run = RunFold()
        self._reset()

    def _reset(self) -> None:
        self.trained_together = False
        """True once a step with all groups has been committed."""
        self._groups: dict[int, RunningGroup] = {}
        self._digests: dict[int, dict[tuple[int, int], tuple[str, float]]] = {}
        """Digest and Unix seconds by step, then by group and rank."""

    @property
    def newest_lighthouse(self) -> LighthouseStarted | None:
        return self._run.lighthouse

    @property
    def ended(self) -> bool:
        """True if training is over or being stopped. Nothing would repair a fault from then on."""
        run = self._run
        if run.stopping is not None or run.launch_end is not None:
            return True
        # Exit status 0 alone proves nothing: a user's loader may exit, and the others train on.
        return any(
            group.state == "finished" and group.has_announced_end for group in run.groups.values()
        )

    def view(self) -> View:
        """Return the view that targets are chosen from."""
        self._had_lighthouse = self._had_lighthouse or self._lighthouse_pid() is not None
        needs_met = self._needs_met()
        if self._had_lighthouse:
            needs_met.add(Need.LIGHTHOUSE)
        num_ranks = self._num_ranks()
        groups = {}
        for replica in sorted({*self._run.groups, *self._groups}):
            groups[replica] = GroupView(replica, num_ranks, self.group(replica).up)
        return View(groups, frozenset(needs_met))

    def _needs_met(self) -> set[Need]:
        start = self._run.configured_worker
        if start is None or start.config is None:
            # No worker has reported its config yet. An order may then find no agent.
            return {Need.AGENT, Need.CHECKPOINT, Need.KEEPER}
        needs_met = set()
        if start.config.chaos:
            needs_met.add(Need.AGENT)
        if start.config.checkpoint:
            needs_met.add(Need.CHECKPOINT)
        if self._run.launched or start.slurm is not None:
            needs_met.add(Need.KEEPER)
        return needs_met

    def _num_ranks(self) -> int:
        num_ranks = self._run.num_ranks if self._run.launched else 1
        for group in self._run.groups.values():
            for rank in group.ranks:
                num_ranks = max(num_ranks, rank + 1)
        return num_ranks

    def all_workers(self) -> list[RunProcess]:
        """Return the workers of the newest attempts of all groups."""
        workers: list[RunProcess] = []
        for slot in self._run.groups:
            workers.extend(self.group(slot).workers.values())
        return workers

    def find_processes(self, fault: Signal, target: Target) -> list[RunProcess]:
        """Return the known processes of a target that a fault signals.

        Raises:
            Unreachable: no process is known.
        """
        if fault.processes == "lighthouse":
            pid = self._lighthouse_pid()
            if pid is None:
                raise Unreachable("the lighthouse does not run right now")
            return [RunProcess("the lighthouse", pid, host="")]
        assert target.replica is not None, "only the lighthouse is in no group"
        group = self.group(target.replica)
        if fault.processes == "agent":
            if group.agent is None:
                raise Unreachable(f"the agent of group {target.replica} is not known")
            return [group.agent]
        workers = []
        for rank, worker in sorted(group.workers.items()):
            if target.rank is None or target.rank == rank:
                workers.append(worker)
        if not workers:
            raise Unreachable(f"no worker of group {target.replica} has said where it runs")
        return workers

    def group(self, replica: int) -> RunningGroup:
        """Return a group, also one without any event yet."""
        group = self._groups.setdefault(replica, RunningGroup(GroupFold(replica)))
        group.fold = self._run.groups.get(replica, group.fold)
        return group

    def add_effect(self, fault: Fault, shot: int, target: Target) -> Effect:
        """Record that a fault is about to hit a target. The group is not up until the effect is over."""
        if target.replica is None:
            return Effect(fault, shot, target, num_starts=0)
        group = self.group(target.replica)
        effect = Effect(fault, shot, target, group.num_starts)
        group.effects.append(effect)
        return effect

    def drop_effect(self, effect: Effect) -> None:
        """Remove the effect of a fault that did not hit its target after all."""
        if effect.target.replica is not None:
            group = self.group(effect.target.replica)
            group.effects = [other for other in group.effects if other is not effect]

    def mark_undone(self, replica: int, fault: str, shot: int | None, time: float) -> None:
        """Record that the effect of a shot on the group was undone."""
        for effect in self.group(replica).effects:
            if (effect.fault.name, effect.shot) == (fault, shot):
                effect.mark_undone(time)

    def observe(self, event: Event) -> None:
        """Take in one event. Events should come in the order of time."""
        num_launches = self._run.num_launches
        self._run.observe(event)
        if self._run.num_launches != num_launches:
            self._reset()
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
                    self._compare_digest(event, event.digest)
                if event.rank == 0:
                    self.group(event.replica).take_commit(event)

    def _note_common_step(self, event: Event) -> None:
        run = self._run
        if run.last_commit is not event:
            return
        knows_all_groups = run.launched or run.configured_worker is not None
        if knows_all_groups and run.groups.keys() <= set(run.last_commit.participants):
            self.trained_together = True

    def _end_effects(self, slot: int, by: Ending, time: float) -> None:
        for effect in self.group(slot).effects:
            effect.end(by, time)

    def _compare_digest(self, event: StepCommitted, digest: str) -> None:
        """End the effect of a flipped bit once the group's digest equals another group's."""
        digests = self._digests.setdefault(event.step, {})
        digests[event.replica, event.rank] = (digest, event.time)
        for old in sorted(self._digests)[:-_KEPT_DIGESTS]:
            del self._digests[old]
        for group in self._groups.values():
            slot = group.fold.slot
            own, time = digests.get((slot, event.rank), ("", 0.0))
            others = [other for (replica, _), (other, _) in digests.items() if replica != slot]
            if own not in others:
                continue
            for effect in group.effects:
                if (effect.target.rank or 0) == event.rank:
                    effect.mark_agreement(event.step, time)

    def _note_other_runner(self, event: FaultInjected) -> None:
        """Note a fault of another runner. This process notes its own faults when it injects them."""
        replica = event.target.replica
        if event.pid != os.getpid() and replica is not None:
            self.group(replica).is_hit_by_others = True


def _worker(start: WorkerStarted) -> RunProcess:
    name = f"rank {start.rank} of group {start.replica}"
    return RunProcess(name, start.pid, start.host, start.mono, start.slurm)
