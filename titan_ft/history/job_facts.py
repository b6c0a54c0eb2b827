# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What a run's events tell of the job as a whole, read once for all who fold them."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import TypeVar

from titan_ft.history.lives import read_faults, read_lives, read_moments
from titan_ft.history.trajectory import chain_to, final_states, read_states
from titan_ft.run.events import (
    Event,
    LaunchFinished,
    LaunchStarted,
    LaunchStopping,
    LighthouseRestarted,
    StepCommitted,
    WorkerStarted,
)

E = TypeVar("E", bound=Event)


class JobFacts:
    """The events by time, what became of the groups, and which of their steps are the job's.

    Attributes:
        moments: all events, each with its Unix microseconds, in that order.
        begin, end: of the job; Unix microseconds.
        commits: those of the groups, as each one's rank 0 tells them.
        void: the lineages that some group committed and that did not lead to the job's last state.
        makers: for each step the groups whose gradients are in it.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.moments = moments = read_moments(events)
        starts, finishes = self.of(LaunchStarted), self.of(LaunchFinished)
        last = moments[-1][0] if moments else 0
        self.begin = starts[0][0] if starts else moments[0][0] if moments else 0
        closed = bool(finishes) and (not starts or finishes[-1][0] >= starts[-1][0])
        self.end = max(self.begin, finishes[-1][0] if closed else last)
        self.stopping = max((time for time, _ in self.of(LaunchStopping)), default=None)
        self.faults = read_faults(moments)
        self._fault_times = [fault.time_us for fault in self.faults]
        self.lives = read_lives(moments, self.faults)
        launched = range(starts[-1][1].replicas) if starts else range(0)
        self.replicas = sorted({*launched, *self.lives})
        self.commits = [(at, event) for at, event in self.of(StepCommitted) if event.rank == 0]
        self.void = self._find_void()
        self.first_commit = self.commits[0][0] if self.commits else last + 1
        self.makers: dict[int, set[int]] = defaultdict(set)
        for _, event in self.commits:
            if event.lineage not in self.void:
                self.makers[event.step].update(event.participants)
        self.outages = self._find_outages(self.of(LighthouseRestarted))
        configs = [started.config for _, started in self.of(WorkerStarted) if started.config is not None]
        self.hang_us = round(configs[-1].hang_timeout_seconds * 1e6) if configs else None

    def of(self, kind: type[E]) -> list[tuple[int, E]]:
        """Return the events of a kind, each with its Unix microseconds."""
        return [(time, event) for time, event in self.moments if isinstance(event, kind)]

    def _find_void(self) -> set[str]:
        """Return the lineages off the job's trajectory; below a cut of the history nobody can tell."""
        history = [event for _, event in self.moments]
        states = read_states(history, [])
        if not states:
            return set()
        chain = chain_to(states, final_states(states, history, [])[0])
        kept = {state.lineage for state in chain}
        return {state.lineage for state in states.values() if state.step >= chain[0].step} - kept

    def _find_outages(self, restarts: Sequence[tuple[int, LighthouseRestarted]]) -> list[tuple[int, int]]:
        """Return the times without a lighthouse."""
        outages = [(time - round(event.seconds * 1e6), time) for time, event in restarts]
        for fault in self.faults:
            if fault.lighthouse:
                back = fault.undone_us or next((time for time, _ in restarts if time >= fault.time_us), self.end)
                outages.append((fault.time_us, back))
        return outages

    def last_fault(self, start: int, end: int) -> int:
        """Return when the last fault from `start` to `end` was; `start` if there was none."""
        index = bisect_right(self._fault_times, end) - 1
        return max(start, self._fault_times[index]) if index >= 0 else start

    def usual_step_us(self) -> int:
        """Return the median time from one step of the job to the next, among those that all groups made at once.

        Of all its steps where there were no such; 0 without any.
        """
        first: dict[int, int] = {}
        calm: dict[int, bool] = {}
        most = max((len(event.participants) for _, event in self.commits), default=0)
        for time, event in self.commits:
            if event.lineage not in self.void:
                step = event.step
                first.setdefault(step, time)
                alike = len(event.participants) == most and event.exchanges == 1
                calm[step] = calm.get(step, True) and alike
        gaps = {step: time - first[step - 1] for step, time in first.items() if time > first.get(step - 1, time)}
        quiet = [gap for step, gap in gaps.items() if calm[step] and calm[step - 1]]
        return round(median(quiet or gaps.values())) if gaps else 0
