# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Carry out the faults that are signals to a job's processes, and let those go on that were stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from titan_ft.chaos.disturbance import Disturbance
from titan_ft.chaos.job import Job
from titan_ft.chaos.outcomes import Outcomes
from titan_ft.chaos.processes import Processes, Reach, Unreachable, Worker
from titan_ft.chaos.schedule import Injection, Shot
from titan_ft.run.events import Target

KILL_AGENT = "kill_agent"
_SIGNALS = {
    KILL_AGENT: signal.SIGKILL,
    "kill_lighthouse": signal.SIGKILL,
    "kill_rank": signal.SIGKILL,
    "kill_group": signal.SIGKILL,
    "kill_groups": signal.SIGKILL,
    "term_group": signal.SIGTERM,
    "stop_rank": signal.SIGSTOP,
    "stop_group": signal.SIGSTOP,
}


@dataclass(eq=False)
class _Stopped:
    """Workers that got SIGSTOP and have not got SIGCONT yet."""

    due: float
    shot: Shot
    target: Target
    reach: Reach
    disturbance: Disturbance


class Signals:
    """Signal workers and the lighthouse.

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
        self._stopped: list[_Stopped] = []

    @property
    def busy(self) -> bool:
        """Tell whether workers are stopped."""
        return bool(self._stopped)

    def send(self, aimed: Injection, lighthouse_pid: int | None) -> None:
        """Signal those targets that can be.

        Args:
            lighthouse_pid: process of the job's lighthouse on this host, None while there is none.

        Raises:
            Unreachable: none can be.
        """
        held: list[tuple[Target, Reach]] = []
        missed: list[tuple[Target, Unreachable]] = []
        for target in aimed.targets:
            try:
                held.append((target, self._reach(target, lighthouse_pid, agent=aimed.fault.name == KILL_AGENT)))
            except Unreachable as error:
                missed.append((target, error))
        if not held:
            raise missed[0][1]
        # All are held before the first is signalled: several groups are to die at once.
        num_hit = sum([self._hit(aimed, target, reach) for target, reach in held])
        for target, reason in missed:
            self._outcomes.missed(aimed.shot, target, str(reason))
        self._outcomes.count(num_hit > 0)

    def provoke(self, aimed: Injection, order: Callable[[], None]) -> None:
        """Kill the target so that there is a heal to disturb.

        Args:
            order: called once the target is certain to be there, before it is killed.

        Raises:
            Unreachable: it is not there.
        """
        (target,) = aimed.targets
        assert target.replica is not None, "a group is killed, not the lighthouse"
        reach = self._reach(target)
        try:
            order()
            self._outcomes.injecting("kill_group", target, aimed.shot, {"provokes": aimed.fault.name})
            with suppress(Unreachable):  # it ended just now by itself, and will heal as well
                reach.send(signal.SIGKILL)
        finally:
            reach.close()
        group = self._job.group(target.replica)
        group.disturbances.append(Disturbance("restart", group.life))
        self._outcomes.hit("kill_group", target, f", for {aimed.fault.name}")

    def undo(self, until: float) -> None:
        """Let those go on whose time is over then. One that was killed meanwhile is not stopped either."""
        due = [one for one in self._stopped if one.due <= until]
        for one in due:
            with suppress(Unreachable):
                one.reach.send(signal.SIGCONT)
            one.reach.close()
            self._stopped.remove(one)
            one.disturbance.undo(self._wall())
        for one in due:  # announced when all of them go on, because the disk may be full
            self._outcomes.undone(one.shot, one.target)

    def _reach(self, target: Target, lighthouse_pid: int | None = None, *, agent: bool = False) -> Reach:
        if target.lighthouse:
            if lighthouse_pid is None:
                raise Unreachable("the lighthouse does not run right now")
            workers = [Worker("the lighthouse", lighthouse_pid, host="")]
            return self._processes.reach(workers, workers)
        workers = self._job.agents(target) if agent else self._job.workers(target)
        if agent and not workers:
            raise Unreachable(f"the agent of group {target.replica} is not known")
        if not workers:
            raise Unreachable(f"no worker of group {target.replica} has said where it runs")
        return self._processes.reach(workers, self._job.everyone())

    def _hit(self, aimed: Injection, target: Target, reach: Reach) -> bool:
        """Signal one target, announced just before; return whether anybody was hit."""
        fault, shot, signum = aimed.fault, aimed.shot, _SIGNALS[aimed.fault.name]
        life = 0 if target.replica is None else self._job.group(target.replica).life
        disturbance = Disturbance.of(aimed, target, life)
        self._outcomes.injecting(fault.name, target, shot, shot.params)
        stopped: _Stopped | None = None
        if signum == signal.SIGSTOP:
            stopped = _Stopped(self._clock() + shot.params["seconds"], shot, target, reach, disturbance)
            self._stopped.append(stopped)  # before the signal: an interrupt may come right behind it
        try:
            reach.send(signum)
        except Unreachable as error:
            if stopped is not None:
                self._stopped.remove(stopped)
            reach.close()
            self._outcomes.missed(shot, target, str(error))
            return False
        if stopped is None:
            reach.close()
        disturbance.begin(self._wall())
        if target.replica is not None:
            self._job.group(target.replica).disturbances.append(disturbance)
        self._outcomes.hit(fault.name, target)
        return True
