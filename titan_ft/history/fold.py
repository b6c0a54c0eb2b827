# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The state of a run by its events: `RunFold` takes each event once, in order of time.

All views of a run ask the fold: the outcome (`titan_ft.history.outcome`), the failures
(`titan_ft.history.incidents`) and the lost groups. `top` feeds a fold with each new event; `check`
and `report` feed it with the whole history.

A *failure* is one of these:

- A worker of a group, or the group's agent, ends by itself. The attempt of the group ends with it.
- A group lives, but the others commit an update without it: it was silent, cut off, or fell behind
  and had to heal. An update that only leaves out the group's gradient, because the gradient is not
  finite, is no failure.
- An exchange breaks, and is repeated with the same groups.

The first two count once, from the moment at which the group drops out until it contributes again. A
group that leaves because it was asked to has not failed. An injected fault without such an effect,
such as a slow rank, is a fault and no failure.

`step` here counts updates: a step, or a round of several. `Unit.step_after` converts it to
torchtitan's step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from titan_ft.history.unit import STEP, Unit
from titan_ft.run import events as ev

GroupState = Literal["not started", "starting", "training", "died", "given up", "left", "finished"]
ENDED: tuple[GroupState, ...] = ("left", "finished")
"""States of a group that ended in order."""
MAX_KNOWN_COMMITS = 4096
"""Commits that are remembered. All groups announce a commit within seconds."""
MAX_START_SECONDS = 300.0
"""A group that starts may be silent this long: it imports, or waits for a file server."""


@dataclass(frozen=True)
class Reason:
    """Why an attempt of a group failed, or why a run ended."""

    text: str
    """Such as "RuntimeError: boom", "killed by SIGKILL" or "exit status 7"."""
    slot: int | None = None
    rank: int | None = None
    attempt: int | None = None
    step: int | None = None
    """The last update of the group before the failure; None if it made none."""
    where: str = ""
    """Where the user's code raised the exception, as in "mybug.py:15"; empty if unknown."""
    log: str = ""
    """Path of the rank's log on the rank's host; empty if unknown."""
    time: float = 0.0
    """Unix seconds."""
    transient: bool = False
    """Whether another attempt may succeed, or chaos injected a fault into this attempt."""
    exception: bool = False
    """True for an exception, False for a signal or an exit status."""

    def describe(self) -> str:
        """Return one line: "RuntimeError: boom, rank 0 of group 1, mybug.py:15"."""
        place = "" if self.slot is None else f"group {self.slot}"
        if place and self.rank is not None:
            place = f"rank {self.rank} of {place}"
        return ", ".join(part for part in (self.text, place, self.where) if part)


@dataclass
class FailureSpan:
    """When a failure, as defined at the top of this module, began and ended; `incidents` adds its cost."""

    slot: int | None
    """The group that dropped out; None for a broken exchange."""
    attempt: int
    time: float
    """Unix seconds of the exit, the first commit without the group, or the broken exchange."""
    since: float
    """Unix seconds of the group's last contribution before; `time` for a broken exchange."""
    died: bool = False
    """Whether a worker or the agent of the group ended by itself."""
    away: bool = True
    """Whether a group dropped out; False for a broken exchange."""
    back: float | None = None
    """Unix seconds of the commit to which the group contributed again; None if it has not yet."""


@dataclass
class GroupFold:
    """The state of one group."""

    slot: int
    state: GroupState = "not started"
    attempt: int = 0
    step: int | None = None
    """The last update in the group's own events, of any attempt; None without any."""
    took_part: int | None = None
    """The last update in the events of any group that names this group as a participant.

    A group that dies may leave no event of its last update.
    """
    last_event: float = 0.0
    """Unix seconds of the last event of the group's workers, its agent or the launcher about it."""
    reason: Reason | None = None
    """Why the last attempt failed; None once the group has contributed again."""
    last_reason: Reason | None = None
    """Why the last failed attempt failed, also after the group has contributed again."""
    silence: Reason | None = None
    """The report of another group that this group is lost; None once this group is heard again."""
    num_failed_attempts: int = 0
    """Failed attempts since the group last contributed to an update."""
    has_announced_end: bool = False
    """Whether the group itself announced that the run made its last step."""
    leave_reason: str = ""
    """Who asked the group to leave, such as "SIGTERM"; empty if nobody did."""
    last_contribution: float = 0.0
    """Unix seconds of the last commit to which the group contributed; 0 without any."""
    contributes: bool = False
    """Whether the group contributed to its last update and has not ended or dropped out since."""
    failure: FailureSpan | None = None
    """The failure from which the group has not come back yet."""

    @property
    def is_away(self) -> bool:
        """Whether the group has failed and not come back, or has left."""
        return self.failure is not None or self.state in ("left", "died")


