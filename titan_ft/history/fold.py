# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The one fold of a run's events: each event once, in order of time, and what is known of the run after it.

The views of a run ask it instead of inferring by themselves: its outcome (`titan_ft.history.outcome`), its failures
(`titan_ft.history.incidents`), and the groups that are lost. The fold needs no end of the run, so a view of a run
that goes on feeds it with each new event.

A *failure* is a group that dropped out of the job's exchanges without having been asked to leave, or an exchange that
broke although no group dropped out:

- a worker of the group, or its agent, ended by itself, and with it the group's attempt;
- or the group lived and the others committed a step without it, in which it should have been: it was silent, out of
  reach, or it fell behind and had to heal. A step that leaves the group's gradient out because it is not finite is no
  such step;
- or an exchange broke and was repeated with the same groups.

Each counts once, from the moment the group drops out until it contributes again. An injected fault that does none of
this, such as one that slows a rank down, is a fault and no failure.
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
"""A group in one of these states ended in order."""
MAX_STATES_REMEMBERED = 4096
START_SECONDS = 300.0
"""A group that starts may be silent for so long: it imports, builds the model, waits for a file server."""


@dataclass(frozen=True)
class Reason:
    """Why the workers of a group, or a run, ended."""

    text: str
    """ "RuntimeError: boom", "killed by SIGKILL", "exit status 7"."""
    slot: int | None = None
    rank: int | None = None
    attempt: int | None = None
    step: int | None = None
    """The group's last committed step before; None before its first."""
    where: str = ""
    """File and line of the user's code that raised the exception, such as "mybug.py:15"; empty if unknown."""
    log: str = ""
    """Path of the rank's log, as the events name it; empty if they do not."""
    time: float = 0.0
    """Unix seconds."""
    transient: bool = False
    """Whether the same start may succeed later, or a fault was injected into the attempt."""
    exception: bool = False
    """Whether it is an exception, and no signal or exit status."""

    def describe(self) -> str:
        """Return it in one line: what, on which rank of which group, at which line."""
        place = "" if self.slot is None else f"group {self.slot}"
        if place and self.rank is not None:
            place = f"rank {self.rank} of {place}"
        return ", ".join(part for part in (self.text, place, self.where) if part)


@dataclass
class Failure:
    """A failure as the events show it; see this module."""

    slot: int | None
    """The group that dropped out; None where an exchange broke and all groups were in its repetition."""
    attempt: int
    time: float
    """Unix seconds of its first sign: an exit, a commit of the others without the group, a broken exchange."""
    since: float
    """Unix seconds of the last commit to which the group contributed before; `time` where an exchange broke."""
    died: bool = False
    """Whether a worker of the group ended by itself."""
    away: bool = True
    """Whether the group was missing from steps, or its workers ended."""
    back: float | None = None
    """Unix seconds of the commit to which it contributed again; None if it has not yet."""


@dataclass
class GroupFold:
    """What is known of one group."""

    slot: int
    state: GroupState = "not started"
    attempt: int = 0
    step: int | None = None
    """The last step, or round, that it committed, in whichever attempt."""
    took_part: int | None = None
    """The last step that a group committed with its gradients: of a group that dies, the own commit may be missing."""
    last: float = 0.0
    """Unix seconds of its last event, whoever wrote it."""
    reason: Reason | None = None
    """Why its last attempt that failed did; None once the group contributes again."""
    last_reason: Reason | None = None
    """The same, and kept when the group contributes again."""
    silence: Reason | None = None
    """What another group said last of this one, where it was not heard of; None once it is heard of again."""
    num_ends: int = 0
    """Attempts that failed since it last contributed to a step."""
    left_because: str = ""
    """Who asked it to leave."""
    contributed: float = 0.0
    """Unix seconds of the last commit to which it contributed."""
    contributes: bool = False
    """Whether it contributed to the last step that it committed, and neither ended nor dropped out since."""
    failure: Failure | None = None
    """The failure that it has not come back from yet."""


