# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Keep one replica group running: start its workers, and start them all again when one of them dies.

One process per group (`python -m titan_ft.launch.supervisor`), of which the workers are forks: it has imported all that
they need (see `forks`), by itself or as a fork of the launcher's zygote. The group as a whole is what is restarted,
because its ranks cannot go on without each other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from titan_ft.config import FaultTolerance
from titan_ft.launch.forks import preload
from titan_ft.launch.own_end import kind_of_end
from titan_ft.launch.restart_policy import (
    AGENT_CRASHED_CODE,
    CONFIG_ERROR_CODE,
    AttemptEnd,
    AttemptEvents,
    GiveUp,
    RestartPolicy,
    exit_status,
    has_trained,
)
from titan_ft.launch.worker_group import (
    LOOPBACK,
    ForkStarter,
    PlainStarter,
    Starter,
    WorkerExit,
    WorkerGroup,
    attempt_env,
    usual_env,
    worker_env,
)
from titan_ft.run.appender import retry_waiting
from titan_ft.run.error_file import beside, read_error
from titan_ft.run.events import ReplicaGaveUp, ReplicaRestarted, TrainingFinished
from titan_ft.run.log import EventLog
from titan_ft.run.marks import has_left
from titan_ft.run.orphan import end_with_parent
from titan_ft.run.output import protect_output
from titan_ft.run.paths import RunPaths
from titan_ft.run.stop import StopRequests
from titan_ft.run.tail import EventTail, last_error_line

POLL_SECONDS = 0.02
GRACE_SECONDS = 3.0
CAUSE_SECONDS = 1.0
"""What a rank that has told of an exception gets to end by itself."""
SUPERVISOR = "titan_ft.launch.supervisor"
"""This module."""
DEFAULT_MODULE = "titan_ft.train"
OVER_SECONDS = 10.0
"""What a group that is back may take to finish together with the others."""
SENT_AWAY = "its workers were told to leave"


@dataclass
class GroupSpec:
    """Supervise one replica group; what follows a -- is the command line of its workers."""

    run_dir: Path
    ranks: int
    lighthouse: str
    """Its address."""
    replica: int = 0
    bind: str = LOOPBACK
    """Numeric address at which the group's store listens: groups on other hosts must reach it; 0.0.0.0 for all."""
    takeover: str = ""
    """Why the first attempt is a restart, if it is one."""
    attempt: int = 0
    """Number of the first attempt."""
    max_restarts: int = 100
    module: str = DEFAULT_MODULE
    drain_seconds: Annotated[float, tyro.conf.arg(name="drain-timeout")] = FaultTolerance.drain_timeout_seconds
    """How long workers may take to finish their step at a stop; 0 kills them at once."""
    grace_seconds: float = GRACE_SECONDS
    """How long the other ranks of a rank that failed may take to end."""
    zygote: bool = True
    """Import what the workers need here, and fork them; else they are new processes, which import it themselves."""
    args: tyro.conf.Suppress[list[str]] = field(default_factory=list)
    env: tyro.conf.Suppress[dict[str, str]] = field(default_factory=dict)

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.run_dir)


