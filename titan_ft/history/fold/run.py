# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`RunFold`: the state of a run, computed from its events, one event after the other.

The processes of a run write events to files, and nobody keeps the state of the whole run. `RunFold`
computes it: groups, attempts, failures, the last update, faults, checkpoints. A fold reads no files
and no clock. Its caller feeds it with events, from one thread:

- `top`, the launcher, the restart policy and chaos feed a fold with each new event of a live run.
- `check` and `report` feed a fold with the whole history, in order of time.

All of them get the failures and the outcome of the run from the fold, so that they agree. Live
callers read one file after the other, so events arrive nearly in order of time. A late event
matters in two cases: the start of a launch (`_begin_launch`) and a commit (`_apply_commit`).

Terms:

- An *update* is one committed optimizer step of the job. With a semi-synchronous method it is the
  end of a round of several local steps. `step` of an event counts updates; `Unit.step_after`
  converts this number to torchtitan's step.
- An *attempt* is one start of a group's processes.
- A group *contributes* to an update if the update contains the group's gradients.

A *failure* is one of these:

1. A worker of a group, or the group's agent, ends without being asked to. The attempt ends with it.
2. A group lives, but the others commit an update without it: it was silent or cut off, or its state
   was behind. An update that only leaves out the group's gradient, because the gradient is not
   finite, is no failure.
3. An exchange breaks, and is repeated with the same groups.

