# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Keep one replica group running: start its workers, and restart all of them when one dies.

A *worker* is the training process of one rank. An *attempt* is one start of all workers of the
group. A process of this module (`python -m titan_ft.launch.group.agent`) is an *agent*. Each host
of a group has one: `titan-ft launch` starts it, or a scheduler by `titan-ft group`. If the group
has several hosts, one of their agents leads and runs the steps below. The others are followers:
they start and end the workers of their hosts on the leader's orders (`hosts`, `follower`).

1. Import everything that workers need, so that workers can be forks (`forks`). An agent that is
   itself a fork of the launcher's zygote has the imports already (`zygote`).
2. Wait until the followers are connected, if the group has several hosts.
3. Start the workers, and look at them every `POLL_SECONDS`.
4. When a worker fails, find the failure that caused the others, write the events, and end the
   other workers. The group is restarted as a whole, because its ranks cannot continue without each
   other.
5. Ask `RestartPolicy` whether and when the next attempt starts, and go back to step 2.

The agent ends with one of these exit statuses, after its workers:

- 0: the group finished, or left in order.
- 1: the group was given up, or did not leave in order when it was stopped. An agent without a
  launcher also ends so after a stop in order, or with 130 after Ctrl-C.
- 2, 3: the group was given up because no restart can help (`CONFIG_ERROR_CODE`,
  `NO_RESTART_CODE`).
- 4: the group leaves a suspected host (`HOST_SUSPECTED_CODE`).
- 5: the agent itself crashed (`AGENT_CRASHED_CODE`). A launcher then starts another agent.

torch elastic's agent (torchrun) is not used, because a group needs more than it offers:

- After a failure, torchrun's agent gives the other ranks 30 s to end, or the time of a whole drain.
  Here they get `GRACE_SECONDS`, because they cannot finish without the failed rank.
- torchrun's agent has threads, so it cannot fork workers that have everything imported. Its
  forkserver takes a function as the entry point, and starts one server for each agent.
- The agents of torchrun meet at a store that is open to everyone, and unpickle its contents.
- Each of torchrun's agents counts restarts and judges ends by itself, and none can give a group up
  on all nodes.
- torchrun's agent takes exit status 0 in the middle of training for success.

See docs/agents.md.
"""

from __future__ import annotations

import signal

# Ctrl-C during the imports below must end this process, without a traceback. If Ctrl-C is ignored,
# as for a job in a shell's background, it stays ignored.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from titan_ft.config import LIGHTHOUSE_VARIABLE, ConfigError, FaultTolerance
from titan_ft.launch.group.follower import STOPPED_STATUS, Follower
from titan_ft.launch.group.forks import check_worker_args, prepare_forks
from titan_ft.launch.group.hosts import (
    MEETING_SECONDS,
    Followers,
    GroupWorkers,
    RemoteAgent,
    listen_if_own_address,
)
from titan_ft.launch.group.worker_exit import WorkerExit, find_root_cause
from titan_ft.launch.group.worker_group import (
    LOOPBACK,
    AttemptStore,
    ForkStarter,
    LocalWorkers,
    MeetingPoint,
    PlainStarter,
    Share,
    Starter,
    attempt_env,
    default_env,
    worker_env,
)
from titan_ft.launch.restart_policy import (
    AGENT_CRASHED_CODE,
    CAUSE_CONFIG,
    CAUSE_HOST,
    CAUSE_NETWORK,
    CONFIG_ERROR_CODE,
    HOST_SUSPECTED_CODE,
    AttemptEnd,
    AttemptEvents,
    NoRestart,
    RestartPolicy,
    agent_exit_status,
    has_run_committed,
)
from titan_ft.launch.suspect import HostDeaths, SuspectPolicy
from titan_ft.run.appender import retry_waiting
from titan_ft.run.events import (
    CONFIG_ERROR,
    HostLeft,
    ReplicaGaveUp,
    ReplicaRestarted,
    TrainingFinished,
)
from titan_ft.run.log import EventLog
from titan_ft.run.orphan import PARENT_PID_ENV, end_with_parent
from titan_ft.run.output import protect_output
from titan_ft.run.paths import RunPaths
from titan_ft.run.refused import emit_refusal
from titan_ft.run.tail import EventTail, last_error_line
from titan_ft.system.ownership import make_folder
from titan_ft.system.process import node_name
from titan_ft.system.stop import StopRequests
from titan_ft.system.token import read_token

POLL_SECONDS = 0.02
"""Pause between two looks at the workers."""
RETRY_SECONDS = 0.2
"""Pause before the next search for the leading agent."""
GRACE_SECONDS = 3.0
"""Time for the other ranks of a group to end after one rank failed; then they are killed."""
EXCEPTION_EXIT_SECONDS = 1.0
"""Time for a rank that reported an exception to end by itself, before the root cause is chosen.

