# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Keep one replica group running: start its workers, and start them all again when one of them dies.

One process per group (`python -m titan_ft.launch.supervisor`), so that a restart does not pay for this module's imports
again; beside the group it keeps a standby (see `standby`), so that a restart does not pay for the workers' imports
either. The group as a whole is what is restarted, because its ranks cannot go on without each other.

A spare supervisor (`--spare`) prepares a standby for a replica that it is told later, on stdin.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from titan_ft.config import FaultTolerance
from titan_ft.launch.restart_policy import CONFIG_ERROR_CODE, AttemptEnd, AttemptEvents, RestartPolicy, exit_status
from titan_ft.launch.standby import Standby, StandbyKeeper
from titan_ft.run.error_file import beside, read_error
from titan_ft.run.events import ReplicaGaveUp, ReplicaRestarted, TrainingFinished
from titan_ft.run.log import EventLog
from titan_ft.run.orphan import exit_with_parent
from titan_ft.run.paths import RunPaths
from titan_ft.run.stop import StopRequests
from titan_ft.run.tail import EventTail, last_error_line

if TYPE_CHECKING:
    from titan_ft.launch.worker_group import WorkerExit, WorkerGroup

POLL_SECONDS = 0.02
GRACE_SECONDS = 3.0
CAUSE_SECONDS = 1.0
"""What a rank that has told of an exception gets to end by itself."""
STANDBY_AFTER_SECONDS = 30.0
"""A group that waits for others this long gets a standby, though it has not committed a step."""
DEFAULT_MODULE = "titan_ft.train"
OVER_SECONDS = 10.0
"""What a group that is back may take to finish together with the others."""
SENT_AWAY = "its workers were told to leave"


@dataclass
class GroupSpec:
    """Supervise one replica group; what follows a -- is the command line of its workers."""

    run_dir: Path
    ranks: int
    replica: int = 0
    spare: bool = False
    """Wait on stdin, after the lighthouse, for a line {"replica": R, "attempt": K}; then be the supervisor of that
    replica from that attempt on, with its --fault_tolerance.replica_id added to the workers' flags."""
    attempt: int = 0
    """Number of the first attempt."""
    max_restarts: int = 100
    module: str = DEFAULT_MODULE
    lighthouse: str = ""
    """Its address; if left out, read as one line from stdin."""
    drain_seconds: Annotated[float, tyro.conf.arg(name="drain-timeout")] = FaultTolerance.drain_timeout_seconds
    """How long workers may take to finish their step at a stop; 0 kills them at once."""
    grace_seconds: float = GRACE_SECONDS
    """How long the other ranks of a rank that failed may take to end."""
    standby: bool = True
    args: tyro.conf.Suppress[list[str]] = field(default_factory=list)
    env: tyro.conf.Suppress[dict[str, str]] = field(default_factory=dict)

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.run_dir)