class RunFold:
    """The state of a run after the events so far; a new launch in the same folder resets it.

    Attributes:
        failures: of all launches, in the order in which they were noticed.
        step: the last update of the latest launch; None before the first.
        target: torchtitan's last step (`training.steps`); None if unknown.
        unit: converts updates to torchtitan's steps.
        last_event: Unix seconds of the last event.
        launched: True for `titan-ft launch`, False for groups that were started one by one.
    """

    def __init__(self) -> None:
        self.failures: list[FailureSpan] = []
        self._reset(0)

    def _reset(self, num_groups: int) -> None:
        self.groups = {slot: GroupFold(slot) for slot in range(num_groups)}
        self.launched = False
        self.launch_end: ev.LaunchFinished | None = None
        self.stopping: ev.LaunchStopping | None = None
        self.step: int | None = None
        self.target: int | None = None
        self.unit: Unit = STEP
        self.last_event = 0.0
        self._known_commits: dict[tuple[int, str], None] = {}
        """Step and lineage of each commit, oldest first: every group announces the same commit."""
        self._excluded: dict[int, set[int]] = defaultdict(set)
        """By update, slots of the groups whose gradients are left out."""
        self._broken: dict[int, float] = {}
        """By update that is not committed yet, Unix seconds of its first broken exchange."""

    def observe(self, event: ev.Event) -> None:
        """Take the next event."""
        match event:
            case ev.LaunchStarted():
                self._reset(event.replicas)
                self.launched = True
            case ev.LaunchStopping():
                self.stopping = event
            case ev.LaunchFinished():
                self.launch_end = event
            case ev.GroupLost() | ev.GroupBack():
                self._apply_silence(event, event.slot)
            case ev.EndedWithout():
                for slot in event.slots:
                    self._apply_silence(event, slot)
        self.last_event = max(self.last_event, event.time)
        if event.replica is None or isinstance(event, ev.FaultEvent):
            return
        self._add_groups(event.replica, event)
        group = self.groups[event.replica]
        is_of_earlier_attempt = (event.attempt or 0) < group.attempt
        if is_of_earlier_attempt:
            return
        group.last_event = max(group.last_event, event.time)
        group.silence = None
        if isinstance(event, ev.GroupEvent):
            self._apply_agent_event(group, event)
        else:
            self._apply_worker_event(group, event)

    def _add_groups(self, slot: int, event: ev.Event) -> None:
        """Add the groups of a run that no launcher announced."""
        slots = {slot}
        if isinstance(event, ev.WorkerStarted) and event.config is not None:
            slots.update(range(event.config.group_size))
            self.target = event.config.steps or None
            self.unit = Unit.of(event.config)
        for missing in sorted(slots - self.groups.keys()):
            self.groups[missing] = GroupFold(missing)

    def _apply_silence(self, event: ev.GroupLost | ev.GroupBack | ev.EndedWithout, slot: int) -> None:
        """Apply a report of another group about the silence of group `slot`."""
        group = self.groups.get(slot)
        if group is None:
            return
        group.silence = None
        is_over = group.state in (*ENDED, "given up")
        match event:
            case ev.GroupBack():
                return
            case ev.GroupLost():
                starts = group.state in ("not started", "starting", "died")
                quiet = event.time - group.last_event
                is_lost = is_silent(quiet, event.seconds, ended=is_over, starts=starts)
            case ev.EndedWithout():
                # Even a group that starts right now is too late to finish with the others.
                is_lost = not is_over
        if is_lost:
            text = f"not heard of for {event.seconds:.0f} s"
            group.silence = Reason(text, slot, attempt=group.attempt, step=group.step, time=event.time)

    def _apply_agent_event(self, group: GroupFold, event: ev.GroupEvent) -> None:
        match event:
            case ev.WorkerExited():
                self._apply_exit(group, event)
            case ev.AgentEnded():
                # A worker that died before its agent is the reason.
                if group.state in ("died", "given up", *ENDED):
                    return
                reason = Reason(
                    event.reason,
                    group.slot,
                    attempt=event.attempt,
                    step=group.step,
                    log=event.log or "",
                    time=event.time,
                )
                self._fail_attempt(group, event, reason)
            case ev.ReplicaRestarted() | ev.SpareTookOver():
                group.state = "starting"
                group.attempt = event.attempt
            case ev.ReplicaGaveUp():
                group.state = "given up"
                if group.reason is None:
                    group.reason = group.last_reason = Reason(
                        event.error or event.reason,
                        group.slot,
                        event.rank,
                        event.attempt,
                        group.step,
                        log=event.log,
                        time=event.time,
                    )

    def _apply_exit(self, group: GroupFold, event: ev.WorkerExited) -> None:
        if event.stopped:
            return
        if group.state in ("died", "given up"):
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
        group.reason = reason
        group.last_reason = reason
        group.num_failed_attempts += 1
        self._drop_out(group, event.time, died=True)

    def _apply_worker_event(self, group: GroupFold, event: ev.Event) -> None:
        # These events count from any rank.
        match event:
            case ev.Drained():
                # The others go on without the group as soon as one of its ranks has left.
                group.state = "left"
                group.leave_reason = event.reason
                group.contributes = False
            case ev.GradientExcluded():
                self._excluded[event.step].update(event.slots)
            case ev.ExchangeFailed():
                self._broken.setdefault(event.step + 1, event.time)
        if event.rank != 0:
            return
        match event:
            case ev.WorkerStarted():
                group.state = "starting"
                group.attempt = event.attempt
            case ev.StepCommitted():
                group.step = event.step
                if group.state in ("not started", "starting", "training"):
                    group.state = "training"
                self._apply_commit(group, event)
            case ev.TrainingFinished() | ev.CameTooLate():
                group.state = "finished"
                group.step = event.step
                group.has_announced_end = True

    def _apply_commit(self, group: GroupFold, event: ev.StepCommitted) -> None:
        """Apply a commit that `group` announces."""
        is_current = event.step >= (self.step or 0)
        if event.contributed and is_current and group.state == "training":
            self._come_back(group, event)
        if self._is_known(event):
            return
        self.step = event.step
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
        # A group that fails or leaves breaks exchanges, and its failure is counted already.
        is_explained = bool(missing) or any(other.is_away for other in self.groups.values())
        if broken is not None and not is_explained:
            self.failures.append(FailureSpan(None, event.attempt, broken, broken, away=False, back=event.time))

    def _is_known(self, event: ev.StepCommitted) -> bool:
        """Return whether another group announced this commit before; note it if not."""
        key = (event.step, event.lineage)
        if key in self._known_commits:
            return True
        self._known_commits[key] = None
        if len(self._known_commits) > MAX_KNOWN_COMMITS:
            oldest = next(iter(self._known_commits))
            del self._known_commits[oldest]
        return False

    def _drop_out(self, group: GroupFold, time: float, *, died: bool = False) -> None:
        """Note a failure of a group.

        The death of a group that has dropped out alive is a part of that failure. Another death,
        such as that of the next attempt, is another failure.
        """
        group.contributes = False
        earlier = group.failure
        is_another_death = earlier is not None and died and earlier.died
        if earlier is not None and not is_another_death:
            earlier.died = earlier.died or died
            return
        since = group.last_contribution or time
        group.failure = FailureSpan(group.slot, group.attempt, time, since, died=died)
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
            if group.state in (*ENDED, "given up"):
                is_any_over = True
            elif group.silence is None:
                return False
        # Groups that are all lost may still train: nobody has seen them end.
        return is_any_over


