# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`GroupFold`: the state of one group by its events, its ranks, and the reason of its failures.

`RunFold` (`titan_ft.history.fold.run`) makes one for each group. It feeds the group with events and
sets the fields that depend on other groups.

| state | meaning |
| --- | --- |
| not started | no event of the group has come yet |
| starting | the processes of an attempt start |
| joined | the group has met the others, and makes no step yet |
| healing | it fetches the state of the job from another group |
| training | it has committed a step |
| died | an attempt failed; an agent may start another one |
| given up | no agent starts it again |
| left | it left because somebody asked |
| finished | it made the last step |

An *attempt* is one start of the group's processes. An *agent* is the process that starts, watches
and restarts them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from titan_ft.run import events as ev
from titan_ft.run.error_file import kind_of

GroupState = Literal[
    "not started",
    "starting",
    "joined",
    "healing",
    "training",
    "died",
    "given up",
    "left",
    "finished",
]
ENDED: tuple[GroupState, ...] = ("left", "finished")
"""States of a group that ended in order."""
OVER: tuple[GroupState, ...] = (*ENDED, "given up")
"""States in which a group is not started again."""
ALIVE: tuple[GroupState, ...] = ("not started", "starting", "joined", "healing", "training")
"""States in which rank 0 may still report progress."""
AttemptKey = tuple[int, int]
"""Slot of a group, and number of its attempt."""
WorkerKey = tuple[int, int, int, int]
"""Slot, rank, attempt and pid of a worker."""
MAX_START_SECONDS = 300.0
"""A group that starts may be silent for so long, because it imports or waits for a file server."""


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
    signal: str = ""
    """Name of the signal that ended the process; empty without one."""

    def describe(self) -> str:
        """Return one line: "RuntimeError: boom, rank 0 of group 1, mybug.py:15"."""
        place = ""
        if self.slot is not None:
            place = f"group {self.slot}"
            if self.rank is not None:
                place = f"rank {self.rank} of {place}"
        return ", ".join(part for part in (self.text, place, self.where) if part)


def group_alike(reasons: Iterable[Reason]) -> dict[str, list[Reason]]:
    """Return lists of reasons whose texts differ only in numbers, in the order of the reasons.

    The key of a list is the text without its numbers (`kind_of`).
    """
    alike: dict[str, list[Reason]] = defaultdict(list)
    for reason in reasons:
        alike[kind_of(reason.text)].append(reason)
    return alike


@dataclass
class FailureSpan:
    """Begin and end of a failure, as defined in `titan_ft.history.fold.run`.

    `titan_ft.history.timing.incidents` adds the cost of the failure.
    """

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
class RankFold:
    """One rank of a group, in the latest of its attempts that has events of this rank."""

    rank: int
    attempt: int
    pid: int
    last: ev.Event
    """The rank's last event."""
    started: ev.WorkerStarted | None = None
    """The event of the start: host, agent and config of the worker; None if it is missing."""
    step: int | None = None
    """The last update that the rank committed in this attempt."""
    memory_bytes: int | None = None
    ended: str = ""
    """The cause of the worker's end; empty while the worker lives."""

    @property
    def host(self) -> str:
        """The name of the host, Slurm's if it has one; empty if unknown."""
        if self.started is None:
            return ""
        return self.started.node