class RunFold:
    """What is known of a run; see this module. Another launch in the same folder begins it anew.

    Attributes:
        failures: of all launches, in the order in which they showed.
        step: the last commit of the latest launch: a step, or a round; None before the first.
        target: torchtitan's step that is to be the last one; None if unknown.
    """

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self._begin(0)

    def _begin(self, num_groups: int) -> None:
        self.groups = {slot: GroupFold(slot) for slot in range(num_groups)}
        self.launched = False
        self.launch_end: ev.LaunchFinished | None = None
        self.stopping: ev.LaunchStopping | None = None
        self.step: int | None = None
        self.target: int | None = None
        self.unit: Unit = STEP
        self.last = 0.0
        self._seen: dict[tuple[int, str], None] = {}
        """Commits that are known, by step and lineage: each group announces its own."""
        self._excluded: dict[int, set[int]] = defaultdict(set)
        """Groups whose gradients are left out, by step."""
        self._broken: dict[int, float] = {}
        """Unix seconds of the first broken exchange of each step that is not committed yet."""

    def observe(self, event: ev.Event) -> None:
        """Take the next event."""
        match event:
            case ev.LaunchStarted():
                self._begin(event.replicas)
                self.launched = True
            case ev.LaunchStopping():
                self.stopping = event
            case ev.LaunchFinished():
                self.launch_end = event
        self.last = max(self.last, event.time)
        if isinstance(event, ev.GroupLost | ev.GroupBack | ev.EndedWithout):
            self._take_silence(event)
        if event.replica is None or isinstance(event, ev.FaultEvent):
            return
        self._add_groups(event.replica, event)
        group = self.groups[event.replica]
        if (event.attempt or 0) < group.attempt:
            return
        group.last, group.silence = max(group.last, event.time), None
        if isinstance(event, ev.GroupEvent):
            self._take_event_of_agent(group, event)
        else:
            self._take_event_of_worker(group, event)

    def _add_groups(self, slot: int, event: ev.Event) -> None:
        """Add groups that no launcher has announced."""
        found = {slot}
        if isinstance(event, ev.WorkerStarted) and event.config is not None:
            found.update(range(event.config.group_size))
            self.target, self.unit = event.config.steps or None, Unit.of(event.config)
        for missing in sorted(found - self.groups.keys()):
            self.groups[missing] = GroupFold(missing)

    def _take_silence(self, event: ev.GroupLost | ev.GroupBack | ev.EndedWithout) -> None:
        """Take what one group says of others that it does not hear of, or hears of again."""
        for slot in event.slots if isinstance(event, ev.EndedWithout) else [event.slot]:
            group = self.groups.get(slot)
            if group is None:
                continue
            group.silence = None
            ended, starts = group.state in (*ENDED, "given up"), group.state in ("not started", "starting", "died")
            match event:
                case ev.GroupBack():
                    lost = False
                case ev.GroupLost():
                    lost = is_silent(event.time - group.last, event.seconds, ended=ended, starts=starts)
                case ev.EndedWithout():
                    lost = not ended  # whoever comes now comes too late, and says so itself
            if lost:
                text = f"not heard of for {event.seconds:.0f} s"
                group.silence = Reason(text, slot, None, group.attempt, group.step, time=event.time)

    def _take_event_of_agent(self, group: GroupFold, event: ev.GroupEvent) -> None:
        match event:
            case ev.WorkerExited():
                self._take_exit(group, event)
            case ev.AgentEnded():
                self._take_end_of_agent(group, event)
            case ev.ReplicaRestarted() | ev.SpareTookOver():
                group.state, group.attempt = "starting", event.attempt
            case ev.ReplicaGaveUp():
                group.state = "given up"
                if group.reason is None:
                    group.reason = Reason(
                        event.error or event.reason,
                        group.slot,
                        event.rank,
                        event.attempt,
                        group.step,
                        log=event.log,
                        time=event.time,
                    )

    def _take_exit(self, group: GroupFold, event: ev.WorkerExited) -> None:
        if event.stopped or group.state in ("died", "given up"):
            return
        if group.state == "left" and event.cause in (None, "SIGTERM"):
            return
        if event.cause is None:
            if event.rank == 0:  # its own last event may be missing, as on a full disk
                group.state = "finished"
            return
        self._die(group, event, reason_of(event, group.step))

    def _take_end_of_agent(self, group: GroupFold, event: ev.AgentEnded) -> None:
        """Take the death of the agent, which takes the workers along. Where they died before it, that is the reason."""
        if group.state not in ("died", "given up", *ENDED):
            log = event.log or ""
            where = (group.slot, None, event.attempt, group.step)
            self._die(group, event, Reason(event.reason, *where, log=log, time=event.time))

    def _die(self, group: GroupFold, event: ev.GroupEvent, reason: Reason) -> None:
        group.state, group.attempt = "died", event.attempt
        group.reason = group.last_reason = reason
        group.num_ends += 1
        self._drop_out(group, event.time, died=True)

    def _take_event_of_worker(self, group: GroupFold, event: ev.Event) -> None:
        if isinstance(event, ev.Drained):  # whichever rank is first: the others go on without the group
            group.state, group.left_because = "left", event.reason
            group.contributes = False
        elif isinstance(event, ev.GradientExcluded):
            self._excluded[event.step].update(event.slots)
        elif isinstance(event, ev.ExchangeFailed):
            self._broken.setdefault(event.step + 1, event.time)
        if event.rank != 0:
            return
        match event:
            case ev.WorkerStarted():
                group.state, group.attempt = "starting", event.attempt
            case ev.StepCommitted():
                group.step = event.step
                if group.state in ("not started", "starting", "training"):
                    group.state = "training"
                self._take_step(event)
            case ev.TrainingFinished() | ev.CameTooLate():
                group.state, group.step = "finished", event.step

    def _take_step(self, event: ev.StepCommitted) -> None:
        """Take a commit. The first one of a state says which groups took part, a group's own that it is back."""
        own = self.groups[event.replica]
        if event.contributed and event.step >= (self.step or 0) and own.state == "training":
            self._come_back(own, event)
        key = (event.step, event.lineage)
        if key in self._seen:
            return
        self._seen[key] = None
        if len(self._seen) > MAX_STATES_REMEMBERED:
            del self._seen[next(iter(self._seen))]
        self.step = event.step
        excluded, broken = self._excluded.pop(event.step, set()), self._broken.pop(event.step, None)
        if self.stopping is not None:
            return  # all groups leave now, one a step later than another
        for group in self.groups.values():
            if group.slot in event.participants:
                group.took_part = event.step
        missing = [g for g in self.groups.values() if g.contributes and g.slot not in event.participants]
        for group in missing:
            if group.slot not in excluded:
                self._drop_out(group, event.time)
        # An exchange breaks as well where a group dies or leaves, or where one is still away.
        explained = missing or any(group.failure or group.state in ("left", "died") for group in self.groups.values())
        if broken is not None and not explained:
            self.failures.append(Failure(None, event.attempt, broken, broken, away=False, back=event.time))

    def _drop_out(self, group: GroupFold, time: float, *, died: bool = False) -> None:
        """Note a failure of a group; one that is away already, and dies only now, has failed once."""
        group.contributes = False
        before = group.failure
        if before is not None and not (died and before.died):
            before.died = before.died or died
            return
        group.failure = Failure(group.slot, group.attempt, time, group.contributed or time, died=died)
        self.failures.append(group.failure)

    def _come_back(self, group: GroupFold, event: ev.StepCommitted) -> None:
        """Note that a group contributed to a step."""
        group.contributes, group.contributed, group.reason, group.num_ends = True, event.time, None, 0
        if group.failure is not None:
            group.failure.back, group.failure = event.time, None

    @property
    def ended(self) -> bool:
        """Whether every group ended in order, is given up, or is lost to the others that did."""
        over = {group.slot for group in self.groups.values() if group.state in (*ENDED, "given up")}
        # Somebody must have seen the end: groups that only fell silent may train on.
        return bool(over) and all(g.slot in over or g.silence is not None for g in self.groups.values())


def is_silent(quiet_seconds: float, silent_seconds: float, *, ended: bool, starts: bool) -> bool:
    """Tell whether a group is lost that another group has not heard of for `silent_seconds`.

    The survivor knows neither of an agent that restarts the group nor of an end in order. The group's own events do.

    Args:
        quiet_seconds: since the group's own last event.
        ended: whether the group's own events say that it ended.
        starts: whether it starts, or is to be started again.
    """
    if ended:
        return False
    # A group that is cut off from the lighthouse writes events, and says itself what it does.
    return quiet_seconds >= (START_SECONDS if starts else silent_seconds / 2)


def fold_events(events: Iterable[ev.Event]) -> RunFold:
    """Return the fold of events that are in order of time."""
    fold = RunFold()
    for event in events:
        fold.observe(event)
    return fold


def reason_of(event: ev.WorkerExited, step: int | None) -> Reason:
    """Return why a worker ended that ended by itself.

    Args:
        step: the last one that its group had committed.
    """
    text = event.error or (f"killed by {event.signal}" if event.signal else f"exit status {event.code}")
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
