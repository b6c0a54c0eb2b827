# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The state of a run by its events: `RunFold` takes each event once, in the order of reading.

That is nearly the order of time. A late line is handled where it matters (`_begin_launch`,
`_apply_commit`).

All views of a run read the fold: the outcome (`titan_ft.history.outcomes.outcome`), the failures
(`titan_ft.history.timing.incidents`), `top`, the launcher, the restart policy, and chaos. `top` and
the launcher feed a fold with each new event; `check` and `report` feed it with the whole history.

A *failure* is one of these:

- A worker of a group, or the group's agent, ends by itself. The attempt of the group ends with it.
- A group lives, but the others commit an update without it: it was silent, cut off, or fell behind
  and had to heal. An update that only leaves out the group's gradient, because the gradient is not
  finite, is no failure.
- An exchange breaks, and is repeated with the same groups.

The first two count once, from the moment at which the group drops out until it contributes again,
and once more for each further attempt that dies before that. A group that leaves because it was
asked to has not failed. An injected fault without such an effect, such as a slow rank, is a fault
and no failure.

`step` here counts updates: a step, or a round of several. `Unit.step_after` converts it to
torchtitan's step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from copy import copy
from typing import TypeVar

from titan_ft.history.fold.attempt import Attempt
from titan_ft.history.fold.checkpoints import CheckpointsFold
from titan_ft.history.fold.faults import InjectedFaults
from titan_ft.history.fold.group import (
    ALIVE,
    OVER,
    AttemptKey,
    FailureSpan,
    GroupFold,
    Reason,
    WorkerKey,
    is_of_worker,
    reason_of,
)
from titan_ft.history.fold.hosts import HostsFold
from titan_ft.history.fold.steps import CommittedSteps
from titan_ft.history.fold.unit import STEP, Unit
from titan_ft.run import events as ev

E = TypeVar("E", bound=ev.Event)


