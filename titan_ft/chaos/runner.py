# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Carry out a plan on a running job: inject what is due as soon as the limits allow it, undo it, record both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from titan_ft.chaos.agents import Agents
from titan_ft.chaos.job import Job
from titan_ft.chaos.outcomes import Outcomes
from titan_ft.chaos.plan import Plan
from titan_ft.chaos.processes import Processes, Unreachable
from titan_ft.chaos.schedule import Injection, Refusal, Shot, aim, shots
from titan_ft.chaos.signals import Signals
from titan_ft.faults.outside import Signal
from titan_ft.run.events import Event, FaultInjected, FaultSkipped, FaultUndone
from titan_ft.run.log import EventLog


class ChaosRunner:
    """Inject the faults of a plan into a running job.

    Args:
        processes: how signals get to workers.
        orders: the file by which orders get to agents.
        events: where all that is done is announced.
        lighthouse_pid: returns the process of the job's lighthouse on this host, None while there is none.
        clock: returns seconds that only go forward; the schedule is by it.
        wall: returns Unix seconds, to compare with the times of events.
        wait_for_all: the schedule starts once all groups have trained together; otherwise with the first `poll`.
        show: called with a line for a person about each fault.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        processes: Processes,
        orders: Path,
        events: EventLog,
        lighthouse_pid: Callable[[], int | None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        wait_for_all: bool = True,
        show: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.plan = plan
        self.job = Job(lighthouse_pid)
        self.outcomes = Outcomes(events, show)
        self._signals = Signals(self.job, processes, self.outcomes, clock, wall)
        self._agents = Agents(self.job, orders, self.outcomes, clock)
        self._clock, self._wait_for_all = clock, wait_for_all
        self._start: float | None = None
        """When the schedule starts; None until the groups train together."""
        self._shots = shots(plan)
        self._next = next(self._shots, None)
        self._waiting: list[Shot] = []
        self._announced = self._closed = False

    @property
    def done(self) -> bool:
        """Tell whether every shot is settled, and all is undone that is undone from here."""
        return self._next is None and not (self._waiting or self._agents.busy or self._signals.busy)

    def observe(self, event: Event) -> None:
        """Take in one event of the job; they should come in order of time."""
        self.job.fold(event)
        # Only the events of agents have an attempt, those of runners have none.
        if isinstance(event, FaultInjected | FaultSkipped | FaultUndone) and event.attempt is not None:
            self._agents.observe(event)

    def poll(self) -> None:
        """Do what is due; to be called some ten times a second."""
        if self._closed:
            return
        now = self._clock()
        self._signals.undo(math.inf if self.job.ended else now)
        self._agents.give_up()
        if self.job.ended:
            self._next, self._waiting = None, []
        elif self._runs(now):
            self._shoot(now)

    def close(self) -> None:
        """Undo what is not undone yet, and end; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self._signals.undo(math.inf)
        finally:
            self.outcomes.finished()

    def _runs(self, now: float) -> bool:
        """Tell whether the schedule's clock runs; start it when it is time."""
        if self._start is None and (self.job.trained_together or not self._wait_for_all):
            self._start = now + self.plan.start_seconds
        if self._start is None or now < self._start:
            return False
        if not self._announced:
            self._announced = True
            self.outcomes.started(self.plan)
        return True

    def _shoot(self, now: float) -> None:
        """Inject what is due and possible; give up what has waited for too long."""
        assert self._start is not None, "called once the schedule's clock runs"
        while self._next is not None and self._start + self._next.time <= now:
            self._waiting.append(self._next)
            self._next = next(self._shots, None)
        for shot in list(self._waiting):
            refusal = self._try(shot)
            late = now - self._start - shot.time
            if refusal is not None and not refusal.final and late < self.plan.limits.patience_seconds:
                continue
            self._waiting.remove(shot)
            if refusal is not None:
                self.outcomes.missed(shot, None, refusal.reason)
                self.outcomes.count(False)

    def _try(self, shot: Shot) -> Refusal | None:
        """Inject a shot, or say why not now."""
        aimed = aim(shot, self.job.view(), self.plan.limits)
        if isinstance(aimed, Refusal):
            return aimed
        if self._agents.awaits_donor:
            return Refusal("a donor is about to be hit, nobody knows which group that will be", final=False)
        try:
            self._inject(aimed)
        except Unreachable as error:
            return Refusal(str(error), error.final)
        return None

    def _inject(self, aimed: Injection) -> None:
        fault = aimed.shot.fault
        if isinstance(fault, Signal):
            self._signals.send(aimed)
        elif fault.scope == "donor":
            self._signals.provoke(aimed, lambda: self._agents.order(aimed))
        else:
            self._agents.order(aimed)
