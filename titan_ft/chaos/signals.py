# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Inject the faults that are signals to a job's processes, and continue stopped processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from titan_ft.chaos.effect import Effect
from titan_ft.chaos.job import RunningJob
from titan_ft.chaos.outcomes import Outcomes
from titan_ft.chaos.processes import HeldProcesses, Processes, Unreachable
from titan_ft.chaos.schedule import Injection, Shot
from titan_ft.faults.outside import KillGroup, Signal
from titan_ft.run.events import Target


@dataclass(eq=False)
class _Lasting:
    """A fault that must be undone."""

    due: float
    fault: Signal
    shot: Shot
    held: HeldProcesses
    effect: Effect


class Signals:
    """Starts and undoes the faults that are signals. `ChaosRunner` calls it, on one thread.

    Args:
        clock: returns monotonic seconds.
        wall: returns Unix seconds, to compare with the times of events.
    """

    def __init__(
        self,
        job: RunningJob,
        processes: Processes,
        outcomes: Outcomes,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._job = job
        self._processes = processes
        self._outcomes = outcomes
        self._clock = clock
        self._wall = wall
        self._lasting: list[_Lasting] = []

    @property
    def busy(self) -> bool:
        """True while a fault must still be undone."""
        return bool(self._lasting)

    def send(self, aimed: Injection) -> None:
        """Hit the targets that are alive.

        Raises:
            Unreachable: no target is alive.
        """
        shot = aimed.shot
        fault = shot.fault
        assert isinstance(fault, Signal), "agents inject the other faults"
        held_targets: list[tuple[Target, HeldProcesses]] = []
        missed: list[tuple[Target, Unreachable]] = []
        for target in aimed.targets:
            try:
                held_targets.append((target, self._hold(fault, target)))
            except Unreachable as error:
                missed.append((target, error))
        if not held_targets:
            raise missed[0][1]
        num_hit = 0
        # All targets are held before the first signal, so that several groups die at once.
        for target, held in held_targets:
            try:
                self._hit(fault, shot, target, held, fault.params)
                num_hit += 1
            except Unreachable as error:
                missed.append((target, error))
        for target, reason in missed:
            self._outcomes.report_skipped(shot, target, str(reason))
        self._outcomes.count_shot(hit=num_hit > 0)

    def provoke_heal(self, aimed: Injection, order: Callable[[], None]) -> None:
        """Kill the target, so that there is a heal for the fault to hit.

        Args:
            order: called before the kill, once the target is held.

        Raises:
            Unreachable: the target is not alive.
        """
        (target,) = aimed.targets
        held = self._hold(KillGroup(), target)
        try:
            order()
        except BaseException:
            held.close()
            raise
        fault = aimed.shot.fault.name
        # A target that ended by itself just now will heal as well.
        with suppress(Unreachable):
            self._hit(KillGroup(), aimed.shot, target, held, {"provokes": fault}, f", for {fault}")

    def undo(self, until: float) -> None:
        """Undo the faults that end by `until`, in seconds of `clock`."""
        due = [lasting for lasting in self._lasting if lasting.due <= until]
        for lasting in due:
            # A target that was killed meanwhile has nothing to undo.
            with suppress(Unreachable):
                lasting.fault.stop(lasting.held.send)
            lasting.held.close()
            self._lasting.remove(lasting)
            lasting.effect.mark_undone(self._wall())
        # Report after all processes go on: a write to a full disk would delay them.
        for lasting in due:
            self._outcomes.report_undone(lasting.shot, lasting.effect.target)

    def _hold(self, fault: Signal, target: Target) -> HeldProcesses:
        processes = self._job.find_processes(fault, target)
        return self._processes.hold(processes, self._job.all_workers())

    def _hit(
        self,
        fault: Signal,
        shot: Shot,
        target: Target,
        held: HeldProcesses,
        params: Mapping[str, float | str],
        detail: str = "",
    ) -> None:
        """Announce and start a fault at one target. Takes over `held`, and closes it in the end.

        Raises:
            Unreachable: the target has just ended.
        """
        effect = self._job.add_effect(fault, shot.number, target)
        self._outcomes.announce_injection(fault.name, target, shot, params)
        lasting = _Lasting(self._clock() + fault.duration_seconds, fault, shot, held, effect)
        if fault.duration_seconds:
            # Before the signal: an interrupt right after it must find the fault here to undo it.
            self._lasting.append(lasting)
        try:
            fault.start(held.send)
        except Unreachable:
            self._job.drop_effect(effect)
            if lasting in self._lasting:
                self._lasting.remove(lasting)
            raise
        finally:
            if lasting not in self._lasting:
                held.close()
        effect.mark_struck(self._wall())
        self._outcomes.show_hit(fault.name, target, detail)
