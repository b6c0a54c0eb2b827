# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Keep the agent of one group running, as the agent keeps the group's workers.

An agent that gives its group up says so in an event and ends with a status of its own. Any other end (SIGKILL, the
kernel's OOM killer, an exception) is a death that nobody has announced. The launcher then waits until the workers of
the dead agent are gone as well, and starts another agent under the same `RestartPolicy`. An agent that is stopped
(SIGSTOP) while its workers end does not restart them: it is killed, so that the next agent does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from titan_ft.launch.children import Child
from titan_ft.launch.restart_policy import (
    AGENT_CRASHED_CODE,
    AttemptEnd,
    GiveUp,
    RestartPolicy,
)
from titan_ft.run.events import (
    AgentEnded,
    Event,
    FaultInjected,
    ReplicaGaveUp,
    ReplicaRestarted,
    StepCommitted,
    WorkerStarted,
)
from titan_ft.run.paths import RunPaths
from titan_ft.run.process import is_running_worker, read_status
from titan_ft.run.tail import last_exception

CLEAR_SECONDS = 10.0
"""A worker in uninterruptible sleep (a hung driver) cannot be killed: do not wait longer for its end."""
FROZEN_SECONDS = 10.0
"""An agent notices the end of its workers within moments. One that was stopped for so long after it may stay so."""
LOST = "lost"
"""`ReplicaGaveUp.cause` of a group that is killed because it is silent, and nobody waits for it any more."""


@dataclass(frozen=True)
class _Worker:
    pid: int
    mono: float
    """Seconds of the host's monotonic clock at which it ran: its pid may be another's by now."""

    @property
    def is_alive(self) -> bool:
        return is_running_worker(self.pid, since=self.mono)

    def kill(self) -> None:
        """Kill it with the processes that it has started: it leads a process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class AgentKeeper:
    """The agent of one group, and after its death the next one.

    Args:
        paths: of the run.
        policy: decides about the deaths of agents, as an agent's own one does about those of workers.
        start: starts an agent: the number of its first attempt, and why that is a restart; empty for the first start.
        announce: writes an event.
        clock: returns seconds that only go forward.

    Attributes:
        child: the latest agent.
    """

    def __init__(
        self,
        replica: int,
        paths: RunPaths,
        policy: RestartPolicy,
        start: Callable[[int, str], Child],
        announce: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replica = replica
        self.child: Child
        self._paths, self._policy, self._start_agent = paths, policy, start
        self._announce, self._clock = announce, clock
        self._attempt = paths.next_attempt(replica)
        """The latest attempt that is known of."""
        self._workers: dict[tuple[int, int], _Worker] = {}
        """By attempt and rank."""
        self._died: float | None = None
        """When the agent was found dead, while its workers are waited for."""
        self._due: float | None = None
        """When the next agent is to be started, during a pause before it."""
        self._reason = ""
        """Why the next agent is started."""
        self._gave_up = False
        self._frozen: float | None = None
        """Since when the agent is stopped although its workers have ended."""
        self._committed = self._disturbed = False
        """Whether the agent's group contributed to a step, and whether a fault was injected into it."""
        self._step: int | None = None
        """The last such step."""
        self._start(self._attempt, "")

    @property
    def code(self) -> int | None:
        """Exit status of the agent; None while it runs, and while another one is to follow it."""
        code = self.child.code
        if code is not None and is_death(code) and not self._gave_up:
            return None
        return code

    def observe(self, event: Event) -> None:
        """Take in an event of this group."""
        if event.replica != self.replica:
            return
        match event:
            case WorkerStarted():
                self._attempt = max(self._attempt, event.attempt)
                self._workers = {key: worker for key, worker in self._workers.items() if key[0] >= event.attempt}
                self._workers[event.attempt, event.rank] = _Worker(event.pid, event.mono)
            case ReplicaRestarted():
                self._attempt = max(self._attempt, event.attempt)
            case StepCommitted() if event.own_tokens > 0:
                self._committed, self._step = True, event.step
            case FaultInjected():
                self._disturbed = True

    def take_over(self, reason: str) -> int:
        """Start an agent in the place of one that gave its group up; returns the number of its first attempt."""
        attempt = self._next_attempt
        self._start(attempt, reason)
        return attempt

    def poll(self) -> None:
        """Notice a death, wait for the workers' end, start the next agent; call it every few moments."""
        if self._due is not None:
            if self._clock() >= self._due:
                self._start_again()
            return
        code = self.child.code
        if code is None:
            self._kill_frozen()
        if code is None or not is_death(code) or self._gave_up:
            return
        if self._died is None:
            self._died = self._clock()
            return  # the last events of its workers are read first
        living = [worker for worker in self._workers.values() if worker.is_alive]
        for worker in living:  # a worker that hangs does not notice that its agent is gone, and keeps its GPU
            worker.kill()
        if not living or self._clock() - self._died >= CLEAR_SECONDS:
            self._decide(code, self._died - self._started)
            self._died = None

    def give_up_lost(self, reason: str) -> None:
        """Kill the agent and its workers, and announce that the group is not started again."""
        self._gave_up = True
        self.child.process.kill()
        for worker in self._workers.values():
            if worker.is_alive:
                worker.kill()
        log = str(self.child.log)
        self._announce(
            ReplicaGaveUp(replica=self.replica, attempt=self._attempt, cause=LOST, reason=reason, log=log, error="")
        )

    def report_death(self) -> None:
        """Announce the death of an agent that nobody starts again, because the run is being stopped."""
        code = self.child.code
        if code is not None and is_death(code):
            self.report_end()

    def report_end(self) -> None:
        """Announce, once, that the agent ended with a failure that no event explains."""
        code = self.child.code
        if code is None or self._gave_up:
            return
        self._gave_up = True
        self._announce(self._describe_end(code, restarts=False))

    def _kill_frozen(self) -> None:
        """Kill an agent that is stopped, and so does not notice the end of its workers: nobody else restarts them."""
        pid = self.child.process.pid
        if not self._workers or not _is_stopped(pid) or any(worker.is_alive for worker in self._workers.values()):
            self._frozen = None
            return
        if self._frozen is None:
            self._frozen = self._clock()
        elif self._clock() - self._frozen >= FROZEN_SECONDS:
            for worker in self._workers.values():  # zombies until their agent ends: what they started may live on
                worker.kill()
            self._known_reason = "its workers ended while its agent was stopped (SIGSTOP)"
            self.child.process.kill()

    def _decide(self, code: int, alive_seconds: float) -> None:
        """Let the policy say whether another agent follows, and announce it."""
        end = AttemptEnd(code, alive_seconds, self._committed, None, self._disturbed, self._step)
        decision = self._policy.decide(end)
        ended = self._describe_end(code, restarts=not isinstance(decision, GiveUp))
        self._announce(ended)
        if not isinstance(decision, GiveUp):
            self._reason, self._due = ended.reason, self._clock() + decision
            return
        self._gave_up = True
        self._announce(
            ReplicaGaveUp(
                replica=self.replica,
                attempt=self._attempt,
                cause=decision.cause,
                reason=f"{ended.reason}; {decision.reason}",
                log=str(self.child.log),
                error=ended.reason,
            )
        )

    def _describe_end(self, code: int, *, restarts: bool) -> AgentEnded:
        return AgentEnded(
            replica=self.replica,
            attempt=self._attempt,
            agent_pid=self.child.process.pid,
            reason=self._known_reason or self._describe(code),
            restarts=restarts,
            code=code if code >= 0 else None,
            signal=signal.Signals(-code).name if code < 0 else None,
            log=str(self.child.log),
        )

    def _describe(self, code: int) -> str:
        """Return in words how the agent ended; on a full disk its log does not hold its exception."""
        if code < 0:
            return f"its agent was killed by {signal.Signals(-code).name}"
        error = last_exception(self.child.log, self._log_size)
        return f"its agent ended with exit status {code}" + (f": {error}" if error else "")

    def _start_again(self) -> None:
        try:
            self._start(self._next_attempt, self._reason)
        except OSError as error:  # too many processes: the policy counts it as another death
            self._known_reason = f"its agent cannot be started ({error.strerror})"

    @property
    def _next_attempt(self) -> int:
        """Return the number of the next attempt: never that of one that ended, also if it had not begun."""
        return max(self._attempt + 1, self._paths.next_attempt(self.replica))

    def _start(self, attempt: int, reason: str) -> None:
        log = self._paths.supervisor_log(self.replica)
        self._log_size = log.stat().st_size if log.exists() else 0
        """Bytes in the log of earlier agents, whose exceptions are not this one's."""
        self._attempt, self._workers = attempt, {}
        self._committed = self._disturbed = False
        self._step = None
        self._started, self._due, self._gave_up, self._known_reason = self._clock(), None, False, ""
        self._frozen = None
        self.child = self._start_agent(attempt, reason)


def is_death(code: int) -> bool:
    """Tell whether an agent ended that did not mean to: its group has neither finished nor been given up."""
    return code < 0 or code == AGENT_CRASHED_CODE


def _is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped by a signal; False where there is no /proc."""
    status = read_status(pid)
    return status is not None and status.state == "T"