def is_silent(quiet_seconds: float, silent_seconds: float, *, ended: bool, starts: bool) -> bool:
    """Return whether a group is lost that another group reports as silent.

    The other group does not know whether an agent restarts the silent group, or whether it ended in
    order. The silent group's own events say so.

    Args:
        quiet_seconds: seconds from the last event of the silent group to the report.
        silent_seconds: seconds of silence by the report.
        ended: whether the silent group ended, by its own events.
        starts: whether the silent group starts, or is to be started again, by its own events.
    """
    if ended:
        return False
    if starts:
        return quiet_seconds >= MAX_START_SECONDS
    # A group that is cut off from the lighthouse, but still writes events, is not lost.
    return quiet_seconds >= silent_seconds / 2


def fold_events(events: Iterable[ev.Event]) -> RunFold:
    """Return the fold of events that are in order of time."""
    fold = RunFold()
    for event in events:
        fold.observe(event)
    return fold


def reason_of(event: ev.WorkerExited, step: int | None) -> Reason:
    """Return why a worker ended that nobody stopped.

    Args:
        step: the last update of the worker's group.
    """
    if event.error:
        text = event.error
    elif event.signal:
        text = f"killed by {event.signal}"
    else:
        text = f"exit status {event.code}"
    return Reason(
        text,
        event.replica,
        event.rank,
        event.attempt,
        step,
        where=event.where or "",
        log=event.log or "",
        time=event.time,
        transient=bool(event.transient),
        exception=event.error is not None,
    )
