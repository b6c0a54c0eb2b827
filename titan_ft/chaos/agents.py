# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Carry out the faults that happen inside workers: order their agents to act, and follow what comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from titan_ft.chaos.effect import Effect
from titan_ft.chaos.job import Job
from titan_ft.chaos.orders import Order
from titan_ft.chaos.outcomes import Outcomes
from titan_ft.chaos.processes import Unreachable
from titan_ft.chaos.schedule import Injection, Shot
from titan_ft.faults.fault import Fault, Need
from titan_ft.faults.inside import CutLink
from titan_ft.run.events import FaultInjected, FaultSkipped, FaultUndone, Target

WAIT_SECONDS = 135.0
"""An order of which nothing was heard for this long is given up. Agents give up earlier, if there are any."""


Key = tuple[str, int | None, int | None]
"""Fault, number and seed of a shot."""


@dataclass(eq=False)
class _Pending:
    """An injection that was ordered, and of which nothing was heard yet."""

    aimed: Injection
    deadline: float
    lives: dict[int, int] = field(default_factory=dict)
    """The life of each target whose agents may carry out the order; empty when the first donor does."""
    effects: list[Effect] = field(default_factory=list)
    """Those that keep groups from contributing."""


class Agents:
    """The agents of a job's workers.

    Args:
        orders: the file that they follow.
        clock: returns seconds that only go forward.
    """

    def __init__(self, job: Job, orders: Path, outcomes: Outcomes, clock: Callable[[], float] = time.monotonic) -> None:
        self._job, self._orders, self._outcomes, self._clock = job, orders, outcomes, clock
        self._pending: dict[Key, _Pending] = {}
        self._ordered: set[Key] = set()

    @property
    def busy(self) -> bool:
        """Tell whether an agent is still to act."""
        return bool(self._pending)

    @property
    def awaits_donor(self) -> bool:
        """Tell whether a group will be hit of which nobody knows yet which it is."""
        return any(not pending.lives for pending in self._pending.values())

    def order(self, aimed: Injection) -> None:
        """Order the agents of the targets to act; for a donor, those of whichever group serves its state next.

        Raises:
            Unreachable: the order could not be written.
        """
        shot, fault = aimed.shot, aimed.shot.fault
        pending = _Pending(aimed, self._clock() + WAIT_SECONDS)
        if fault.scope == "donor":
            self._give(shot, fault, Target(), None)
        else:
            for target in aimed.targets:
                assert target.replica is not None, "the lighthouse has no agent"
                group = self._job.group(target.replica)
                pending.lives[target.replica] = group.life
                self._give(shot, _fault_at(aimed, target), target, group.attempt)
            # A group whose checkpoint cannot be saved trains on: it is not affected.
            if Need.CHECKPOINT not in fault.needs:
                pending.effects = [self._job.affect(fault, shot.number, target) for target in aimed.targets]
        self._pending[shot.key] = pending

    def _give(self, shot: Shot, fault: Fault, target: Target, attempt: int | None) -> None:
        self._ordered.add(shot.key)
        order = Order(
            fault=fault.name,
            replica=target.replica,
            rank=target.rank,
            attempt=attempt,
            params=fault.params,
            seed=shot.seed,
            shot=shot.number,
        )
        try:
            order.give(self._orders)
        except OSError as error:
            raise Unreachable(f"the order could not be written ({error})") from error

    def observe(self, event: FaultInjected | FaultSkipped | FaultUndone) -> None:
        """Take in what an agent announces: that it acts, that it does not, or that it has undone it."""
        replica, target = event.replica, Target(event.replica, event.rank)
        assert replica is not None, "an agent is in a worker"
        if isinstance(event, FaultUndone):
            self._job.undo(replica, event.fault, event.shot, event.time)
            return
        key = (event.fault, event.shot, event.seed)
        if isinstance(event, FaultInjected) and key in self._ordered:
            self._outcomes.announced(event)  # also one that comes after it was given up
        pending = self._pending.pop(key, None)
        if pending is None:  # another rank of the group was first, or a link's other end, or it is another runner's
            if isinstance(event, FaultSkipped):
                self._job.undo(replica, event.fault, event.shot, event.time)
            return
        aimed = pending.aimed
        if isinstance(event, FaultSkipped):
            self._miss(pending, target, event.reason, by_agent=True)
            return
        if not pending.lives:
            pending.effects.append(self._job.affect(aimed.shot.fault, aimed.shot.number, target))
        for effect in pending.effects:  # both ends of a link, though only one has announced it
            effect.begin(event.time, event.step)
        peer = (event.params or {}).get("peer")
        self._outcomes.hit(aimed.shot.fault.name, target, "" if peer is None else f", to group {peer:g}")
        self._outcomes.count(True)

    def give_up(self) -> None:
        """Stop waiting for agents that are gone, or that do not act."""
        now = self._clock()
        for key, pending in list(self._pending.items()):
            if self._job.ended:
                reason = "the job's training ended first"
            elif any(self._job.group(replica).life != life for replica, life in pending.lives.items()):
                reason = "the group was started anew before its agent acted"
            elif now >= pending.deadline:
                reason = f"no agent has acted within {WAIT_SECONDS:g} s"
            else:
                continue
            del self._pending[key]
            self._miss(pending, pending.aimed.targets[0] if pending.lives else None, reason)

    def _miss(self, pending: _Pending, target: Target | None, reason: str, *, by_agent: bool = False) -> None:
        for effect in pending.effects:
            self._job.calm(effect)
        self._outcomes.missed(pending.aimed.shot, target, reason, by_agent=by_agent)
        self._outcomes.count(False)


def _fault_at(aimed: Injection, target: Target) -> Fault:
    """Return the fault for one target: each end of a link gets the number of the other."""
    fault = aimed.shot.fault
    if not isinstance(fault, CutLink):
        return fault
    (peer,) = (other.replica for other in aimed.targets if other != target)
    return msgspec.structs.replace(fault, peer=peer)