Failures 1 and 2 last until the group contributes again. A group that drops out alive and then dies
has one failure. Each further attempt that dies before the group contributes is one more failure. A
group that leaves because it was asked to has not failed. An injected fault without such an effect,
such as a slow rank, is a fault and no failure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
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
    """The state of a run after the events so far.

    Several launches may write to the same folder, one after the other: a run, and its resumes.

    Args:
        num_groups: groups 0 to `num_groups` - 1 are part of the run before they have any event.

    Attributes of all launches:
        failures: in the order in which they were noticed.
        first_reasons: for each attempt that failed, the first reason, in order of time.
        hosts: the hosts, with their starts and deaths of workers.
        num_launches: how many launches the folder holds.
        attempts: every attempt of every group.
        faults: the injected faults.
        unit: converts updates to torchtitan's steps, by the latest config.
        plan: the start of the latest chaos plan; None without any.
        fault_seed: seed of the last fault that was injected before any plan; None without any.

    Attributes of the latest launch; a new launch resets them:
        groups: the state of each group, by slot.
        launch: the event of its start; None for groups that were started one by one.
        launch_end: the event of its end; None before it.
        stopping: the request to stop; None without one.
        num_ranks: ranks of each group; 0 without a launcher.
        step: number of the last update; None before the first.
        last_commit: the first event of that update; every group reports the update.
        steps: counts the updates and their exchanges.
        target_step: torchtitan's last step (`training.steps`); None if unknown.
        configured_worker: the start of the worker that reported its config last; None before it.
        first_event_time: Unix seconds of the first event; None before it.
        last_event_time: Unix seconds of the last event; 0 before it.
        checkpoints: the checkpoints that a resume can load.
        lighthouse: the start of the latest lighthouse; None before it.
        num_lighthouse_restarts: how often a lighthouse was started again.
        ended_workers: the workers that ended.
    """

    def __init__(self, num_groups: int = 0) -> None:
        self.failures: list[FailureSpan] = []
        self.first_reasons: dict[AttemptKey, Reason] = {}
        self.hosts = HostsFold()
        self.num_launches = 0
        self.attempts: dict[AttemptKey, Attempt] = {}
        self.faults = InjectedFaults()
        self.plan: ev.ChaosStarted | None = None
        self.fault_seed: int | None = None
        self.unit: Unit = STEP
        self._reset_launch(num_groups)

    @property
    def launched(self) -> bool:
        """True for `titan-ft launch`, False for groups that were started one by one."""
        return self.launch is not None

    def _reset_launch(self, num_groups: int) -> None:
        self.groups = {slot: GroupFold(slot) for slot in range(num_groups)}
        self.launch: ev.LaunchStarted | None = None
        self.launch_end: ev.LaunchFinished | None = None
        self.stopping: ev.LaunchStopping | None = None
        self.num_ranks = 0
        self.step: int | None = None
        self.last_commit: ev.StepCommitted | None = None
        self.steps = CommittedSteps()
        self.target_step: int | None = None
        self.configured_worker: ev.WorkerStarted | None = None
        self.first_event_time: float | None = None
        self.last_event_time = 0.0
        self.checkpoints = CheckpointsFold()
        self.lighthouse: ev.LighthouseStarted | None = None
        self.num_lighthouse_restarts = 0
        self.ended_workers: set[WorkerKey] = set()
        self._excluded: dict[int, set[int]] = defaultdict(set)
        """By update, slots of the groups whose gradients the update leaves out."""
        self._broken_since: dict[int, float] = {}
        """By update that is not committed yet, Unix seconds of its first broken exchange."""

    def observe(self, event: ev.Event) -> None:
        """Take the next event."""
        # Nearly all events of a long run are commits, and a commit holds nothing about the launch,
        # its faults or its checkpoints. Skipping commits here makes a long history fast to read.
        is_commit = isinstance(event, ev.StepCommitted)
        if not is_commit:
            self._apply_run_event(event)
            self.faults.observe(event)
            self.checkpoints.observe(event)
        if self.first_event_time is None or event.time < self.first_event_time:
            self.first_event_time = event.time
        self.last_event_time = max(self.last_event_time, event.time)
        # A `LaunchEvent` is about the whole run, even if a process of a group wrote it.
        if event.replica is None or isinstance(event, ev.LaunchEvent):
            return
        if event.replica not in self.groups:
            self._add_slots([event.replica])
        attempt_number = event.attempt or 0
        self._observe_attempt(event, event.replica, attempt_number)
        group = self.groups[event.replica]
        # The chaos agent of a worker writes fault events. They say nothing of the group's progress.
        if isinstance(event, ev.FaultEvent):
            self._note_fault_in_worker(group, event)
            return
        if isinstance(event, ev.WorkerExited):
            group.observe_exit(event)
        elif is_commit or is_of_worker(event):  # `is_commit` is the fast answer for most events
            self._apply_rank_event(group, event)
        # A late event of an earlier attempt must not change the state of the present attempt.
        if attempt_number >= group.attempt:
            group.last_event_time = max(group.last_event_time, event.time)
            group.silence = None  # the group has been heard again
            if isinstance(event, ev.GroupEvent):
                self._apply_agent_event(group, event)
            else:
                self._apply_worker_event(group, event)
        # A commit counts for the run from any attempt.
        if isinstance(event, ev.StepCommitted) and event.rank == 0:
            self._apply_commit(event)

    def _observe_attempt(self, event: ev.Event, slot: int, number: int) -> None:
        attempt = self.attempts.get((slot, number))
        if attempt is None:
            attempt = Attempt(slot, number, begin_us=event.time_us)
            self.attempts[slot, number] = attempt
        attempt.observe(event)

    def _apply_run_event(self, event: ev.Event) -> None:
        """Apply an event to the state of the run as a whole; most events have no effect here."""
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
                self._apply_report_of_peer(event, event.slot)
            case ev.EndedWithout():
                for slot in event.slots:
                    self._apply_report_of_peer(event, slot)
            case ev.ChaosStarted():
                self.plan = event
            case ev.FaultInjected():
                # With a plan, the plan's seed determines the seeds of all its faults.
                if self.plan is None and event.seed is not None:
                    self.fault_seed = event.seed
                target = event.target.replica
                if target is not None and target in self.groups:
                    self.groups[target].last_fault = event
            case ev.WorkerStarted():
                self.hosts.note_start(event)
                if event.config is not None:
                    self._take_config(event, event.config)
                    self._add_slots(range(event.config.group_size))
            case ev.WorkerExited():
                self.hosts.note_exit(event)
                self.ended_workers.add((event.replica, event.rank, event.attempt, event.worker_pid))
            case ev.HostLeft():
                self.hosts.note_left(event)

    def _begin_launch(self, event: ev.LaunchStarted) -> None:
        """Take the start of a launch, which ends the launch before.

        Its event may be read after later events of the same launch, as through a network file
        system or from a disk that was full. If the fold forgot these later events, it would show
        groups that train as not started, and would lose their attempts and restarts.
        """
        self.num_launches += 1
        if self.launch is not None and event.time < self.launch.time:
            return  # the late event of an earlier launch
        if self.first_event_time is None or self.last_event_time <= event.time:
            # In time: all events so far are of earlier launches.
            self._reset_launch(event.replicas)
        elif self.first_event_time <= event.time:
            # Late, and some events are of an earlier launch.
            self._forget_before(event.time)
        # Otherwise the event is late, and all events so far are of this launch: keep everything.
        self.launch = event
        self.num_ranks = event.ranks_per_replica
        self._add_slots(range(event.replicas))

    def _forget_before(self, since: float) -> None:
        """Forget the events before `since` (Unix seconds), which are of an earlier launch.

        A group that has started since keeps its state; its counts may include the earlier launch.
        """
        groups = self.groups
        checkpoints = self.checkpoints
        ended_workers = self.ended_workers
        last_event_time = self.last_event_time
        stopping = _if_after(since, self.stopping)
        launch_end = _if_after(since, self.launch_end)
        lighthouse = _if_after(since, self.lighthouse)
        worker = _if_after(since, self.configured_worker)
        commit = _if_after(since, self.last_commit)
        self._reset_launch(0)
        for slot, group in groups.items():
            if group.began_after(since):
                self.groups[slot] = group
        self.first_event_time = since
        self.last_event_time = last_event_time
        # Without the checkpoints, the launcher would say that no checkpoint is complete.
        self.checkpoints = checkpoints
        self.checkpoints.forget_before(since)
        # Without the ended workers, the launcher would wait for workers that have ended.
        self.ended_workers = ended_workers
        self.stopping = stopping
        self.launch_end = launch_end
        self.lighthouse = lighthouse
        if worker is not None and worker.config is not None:
            self._take_config(worker, worker.config)
        if commit is not None:
            self.steps.observe(commit)
            self.step = commit.step
            self.last_commit = commit

    def _note_fault_in_worker(self, group: GroupFold, event: ev.FaultEvent) -> None:
        """Note an event that the chaos agent in a worker of a group wrote."""
        if event.rank is not None:
            group.observe_rank(event, event.rank)
        if isinstance(event, ev.FaultInjected) and event.attempt is not None:
            group.attempt_with_fault = max(event.attempt, group.attempt_with_fault or 0)

    def _take_config(self, worker: ev.WorkerStarted, config: ev.WorkerConfig) -> None:
        self.configured_worker = worker
        self.unit = Unit.of(config)
        self.target_step = config.steps or None  # 0 if unknown

    def _add_slots(self, slots: Iterable[int]) -> None:
        missing = set(slots) - self.groups.keys()
        if not missing:
            return
        groups = dict(self.groups)
        for slot in missing:
            groups[slot] = GroupFold(slot)
        # A new dictionary, because a caller may be walking through the old one.
        self.groups = dict(sorted(groups.items()))

    def _apply_report_of_peer(
        self, event: ev.GroupLost | ev.GroupBack | ev.EndedWithout, slot: int
    ) -> None:
        """Apply the report of another group that group `slot` is silent, or is back."""
        group = self.groups.get(slot)
        if group is None:
            return
        was_silent = group.silence is not None
        group.silence = group.find_silence(event)
        if isinstance(event, ev.GroupBack):
            # The others have gone on meanwhile: the group has to meet them again.
            if was_silent and group.state in ("healing", "training"):
                group.state = "joined"
            return
        if group.silence is None or not isinstance(event, ev.GroupLost):
            return
        if event.last_step is not None:
            # The group's own event of its last update may be missing.
            group.held_step = max(group.held_step or 0, event.last_step)

    def _apply_rank_event(self, group: GroupFold, event: ev.Event) -> None:
        """Apply an event of a worker to its rank; the start of a worker may begin an attempt."""
        rank = event.rank or 0
        before = group.ranks.get(rank)
        group.observe_rank(event, rank)
        if not isinstance(event, ev.WorkerStarted) or event.attempt < group.attempt:
            return
        is_new_attempt = group.started_attempt != event.attempt
        # The agent of a group numbers the attempts. A worker that was started without an agent,
        # such as by hand, starts again under the same number with another process id.
        is_second_start = False
        if before is not None and before.attempt == event.attempt:
            is_second_start = before.pid != event.pid
        if is_second_start:
            # The other ranks are those of the ended processes.
            group.ranks = {rank: group.ranks[rank]}
        if is_new_attempt or is_second_start:
            group.started_attempt = event.attempt
            group.num_starts += 1
            group.begin_attempt(event.attempt)
        group.last_start = event

    def _apply_agent_event(self, group: GroupFold, event: ev.GroupEvent) -> None:
        """Apply an event of the group's agent, or of the launcher about the group."""
        match event:
            case ev.WorkerExited():
                self._apply_exit(group, event)
            case ev.AgentEnded():
                group.is_ending = True
                group.gets_no_restart = not event.restarts
                # If a worker died before its agent, the worker's death is the reason.
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
                self._note_first_reason(group.slot, group.attempt, group.reason)

    def _apply_exit(self, group: GroupFold, event: ev.WorkerExited) -> None:
        """Apply the end of a worker to the state of its group."""
        known = group.ranks.get(event.rank)
        # The agent may report the end of a process after its successor has started.
        is_of_replaced_worker = known is not None and known.pid != event.worker_pid
        if not is_of_replaced_worker:
            group.is_ending = True
        if event.stopped:
            if group.state in ALIVE:
                group.was_stopped = True
                group.commit = None
            return
        has_failed_before = group.state in ("died", "given up")
        if has_failed_before and event.attempt == group.attempt:
            return  # the first exit is the cause; the other workers follow
        ended_as_asked = event.cause is None or event.cause == "SIGTERM"
        if group.state == "left" and ended_as_asked:
            return
        if event.cause is not None:
            self._fail_attempt(group, event, reason_of(event, group.step))
        elif event.rank == 0:
            # Exit status 0. On a full disk the worker's own `TrainingFinished` may be missing.
            group.state = "finished"

    def _fail_attempt(self, group: GroupFold, event: ev.GroupEvent, reason: Reason) -> None:
        """Note that an attempt of a group failed."""
        group.state = "died"
        group.attempt = event.attempt
        group.failed_by = event
        group.reason = reason
        group.last_reason = reason
        self._note_first_reason(group.slot, event.attempt, reason)
        group.commit = None
        group.num_failed_attempts += 1
        self._drop_out(group, event.time, died=True)

    def _note_first_reason(self, slot: int, attempt: int, reason: Reason) -> None:
        # Later reasons are consequences, such as that the agent gives the group up.
        self.first_reasons.setdefault((slot, attempt), reason)

    def _apply_worker_event(self, group: GroupFold, event: ev.Event) -> None:
        """Apply an event of a worker to the state of its group."""
        # One rank is enough for these events: the other ranks may have died, or report later.
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
                # `step` of this event is the last update; the exchange was for the next one.
                next_update = event.step + 1
                self._broken_since.setdefault(next_update, event.time)
        # Rank 0 reports the progress of its group.
        if event.rank != 0:
            return
        match event:
            case ev.StepCommitted():
                group.step = event.step
                group.apply_progress(event)
                # A late event of an earlier update is no return.
                is_latest_update = self.step is None or event.step >= self.step
                if event.contributed and is_latest_update and group.state == "training":
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
        """Apply a commit to all groups. Each group reports each update: the first report counts."""
        is_first_report = self.steps.observe(event)
        if not is_first_report or self._is_overtaken(event):
            return
        self.step = event.step
        self.last_commit = event
        excluded = self._excluded.pop(event.step, set())
        broken_since = self._broken_since.pop(event.step, None)
        if self.stopping is not None:
            return  # the groups leave one after the other: none of them dropped out
        missing = []
        for other in self.groups.values():
            if other.slot in event.participants:
                other.took_part = event.step
            elif other.contributes:
                missing.append(other)
        for other in missing:
            # A group whose gradient was left out takes part again in the next update.
            if other.slot not in excluded:
                self._drop_out(other, event.time)
        if broken_since is None or missing:
            return
        # A group that fails or leaves breaks exchanges, and its failure is counted already.
        for other in self.groups.values():
            if other.is_away:
                return
        repeated_exchange = FailureSpan(
            slot=None,
            attempt=event.attempt,
            time=broken_since,
            since=broken_since,
            away=False,
            back=event.time,
        )
        self.failures.append(repeated_exchange)

    def _is_overtaken(self, event: ev.StepCommitted) -> bool:
        """Return whether an event waited for room on the disk while training went on."""
        latest = self.last_commit
        if latest is None:
            return False
        return event.step <= latest.step and event.time < latest.time

    def _drop_out(self, group: GroupFold, time: float, *, died: bool = False) -> None:
        """Note a failure of a group at `time`, in Unix seconds."""
        group.contributes = False
        earlier = group.failure
        if earlier is not None:
            if not died:
                return
            if not earlier.died:
                # The group had dropped out alive: its death is a part of that failure.
                earlier.died = True
                return
            # Each attempt that dies is a failure of its own.
        since = time
        if group.last_contribution > 0:
            since = group.last_contribution
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
        """Whether the run is over: at least one group ended or was given up, and all the others did
        as well or are silent.
        """
        is_any_over = False
        for group in self.groups.values():
            if group.state in OVER:
                is_any_over = True
            elif group.silence is None:
                return False
        # If all groups are only silent, they may still train: nobody has seen them end.
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
