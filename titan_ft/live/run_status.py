# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The status of a whole run as a person sees it, from its events alone: no files, no clock.

`titan-ft top` and the launcher each create a `RunStatus`, and give it each event in order
(`observe`) on one thread. `RunStatus` adds the event to the *fold*, which is the sum of all events
so far (`history/fold/run.py`), and returns the event's line for the terminal (`live/status.py`).
"""

from __future__ import annotations

from collections import deque
from statistics import fmean
from typing import NamedTuple

from titan_ft.history.fold.group import ENDED
from titan_ft.history.fold.run import RunFold
from titan_ft.history.judgement import count
from titan_ft.history.outcomes.outcome import Outcome, decide_outcome
from titan_ft.history.record.run_record import SILENT_SECONDS
from titan_ft.history.terminal import format_clock
from titan_ft.live import status
from titan_ft.run import events as ev
from titan_ft.run.paths import RunPaths
from titan_ft.system.text import printable

RATE_SECONDS = 60.0
"""Time before the last step over which the rate of tokens is measured."""
RATE_STEPS = 8
"""Smallest number of steps over which the rate is measured, if there are as many."""
MAX_POINTS = 1024
"""Points of the loss curve: more than a terminal has columns."""
MAX_LINES = 200
CUT_SECONDS = 3.0
"""Report a cut file (`run/log.py`) only after this time: a reader may see a write half done."""


def describe_shape(groups: int, ranks: int = 0) -> str:
    """Describe the number of groups, and of ranks of each group if known (not 0)."""
    text = count(groups, "group")
    if ranks:
        text += f" x {count(ranks, 'rank')}"
    return text


def _line_of_launch(event: ev.Event) -> str | None:
    """Return the line of an event that the launcher prints by itself.

    `titan-ft top` shows this line, but `observe` does not return it: the launcher would print it
    twice.
    """
    match event:
        case ev.LaunchStarted():
            launched = f"launched: {describe_shape(event.replicas, event.ranks_per_replica)}"
            return "; ".join([launched, *event.allowed])
        case ev.LaunchStopping():
            return f"all groups are asked to leave: {event.reason}"
        case ev.LaunchFinished():
            return f"over: {event.reason} (exit status {event.code})"
    return None


class StatusLine(NamedTuple):
    """The line of an event, for people."""

    time: float
    """Unix seconds."""
    text: str
    severity: ev.Severity


class _StepTokens(NamedTuple):
    """A commit, for the rate of tokens."""

    time: float
    """Unix seconds."""
    tokens: int


class _RecentSteps(NamedTuple):
    """The last steps, over which the rate is measured.

    The time begins with the first commit, so the tokens and the number leave out the first step.
    """

    tokens: int
    num_steps: int
    seconds: float
    """From the first commit to the last, or to now if the next one is late; 0 if there is no rate,
    because only one step is known."""


class LossCurve:
    """The loss curve of a run in a bounded number of points."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self._points: list[float] = []
        """Means of `_values_per_point` values each."""
        self._values_per_point = 1
        self._newest: list[float] = []
        """Values that are not in a point yet."""

    @property
    def points(self) -> list[float]:
        if not self._newest:
            return self._points
        return [*self._points, fmean(self._newest)]

    def add(self, loss: float) -> None:
        if self.first is None:
            self.first = loss
        self.last = loss
        self._newest.append(loss)
        if len(self._newest) == self._values_per_point:
            self._points.append(fmean(self._newest))
            self._newest.clear()
        if len(self._points) == MAX_POINTS:
            # Halve the resolution.
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [fmean(pair) for pair in pairs]
            self._values_per_point *= 2


