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
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec

from titan_ft.history.fold.attempt import Attempt, find_fatal_fault
from titan_ft.history.fold.faults import RecordedFault
from titan_ft.history.fold.group import WorkerKey, is_of_worker
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

    slot: int
    rank: int
    attempt: int
    pid: int
    events: list[ev.Event] = field(default_factory=list)
    exit: ev.WorkerExited | ev.AgentEnded | None = None
    """The event of its end, by its agent, or by the launcher if the agent died too."""

    @property
    def name(self) -> str:
        return f"group {self.slot}, attempt {self.attempt}, rank {self.rank}"

    @cached_property
    def config(self) -> ev.WorkerConfig | None:
        """The process's config; None if no event has it."""
        for event in self.events:
            if isinstance(event, ev.WorkerStarted):
                return event.config
        return None

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
                # Training went back over usual steps, and no event reports it: each of their
                # commits counts.
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
        if not self.written:
            return self.written
        offsets = [event.time - event.mono for event in self.written]
        is_steady = max(offsets) - min(offsets) < STEADY_SECONDS
        hosts = {event.host for event in self.written if isinstance(event, ev.WorkerStarted)}
        num_launches = sum(isinstance(event, ev.LaunchStarted) for event in self.written)
        has_one_clock = len(hosts) == 1 and num_launches <= 1
        if is_steady or not has_one_clock:
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
        """The commits of usual steps, by all processes, that are not among the events."""
        return sum(event.num_steps for event in self.of(UsualSteps))

    @cached_property
    def num_usual_comparisons(self) -> int:
        """Pairs of a usual step and a rank for which all groups have the same digest."""
        # The same usual steps of a rank are in one event of each group: count them once.
        digests = {(event.parent, event.rank): event.num_digests for event in self.of(UsualSteps)}
        return sum(digests.values())

    @property
    def num_events(self) -> int:
        """Number of events that the processes wrote."""
        return len(self.events) - len(self.of(UsualSteps)) + self.num_omitted

    @cached_property
    def _known_commits(self) -> list[ev.StepCommitted]:
        """The commits of all ranks, in order of time; for a usual step only the first one."""
        return sorted([*self.of(ev.StepCommitted), *self.firsts], key=lambda event: event.time)

    @cached_property
    def fold(self) -> RunFold:
        """The state of the run after its last event."""
        return fold_events(self.events)

    # Processes and groups

    @cached_property
    def processes(self) -> list[ProcessHistory]:
        """The worker processes."""
        found: dict[WorkerKey, ProcessHistory] = {}
        for event in self.events:
            if is_of_worker(event):
                key = (event.replica or 0, event.rank or 0, event.attempt or 0, event.pid)
                found.setdefault(key, ProcessHistory(*key)).events.append(event)
        for process in found.values():
            # The wall clock may have been set meanwhile; the monotonic one cannot be.
            process.events.sort(key=lambda event: event.mono)
        for exit in self.of(ev.WorkerExited):
            ended = found.get((exit.replica, exit.rank, exit.attempt, exit.worker_pid))
            if ended is not None:
                ended.exit = exit
        dead_agents = {(event.replica, event.attempt): event for event in self.of(ev.AgentEnded)}
        for process in found.values():
            process.exit = process.exit or dead_agents.get((process.slot, process.attempt))
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
            groups[attempt.slot].append(attempt)
        for attempts in groups.values():
            since = 0
            for attempt in attempts:
                attempt.fault = find_fatal_fault(attempt, self.faults, since)
                since = attempt.exit_us or 0
        return dict(groups)

    @cached_property
    def groups(self) -> list[int]:
        """The groups that were launched, and those that have events."""
        found = set(self.attempts)
        if self.fold.launch is not None:
            found.update(range(self.fold.launch.replicas))
        return sorted(found)

    @cached_property
    def group_size(self) -> int:
        """Number of the job's groups when all are present; 0 if unknown."""
        configs = [process.config for process in self.processes if process.config is not None]
        sizes = [config.group_size for config in configs]
        sizes += [event.replicas for event in self.of(ev.LaunchStarted)]
        return max(sizes, default=0)

    @property
    def unit(self) -> Unit:
        """The meaning of one commit, by the latest config: a step, or a round of several."""
        return self.fold.unit

    @cached_property
    def hang_us(self) -> int | None:
        """Microseconds without progress after which a worker ends itself; None if unknown."""
        configs = [event.config for event in self.of(ev.WorkerStarted) if event.config is not None]
        return round(configs[-1].hang_timeout_seconds * 1e6) if configs else None

    # Time

    @cached_property
    def span_us(self) -> tuple[int, int]:
        """Begin and end of the job in Unix microseconds.

        `launch_started` and `launch_finished`, or else the first and the last event.
        """
        if not self.events:
            return 0, 0
        begin, end = self.events[0].time_us, self.events[-1].time_us
        starts, ends = self.of(ev.LaunchStarted), self.of(ev.LaunchFinished)
        if starts:
            begin = starts[0].time_us
        # The last launch may have no event of its end yet.
        if ends and (not starts or ends[-1].time >= starts[-1].time):
            end = ends[-1].time_us
        return begin, max(begin, end)

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
        """Begin and end of each time without a lighthouse, in Unix microseconds."""
        outages = []
        for event in self.of(ev.LighthouseRestarted):
            away_us = round(event.seconds * 1e6)
            outages.append((event.time_us - away_us, event.time_us))
        for fault in self.faults:
            if not fault.lighthouse:
                continue
            # A fault that is not undone lasts to the end of the job.
            end_us = fault.undone_us or self.span_us[1]
            outages.append((fault.time_us, end_us))
        return outages

    def last_fault_us(self, start: int, end: int) -> int:
        """Return the time of the last fault from `start` to `end`; `start` if there was none."""
        place = bisect_right(self.faults, end, key=lambda fault: fault.time_us) - 1
        if place < 0:
            return start
        return max(start, self.faults[place].time_us)

    # Steps and states

    @cached_property
    def curve(self) -> list[Point]:
        """The loss curve: a point for each step of the trajectory in the history."""
        points = []
        tokens = 0
        for state in self.chain:
            commits = self.commits_of[state.lineage]
            first = commits[0]
            tokens += first.tokens
            # In older histories only the ranks of a pipeline's last stage know the loss.
            losses = [commit.loss for commit in commits if commit.loss is not None]
            loss = losses[0] if losses else None
            points.append(Point(first.step, tokens, loss, self._is_whole(commits), first))
        return points

    def _is_whole(self, commits: list[ev.StepCommitted]) -> bool:
        """Return True if all groups took part in a step, and made all steps of a round."""
        if self.unit.method:
            length = self.unit.steps_of(commits[0].step)
            for commit in commits:
                # A group that joins during a round makes fewer steps.
                if commit.inner_steps is not None and commit.inner_steps < length:
                    return False
        return len(commits[0].participants) >= self.group_size

    @cached_property
    def commits(self) -> list[ev.StepCommitted]:
        """One commit per group and step, by its rank 0. Usual steps have none."""
        return [event for event in self.of(ev.StepCommitted) if event.rank == 0]

    @cached_property
    def commits_by_group(self) -> dict[int, list[ev.StepCommitted]]:
        """The commits by group, in order of time."""
        found: dict[int, list[ev.StepCommitted]] = defaultdict(list)
        for event in self.commits:
            found[event.replica].append(event)
        return found

    @cached_property
    def commits_of(self) -> dict[str, list[ev.StepCommitted]]:
        """The commits of all ranks by the state they made; for a usual step only the first."""
        found: dict[str, list[ev.StepCommitted]] = defaultdict(list)
        for event in self._known_commits:
            found[event.lineage].append(event)
        return found

    @cached_property
    def _states(self) -> tuple[dict[str, JobState], list[str]]:
        return read_states(self._known_commits, self.usual)

    @property
    def states(self) -> dict[str, JobState]:
        """The states that commits made, by lineage."""
        return self._states[0]

    @property
    def conflicts(self) -> list[str]:
        """Contradictions between events about a state."""
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
        lineages = set()
        for state in self.states.values():
            if state.step >= self.chain[0].step:
                lineages.add(state.lineage)
        return frozenset(lineages - self.on_chain)

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
                # All makers died after the exchange, and only a group without weight reports the
                # step. Without this, its time would count as wasted.
                for commit in self.commits_of[state.lineage]:
                    makers = makers.union(commit.participants)
            found[state.step] = found.get(state.step, frozenset()) | makers
        return found

    @cached_property
    def first_commits(self) -> dict[int, ev.StepCommitted]:
        """For each step of the job, its first commit."""
        return {event.step: event for event in (*reversed(self.kept), *self.firsts)}

    @cached_property
    def usual_step_us(self) -> int:
        """The usual step: the median microseconds between consecutive steps of the job; 0 without
        any.

        Only steps that all groups made with one exchange each count, or all steps if there are none
        such. All costs in time refer to the usual step: stalls, effective training time, a joiner's
        price.
        """
        num_all = max((len(event.participants) for event in self.commits), default=0)
        troubled = set()
        for event in self.kept:
            if len(event.participants) < num_all or event.exchanges != 1:
                troubled.add(event.step)
        gaps, quiet_gaps = [], []
        for step, event in self.first_commits.items():
            before = self.first_commits.get(step - 1)
            if before is None or event.time_us <= before.time_us:
                continue
            gap = event.time_us - before.time_us
            gaps.append(gap)
            # A gap has trouble if one of the steps at its ends has.
            if step not in troubled and step - 1 not in troubled:
                quiet_gaps.append(gap)
        if not gaps:
            return 0
        return round(median(quiet_gaps or gaps))

    @cached_property
    def usual_rest_seconds(self) -> float:
        """The usual `rest_seconds`: the median over all groups; 0 without any."""
        rests = []
        for process in self.processes:
            if process.rank != 0:
                continue
            for before, after in pairwise(process.commits()):
                rests.append(rest_seconds(before, after))
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
    # A free lock is no proof: some file systems keep a launcher's lock on its own host.
    least = RECENT_SECONDS if held is None else SILENT_SECONDS
    age = now - record.written[-1].time
    return age < max(least, 2 * (record.usual_step_seconds or 0.0))


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