class Supervisor:
    """Run one group until it finishes, may not be restarted any more, or a stop is asked for.

    Args:
        stop: counts the requests to stop.
        starter: of the workers.
    """

    def __init__(self, spec: GroupSpec, stop: StopRequests, starter: Starter) -> None:
        self.spec = spec
        self._stop = stop
        self._starter = starter
        self._policy = RestartPolicy(spec.max_restarts, run_trains=lambda: has_trained(spec.paths))
        self._events = EventLog(spec.paths.supervisor_events(spec.replica, os.getpid()), replica=spec.replica)
        self._group: WorkerGroup | None = None
        # From now on: what the folder holds of an earlier run keeps nobody away.
        self._finishes = EventTail(spec.paths.events, TrainingFinished, pattern=spec.paths.workers_pattern())
        self._finish_time: float | None = None
        """Unix seconds at which the first group finished."""
        self._attempt_events = self._follow(spec.attempt)
        self._too_late = False
        """Whether the others have finished while the group was coming back."""

    def kill_workers(self) -> None:
        """Kill the workers at once; for the end of a process that is orphaned."""
        self._stop()
        if self._group is not None:
            self._group.kill()

    def run(self) -> int:
        """Return 0 when the group finished or was drained, 2 or 3 (see `restart_policy`) as a worker did, else 1.

        Raises:
            Exception: whatever this process cannot do (no file, no fork); the group's workers have ended with it.
        """
        attempt = self.spec.attempt
        restarted_because = self.spec.takeover
        try:
            while not self._stop:
                started = time.monotonic()
                failure = self._run_attempt(attempt, restarted_because)
                told = self._attempt_events
                told.poll()
                if self._too_late:
                    return 0
                if failure is None and (self._stop or not self._was_sent_away(attempt)):
                    return 0
                if self._stop:
                    break
                code, error = (0, None) if failure is None else (failure.code, failure.error)
                alive = time.monotonic() - started
                disturbed = told.disturbed or self._events.is_stalled
                end = AttemptEnd(code, alive, told.committed, error, disturbed, told.step)
                decision = self._policy.decide(end)
                if isinstance(decision, GiveUp):
                    if failure is None:
                        return 0
                    self._give_up(attempt, failure, decision)
                    return exit_status(code)
                self._pause(decision)
                attempt += 1
                restarted_because = SENT_AWAY if failure is None else failure.describe()
            return 1
        finally:
            self._events.close()

    def _run_attempt(self, attempt: int, restarted_because: str) -> WorkerExit | None:
        """Run the group once; return the first worker that failed, None when all ended well."""
        self._attempt_events = self._follow(attempt)
        group = self._group = self._start_group(attempt, restarted_because)
        first: WorkerExit | None = None
        announced: set[int] = set()
        try:
            exits = self._wait_for_end(group, came_back=restarted_because == SENT_AWAY)
            if root_failure(exits):
                exits = self._wait_for_cause(attempt, group)
            exits = self._with_errors(attempt, exits)
            first = root_failure(exits)
            self._attempt_events.poll()
            # Before the others are ended, which may take the grace time: the event's time is that of the failure.
            for exit in sorted(exits, key=lambda exit: exit is not first):
                self._emit_exit(attempt, exit)
                announced.add(exit.rank)
            if self._stop and first is None and self.spec.drain_seconds > 0:
                group.drain(self.spec.drain_seconds, self._stop.impatient)
        finally:
            # A rank cannot finish without the one that failed; after a drain, there was time enough.
            sibling_failed = root_failure(group.exits()) is not None and not self._stop.impatient()
            final = self._with_errors(attempt, group.end(self.spec.grace_seconds if sibling_failed else 0.0))
            self._group = None
        for exit in final:
            if exit.rank not in announced:
                cause = first.describe() if first else "the run was stopped"
                self._emit_exit(attempt, exit, cause)
        return first or root_failure(final)

    def _start_group(self, attempt: int, restarted_because: str) -> WorkerGroup:
        spec = self.spec
        logs = {rank: self._log(attempt, rank) for rank in range(spec.ranks)}
        point_to(logs[0].parent, spec.paths.latest_logs(spec.replica))
        if restarted_because:
            self._events.emit(ReplicaRestarted(attempt=attempt, reason=restarted_because, standby=self._starter.forks))
        return WorkerGroup(
            self._starter,
            spec.module,
            spec.args,
            {**spec.env, **attempt_env(attempt)},
            spec.ranks,
            spec.max_restarts,
            attempt=attempt,
            logs=logs,
            title=f"titan-ft {spec.replica}.",
            bind=spec.bind,
        )

    def _wait_for_end(self, group: WorkerGroup, came_back: bool) -> list[WorkerExit]:
        """Wait until all finished, one failed, or a stop was asked for; return those that ended by themselves.

        Args:
            came_back: whether the others do not wait for the group, because it left in order.
        """
        looked = time.monotonic()
        while True:
            exits = group.exits()
            if self._stop or len(exits) == group.num_ranks or any(exit.failed for exit in exits):
                return exits
            now = time.monotonic()
            if now - looked > 1.0:
                looked = now
                retry_waiting()
                self._attempt_events.poll()
                came_back = came_back and not self._attempt_events.committed
                if came_back and self._job_is_over(OVER_SECONDS):
                    self._too_late = True  # it would train everything anew, alone
                    self._stop.count = max(self._stop.count, 2)
            time.sleep(POLL_SECONDS)

    def _wait_for_cause(self, attempt: int, group: WorkerGroup) -> list[WorkerExit]:
        """Wait a moment for ranks that have told of an exception and have not ended yet; return all that have ended.

        On a busy host a rank that lost its peer may be gone before that peer, whose exception is the cause, is.
        """
        deadline = time.monotonic() + CAUSE_SECONDS
        while True:
            exits = group.exits()
            running = set(range(group.num_ranks)) - {exit.rank for exit in exits}
            if not any(self._error_file(attempt, rank).exists() for rank in running) or time.monotonic() > deadline:
                return exits
            time.sleep(POLL_SECONDS)

    def _emit_exit(self, attempt: int, exit: WorkerExit, stopped_because: str = "") -> None:
        disturbed, log = self._attempt_events.disturbed, self._log(attempt, exit.rank)
        self._events.emit(exit.event(attempt, stopped_because, disturbed=disturbed, log=log))

    def _with_errors(self, attempt: int, exits: list[WorkerExit]) -> list[WorkerExit]:
        """Return the exits with the exceptions that ended the workers, as far as they have told."""
        return [
            replace(exit, error=read_error(self._error_file(attempt, exit.rank))) if exit.code > 0 else exit
            for exit in exits
        ]

    def _log(self, attempt: int, rank: int) -> Path:
        return self.spec.paths.logs(self.spec.replica, attempt, rank)

    def _error_file(self, attempt: int, rank: int) -> Path:
        return beside(self._log(attempt, rank))

    def _follow(self, attempt: int) -> AttemptEvents:
        paths = self.spec.paths
        return AttemptEvents(paths.events, paths.workers_pattern(self.spec.replica, attempt))

    def _was_sent_away(self, attempt: int) -> bool:
        """Tell whether somebody asked the workers to leave while others train on: then the group is to come back.

        Who asks this process too wants the group to be gone. And nobody comes back to a job that is over.

        Where the last events are missing and there is no mark either, the group stays away: it may have finished. One
        that comes back to a job that is over would train all of it again, alone.
        """
        told = self._attempt_events
        error_files = [self._error_file(attempt, rank) for rank in range(self.spec.ranks)]
        told.drained = told.drained or any(map(has_left, error_files))
        if told.is_cut and not told.drained and not self._job_is_over():
            why = "its last events could not be written, and it may have finished"
            print(f"group {self.spec.replica} is not started again: {why}", file=sys.stderr, flush=True)
        return told.drained and not self._job_is_over()

    def _job_is_over(self, seconds: float = 0.0) -> bool:
        """Tell whether a group has finished since this process was started, at least so long ago."""
        if self._finish_time is None:
            self._finish_time = next((event.time for event in self._finishes.poll()), None)
        if self._finish_time is None:
            with contextlib.suppress(OSError):  # the mark that is there also where no event can be written
                self._finish_time = os.lstat(self.spec.paths.finished).st_mtime
        return self._finish_time is not None and self._finish_time <= time.time() - seconds

    def _give_up(self, attempt: int, failure: WorkerExit, why: GiveUp) -> None:
        log = self._log(attempt, failure.rank)
        line = last_error_line(log) if failure.error is None or failure.is_early else failure.error.text
        if failure.code == -signal.SIGKILL:
            line = ""  # its log just stops: the last line is no reason
        reason = f"{failure.describe()}; {why.reason}"
        self._events.emit(
            ReplicaGaveUp(
                attempt=attempt,
                rank=failure.rank,
                cause=why.cause,
                reason=reason,
                log=str(log),
                error=line,
            )
        )
        print(
            f"group {self.spec.replica}: {reason}; {f'{log}: {line}' if line else f'see {log}'}",
            file=sys.stderr,
            flush=True,
        )

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stop and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def point_to(folder: Path, link: Path) -> None:
    """Let a link lead to a folder beside it; without links, as on some file systems, there is none."""
    new = link.with_name(f".{link.name}-{os.getpid()}")
    with contextlib.suppress(OSError):
        link.parent.mkdir(parents=True, exist_ok=True)
        new.unlink(missing_ok=True)
        new.symlink_to(folder.name, target_is_directory=True)
        new.replace(link)  # in one piece: there is no moment without it


