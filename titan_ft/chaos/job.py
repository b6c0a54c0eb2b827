# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The facts of a running job that chaos needs in order to inject faults into it.

Chaos reads the events of the job, and injects faults by a schedule. `RunningJob` answers three
questions for it:

1. Which groups may be hit now? A group is *up* if it trains with the others and no *effect* of an
   earlier fault is left (`view`).
2. Which processes are they, so that a fault can send a signal to them (`find_processes`)?
3. When is the effect of a fault over? An effect begins when a fault is about to hit a group
   (`add_effect`). An event may end it, for example `HealFinished`. Then the next commit to which
   the group contributes removes it.

A *shot* is one fault of the schedule, with its number. It may hit several groups, and has an effect
on each of them. A *fold* (`titan_ft.history.fold`) is the sum of all events so far.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

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

_STEPS_WITH_DIGESTS = 8
"""Keep the digests of this many of the newest steps."""


@dataclass(frozen=True)
class _RankOfJob:
    slot: int
    rank: int


@dataclass(frozen=True)
class _Digest:
    """Digest of a rank's state after a step, in hex; `time` is in Unix seconds."""

    text: str
    time: float


class RunningGroup:
    """One group of the job: its fold, and the effects of faults on it."""

    def __init__(self, fold: GroupFold) -> None:
        self.fold = fold
        self.effects: list[Effect] = []
        """Effects of this process's faults that are not over yet."""
        self.is_hit_by_another_runner = False
        """True if another process of chaos has injected a fault here since the group's last
        commit."""

    @property
    def num_starts(self) -> int:
        """How often the group's workers were started so far."""
        return self.fold.num_starts

    @property
    def attempt(self) -> int | None:
        """Number of the latest start of the workers; None before the first."""
        return self.fold.started_attempt

    @property
    def workers(self) -> dict[int, RunProcess]:
        """Workers of the latest attempt, by rank."""
        return {start.rank: _worker(start) for start in self.fold.workers}

    @property
    def agent(self) -> RunProcess | None:
        """The process that starts the workers; None if torchrun or another program does so."""
        start = self.fold.last_start
        if start is None or start.agent_pid is None:
            return None
        name = f"the agent of group {self.fold.slot}"
        return RunProcess(name, start.agent_pid, start.host, start.mono, start.slurm)

    @property
    def up(self) -> bool:
        """True if the group trains with the others, and no effect of a fault is left."""
        return self._trains and not self.effects and not self.is_hit_by_another_runner

    @property
    def _trains(self) -> bool:
        if self.attempt is None:
            # No worker of the group has reported itself, so no process is known. A group that
            # another program started may still contribute.
            return False
        return self.fold.contributes and self.fold.state == "training" and not self.fold.is_ending

    def apply_commit(self, event: StepCommitted) -> None:
        """Remove the effects that a commit shows to be over.

        Args:
            event: written by this group's rank 0. Another group's event would not show that this
                group works.
        """
        if not event.contributed or not self._trains:
            return
        self.is_hit_by_another_runner = False
        self.effects = [
            effect for effect in self.effects if not effect.is_over(self.num_starts, event.time)
        ]


