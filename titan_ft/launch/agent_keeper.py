# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Keep the agent of one group running, as the agent keeps the group's workers running.

An agent that ends by its own decision writes an event and ends with an exit status for it. Any
other end is an unexpected *death*: SIGKILL, the kernel's OOM killer, an exception of the agent
itself. The launcher has an `AgentKeeper` for each group, which proceeds in these steps:

1. Start an agent, and poll it.
2. After a death, kill the workers of the agent that still run, and wait until they have ended.
3. Ask a `RestartPolicy` whether another agent is started. This policy counts deaths of agents, and
   the agent's own policy counts ends of workers.
4. After the pause of the policy, start another agent, or announce that the group is given up.

An agent that is stopped (SIGSTOP) cannot restart workers that end meanwhile. The keeper kills such
an agent, which is then a death like any other. If a host has no room for a process, the failed
start counts as a death as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from titan_ft.history.fold.group import GroupFold
from titan_ft.launch.group.children import Child
from titan_ft.launch.restart_policy import (
    AGENT_CRASHED_CODE,
    AttemptEnd,
    NoRestart,
    RestartPolicy,
)
from titan_ft.run.error_file import WorkerError
from titan_ft.run.events import AgentEnded, Event, ReplicaGaveUp, WorkerStarted
from titan_ft.run.paths import RunPaths
from titan_ft.run.tail import last_exception
from titan_ft.system.process import is_running_worker, read_status

MAX_WAIT_FOR_WORKERS_SECONDS = 10.0
"""After the death of an agent, the next agent starts at the latest after this time.

A worker in uninterruptible sleep, as in a hung driver, does not end even by SIGKILL.
"""
FROZEN_SECONDS = 10.0
"""An agent that is still stopped this long after the end of its workers is killed.

An agent that runs notices the end of its workers within moments.
"""
CAUSE_LOST = "lost"
"""`ReplicaGaveUp.cause` of a lost group that is killed because all other groups have ended."""


@dataclass
class _Agent:
    """One agent of the group. Times are in seconds of the keeper's clock."""

    child: Child
    first_attempt: int
    start_time: float
    log_offset: int
    """Size of the log at the start of this agent. Lines before it are of earlier agents."""
    death_time: float | None = None
    """When the keeper found the agent dead; None before."""
    freeze_time: float | None = None
    """When the keeper found the agent stopped although its workers had ended; None otherwise."""
    kill_reason: str = ""
    """Why the keeper killed the agent; empty if the keeper did not."""

    def describe_end(self, code: int) -> str:
        """Return in words how the agent ended."""
        if self.kill_reason:
            return self.kill_reason
        if code < 0:
            return f"its agent was killed by {signal.Signals(-code).name}"
        reason = f"its agent ended with exit status {code}"
        error = last_exception(self.child.log, self.log_offset)
        if not error:
            return reason
        return f"{reason}: {error}"


