# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Fold a running job's events into what a fault needs to know: who contributes, who is in trouble, which processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from titan_ft.chaos.faults import AGENT, CHECKPOINT, LIGHTHOUSE
from titan_ft.chaos.processes import Worker
from titan_ft.chaos.schedule import GroupView, Target, View
from titan_ft.chaos.trouble import Trouble

Event = Mapping[str, Any]

_KEPT_DIGESTS = 8
"""Newest steps whose digests are compared."""


@dataclass
class _Group:
    """What is known of one group. A life is one start of its workers."""

    replica: int
    life: int = 0
    attempt: int | None = None
    dead: bool = False
    """This life is over, or about to be."""
    contributes: bool = False
    left_out_of: int = -1
    """Newest step that others committed without it."""
    workers: dict[int, Worker] = field(default_factory=dict)
    troubles: list[Trouble] = field(default_factory=list)

    @property
    def up(self) -> bool:
        return self.contributes and not self.dead and not self.troubles


class Job:
    """A running job as its events show it. Events that come twice do no harm."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._stopping = False
        self._finished: set[int] = set()
        self.trained_together = False
        """A step to which all groups contributed has been committed."""
        self._num_groups = 0
        self._num_ranks = 1
        self._groups: dict[int, _Group] = {}
        self._has = {AGENT: True, CHECKPOINT: True}  # until the job says otherwise; an order may then find no taker
        self._digests: dict[int, dict[tuple[int, int], tuple[str, float]]] = {}

    @property
    def ended(self) -> bool:
        """Tell whether its training is over, or being stopped: nothing that is broken now would be repaired."""
        return self._stopping or bool(self._finished)

    def view(self, *, lighthouse: bool) -> View:
        """Return what faults are aimed by."""
        available = {name for name, there in self._has.items() if there} | ({LIGHTHOUSE} if lighthouse else set())
        replicas = sorted({*range(self._num_groups), *self._groups})
        return View(
            {replica: GroupView(replica, self._num_ranks, self._group(replica).up) for replica in replicas},
            frozenset(available),
        )

    def everyone(self) -> list[Worker]:
        """Return all workers of the groups' newest lives."""
        return [worker for group in self._groups.values() for worker in group.workers.values()]

    def workers(self, target: Target) -> list[Worker]:
        """Return the workers that a target stands for; those that are known."""
        assert target.replica is not None, "the lighthouse is no worker"
        workers = self._group(target.replica).workers
        return [worker for rank, worker in sorted(workers.items()) if target.rank in (None, rank)]

    def attempt(self, replica: int) -> int | None:
        """Return the number of the group's newest start, as its workers tell it."""
        return self._group(replica).attempt

    def life(self, replica: int) -> int:
        """Return how often the group's workers were seen to start."""
        return self._group(replica).life

    def add_trouble(self, replica: int, trouble: Trouble) -> None:
        """Note that the group is not up until it has shown that the trouble is over."""
        self._group(replica).troubles.append(trouble)

    def drop_trouble(self, replica: int, trouble: Trouble) -> None:
        """Note that it never came to that."""
        group = self._group(replica)
        group.troubles = [other for other in group.troubles if other is not trouble]

    def undo(self, replica: int, key: tuple[str | None, int | None], time: float) -> None:
        """Note that the trouble that a shot made for the group was undone."""
        for trouble in self._group(replica).troubles:
            if trouble.key == key:
                trouble.undo(time)

    def fold(self, event: Event) -> None:
        """Take in one event; they should come in order of time."""
        name, replica = event["event"], event.get("replica")
        match name:
            case "launch_started":  # a run directory may hold several launches
                self._forget()
                self._num_groups, self._num_ranks = event.get("replicas", 0), event.get("ranks_per_replica", 1)
            case "launch_stopping" | "launch_finished":
                self._stopping = True
            case "gradient_excluded":
                for slot in event.get("slots") or ():
                    for trouble in self._group(slot).troubles:
                        trouble.exclude(event["time"])
            case "fault_injected" if "attempt" not in event:
                self._disturbed_from_outside(event)
        if isinstance(replica, int):
            self._fold_group(self._group(replica), event)

    def _fold_group(self, group: _Group, event: Event) -> None:
        name = event["event"]
        if name == "worker_started":
            self._start(group, event)
        if "attempt" not in event or event["attempt"] != group.attempt:
            return  # what an earlier life said, or a supervisor about the next one
        if name == "step_committed":
            self._commit(group, event)
        elif name == "training_finished":
            self._finished.add(group.replica)
        elif name in ("worker_exited", "drained", "hung", "rank_silent", "replica_gave_up"):
            worker = group.workers.get(event.get("rank", 0))
            if worker is None or event.get("worker_pid", worker.pid) == worker.pid:
                group.dead, group.contributes = True, False
        if name == "heal_finished":
            for trouble in group.troubles:
                trouble.heal(event["time"])

    def _start(self, group: _Group, event: Event) -> None:
        """Note a worker; the first one of a new start ends what was known of the last."""
        rank, attempt = event.get("rank", 0), event.get("attempt", 0)
        known = group.workers.get(rank)
        if attempt != group.attempt or (known is not None and known.pid != event["pid"]):
            group.life += 1
            group.attempt, group.workers = attempt, {}
            group.dead, group.contributes, group.left_out_of = False, False, -1
            self._finished.discard(group.replica)
        name = f"rank {rank} of replica {group.replica}"
        where = (event.get("host") or "", event.get("mono"), event.get("slurm"))
        group.workers[rank] = Worker(name, event["pid"], *where)
        self._num_ranks = max(self._num_ranks, rank + 1)
        config = event.get("config") or {}
        self._num_groups = self._num_groups or config.get("group_size", 0)
        self._has = {AGENT: bool(config.get("chaos", True)), CHECKPOINT: bool(config.get("checkpoint", True))}

    def _commit(self, group: _Group, event: Event) -> None:
        """Note who contributed to a step. That a group is up, only its own word shows."""
        step, participants = event.get("step", 0), event.get("participants") or []
        rank = event.get("rank", 0)
        if event.get("digest"):
            self._compare(step, (group.replica, rank), event)
        if rank != 0:
            return
        if self._num_groups and all(replica in participants for replica in range(self._num_groups)):
            self.trained_together = True
        for other in self._groups.values():
            if other.replica not in participants:
                other.contributes, other.left_out_of = False, max(step, other.left_out_of)
        if group.replica in participants and not group.dead and step > group.left_out_of:
            group.troubles = [trouble for trouble in group.troubles if not trouble.over(group.life, event["time"])]
            group.contributes = True

    def _compare(self, step: int, who: tuple[int, int], event: Event) -> None:
        """Tell groups with a flipped bit when a digest of theirs is another group's too: then it is gone."""
        digests = self._digests.setdefault(step, {})
        digests[who] = (event["digest"], event["time"])
        for old in sorted(self._digests)[:-_KEPT_DIGESTS]:
            del self._digests[old]
        for group in self._groups.values():
            mine, time = digests.get((group.replica, who[1]), ("", 0.0))
            others = [digest for (replica, rank), (digest, _) in digests.items() if replica != group.replica]
            for trouble in group.troubles:
                if mine in others and (trouble.rank or 0) == who[1]:
                    trouble.agree(step, time)

    def _disturbed_from_outside(self, event: Event) -> None:
        """Note a fault that a runner injected, unless this process did, which knows of it."""
        target = event.get("target")
        replica = target.get("replica") if isinstance(target, Mapping) else target
        if event.get("pid") != os.getpid() and isinstance(replica, int) and not isinstance(replica, bool):
            self._group(replica).contributes = False

    def _group(self, replica: int) -> _Group:
        return self._groups.setdefault(replica, _Group(replica))