The grace time for the other ranks begins afterwards.
"""
LATE_RETURN_SECONDS = 10.0
"""A group that returned, and has not committed this long after another group finished, gives up."""
AGENT_MODULE = "titan_ft.launch.group.agent"
"""This module."""
DEFAULT_MODULE = "titan_ft.train"
"""The module that workers run if the command line names no other."""
METRICS_MODULE = "titan_ft.live.group_metrics"
ASKED_TO_LEAVE = "its workers were told to leave"
"""Reason for the restart of a group whose workers left without a request to their agent."""
ZYGOTE_ENV = "TITAN_FT_ZYGOTE"
"""Environment variable; with the value 0, workers are new processes, as with --no-zygote."""
WORKERS_ARE_NEW_PROCESSES = "its workers are new processes"
"""End of the line in which an agent reports why its workers are no forks. Benchmarks search for it.
"""
GROUP_OUTPUT = "the output of its group"
"""Stands for the path of a log in `ReplicaGaveUp.log` if the workers have no logs of their own."""


# The help of the command line shows this docstring and those of the fields.
@dataclass
class GroupSpec:
    """Keep one replica group running. Arguments after a -- are the command line of its workers."""

    run_dir: Path
    ranks: int
    """Number of the group's ranks on this host."""
    lighthouse: str = ""
    """Address of the lighthouse; empty: TORCHFT_LIGHTHOUSE of the environment."""
    replica: int = 0
    """Slot of the group."""
    bind: str = LOOPBACK
    """Numeric address at which the group's store listens; :: stands for all addresses. The ranks of
    other groups connect to the store as well, to exchange gradients.
    """
    restart_reason: str = ""
    """Why the first attempt is a restart; empty if it is none."""
    attempt: int = 0
    """Number of the first attempt."""
    max_restarts: int = 100
    module: str = DEFAULT_MODULE
    """Python module that the workers run."""
    drain_seconds: Annotated[float, tyro.conf.arg(name="drain-timeout")] = (
        FaultTolerance.drain_timeout_seconds
    )
    """How long workers may take to finish their step at a stop; 0 kills them at once."""
    grace_seconds: float = GRACE_SECONDS
    """How long the other ranks may take to end after one rank failed."""
    zygote: bool = True
    """Import everything that workers need in this process, and fork them. Without it, workers are
    new processes, and each imports everything itself.
    """
    cluster: bool = False
    """The agent has no launcher. It checks the config and chooses the number of the first attempt
    itself. Its output and exit status are those of the group's command.
    """
    hosts: int = 1
    """Number of hosts of the group."""
    rendezvous: str = ""
    """HOST:PORT of the group's first host, at which the agents of its hosts meet."""
    args: tyro.conf.Suppress[list[str]] = field(default_factory=list)
    """Command line of the workers."""
    env: tyro.conf.Suppress[dict[str, str]] = field(default_factory=dict)
    """Variables for the workers, in addition to the environment of this process."""

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.run_dir)

    def report(self, text: str) -> None:
        print(f"titan_ft: group {self.replica}: {text}", file=sys.stderr, flush=True)

    def start_workers(
        self, starter: Starter, attempt: int, share: Share, meeting_point: MeetingPoint
    ) -> LocalWorkers:
        """Start the workers of an attempt on this host."""
        logs = {rank: self.paths.logs(self.replica, attempt, rank) for rank in share.ranks}
        # On a cluster the workers write to the output of the group's command, and have no logs.
        has_logs = not self.cluster
        if has_logs:
            replace_link(logs[share.first_rank].parent, self.paths.latest_logs(self.replica))
        return LocalWorkers(
            starter,
            self.module,
            self.args,
            {**self.env, **attempt_env(attempt)},
            share,
            meeting_point,
            attempt=attempt,
            max_restarts=self.max_restarts,
            logs=logs,
            has_logs=has_logs,
            # `ps` shows "titan-ft 0.1" for rank 1 of group 0.
            title=f"titan-ft {self.replica}.",
        )


