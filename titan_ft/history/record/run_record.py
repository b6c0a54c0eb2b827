# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The record of a run: its events, read once, and derived values; every figure is a view of it."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec

from titan_ft.history.fold.attempt import Attempt, find_fatal_fault
from titan_ft.history.fold.faults import RecordedFault
from titan_ft.history.fold.group import is_of_worker
from titan_ft.history.fold.run import RunFold, fold_events
from titan_ft.history.fold.unit import Unit
from titan_ft.history.record.kept import SETTLED_SECONDS, read_reduced
from titan_ft.history.record.trajectory import (
    JobState,
    Restart,
    chain_to,
    final_states,
    read_states,
)
from titan_ft.history.record.usual_steps import UsualSteps
from titan_ft.run import events as ev
from titan_ft.run.held import is_held
from titan_ft.run.log import read_history
from titan_ft.run.paths import RunPaths

E = TypeVar("E", bound=ev.Event)
T = TypeVar("T")
Healed = (ev.HealFinished, ev.CheckpointLoaded, ev.RolledBack, ev.StartedAnew)
"""After these a process goes on from another state than the one it held."""
STEADY_SECONDS = 0.1
"""Wall clocks that part by less from the monotonic clock were not set."""
SILENT_SECONDS = 10.0
"""A run that is not over and announces nothing for so long, or for two steps, is silent."""
RECENT_SECONDS = 60.0
"""Groups that have no launcher, and did not end, go on if one of them has announced anything within
this time.
"""


@dataclass
class ProcessHistory:
    """One worker process: a rank in one attempt of its group. Its events are in the order in which
    it wrote them.
    """

    replica: int
    rank: int
    attempt: int
    pid: int
    events: list[ev.Event] = field(default_factory=list)
    exit: ev.WorkerExited | ev.AgentEnded | None = None
    """What its agent wrote of its end, or the launcher of the end of both."""

    @property
    def name(self) -> str:
        return f"group {self.replica}, attempt {self.attempt}, rank {self.rank}"

    @cached_property
    def config(self) -> ev.WorkerConfig | None:
        """The process's config; None if no event has it."""
        return next(
            (event.config for event in self.events if isinstance(event, ev.WorkerStarted)), None
        )

    @cached_property
    def ended_in_order(self) -> bool:
        """True if the process wrote that it finished, or that it left on request."""
        return any(isinstance(event, (ev.TrainingFinished, ev.Drained)) for event in self.events)

    def commits(self) -> Iterator[ev.StepCommitted]:
        """Yield its commits."""
        return (event for event in self.events if isinstance(event, ev.StepCommitted))


@dataclass(frozen=True, slots=True)
class Point:
    """One step of the loss curve.

    Attributes:
        tokens: total up to and including this step.
        loss: mean over the tokens of the step; None if not finite, or missing in the history.
        whole: True if all groups took part, and made all steps of a round.
        event: the first commit of the step.
    """

    step: int
    tokens: int
    loss: float | None
    whole: bool
    event: ev.StepCommitted