def root_failure(exits: list[WorkerExit]) -> WorkerExit | None:
    """Return the worker whose end most likely caused the others', among those found ended at the same look.

    A rank that was killed brings its peers down with a connection error before the next look, not the other way round.
    Of ranks with exceptions the earliest one counts, as in torch elastic's `ChildFailedError`: later ones may follow.

    A SIGABRT and an exit status without an exception (0 of an early end, too) may follow from a lost peer, for Gloo and
    NCCL abort the process. So an exception that does not go by itself comes before them. A connection error comes after
    them: it is what the peers of a rank end with that has aborted.
    """
    errors = [exit.error for exit in exits if exit.error is not None and not exit.is_early]
    earliest = min(errors, key=lambda error: error.time, default=None)
    is_explained = earliest is not None and not earliest.transient

    def place(exit: WorkerExit) -> int:
        if exit.code < 0 and exit.code != -signal.SIGABRT:
            return 0
        if exit.error is not None and not exit.is_early:
            return 1 if is_explained else 2
        if exit.is_early or kind_of_end(exit.code, None):
            return 2 if is_explained else 1
        return 3  # a rank that was told to end, and could not do so in order

    def order(exit: WorkerExit) -> tuple[bool, int, float, int]:
        when = exit.error.time if exit.error is not None else float("inf")
        return exit.code != CONFIG_ERROR_CODE, place(exit), when, exit.rank

    return min((exit for exit in exits if exit.failed), key=order, default=None)


