# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Tell what a chaos runner does, to the run's history and to whoever watches, and count it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from titan_ft.chaos.plan import Plan
from titan_ft.chaos.schedule import Shot, Target
from titan_ft.run.events import ChaosFinished, ChaosStarted, FaultInjected, FaultSkipped, FaultUndone
from titan_ft.run.log import EventLog


class Record:
    """What became of the shots of a plan.

    Args:
        events: where it is told.
        tell: called with a line for a person.
    """

    def __init__(self, events: EventLog, tell: Callable[[str], None]) -> None:
        self.num_injected = self.num_skipped = 0
        """Shots; one with several targets is injected when one of them was hit."""
        self.last_reason = ""
        """Why the shot that was skipped last was."""
        self._events, self._tell = events, tell

    def started(self, plan: Plan) -> None:
        """Tell that the schedule's clock runs from now on."""
        self._events.emit(ChaosStarted(seed=plan.seed, plan=plan.name, schedule=str(plan)))
        self._tell(f"chaos starts: {plan.name} with seed {plan.seed}")

    def finished(self) -> None:
        """Tell that nothing more will be injected."""
        self._events.emit(ChaosFinished(injected=self.num_injected, skipped=self.num_skipped))

    def injecting(self, fault: str, target: Target, shot: Shot, params: Mapping[str, float | str]) -> None:
        """Tell that a target is about to be hit, just before it is; agents tell it of themselves."""
        self._events.emit(
            FaultInjected(fault=fault, target=target.told(), seed=shot.seed, shot=shot.number, params=dict(params))
        )

    def hit(self, fault: str, target: Target, why: str = "") -> None:
        """Tell a person that a target was hit."""
        self._tell(f"chaos: {_at(fault, target)}{why}")

    def undone(self, shot: Shot, target: Target) -> None:
        """Tell that the target is left alone again."""
        self._events.emit(FaultUndone(fault=shot.fault, target=target.told(), shot=shot.number))
        self._tell(f"chaos: {_at(shot.fault, target)} undone")

    def missed(self, shot: Shot, target: Target | None, reason: str) -> None:
        """Tell that a target, or the shot as a whole, is not hit."""
        where = None if target is None else target.told()
        self._events.emit(FaultSkipped(fault=shot.fault, target=where, shot=shot.number, reason=reason))
        self._tell_missed(shot, target, reason)

    def missed_by_agent(self, shot: Shot, target: Target, reason: str) -> None:
        """Note what an agent has told already."""
        self._tell_missed(shot, target, reason)

    def count(self, injected: bool) -> None:
        """Count a shot that is settled."""
        self.num_injected += injected
        self.num_skipped += not injected

    def _tell_missed(self, shot: Shot, target: Target | None, reason: str) -> None:
        self.last_reason = reason
        self._tell(f"chaos: {shot.fault if target is None else _at(shot.fault, target)} skipped: {reason}")


def _at(fault: str, target: Target) -> str:
    if target.replica is None:
        return fault
    return f"{fault} at replica {target.replica}" + ("" if target.rank is None else f" rank {target.rank}")