class AgentKeeper:
    """Starts the agent of one group, and another agent after each unexpected death.

    `LocalRun` makes one keeper for each group, and calls all methods on its only thread. The
    constructor starts the first agent. A group that was given up stays so until `take_over`.

    Args:
        slot: slot of the group.
        paths: paths of the run.
        policy: decides whether and when another agent is started.
        read_group: returns the state of the group by the run's events; None before the first.
        start: starts an agent. Gets the number of the agent's first attempt, and the reason for a
            restart, which is empty at the first start. Raises OSError if no process can be started.
        announce: writes an event.
        clock: returns monotonic seconds.

    Raises:
        OSError: the first agent cannot be started.
    """

    def __init__(
        self,
        slot: int,
        paths: RunPaths,
        policy: RestartPolicy,
        read_group: Callable[[], GroupFold | None],
        start: Callable[[int, str], Child],
        announce: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slot = slot
        self._paths = paths
        self._policy = policy
        self._read_group = read_group
        self._start_agent = start
        self._announce = announce
        self._clock = clock
        self._planned_attempt = paths.next_attempt(slot)
        """Number of the first attempt of the latest agent, even if that agent could not be started.
        """
        # The keeper is in one of four states: an agent runs or has just ended (all of the next
        # three are unset), the pause before a restart, a failed start, or the group is over.
        self._restart_time: float | None = None
        """When to start the next agent, by the keeper's clock; None outside the pause."""
        self._start_error = ""
        """Why the last start failed; empty once the policy has decided about the next start."""
        self._is_over = False
        """Whether no agent follows, except by `take_over`."""
        self._restart_reason = ""
        """Why the next agent is a restart."""
        self._agent = self._start(self._planned_attempt, "")

    @property
    def child(self) -> Child:
        """The process of the latest agent."""
        return self._agent.child

    @property
    def code(self) -> int | None:
        """Exit status of the latest agent; None while it runs, or if another agent may follow."""
        code = self._agent.child.code
        if self._is_over:
            return code
        is_between_agents = self._restart_time is not None or bool(self._start_error)
        if is_between_agents:
            return None
        if code is not None and is_death(code):
            return None
        return code

    @property
    def _group(self) -> GroupFold:
        """The state of the group by the run's events."""
        return self._read_group() or GroupFold(self.slot)

    @property
    def _latest_attempt(self) -> int:
        """Number of the group's latest attempt, planned by the keeper or started by the agent."""
        return max(self._planned_attempt, self._group.attempt)

    def _workers(self) -> list[WorkerStarted]:
        """Return the latest workers of the agent, by rank."""
        return [
            worker for worker in self._group.workers if worker.attempt >= self._agent.first_attempt
        ]

    def _living_workers(self) -> list[WorkerStarted]:
        return [worker for worker in self._workers() if _is_alive(worker)]

    def take_over(self, reason: str) -> int:
        """Start an agent for a group that was given up; return the number of its first attempt.

        If no process can be started, `poll` tries again under the policy.
        """
        self._is_over = False
        self._try_start(reason)
        return self._latest_attempt

    def poll(self) -> None:
        """Take the next step, see the module's head. Does not block; call it often."""
        if self._is_over:
            return
        if self._start_error:
            self._decide_after_failed_start()
        elif self._restart_time is None:
            self._poll_agent()
        elif self._clock() >= self._restart_time:
            self._try_start(self._restart_reason)

    def give_up_lost(self, reason: str) -> None:
        """Kill the agent and its workers, and announce that the group is not started again."""
        self._is_over = True
        self.child.process.kill()
        for worker in self._living_workers():
            _kill(worker)
        self._announce_give_up(CAUSE_LOST, reason, error="")

    def report_death(self) -> None:
        """Announce the death of an agent that is not replaced, because the run is being stopped."""
        code = self.child.code
        if code is not None and is_death(code):
            self.report_end()

    def report_end(self) -> None:
        """Announce, once, an end of the agent that no event of its own explains.

        No agent follows.
        """
        code = self.child.code
        if code is None or self._is_over:
            return
        self._is_over = True
        if self._restart_time is not None:
            return  # `_carry_out` announced this end when the pause began
        if self._start_error:
            self._announce(self._describe_failed_start(restarts=False))
        else:
            self._announce(self._describe_end(code, restarts=False))

    def _poll_agent(self) -> None:
        agent = self._agent
        code = agent.child.code
        if code is None:
            self._kill_if_frozen()
            return
        if not is_death(code):
            return
        if agent.death_time is None:
            agent.death_time = self._clock()
            # The launcher reads the last events of the workers before the next poll. Without them
            # the policy would not know of the group's last commits.
            return
        living = self._living_workers()
        for worker in living:
            # A worker that hangs does not notice the death of its agent and would keep its GPU.
            _kill(worker)
        waited_seconds = self._clock() - agent.death_time
        if living and waited_seconds < MAX_WAIT_FOR_WORKERS_SECONDS:
            return
        alive_seconds = agent.death_time - agent.start_time
        decision = self._policy.decide(self._summarize_end(code, alive_seconds))
        ended = self._describe_end(code, restarts=not isinstance(decision, NoRestart))
        self._carry_out(decision, ended)

    def _summarize_end(self, code: int, alive_seconds: float) -> AttemptEnd:
        """Return the facts on the agent's death for the policy.

        A step or a fault of an earlier agent's workers does not count for this agent.
        """
        group = self._group
        first_attempt = self._agent.first_attempt
        step = None
        if group.contributed is not None:
            attempt, last_step = group.contributed
            if attempt >= first_attempt:
                step = last_step
        had_fault = False
        if group.attempt_with_fault is not None:
            had_fault = group.attempt_with_fault >= first_attempt
        return AttemptEnd(
            code,
            alive_seconds=alive_seconds,
            committed=step is not None,
            disturbed=had_fault,
            step=step,
        )

    def _kill_if_frozen(self) -> None:
        """Kill an agent that is stopped (SIGSTOP) and so cannot restart its ended workers."""
        agent = self._agent
        is_stopped = _is_stopped(agent.child.process.pid)
        have_workers_ended = bool(self._workers()) and not self._living_workers()
        if not (is_stopped and have_workers_ended):
            agent.freeze_time = None
            return
        if agent.freeze_time is None:
            agent.freeze_time = self._clock()
        elif self._clock() - agent.freeze_time >= FROZEN_SECONDS:
            # The workers are zombies until their agent ends, but their own children may live on.
            for worker in self._workers():
                _kill(worker)
            agent.kill_reason = "its workers ended while its agent was stopped (SIGSTOP)"
            agent.child.process.kill()

    def _decide_after_failed_start(self) -> None:
        """Let the policy decide after a start that failed."""
        # A transient error counts as a restart, but never as part of a crash loop. There is no exit
        # status, and 1 stands for any failure.
        error = WorkerError(self._start_error, transient=True, time=time.time())
        decision = self._policy.decide(AttemptEnd(code=1, alive_seconds=0.0, error=error))
        ended = self._describe_failed_start(restarts=not isinstance(decision, NoRestart))
        self._start_error = ""
        self._carry_out(decision, ended)

    def _carry_out(self, decision: float | NoRestart, ended: AgentEnded) -> None:
        """Announce an end, and plan the restart or announce that the group is given up.

        Args:
            decision: the policy's: seconds until the restart, or why there is none.
            ended: the event of the end.
        """
        self._announce(ended)
        if isinstance(decision, NoRestart):
            self._is_over = True
            self._announce_give_up(
                decision.cause, f"{ended.reason}; {decision.reason}", error=ended.reason
            )
        else:
            self._restart_reason = ended.reason
            self._restart_time = self._clock() + decision

    def _describe_end(self, code: int, *, restarts: bool) -> AgentEnded:
        ended = AgentEnded(
            replica=self.slot,
            attempt=self._latest_attempt,
            agent_pid=self.child.process.pid,
            reason=self._agent.describe_end(code),
            restarts=restarts,
            log=str(self.child.log),
        )
        if code < 0:
            ended.signal = signal.Signals(-code).name
        else:
            ended.code = code
        return ended

    def _describe_failed_start(self, *, restarts: bool) -> AgentEnded:
        """Return the event of an agent that has no process and no exit status."""
        return AgentEnded(
            replica=self.slot,
            attempt=self._latest_attempt,
            agent_pid=None,
            reason=self._start_error,
            restarts=restarts,
            log=str(self.child.log),
        )

    def _announce_give_up(self, cause: str, reason: str, *, error: str) -> None:
        self._announce(
            ReplicaGaveUp(
                replica=self.slot,
                attempt=self._latest_attempt,
                cause=cause,
                reason=reason,
                log=str(self.child.log),
                error=error,
            )
        )

    def _try_start(self, reason: str) -> None:
        """Start the next agent; if the host has no room for a process, `poll` tries again."""
        # Never a number that was used before, even if the agent then started no workers. Otherwise
        # readers of the events would take two attempts for one.
        self._planned_attempt = max(self._latest_attempt + 1, self._paths.next_attempt(self.slot))
        self._restart_time = None
        self._start_error = ""
        try:
            self._agent = self._start(self._planned_attempt, reason)
        except OSError as error:
            self._start_error = f"its agent cannot be started ({error.strerror})"

    def _start(self, attempt: int, reason: str) -> _Agent:
        log = self._paths.agent_log(self.slot)
        log_offset = log.stat().st_size if log.exists() else 0
        start_time = self._clock()
        child = self._start_agent(attempt, reason)
        return _Agent(child, attempt, start_time, log_offset)


def is_death(code: int) -> bool:
    """True if an agent died unexpectedly: its group neither finished nor was given up.

    Any other exit status is the agent's own decision, and the agent wrote an event before.
    """
    return code < 0 or code == AGENT_CRASHED_CODE


def _is_alive(worker: WorkerStarted) -> bool:
    """True if a worker runs.

    A younger process with the worker's pid is another process and must not be killed.
    """
    return is_running_worker(worker.pid, since=worker.mono)


def _kill(worker: WorkerStarted) -> None:
    """Kill a worker and its process group, which includes the processes that the worker started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal; False on a host without /proc."""
    status = read_status(pid)
    return status is not None and status.state == "T"
