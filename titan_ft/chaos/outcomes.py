# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Announce what becomes of a plan's shots, in the run's events and to the person who watches, and count it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from titan_ft.chaos.plan import Plan
from titan_ft.chaos.schedule import Shot
from titan_ft.history.fold.faults import InjectedFaults
from titan_ft.run.events import ChaosFinished, ChaosStarted, FaultInjected, FaultSkipped, FaultUndone, Target
from titan_ft.run.log import EventLog


class Outcomes:
    """What became of the shots of a plan.

    Args:
        events: where it is announced.
        show: called with a line for a person.
    """

    def __init__(self, events: EventLog, show: Callable[[str], None]) -> None:
        self.num_hit = self.num_skipped = 0
        """Shots; one with several targets has hit when one of them was hit."""
        self.last_reason = ""
        """Why the shot that was skipped last was."""
        self._events, self._show, self._faults = events, show, InjectedFaults()

    @property
    def num_injected(self) -> int:
        """Faults, as every view of the run counts them."""
        return self._faults.num_injected

    def started(self, plan: Plan) -> None:
        """Announce that the schedule's clock runs from now on."""
        self._events.emit(ChaosStarted(seed=plan.seed, plan=plan.name, schedule=str(plan)))
        self._show(f"chaos starts: {plan.name} with seed {plan.seed}")

    def finished(self) -> None:
        """Announce that nothing more will be injected."""
        self._events.emit(ChaosFinished(injected=self.num_injected, skipped=self.num_skipped))

    def injecting(self, fault: str, target: Target, shot: Shot, params: Mapping[str, float | str]) -> None:
        """Announce that a target is about to be hit, just before it is; what agents do they announce themselves."""
        event = FaultInjected(fault=fault, target=target, seed=shot.seed, shot=shot.number, params=dict(params))
        self._events.emit(event)
        self.announced(event)

    def announced(self, event: FaultInjected) -> None:
        """Count a fault of this plan that was announced, here or by an agent."""
        self._faults.observe(event)

    def hit(self, fault: str, target: Target, why: str = "") -> None:
        """Show that a target was hit."""
        self._show(f"chaos: {_at(fault, target)}{why}")

    def undone(self, shot: Shot, target: Target) -> None:
        """Announce that the fault in the target was undone."""
        self._events.emit(FaultUndone(fault=shot.fault.name, target=target, shot=shot.number))
        self._show(f"chaos: {_at(shot.fault.name, target)} undone")

    def missed(self, shot: Shot, target: Target | None, reason: str, *, by_agent: bool = False) -> None:
        """Announce that a target, or the shot as a whole, is not hit; an agent has announced it by an event already."""
        fault = shot.fault.name
        if not by_agent:
            self._events.emit(FaultSkipped(fault=fault, target=target, shot=shot.number, reason=reason))
        self.last_reason = reason
        self._show(f"chaos: {fault if target is None else _at(fault, target)} skipped: {reason}")

    def count(self, hit: bool) -> None:
        """Count a shot that is settled."""
        self.num_hit += hit
        self.num_skipped += not hit


def _at(fault: str, target: Target) -> str:
    if target.replica is None:
        return fault
    return f"{fault} at group {target.replica}" + ("" if target.rank is None else f" rank {target.rank}")