class RunStatus:
    """The status of a run. A second launch in the same folder resets it, except for the losses.

    Args:
        num_replicas: number of groups of the run; others are added with their first event.
    """

    def __init__(self, num_replicas: int = 0) -> None:
        self.losses = LossCurve()
        """Losses of the committed steps, if finite."""
        self.fold = RunFold(num_replicas)
        self.lines: deque[StatusLine] = deque(maxlen=MAX_LINES)
        """Lines of the latest events."""
        self._steps: deque[_StepTokens] = deque(maxlen=512)
        """The last commits."""
        self._restart(0.0)

    def _restart(self, since: float) -> None:
        """Drop lines and steps before `since`, in Unix seconds, and reset all else.

        Events of the new launch may have come before its `LaunchStarted`, from another file.
        """
        lines = [line for line in self.lines if line.time > since]
        self.lines = deque(lines, maxlen=self.lines.maxlen)
        steps = [step for step in self._steps if step.time > since]
        self._steps = deque(steps, maxlen=self._steps.maxlen)
        self.launcher_gone = False
        """True if the launcher has ended without an event. `FollowedRun` sets it."""
        self.num_cut = 0
        """Number of processes whose events cannot be written, as on a full disk. Reported."""
        self._num_cut_now = 0
        """The same number at the last call of `observe_cut`, perhaps not reported yet."""
        self._num_cut_since = 0.0
        """Monotonic seconds since which `_num_cut_now` has its value."""
        self._refusals: set[tuple[str | None, str]] = set()
        """Ports and kinds of the refusals that have a line."""

    @property
    def groups(self) -> status.Groups:
        """The status of each group, by slot."""
        groups = self.fold.groups.items()
        return {slot: status.build_status(group, self.fold) for slot, group in groups}

    @property
    def states(self) -> dict[int, str]:
        """The state of each group, by slot."""
        return {slot: status.state_of(group, self.fold) for slot, group in self.fold.groups.items()}

    @property
    def step(self) -> int | None:
        """Number of the last committed step, or round."""
        return self.fold.step

    @property
    def loss(self) -> float | None:
        if self.fold.last_commit is None:
            return None
        return self.fold.last_commit.loss

    @property
    def participants(self) -> tuple[int, ...]:
        if self.fold.last_commit is None:
            return ()
        return tuple(self.fold.last_commit.participants)

    @property
    def restarts(self) -> int:
        return sum(group.num_restarts for group in self.fold.groups.values())

    @property
    def all_left(self) -> bool:
        """True if every group has finished or left."""
        return all(group.state in ENDED for group in self.fold.groups.values())

    @property
    def end(self) -> str:
        """Why the run is over; empty while it goes on. A run without a launcher ends when all of
        its groups have ended.
        """
        if self.fold.launch_end is not None:
            return self.fold.launch_end.reason or "the launcher ended"
        if self.fold.ended and not self.fold.launched:
            return "all groups finished, left, failed or are lost"
        return ""

    @property
    def outcome(self) -> Outcome:
        """The outcome of the run so far, the same as in `check` and `report`."""
        return decide_outcome(self.fold, is_live=not self.end and not self.launcher_gone)

    def observe(self, event: ev.Event) -> str | None:
        """Take in the next event; return its line for the launcher's terminal, or None."""
        if isinstance(event, ev.LaunchStarted):
            self._restart(event.time)
        states_before = self.states
        commit_before = self.fold.last_commit
        self.fold.observe(event)
        line = status.describe_event(states_before, self.fold, event)
        if line is not None:
            line = printable(line)
        if isinstance(event, ev.StrangerRefused) and not self._is_first_of_its_kind(event):
            return None
        if isinstance(event, ev.StepCommitted):
            line = self._note_commit(commit_before)
        shown = _line_of_launch(event) or line
        if shown:
            self.lines.append(StatusLine(event.time, shown, event.severity))
        return line

    def _is_first_of_its_kind(self, event: ev.StrangerRefused) -> bool:
        """True for the first refusal of its kind at ports of its kind.

        Each rank has ports of its own. A stranger at all of them would fill the terminal.
        """
        refusal = (event.port, event.kind)
        if refusal in self._refusals:
            return False
        self._refusals.add(refusal)
        return True

    def observe_cut(self, files: set[str], now: float) -> str | None:
        """Take in the names of the cut files of events; return a line for a lasting change.

        Args:
            now: seconds of the monotonic clock.
        """
        num_cut = self._count_living_writers(files)
        if num_cut != self._num_cut_now:
            self._num_cut_now = num_cut
            self._num_cut_since = now
        is_lasting = now - self._num_cut_since >= CUT_SECONDS
        if num_cut == self.num_cut or not is_lasting:
            return None
        self.num_cut = num_cut
        if not num_cut:
            return "all events are written again"
        who = count(num_cut, "process", "processes")
        lag = "what is shown here may lag behind"
        return f"not all events of {who} can be written (is the disk full?): {lag}"

    def _count_living_writers(self, files: set[str]) -> int:
        """Return the number of processes that wrote these files of events and have not ended."""
        if not files:
            return 0
        writers = {RunPaths.process_of(name) for name in files}
        for worker in self.fold.ended_workers:
            writers.discard(RunPaths.process_of(RunPaths("").worker_events(*worker).name))
        return len(writers)

    def _note_commit(self, before: ev.StepCommitted | None) -> str | None:
        """Take in the latest commit; return a line if the job went back to an earlier state.

        Args:
            before: the latest commit before the event.
        """
        commit = self.fold.last_commit
        unit = self.fold.unit
        if commit is None or commit is before:
            return None
        if commit.loss is not None:
            self.losses.add(commit.loss)
        self._steps.append(_StepTokens(commit.time, commit.tokens))
        if before is None or commit.step > before.step:
            return None
        steps = f"{unit.noun}s {commit.step} to {before.step} are"
        if commit.step == before.step:
            steps = f"{unit.noun} {before.step} is"
        return f"training went back to {unit.name(commit.step - 1)}: {steps} made again"

    def elapsed(self, now: float) -> float:
        """Return the seconds from the start to now, or to the end of the run."""
        if self.fold.first_event_time is None:
            return 0.0
        until = self.fold.last_event_time if self.end else now
        return max(0.0, until - self.fold.first_event_time)

    @property
    def usual_seconds(self) -> float:
        """Mean seconds between the last commits; 0 before the second commit."""
        recent = self._measure_recent(self.fold.last_event_time)
        if not recent.seconds:
            return 0.0
        return recent.seconds / recent.num_steps

    def is_silent(self, now: float) -> bool:
        """Return whether a run that is not over may be stuck, or its launcher killed."""
        return now - self.fold.last_event_time > max(SILENT_SECONDS, 2 * self.usual_seconds)

    def tokens_per_second(self, now: float) -> float | None:
        """Return the rate over the last steps. It falls while no step comes. None before the second
        step.
        """
        recent = self._measure_recent(now)
        if not recent.seconds:
            return None
        return recent.tokens / recent.seconds

    def seconds_left(self, now: float) -> float | None:
        """Return the time until the target at the present rate; None if unknown."""
        if self.fold.target_step is None or self.step is None:
            return None
        if self.end or self.all_left:
            return None
        recent = self._measure_recent(now)
        if not recent.seconds:
            return None
        unit = self.fold.unit
        num_commits = max(0, self.fold.target_step - unit.step_after(self.step)) / unit.steps
        return num_commits * recent.seconds / recent.num_steps

    def progress(self, now: float) -> str | None:
        """Return a line with the progress of the run; None before its first step."""
        if self.step is None:
            return None
        loss = "-" if self.loss is None else f"{self.loss:.5f}"
        parts = [
            self.fold.unit.name(self.step),
            f"loss {loss}",
            f"groups {len(self.participants)}/{len(self.fold.groups)}",
            f"restarts {self.restarts}",
        ]
        rate = self.tokens_per_second(now)
        if rate is not None:
            parts.append(f"tokens/s {rate:,.0f}")
        left = self.seconds_left(now)
        if left is not None:
            parts.append(f"ETA {format_clock(left)} (step {self.fold.target_step})")
        return "  ".join(parts)

    def _measure_recent(self, now: float) -> _RecentSteps:
        """Measure the steps of the last `RATE_SECONDS`, or the last `RATE_STEPS` if these are
        more.
        """
        if not self._steps:
            return _RecentSteps(0, 0, 0.0)
        last = self._steps[-1].time
        recent = [step for step in self._steps if step.time >= last - RATE_SECONDS]
        if len(recent) < RATE_STEPS:
            recent = list(self._steps)[-RATE_STEPS:]
        tokens = sum(step.tokens for step in recent[1:])
        num_steps = len(recent) - 1
        first = recent[0].time
        if num_steps == 0 or last <= first:
            return _RecentSteps(tokens, num_steps, 0.0)
        usual_seconds = (last - first) / num_steps
        until = last
        is_late = now > last + 2 * usual_seconds
        if is_late and not self.end:
            # The rate falls while no step comes.
            until = now
        return _RecentSteps(tokens, num_steps, until - first)