class RunningJob:
    """A running job as its events show it.

    `ChaosRunner` and `JobFollower` call all methods on one thread. They give each event to
    `observe`, and an event may come twice. A new launch in the same folder is a new job: all
    effects are forgotten.

    Args:
        find_lighthouse_pid: returns the pid of the job's lighthouse on this host; None if there is
            none now.
    """

    def __init__(self, find_lighthouse_pid: Callable[[], int | None] = lambda: None) -> None:
        self._find_lighthouse_pid = find_lighthouse_pid
        # The lighthouse may be down for a moment, because of a fault. The job has one all the same.
        self._has_seen_lighthouse = False
        self._run = RunFold()
        self._reset()

    def _reset(self) -> None:
        """Forget the former launch, except what `RunFold` keeps."""
        self.trained_together = False
        """True once a step with all groups has been committed."""
        self._groups: dict[int, RunningGroup] = {}
        self._digests_by_step: dict[int, dict[_RankOfJob, _Digest]] = {}

    @property
    def newest_lighthouse(self) -> LighthouseStarted | None:
        return self._run.lighthouse

    @property
    def ended(self) -> bool:
        """True if training is over or being stopped. Nothing would repair a fault from then on."""
        run = self._run
        if run.stopping is not None or run.launch_end is not None:
            return True
        for group in run.groups.values():
            # A worker's exit status 0 alone proves nothing: a user's loader may exit with it while
            # the other groups train on. So the group must have announced the end as well.
            if group.state == "finished" and group.has_announced_end:
                return True
        return False

    def view(self) -> View:
        """Return the facts by which the schedule chooses the targets of a shot."""
        if self._find_lighthouse_pid() is not None:
            self._has_seen_lighthouse = True
        available = self._find_available()
        if self._has_seen_lighthouse:
            available.add(Need.LIGHTHOUSE)
        num_ranks = self._num_ranks()
        groups = {}
        for replica in sorted({*self._run.groups, *self._groups}):
            groups[replica] = GroupView(replica, num_ranks, self.group(replica).up)
        return View(groups, frozenset(available))

    def _find_available(self) -> set[Need]:
        """Return the needs of faults that this job meets, without the lighthouse.

        `Need.AGENT` is the thread in each worker that injects faults, not the process that starts
        workers. `Need.KEEPER` is a program that starts that process again.
        """
        start = self._run.configured_worker
        if start is None or start.config is None:
            # No worker has reported its config yet. Assume the best: an order that finds no agent
            # is reported later.
            return {Need.AGENT, Need.CHECKPOINT, Need.KEEPER}
        available = set()
        if start.config.chaos:
            available.add(Need.AGENT)
        if start.config.checkpoint:
            available.add(Need.CHECKPOINT)
        if self._run.launched or start.slurm is not None:
            available.add(Need.KEEPER)
        return available

    def _num_ranks(self) -> int:
        """Return the number of ranks of a group, the same in all groups."""
        # Without `titan-ft launch`, no event has the number. Then it is known from the events of
        # the ranks.
        num_ranks = self._run.num_ranks if self._run.launched else 1
        for group in self._run.groups.values():
            for rank in group.ranks:
                num_ranks = max(num_ranks, rank + 1)
        return num_ranks

    def all_workers(self) -> list[RunProcess]:
        """Return the workers of the latest attempt of each group."""
        workers: list[RunProcess] = []
        for slot in self._run.groups:
            workers.extend(self.group(slot).workers.values())
        return workers

    def find_processes(self, fault: Signal, target: Target) -> list[RunProcess]:
        """Return the processes of a target to which a fault sends its signal.

        Raises:
            Unreachable: no process of the target is known.
        """
        if fault.processes == "lighthouse":
            pid = self._find_lighthouse_pid()
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
        is_whole_group = target.rank is None
        for rank, worker in sorted(group.workers.items()):
            if is_whole_group or target.rank == rank:
                workers.append(worker)
        if not workers:
            raise Unreachable(f"no worker of group {target.replica} has said where it runs")
        return workers

    def group(self, replica: int) -> RunningGroup:
        """Return a group by its slot; a group without any event yet has an empty fold."""
        group = self._groups.setdefault(replica, RunningGroup(GroupFold(replica)))
        # The run's fold creates a group's fold at its first event.
        group.fold = self._run.groups.get(replica, group.fold)
        return group

    def add_effect(self, fault: Fault, shot: int, target: Target) -> Effect:
        """Record that a fault is about to hit a target; return the effect.

        The group of the target is not up until the effect is over.

        Args:
            shot: number of the shot in the schedule.
        """
        if target.replica is None:
            # The target is the lighthouse. No group is down because of it.
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

    def mark_effect_undone(self, replica: int, fault: str, shot: int | None, time: float) -> None:
        """Record that a shot's fault in the group was undone, for example a delay of a link.

        Args:
            fault: name of the fault.
            time: Unix seconds at which the fault was undone.
        """
        for effect in self.group(replica).effects:
            if effect.fault.name == fault and effect.shot == shot:
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
            case HealFinished():
                if self._is_of_latest_attempt(event):
                    self._end_effects(event.replica, "healed", event.time)
            case FaultInjected():
                is_of_runner = event.attempt is None  # An agent in a worker reports its attempt.
                if is_of_runner:
                    self._note_fault_of_another_runner(event)
            case StepCommitted():
                if not self._is_of_latest_attempt(event):
                    return
                if event.digest:
                    self._end_flip_if_digests_agree(event, event.digest)
                if event.rank == 0:
                    self.group(event.replica).apply_commit(event)

    def _is_of_latest_attempt(self, event: HealFinished | StepCommitted) -> bool:
        """Return False for an event that is read after its group was started again."""
        return event.attempt == self.group(event.replica).attempt

    def _note_common_step(self, event: Event) -> None:
        """Note whether all groups have taken part in the step of this event."""
        run = self._run
        if run.last_commit is not event:  # The event is no commit, or one that is known already.
            return
        knows_all_groups = run.launched or run.configured_worker is not None
        if knows_all_groups and run.groups.keys() <= set(run.last_commit.participants):
            self.trained_together = True

    def _end_effects(self, slot: int, by: Ending, time: float) -> None:
        for effect in self.group(slot).effects:
            effect.end(by, time)

    def _end_flip_if_digests_agree(self, event: StepCommitted, digest: str) -> None:
        """End the effect of a flipped bit once the group's digest equals another group's.

        The fault flips a bit in one rank's state, so the digests of this rank are compared.
        """
        digests = self._digests_by_step.setdefault(event.step, {})
        digests[_RankOfJob(event.replica, event.rank)] = _Digest(digest, event.time)
        for old_step in sorted(self._digests_by_step)[:-_STEPS_WITH_DIGESTS]:
            del self._digests_by_step[old_step]
        for group in self._groups.values():
            slot = group.fold.slot
            own = digests.get(_RankOfJob(slot, event.rank))
            if own is None:
                continue
            # Ranks differ in their shards, so a digest of another rank is never equal by chance.
            others = {each.text for rank, each in digests.items() if rank.slot != slot}
            if own.text not in others:
                continue
            for effect in group.effects:
                hit_rank = effect.target.rank or 0
                if hit_rank == event.rank:
                    effect.mark_agreement(event.step, own.time)

    def _note_fault_of_another_runner(self, event: FaultInjected) -> None:
        replica = event.target.replica
        # This process has added the effects of its own faults before they were injected.
        is_own = event.pid == os.getpid()
        if not is_own and replica is not None:
            self.group(replica).is_hit_by_another_runner = True


def _worker(start: WorkerStarted) -> RunProcess:
    name = f"rank {start.rank} of group {start.replica}"
    return RunProcess(name, start.pid, start.host, start.mono, start.slurm)
