# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Order agents to act, and follow what they make of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from titan_ft.chaos.faults import CHECKPOINT
from titan_ft.chaos.job import Job
from titan_ft.chaos.orders import Orders
from titan_ft.chaos.processes import Unreachable
from titan_ft.chaos.record import Record
from titan_ft.chaos.schedule import Injection, Target
from titan_ft.chaos.trouble import Trouble, trouble_of
from titan_ft.run.events import FaultInjected, FaultSkipped, FaultUndone

WAIT_SECONDS = 135.0
"""An order of which nothing was heard for this long is given up. Agents tell earlier that they do, if there are any."""


@dataclass(eq=False)
class _StandingOrder:
    """A shot that an agent is to carry out and has not yet."""

    aimed: Injection
    deadline: float
    lives: dict[int, int] = field(default_factory=dict)
    """The life of each target that may obey; empty where whichever donor comes first does."""
    troubles: dict[int, Trouble] = field(default_factory=dict)
    """By replica; of those that the fault keeps from contributing."""


class StandingOrders:
    """The orders that were given and came to nothing yet.

    Args:
        clock: returns seconds that only go forward.
    """

    def __init__(self, job: Job, orders: Orders, record: Record, clock: Callable[[], float] = time.monotonic) -> None:
        self._job, self._orders, self._record, self._clock = job, orders, record, clock
        self._standing: list[_StandingOrder] = []

    @property
    def pending(self) -> bool:
        """Tell whether an agent is still to act."""
        return bool(self._standing)

    @property
    def awaits_donor(self) -> bool:
        """Tell whether a group will be hit of which nobody knows yet which it is."""
        return any(not standing.lives for standing in self._standing)

    def order(self, aimed: Injection) -> None:
        """Order the agents of the targets to act.

        Raises:
            Unreachable: the order could not be written.
        """
        standing = _StandingOrder(aimed, self._clock() + WAIT_SECONDS)
        for target in aimed.targets:
            assert target.replica is not None, "the lighthouse has no agent"
            life = standing.lives[target.replica] = self._job.life(target.replica)
            self._send(aimed, target, self._job.attempt(target.replica), _params_at(aimed, target))
            # A checkpoint that cannot be saved costs no group its part in training.
            if CHECKPOINT not in aimed.fault.needs:
                trouble = trouble_of(aimed.fault, aimed.shot, target, life)
                standing.troubles[target.replica] = trouble
                self._job.add_trouble(target.replica, trouble)
        self._standing.append(standing)

    def order_donor(self, aimed: Injection) -> None:
        """Order whichever group serves its state next to act.

        Raises:
            Unreachable: the order could not be written.
        """
        self._send(aimed, Target(), None, aimed.shot.params)
        self._standing.append(_StandingOrder(aimed, self._clock() + WAIT_SECONDS))

    def _send(self, aimed: Injection, target: Target, attempt: int | None, params: Mapping[str, float]) -> None:
        shot = aimed.shot
        where = {"replica": target.replica, "rank": target.rank, "attempt": attempt}
        try:
            self._orders.send(shot.fault, **where, params=params, seed=shot.seed, shot=shot.number)
        except OSError as error:
            raise Unreachable(f"the order could not be written ({error})") from error

    def note(self, event: FaultInjected | FaultSkipped | FaultUndone) -> None:
        """Take in what an agent tells: that it acts, that it does not, or that it has undone it."""
        replica, target = event.replica, Target(event.replica, event.rank)
        assert replica is not None, "an agent is in a worker"
        if isinstance(event, FaultUndone):
            self._job.undo(replica, (event.fault, event.shot), event.time)
            return
        standing = next((standing for standing in self._standing if _is_about(event, standing.aimed)), None)
        if standing is None:  # another rank of the group has told it, or a link's other end, or it is another runner's
            if isinstance(event, FaultSkipped):
                self._job.undo(replica, (event.fault, event.shot), event.time)
            return
        self._standing.remove(standing)
        shot = standing.aimed.shot
        if isinstance(event, FaultSkipped):
            self._drop(standing)
            self._record.missed_by_agent(shot, target, event.reason)
            self._record.count(False)
            return
        if not standing.lives:
            trouble = trouble_of(standing.aimed.fault, shot, target, self._job.life(replica))
            standing.troubles[replica] = trouble
            self._job.add_trouble(replica, trouble)
        for trouble in standing.troubles.values():  # of a link both ends, although only one has spoken yet
            trouble.act(event.time, event.step)
        peer = (event.params or {}).get("peer")
        self._record.hit(shot.fault, target, "" if peer is None else f", to replica {peer}")
        self._record.count(True)

    def give_up(self) -> None:
        """Stop waiting for agents that are gone, or that do not act."""
        now = self._clock()
        for standing in list(self._standing):
            if self._job.ended:
                reason = "the job's training ended first"
            elif any(self._job.life(replica) != life for replica, life in standing.lives.items()):
                reason = "the group was started anew before its agent acted"
            elif now >= standing.deadline:
                reason = f"no agent has acted within {WAIT_SECONDS:g} s"
            else:
                continue
            self._standing.remove(standing)
            self._drop(standing)
            target = standing.aimed.targets[0] if standing.lives else None
            self._record.missed(standing.aimed.shot, target, reason)
            self._record.count(False)

    def _drop(self, standing: _StandingOrder) -> None:
        for replica, trouble in standing.troubles.items():
            self._job.drop_trouble(replica, trouble)


def _params_at(aimed: Injection, target: Target) -> Mapping[str, float]:
    """Return the parameters for one target: each end of a link is told the other one."""
    if aimed.fault.scope != "link":
        return aimed.shot.params
    (peer,) = (other.replica for other in aimed.targets if other != target)
    assert peer is not None, "a link's ends are groups"
    return {**aimed.shot.params, "peer": peer}


def _is_about(event: FaultInjected | FaultSkipped, aimed: Injection) -> bool:
    shot = aimed.shot
    return (event.fault, event.shot, event.seed) == (shot.fault, shot.number, shot.seed)
