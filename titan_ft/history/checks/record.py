# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A run's events, sorted for the checkers: by process, by committed state, by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from titan_ft.history.failures import contributed, is_of_worker
from titan_ft.history.trajectory import State, chain_to, final_states, read_states
from titan_ft.run.events import (
    CheckpointLoaded,
    Drained,
    Event,
    HealFinished,
    LaunchFinished,
    LaunchStarted,
    RolledBack,
    StartedAnew,
    StepCommitted,
    TrainingFinished,
    WorkerConfig,
    WorkerExited,
    WorkerStarted,
)

E = TypeVar("E", bound=Event)
Healed = HealFinished | CheckpointLoaded | RolledBack | StartedAnew
"""After these a process goes on from another state than the one it held."""


@dataclass
class Process:
    """One worker process: a rank in one attempt of its group. Its events are in the order in which it wrote them."""

    replica: int
    rank: int
    attempt: int
    pid: int
    events: list[Event] = field(default_factory=list)
    exit: WorkerExited | None = None
    """What its supervisor told of its end."""

    @property
    def name(self) -> str:
        return f"replica {self.replica}, attempt {self.attempt}, rank {self.rank}"

    @property
    def config(self) -> WorkerConfig | None:
        """Return what it told of its config; None where that is missing."""
        return next((event.config for event in self.events if isinstance(event, WorkerStarted)), None)

    @property
    def ended_in_order(self) -> bool:
        """Say whether it told that it finished, or left because it was asked to."""
        return any(isinstance(event, TrainingFinished | Drained) for event in self.events)

    def commits(self) -> Iterator[StepCommitted]:
        """Yield its commits."""
        return (event for event in self.events if isinstance(event, StepCommitted))


class Record:
    """The events of a run. Everything is worked out when it is first asked for: what fails there fails one checker."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = sorted(events, key=lambda event: event.time)

    @cached_property
    def _by_kind(self) -> dict[type[Event], list[Event]]:
        found: dict[type[Event], list[Event]] = defaultdict(list)
        for event in self.events:
            found[type(event)].append(event)
        return found

    def of(self, *kinds: type[E]) -> list[E]:
        """Return the events of some kinds, in order of time if it is one."""
        found: list[Any] = [event for kind in kinds for event in self._by_kind.get(kind, [])]
        return found

    @cached_property
    def processes(self) -> list[Process]:
        """Return the worker processes."""
        found: dict[tuple[int, int, int, int], Process] = {}
        for event in self.events:
            if is_of_worker(event):
                key = (event.replica or 0, event.rank or 0, event.attempt or 0, event.pid)
                found.setdefault(key, Process(*key)).events.append(event)
        for process in found.values():
            # The wall clock may have been set meanwhile; the other one cannot be.
            process.events.sort(key=lambda event: event.mono)
        for exit in self.of(WorkerExited):
            ended = found.get((exit.replica, exit.rank, exit.attempt, exit.worker_pid))
            if ended is not None:
                ended.exit = exit
        return list(found.values())

    @cached_property
    def commits(self) -> dict[str, list[StepCommitted]]:
        """Return the commits of all ranks by the state that they made."""
        found: dict[str, list[StepCommitted]] = defaultdict(list)
        for event in self.of(StepCommitted):
            found[event.lineage].append(event)
        return found

    @cached_property
    def states(self) -> dict[str, State]:
        """Return the states that commits made."""
        return read_states(self.of(StepCommitted), [])

    @cached_property
    def chain(self) -> list[State]:
        """Return the job's trajectory, oldest state first; empty without any commit."""
        if not self.states:
            return []
        return chain_to(self.states, final_states(self.states, self.events, [])[0])

    @cached_property
    def on_chain(self) -> frozenset[str]:
        """Return the lineages of the trajectory."""
        return frozenset(state.lineage for state in self.chain)

    @cached_property
    def replicas(self) -> list[int]:
        """Return the groups that wrote events."""
        return sorted({process.replica for process in self.processes})

    @cached_property
    def group_size(self) -> int:
        """Return how many groups the job has when all are there; 0 if nothing tells."""
        told = [process.config.group_size for process in self.processes if process.config is not None]
        told += [event.replicas for event in self.of(LaunchStarted)]
        return max(told, default=0)

    @cached_property
    def launch_end(self) -> float | None:
        """Return when the last launch ended, or None if it did not, or there was none."""
        started = self.of(LaunchStarted)
        if not started:
            return None
        ends = [event.time for event in self.of(LaunchFinished) if event.pid == started[-1].pid]
        return max(ends, default=None)

    @cached_property
    def step_seconds(self) -> float | None:
        """Return the median duration of a step, or None without any."""
        seconds = sorted(event.seconds for event in self.of(StepCommitted) if contributed(event))
        return seconds[len(seconds) // 2] if seconds else None

    def participants(self, lineage: str) -> frozenset[int]:
        """Return the groups that gave weight to a state, as the first event that made it says."""
        return frozenset(self.commits[lineage][0].participants) if lineage in self.commits else frozenset()
