# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Report and count the outcomes of a plan's shots, in the run's events and on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from titan_ft.chaos.plan import Plan
from titan_ft.chaos.schedule import Shot
from titan_ft.history.fold.faults import InjectedFaults
from titan_ft.run.events import (
    ChaosFinished,
    ChaosStarted,
    FaultInjected,
    FaultSkipped,
    FaultUndone,
    Target,
)
from titan_ft.run.log import EventLog


class Outcomes:
    """The outcomes of a plan's shots.

    Args:
        events: log of the runner's events.
        show: called with a line for a person.
    """

    def __init__(self, events: EventLog, show: Callable[[str], None]) -> None:
        self.num_hit = 0
        """Shots that hit at least one target."""
        self.num_skipped = 0
        """Shots that hit no target."""
        self.last_reason = ""
        """Reason of the last skipped shot."""
        self._events = events
        self._show = show
        self._faults = InjectedFaults()

    @property
    def num_injected(self) -> int:
        """Number of injected faults, by the same count as in all views of the run."""
        return self._faults.num_injected

    def report_start(self, plan: Plan) -> None:
        """Report that the schedule's clock runs from now on."""
        self._events.emit(ChaosStarted(seed=plan.seed, plan=plan.name, schedule=str(plan)))
        self._show(f"chaos starts: {plan.name} with seed {plan.seed}")

    def report_finish(self) -> None:
        """Report that no more faults will be injected."""
        self._events.emit(ChaosFinished(injected=self.num_injected, skipped=self.num_skipped))

    def announce_injection(
        self, fault: str, target: Target, shot: Shot, params: Mapping[str, float | str]
    ) -> None:
        """Write the event just before a target is hit. Agents write those of their own faults."""
        event = FaultInjected(
            fault=fault, target=target, seed=shot.seed, shot=shot.number, params=dict(params)
        )
        self._events.emit(event)
        self.count_injected(event)

    def count_injected(self, event: FaultInjected) -> None:
        """Count a fault of this plan, from this process or from an agent."""
        self._faults.observe(event)

    def show_hit(self, fault: str, target: Target, detail: str = "") -> None:
        self._show(f"chaos: {_at(fault, target)}{detail}")

    def report_undone(self, shot: Shot, target: Target) -> None:
        """Report that the fault in the target was undone."""
        fault = shot.fault.name
        self._events.emit(FaultUndone(fault=fault, target=target, shot=shot.number))
        self._show(f"chaos: {_at(fault, target)} undone")

    def report_skipped(
        self, shot: Shot, target: Target | None, reason: str, *, by_agent: bool = False
    ) -> None:
        """Report that a target, or the whole shot, is not hit.

        Args:
            target: None = the whole shot.
            by_agent: an agent has written the event already.
        """
        fault = shot.fault.name
        if not by_agent:
            event = FaultSkipped(fault=fault, target=target, shot=shot.number, reason=reason)
            self._events.emit(event)
        self.last_reason = reason
        name = fault if target is None else _at(fault, target)
        self._show(f"chaos: {name} skipped: {reason}")

    def count_shot(self, hit: bool) -> None:
        """Count a shot whose outcome is known."""
        if hit:
            self.num_hit += 1
        else:
            self.num_skipped += 1


def _at(fault: str, target: Target) -> str:
    if target.replica is None:
        return fault
    text = f"{fault} at group {target.replica}"
    return text if target.rank is None else f"{text} rank {target.rank}"
