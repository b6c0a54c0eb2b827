# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Keep one replica group running: start its workers, and restart all of them when one dies.

Each group has one agent (`python -m titan_ft.launch.group.agent`), under `titan-ft launch` and on a
cluster (`titan-ft group`). A group on several hosts has an agent on each: the first one leads, and
the others follow its messages (`hosts`, `follower`). The group is restarted as a whole, because its
ranks cannot continue without each other. The workers are forks of the agent, which has imported
everything that they need (`forks`), by itself or as a fork of the launcher's zygote.

torch elastic's agent (torchrun) is not used, because a group needs more than it offers:

- After a failure it gives the other ranks as long as for an orderly end: 30 s, or a whole drain.
  Here they get `GRACE_SECONDS`, because they cannot finish without the failed rank.
- It has threads, so it cannot fork workers that have everything imported. Its forkserver takes a
  function as the entry point, and starts one server for each agent.
- The agents of a group meet at a store that is open to everyone, and unpickle its contents.
- The agent of each node counts restarts and judges ends by itself, and no agent can give a group up
  on all nodes.
- It takes exit status 0 in the middle of training for success.

See docs/agents.md.
"""

from __future__ import annotations

import signal

# Without this, Ctrl-C during the imports printed a traceback. A job in a shell's background ignores
# Ctrl-C.
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
from titan_ft.launch.group.follower import STOPPED, Follower
from titan_ft.launch.group.forks import check, preload
from titan_ft.launch.group.hosts import (
    MEETING_SECONDS,
    GroupWorkers,
    HostAgent,
    Hosts,
    listen_if_own_address,
)
from titan_ft.launch.group.worker_exit import WorkerExit, root_failure
from titan_ft.launch.group.worker_group import (
    LOOPBACK,
    AttemptStore,
    ForkStarter,
    MeetingPoint,
    PlainStarter,
    Share,
    Starter,
    WorkerGroup,
    attempt_env,
    default_env,
    worker_env,
)
from titan_ft.launch.restart_policy import (
    AGENT_CRASHED_CODE,
    CONFIG,
    CONFIG_ERROR_CODE,
    HOST,
    HOST_SUSPECTED_CODE,
    NETWORK,
    AttemptEnd,
    AttemptEvents,
    NoRestart,
    RestartPolicy,
    exit_status,
    has_trained,
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
RETRY_SECONDS = 0.2
"""Pause between two attempts to find the agent that leads."""
GRACE_SECONDS = 3.0
"""Time for the other ranks of a group to end after one rank failed; then they are killed."""
EXCEPTION_EXIT_SECONDS = 1.0
"""Time for a rank that reported an exception to end by itself."""
AGENT_MODULE = "titan_ft.launch.group.agent"
"""This module."""
DEFAULT_MODULE = "titan_ft.train"
LATE_RETURN_SECONDS = 10.0
"""A restarted group that has committed nothing this long after another group finished gives up."""
ASKED_TO_LEAVE = "its workers were told to leave"
ZYGOTE_ENV = "TITAN_FT_ZYGOTE"
"""Environment variable; with the value 0, workers are new processes, as with --no-zygote."""
NEW_PROCESSES = "its workers are new processes"
"""End of the line in which an agent reports why its workers are no forks."""
METRICS_MODULE = "titan_ft.live.group_metrics"
NO_LOG = "the output of its group"


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
    """Numeric address at which the group's store listens. Groups on other hosts must reach it. ::
    stands for all addresses.
    """
    takeover: str = ""
    """Why the first attempt is a restart, if it is one."""
    attempt: int = 0
    """Number of the first attempt."""
    max_restarts: int = 100
    module: str = DEFAULT_MODULE
    drain_seconds: Annotated[float, tyro.conf.arg(name="drain-timeout")] = (
        FaultTolerance.drain_timeout_seconds
    )
    """How long workers may take to finish their step at a stop; 0 kills them at once."""
    grace_seconds: float = GRACE_SECONDS
    """How long the other ranks of a rank that failed may take to end."""
    zygote: bool = True
    """Import everything that workers need in this process, and fork them. Without it, workers are
    new processes, and each imports everything itself.
    """
    cluster: bool = False
    """No launcher has started this agent. The agent counts attempts and checks the config itself.
    Its output and exit status are those of the group's command.
    """
    hosts: int = 1
    """Number of hosts of the group."""
    rendezvous: str = ""
    """HOST:PORT of the group's first host, at which the agents of its hosts meet."""
    args: tyro.conf.Suppress[list[str]] = field(default_factory=list)
    env: tyro.conf.Suppress[dict[str, str]] = field(default_factory=dict)

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.run_dir)

    def report(self, text: str) -> None:
        print(f"titan_ft: group {self.replica}: {text}", file=sys.stderr, flush=True)

    def start_workers(
        self, starter: Starter, attempt: int, share: Share, meeting_point: MeetingPoint
    ) -> WorkerGroup:
        """Start the workers of an attempt on this host."""
        logs = {rank: self.paths.logs(self.replica, attempt, rank) for rank in share.ranks}
        if not self.cluster:
            replace_link(logs[share.first_rank].parent, self.paths.latest_logs(self.replica))
        return WorkerGroup(
            starter,
            self.module,
            self.args,
            {**self.env, **attempt_env(attempt)},
            share,
            meeting_point,
            attempt=attempt,
            max_restarts=self.max_restarts,
            logs=logs,
            has_logs=not self.cluster,
            title=f"titan-ft {self.replica}.",
        )