class Supervisor:
    """Run one group until it finishes, may not be restarted any more, or a stop is asked for.

    Args:
        stop: counts the requests to stop.
        keeper: of the standbys of `spec`; one that already has a standby lets the first attempt begin with it.
    """

    def __init__(self, spec: GroupSpec, stop: StopRequests, keeper: StandbyKeeper) -> None:
        self.spec = spec
        self._stop = stop
        self._keeper = keeper
        self._policy = RestartPolicy(spec.max_restarts)
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
        """Kill the workers at once; for the thread that found this process orphaned."""
        self._stop()
        if self._group is not None:
            self._group.kill()

    def run(self, takeover: str = "") -> int:
        """Return 0 when the group finished or was drained, 2 or 3 (see `restart_policy`) as a worker did, else 1.

        Args:
            takeover: why the first attempt is a restart, if it is one.
        """
        attempt = self.spec.attempt
        restarted_because = takeover
        try:
            while not self._stop:
                started = time.monotonic()
                failure = self._run_attempt(attempt, restarted_because)
                told = self._attempt_events
                told.poll()
                if self._too_late:
                    return 0
                if failure is None and (self._stop or not self._was_sent_away()):
                    return 0
                if self._stop:
                    break
                code, error = (0, None) if failure is None else (failure.code, failure.error)
                alive = time.monotonic() - started
                delay = self._policy.decide(AttemptEnd(code, alive, told.committed, error, told.disturbed))
                if isinstance(delay, str):
                    if failure is None:
                        return 0
                    self._give_up(attempt, failure, delay)
                    return exit_status(code)
                self._pause(delay)
                attempt += 1
                restarted_because = SENT_AWAY if failure is None else failure.describe()
            return 1
        finally:
            self._keeper.end()
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
                self._keeper.end()
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
        """Let the standby begin if there is one that may; else start workers."""
        from titan_ft.launch.worker_group import WorkerGroup, attempt_env

        spec = self.spec
        logs = {rank: self._log(attempt, rank) for rank in range(spec.ranks)}
        point_to(logs[0].parent, spec.paths.latest_logs(spec.replica))
        standby = self._keeper.take()
        if restarted_because:
            self._events.emit(ReplicaRestarted(attempt=attempt, reason=restarted_because, standby=standby is not None))
        if standby is not None:
            # One that dies right now costs its start-up time, but is not the group's failure.
            if standby.go(spec.args, {**spec.env, **attempt_env(attempt)}, logs):
                return standby.group
            standby.end()
        return WorkerGroup(spec.module, spec.args, spec.env, spec.ranks, spec.max_restarts, attempt=attempt, logs=logs)

    def _wait_for_end(self, group: WorkerGroup, came_back: bool) -> list[WorkerExit]:
        """Wait until all finished, one failed, or a stop was asked for; return those that ended by themselves.

        Args:
            came_back: whether the others do not wait for the group, because it left in order.
        """
        started = looked = time.monotonic()
        due = False
        while True:
            exits = group.exits()
            if self._stop or len(exits) == group.num_ranks or any(exit.failed for exit in exits):
                return exits
            now = time.monotonic()
            if now - looked > 1.0:
                looked = now
                self._attempt_events.poll()
                came_back = came_back and not self._attempt_events.committed
                if came_back and self._job_is_over(OVER_SECONDS):
                    self._too_late = True  # it would train everything anew, alone
                    self._stop.count = max(self._stop.count, 2)
                # Imports must not slow the start of the group itself.
                due = due or self._attempt_events.committed or now - started > STANDBY_AFTER_SECONDS
            # A group of which ranks have left needs no standby.
            self._keeper.keep(due and not exits and self.spec.standby and self._policy.restarts_left)
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

    def _was_sent_away(self) -> bool:
        """Tell whether somebody asked the workers to leave while others train on: then the group is to come back.

        Who asks this process too wants the group to be gone. And nobody comes back to a job that is over.
        """
        return self._attempt_events.drained and not self._job_is_over()

    def _job_is_over(self, seconds: float = 0.0) -> bool:
        """Tell whether a group has finished since this process was started, at least so long ago."""
        if self._finish_time is None:
            self._finish_time = next((event.time for event in self._finishes.poll()), None)
        return self._finish_time is not None and self._finish_time <= time.time() - seconds

    def _give_up(self, attempt: int, failure: WorkerExit, why: str) -> None:
        log = self._log(attempt, failure.rank)
        line = last_error_line(log) if failure.error is None else failure.error.text
        reason = f"{failure.describe()}; {why}"
        self._events.emit(ReplicaGaveUp(attempt=attempt, rank=failure.rank, reason=reason, log=str(log), error=line))
        print(f"replica {self.spec.replica}: {failure.describe()}; {why}; {log}: {line}", file=sys.stderr, flush=True)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stop and time.monotonic() < deadline:
            self._keeper.keep(due=False)
            time.sleep(POLL_SECONDS)


def start_standby(spec: GroupSpec) -> Standby:
    """Start a standby of the group; what depends on the replica, if it is not known yet, follows with "go"."""
    return Standby(spec.module, spec.args, spec.env, spec.ranks, spec.max_restarts)


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
    """

    def order(exit: WorkerExit) -> tuple[bool, bool, float, int]:
        when = exit.error.time if exit.error is not None else float("inf")
        return exit.code != CONFIG_ERROR_CODE, exit.code > 0, when, exit.rank

    return min((exit for exit in exits if exit.failed), key=order, default=None)


def read_instruction(stop: StopRequests, meanwhile: Callable[[], None] = lambda: None) -> str:
    """Return the launcher's next line on stdin; an empty one when it closed stdin, or a stop was asked for."""
    while not stop and not select.select([0], [], [], POLL_SECONDS)[0]:
        meanwhile()
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # a buffer would keep the line after it from `select`
        return "" if stop else stdin.readline().decode().strip()


def main() -> int:
    """Supervise the group that the command line, or for a spare the launcher, describes."""
    stop = StopRequests(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    spec = tyro.cli(GroupSpec, args=arguments[:end], config=(tyro.conf.FlagCreatePairsOff,))
    spec.args = arguments[end + 1 :]
    keeper = StandbyKeeper(lambda: start_standby(spec))
    started: list[Supervisor] = []

    def kill_workers() -> None:
        keeper.kill()
        for supervisor in started:
            supervisor.kill_workers()

    exit_with_parent(before_exit=kill_workers)
    # Imported here, while the lighthouse starts, and before its address is waited for.
    from titan_ft.launch.worker_group import usual_env, worker_env

    lighthouse = spec.lighthouse or read_instruction(stop)
    if not lighthouse:
        return 0 if spec.spare else 1  # the launcher ended before the lighthouse was there
    if spec.spare:
        spec.env = usual_env()
        line = read_instruction(stop, lambda: keeper.keep(due=spec.standby))
        if not line:
            keeper.end()
            return 0
        place = json.loads(line)
        spec.replica, spec.attempt = place["replica"], place["attempt"]
        spec.args.append(f"--fault_tolerance.replica_id={spec.replica}")
    spec.env = worker_env(spec.replica, spec.ranks, lighthouse)
    supervisor = Supervisor(spec, stop, keeper)
    started.append(supervisor)
    return supervisor.run(takeover="a spare takes its place" if spec.spare else "")


if __name__ == "__main__":
    sys.exit(main())