class RunFold:
    """The state of a run after the events so far; a new launch in the same folder resets it.

    Args:
        num_groups: groups that are known before the first event.

    Attributes:
        failures: of all launches, in the order in which they were noticed.
        first_ends: why attempts of all launches ended by themselves, in order of time.
        hosts: of all launches.
        num_launches: how many launches the folder holds.
        attempts: of all launches.
        faults: of all launches.
        unit: converts updates to torchtitan's steps, by the latest config of all launches.
        plan: the latest chaos plan of all launches; None without any.
        fault_seed: of the last fault that was injected before any plan; None without any.
        launch: the start of the latest launch; None for groups that were started one by one.
        num_ranks: ranks of each group; 0 without a launcher.
        step: the last update of the latest launch; None before the first.
        commit: the first event of that update.
        steps: the number of updates and of their exchanges.
        target: torchtitan's last step (`training.steps`); None if unknown.
        worker: the start of the worker that announced its config last; None before it.
        started: Unix seconds of the first event; None before it.
        last_event: Unix seconds of the last event.
        lighthouse: the start of the latest lighthouse; None before it.
        ended_workers: the workers that ended.
    """

    def __init__(self, num_groups: int = 0) -> None:
        self.failures: list[FailureSpan] = []
        self.first_ends: dict[AttemptKey, Reason] = {}
        self.hosts = HostsFold()
        self.num_launches = 0
        self.attempts: dict[AttemptKey, Attempt] = {}
        self.faults = InjectedFaults()
        self.plan: ev.ChaosStarted | None = None
        self.fault_seed: int | None = None
        self.unit: Unit = STEP
        self._reset(num_groups)

    @property
    def launched(self) -> bool:
        """True for `titan-ft launch`, False for groups that were started one by one."""
        return self.launch is not None

    def _reset(self, num_groups: int) -> None:
        self.groups = {slot: GroupFold(slot) for slot in range(num_groups)}
        self.launch: ev.LaunchStarted | None = None
        self.launch_end: ev.LaunchFinished | None = None
        self.stopping: ev.LaunchStopping | None = None
        self.num_ranks = 0
        self.step: int | None = None
        self.commit: ev.StepCommitted | None = None
        self.steps = CommittedSteps()
        self.target: int | None = None
        self.worker: ev.WorkerStarted | None = None
        self.started: float | None = None
        self.last_event = 0.0
        self.checkpoints = CheckpointsFold()
        self.lighthouse: ev.LighthouseStarted | None = None
        self.num_lighthouse_restarts = 0
        self.ended_workers: set[WorkerKey] = set()
        self._excluded: dict[int, set[int]] = defaultdict(set)
        """By update, slots of the groups whose gradients are left out."""
        self._broken: dict[int, float] = {}
        """By update that is not committed yet, Unix seconds of its first broken exchange."""

    def observe(self, event: ev.Event) -> None:
        """Take the next event."""
        # Commits are skipped here: nearly all events of a long run are commits, and they hold
        # nothing about the run, its faults or its checkpoints.
        is_commit = isinstance(event, ev.StepCommitted)
        if not is_commit:
            self._apply_run_event(event)
            self.faults.observe(event)
            self.checkpoints.observe(event)
        if self.started is None or event.time < self.started:
            self.started = event.time
        self.last_event = max(self.last_event, event.time)
        # An event of the run says nothing of a group, even if a process of a group wrote it.
        if event.replica is None or isinstance(event, ev.LaunchEvent):
            return
        if event.replica not in self.groups:
            self._add_slots([event.replica])
        key = (event.replica, event.attempt or 0)
        attempt = self.attempts.get(key)
        if attempt is None:
            attempt = Attempt(*key, begin_us=event.time_us)
            self.attempts[key] = attempt
        attempt.observe(event)
        group = self.groups[event.replica]
        if isinstance(event, ev.FaultEvent):
            self._note_agent_fault(group, event)
            return
        if isinstance(event, ev.WorkerExited):
            group.observe_exit(event)
        elif is_commit or is_of_worker(event):
            self._apply_rank_event(group, event)
        is_of_earlier_attempt = (event.attempt or 0) < group.attempt
        if not is_of_earlier_attempt:
            group.last_event = max(group.last_event, event.time)
            group.silence = None
            if isinstance(event, ev.GroupEvent):
                self._apply_agent_event(group, event)
            else:
                self._apply_worker_event(group, event)
        if isinstance(event, ev.StepCommitted) and event.rank == 0:
            self._apply_commit(event)

    def _apply_run_event(self, event: ev.Event) -> None:
        match event:
            case ev.LaunchStarted():
                self._begin_launch(event)
            case ev.LaunchStopping():
                self.stopping = event
            case ev.LaunchFinished():
                self.launch_end = event
            case ev.LighthouseStarted():
                self.lighthouse = event
            case ev.LighthouseRestarted():
                self.num_lighthouse_restarts += 1
            case ev.GroupLost() | ev.GroupBack():
                self._apply_silence(event, event.slot)
            case ev.EndedWithout():
                for slot in event.slots:
                    self._apply_silence(event, slot)
            case ev.ChaosStarted():
                self.plan = event
            case ev.FaultInjected():
                # A fault of a plan has a seed of its own, which follows from the plan's.
                if self.plan is None and event.seed is not None:
                    self.fault_seed = event.seed
                target = event.target.replica
                if target is not None and target in self.groups:
                    self.groups[target].last_fault = event
            case ev.WorkerStarted():
                self.hosts.note_start(event)
                if event.config is not None:
                    self._take_config(event)
                    self._add_slots(range(event.config.group_size))
            case ev.WorkerExited():
                self.hosts.note_exit(event)
                self.ended_workers.add((event.replica, event.rank, event.attempt, event.worker_pid))
            case ev.HostLeft():
                self.hosts.note_left(event)

    def _begin_launch(self, event: ev.LaunchStarted) -> None:
        """Take the start of a launch: it ends the launch before.

        Its line may come after later events of the same launch, as through a network file system or
        from a disk that was full. A fold that began anew then would show groups that train as not
        started, and would lose their attempts and restarts.
        """
        self.num_launches += 1
        if self.launch is not None and event.time < self.launch.time:
            return  # the late line of an earlier launch
        if self.started is None or self.last_event <= event.time:
            self._reset(event.replicas)
        elif self.started <= event.time:
            self._forget_before(event.time)
        self.launch = event
        self.num_ranks = event.ranks_per_replica
        self._add_slots(range(event.replicas))

    def _forget_before(self, since: float) -> None:
        """Forget the events before `since`, which are of an earlier launch.

        A group that has started since keeps its state; its counts may include the earlier launch.
        """
        former = copy(vars(self))
        self._reset(0)
        self.groups = {
            slot: group for slot, group in former["groups"].items() if group.began_after(since)
        }
        self.started = since
        self.last_event = former["last_event"]
        # Without these, the launcher would say that no checkpoint is complete, and would wait for
        # workers that have ended.
        self.checkpoints = former["checkpoints"]
        self.checkpoints.forget_before(since)
        self.ended_workers = former["ended_workers"]
        self.stopping = _if_after(since, former["stopping"])
        self.launch_end = _if_after(since, former["launch_end"])
        self.lighthouse = _if_after(since, former["lighthouse"])
        worker = _if_after(since, former["worker"])
        if worker is not None:
            self._take_config(worker)
        commit = _if_after(since, former["commit"])
        if commit is not None:
            self.steps.observe(commit)
            self.step = commit.step
            self.commit = commit

    def _note_agent_fault(self, group: GroupFold, event: ev.FaultEvent) -> None:
        """Note an event of the chaos agent in a worker of a group."""
        if event.rank is not None:
            group.observe_rank(event, event.rank)
        if isinstance(event, ev.FaultInjected) and event.attempt is not None:
            group.attempt_with_fault = max(event.attempt, group.attempt_with_fault or 0)

    def _take_config(self, worker: ev.WorkerStarted) -> None:
        self.worker = worker
        if worker.config is not None:
            self.target = worker.config.steps or None
            self.unit = Unit.of(worker.config)

    def _add_slots(self, slots: Iterable[int]) -> None:
        missing = set(slots) - self.groups.keys()
        if not missing:
            return
        groups = dict(self.groups)
        for slot in missing:
            groups[slot] = GroupFold(slot)
        # A new dictionary, because a view may walk through the old one.
        self.groups = dict(sorted(groups.items()))

    def _apply_silence(
        self, event: ev.GroupLost | ev.GroupBack | ev.EndedWithout, slot: int
    ) -> None:
        """Apply a report of another group about the silence of group `slot`."""
        group = self.groups.get(slot)
        if group is None:
            return
        was_silent = group.silence is not None
        group.silence = group.find_silence(event)
        last_step: int | None = None
        if isinstance(event, ev.GroupLost):
            last_step = event.last_step
        if group.silence is not None and last_step is not None:
            # The group's own event of its last update may be missing.
            group.held_step = max(group.held_step or 0, last_step)
        is_back = was_silent and isinstance(event, ev.GroupBack)
        if is_back and group.state in ("healing", "training"):
            group.state = "joined"

    def _apply_rank_event(self, group: GroupFold, event: ev.Event) -> None:
        rank = event.rank or 0
        before = group.ranks.get(rank)
        group.observe_rank(event, rank)
        if not isinstance(event, ev.WorkerStarted) or event.attempt < group.attempt:
            return
        # A trainer without this project's agent may start again under the same number.
        starts_again = False
        if before is not None and before.attempt == event.attempt:
            starts_again = before.pid != event.pid
        if starts_again:
            group.ranks = {rank: group.ranks[rank]}
        if starts_again or group.started_attempt != event.attempt:
            group.started_attempt = event.attempt
            group.num_starts += 1
            group.begin_attempt(event.attempt)
        group.last_start = event

    def _apply_agent_event(self, group: GroupFold, event: ev.GroupEvent) -> None:
        match event:
            case ev.WorkerExited():
                self._apply_exit(group, event)
            case ev.AgentEnded():
                group.is_ending = True
                group.gets_no_restart = not event.restarts
                # A worker that died before its agent is the reason.
                if group.state == "died" or group.state in OVER:
                    return
                reason = Reason(
                    event.reason,
                    group.slot,
                    attempt=event.attempt,
                    step=group.step,
                    log=event.log or "",
                    time=event.time,
                    signal=event.signal or "",
                )
                self._fail_attempt(group, event, reason)
            case ev.ReplicaRestarted():
                group.num_restarts += 1
                group.num_standby_restarts += event.standby
                group.begin_attempt(event.attempt)
            case ev.SpareTookOver():
                group.begin_attempt(event.attempt)
            case ev.ReplicaGaveUp():
                group.state = "given up"
                group.give_up = event
                group.is_ending = True
                if group.reason is None:
                    group.reason = Reason(
                        event.error or event.reason,
                        slot=group.slot,
                        rank=event.rank,
                        attempt=event.attempt,
                        step=group.step,
                        log=event.log,
                        time=event.time,
                    )
                    group.last_reason = group.reason
                self.first_ends.setdefault((group.slot, group.attempt), group.reason)

    def _apply_exit(self, group: GroupFold, event: ev.WorkerExited) -> None:
        known = group.ranks.get(event.rank)
        is_of_replaced_worker = known is not None and known.pid != event.worker_pid
        if not is_of_replaced_worker:
            group.is_ending = True
        if event.stopped:
            if group.state in ALIVE:
                group.was_stopped = True
                group.commit = None
            return
        if group.state in ("died", "given up") and event.attempt == group.attempt:
            return  # the first exit is the cause; the other workers follow
        if group.state == "left" and event.cause in (None, "SIGTERM"):
            return
        if event.cause is not None:
            self._fail_attempt(group, event, reason_of(event, group.step))
        elif event.rank == 0:
            # On a full disk, `TrainingFinished` may be missing.
            group.state = "finished"

    def _fail_attempt(self, group: GroupFold, event: ev.GroupEvent, reason: Reason) -> None:
        group.state = "died"
        group.attempt = event.attempt
        group.failed_by = event
        group.reason = reason
        group.last_reason = reason
        self.first_ends.setdefault((group.slot, event.attempt), reason)
        group.commit = None
        group.num_failed_attempts += 1
        self._drop_out(group, event.time, died=True)

    def _apply_worker_event(self, group: GroupFold, event: ev.Event) -> None:
        # These events count from any rank.
        match event:
            case ev.StepCommitted():
                if event.own_tokens > 0:
                    group.contributed = (event.attempt, event.step)
            case ev.Drained():
                # The others go on without the group as soon as one of its ranks has left.
                group.state = "left"
                group.is_ending = True
                group.leave_reason = event.reason
                group.contributes = False
            case ev.Hung() | ev.RankSilent():
                group.is_ending = True
            case ev.GradientExcluded():
                self._excluded[event.step].update(event.slots)
            case ev.ExchangeFailed():
                self._broken.setdefault(event.step + 1, event.time)
        if event.rank != 0:
            return
        match event:
            case ev.StepCommitted():
                group.step = event.step
                group.apply_progress(event)
                is_current = event.step >= (self.step or 0)
                if event.contributed and is_current and group.state == "training":
                    self._come_back(group, event)
            case ev.CheckpointLoaded():
                group.apply_progress(event, commits_after_load=self.unit.commits_after(event.step))
            case ev.Drained():
                group.held_step = event.step
            case ev.TrainingFinished() | ev.CameTooLate():
                group.state = "finished"
                group.step = event.step
                group.held_step = event.step
                group.has_announced_end = True
            case _:
                group.apply_progress(event)

    def _apply_commit(self, event: ev.StepCommitted) -> None:
        """Apply a commit of any attempt to all groups, when the first group announces it."""
        if not self.steps.observe(event):
            return
        latest = self.commit
        if latest is not None and event.step <= latest.step and event.time < latest.time:
            return  # the event waited for room on the disk, and training has gone on since
        self.step = event.step
        self.commit = event
        excluded = self._excluded.pop(event.step, set())
        broken = self._broken.pop(event.step, None)
        if self.stopping is not None:
            return  # the groups leave one after the other: none of them dropped out
        missing = []
        for other in self.groups.values():
            if other.slot in event.participants:
                other.took_part = event.step
            elif other.contributes:
                missing.append(other)
        for other in missing:
            if other.slot not in excluded:
                self._drop_out(other, event.time)
        if broken is None or missing:
            return
        # A group that fails or leaves breaks exchanges, and its failure is counted already.
        for other in self.groups.values():
            if other.is_away:
                return
        repeated = FailureSpan(
            slot=None,
            attempt=event.attempt,
            time=broken,
            since=broken,
            away=False,
            back=event.time,
        )
        self.failures.append(repeated)

    def _drop_out(self, group: GroupFold, time: float, *, died: bool = False) -> None:
        """Note a failure of a group.

        The death of a group that has dropped out alive is a part of that failure. Another death,
        such as that of the next attempt, is another failure.
        """
        group.contributes = False
        earlier = group.failure
        if earlier is not None:
            is_another_death = died and earlier.died
            if not is_another_death:
                earlier.died = earlier.died or died
                return
        since = group.last_contribution or time
        group.failure = FailureSpan(
            slot=group.slot, attempt=group.attempt, time=time, since=since, died=died
        )
        self.failures.append(group.failure)

    def _come_back(self, group: GroupFold, event: ev.StepCommitted) -> None:
        """Note that a group contributed to an update."""
        group.contributes = True
        group.last_contribution = event.time
        group.reason = None
        group.num_failed_attempts = 0
        if group.failure is not None:
            group.failure.back = event.time
            group.failure = None

    @property
    def ended(self) -> bool:
        """Whether the run is over: some groups ended or were given up, and all others are lost."""
        is_any_over = False
        for group in self.groups.values():
            if group.state in OVER:
                is_any_over = True
            elif group.silence is None:
                return False
        # Groups that are all lost may still train: nobody has seen them end.
        return is_any_over


def _if_after(since: float, event: E | None) -> E | None:
    """Return an event if it was after `since`, in Unix seconds."""
    if event is None or event.time <= since:
        return None
    return event


def fold_events(events: Iterable[ev.Event]) -> RunFold:
    """Return the fold of events that are in order of time."""
    fold = RunFold()
    for event in events:
        fold.observe(event)
    return fold