class Agent:
    """Runs one group until it finishes, is given up, or a stop is requested.

    `_AgentProcess` makes the object in the agent's process, and calls `run` on the main thread. The
    process has no other thread on Linux, because a forked worker would lose it. If this process
    dies, its workers end with it, and the launcher's `AgentKeeper` starts another agent.

    Args:
        stop_requests: counts the requests to stop.
        starter: starts the workers.
        followers: the agents of the group's other hosts; None if the group has one host.
    """

    def __init__(
        self,
        spec: GroupSpec,
        stop_requests: StopRequests,
        starter: Starter,
        followers: Followers | None = None,
    ) -> None:
        self.spec = spec
        self._stop_requests = stop_requests
        self._starter = starter
        self._followers = followers
        self._suspect_policy = SuspectPolicy()
        if spec.cluster:
            # Under a launcher, no host can be left: all groups are on this one.
            self._suspect_policy = SuspectPolicy.from_environment(os.environ)
        self._restart_policy = RestartPolicy(
            spec.max_restarts,
            has_run_committed=lambda: has_run_committed(spec.paths),
            deaths_until_suspected=self._suspect_policy.deaths_until_suspected,
        )
        self._events = EventLog(
            spec.paths.agent_events(spec.replica, os.getpid()), replica=spec.replica
        )
        if followers is not None:
            followers.on_refusal = partial(emit_refusal, self._events, "agent")
        self._group: GroupWorkers | None = None
        """The workers of the running attempt; None between attempts."""
        # Reads only new events: if an earlier run in the folder finished, this group must still
        # restart.
        self._finishes = EventTail(
            spec.paths.events, TrainingFinished, pattern=spec.paths.workers_pattern()
        )
        self._finish_time: float | None = None
        """Unix seconds at which the first group finished; None while no group has."""
        self._attempt_events = self._open_attempt_events(spec.attempt)
        self._returned_too_late = False
        """Whether the other groups finished before this group, which had left, trained again."""
        self._host_deaths: dict[str, HostDeaths] = {}
        """Counters of the workers' deaths, by host."""

    def kill_workers(self) -> None:
        """Kill the workers at once, and let `run` return.

        Called when this process has failed, or when the launcher has died: then on Linux by a
        signal handler, elsewhere by a thread.
        """
        self._stop_requests()  # counts one request, as a signal does
        if self._group is not None:
            self._group.kill()

    def run(self) -> int:
        """Run attempts until none must follow, and return the agent's exit status.

        Raises:
            Exception: this process failed (no file, no fork). The group's workers have ended.
        """
        try:
            status = self._run_attempts()
            if self._followers is not None:
                follower_status = STOPPED_STATUS if self._stop_requests else status
                self._followers.close(follower_status, self._reason_for_followers(status))
            return status
        finally:
            self._events.close()

    def give_up_for_config_error(self, mistake: str) -> int:
        """Give the group up for a mistake in its config, found before any worker was started."""
        self._announce_give_up(
            self.spec.attempt,
            cause=CAUSE_CONFIG,
            reason="the configuration is wrong",
            rank=0,
            error=f"{CONFIG_ERROR}: {mistake}",
            error_kind=CONFIG_ERROR,
        )
        self._events.close()
        print(f"titan_ft: {mistake}", file=sys.stderr, flush=True)
        return CONFIG_ERROR_CODE

    def _run_attempts(self) -> int:
        attempt = self.spec.attempt
        restart_reason = self.spec.restart_reason
        returns_after_leave = False
        while not self._stop_requests:
            followers = self._wait_for_followers(attempt)
            if followers is None:
                return 1
            started = time.monotonic()
            failure = self._run_attempt(
                attempt, restart_reason, followers, returns_after_leave=returns_after_leave
            )
            alive_seconds = time.monotonic() - started
            self._attempt_events.poll()
            if self._returned_too_late:
                return 0
            if failure is None and not self._must_return():
                return 0
            if self._stop_requests:
                return 1  # a worker failed before the group had left
            # Seconds until the restart, or why none follows.
            decision = self._restart_policy.decide(self._summarize_attempt(failure, alive_seconds))
            if failure is None:
                if isinstance(decision, NoRestart):
                    # The restarts are used up, but no worker has failed.
                    return 0
                restart_reason = ASKED_TO_LEAVE
                returns_after_leave = True
            else:
                status = agent_exit_status(failure.code)
                if not isinstance(decision, NoRestart):
                    suspicion = self._leave_host_if_suspected(attempt, failure.host)
                    if suspicion:
                        decision = NoRestart(CAUSE_HOST, suspicion)
                        status = HOST_SUSPECTED_CODE
                if isinstance(decision, NoRestart):
                    self._give_up(attempt, failure, decision)
                    return status
                restart_reason = failure.describe()
                returns_after_leave = False
            self._pause(decision)
            attempt += 1
        return 1

    def _wait_for_followers(self, attempt: int) -> Sequence[RemoteAgent] | None:
        """Wait for the agents of the group's other hosts.

        Returns:
            The agents. None if a stop was requested, or if not all agents came in time. This method
            then gives the group up.
        """
        if self._followers is None:
            return []
        present = self._followers.wait_for_all(lambda: bool(self._stop_requests))
        if present is None and not self._stop_requests:
            why = (
                f"the agents of its {self._followers.num_hosts} hosts did not meet within "
                f"{MEETING_SECONDS:.0f} s"
            )
            self._announce_give_up(attempt, cause=CAUSE_NETWORK, reason=why, rank=None, error=why)
            self.spec.report(why)
        return present

    def _run_attempt(
        self,
        attempt: int,
        restart_reason: str,
        followers: Sequence[RemoteAgent],
        *,
        returns_after_leave: bool,
    ) -> WorkerExit | None:
        """Run all workers of the group once, and end them.

        Args:
            restart_reason: reason for the restart; empty for a first start.
            followers: the agents of the group's other hosts.
            returns_after_leave: whether the group left in order before this attempt. The other
                groups then do not wait for the group, and may finish without it.

        Returns:
            The failed worker whose end caused the others; None if no worker failed.
        """
        self._attempt_events = self._open_attempt_events(attempt)
        if restart_reason:
            # The field `standby` means that the workers need no imports.
            self._events.emit(
                ReplicaRestarted(
                    attempt=attempt, reason=restart_reason, standby=self._starter.forks
                )
            )
        group = self._start_group(attempt, followers)
        self._group = group
        root_cause: WorkerExit | None = None
        announced_ranks: set[int] = set()
        try:
            exits = self._wait_for_end(group, returns_after_leave)
            if any(exit.failed for exit in exits):
                group.wait_for_cause(EXCEPTION_EXIT_SECONDS)
                exits = group.exits()
            root_cause = find_root_cause(exits)
            self._attempt_events.poll()
            # Announced before the other ranks are ended: to end them may take the grace time, and
            # the event must have the time of the failure.
            self._announce_exits(attempt, exits, root_cause)
            announced_ranks = {exit.rank for exit in exits}
            if self._stop_requests and root_cause is None and self.spec.drain_seconds > 0:
                group.drain(self.spec.drain_seconds, self._stop_requests.must_end_at_once)
        finally:
            # After a failure, the other ranks notice the lost rank and end by themselves within the
            # grace time. Otherwise the ranks that still run had their time in the drain.
            grace_seconds = 0.0
            has_failed = any(exit.failed for exit in group.exits())
            if has_failed and not self._stop_requests.must_end_at_once():
                grace_seconds = self.spec.grace_seconds
            exits = group.end(grace_seconds)
            self._group = None
        if any(exit.has_left for exit in exits):
            self._attempt_events.note_leave()
        for exit in exits:
            if exit.rank not in announced_ranks:
                cause = root_cause.describe() if root_cause else "the run was stopped"
                self._emit_exit(attempt, exit, cause)
        return root_cause or find_root_cause(exits)

    def _start_group(self, attempt: int, followers: Sequence[RemoteAgent]) -> GroupWorkers:
        spec = self.spec
        own_address = ""
        if followers:
            own_address = followers[0].connection.own_address
        bind = spec.bind
        if own_address and bind == LOOPBACK:
            # The workers of other hosts reach this host at `own_address`. That may be ::1 in a
            # test, where a store that listens at 127.0.0.1 would not answer.
            bind = own_address
        store = AttemptStore(self._starter, bind, own_address)
        share = Share(
            spec.ranks,
            spec.ranks + sum(follower.num_ranks for follower in followers),
            num_hosts=1 + len(followers),
        )
        try:
            local = spec.start_workers(self._starter, attempt, share, store.meeting_point)
        except BaseException:
            store.close()
            raise
        return GroupWorkers(attempt, share, store, local, self._followers, followers)

    def _wait_for_end(self, group: GroupWorkers, returns_after_leave: bool) -> list[WorkerExit]:
        """Wait until all workers finished, one failed, or the group must end.

        Returns:
            The workers that ended by themselves.
        """
        last_poll = time.monotonic()
        while True:
            exits = group.exits()
            if self._stop_requests or any(exit.failed for exit in exits):
                return exits
            if len(exits) == group.num_ranks:
                return exits
            now = time.monotonic()
            if now - last_poll > 1.0:
                last_poll = now
                retry_waiting()  # writes events that wait because the disk was full
                self._attempt_events.poll()
                waits_for_others = returns_after_leave and not self._attempt_events.committed
                if waits_for_others and self._is_job_over(LATE_RETURN_SECONDS):
                    # Alone, the group would train the whole finished job again.
                    self._returned_too_late = True
                    return exits
            time.sleep(POLL_SECONDS)

    def _summarize_attempt(self, failure: WorkerExit | None, alive_seconds: float) -> AttemptEnd:
        """Return the facts on the end of the latest attempt for the restart policy.

        Args:
            failure: the root cause of the end; None if no worker failed.
        """
        events = self._attempt_events
        code = 0
        error = None
        if failure is not None:
            code = failure.code
            error = failure.error
        return AttemptEnd(
            code,
            alive_seconds,
            committed=events.committed,
            error=error,
            # If this process cannot write events now, the workers' events may be missing as well.
            disturbed=events.disturbed or self._events.has_outage,
            step=events.step,
        )

    def _announce_exits(
        self, attempt: int, exits: Sequence[WorkerExit], root_cause: WorkerExit | None
    ) -> None:
        """Write the events of workers that ended by themselves, the root cause first."""
        if root_cause is not None:
            self._emit_exit(attempt, root_cause)
        for exit in exits:
            if exit is root_cause:
                continue
            cause = ""
            if root_cause is not None and exit.reports_lost_rank:
                # Without a cause in the event, the end of a rank that only reports the loss of
                # another rank would count as a death on its own host.
                cause = root_cause.describe()
            self._emit_exit(attempt, exit, cause)

    def _emit_exit(self, attempt: int, exit: WorkerExit, stopped_because: str = "") -> None:
        event = exit.to_event(
            attempt,
            stopped_because,
            disturbed=self._attempt_events.disturbed,
            log=self._worker_log(attempt, exit.rank),
        )
        self._events.emit(event)

    def _worker_log(self, attempt: int, rank: int) -> Path | None:
        if self.spec.cluster:
            return None
        return self.spec.paths.logs(self.spec.replica, attempt, rank)

    def _open_attempt_events(self, attempt: int) -> AttemptEvents:
        return AttemptEvents(self.spec.paths, self.spec.replica, attempt)

    def _must_return(self) -> bool:
        """True if the workers were asked to leave, but not this agent, and other groups train.

        If the last events of the attempt are missing because the disk is full, and no worker wrote
        a mark (`run.marks`) that it left, the group may have finished. The result is then False,
        and a line says so. Otherwise a finished group would train the whole job again, alone.
        """
        if self._stop_requests:
            return False
        events = self._attempt_events
        # Tested first: at a normal end, no agent need read the events of all groups.
        if not (events.drained or events.is_cut):
            return False
        if self._is_job_over():
            return False
        if not events.drained:
            self.spec.report(
                "it is not started again: its last events could not be written, and it may have "
                "finished"
            )
        return events.drained

    def _is_job_over(self, for_seconds: float = 0.0) -> bool:
        """True if a group finished since the start of this process, at least `for_seconds` ago."""
        if self._finish_time is None:
            finishes = self._finishes.poll()
            if finishes:
                self._finish_time = finishes[0].time
        if self._finish_time is None:
            # On a full disk the event is missing, but a worker has left a mark.
            with contextlib.suppress(OSError):
                self._finish_time = os.lstat(self.spec.paths.finished).st_mtime
        if self._finish_time is None:
            return False
        return self._finish_time <= time.time() - for_seconds

    def _leave_host_if_suspected(self, attempt: int, host: str) -> str:
        """Announce that the group leaves a host on which too many workers died.

        Returns:
            The reason; empty if the host is not suspected.
        """
        policy = self._suspect_policy
        if not policy.deaths_until_suspected:
            return ""
        seconds = policy.window_seconds
        paths = self.spec.paths
        if host not in self._host_deaths:
            self._host_deaths[host] = HostDeaths(
                paths.events, paths.agents_pattern(), host, seconds
            )
        num_deaths = self._host_deaths[host].count()
        if num_deaths < policy.deaths_until_suspected:
            return ""
        reason = (
            f"{num_deaths} deaths of workers on host {host} within {seconds:g} s: the group is to "
            "go on elsewhere"
        )
        self._events.emit(HostLeft(attempt=attempt, host=host, deaths=num_deaths, reason=reason))
        policy.act(host, reason)
        return reason

    def _give_up(self, attempt: int, failure: WorkerExit, why: NoRestart) -> None:
        """Announce and report that the group is not started again after a worker's failure."""
        log = self._worker_log(attempt, failure.rank)
        error = ""
        error_kind = None
        if failure.error is not None and not failure.ended_early:
            error = failure.error.text
            error_kind = failure.error.type_name
        # The log of a rank that was killed just stops. Its last line would be a wrong reason.
        if not error and log is not None and failure.code != -signal.SIGKILL:
            error = last_error_line(log)
        if log is None:
            error = error or "see its output"
            where = error
        elif error:
            where = f"{log}: {error}"
        else:
            where = f"see {log}"
        reason = f"{failure.describe()}; {why.reason}"
        self._announce_give_up(
            attempt,
            cause=why.cause,
            reason=reason,
            rank=failure.rank,
            error=error,
            error_kind=error_kind,
            log=log,
        )
        self.spec.report(f"{reason}; {where}")

    def _announce_give_up(
        self,
        attempt: int,
        *,
        cause: str,
        reason: str,
        rank: int | None,
        error: str,
        error_kind: str | None = None,
        log: Path | None = None,
    ) -> None:
        self._events.emit(
            ReplicaGaveUp(
                attempt=attempt,
                rank=rank,
                cause=cause,
                reason=reason,
                log=GROUP_OUTPUT if log is None else str(log),
                error=error,
                error_kind=error_kind,
            )
        )

    def _reason_for_followers(self, status: int) -> str:
        """Return the reason that the other hosts' agents print; empty if the group finished."""
        if self._stop_requests:
            return f"it was stopped on host {node_name()}"
        if status:
            return f"it was given up; see the output of host {node_name()}"
        return ""

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stop_requests and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def replace_link(folder: Path, link: Path) -> None:
    """Let a symbolic link lead to a folder beside it.

    The link is replaced in one operation, so that a reader always finds the old or the new one.

    Does nothing on a file system without links, or if the folder that holds the link is another
    user's link.
    """
    new = link.with_name(f".{link.name}-{os.getpid()}")
    with contextlib.suppress(OSError):
        make_folder(link.parent)
        new.unlink(missing_ok=True)
        new.symlink_to(folder.name, target_is_directory=True)
        new.replace(link)


