# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A run's events, sorted for the checkers: by process, by committed state, by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from titan_ft.history.events import Event
from titan_ft.history.failures import SUPERVISOR_EVENTS, contributed, integer, number
from titan_ft.history.trajectory import State, chain_to, final_states, read_states

HEALED = ("heal_finished", "checkpoint_loaded", "rolled_back", "started_anew")
"""After these a process goes on from another state than the one it held."""


@dataclass
class Process:
    """One worker process: a rank in one attempt of its group. Its events are in the order in which it wrote them."""

    replica: int
    rank: int
    attempt: int
    pid: int
    events: list[Event] = field(default_factory=list)
    exit: Event | None = None
    """What its supervisor told of its end."""

    @property
    def name(self) -> str:
        return f"replica {self.replica}, attempt {self.attempt}, rank {self.rank}"

    @property
    def config(self) -> dict[str, Any]:
        """Return what it told of its config; empty in histories that do not tell."""
        started = next((event for event in self.events if event["event"] == "worker_started"), {})
        config = started.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def ended_in_order(self) -> bool:
        """Say whether it told that it finished, or left because it was asked to."""
        return any(event["event"] in ("training_finished", "drained") for event in self.events)

    def commits(self) -> Iterator[Event]:
        """Yield its commits that name a state."""
        return (event for event in self.events if is_commit(event))


def is_commit(event: Event) -> bool:
    """Tell whether an event is a commit that names the state that it made."""
    return event["event"] == "step_committed" and isinstance(event.get("lineage"), str)


class Record:
    """The events of a run. Everything is worked out when it is first asked for: what fails there fails one checker."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = sorted(events, key=lambda event: event["time"])

    @cached_property
    def by_name(self) -> dict[str, list[Event]]:
        """Return the events of each name."""
        found: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            found[event["event"]].append(event)
        return found

    def named(self, *names: str) -> list[Event]:
        """Return the events of some names, in order of time if it is one."""
        return [event for name in names for event in self.by_name.get(name, [])]

    @cached_property
    def processes(self) -> list[Process]:
        """Return the worker processes."""
        found: dict[tuple[int, int, int, int], Process] = {}
        for event in self.events:
            if event["event"] not in SUPERVISOR_EVENTS and number(event, "replica") is not None and "rank" in event:
                key = tuple(integer(event, name) for name in ("replica", "rank", "attempt", "pid"))
                process = found.setdefault(key, Process(*key))  # type: ignore[arg-type]  # four of them
                process.events.append(event)
        for process in found.values():
            # The wall clock may have been set meanwhile; the other one cannot be.
            if all(number(event, "mono") is not None for event in process.events):
                process.events.sort(key=lambda event: event["mono"])
        for event in self.named("worker_exited"):
            replica, rank, attempt = (integer(event, name) for name in ("replica", "rank", "attempt"))
            pid = number(event, "worker_pid")
            for process in found.values():
                if (process.replica, process.rank, process.attempt) == (replica, rank, attempt) and pid in (
                    None,
                    process.pid,
                ):
                    process.exit = event
        return list(found.values())

    @cached_property
    def commits(self) -> dict[str, list[Event]]:
        """Return the commits of all ranks by the state that they made."""
        found: dict[str, list[Event]] = defaultdict(list)
        for event in self.named("step_committed"):
            if is_commit(event):
                found[event["lineage"]].append(event)
        return found

    @cached_property
    def states(self) -> dict[str, State]:
        """Return the states that commits made."""
        return read_states(self.named("step_committed"), [], [])

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
        told = [integer(process.config, "group_size") for process in self.processes]
        told += [integer(event, "replicas") for event in self.named("launch_started")]
        return max(told, default=0)

    @cached_property
    def launch_end(self) -> float | None:
        """Return when the last launch ended, or None if it did not, or there was none."""
        started = self.named("launch_started")
        if not started:
            return None
        ends = [event["time"] for event in self.named("launch_finished") if event["pid"] == started[-1]["pid"]]
        return max(ends, default=None)

    @cached_property
    def step_seconds(self) -> float | None:
        """Return the median duration of a step, or None without any."""
        seconds = sorted(
            value
            for event in self.named("step_committed")
            if contributed(event) and (value := number(event, "seconds")) is not None
        )
        return seconds[len(seconds) // 2] if seconds else None

    def participants(self, lineage: str) -> frozenset[int]:
        """Return the groups that gave weight to a state, as the first event that made it says."""
        told = next((event.get("participants") for event in self.commits[lineage]), None)
        return frozenset(slot for slot in told or [] if isinstance(slot, int))