class Agent:
    """Runs one group until it finishes, its restarts are used up, or a stop is requested.

    `_AgentProcess` makes it in each agent's process and calls `run`, on the process's only thread.
    There is no other thread, because a fork would lose it. `kill_workers` is the one exception: the
    thread that notices the launcher's death calls it. If this process dies, its workers end with
    it, and the launcher's `AgentKeeper` starts another agent. See docs/agents.md.

    Args:
        stop: counts the requests to stop.
        starter: starts the workers.
        hosts: the other hosts of the group; None if there is none.
    """

    def __init__(
        self, spec: GroupSpec, stop: StopRequests, starter: Starter, hosts: Hosts | None = None
    ) -> None:
        self.spec = spec
        self._stop = stop
        self._starter = starter
        self._hosts = hosts
        self._suspects = SuspectPolicy.of(os.environ) if spec.cluster else SuspectPolicy()
        self._policy = RestartPolicy(
            spec.max_restarts,
            has_run_trained=lambda: has_trained(spec.paths),
            host_deaths=self._suspects.deaths,
        )
        self._events = EventLog(
            spec.paths.agent_events(spec.replica, os.getpid()), replica=spec.replica
        )
        if hosts is not None:
            hosts.on_refusal = partial(emit_refusal, self._events, "agent")
        self._group: GroupWorkers | None = None
        # Only new events count: a finish of an earlier run in the folder must keep nobody away.
        self._finishes = EventTail(
            spec.paths.events, TrainingFinished, pattern=spec.paths.workers_pattern()
        )
        self._finish_time: float | None = None
        """Unix seconds at which the first group finished."""
        self._attempt_events = self._follow(spec.attempt)
        self._returned_too_late = False
        """Whether the other groups finished while this group was coming back."""
        self._deaths: dict[str, HostDeaths] = {}
        """Deaths of workers, by host."""

    def kill_workers(self) -> None:
        """Kill the workers at once. Any thread may call this after the end of the launcher."""
        self._stop()
        if self._group is not None:
            self._group.kill()

    def run(self) -> int:
        """Run attempts until none must follow, and return the exit status of this agent.

        Returns:
            0 if the group finished or was drained. 2, 3 or 4 as in `restart_policy`. Else 1.

        Raises:
            Exception: this process failed (no file, no fork). The group's workers have ended.
        """
        try:
            status = self._run_attempts()
            if self._hosts is not None:
                self._hosts.close(STOPPED if self._stop else status, self._describe_end(status))
            return status
        finally:
            self._events.close()

    def give_up_for_config_error(self, mistake: str) -> int:
        """Give the group up for a mistake in its config, found before any worker was started."""
        error = f"{CONFIG_ERROR}: {mistake}"
        why = NoRestart(CONFIG, "the configuration is wrong")
        self._announce_give_up(self.spec.attempt, 0, why, "", error, CONFIG_ERROR)
        self._events.close()
        print(f"titan_ft: {mistake}", file=sys.stderr, flush=True)
        return CONFIG_ERROR_CODE

    def _run_attempts(self) -> int:
        attempt = self.spec.attempt
        restarted_because = self.spec.takeover
        came_back = False
        while not self._stop:
            members = self._wait_for_hosts(attempt)
            if members is None:
                return 1
            started = time.monotonic()
            failure = self._run_attempt(attempt, restarted_because, members, came_back=came_back)
            self._attempt_events.poll()
            if self._returned_too_late:
                return 0
            if failure is None and (self._stop or not self._must_return()):
                return 0
            if self._stop:
                return 1
            decision = self._policy.decide(
                self._describe_attempt(failure, time.monotonic() - started)
            )
            if failure is None:
                if isinstance(decision, NoRestart):
                    return 0
                restarted_because = ASKED_TO_LEAVE
                came_back = True
            else:
                status = exit_status(failure.code)
                if not isinstance(decision, NoRestart):
                    suspicion = self._suspect(attempt, failure.host)
                    if suspicion:
                        decision = NoRestart(HOST, suspicion)
                        status = HOST_SUSPECTED_CODE
                if isinstance(decision, NoRestart):
                    self._give_up(attempt, failure, decision)
                    return status
                restarted_because = failure.describe()
                came_back = False
            self._pause(decision)
            attempt += 1
        return 1

    def _wait_for_hosts(self, attempt: int) -> Sequence[HostAgent] | None:
        """Wait for the agents of the group's other hosts.

        Returns:
            The agents, without this one. None if they did not come in time, which is announced, or
            if a stop was requested.
        """
        if self._hosts is None:
            return []
        members = self._hosts.wait_for_all(lambda: bool(self._stop))
        if members is None and not self._stop:
            why = (
                f"the agents of its {self._hosts.num_hosts} hosts did not meet within "
                f"{MEETING_SECONDS:.0f} s"
            )
            self._announce_give_up(attempt, None, NoRestart(NETWORK, why), "", why)
            self.spec.report(why)
        return members

    def _run_attempt(
        self, attempt: int, restarted_because: str, members: Sequence[HostAgent], *, came_back: bool
    ) -> WorkerExit | None:
        """Run the group once; return the first worker that failed, or None if all ended well.

        Args:
            restarted_because: reason for the restart; empty for a first start.
            members: the agents of the group's other hosts.
            came_back: whether the group left in order before, so that the other groups do not wait
                for it.
        """
        self._attempt_events = self._follow(attempt)
        if restarted_because:
            self._events.emit(
                ReplicaRestarted(
                    attempt=attempt, reason=restarted_because, standby=self._starter.forks
                )
            )
        group = self._group = self._start_group(attempt, members)
        first: WorkerExit | None = None
        announced: set[int] = set()
        try:
            exits = self._wait_for_end(group, came_back=came_back)
            if root_failure(exits):
                group.wait_for_cause(EXCEPTION_EXIT_SECONDS)
                exits = group.exits()
            first = root_failure(exits)
            self._attempt_events.poll()
            # Announced before the other ranks are ended: that may take the grace time, and the
            # event must have the time of the failure.
            for exit in sorted(exits, key=lambda exit: exit is not first):
                cause = ""
                if first is not None and exit is not first and exit.reports_lost_rank:
                    # Without a cause, the exit of a rank that only reports the loss of another one
                    # would count against the rank's own host.
                    cause = first.describe()
                self._emit_exit(attempt, exit, cause)
                announced.add(exit.rank)
            if self._stop and first is None and self.spec.drain_seconds > 0:
                group.drain(self.spec.drain_seconds, self._stop.must_end_at_once)
        finally:
            # The grace time is for ranks that lost another rank: they notice and end by themselves.
            # After a drain, they have had time enough.
            grace_seconds = 0.0
            has_failed = root_failure(group.exits()) is not None
            if has_failed and not self._stop.must_end_at_once():
                grace_seconds = self.spec.grace_seconds
            final = group.end(grace_seconds)
            self._group = None
        if any(exit.has_left for exit in final):
            self._attempt_events.note_leave()
        for exit in final:
            if exit.rank not in announced:
                cause = first.describe() if first else "the run was stopped"
                self._emit_exit(attempt, exit, cause)
        return first or root_failure(final)

    def _start_group(self, attempt: int, members: Sequence[HostAgent]) -> GroupWorkers:
        spec = self.spec
        address = members[0].connection.own_address if members else ""
        # The followers reach this host at `address`, which may be ::1 (localhost): a store that
        # listens at 127.0.0.1 would not answer there.
        bind = address if address and spec.bind == LOOPBACK else spec.bind
        store = AttemptStore(self._starter, bind, address)
        share = Share(
            spec.ranks,
            spec.ranks + sum(member.num_ranks for member in members),
            num_hosts=1 + len(members),
        )
        try:
            local = spec.start_workers(self._starter, attempt, share, store.meeting_point)
        except BaseException:
            store.close()
            raise
        return GroupWorkers(attempt, share, store, local, self._hosts, members)

    def _wait_for_end(self, group: GroupWorkers, came_back: bool) -> list[WorkerExit]:
        """Wait until all workers finished, one failed, or the group must end.

        Returns:
            The workers that ended by themselves.
        """
        last_look = time.monotonic()
        while True:
            exits = group.exits()
            if self._stop or len(exits) == group.num_ranks or any(exit.failed for exit in exits):
                return exits
            now = time.monotonic()
            if now - last_look > 1.0:
                last_look = now
                retry_waiting()
                self._attempt_events.poll()
                came_back = came_back and not self._attempt_events.committed
                if came_back and self._job_is_over(LATE_RETURN_SECONDS):
                    # Alone, the group would train the whole finished job again.
                    self._returned_too_late = True
                    return exits
            time.sleep(POLL_SECONDS)

    def _describe_attempt(self, failure: WorkerExit | None, alive_seconds: float) -> AttemptEnd:
        """Describe the end of the latest attempt for the restart policy.

        Args:
            failure: the worker that failed first; None if all workers ended well.
        """
        events = self._attempt_events
        return AttemptEnd(
            0 if failure is None else failure.code,
            alive_seconds,
            committed=events.committed,
            error=None if failure is None else failure.error,
            disturbed=events.disturbed or self._events.is_stalled,
            step=events.step,
        )

    def _emit_exit(self, attempt: int, exit: WorkerExit, stopped_because: str = "") -> None:
        disturbed, log = self._attempt_events.disturbed, self._log(attempt, exit.rank)
        self._events.emit(exit.event(attempt, stopped_because, disturbed=disturbed, log=log))

    def _log(self, attempt: int, rank: int) -> Path | None:
        return None if self.spec.cluster else self.spec.paths.logs(self.spec.replica, attempt, rank)

    def _follow(self, attempt: int) -> AttemptEvents:
        return AttemptEvents(self.spec.paths, self.spec.replica, attempt)

    def _must_return(self) -> bool:
        """True if the workers were asked to leave while other groups train.

        The group then returns. It stays away if this process was asked to stop as well, which the
        caller checks. It also stays away if the job has finished, because it would train all of it
        again, alone. If the last events of the attempt are missing, and no mark shows that the
        workers left, the group may have finished. So it stays away, and a line says so.
        """
        events = self._attempt_events
        # First: at a normal end, no agent need read the events of all groups.
        if not (events.drained or events.is_cut):
            return False
        if self._job_is_over():
            return False
        if not events.drained:
            self.spec.report(
                "it is not started again: its last events could not be written, and it may have "
                "finished"
            )
        return events.drained

    def _job_is_over(self, seconds: float = 0.0) -> bool:
        """True if a group finished since the start of this process, at least `seconds` ago."""
        if self._finish_time is None:
            finishes = self._finishes.poll()
            if finishes:
                self._finish_time = finishes[0].time
        if self._finish_time is None:
            # On a full disk the event is missing, but the mark is there.
            with contextlib.suppress(OSError):
                self._finish_time = os.lstat(self.spec.paths.finished).st_mtime
        if self._finish_time is None:
            return False
        return self._finish_time <= time.time() - seconds

    def _suspect(self, attempt: int, host: str) -> str:
        """Announce a suspected host and return the reason; empty if the host is not suspected."""
        if not self._suspects.deaths:
            return ""
        seconds = self._suspects.window_seconds
        paths = self.spec.paths
        if host not in self._deaths:
            self._deaths[host] = HostDeaths(paths.events, paths.agents_pattern(), host, seconds)
        deaths = self._deaths[host].count()
        if deaths < self._suspects.deaths:
            return ""
        reason = (
            f"{deaths} deaths of workers on host {host} within {seconds:g} s: the group is to go "
            "on elsewhere"
        )
        self._events.emit(HostLeft(attempt=attempt, host=host, deaths=deaths, reason=reason))
        self._suspects.act(host, reason)
        return reason

    def _give_up(self, attempt: int, failure: WorkerExit, why: NoRestart) -> None:
        """Announce and report that the group is not started again after a worker's failure."""
        log = self._log(attempt, failure.rank)
        line = ""
        kind = None
        if failure.error is not None and not failure.is_early:
            line = failure.error.text
            kind = failure.error.type_name
        # The log of a rank that was killed just stops. Its last line would be a wrong reason.
        if not line and log is not None and failure.code != -signal.SIGKILL:
            line = last_error_line(log)
        reason = f"{failure.describe()}; {why.reason}"
        if log is None:
            where = error = line or "see its output"
        else:
            where = f"{log}: {line}" if line else f"see {log}"
            error = line
        self._announce_give_up(
            attempt,
            failure.rank,
            NoRestart(why.cause, reason),
            "" if log is None else str(log),
            error,
            kind,
        )
        self.spec.report(f"{reason}; {where}")

    def _announce_give_up(
        self,
        attempt: int,
        rank: int | None,
        why: NoRestart,
        log: str,
        error: str,
        error_kind: str | None = None,
    ) -> None:
        self._events.emit(
            ReplicaGaveUp(
                attempt=attempt,
                rank=rank,
                cause=why.cause,
                reason=why.reason,
                log=log or NO_LOG,
                error=error,
                error_kind=error_kind,
            )
        )

    def _describe_end(self, status: int) -> str:
        """Return the reason that the other hosts' agents print; empty if the group finished."""
        if self._stop:
            return f"it was stopped on host {node_name()}"
        if status:
            return f"it was given up; see the output of host {node_name()}"
        return ""

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stop and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def replace_link(folder: Path, link: Path) -> None:
    """Let a symbolic link lead to a folder beside it.

    Does nothing on a file system without links, or if its own folder is another user's link.

    The link is replaced in one operation, so that a reader always finds the old or the new one.
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
    signums = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    # A signal that is ignored stays so: SIGHUP after nohup, SIGINT in a shell's background.
    stop = StopRequests(
        *(signum for signum in signums if signal.getsignal(signum) != signal.SIG_IGN)
    )
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    spec = tyro.cli(GroupSpec, args=arguments[:end], config=(tyro.conf.FlagCreatePairsOff,))
    spec.args = arguments[end + 1 :]
    main_process = _AgentProcess(spec, stop)
    try:
        return main_process.run_on_cluster() if spec.cluster else main_process.run_under_launcher()
    except Exception:  # noqa: BLE001  # process edge
        # With another exit status, the launcher would take the group for given up.
        traceback.print_exc()
        main_process.kill_workers()
        return AGENT_CRASHED_CODE


class _AgentProcess:
    """The process of an agent: chooses how to start workers, and whether to lead or to follow.

    `main` makes it and calls one of the two `run_...` methods, on the process's only thread. The
    thread that notices the launcher's death calls `kill_workers`.
    """

    def __init__(self, spec: GroupSpec, stop: StopRequests) -> None:
        self.spec = spec
        self._stop = stop
        self._mistake = ""
        """The mistake that was found in the config; empty if none was found."""
        self._starter: Starter = PlainStarter()
        self._agent: Agent | None = None
        self._hosts: Hosts | None = None
        self._follower: Follower | None = None

    def kill_workers(self) -> None:
        for owner in (self._agent, self._follower):
            if owner is not None:
                owner.kill_workers()

    def run_under_launcher(self) -> int:
        """Keep the group until it ends, or the launcher does."""
        spec = self.spec
        end_with_parent(self.kill_workers)
        spec.env = worker_env(spec.replica, spec.ranks, spec.lighthouse)
        self._choose_starter()
        self._agent = Agent(spec, self._stop, self._starter)
        return self._agent.run()

    def run_on_cluster(self) -> int:
        """Run the group, or this host's part of it, until it ends."""
        spec = self.spec
        try:
            metrics_place = _read_environment()
        except ConfigError as error:
            print(f"titan_ft: {error}", file=sys.stderr)
            return CONFIG_ERROR_CODE
        # Workers end by themselves after drain_timeout_seconds. Without this margin, they could be
        # killed at that moment in the middle of a save.
        spec.drain_seconds += spec.grace_seconds
        spec.zygote = spec.zygote and os.environ.get(ZYGOTE_ENV) != "0"
        spec.env = default_env()
        if spec.lighthouse:
            spec.env[LIGHTHOUSE_VARIABLE] = spec.lighthouse
        self._choose_starter()
        if self._mistake:
            _number_first_attempt(spec)
            return Agent(spec, self._stop, self._starter).give_up_for_config_error(self._mistake)
        try:
            if spec.hosts == 1:
                status = self._lead(metrics_place)
            else:
                status = self._lead_or_follow(metrics_place)
        except ConfigError as error:
            print(f"titan_ft: {error}", file=sys.stderr, flush=True)
            return CONFIG_ERROR_CODE
        if self._stop.signum is not None:
            print(
                f"titan_ft: this group was stopped by {self._stop.signum.name}",
                file=sys.stderr,
                flush=True,
            )
            return _exit_status_of_stop(self._stop)
        return status

    def _choose_starter(self) -> None:
        """Import everything that workers need and fork them later, if that is possible and wanted.

        Otherwise the starter stays `PlainStarter`, which starts new processes.
        """
        spec = self.spec
        if not spec.zygote or sys.platform != "linux":  # macOS's own libraries do not bear a fork
            return
        # Some libraries read these variables when they are loaded, so they are set before.
        os.environ.update(default_env())
        self._stop.on_request = self._exit_during_imports
        if spec.cluster:  # under a launcher, the zygote has checked the config
            try:
                check(spec.module, spec.args)
            except ConfigError as error:
                self._mistake = str(error)
                return
        obstacle = preload(spec.module, spec.args)
        self._stop.on_request = None
        if obstacle:
            spec.report(f"{obstacle}: {NEW_PROCESSES}")
        else:
            self._starter = ForkStarter(self._private_descriptors)

    def _exit_during_imports(self) -> None:
        """End during the imports, which take seconds: there are no workers yet."""
        if self.spec.cluster and self._stop.signum is not None:
            os.write(2, f"titan_ft: this group was stopped by {self._stop.signum.name}\n".encode())
            os._exit(_exit_status_of_stop(self._stop))
        os._exit(1)

    def _private_descriptors(self) -> list[int]:
        """List the descriptors that no fork of this process may keep; see `ForkStarter`."""
        descriptors: list[int] = []
        if self._hosts is not None:
            descriptors += self._hosts.descriptors()
        if self._follower is not None:
            descriptors += self._follower.descriptors()
        return descriptors

    def _lead_or_follow(self, metrics_place: str) -> int:
        """Lead the group if its rendezvous is on this host, else follow the leading agent."""
        spec = self.spec
        token = read_token(os.environ)
        self._follower = Follower(
            self._stop,
            token,
            spec.replica,
            spec.ranks,
            partial(spec.start_workers, self._starter),
            drain_seconds=spec.drain_seconds,
            grace_seconds=spec.grace_seconds,
            report=spec.report,
        )
        deadline = time.monotonic() + MEETING_SECONDS
        while not self._stop and time.monotonic() < deadline:
            listener = None
            with contextlib.suppress(OSError):  # the name server does not know the host yet
                listener = listen_if_own_address(spec.rendezvous)
            if listener is not None:
                self._hosts = Hosts(listener, spec.hosts, token, spec.replica, spec.report)
                return self._lead(metrics_place)
            status = self._follower.follow(spec.rendezvous)
            if status is not None:
                return status
            if self._follower.has_met:
                deadline = time.monotonic() + MEETING_SECONDS
            time.sleep(RETRY_SECONDS)
        if not self._stop:
            spec.report(
                f"no agent of this group was at {spec.rendezvous} for {MEETING_SECONDS:.0f} s"
            )
        return 1

    def _lead(self, metrics_place: str) -> int:
        spec = self.spec
        _number_first_attempt(spec)
        self._agent = Agent(spec, self._stop, self._starter, self._hosts)
        metrics = None
        if metrics_place:
            arguments = [metrics_place, str(spec.run_dir), str(spec.replica)]
            env = {**os.environ, PARENT_PID_ENV: str(os.getpid())}
            metrics = self._starter.start(METRICS_MODULE, arguments, env, None, "titan-ft metric")
        try:
            return self._agent.run()
        finally:
            if metrics is not None:
                metrics.kill()
                metrics.wait()