def main() -> int:
    """Supervise the group that the command line describes."""
    protect_output()
    stop = StopRequests(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    spec = tyro.cli(GroupSpec, args=arguments[:end], config=(tyro.conf.FlagCreatePairsOff,))
    spec.args = arguments[end + 1 :]
    started: list[Supervisor] = []

    def kill_workers() -> None:
        for supervisor in started:
            supervisor.kill_workers()

    end_with_parent(kill_workers)
    spec.env = worker_env(spec.replica, spec.ranks, spec.lighthouse)
    started.append(Supervisor(spec, stop, choose_starter(spec)))
    try:
        return started[0].run()
    except Exception:  # noqa: BLE001  # process edge: the launcher must know that the group was not given up
        traceback.print_exc()
        started[0].kill_workers()
        return AGENT_CRASHED_CODE


def choose_starter(spec: GroupSpec) -> Starter:
    """Import what the workers need, if they are to be forks; where that is not possible they are new processes."""
    if not spec.zygote or sys.platform != "linux":  # macOS's own libraries do not bear a fork
        return PlainStarter()
    os.environ.update(usual_env())  # what is read when a library is loaded must be there before
    obstacle = preload(spec.module, spec.args)
    if obstacle:
        print(f"group {spec.replica}: {obstacle}: its workers are new processes", file=sys.stderr, flush=True)
    return PlainStarter() if obstacle else ForkStarter()


if __name__ == "__main__":
    sys.exit(main())
