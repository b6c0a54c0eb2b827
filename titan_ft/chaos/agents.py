# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Order the chaos agents in the workers to act, and follow the results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from titan_ft.chaos.effect import Effect
from titan_ft.chaos.job import RunningJob
from titan_ft.chaos.orders import Order
from titan_ft.chaos.outcomes import Outcomes
from titan_ft.chaos.processes import Unreachable
from titan_ft.chaos.schedule import Injection, Shot
from titan_ft.faults.fault import Fault, Need
from titan_ft.faults.inside import CutLink
from titan_ft.run.events import FaultInjected, FaultSkipped, FaultUndone, Target

WAIT_SECONDS = 135.0
"""Time until an order without any answer is given up. A live agent gives up earlier."""


Key = tuple[str, int | None, int | None]
"""Fault, number and seed of a shot."""


@dataclass(eq=False)
class _Pending:
    """An injection that was ordered and has no answer yet."""

    aimed: Injection
    deadline: float
    starts: dict[int, int] = field(default_factory=dict)
    """Number of starts of each target group at the order. Empty if the next donor is the target."""
    effects: list[Effect] = field(default_factory=list)
    """Effects that keep groups from contributing."""


class Agents:
    """The chaos agents of a job's workers. `ChaosRunner` calls it, on one thread.

    Args:
        orders: the file that the agents follow.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        job: RunningJob,
        orders: Path,
        outcomes: Outcomes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job = job
        self._orders = orders
        self._outcomes = outcomes
        self._clock = clock
        self._pending: dict[Key, _Pending] = {}
        self._ordered: set[Key] = set()

    @property
    def busy(self) -> bool:
        """True while an order has no answer."""
        return bool(self._pending)

    @property
    def awaits_donor(self) -> bool:
        """True while an order is for the next donor, whose group is not known yet."""
        return any(not pending.starts for pending in self._pending.values())

    def order(self, aimed: Injection) -> None:
        """Order the agents of the targets to act. A donor is the next group to serve its state.

        Raises:
            Unreachable: the order could not be written.
        """
        shot = aimed.shot
        fault = shot.fault
        pending = _Pending(aimed, self._clock() + WAIT_SECONDS)
        if fault.scope == "donor":
            self._write_order(shot, fault, Target(), None)
        else:
            for target in aimed.targets:
                assert target.replica is not None, "the lighthouse has no agent"
                group = self._job.group(target.replica)
                pending.starts[target.replica] = group.num_starts
                self._write_order(shot, _fault_at(aimed, target), target, group.attempt)
            # A group whose checkpoint fails trains on, so the fault has no effect on it.
            if Need.CHECKPOINT not in fault.needs:
                for target in aimed.targets:
                    pending.effects.append(self._job.add_effect(fault, shot.number, target))
        self._pending[shot.key] = pending

    def _write_order(self, shot: Shot, fault: Fault, target: Target, attempt: int | None) -> None:
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
            order.append_to(self._orders)
        except OSError as error:
            raise Unreachable(f"the order could not be written ({error})") from error

    def observe(self, event: FaultInjected | FaultSkipped | FaultUndone) -> None:
        """Handle an agent's event about a fault."""
        replica = event.replica
        assert replica is not None, "an agent is in a worker"
        if isinstance(event, FaultUndone):
            self._job.mark_effect_undone(replica, event.fault, event.shot, event.time)
            return
        key = (event.fault, event.shot, event.seed)
        # An answer counts even if it comes after the order was given up.
        if isinstance(event, FaultInjected) and key in self._ordered:
            self._outcomes.count_injected(event)
        pending = self._pending.pop(key, None)
        if pending is None:
            # Another rank of the group or the other end of a link was first, or the order is
            # another runner's.
            if isinstance(event, FaultSkipped):
                self._job.mark_effect_undone(replica, event.fault, event.shot, event.time)
            return
        target = Target(replica, event.rank)
        if isinstance(event, FaultSkipped):
            self._report_miss(pending, target, event.reason, by_agent=True)
        else:
            self._mark_hit(pending, target, event)

    def _mark_hit(self, pending: _Pending, target: Target, event: FaultInjected) -> None:
        shot = pending.aimed.shot
        if not pending.starts:
            pending.effects.append(self._job.add_effect(shot.fault, shot.number, target))
        # A link has two effects, one at each end, and only the first agent gets here.
        for effect in pending.effects:
            effect.mark_struck(event.time, event.step)
        peer = (event.params or {}).get("peer")
        detail = "" if peer is None else f", to group {peer:g}"
        self._outcomes.show_hit(shot.fault.name, target, detail)
        self._outcomes.count_shot(hit=True)

    def give_up(self) -> None:
        """Give up orders whose agents are gone, or have not answered in time."""
        for key, pending in list(self._pending.items()):
            reason = self._reason_to_give_up(pending)
            if reason:
                del self._pending[key]
                target = pending.aimed.targets[0] if pending.starts else None
                self._report_miss(pending, target, reason)

    def _reason_to_give_up(self, pending: _Pending) -> str:
        """Return why the order has no chance any more; empty if the wait goes on."""
        if self._job.ended:
            return "the job's training ended first"
        for replica, num_starts in pending.starts.items():
            if self._job.group(replica).num_starts != num_starts:
                return "the group was started anew before its agent acted"
        if self._clock() >= pending.deadline:
            return f"no agent has acted within {WAIT_SECONDS:g} s"
        return ""

    def _report_miss(
        self, pending: _Pending, target: Target | None, reason: str, *, by_agent: bool = False
    ) -> None:
        for effect in pending.effects:
            self._job.drop_effect(effect)
        self._outcomes.report_skipped(pending.aimed.shot, target, reason, by_agent=by_agent)
        self._outcomes.count_shot(hit=False)


def _fault_at(aimed: Injection, target: Target) -> Fault:
    """Return the fault for one target: each end of a link gets the number of the other end."""
    fault = aimed.shot.fault
    if not isinstance(fault, CutLink):
        return fault
    (peer,) = (other.replica for other in aimed.targets if other != target)
    return msgspec.structs.replace(fault, peer=peer)
