# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`RunRecord`: the events of a run, read once, and the values that many readers derive from them.

`check`, `report`, the forecast and the benchmarks call `RunRecord.read` on the folder of a run, and
pass the record to the functions that judge the run or compute its figures. Each derived value is
computed on first use, once (`cached_property`, `once_per_record`), so that all readers agree on it.
Reading goes in this order:

1. Read the events of all files; see `titan_ft.history.record.kept`. For a long run many events are
   reduced: a *usual step*, about which a checker can say nothing, keeps one commit.
2. Sort them by the wall clock (`written`), and correct a wall clock that was set (`events`).
3. Feed them to a fold (`fold`). It has the groups, attempts, failures and faults.
4. Find the states that commits made (`states`), and the trajectory of the job (`chain`).

Terms:

- A *lineage* is the name of a state. A commit names the state that it made and the state that it
  changed (its parent).
- The *trajectory* is the chain of parents from the job's final state back to the first. A commit
  off the trajectory is *void*: training went back, and its update was thrown away.
- "Usual step" has a second meaning: the usual *length* of a step, `usual_step_us`. All costs in
  time are compared with this length.
"""

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
from titan_ft.history.fold.group import AttemptKey, WorkerKey, is_of_worker
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
STATE_REPLACING_EVENTS = (ev.HealFinished, ev.CheckpointLoaded, ev.RolledBack, ev.StartedAnew)
"""Events after which a process goes on from another state than the one that its commits made."""
STEADY_SECONDS = 0.1
"""A wall clock that moves by less against the monotonic clock was not set."""
SILENT_SECONDS = 10.0
"""A run that is not over is silent if it has written no event for so long, and for two steps."""
RECENT_SECONDS = 60.0
"""If no lock shows whether a launcher lives, a run with an event within this time is taken to live.
"""


@dataclass
class ProcessHistory:
    """One worker process: a rank in one attempt of its group."""

    slot: int
    rank: int
    attempt: int
    pid: int
    events: list[ev.Event] = field(default_factory=list)
    """In the order in which the process wrote them."""
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
        for event in self.events:
            if isinstance(event, ev.StepCommitted):
                yield event


@dataclass(frozen=True, slots=True)
class CurvePoint:
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

    An error in the computation of one value affects only the users of this value.

    Args:
        events: of all processes.
        cut: names of the files whose writers had more to write (see `run/appender.py`).
        is_live: True if the run was alive when its events were read, so that more events follow.
        silent_seconds: for a live run, the age of its last event at that time, if the run was
            silent; otherwise 0.
        usual_commits: the first commit of each usual step, if the events of a long run are reduced;
            see `usual_steps`.

    Attributes:
        written: the events as their processes wrote them, in the order of their wall clocks.
        computed: the results of the functions with `once_per_record`.
    """

    def __init__(
        self,
        events: Iterable[ev.Event],
        cut: Iterable[str] = (),
        *,
        is_live: bool = False,
        silent_seconds: float = 0.0,
        usual_commits: Iterable[ev.StepCommitted] = (),
    ) -> None:
        self.written = sorted(events, key=lambda event: event.time)
        self.cut = tuple(cut)
        self.is_live = is_live
        self.silent_seconds = silent_seconds
        self.usual_commits = list(usual_commits)
        self.computed: dict[Callable[..., Any], Any] = {}

    @classmethod
    def read(cls, folder: Path, *, whole: bool = False) -> RunRecord:
        """Read the event files in the folder `events` of a run.

        For a live run, events that were written during the reading are left out. Files are read one
        after the other, so the first files may lack events that the last files refer to.

        Args:
            whole: do not reduce the events of a long run, however many they are.

        Raises:
            OSError: a file cannot be read.
            ValueError: names the file and the line that is no event.
        """
        now = time.time()
        if whole:
            events, cut_files = read_history(folder)
            record = cls(events, cut_files)
        else:
            reduction, cut_files = read_reduced(folder)
            record = cls(reduction.events, cut_files, usual_commits=reduction.firsts)
            all_usual_are_on_chain = record.usual_lineages <= record.chain_lineages
            if not all_usual_are_on_chain:
                # Training went back over usual steps, and no event reports it. Each of their
                # commits counts then, so none of them may be left out.
                return cls.read(folder, whole=True)
        if not _is_live(record, RunPaths(folder.parent), now):
            return record
        settled = [event for event in record.written if event.time <= now - SETTLED_SECONDS]
        if not settled:
            settled = record.written
        silent_seconds = now - record.written[-1].time
        if silent_seconds <= _at_least_two_steps(record, SILENT_SECONDS):
            silent_seconds = 0.0
        return cls(
            settled,
            is_live=True,
            silent_seconds=silent_seconds,
            usual_commits=record.usual_commits,
        )

    @cached_property
    def events(self) -> list[ev.Event]:
        """The events with their true times.

        A wall clock may be set while a run goes on. If all events are of one host and one launch,
        its monotonic clock gives the time that really passed.
        """
        if not self.written:
            return self.written
        # `time` is of the wall clock, and `mono` of the host's monotonic clock.
        offsets = [event.time - event.mono for event in self.written]
        is_steady = max(offsets) - min(offsets) < STEADY_SECONDS
        hosts = {event.host for event in self.written if isinstance(event, ev.WorkerStarted)}
        launches = [event for event in self.written if isinstance(event, ev.LaunchStarted)]
        has_one_monotonic_clock = len(hosts) == 1 and len(launches) <= 1
        if is_steady or not has_one_monotonic_clock:
            return self.written
        first = min(self.written, key=lambda event: event.mono)
        begin = first.time - first.mono
        corrected = [
            msgspec.structs.replace(event, time=event.mono + begin) for event in self.written
        ]
        return sorted(corrected, key=lambda event: event.time)

    @cached_property
    def _by_kind(self) -> dict[type[ev.Event], list[Any]]:
        found: dict[type[ev.Event], list[Any]] = defaultdict(list)
        for event in self.events:
            found[type(event)].append(event)
        return found

    def of(self, *kinds: type[E]) -> list[E]:
        """Return the events of some kinds, one kind after the other, each in order of time."""
        found: list[E] = []
        for kind in kinds:
            found += self._by_kind.get(kind, [])
        return found

    @cached_property
    def usual_lineages(self) -> frozenset[str]:
        """The states that usual steps made, if the events are reduced."""
        return frozenset(commit.lineage for commit in self.usual_commits)

    @cached_property
    def num_omitted(self) -> int:
        """Number of commits of usual steps, by all processes, that are not among the events."""
        return sum(event.num_steps for event in self.of(UsualSteps))

    @cached_property
    def num_usual_comparisons(self) -> int:
        """Number of pairs of a usual step and a rank for which all groups have the same digest."""
        num_digests_of: dict[tuple[str, int], int] = {}
        for event in self.of(UsualSteps):
            # Each group has an event for the same usual steps of a rank: count them once.
            num_digests_of[event.parent, event.rank] = event.num_digests
        return sum(num_digests_of.values())

    @property
    def num_events(self) -> int:
        """Number of events that the processes wrote."""
        return len(self.events) - len(self.of(UsualSteps)) + self.num_omitted

    @cached_property
    def _known_commits(self) -> list[ev.StepCommitted]:
        """The commits of all ranks, in order of time; for a usual step only the first one."""
        commits = [*self.of(ev.StepCommitted), *self.usual_commits]
        return sorted(commits, key=lambda event: event.time)

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
            if not is_of_worker(event):
                continue
            key = (event.replica or 0, event.rank or 0, event.attempt or 0, event.pid)
            if key not in found:
                found[key] = ProcessHistory(*key)
            found[key].events.append(event)
        for process in found.values():
            # The wall clock may have been set meanwhile; the monotonic one cannot be.
            process.events.sort(key=lambda event: event.mono)
        for exit in self.of(ev.WorkerExited):
            ended = found.get((exit.replica, exit.rank, exit.attempt, exit.worker_pid))
            if ended is not None:
                ended.exit = exit
        # An agent that died could not report the ends of its workers.
        dead_agents: dict[AttemptKey, ev.AgentEnded] = {}
        for agent_end in self.of(ev.AgentEnded):
            dead_agents[agent_end.replica, agent_end.attempt] = agent_end
        for process in found.values():
            if process.exit is None:
                process.exit = dead_agents.get((process.slot, process.attempt))
        return list(found.values())

    @property
    def faults(self) -> list[RecordedFault]:
        """The injected faults, in order of time."""
        return self.fold.faults.injected

    @cached_property
    def attempts(self) -> dict[int, list[Attempt]]:
        """The attempts of each group that have events, in order, each with its fatal fault."""
        groups: dict[int, list[Attempt]] = defaultdict(list)
        for attempt in sorted(self.fold.attempts.values(), key=lambda attempt: attempt.number):
            groups[attempt.slot].append(attempt)
        for attempts in groups.values():
            former_end_us = 0
            for attempt in attempts:
                attempt.fault = find_fatal_fault(attempt, self.faults, former_end_us)
                former_end_us = attempt.exit_us or 0
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
        launch_sizes = [event.replicas for event in self.of(ev.LaunchStarted)]
        configs = [process.config for process in self.processes if process.config is not None]
        config_sizes = [config.group_size for config in configs]
        return max([*launch_sizes, *config_sizes], default=0)

    @property
    def unit(self) -> Unit:
        """The meaning of one commit, by the latest config: a step, or a round of several."""
        return self.fold.unit

    @cached_property
    def hang_timeout_us(self) -> int | None:
        """Microseconds without progress after which a worker ends itself; None if unknown."""
        latest: int | None = None
        for event in self.of(ev.WorkerStarted):
            if event.config is not None:
                latest = round(event.config.hang_timeout_seconds * 1e6)
        return latest

    # Time

    @cached_property
    def span_us(self) -> tuple[int, int]:
        """Begin and end of the job in Unix microseconds.

        `launch_started` and `launch_finished`, or else the first and the last event.
        """
        if not self.events:
            return 0, 0
        begin_us = self.events[0].time_us
        end_us = self.events[-1].time_us
        starts = self.of(ev.LaunchStarted)
        ends = self.of(ev.LaunchFinished)
        if starts:
            begin_us = starts[0].time_us
        if ends:
            # The last launch may have no event of its end yet. Then the end is an earlier launch's.
            is_end_of_last_launch = not starts or ends[-1].time >= starts[-1].time
            if is_end_of_last_launch:
                end_us = ends[-1].time_us
        return begin_us, max(begin_us, end_us)

    @property
    def begin(self) -> float:
        """Begin of the job in Unix seconds."""
        return self.span_us[0] / 1e6

    @property
    def launch_end(self) -> float | None:
        """When the last launch ended, in Unix seconds; None if it did not, or there was none."""
        launch = self.fold.launch
        end = self.fold.launch_end
        if launch is None or end is None:
            return None
        if end.pid != launch.pid:
            return None  # the end of another launch, whose start is missing
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

    def find_last_fault_us(self, begin_us: int, end_us: int) -> int:
        """Return the time of the last fault within a time; `begin_us` if there was none."""
        num_until_end = bisect_right(self.faults, end_us, key=lambda fault: fault.time_us)
        if num_until_end == 0:
            return begin_us
        last = self.faults[num_until_end - 1]
        return max(begin_us, last.time_us)

    # Steps and states

    @cached_property
    def curve(self) -> list[CurvePoint]:
        """The loss curve: a point for each step of the trajectory."""
        points = []
        tokens = 0
        for state in self.chain:
            commits = self.commits_by_lineage[state.lineage]
            first = commits[0]
            tokens += first.tokens
            loss: float | None = None
            for commit in commits:
                # In older histories only the ranks of a pipeline's last stage know the loss.
                if commit.loss is not None:
                    loss = commit.loss
                    break
            points.append(CurvePoint(first.step, tokens, loss, self._is_whole(commits), first))
        return points

    def _is_whole(self, commits: list[ev.StepCommitted]) -> bool:
        """Return True if all groups took part in a step, and made all local steps of a round."""
        if self.unit.method:
            num_steps = self.unit.steps_of(commits[0].step)
            for commit in commits:
                # A group that joins during a round makes fewer steps.
                if commit.inner_steps is not None and commit.inner_steps < num_steps:
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
    def commits_by_lineage(self) -> dict[str, list[ev.StepCommitted]]:
        """The commits of all ranks by the state that they made; for a usual step only the first."""
        found: dict[str, list[ev.StepCommitted]] = defaultdict(list)
        for event in self._known_commits:
            found[event.lineage].append(event)
        return found

    @cached_property
    def _states(self) -> tuple[dict[str, JobState], list[str]]:
        return read_states(self._known_commits, self.usual_lineages)

    @property
    def states(self) -> dict[str, JobState]:
        """The states that commits made, by lineage."""
        return self._states[0]

    @property
    def conflicts(self) -> list[str]:
        """Contradictions between events about a state."""
        return self._states[1]

    @cached_property
    def _finals(self) -> tuple[list[JobState], list[str]]:
        reasons_missing: list[str] = []
        if not self.states:
            return [], reasons_missing
        restarts: list[Restart] = [
            *self.of(ev.CheckpointLoaded),
            *self.of(ev.RolledBack),
            *self.of(ev.StartedAnew),
        ]
        finished = self.of(ev.TrainingFinished)
        finals = final_states(
            self.states, self.commits_by_lineage, restarts, finished, reasons_missing
        )
        return finals, reasons_missing

    @property
    def finals(self) -> list[JobState]:
        """The states with which the job may have ended, the likeliest first; usually one."""
        return self._finals[0]

    @property
    def missing_finals(self) -> list[str]:
        """Why a state that the job announced as its last one is not among them; usually empty."""
        return self._finals[1]

    @cached_property
    def chain(self) -> list[JobState]:
        """The job's trajectory, oldest state first; empty without any commit."""
        if not self.states:
            return []
        return chain_to(self.states, self.finals[0])

    @cached_property
    def chain_lineages(self) -> frozenset[str]:
        """The lineages of the trajectory."""
        return frozenset(state.lineage for state in self.chain)

    @cached_property
    def void_lineages(self) -> frozenset[str]:
        """The states that some group committed and that did not lead to the job's last state.

        Steps below a cut of the history are left out, because nothing is known of them.
        """
        lineages = set()
        for state in self.states.values():
            if state.step >= self.chain[0].step:
                lineages.add(state.lineage)
        return frozenset(lineages - self.chain_lineages)

    @cached_property
    def kept_commits(self) -> list[ev.StepCommitted]:
        """The commits of states that are not void, one per group and step."""
        return [event for event in self.commits if event.lineage not in self.void_lineages]

    @cached_property
    def contributors_of_step(self) -> dict[int, frozenset[int]]:
        """For each step, the slots of the groups whose gradients the job's update contains."""
        found: dict[int, frozenset[int]] = {}
        for state in self.states.values():
            if state.lineage in self.void_lineages:
                continue
            contributors = state.participants
            if not contributors:
                # All contributors died after the exchange, and only a group without weight reports
                # the step. Take the contributors from this report: otherwise the time of the step
                # would count as wasted.
                for commit in self.commits_by_lineage[state.lineage]:
                    contributors = contributors.union(commit.participants)
            found[state.step] = found.get(state.step, frozenset()) | contributors
        return found

    @cached_property
    def first_commit_of_step(self) -> dict[int, ev.StepCommitted]:
        """For each step of the job, its first commit by any group."""
        found: dict[int, ev.StepCommitted] = {}
        for event in self.kept_commits:
            found.setdefault(event.step, event)
        for event in self.usual_commits:
            found[event.step] = event
        return found

    @cached_property
    def usual_step_us(self) -> int:
        """The usual step: the median microseconds between consecutive steps of the job.

        0 if the job made no two steps in a row. If possible, it is the median of undisturbed steps
        only: all groups made them, with one exchange each. All costs in time refer to the usual
        step: stalls, effective training time, the cost of a joiner.
        """
        most_participants = max((len(event.participants) for event in self.commits), default=0)
        disturbed_steps = set()
        for event in self.kept_commits:
            if len(event.participants) < most_participants or event.exchanges != 1:
                disturbed_steps.add(event.step)
        gaps = []
        undisturbed_gaps = []
        for step, event in self.first_commit_of_step.items():
            before = self.first_commit_of_step.get(step - 1)
            if before is None or event.time_us <= before.time_us:
                continue
            gap = event.time_us - before.time_us
            gaps.append(gap)
            if step not in disturbed_steps and step - 1 not in disturbed_steps:
                undisturbed_gaps.append(gap)
        if undisturbed_gaps:
            return round(median(undisturbed_gaps))
        if gaps:
            return round(median(gaps))
        return 0

    @cached_property
    def usual_non_compute_seconds(self) -> float:
        """The median of `non_compute_seconds` over the steps of all groups; 0 without any."""
        found = []
        for process in self.processes:
            if process.rank != 0:
                continue
            for before, after in pairwise(process.commits()):
                found.append(non_compute_seconds(before, after))
        if not found:
            return 0.0
        return median(found)

    @property
    def usual_step_seconds(self) -> float | None:
        """The usual step in seconds; None if unknown."""
        if not self.usual_step_us:
            return None
        return self.usual_step_us / 1e6


