# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What a person sees of a run as a whole: a view of its fold; pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import Any, NamedTuple

from titan_ft.history.fold.group import ENDED
from titan_ft.history.fold.run import RunFold
from titan_ft.history.judgement import count
from titan_ft.history.outcomes.outcome import Outcome, decide_outcome
from titan_ft.history.record.run_record import SILENT_SECONDS
from titan_ft.history.terminal import clock
from titan_ft.live import status
from titan_ft.run import events as ev
from titan_ft.run.paths import RunPaths
from titan_ft.system.text import printable

RATE_SECONDS = 60.0
"""The tokens per second are those of this time before the last step."""
RATE_STEPS = 8
"""But of this many steps at least, as far as there are."""
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
        self.fold = RunFold(num_replicas)
        self.lines: deque[Line] = deque(maxlen=MAX_LINES)
        """What happened."""
        self._tokens: deque[tuple[float, int]] = deque(maxlen=512)
        """Unix seconds and tokens of the last commits."""
        self._begin(0.0)

    def _begin(self, since: float) -> None:
        """Begin with the events after `since`, in Unix seconds; some of them may have come already."""
        self.lines = deque((line for line in self.lines if line.time > since), maxlen=MAX_LINES)
        self._tokens = deque((each for each in self._tokens if each[0] > since), maxlen=512)
        self.launcher_gone = False
        """Whether its launcher has ended without a word; to be set by who can see that."""
        self.num_cut = 0
        """Processes whose events wait, as far as is known: they cannot be written, as on a full disk."""
        self._seen_cut = (0, 0.0)
        """The same at the last look, and since when, in seconds of the monotonic clock."""

    @property
    def groups(self) -> status.Groups:
        """What a person sees of each group."""
        return {slot: status.show_group(group, self.fold) for slot, group in self.fold.groups.items()}

    @property
    def states(self) -> dict[int, str]:
        """The state of each group."""
        return {slot: status.state_of(group, self.fold) for slot, group in self.fold.groups.items()}

    @property
    def step(self) -> int | None:
        """The last commit: a step, or a round."""
        return self.fold.step

    @property
    def loss(self) -> float | None:
        return None if self.fold.commit is None else self.fold.commit.loss

    @property
    def participants(self) -> tuple[int, ...]:
        return () if self.fold.commit is None else tuple(self.fold.commit.participants)

    @property
    def restarts(self) -> int:
        return sum(group.num_restarts for group in self.fold.groups.values())

    @property
    def all_left(self) -> bool:
        """Whether every group has finished or left."""
        return all(group.state in ENDED for group in self.fold.groups.values())

    @property
    def end(self) -> str:
        """Return why the run is over; empty while it goes on. Without a launcher, it is over when all groups are."""
        if self.fold.launch_end is not None:
            return self.fold.launch_end.reason or "the launcher ended"
        is_over = self.fold.ended and not self.fold.launched
        return "all groups finished, left, failed or are lost" if is_over else ""

    @property
    def outcome(self) -> Outcome:
        """What became of the run, or is known of it so far: the same that `check` and `report` say."""
        return decide_outcome(self.fold, goes_on=not self.end and not self.launcher_gone)

    def observe(self, event: ev.Event) -> str | None:
        """Take the next event; return the line that it becomes for who launched the run, None if it is worth none."""
        if isinstance(event, ev.LaunchStarted):
            self._begin(event.time)
        states, commit = self.states, self.fold.commit
        self.fold.observe(event)
        line = status.describe(states, self.fold, event)
        line = None if line is None else printable(line)
        if isinstance(event, ev.StepCommitted):
            line = self._take_step(commit)
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
        ended = {RunPaths.process_of(RunPaths("").worker_events(*worker).name) for worker in self.fold.ended_workers}
        num_cut = len({RunPaths.process_of(name) for name in files} - ended) if files else 0
        if num_cut != self._seen_cut[0]:
            self._seen_cut = (num_cut, now)
        if num_cut == self.num_cut or now - self._seen_cut[1] < CUT_SECONDS:
            return None
        self.num_cut = num_cut
        if not num_cut:
            return "all events are written again"
        who = count(num_cut, "process", "processes")
        return f"not all events of {who} can be written (is the disk full?): what is shown here may lag behind"

    def _take_step(self, before: ev.StepCommitted | None) -> str | None:
        """Take the latest commit; return the line that tells that the job went back to an earlier state, if it did.

        Args:
            before: the latest commit before the event.
        """
        commit, unit = self.fold.commit, self.fold.unit
        if commit is None or commit is before:
            return None
        if commit.loss is not None:
            self.losses.add(commit.loss)
        self._tokens.append((commit.time, commit.tokens))
        if before is None or commit.step > before.step:
            return None
        again = f"{unit.noun}s {commit.step} to {before.step} are"
        if commit.step == before.step:
            again = f"{unit.noun} {before.step} is"
        return f"training went back to {unit.name(commit.step - 1)}: {again} made again"

    def elapsed(self, now: float) -> float:
        """Return the seconds since the start, up to the end where it is over."""
        if self.fold.started is None:
            return 0.0
        until = self.fold.last_event if self.end else now
        return max(0.0, until - self.fold.started)

    @property
    def usual_seconds(self) -> float:
        """Return the time from one of the last commits to the next; 0 before the second one."""
        recent, seconds = self._recent(self.fold.last_event)
        return seconds / (len(recent) - 1) if seconds else 0.0

    def is_silent(self, now: float) -> bool:
        """Tell whether a run that is not over may be stuck, or its launcher killed."""
        return now - self.fold.last_event > max(SILENT_SECONDS, 2 * self.usual_seconds)

    def tokens_per_second(self, now: float) -> float | None:
        """Return the rate of the last steps; it falls when no step comes. None before the second step."""
        recent, seconds = self._recent(now)
        return sum(tokens for _, tokens in recent[1:]) / seconds if seconds else None

    def seconds_left(self, now: float) -> float | None:
        """Return the time that the steps up to the target take at the rate of the last ones; None if unknown."""
        recent, seconds = self._recent(now)
        if self.fold.target is None or self.step is None or not seconds or self.end or self.all_left:
            return None
        commits = max(0, self.fold.target - self.fold.unit.step_after(self.step)) / self.fold.unit.steps
        return commits * seconds / (len(recent) - 1)

    def progress(self, now: float) -> str | None:
        """Return one line on how far the run is, or None before its first step."""
        if self.step is None:
            return None
        loss = f"{self.loss:.5f}" if self.loss is not None else "-"
        parts = [
            self.fold.unit.name(self.step),
            f"loss {loss}",
            f"groups {len(self.participants)}/{len(self.fold.groups)}",
        ]
        parts += [f"restarts {self.restarts}"]
        rate, left = self.tokens_per_second(now), self.seconds_left(now)
        parts += [f"tokens/s {rate:,.0f}"] if rate is not None else []
        parts += [f"ETA {clock(left)} (step {self.fold.target})"] if left is not None else []
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
