# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Carry out a plan on a running job: inject due faults when the limits allow it, and undo them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from titan_ft.chaos.agents import Agents
from titan_ft.chaos.job import RunningJob
from titan_ft.chaos.outcomes import Outcomes
from titan_ft.chaos.plan import Plan
from titan_ft.chaos.processes import Processes, Unreachable
from titan_ft.chaos.schedule import Injection, Refusal, Shot, aim, shots
from titan_ft.chaos.signals import Signals
from titan_ft.faults.outside import Signal
from titan_ft.run.events import Event, FaultInjected, FaultSkipped, FaultUndone
from titan_ft.run.log import EventLog


class ChaosRunner:
    """Injects the faults of a plan into a running job.

    The launcher or `titan-ft chaos` calls it, on one thread: `observe` with each event, `poll`
    about ten times a second, and `close` at the end. `close` continues all stopped processes. See
    docs/chaos.md.

    Args:
        processes: delivers signals.
        orders: the file of orders for agents.
        events: log of the runner's events.
        find_lighthouse_pid: returns the process of the job's lighthouse on this host; None = there
            is none.
        clock: returns monotonic seconds, for the schedule.
        wall: returns Unix seconds, to compare with the times of events.
        wait_for_all: True starts the schedule when all groups have trained together; False with the
            first `poll`.
        show: called with a line for a person.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        processes: Processes,
        orders: Path,
        events: EventLog,
        find_lighthouse_pid: Callable[[], int | None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        wait_for_all: bool = True,
        show: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.plan = plan
        self.job = RunningJob(find_lighthouse_pid)
        self.outcomes = Outcomes(events, show)
        self._signals = Signals(self.job, processes, self.outcomes, clock, wall)
        self._agents = Agents(self.job, orders, self.outcomes, clock)
        self._clock = clock
        self._wait_for_all = wait_for_all
        self._start: float | None = None
        """Start of the schedule in seconds of `clock`; None until the groups train together."""
        self._shots = shots(plan)
        self._next = next(self._shots, None)
        self._waiting: list[Shot] = []
        self._start_reported = False
        self._closed = False

    @property
    def done(self) -> bool:
        """True if every shot has its outcome and this process has nothing left to undo."""
        if self._next is not None or self._waiting:
            return False
        return not self._agents.busy and not self._signals.busy

    def observe(self, event: Event) -> None:
        """Take in one event of the job. Events should come in the order of time."""
        self.job.observe(event)
        # Events of agents have an attempt, those of runners have none.
        is_of_agent = event.attempt is not None
        if is_of_agent and isinstance(event, FaultInjected | FaultSkipped | FaultUndone):
            self._agents.observe(event)

    def poll(self) -> None:
        """Undo and inject whatever is due."""
        if self._closed:
            return
        now = self._clock()
        ended = self.job.ended
        self._signals.undo(math.inf if ended else now)
        self._agents.give_up()
        if ended:
            self._next = None
            self._waiting = []
        elif self._schedule_runs(now):
            self._inject_due(now)

    def close(self) -> None:
        """Undo all faults of this process, and end. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self._signals.undo(math.inf)
        finally:
            self.outcomes.report_finish()

    def _schedule_runs(self, now: float) -> bool:
        """Return whether the schedule has started; start it if all groups have trained."""
        if self._start is None:
            if self._wait_for_all and not self.job.trained_together:
                return False
            self._start = now + self.plan.start_seconds
        if now < self._start:
            return False
        if not self._start_reported:
            self._start_reported = True
            self.outcomes.report_start(self.plan)
        return True

    def _inject_due(self, now: float) -> None:
        """Inject due shots where possible, and skip those that have waited too long."""
        assert self._start is not None, "called once the schedule has started"
        while self._next is not None and self._start + self._next.time <= now:
            self._waiting.append(self._next)
            self._next = next(self._shots, None)
        for shot in list(self._waiting):
            refusal = self._try(shot)
            if refusal is None:
                self._waiting.remove(shot)
                continue
            late_seconds = now - self._start - shot.time
            if refusal.final or late_seconds >= self.plan.limits.patience_seconds:
                self._waiting.remove(shot)
                self.outcomes.report_skipped(shot, None, refusal.reason)
                self.outcomes.count_shot(hit=False)

    def _try(self, shot: Shot) -> Refusal | None:
        """Inject a shot; return the refusal if that is not possible now."""
        aimed = aim(shot, self.job.view(), self.plan.limits)
        if isinstance(aimed, Refusal):
            return aimed
        if self._agents.awaits_donor:
            return Refusal(
                "a donor is about to be hit, and its group is not known yet", final=False
            )
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
            self._signals.provoke_heal(aimed, lambda: self._agents.order(aimed))
        else:
            self._agents.order(aimed)