def _is_live(record: RunRecord, paths: RunPaths, now: float) -> bool:
    """Return True if a run is alive: its launcher holds the run's folder, or an event is recent.

    Args:
        now: Unix seconds.
    """
    fold = record.fold
    if not record.events or fold.launch_end is not None:
        return False
    recent_seconds = RECENT_SECONDS
    if fold.launched:
        is_occupied = is_held(paths)
        if is_occupied:
            return True
        if is_occupied is not None:
            # The lock is free. This does not prove the launcher's end, because some file systems
            # keep a lock on the launcher's own host.
            recent_seconds = SILENT_SECONDS
    elif fold.ended:
        return False
    age = now - record.written[-1].time
    return age < _at_least_two_steps(record, recent_seconds)


def _at_least_two_steps(record: RunRecord, seconds: float) -> float:
    """Return a time, or two usual steps if these are longer: no event comes within a long step."""
    if record.usual_step_seconds is None:
        return seconds
    return max(seconds, 2 * record.usual_step_seconds)


def non_compute_seconds(before: ev.StepCommitted, after: ev.StepCommitted) -> float:
    """Return the seconds between two commits of a process in which it did not compute.

    Mostly it waits then: for the exchange, and for late groups.
    """
    return after.time - before.time - after.compute_seconds - after.apply_seconds


def once_per_record(compute: Callable[[RunRecord], T]) -> Callable[[RunRecord], T]:
    """Decorate a function of a record: it is computed once for each record.

    All callers get the same object, and must not change it.
    """

    @wraps(compute)
    def compute_once(record: RunRecord) -> T:
        if compute_once not in record.computed:
            record.computed[compute_once] = compute(record)
        result: T = record.computed[compute_once]
        return result

    return compute_once