def _read_environment() -> str:
    """Check the environment variables of an agent on a cluster.

    Returns:
        Address at which the group's metrics are served; empty: none are served.

    Raises:
        ConfigError: a variable is wrong.
    """
    from titan_ft.live.group_metrics import PORT_ENV
    from titan_ft.live.metrics import split_address

    SuspectPolicy.of(os.environ)
    place = os.environ.get(PORT_ENV, "")
    if place:
        split_address(place)
    return place


def _number_first_attempt(spec: GroupSpec) -> None:
    """Number the first attempt of a group without a launcher, and record why it is a restart.

    A group that Slurm requeued, or that a person started again, is a restart like any other. With
    one number, the events of two attempts would be taken for those of one.
    """
    known = spec.paths.next_attempt(spec.replica)
    requeued = os.environ.get("SLURM_RESTART_COUNT", "")
    num_requeued = int(requeued) if requeued.isdecimal() else 0
    spec.attempt = max(known, num_requeued)
    if spec.attempt > 0:
        spec.takeover = "Slurm requeued it" if num_requeued else "started by hand"


def _exit_status_of_stop(stop: StopRequests) -> int:
    """Return the exit status of a stopped group's command: 130 after SIGINT, else 1.

    The status after SIGTERM is not 0, although the workers left in order: Kubernetes would take the
    group for finished.
    """
    return stop.status if stop.signum == signal.SIGINT else 1


if __name__ == "__main__":
    sys.exit(main())