@dataclass
class GroupFold:
    """The state of one group."""

    slot: int
    state: GroupState = "not started"
    attempt: int = 0
    started_attempt: int | None = None
    """The attempt of the workers that were seen to start last; None before the first."""
    num_starts: int = 0
    """How often the workers were seen to start."""
    last_start: ev.WorkerStarted | None = None
    """The start of the worker that started last; None before the first."""
    num_standby_restarts: int = 0
    """How many of the restarts were forks, which had everything imported."""
    num_restarts: int = 0
    """How often an agent or the launcher started the group again."""
    ranks: dict[int, RankFold] = field(default_factory=dict)
    host: str = ""
    """The host on which rank 0 started last; empty if unknown."""
    last_event_time: float = 0.0
    """Unix seconds of the last event of the group's workers, its agent or the launcher about it."""

    # Progress

    step: int | None = None
    """The last update in the group's own events, of any attempt; None without any."""
    took_part: int | None = None
    """The last update in the events of any group that names this group as a participant.

    A group that dies may leave no event of its last update.
    """
    contributed: tuple[int, int] | None = None
    """Attempt and number of the last update that trained tokens of this group; None without any."""
    held_step: int | None = None
    """The update whose state this attempt holds: made, fetched or loaded; None before that."""
    commit: ev.StepCommitted | None = None
    """The last commit of this attempt while the attempt lives; None before it."""
    participants: tuple[int, ...] = ()
    """The groups of that commit, or of the quorum joined last."""
    waited: ev.Waited | None = None
    """The group with the longest wait for that commit; with 0 s, the group that the step under way
    needs.
    """
    donor: int | None = None
    """The group from which this attempt fetched the state last, or fetches it."""
    last_contribution: float = 0.0
    """Unix seconds of the last commit to which the group contributed; 0 without any."""
    contributes: bool = False
    """Whether the group contributed to its last update and has not ended or dropped out since."""

    # Failures and ends

    reason: Reason | None = None
    """Why the last attempt failed; None once the group has contributed again."""
    last_reason: Reason | None = None
    """Why the last failed attempt failed, also after the group has contributed again."""
    silence: Reason | None = None
    """The report of another group that this group is lost; None once this group is heard again."""
    failure: FailureSpan | None = None
    """The failure from which the group has not come back yet."""
    failed_by: ev.GroupEvent | None = None
    """The end of a worker, or of the agent, that ended the last failed attempt; None if no attempt
    failed.
    """
    give_up: ev.ReplicaGaveUp | None = None
    """Why the group was given up last; None if it never was."""
    num_failed_attempts: int = 0
    """Failed attempts since the group last contributed to an update."""
    gets_no_restart: bool = False
    """Whether the agent of the group has died and no other agent follows."""
    was_stopped: bool = False
    """Whether the agent ended the workers of this attempt, and no worker had failed before."""
    is_ending: bool = False
    """Whether a worker of this attempt has ended, hangs or leaves: the attempt is over, or about to
    be.
    """
    has_announced_end: bool = False
    """Whether the group itself announced that the run made its last step."""
    leave_reason: str = ""
    """The request to leave, such as "SIGTERM"; empty without one."""
    last_fault: ev.FaultInjected | None = None
    """The fault that was injected into the group last."""
    attempt_with_fault: int | None = None
    """The last attempt in whose workers chaos injected a fault."""

    @property
    def is_away(self) -> bool:
        """Whether the group has failed and not come back, or has left."""
        return self.failure is not None or self.state in ("left", "died")

    @property
    def workers(self) -> list[ev.WorkerStarted]:
        """The starts of the workers of the attempt that started last, by rank."""
        workers = []
        for _, rank in sorted(self.ranks.items()):
            if rank.attempt == self.started_attempt and rank.started is not None:
                workers.append(rank.started)
        return workers

    def began_after(self, time: float) -> bool:
        """Return whether the workers were seen to start last after a time in Unix seconds."""
        return self.last_start is not None and self.last_start.time > time

    def begin_attempt(self, attempt: int) -> None:
        """Note the start of an attempt, which holds no state yet."""
        self.state = "starting"
        self.attempt = attempt
        self.held_step = None
        self.commit = None
        self.participants = ()
        self.waited = None
        self.donor = None
        self.gets_no_restart = False
        self.was_stopped = False
        self.is_ending = False

    def find_silence(self, event: ev.GroupLost | ev.GroupBack | ev.EndedWithout) -> Reason | None:
        """Return why the group is lost by the report of another group; None if it is not lost.

        The other group sees only that this group is silent at the lighthouse. It does not know
        whether an agent restarts this group, or whether this group ended in order. This group's own
        events show that.
        """
        if isinstance(event, ev.GroupBack) or self.state in OVER:
            return None
        # With `EndedWithout` the others have finished: even a group that starts right now is too
        # late then.
        if isinstance(event, ev.GroupLost):
            # A group that is cut off from the lighthouse, but still writes events, is not lost.
            min_quiet_seconds = event.seconds / 2
            if self.state in ("not started", "starting", "died"):
                min_quiet_seconds = MAX_START_SECONDS
            if event.time - self.last_event_time < min_quiet_seconds:
                return None
        text = f"not heard of for {event.seconds:.0f} s"
        return Reason(text, self.slot, attempt=self.attempt, step=self.step, time=event.time)

    def observe_rank(self, event: ev.Event, rank: int) -> None:
        """Take an event that a worker of the group wrote."""
        attempt = event.attempt or 0
        known = self.ranks.get(rank)
        if known is not None and attempt < known.attempt:
            return  # a late event of an earlier attempt
        is_new_process = isinstance(event, ev.WorkerStarted)
        if known is None or is_new_process or attempt > known.attempt:
            known = RankFold(rank, attempt, event.pid, event)
            self.ranks[rank] = known
        known.last = event
        if isinstance(event, ev.StepCommitted):
            known.step = event.step
            known.memory_bytes = event.memory_bytes
        elif isinstance(event, ev.WorkerStarted):
            known.started = event
            if rank == 0:
                self.host = event.node

    def observe_exit(self, event: ev.WorkerExited) -> None:
        """Take the end of a worker, of any attempt."""
        known = self.ranks.get(event.rank)
        if known is not None and known.attempt == event.attempt:
            known.ended = event.cause or "ended"

    def apply_progress(self, event: ev.Event, *, commits_after_load: int = 0) -> None:
        """Apply an event of rank 0: the attempt met the others, heals, holds a state or commits.

        Args:
            commits_after_load: for `CheckpointLoaded`, the number of updates at the checkpoint.
        """
        if self.state not in ALIVE:
            return
        match event:
            case ev.StepCommitted():
                self.state = "training"
                self.held_step = event.step
                self.commit = event
                self.participants = tuple(event.participants)
                self.waited = None
                if event.waits:
                    self.waited = event.waits[0]
            case ev.Joined():
                self.participants = tuple(event.participants)
                if self.state in ("not started", "starting"):
                    self.state = "joined"
            case ev.LeftOut():
                # The group was frozen, and notices that the others went on.
                self.state = "joined"
            case ev.HealStarted():
                self.state = "healing"
                self.donor = event.donor
            case ev.HealFinished():
                self.state = "joined"
                self.held_step = event.step
            case ev.CheckpointLoaded():
                self.held_step = commits_after_load
            case ev.Waiting():
                if event.slots:
                    self.waited = ev.Waited(slot=event.slots[0], seconds=0.0, why=event.why or "")


def is_of_worker(event: ev.Event) -> bool:
    """Return True if a worker wrote an event.

    These are its own events, those of its chaos agent, and those about its file of events.
    """
    if isinstance(event, ev.RankEvent):
        return True
    return isinstance(event, ev.FaultEvent | ev.LogEvent) and event.rank is not None


def reason_of(event: ev.WorkerExited, step: int | None) -> Reason:
    """Return the reason for which a worker ended without a request.

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
        slot=event.replica,
        rank=event.rank,
        attempt=event.attempt,
        step=step,
        where=event.where or "",
        log=event.log or "",
        time=event.time,
        transient=bool(event.transient),
        exception=event.error is not None,
        signal=event.signal or "",
    )