class RunRecord:
    """The events of a run in order of time, and values derived from them.

    Each value is computed on first use, once. An error in one computation affects only its users.

    Args:
        events: of all processes.
        cut: names of the files whose writers had more to write (see `run/appender.py`).
        goes_on: True if the run was alive when its events were read, so that more of them follow.
        silent_seconds: for a live run, the age of its last event at that time; 0 if usual.
        firsts: for a long run with reduced events, the first commit of each usual step; see
            `usual_steps`.

    Attributes:
        written: the events as their processes wrote them, in the order of their wall clocks.
    """

    def __init__(
        self,
        events: Iterable[ev.Event],
        cut: Iterable[str] = (),
        *,
        goes_on: bool = False,
        silent_seconds: float = 0.0,
        firsts: Iterable[ev.StepCommitted] = (),
    ) -> None:
        self.written = sorted(events, key=lambda event: event.time)
        self.cut = tuple(cut)
        self.goes_on, self.silent_seconds = goes_on, silent_seconds
        self.firsts = list(firsts)
        self.views: dict[Callable[..., Any], Any] = {}

    @classmethod
    def read(cls, folder: Path, *, whole: bool = False) -> RunRecord:
        """Read the event files in the folder `events` of a run; many events are reduced, see
        `usual_steps`.

        For a live run, events that were written during the reading are left out. Files are read one
        after the other, and an early file lacks events that a late file refers to.

        Args:
            whole: read all events unreduced, however many.

        Raises:
            OSError: a file cannot be read.
            ValueError: names the file and the line that is no event.
        """
        now = time.time()
        if whole:
            record = cls(*read_history(folder))
        else:
            found, cut = read_reduced(folder)
            record = cls(found.events, cut, firsts=found.firsts)
            if not record.usual <= record.on_chain:
                # Nobody said that training went back over usual steps: each of their commits
                # counts.
                return cls.read(folder, whole=True)
        if not _goes_on(record, RunPaths(folder.parent), now):
            return record
        settled = [event for event in record.written if event.time <= now - SETTLED_SECONDS]
        age = now - record.written[-1].time
        is_silent = age > max(SILENT_SECONDS, 2 * (record.usual_step_seconds or 0.0))
        silent_seconds = age if is_silent else 0.0
        return cls(
            settled or record.written,
            goes_on=True,
            silent_seconds=silent_seconds,
            firsts=record.firsts,
        )

    @cached_property
    def events(self) -> list[ev.Event]:
        """The events with their true times.

        Wall clocks may be set while a run goes on. If all events are of one host and one launch,
        its monotonic clock gives the time that really passed.
        """
        offsets = [event.time - event.mono for event in self.written]
        hosts = {event.host for event in self.written if isinstance(event, ev.WorkerStarted)}
        launches = sum(isinstance(event, ev.LaunchStarted) for event in self.written)
        if (
            not offsets
            or max(offsets) - min(offsets) < STEADY_SECONDS
            or len(hosts) != 1
            or launches > 1
        ):
            return self.written
        first = min(self.written, key=lambda event: event.mono)
        begin = first.time - first.mono
        replaced = (
            msgspec.structs.replace(event, time=event.mono + begin) for event in self.written
        )
        return sorted(replaced, key=lambda event: event.time)

    @cached_property
    def _by_kind(self) -> dict[type[ev.Event], list[Any]]:
        found: dict[type[ev.Event], list[Any]] = defaultdict(list)
        for event in self.events:
            found[type(event)].append(event)
        return found

    def of(self, *kinds: type[E]) -> list[E]:
        """Return the events of some kinds, one kind after the other, each in order of time."""
        return [event for kind in kinds for event in self._by_kind.get(kind, [])]

    @cached_property
    def usual(self) -> frozenset[str]:
        """The lineages of the usual steps, each of which has one commit in place of all."""
        return frozenset(commit.lineage for commit in self.firsts)

    @cached_property
    def num_omitted(self) -> int:
        """How many commits of usual steps, of all processes together, are not among the events."""
        return sum(event.num_steps for event in self.of(UsualSteps))

    @cached_property
    def num_usual_comparisons(self) -> int:
        """Pairs of a usual step and a rank of which all groups have the same digest."""
        # The processes of a rank commit the same steps as usual, and take a digest of the same
        # ones.
        each = {(event.parent, event.rank): event.num_digests for event in self.of(UsualSteps)}
        return sum(each.values())

    @property
    def num_events(self) -> int:
        """How many events the processes wrote."""
        return len(self.events) - len(self.of(UsualSteps)) + self.num_omitted

    @cached_property
    def _told_commits(self) -> list[ev.StepCommitted]:
        """The commits of all ranks, of each usual step the first one, in order of time."""
        return sorted([*self.of(ev.StepCommitted), *self.firsts], key=lambda event: event.time)

    @cached_property
    def fold(self) -> RunFold:
        """What is known of the run after its last event."""
        return fold_events(self.events)

    # Processes and groups

    @cached_property
    def processes(self) -> list[ProcessHistory]:
        """The worker processes."""
        found: dict[tuple[int, int, int, int], ProcessHistory] = {}
        for event in self.events:
            if is_of_worker(event):
                key = (event.replica or 0, event.rank or 0, event.attempt or 0, event.pid)
                found.setdefault(key, ProcessHistory(*key)).events.append(event)
        for process in found.values():
            # The wall clock may have been set meanwhile; the other one cannot be.
            process.events.sort(key=lambda event: event.mono)
        for exit in self.of(ev.WorkerExited):
            ended = found.get((exit.replica, exit.rank, exit.attempt, exit.worker_pid))
            if ended is not None:
                ended.exit = exit
        dead_agents = {(event.replica, event.attempt): event for event in self.of(ev.AgentEnded)}
        for process in found.values():
            process.exit = process.exit or dead_agents.get((process.replica, process.attempt))
        return list(found.values())

    @property
    def faults(self) -> list[RecordedFault]:
        """The injected faults, in order of time."""
        return self.fold.faults.injected

    @cached_property
    def attempts(self) -> dict[int, list[Attempt]]:
        """The attempts of each group that have events, in order."""
        groups: dict[int, list[Attempt]] = defaultdict(list)
        for attempt in sorted(self.fold.attempts.values(), key=lambda attempt: attempt.number):
            groups[attempt.replica].append(attempt)
        for attempts in groups.values():
            since = 0
            for attempt in attempts:
                attempt.fault = find_fatal_fault(attempt, self.faults, since)
                since = attempt.exit_us or 0
        return dict(groups)

    @cached_property
    def groups(self) -> list[int]:
        """The groups that were launched, and those that have events."""
        launch = self.fold.launch
        return sorted({*range(launch.replicas if launch else 0), *self.attempts})

    @cached_property
    def group_size(self) -> int:
        """How many groups the job has when all are there; 0 if unknown."""
        sizes = [
            process.config.group_size for process in self.processes if process.config is not None
        ]
        return max([*sizes, *(event.replicas for event in self.of(ev.LaunchStarted))], default=0)

    @property
    def unit(self) -> Unit:
        """What one commit of the run stands for, as the latest config says: a step, or a round of
        several.
        """
        return self.fold.unit

    @cached_property
    def hang_us(self) -> int | None:
        """After how many microseconds without progress a worker ends itself; None if unknown."""
        configs = [event.config for event in self.of(ev.WorkerStarted) if event.config is not None]
        return round(configs[-1].hang_timeout_seconds * 1e6) if configs else None

    # Time

    @cached_property
    def span_us(self) -> tuple[int, int]:
        """Begin and end of the job in Unix microseconds.

        `launch_started` and `launch_finished`, or else the first and the last event.
        """
        first, last = (self.events[place].time_us for place in (0, -1)) if self.events else (0, 0)
        starts, ends = self.of(ev.LaunchStarted), self.of(ev.LaunchFinished)
        begin = starts[0].time_us if starts else first
        closed = bool(ends) and (not starts or ends[-1].time >= starts[-1].time)
        return begin, max(begin, ends[-1].time_us if closed else last)

    @property
    def begin(self) -> float:
        """Begin of the job in Unix seconds."""
        return self.span_us[0] / 1e6

    @property
    def launch_end(self) -> float | None:
        """When the last launch ended, in Unix seconds; None if it did not, or there was none."""
        launch, end = self.fold.launch, self.fold.launch_end
        # Another launcher's end: the start of the last launch is missing.
        if launch is None or end is None or end.pid != launch.pid:
            return None
        return end.time

    @cached_property
    def outages_us(self) -> list[tuple[int, int]]:
        """From when to when there was no lighthouse."""
        outages = [
            (e.time_us - round(e.seconds * 1e6), e.time_us) for e in self.of(ev.LighthouseRestarted)
        ]
        return outages + [
            (f.time_us, f.undone_us or self.span_us[1]) for f in self.faults if f.lighthouse
        ]

    def last_fault_us(self, start: int, end: int) -> int:
        """Return when the last fault from `start` to `end` was; `start` if there was none."""
        place = bisect_right(self.faults, end, key=lambda fault: fault.time_us) - 1
        return max(start, self.faults[place].time_us) if place >= 0 else start

    # Steps and states

    @cached_property
    def curve(self) -> list[Point]:
        """The loss curve, a point for each step of the trajectory, as far back as the history
        goes.
        """
        commits = [self.commits_of[state.lineage] for state in self.chain]
        # In older histories only the ranks of a pipeline's last stage know the loss.
        losses = [
            next((event.loss for event in events if event.loss is not None), None)
            for events in commits
        ]
        totals = accumulate(events[0].tokens for events in commits)
        return [
            Point(events[0].step, total, loss, self._is_whole(events), events[0])
            for events, loss, total in zip(commits, losses, totals, strict=True)
        ]

    def _is_whole(self, events: list[ev.StepCommitted]) -> bool:
        step, unit = events[0].step, self.unit
        length = unit.step_after(step) - unit.step_after(step - 1)
        if unit.method and any(
            event.inner_steps is not None and event.inner_steps < length for event in events
        ):
            return False  # a group has joined in the midst of the round
        return len(events[0].participants) >= self.group_size

    @cached_property
    def commits(self) -> list[ev.StepCommitted]:
        """One commit per group and step, by its rank 0. Usual steps have none."""
        return [event for event in self.of(ev.StepCommitted) if event.rank == 0]

    @cached_property
    def commits_by_group(self) -> dict[int, list[ev.StepCommitted]]:
        """The same by group, in order of time."""
        found: dict[int, list[ev.StepCommitted]] = defaultdict(list)
        for event in self.commits:
            found[event.replica].append(event)
        return found

    @cached_property
    def commits_of(self) -> dict[str, list[ev.StepCommitted]]:
        """The commits of all ranks by the state that they made; of a usual step only the first."""
        found: dict[str, list[ev.StepCommitted]] = defaultdict(list)
        for event in self._told_commits:
            found[event.lineage].append(event)
        return found

    @cached_property
    def _states(self) -> tuple[dict[str, JobState], list[str]]:
        return read_states(self._told_commits, self.usual)

    @property
    def states(self) -> dict[str, JobState]:
        """The states that commits made, by lineage."""
        return self._states[0]

    @property
    def conflicts(self) -> list[str]:
        """Where events contradict each other about a state."""
        return self._states[1]

    @cached_property
    def finals(self) -> tuple[list[JobState], list[str]]:
        """The states with which the job may have ended, the likeliest first, and the
        missing facts.
        """
        unknown: list[str] = []
        if not self.states:
            return [], unknown
        restarts: list[Restart] = [
            *self.of(ev.CheckpointLoaded),
            *self.of(ev.RolledBack),
            *self.of(ev.StartedAnew),
        ]
        finished = self.of(ev.TrainingFinished)
        return final_states(self.states, self.commits_of, restarts, finished, unknown), unknown

    @cached_property
    def chain(self) -> list[JobState]:
        """The job's trajectory, oldest state first; empty without any commit."""
        return chain_to(self.states, self.finals[0][0]) if self.states else []

    @cached_property
    def on_chain(self) -> frozenset[str]:
        """The lineages of the trajectory."""
        return frozenset(state.lineage for state in self.chain)

    @cached_property
    def void(self) -> frozenset[str]:
        """The lineages that some group committed and that did not lead to the job's last state.

        Steps below a cut of the history are left out, because nothing is known of them.
        """
        known = {
            state.lineage for state in self.states.values() if state.step >= self.chain[0].step
        }
        return frozenset(known - self.on_chain)

    @cached_property
    def kept(self) -> list[ev.StepCommitted]:
        """The commits of states that are not void, one per group and step."""
        return [event for event in self.commits if event.lineage not in self.void]

    @cached_property
    def makers(self) -> dict[int, frozenset[int]]:
        """For each step, the groups whose gradients it contains."""
        found: dict[int, frozenset[int]] = {}
        for state in self.states.values():
            if state.lineage in self.void:
                continue
            makers = state.participants
            if not makers:
                # All makers died after the exchange, and a group without weight tells of the step.
                # Its time would count as wasted.
                makers = frozenset().union(
                    *(commit.participants for commit in self.commits_of[state.lineage])
                )
            known = found.get(state.step)
            found[state.step] = makers if known is None else known | makers
        return found

    @cached_property
    def first_commits(self) -> dict[int, ev.StepCommitted]:
        """For each step of the job the commit that came first."""
        return {event.step: event for event in (*reversed(self.kept), *self.firsts)}

    @cached_property
    def usual_step_us(self) -> int:
        """The usual step: the median microseconds between consecutive steps of the job; 0 without
        any.

        Only steps that all groups made with one exchange each count, or all steps if there are none
        such. All costs in time refer to the usual step: stalls, effective training time, a joiner's
        price.
        """
        most = max((len(event.participants) for event in self.commits), default=0)
        troubled = {
            event.step
            for event in self.kept
            if len(event.participants) < most or event.exchanges != 1
        }
        times = {step: event.time_us for step, event in self.first_commits.items()}
        gaps = {
            step: time - times[step - 1]
            for step, time in times.items()
            if time > times.get(step - 1, time)
        }
        quiet = [gap for step, gap in gaps.items() if not {step, step - 1} & troubled]
        return round(median(quiet or gaps.values())) if gaps else 0

    @cached_property
    def usual_rest_seconds(self) -> float:
        """The usual `rest_seconds`: the median over all groups; 0 without any."""
        made = [list(process.commits()) for process in self.processes if process.rank == 0]
        rests = [
            rest_seconds(before, after) for commits in made for before, after in pairwise(commits)
        ]
        return median(rests) if rests else 0.0

    @property
    def usual_step_seconds(self) -> float | None:
        """The usual step in seconds; None if unknown."""
        return self.usual_step_us / 1e6 if self.usual_step_us else None


