# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Fold a run's events into what is known of the run as a whole; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import Any, NamedTuple

from titan_ft.history.attempts import InjectedFaults
from titan_ft.history.checks.judgement import count
from titan_ft.history.fold import RunFold
from titan_ft.history.hosts import HostsSoFar
from titan_ft.history.outcome import Outcome, decide_outcome
from titan_ft.history.record import SILENT_SECONDS
from titan_ft.history.terminal import clock
from titan_ft.history.unit import STEP, Unit
from titan_ft.live import status
from titan_ft.live.rank_table import RanksSoFar
from titan_ft.run import events as ev
from titan_ft.run.paths import RunPaths

RATE_SECONDS = 60.0
"""The tokens per second are those of this time before the last step."""
RATE_STEPS = 8
"""But of this many steps at least, as far as there are."""
MAX_STEPS_REMEMBERED = 4096
MAX_POINTS = 1024
"""Of the loss's course: more than a terminal has columns."""
MAX_LINES = 200
CUT_SECONDS = 3.0
"""For so long a file of events must be cut before it is said: whoever reads it may come into the midst of a write."""


def shape(groups: int, ranks: int = 0) -> str:
    """Return how many groups a run has, and of how many ranks each, as far as that is known, in words."""
    return count(groups, "group") + (f" x {count(ranks, 'rank')}" if ranks else "")


# What the launcher prints by itself, so that `status.describe` leaves it out.
_OF_LAUNCH: dict[type[ev.Event], Callable[[Any], str]] = {
    ev.LaunchStarted: lambda e: "; ".join([f"launched: {shape(e.replicas, e.ranks_per_replica)}", *e.allowed]),
    ev.LaunchStopping: lambda e: f"all groups are asked to leave: {e.reason}",
    ev.LaunchFinished: lambda e: f"over: {e.reason} (exit status {e.code})",
}


class Line(NamedTuple):
    """Something that happened, for people."""

    time: float
    """Unix seconds."""
    text: str
    severity: ev.Severity


class CommittedSteps:
    """Count each committed step once, whichever of its groups is first."""

    def __init__(self) -> None:
        self.num_committed = 0
        self.num_attempted = 0
        """Exchanges that the committed steps took; of the group with most of them."""
        self._exchanges: dict[tuple[int, str], int] = {}

    def observe(self, event: ev.StepCommitted) -> tuple[bool, int]:
        """Take a commit; return whether it is a new step, and how many exchanges it adds to those known.

        The same step number comes again when groups went on from an earlier state; then its lineage differs.
        """
        key = (event.step, event.lineage)
        known, exchanges = self._exchanges.get(key), max(1, event.exchanges)
        added = max(0, exchanges - (known or 0))
        self._exchanges[key] = max(exchanges, known or 0)
        if len(self._exchanges) > MAX_STEPS_REMEMBERED:
            del self._exchanges[next(iter(self._exchanges))]
        self.num_committed += known is None
        self.num_attempted += added
        return known is None, added