def main() -> int:
    """Run the agent of the group that the command line describes; return its exit status."""
    protect_output()
    # An ignored SIGCHLD is inherited, and the kernel would then reap the workers: their exit
    # statuses would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # A signal that is ignored stays so: SIGHUP after nohup, SIGINT in a shell's background.
    stop_signals = [
        signum
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(signum) != signal.SIG_IGN
    ]
    stop_requests = StopRequests(*stop_signals)
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    spec = tyro.cli(GroupSpec, args=arguments[:end], config=(tyro.conf.FlagCreatePairsOff,))
    spec.args = arguments[end + 1 :]
    process = _AgentProcess(spec, stop_requests)
    try:
        return process.run_on_cluster() if spec.cluster else process.run_under_launcher()
    except Exception:  # noqa: BLE001  # process edge
        # With another exit status, the launcher would take the group for given up.
        traceback.print_exc()
        process.kill_workers()
        return AGENT_CRASHED_CODE


class _AgentProcess:
    """The process of an agent: chooses how to start workers, and whether to lead or to follow.

    `main` makes the object, and calls one of the two `run_...` methods on the main thread.
    """

    def __init__(self, spec: GroupSpec, stop_requests: StopRequests) -> None:
        self.spec = spec
        self._stop_requests = stop_requests
        self._config_mistake = ""
        """A mistake in the config; empty if none was found."""
        self._starter: Starter = PlainStarter()
        self._agent: Agent | None = None
        """Set if this agent leads."""
        self._followers: Followers | None = None
        """Set if this agent leads a group on several hosts."""
        self._follower: Follower | None = None
        """Set if the group has several hosts; idle if this agent leads."""

    def kill_workers(self) -> None:
        """Kill the workers at once; see `Agent.kill_workers`."""
        if self._agent is not None:
            self._agent.kill_workers()
        if self._follower is not None:
            self._follower.kill_workers()

    def run_under_launcher(self) -> int:
        """Run the group until it ends, or the launcher dies."""
        spec = self.spec
        end_with_parent(self.kill_workers)
        spec.env = worker_env(spec.replica, spec.ranks, spec.lighthouse)
        self._choose_starter()
        self._agent = Agent(spec, self._stop_requests, self._starter)
        return self._agent.run()

    def run_on_cluster(self) -> int:
        """Run the group, or its workers on this host, until the group ends."""
        spec = self.spec
        try:
            metrics_address = _read_environment()
        except ConfigError as error:
            print(f"titan_ft: {error}", file=sys.stderr)
            return CONFIG_ERROR_CODE
        # Workers end by themselves after `drain_timeout_seconds`. This agent waits longer, because
        # it would otherwise kill them at that moment, perhaps in the middle of a save.
        spec.drain_seconds += spec.grace_seconds
        spec.zygote = spec.zygote and os.environ.get(ZYGOTE_ENV) != "0"
        spec.env = default_env()
        if spec.lighthouse:
            spec.env[LIGHTHOUSE_VARIABLE] = spec.lighthouse
        self._choose_starter()
        if self._config_mistake:
            _number_first_attempt(spec)
            agent = Agent(spec, self._stop_requests, self._starter)
            return agent.give_up_for_config_error(self._config_mistake)
        try:
            if spec.hosts == 1:
                status = self._lead(metrics_address)
            else:
                status = self._lead_or_follow(metrics_address)
        except ConfigError as error:
            print(f"titan_ft: {error}", file=sys.stderr, flush=True)
            return CONFIG_ERROR_CODE
        if self._stop_requests.signum is not None:
            print(
                f"titan_ft: this group was stopped by {self._stop_requests.signum.name}",
                file=sys.stderr,
                flush=True,
            )
            return _exit_status_of_stop(self._stop_requests)
        return status

    def _choose_starter(self) -> None:
        """Import everything that workers need and fork them later, if that is possible and wanted.

        Otherwise the starter stays `PlainStarter`, which starts new processes.
        """
        spec = self.spec
        if not spec.zygote or sys.platform != "linux":  # macOS's own libraries cannot be forked
            return
        # Set before the imports, because some libraries read these variables when they are loaded.
        os.environ.update(default_env())
        # The imports take seconds, in which a request to stop must not wait.
        self._stop_requests.on_request = self._exit_during_imports
        if spec.cluster:  # under a launcher, the zygote has checked the config
            try:
                check_worker_args(spec.module, spec.args)
            except ConfigError as error:
                self._config_mistake = str(error)
                return
        obstacle = prepare_forks(spec.module, spec.args)
        self._stop_requests.on_request = None
        if obstacle:
            spec.report(f"{obstacle}: {WORKERS_ARE_NEW_PROCESSES}")
        else:
            self._starter = ForkStarter(self._private_descriptors)

    def _exit_during_imports(self) -> None:
        """End this process at once; there are no workers yet. A signal handler calls this."""
        if self.spec.cluster and self._stop_requests.signum is not None:
            signal_name = self._stop_requests.signum.name
            os.write(2, f"titan_ft: this group was stopped by {signal_name}\n".encode())
            os._exit(_exit_status_of_stop(self._stop_requests))
        os._exit(1)

    def _private_descriptors(self) -> list[int]:
        """List the descriptors that no fork of this process may keep; see `ForkStarter`."""
        descriptors: list[int] = []
        if self._followers is not None:
            descriptors += self._followers.descriptors()
        if self._follower is not None:
            descriptors += self._follower.descriptors()
        return descriptors

    def _lead_or_follow(self, metrics_address: str) -> int:
        """Lead the group if its rendezvous is on this host, else follow the leading agent."""
        spec = self.spec
        token = read_token(os.environ)
        self._follower = Follower(
            self._stop_requests,
            token,
            spec.replica,
            spec.ranks,
            partial(spec.start_workers, self._starter),
            drain_seconds=spec.drain_seconds,
            grace_seconds=spec.grace_seconds,
            report=spec.report,
        )
        deadline = time.monotonic() + MEETING_SECONDS
        while not self._stop_requests and time.monotonic() < deadline:
            listener = None
            # The name of a host may not be known yet, for example while Kubernetes starts its pod.
            with contextlib.suppress(OSError):
                listener = listen_if_own_address(spec.rendezvous)
            if listener is not None:
                self._followers = Followers(listener, spec.hosts, token, spec.replica, spec.report)
                return self._lead(metrics_address)
            status = self._follower.follow(spec.rendezvous)
            if status is not None:
                return status
            if self._follower.has_started_workers:
                # There was a leader, and it is gone. The next leader gets the whole time again.
                deadline = time.monotonic() + MEETING_SECONDS
            time.sleep(RETRY_SECONDS)
        if not self._stop_requests:
            spec.report(
                f"no agent of this group was at {spec.rendezvous} for {MEETING_SECONDS:.0f} s"
            )
        return 1

    def _lead(self, metrics_address: str) -> int:
        """Lead the group until it ends, and serve its metrics meanwhile.

        Args:
            metrics_address: PORT or HOST:PORT; empty: the metrics are not served.
        """
        spec = self.spec
        _number_first_attempt(spec)
        self._agent = Agent(spec, self._stop_requests, self._starter, self._followers)
        metrics = None
        if metrics_address:
            # Another process serves the metrics, because the server has threads.
            metrics = self._starter.start(
                METRICS_MODULE,
                args=[metrics_address, str(spec.run_dir), str(spec.replica)],
                env={**os.environ, PARENT_PID_ENV: str(os.getpid())},
                log=None,
                title="titan-ft metric",
            )
        try:
            return self._agent.run()
        finally:
            if metrics is not None:
                metrics.kill()
                metrics.wait()


