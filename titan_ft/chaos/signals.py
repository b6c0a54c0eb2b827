# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Carry out the faults that are signals to a job's processes, and let those go on that were stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from titan_ft.chaos.effect import Effect
from titan_ft.chaos.job import Job
from titan_ft.chaos.outcomes import Outcomes
from titan_ft.chaos.processes import Processes, Reach, Unreachable
from titan_ft.chaos.schedule import Injection, Shot
from titan_ft.faults.outside import KillGroup, Signal
from titan_ft.run.events import Target


@dataclass(eq=False)
class _Lasting:
    """A fault that is to be undone."""

    due: float
    fault: Signal
    shot: Shot
    reach: Reach
    effect: Effect


class Signals:
    """Start and stop the faults from outside.

    Args:
        clock: returns seconds that only go forward.
        wall: returns Unix seconds, to compare with the times of events.
    """

    def __init__(
        self,
        job: Job,
        processes: Processes,
        outcomes: Outcomes,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._job, self._processes, self._outcomes = job, processes, outcomes
        self._clock, self._wall = clock, wall
        self._lasting: list[_Lasting] = []

    @property
    def busy(self) -> bool:
        """Tell whether a fault is still to be undone."""
        return bool(self._lasting)

    def send(self, aimed: Injection) -> None:
        """Hit those targets that are there.

        Raises:
            Unreachable: none is.
        """
        shot, fault = aimed.shot, aimed.shot.fault
        assert isinstance(fault, Signal), "agents carry out the others"
        held: list[tuple[Target, Reach]] = []
        missed: list[tuple[Target, Unreachable]] = []
        for target in aimed.targets:
            try:
                held.append((target, self._reach(fault, target)))
            except Unreachable as error:
                missed.append((target, error))
        if not held:
            raise missed[0][1]
        num_hit = 0
        # All are held before the first is signalled: several groups are to die at once.
        for target, reach in held:
            try:
                self._hit(fault, shot, target, reach, fault.params)
                num_hit += 1
            except Unreachable as error:
                missed.append((target, error))
        for target, reason in missed:
            self._outcomes.missed(shot, target, str(reason))
        self._outcomes.count(num_hit > 0)

    def provoke(self, aimed: Injection, order: Callable[[], None]) -> None:
        """Kill the target so that there is a heal to disturb.

        Args:
            order: called once the target is certain to be there, before it is killed.

        Raises:
            Unreachable: it is not there.
        """
        (target,) = aimed.targets
        reach = self._reach(KillGroup(), target)
        try:
            order()
        except BaseException:
            reach.close()
            raise
        name = aimed.shot.fault.name
        with suppress(Unreachable):  # it ended just now by itself, and will heal as well
            self._hit(KillGroup(), aimed.shot, target, reach, {"provokes": name}, f", for {name}")

    def undo(self, until: float) -> None:
        """Let those go on whose time is over then. One that was killed meanwhile is not stopped either."""
        due = [one for one in self._lasting if one.due <= until]
        for one in due:
            with suppress(Unreachable):
                one.fault.stop(one.reach.send)
            one.reach.close()
            self._lasting.remove(one)
            one.effect.undo(self._wall())
        for one in due:  # announced when all of them go on, because the disk may be full
            self._outcomes.undone(one.shot, one.effect.target)

    def _reach(self, fault: Signal, target: Target) -> Reach:
        return self._processes.reach(self._job.processes(fault, target), self._job.everyone())

    def _hit(
        self,
        fault: Signal,
        shot: Shot,
        target: Target,
        reach: Reach,
        params: Mapping[str, float | str],
        why: str = "",
    ) -> None:
        """Start a fault at one target, announced just before, and take over what holds the target.

        Raises:
            Unreachable: it has just ended.
        """
        effect = self._job.affect(fault, shot.number, target)
        self._outcomes.injecting(fault.name, target, shot, params)
        lasting = _Lasting(self._clock() + fault.duration_seconds, fault, shot, reach, effect)
        if fault.duration_seconds:
            self._lasting.append(lasting)  # before the signal: an interrupt may come right after it
        try:
            fault.start(reach.send)
        except Unreachable:
            self._job.calm(effect)
            if lasting in self._lasting:
                self._lasting.remove(lasting)
            raise
        finally:
            if lasting not in self._lasting:
                reach.close()
        effect.begin(self._wall())
        self._outcomes.hit(fault.name, target, why)