class LossCourse:
    """The course of the loss over a run, however long, in a bounded number of points."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self._points: list[float] = []
        """Means of as many values each."""
        self._size = 1
        """Of how many."""
        self._rest: list[float] = []
        """The values that make no point yet."""

    @property
    def points(self) -> list[float]:
        return self._points + ([fmean(self._rest)] if self._rest else [])

    def add(self, loss: float) -> None:
        self.first, self.last = loss if self.first is None else self.first, loss
        self._rest.append(loss)
        if len(self._rest) == self._size:
            self._points.append(fmean(self._rest))
            self._rest.clear()
        if len(self._points) == MAX_POINTS:
            halves = zip(self._points[::2], self._points[1::2], strict=True)
            self._points, self._size = [fmean(pair) for pair in halves], 2 * self._size


class RunStatus:
    """What is known of a run. A second launch in the same folder starts it anew, except for the losses.

    Args:
        num_replicas: groups of the run; more are added as they show up.
    """

    def __init__(self, num_replicas: int = 0) -> None:
        self.losses = LossCourse()
        """Of the committed steps, as far as it is known and finite."""
        self.fold = RunFold()
        """What became of the groups, and their failures; it begins anew by itself."""
        self._begin(num_replicas)

    def _begin(self, num_replicas: int) -> None:
        self.groups = status.initial(num_replicas)
        self.num_ranks = 0
        """Ranks of each group; 0 where there is no launcher."""
        self.steps = CommittedSteps()
        self.step: int | None = None
        """The last commit: a step, or a round."""
        self.unit = STEP
        """What one commit stands for."""
        self.target: int | None = None
        """torchtitan's step that is to be the last one; None if unknown."""
        self.loss: float | None = None
        self.participants: tuple[int, ...] = ()
        self.faults = InjectedFaults()
        self.num_lighthouse_restarts = 0
        self.hosts = HostsSoFar()
        self.ranks = RanksSoFar()
        self.lines: deque[Line] = deque(maxlen=MAX_LINES)
        """What happened."""
        self.started: float | None = None
        """Unix seconds of the first event; None before it."""
        self.last = 0.0
        """Unix seconds of the last one."""
        self.code: int | None = None
        """The launcher's exit status, once it has ended."""
        self.saving: int | None = None
        """torchtitan's step that a group saves before it leaves, until its checkpoint is complete."""
        self.save_error = ""
        """Why the run cannot go on from a later step than that of the latest checkpoint; empty if none was saved."""
        self._checkpoints: dict[int, float] = {}
        """Steps of the checkpoints to go on from, with the Unix seconds since which each was there."""
        self._started: dict[int, float] = {}
        """Unix seconds of the last start of each group's workers."""
        self._reason = ""
        self.launched = False
        """Whether a launcher watches over it."""
        self.launcher_gone = False
        """Whether its launcher has ended without a word; to be set by who can see that."""
        self.num_cut = 0
        """Processes whose events wait, as far as is known: they cannot be written, as on a full disk."""
        self._ended: set[str] = set()
        """Names of workers that have ended: in their files nothing comes any more."""
        self._seen_cut = (0, 0.0)
        """The same at the last look, and since when, in seconds of the monotonic clock."""
        self._tokens: deque[tuple[float, int]] = deque(maxlen=512)
        self._step_time = 0.0
        """Unix seconds of the last commit."""

    @property
    def restarts(self) -> int:
        return sum(group.restarts for group in self.groups.values())

    @property
    def checkpoint(self) -> int | None:
        """torchtitan's step of the latest checkpoint to go on from that this launch has made or gone on from."""
        return max(self._checkpoints, default=None)

    @property
    def all_left(self) -> bool:
        """Whether every group has finished or left."""
        return all(group.state in (status.FINISHED, status.DRAINED) for group in self.groups.values())

    @property
    def end(self) -> str:
        """Return why the run is over; empty while it goes on. Without a launcher, it is over when all groups are."""
        if self.code is not None:
            return self._reason or "the launcher ended"
        states = {group.state for group in self.groups.values()}
        # Somebody must have seen the end: groups that only fell silent may train on.
        ended = {status.FINISHED, status.DRAINED, status.FAILED}
        over = states & ended and states <= {*ended, status.LOST}
        return "all groups finished, left, failed or are lost" if over and not self.launched else ""

    @property
    def outcome(self) -> Outcome:
        """What became of the run, or is known of it so far: the same that `check` and `report` say."""
        return decide_outcome(self.fold, goes_on=not self.end and not self.launcher_gone)

    def observe(self, event: ev.Event) -> str | None:
        """Take the next event; return the line that it becomes for who launched the run, None if it is worth none."""
        if isinstance(event, ev.LaunchStarted):
            self._begin(event.replicas)
            self.launched, self.num_ranks = True, event.ranks_per_replica
        self.started = event.time if self.started is None else min(self.started, event.time)
        self.last = max(self.last, event.time)
        self._add_groups(event)
        self.faults.observe(event)
        self.hosts.observe(event)
        self.ranks.observe(event)
        before = self.groups
        self.fold.observe(event)
        self.groups = status.fold(before, event, {slot: group.last_event for slot, group in self.fold.groups.items()})
        line = status.describe(before, self.groups, event)
        match event:
            case ev.WorkerStarted() if event.config is not None:
                self.target, self.unit = event.config.steps, Unit.of(event.config)
            case ev.StepCommitted():
                line = self._take_step(event)
            case ev.WorkerExited():
                file = RunPaths("").worker_events(event.replica, event.rank, event.attempt, event.worker_pid)
                self._ended.add(RunPaths.process_of(file.name))
            case ev.LighthouseRestarted():
                self.num_lighthouse_restarts += 1
            case ev.LaunchStopping():
                self.groups = status.draining(self.groups)
            case ev.LaunchFinished():
                self.code, self._reason = event.code, event.reason
                self.groups = status.stopped(self.groups)
        self._follow_checkpoints(event)
        of_launch = _OF_LAUNCH.get(type(event))
        shown = of_launch(event) if of_launch else line
        if shown:
            self.lines.append(Line(event.time, shown, event.severity))
        return line

    def observe_cut(self, files: set[str], now: float) -> str | None:
        """Take the names of the files of events that are cut; return the line that a lasting change becomes.

        Args:
            now: seconds of the monotonic clock.
        """
        num_cut = len({RunPaths.process_of(name) for name in files} - self._ended)
        if num_cut != self._seen_cut[0]:
            self._seen_cut = (num_cut, now)
        if num_cut == self.num_cut or now - self._seen_cut[1] < CUT_SECONDS:
            return None
        self.num_cut = num_cut
        if not num_cut:
            return "all events are written again"
        who = count(num_cut, "process", "processes")
        return f"not all events of {who} can be written (is the disk full?): what is shown here may lag behind"

    def _add_groups(self, event: ev.Event) -> None:
        """Add groups that no launcher has announced."""
        found = set() if event.replica is None else {event.replica}
        if isinstance(event, ev.WorkerStarted) and event.config is not None:
            found.update(range(event.config.group_size))
        if missing := found - self.groups.keys():
            groups = self.groups | {replica: status.GroupStatus(replica) for replica in missing}
            self.groups = dict(sorted(groups.items()))

    def _follow_checkpoints(self, event: ev.Event) -> None:
        match event:
            case ev.WorkerStarted():
                self._started[event.replica] = event.time
            case ev.CheckpointSaved() if event.model_only:
                self._checkpoints.pop(event.step, None)  # it has taken the place of a whole one
                self.saving, self.save_error = None, f"that of step {event.step} is of the model only"
            case ev.CheckpointSaved():
                self._checkpoints[event.step] = event.time
                self.saving, self.save_error = None, ""
            case ev.CheckpointLoaded():
                self._drop_passed_over(event)
                self._checkpoints.setdefault(event.step, event.time)
                self.saving, self.save_error = None, ""
            case ev.CheckpointWithdrawn() | ev.CheckpointSkipped():
                self._checkpoints.pop(event.step, None)
            case ev.CheckpointFailed():
                self.save_error = f"that of step {event.step} could not be written: {event.error}"
            case ev.SavingBeforeLeaving():
                self.saving, self.save_error = event.step, ""

    def _drop_passed_over(self, event: ev.CheckpointLoaded) -> None:
        """Drop the later checkpoints that a load has passed over: damaged, gone, or turned away from.

        A later one that came after the worker's start stays: another group may have loaded the same
        step, trained and saved while this worker was still loading.
        """
        started = self._started.get(event.replica, event.time)
        for step, since in list(self._checkpoints.items()):
            if step > event.step and since <= started:
                del self._checkpoints[step]

    def _take_step(self, event: ev.StepCommitted) -> str | None:
        """Take a commit; return the line that tells that the job went back to an earlier state, if it did."""
        if event.rank != 0 or not self.steps.observe(event)[0]:
            return None
        if event.time < self._step_time:
            return None  # it waited for room on the disk, and training has gone on since then
        before, self.step, self.loss = self.step, event.step, event.loss
        self._step_time = event.time
        self.participants = tuple(event.participants)
        if self.loss is not None:
            self.losses.add(self.loss)
        self._tokens.append((event.time, event.tokens))
        if before is None or event.step > before:
            return None
        noun = self.unit.noun
        again = f"{noun} {before} is" if event.step == before else f"{noun}s {event.step} to {before} are"
        return f"training went back to {self.unit.name(event.step - 1)}: {again} made again"

    def elapsed(self, now: float) -> float:
        """Return the seconds since the start, up to the end where it is over."""
        return 0.0 if self.started is None else max(0.0, (self.last if self.end else now) - self.started)

    @property
    def usual_seconds(self) -> float:
        """Return the time from one of the last commits to the next; 0 before the second one."""
        recent, seconds = self._recent(self.last)
        return seconds / (len(recent) - 1) if seconds else 0.0

    def is_silent(self, now: float) -> bool:
        """Tell whether a run that is not over may be stuck, or its launcher killed."""
        return now - self.last > max(SILENT_SECONDS, 2 * self.usual_seconds)

    def tokens_per_second(self, now: float) -> float | None:
        """Return the rate of the last steps; it falls when no step comes. None before the second step."""
        recent, seconds = self._recent(now)
        return sum(tokens for _, tokens in recent[1:]) / seconds if seconds else None

    def seconds_left(self, now: float) -> float | None:
        """Return the time that the steps up to the target take at the rate of the last ones; None if unknown."""
        recent, seconds = self._recent(now)
        if self.target is None or self.step is None or not seconds or self.end or self.all_left:
            return None
        commits = max(0, self.target - self.unit.step_after(self.step)) / self.unit.steps
        return commits * seconds / (len(recent) - 1)

    def progress(self, now: float) -> str | None:
        """Return one line on how far the run is, or None before its first step."""
        if self.step is None:
            return None
        loss = f"{self.loss:.5f}" if self.loss is not None else "-"
        parts = [self.unit.name(self.step), f"loss {loss}", f"groups {len(self.participants)}/{len(self.groups)}"]
        parts += [f"restarts {self.restarts}"]
        rate, left = self.tokens_per_second(now), self.seconds_left(now)
        parts += [f"tokens/s {rate:,.0f}"] if rate is not None else []
        parts += [f"ETA {clock(left)} (step {self.target})"] if left is not None else []
        return "  ".join(parts)

    def _recent(self, now: float) -> tuple[list[tuple[float, int]], float]:
        """Return the last steps with their tokens, and the seconds from the first of them; 0 where that is no rate."""
        last = self._tokens[-1][0] if self._tokens else 0.0
        recent = [each for each in self._tokens if each[0] >= last - RATE_SECONDS]
        recent = max(recent, list(self._tokens)[-RATE_STEPS:], key=len)
        if len(recent) < 2 or last <= recent[0][0]:
            return recent, 0.0
        usual = (last - recent[0][0]) / (len(recent) - 1)
        until = now if not self.end and now > last + 2 * usual else last
        return recent, until - recent[0][0]