def _goes_on(record: RunRecord, paths: RunPaths, now: float) -> bool:
    """Return True if a run is alive: its launch holds the run's folder, or a recent event
    exists.
    """
    fold = record.fold
    if fold.launch_end is not None:
        return False
    if not record.events or (fold.ended and not fold.launched):
        return False
    held = is_held(paths) if fold.launched else None
    if held:
        return True
    # A lock that nobody holds is no proof: some file systems keep a launcher's lock on its own
    # host.
    least = RECENT_SECONDS if held is None else SILENT_SECONDS
    return now - record.written[-1].time < max(least, 2 * (record.usual_step_seconds or 0.0))


def rest_seconds(before: ev.StepCommitted, after: ev.StepCommitted) -> float:
    """Return the seconds between two commits of a process in which it did not compute.

    Mostly it waits then: for the exchange, and for late groups.
    """
    return after.time - before.time - after.compute_seconds - after.apply_seconds


def view(work_out: Callable[[RunRecord], T]) -> Callable[[RunRecord], T]:
    """Compute a function of a record once for each record; every caller gets the same object,
    read-only.
    """

    @wraps(work_out)
    def once(record: RunRecord) -> T:
        if once not in record.views:
            record.views[once] = work_out(record)
        found: T = record.views[once]
        return found

    return once