def _read_environment() -> str:
    """Check the environment variables of an agent on a cluster.

    Returns:
        PORT or HOST:PORT at which the group's metrics are served; empty: none are served.

    Raises:
        ConfigError: a variable is wrong.
    """
    from titan_ft.live.group_metrics import PORT_ENV
    from titan_ft.live.metrics import split_address

    SuspectPolicy.from_environment(os.environ)
    metrics_address = os.environ.get(PORT_ENV, "")
    if metrics_address:
        split_address(metrics_address)
    return metrics_address


def _number_first_attempt(spec: GroupSpec) -> None:
    """Number the first attempt of a group without a launcher, and record why it is a restart.

    Slurm may have requeued the group, or a person may have started it again. Such a start is a
    restart, and needs a number that no earlier attempt had. Otherwise readers of the events would
    take the two attempts for one.
    """
    unused_number = spec.paths.next_attempt(spec.replica)
    requeued = os.environ.get("SLURM_RESTART_COUNT", "")
    num_requeued = int(requeued) if requeued.isdecimal() else 0
    spec.attempt = max(unused_number, num_requeued)
    if spec.attempt > 0:
        spec.restart_reason = "Slurm requeued it" if num_requeued else "started by hand"


def _exit_status_of_stop(stop_requests: StopRequests) -> int:
    """Return the exit status of a stopped group's command: 130 after SIGINT, else 1.

    The status after SIGTERM is not 0, although the workers left in order: Kubernetes would take the
    group for finished.
    """
    return stop_requests.status if stop_requests.signum == signal.SIGINT else 1


if __name__ == "__main__":
    sys.exit(main())
