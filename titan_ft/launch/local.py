# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Launch a whole run on this host: a lighthouse and supervised replica groups, with live status."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from titan_ft.config import ConfigError
from titan_ft.history.fold.group import GroupFold
from titan_ft.history.outcomes.notes import name_groups
from titan_ft.launch.agent_keeper import AgentKeeper
from titan_ft.launch.going_on import CHECKPOINTS_OFF, describe_stop
from titan_ft.launch.group.agent import AGENT_MODULE, GRACE_SECONDS
from titan_ft.launch.group.children import Child, ChildProcess, Children
from titan_ft.launch.group.worker_group import default_env, open_log
from titan_ft.launch.group.zygote import IMPORT_SECONDS, Zygote, can_fork
from titan_ft.launch.launch_plan import LaunchPlan
from titan_ft.launch.lighthouse_keeper import LighthouseKeeper
from titan_ft.launch.record_keeper import RecordKeeper
from titan_ft.launch.restart_policy import (
    CONFIG_ERROR_CODE,
    CommonEnd,
    RestartPolicy,
    has_trained,
    may_replace,
)
from titan_ft.live import status
from titan_ft.live.job_curve import JobCurve
from titan_ft.live.metrics import MetricsServer
from titan_ft.live.run_status import RunStatus, describe_shape
from titan_ft.live.status_view import LaunchView
from titan_ft.options import QUIET_SECONDS
from titan_ft.run.appender import any_is_cut, retry_waiting
from titan_ft.run.events import (
    Event,
    LaunchFinished,
    LaunchStarted,
    LaunchStopping,
    SpareTookOver,
    WorkerExited,
)
from titan_ft.run.log import EventLog
from titan_ft.run.output import choose_native_log
from titan_ft.run.tail import EventTail, last_error_line
from titan_ft.system.namespace import allow_namespaces, enter_network_namespace
from titan_ft.system.stop import StopRequests
from titan_ft.system.token import TOKEN_ENV

if TYPE_CHECKING:
    from titan_ft.chaos.plan import Plan
    from titan_ft.chaos.runner import ChaosRunner

TICK_SECONDS = 0.1
LOST_SECONDS = 10.0
"""What a lost group gets to be heard of again once all others have ended; then it is killed."""


@dataclass(frozen=True)
class _RunEnd:
    """The end of a launch."""

    code: int
    """Exit status."""
    reason: str
    """In words."""
    own_failure: bool = False
    """Whether the launch itself failed, and none of its groups.

    Without this fact a view would name the last death of a group, from which that group had long
    come back. """


class LocalRun:
    """The processes of one run and their known state. `launch` makes it; one thread runs it.

    Raises:
        ConfigError: the lighthouse's port is taken.
    """

    def __init__(self, plan: LaunchPlan, stop: StopRequests) -> None:
        self.plan, self.stop = plan, stop
        self.status = RunStatus(plan.num_replicas)
        # First: when its port is taken, the folder must not look as if a run had been in it.
        self._metrics = None
        if plan.options.metrics_port:
            self._metrics = MetricsServer.at(
                self.status.fold, plan.options.metrics_port, plan.labels
            )
        # After the port of the figures, before any socket and process of the run.
        if plan.options.private_network:
            enter_network_namespace()
        self._curve = (
            None
            if plan.job_curve is None
            else JobCurve(plan.job_curve, lambda text: self.view.error(text))
        )
        self._events = EventLog(plan.paths.launcher_events(os.getpid()))
        # The token is not on any command line, where other users of the host could read it.
        token = secrets.token_hex(16)
        env = {TOKEN_ENV: token, "RUST_LOG": choose_native_log(os.environ)}
        env["WANDB_RUN_GROUP"] = os.environ.get("WANDB_RUN_GROUP") or plan.first_job_id
        env["TITAN_FT_RANKS_ON_HOST"] = str(plan.num_replicas * plan.num_ranks)
        self._children = Children(env)
        self._lighthouse = LighthouseKeeper(
            plan.lighthouse_command,
            plan.options.lighthouse_port,
            plan.paths.lighthouse_log,
            self._children,
            token,
            self._events,
        )
        self._record = RecordKeeper(plan.paths.events, self._children, plan.paths.record_log)
        self._agents: dict[int, AgentKeeper] = {}
        self._num_spares = plan.options.spares
        self._zygote: Zygote | None = None
        self._early_log: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  # open until the end
        """Output of the zygote from before there is a folder for its log."""
        self._trains_since: float | None = None
        self._time_is_up = False
        self._only_lost_since: float | None = None
        """Since when all groups but lost ones have ended, by the monotonic clock."""
        self._common_end = CommonEnd()
        self._mistake = ""
        """A mistake in the config that only a worker could find; empty as long as none is known."""
        self._hopeless = ""
        """Why it does not help to start groups again; empty as long as it may."""
        self._chaos = None if plan.chaos is None else self._chaos_runner(plan.chaos)

    def _chaos_runner(self, plan: Plan) -> ChaosRunner:
        # A run that nobody breaks loads nothing of it.
        from titan_ft.chaos.processes import Processes
        from titan_ft.chaos.runner import ChaosRunner

        return ChaosRunner(
            plan,
            processes=Processes(),
            orders=self.plan.paths.chaos_orders,
            events=self._events,
            lighthouse_pid=lambda: self._lighthouse.pid,
        )

    def run(self) -> int:
        """Return 0 when all groups finished or left, 2 when their configuration is wrong, else 1.

        A run that a signal stopped ends with 128 + the signal's number.
        """
        self._tail = EventTail(self.plan.paths.events)
        self.view = LaunchView(self.status, self.plan.paths.launch_log)
        end = _RunEnd(1, "the launcher failed", own_failure=True)
        try:
            end = self._run()
        finally:
            self._stop()
            self._refresh()
            if self._time_is_up and end.code == 0:
                end = self._judge_leaving()
            stopped = self.stop.signum if self.stop and end.code == self.stop.status else None
            finished = LaunchFinished(code=end.code, reason=end.reason)
            finished.signal = None if stopped is None else stopped.name
            finished.own_failure = end.own_failure or None
            self._events.emit(finished)
            self._refresh()  # a terminal's last picture would be of a run that goes on
            self._events.close()
            self._lighthouse.close()
            if self._curve:
                self._curve.close()  # without a wait of its own: it had that of the events
            if self._metrics:
                self._metrics.close()
            self.view.close()
            if self.stop or self._time_is_up:
                self._say_how_to_go_on()  # after the view, whose lines a terminal's width cuts
            self.view.close_log()
        return end.code

    def _say_how_to_go_on(self) -> None:
        if set(self.status.states.values()) == {status.FINISHED}:
            return
        command, drain = self.plan.resume_command, self.plan.drain_seconds
        for line in describe_stop(self.status, command, saves=self.plan.saves, drain_seconds=drain):
            self.view.note(line)

    def _run(self) -> _RunEnd:
        plan = self.plan
        started = LaunchStarted(
            replicas=plan.num_replicas,
            ranks_per_replica=plan.num_ranks,
            spares=plan.options.spares,
            job_id=plan.job_id,
            config_file=str(plan.options.config),
            changed=dict(plan.changes) or None,
        )
        self._events.emit(started)
        for name, change in plan.changes.items():
            self.view.line(f"goes on with another value: {change.describe(name)}")
        self._lighthouse.poll()
        self._let_zygote_proceed()
        while not self._lighthouse.listens:
            if self.stop:
                return self._interrupted()
            if self._lighthouse.failure:
                return self._lighthouse_failed()
            time.sleep(TICK_SECONDS / 4)
            self._lighthouse.poll()
        address = self._lighthouse.address
        self.view.line(
            f"lighthouse at {address}; {describe_shape(plan.num_replicas, plan.num_ranks)}; "
            f"{plan.paths.root}"
        )
        self.view.line(
            f"watch it: titan-ft top {plan.paths.root}; logs: "
            f"{plan.paths.root}/logs/replica-*/latest/"
        )
        if not plan.saves:
            self.view.line(CHECKPOINTS_OFF)
        if self._curve:
            self.view.line(f"curves: tensorboard --logdir {self._curve.folder.parent}")
        if self._metrics:
            self.view.line(f"metrics at {self._metrics.url}")
        while self._zygote is not None and not self._zygote.ready:
            if self.stop:
                return self._interrupted()
            time.sleep(TICK_SECONDS / 4)
            self._lighthouse.poll()
            if self._lighthouse.failure:
                return self._lighthouse_failed()
            self._watch_zygote()
        for replica in range(plan.num_replicas):
            self._agents[replica] = self._keep_agent(replica)
        return self._watch()

    def check(self) -> None:
        """Check the config as the workers read it, before there is a folder, or any process but the
        zygote.

        The check needs torchtitan, which the later zygote imports. Returns early at a stop.

        Raises:
            ConfigError: there is a mistake in the config.
        """
        log = self.plan.paths.zygote_log

        def start(command: list[str], descriptor: int) -> ChildProcess:
            env, output = default_env(), self._early_log
            child = self._children.start(
                "the zygote", command, log, env=env, pass_fds=[descriptor], output=output
            )
            return child.process

        self._zygote = Zygote(start, self.plan.module, self.plan.check_flags())
        deadline = time.monotonic() + IMPORT_SECONDS
        while (
            not (self._zygote.checked or self._zygote.is_lost or self.stop)
            and time.monotonic() < deadline
        ):
            time.sleep(TICK_SECONDS / 10)
            self._zygote.poll()
        if self._zygote.mistake:
            raise ConfigError(self._zygote.mistake)

    def abandon(self) -> None:
        """End the processes and release the ports of a run that does not begin."""
        self._children.stop(0.0)
        self._lighthouse.close()
        if self._metrics:
            self._metrics.close()

    def _let_zygote_proceed(self) -> None:
        """Let the zygote import the rest during the lighthouse's start, or end it, if there are no
        forks.
        """
        assert self._zygote is not None, "it has checked the config"
        with open_log(self.plan.paths.zygote_log, "ab") as log:
            self._early_log.seek(0)
            shutil.copyfileobj(self._early_log, log)
            log.flush()
            if not self.plan.options.no_zygote and can_fork():
                self._zygote.proceed(log.fileno())
                return
        self._zygote.close()
        self._zygote = None
        if not self.plan.options.no_zygote:
            self.view.line("this system hands no forks over: each group imports everything itself")

    def _watch_zygote(self) -> None:
        """Report once that the zygote is gone. Running groups fork without it."""
        if self._zygote is None:
            return
        self._zygote.poll()
        if self._zygote.is_lost:
            self.view.line(
                f"{self._zygote.loss_reason}; groups started from now on import everything "
                f"themselves ({self.plan.paths.zygote_log})"
            )
            self._zygote = None

    def _keep_agent(self, replica: int) -> AgentKeeper:
        policy = RestartPolicy(
            self.plan.options.max_restarts, has_run_trained=lambda: has_trained(self.plan.paths)
        )
        start = partial(self._start_agent, replica)
        read_group = partial(self._read_group, replica)
        return AgentKeeper(replica, self.plan.paths, policy, read_group, start, self._announce)

    def _read_group(self, slot: int) -> GroupFold | None:
        return self.status.fold.groups.get(slot)

    def _start_agent(self, replica: int, attempt: int, takeover: str) -> Child:
        """Start a group's agent: a fork of the zygote if there is one, else a process that imports
        everything.

        Args:
            attempt: number of the group's next attempt.
            takeover: why that is a restart; empty if it is none.
        """
        name, log = f"agent of group {replica}", self.plan.paths.agent_log(replica)
        args = self.plan.agent_args(replica, attempt, self._lighthouse.address, takeover)
        if self._zygote is not None:
            with open_log(log, "ab") as output:
                files = (output.fileno(), output.fileno())
                forked = self._zygote.fork(
                    AGENT_MODULE, args, self._children.env, files, f"titan-ft {replica}"
                )
            if forked is not None:
                return self._children.add(Child(name, forked, log))
            self._watch_zygote()
            if self._zygote is not None:
                self.view.line(
                    f"{name} cannot be forked, and imports everything itself "
                    f"({self.plan.paths.zygote_log})"
                )
        return self._children.start(name, [sys.executable, "-m", AGENT_MODULE, *args], log)

    def _watch(self) -> _RunEnd:
        """Follow the run to its end."""
        while True:
            codes = {replica: agent.code for replica, agent in self._agents.items()}
            self._lighthouse.poll()
            self._watch_zygote()
            self._refresh()
            self._record.poll()
            if self.stop:
                return self._interrupted()
            if self._chaos is not None:
                self._chaos.poll()
                if self._seconds_left() < QUIET_SECONDS:
                    self._chaos.close()
            self._keep_agents(codes)
            self._end_lost(codes)
            if CONFIG_ERROR_CODE in codes.values():
                # All groups read the same file: the others would only wait for each other.
                mistake = (
                    self._mistake
                    or f"the configuration is wrong; see {self.plan.paths.root / 'logs'}"
                )
                self.view.refuse(mistake)
                return _RunEnd(CONFIG_ERROR_CODE, mistake)
            if self._hopeless:
                self.view.error(
                    f"{self._hopeless}; starting again does not help: all groups are stopped"
                )
                return _RunEnd(1, self._hopeless)
            self._replace_failed(codes)
            if None not in codes.values():
                return self._finished()
            if self._lighthouse.failure:
                return self._lighthouse_failed()
            if self._seconds_left() <= 0:
                return self._end_in_time()
            time.sleep(TICK_SECONDS)

    def _seconds_left(self) -> float:
        """Return the time until the run is ended in order; infinite as long as that has not been
        set.
        """
        if not self.plan.options.minutes or self._trains_since is None:
            return float("inf")
        return self._trains_since + 60 * self.plan.options.minutes - time.monotonic()

    def _stop(self) -> None:
        """End the running processes. If the run is stopped from outside, its groups get time to
        leave in order.
        """
        num_before, in_order = self.stop.count, bool(self.stop) or self._time_is_up
        grace = GRACE_SECONDS + 2.0 + (self.plan.drain_seconds if in_order else 0.0)

        def hurry() -> bool:
            if in_order:
                self._refresh()
                for agent in self._agents.values():
                    agent.report_death()  # before those are killed here that do not leave in time
            return self.stop.count > max(num_before, 1)

        try:
            if self._chaos is not None:
                self._chaos.close()  # a worker that is stopped cannot leave in order
        finally:
            self._children.stop(grace, hurry=hurry)

    def _refresh(self) -> None:
        """Fold and show the events since the last call."""
        retry_waiting()
        for event in self._tail.poll():
            # The launcher takes in its own events about groups when it writes them.
            if event.replica is None or event.pid != os.getpid():
                self._observe(event)
        line = self.status.observe_cut(self._tail.cut, time.monotonic())
        if line is not None:
            self.view.line(line)
        if self._metrics:
            self._metrics.update(self.status.groups)
        self.view.update(self.status)

    def _announce(self, event: Event) -> None:
        """Write an event of this process, and process it at once: on a full disk the tail shows it
        late, or never.
        """
        self._events.emit(event)
        self._observe(event)

    def _observe(self, event: Event) -> None:
        if self._chaos is not None:
            self._chaos.observe(event)
        line = self.status.observe(event)
        if self.status.step is not None and self._trains_since is None:
            self._trains_since = time.monotonic()
        group = self.status.fold.groups.get(-1 if event.replica is None else event.replica)
        mistake = ""
        if group is not None:
            self._hopeless = self._hopeless or self._judge(group, event)
            if group.give_up is event:
                mistake = group.give_up.mistake
        if self._metrics:
            self._metrics.observe(event)
        if self._curve:
            self._curve.observe(event)
        stopping = self.stop or self._time_is_up
        if mistake:
            # All groups have it, and it is one line, at the end.
            self._mistake = self._mistake or mistake
        elif line is not None and (not stopping or status.is_shown_at_a_stop(event)):
            self.view.line(line)

    def _judge(self, group: GroupFold, event: Event) -> str:
        """Return why an event shows that no further start of a group helps the run; empty for
        nearly all events.
        """
        if group.failed_by is event and isinstance(event, WorkerExited):
            over = (status.FAILED, status.FINISHED, status.DRAINED)
            there = [slot for slot, state in self.status.states.items() if state not in over]
            return self._common_end.observe_exit(event, group.held_step or 0, there)
        if group.give_up is event:
            # Commits of which no event tells, because the disk is full, are commits all the same.
            paths = self.plan.paths
            trained = self._trains_since is not None or any_is_cut(
                paths.events, paths.workers_pattern()
            )
            return self._common_end.observe_loss(group.give_up, trained)
        return ""

    def _keep_agents(self, codes: dict[int, int | None]) -> None:
        """Restart agents that died, and report those that ended without an event that says why."""
        for replica, agent in self._agents.items():
            agent.poll()
            if codes[replica] and self.status.states[replica] != status.FAILED:
                agent.report_end()

    def _end_lost(self, codes: dict[int, int | None]) -> None:
        """Kill lost groups once all others have ended; the launch would wait for a frozen group
        forever.
        """
        states = self.status.states
        rest = [replica for replica, code in codes.items() if code is None]
        if (
            not rest
            or status.FINISHED not in states.values()
            or any(states[r] != status.LOST for r in rest)
        ):
            self._only_lost_since = None
            return
        now = time.monotonic()
        if self._only_lost_since is None:
            self._only_lost_since = now
            who = name_groups(rest)
            self.view.line(
                f"all others have ended; waiting for {who} (lost) for {LOST_SECONDS:g} s at most"
            )
        elif now - self._only_lost_since >= LOST_SECONDS:
            for replica in rest:
                self._agents[replica].give_up_lost(
                    "it was silent, and was killed when all others had ended"
                )

    def _replace_failed(self, codes: dict[int, int | None]) -> None:
        """Start a spare for each lost group, while there is one, and reset its exit status
        to None.
        """
        # By the exit status, too: on a full disk the event comes late, or never.
        states = self.status.states
        left = [
            replica
            for replica, code in codes.items()
            if code == 0 and states[replica] != status.DRAINED
        ]
        if left or status.FINISHED in states.values():
            return  # nobody would be left to fetch the state from
        for replica, code in codes.items():
            gave_up = states[replica] == status.FAILED
            if self._num_spares and may_replace(code, gave_up):
                self._num_spares -= 1
                attempt = self._agents[replica].take_over("a spare takes its place")
                self._announce(SpareTookOver(replica=replica, attempt=attempt))
                codes[replica] = None

    def _finished(self) -> _RunEnd:
        failed = [replica for replica, agent in self._agents.items() if agent.code != 0]
        if failed:
            reason = (
                f"{len(failed)} of {self.plan.num_replicas} groups failed: "
                f"{', '.join(map(str, failed))}"
            )
            self.view.error(f"{reason}; logs below {self.plan.paths.root / 'logs'}")
            return _RunEnd(1, reason)
        drained = [slot for slot, state in self.status.states.items() if state == status.DRAINED]
        reason = "all groups finished"
        if drained:
            reason = f"all groups finished or left (left: {', '.join(map(str, drained))})"
        self.view.line(f"{reason}; see titan-ft report {self.plan.paths.root}")
        return _RunEnd(0, reason)

    def _interrupted(self) -> _RunEnd:
        self._begin_to_drain(self.stop.asked_by, "stopping all groups", "again")
        return self._stopped()

    def _stopped(self) -> _RunEnd:
        return _RunEnd(self.stop.status, f"stopped by {self.stop.asked_by}")

    def _end_in_time(self) -> _RunEnd:
        """End a run whose time is over; its success is known when its groups have left."""
        self._time_is_up = True
        self._begin_to_drain(
            "its time is up", f"--minutes ({self.plan.options.minutes:g}) are over", "Ctrl-C"
        )
        return _RunEnd(0, "its time is up")

    def _begin_to_drain(self, reason: str, text: str, how_to_hurry: str) -> None:
        limit = self.plan.drain_seconds
        self._events.emit(LaunchStopping(reason=reason, drain_seconds=limit))
        self.view.line(
            f"{text}: draining for {limit:g} s at most ({how_to_hurry} to kill them at once)"
        )

    def _judge_leaving(self) -> _RunEnd:
        """Return the end of a run whose time is over.

        It follows from the groups' exit statuses: on a full disk a last event comes late, or never.
        """
        late = [replica for replica, agent in self._agents.items() if agent.code != 0]
        if not late:
            self.view.line(f"all groups left; see titan-ft report {self.plan.paths.root}")
            return _RunEnd(0, "all groups left when the time was up")
        if self.stop:  # somebody did not want to wait for them
            return self._stopped()
        reason = (
            f"when the time was up, {len(late)} groups did not leave in order: "
            f"{', '.join(map(str, late))}"
        )
        self.view.error(f"{reason}; logs below {self.plan.paths.root / 'logs'}")
        return _RunEnd(1, reason)

    def _lighthouse_failed(self) -> _RunEnd:
        """Report it. Groups cannot meet without a lighthouse, so the run ends."""
        reason, log = self._lighthouse.failure, self._lighthouse.log
        self.view.error(f"{reason}, so all groups are stopped; {log}: {last_error_line(log)}")
        return _RunEnd(1, reason, own_failure=True)


def _allow_private_network() -> None:
    if refusal := allow_namespaces():
        raise ConfigError(
            f"--private-network needs a network namespace, got {refusal}; leave it out, or let "
            "this user make one"
        )


def launch(plan: LaunchPlan) -> int:
    """Carry out a plan; Ctrl-C, SIGTERM and a closed terminal end everything that it started.

    Raises:
        ConfigError: there is a mistake in the config, or the run directory or a port cannot be
            used.
    """
    # nohup has SIGHUP ignored
    others = [
        signum
        for signum in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(signum) != signal.SIG_IGN
    ]
    stop = StopRequests(signal.SIGINT, *others)
    plan.check_not_in_use()  # again: the check of the config takes seconds
    if plan.options.private_network:  # while this process has one thread
        _allow_private_network()
    run = LocalRun(plan, stop)
    try:
        run.check()
        if stop:
            print(f"stopped by {stop.asked_by} before anything was started", flush=True)
            return stop.status
        with plan.occupied():
            plan.write()
            return run.run()
    finally:
        run.abandon()  # does nothing after `run`, which has ended all of it
