# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Launch a whole run on this host: a lighthouse, an agent for each group, and the live status.

`launch` is the body of `titan-ft launch`. This process, the *launcher*, proceeds in these steps:

1. Start the *zygote*. It imports torchtitan, and checks the config as the workers read it. Until
   then the run has no folder, so that a mistake in the config leaves nothing behind.
2. Write the run's folder, start the lighthouse, and let the zygote import everything that workers
   need.
3. Start an agent for each group, as a fork of the zygote. The agent forks the group's workers.
4. Every `TICK_SECONDS`: restart a lighthouse or an agent that died, read the events that workers
   and agents wrote, show them, start spares, and decide whether the run ends.
5. End all processes, in order if the user or --minutes ended the run, and write the exit status.

The launcher learns of the workers by their events only, and of the agents also by their exit
statuses. On a full disk events come late or never, so an exit status decides wherever there is one.

All of this is on the main thread. Only the lighthouse's probes and the metrics have threads of
their own. See docs/agents.md.
"""

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
from titan_ft.launch.group.agent import AGENT_MODULE, GRACE_SECONDS
from titan_ft.launch.group.children import Child, ChildProcess, Children
from titan_ft.launch.group.worker_group import default_env, open_log
from titan_ft.launch.group.zygote import IMPORT_SECONDS, Zygote, can_hand_over_forks
from titan_ft.launch.launch_plan import LaunchPlan
from titan_ft.launch.lighthouse_keeper import LighthouseKeeper
from titan_ft.launch.record_keeper import RecordKeeper
from titan_ft.launch.restart_policy import (
    CONFIG_ERROR_CODE,
    RestartPolicy,
    RunStopPolicy,
    can_spare_help,
    has_run_committed,
)
from titan_ft.launch.stopped_run import CHECKPOINTS_OFF, describe_stop
from titan_ft.live import status
from titan_ft.live.job_curve import JobCurve
from titan_ft.live.metrics import MetricsServer
from titan_ft.live.run_status import RunStatus, describe_shape
from titan_ft.live.status_view import LaunchView
from titan_ft.options import SECONDS_WITHOUT_FAULTS_AT_END
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
"""After the end of all other groups, a lost group has this long to write an event.

A group is lost if it was silent for so long that it may be frozen. After this time the launcher
kills the group.
"""


@dataclass(frozen=True)
class _RunEnd:
    """The end of a launch."""

    code: int
    """Exit status."""
    reason: str
    """Why the launch ended, for people."""
    own_failure: bool = False
    """Whether the launcher or the lighthouse failed, and none of the groups.

    Otherwise `titan-ft check` and `top` would name the last death of a group as the reason,
    although that group came back.
    """


class LocalRun:
    """The processes of one run, and the state of the run by its events.

    `launch` makes the object, and calls `check`, `run` and `abandon` on the main thread, in this
    order. Whatever happens, `run` ends all processes before it returns or raises. If `check` finds
    a mistake, `run` is not called, and `abandon` ends the processes.

    Raises:
        ConfigError: the port of the lighthouse or of the metrics is taken.
    """

    def __init__(self, plan: LaunchPlan, stop: StopRequests) -> None:
        self.plan = plan
        self.stop = stop
        self.status = RunStatus(plan.num_replicas)
        # The first part that can fail, before any file of the run. If the port is taken, the folder
        # must not look as if a run had been there.
        self._metrics: MetricsServer | None = None
        if plan.options.metrics_port:
            self._metrics = MetricsServer.at(
                self.status.fold, plan.options.metrics_port, plan.labels
            )
        # After the socket of the metrics, which must stay reachable from outside. Before the other
        # sockets and processes of the run, which nobody outside may reach.
        if plan.options.private_network:
            enter_network_namespace()
        self._job_curve: JobCurve | None = None
        if plan.job_curve is not None:
            self._job_curve = JobCurve(plan.job_curve, lambda text: self.view.error(text))
        self._events = EventLog(plan.paths.launcher_events(os.getpid()))
        # The token is on no command line, where other users of the host could read it.
        token = secrets.token_hex(16)
        # W&B shows all groups and all launches of the run together.
        wandb_group = os.environ.get("WANDB_RUN_GROUP") or plan.first_job_id
        env = {
            TOKEN_ENV: token,
            "RUST_LOG": choose_native_log(os.environ),
            "WANDB_RUN_GROUP": wandb_group,
            "TITAN_FT_RANKS_ON_HOST": str(plan.num_replicas * plan.num_ranks),
        }
        self._children = Children(env)
        self._lighthouse = LighthouseKeeper(
            plan.lighthouse_command,
            plan.options.lighthouse_port,
            plan.paths.lighthouse_log,
            self._children,
            token,
            self._events,
        )
        self._record_keeper = RecordKeeper(plan.paths.events, self._children, plan.paths.record_log)
        self._agents: dict[int, AgentKeeper] = {}
        """The keeper of each group's agent, by slot; empty until the zygote is ready."""
        self._num_spares = plan.options.spares
        self._zygote: Zygote | None = None
        self._zygote_output: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  # kept open
        """Output of the zygote before the run has a folder for logs."""
        self._first_step_time: float | None = None
        """When the launcher saw the first step, in monotonic seconds; None before."""
        self._time_is_up = False
        """Whether the run ends because --minutes are over."""
        self._only_lost_since: float | None = None
        """When all groups but lost ones had ended, in monotonic seconds; None before."""
        self._run_stop_policy = RunStopPolicy()
        self._config_mistake = ""
        """A mistake in the config that a worker found after `check`; empty if none is known."""
        self._hopeless_reason = ""
        """Why restarts of groups cannot help the run; empty while they may help."""
        self._chaos: ChaosRunner | None = None
        if plan.chaos is not None:
            self._chaos = self._make_chaos_runner(plan.chaos)

    def _make_chaos_runner(self, plan: Plan) -> ChaosRunner:
        # Imported here: a run without chaos loads no code that can break it.
        from titan_ft.chaos.processes import Processes
        from titan_ft.chaos.runner import ChaosRunner

        return ChaosRunner(
            plan,
            processes=Processes(),
            orders=self.plan.paths.chaos_orders,
            events=self._events,
            find_lighthouse_pid=lambda: self._lighthouse.pid,
        )

    def run(self) -> int:
        """Run to the end, and end all processes.

        Returns:
            0 if all groups finished or left, 2 if their config is wrong, 128 + the signal's number
            if a signal stopped the run, else 1.
        """
        # Not made before, because the run has a folder only now. New events are read only: those of
        # earlier launches are in the folder as well.
        self._tail = EventTail(self.plan.paths.events)
        self.view = LaunchView(self.status, self.plan.paths.launch_log)
        end = _RunEnd(1, "the launcher failed", own_failure=True)
        try:
            end = self._start_and_watch()
        finally:
            self._end_processes()
            self._refresh()
            if self._time_is_up and end.code == 0:
                end = self._conclude_leave_after_time()
            finished = LaunchFinished(code=end.code, reason=end.reason)
            signum = self.stop.signum
            if signum is not None and end.code == self.stop.status:
                finished.signal = signum.name
            if end.own_failure:
                finished.own_failure = True
            self._events.emit(finished)
            # Shows the event that was just written. Otherwise the last picture on a terminal would
            # show a running run.
            self._refresh()
            self._events.close()
            self._lighthouse.close()
            if self._job_curve:
                # Without a wait for room on the disk: the events' `close` has waited already.
                self._job_curve.close()
            if self._metrics:
                self._metrics.close()
            self.view.close()
            if self.stop or self._time_is_up:
                # After the view, which would cut the command at the terminal's width.
                self._print_how_to_continue()
            self.view.close_log()
        return end.code

    def _print_how_to_continue(self) -> None:
        if set(self.status.states.values()) == {status.FINISHED}:
            return
        plan = self.plan
        lines = describe_stop(
            self.status,
            plan.resume_command,
            saves=plan.saves_checkpoints,
            drain_seconds=plan.drain_seconds,
        )
        for line in lines:
            self.view.note(line)

    def _start_and_watch(self) -> _RunEnd:
        """Start the lighthouse and the agents, and watch the run until it must end."""
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
        self._lighthouse.poll()  # starts the lighthouse
        self._let_zygote_proceed()
        while not self._lighthouse.listens:
            if self.stop:
                return self._conclude_stop_request()
            if self._lighthouse.failure:
                return self._conclude_lighthouse_failure()
            time.sleep(TICK_SECONDS / 4)
            self._lighthouse.poll()
        self._print_addresses()
        # `_watch_zygote` sets it to None if it is lost. The agents then start without it.
        while self._zygote is not None and not self._zygote.ready:
            if self.stop:
                return self._conclude_stop_request()
            time.sleep(TICK_SECONDS / 4)
            self._lighthouse.poll()
            if self._lighthouse.failure:
                return self._conclude_lighthouse_failure()
            self._watch_zygote()
        for slot in range(plan.num_replicas):
            self._agents[slot] = self._keep_agent(slot)
        return self._watch_until_end()

    def _print_addresses(self) -> None:
        """Print where the run is, and where it can be watched."""
        plan = self.plan
        root = plan.paths.root
        self.view.line(
            f"lighthouse at {self._lighthouse.address}; "
            f"{describe_shape(plan.num_replicas, plan.num_ranks)}; {root}"
        )
        self.view.line(f"watch it: titan-ft top {root}; logs: {root}/logs/replica-*/latest/")
        if not plan.saves_checkpoints:
            self.view.line(CHECKPOINTS_OFF)
        if self._job_curve:
            self.view.line(f"curves: tensorboard --logdir {self._job_curve.folder.parent}")
        if self._metrics:
            self.view.line(f"metrics at {self._metrics.url}")

    def check(self) -> None:
        """Start the zygote, and let it check the config as the workers read it.

        The check needs torchtitan, which only the zygote imports. No other process runs yet, and
        the run has no folder.

        Returns early at a stop. If the zygote is lost or late, the config counts as checked: the
        workers check it again.

        Raises:
            ConfigError: there is a mistake in the config.
        """

        def start(command: list[str], descriptor: int) -> ChildProcess:
            child = self._children.start(
                "the zygote",
                command,
                self.plan.paths.zygote_log,
                env=default_env(),
                pass_fds=[descriptor],
                output=self._zygote_output,
            )
            return child.process

        zygote = Zygote(start, self.plan.module, self.plan.flags_for_check())
        self._zygote = zygote
        deadline = time.monotonic() + IMPORT_SECONDS
        while not (zygote.checked or zygote.is_lost or self.stop):
            if time.monotonic() >= deadline:
                break
            time.sleep(TICK_SECONDS / 10)
            zygote.poll()
        if zygote.mistake:
            raise ConfigError(zygote.mistake)

    def abandon(self) -> None:
        """End the processes and release the ports of a run that does not begin."""
        self._children.stop(0.0)
        self._lighthouse.close()
        if self._metrics:
            self._metrics.close()

    def _let_zygote_proceed(self) -> None:
        """Let the zygote import the rest while the lighthouse starts.

        The zygote is ended instead if the system or the user does not permit forks.
        """
        assert self._zygote is not None, "the zygote has checked the config"
        with open_log(self.plan.paths.zygote_log, "ab") as log:
            self._zygote_output.seek(0)
            shutil.copyfileobj(self._zygote_output, log)
            log.flush()
            if not self.plan.options.no_zygote and can_hand_over_forks():
                self._zygote.proceed(log.fileno())
                return
        self._zygote.close()
        self._zygote = None
        if not self.plan.options.no_zygote:
            self.view.line("this system hands no forks over: each group imports everything itself")

    def _watch_zygote(self) -> None:
        """Report once that the zygote is lost. Running agents fork their workers without it."""
        if self._zygote is None:
            return
        self._zygote.poll()
        if self._zygote.is_lost:
            self.view.line(
                f"{self._zygote.loss_reason}; groups started from now on import everything "
                f"themselves ({self.plan.paths.zygote_log})"
            )
            self._zygote = None

    def _keep_agent(self, slot: int) -> AgentKeeper:
        policy = RestartPolicy(
            self.plan.options.max_restarts,
            has_run_committed=lambda: has_run_committed(self.plan.paths),
        )
        start = partial(self._start_agent, slot)
        read_group = partial(self._read_group, slot)
        return AgentKeeper(slot, self.plan.paths, policy, read_group, start, self._announce)

    def _read_group(self, slot: int) -> GroupFold | None:
        return self.status.fold.groups.get(slot)

    def _start_agent(self, slot: int, attempt: int, restart_reason: str) -> Child:
        """Start a group's agent: a fork of the zygote, or else a new process.

        A new process imports everything itself, which takes seconds.

        Args:
            attempt: number of the group's next attempt.
            restart_reason: why the attempt is a restart; empty for the first attempt.
        """
        name = f"agent of group {slot}"
        log = self.plan.paths.agent_log(slot)
        args = self.plan.agent_args(slot, attempt, self._lighthouse.address, restart_reason)
        if self._zygote is not None:
            with open_log(log, "ab") as output:
                forked = self._zygote.fork(
                    AGENT_MODULE,
                    args,
                    self._children.env,
                    output=(output.fileno(), output.fileno()),
                    title=f"titan-ft {slot}",
                )
            if forked is not None:
                return self._children.add(Child(name, forked, log))
            self._watch_zygote()  # reports a lost zygote
            is_zygote_there = self._zygote is not None
            if is_zygote_there:
                self.view.line(
                    f"{name} cannot be forked, and imports everything itself "
                    f"({self.plan.paths.zygote_log})"
                )
        return self._children.start(name, [sys.executable, "-m", AGENT_MODULE, *args], log)

    def _watch_until_end(self) -> _RunEnd:
        while True:
            # Exit status of each group's agent; None while the agent runs or will be restarted.
            # Read before `_refresh`: the events of an agent that has ended are then known as well.
            codes = {slot: agent.code for slot, agent in self._agents.items()}
            self._lighthouse.poll()
            self._watch_zygote()
            self._refresh()
            self._record_keeper.poll()
            if self.stop:
                return self._conclude_stop_request()
            if self._chaos is not None:
                self._chaos.poll()
                if self._seconds_left() < SECONDS_WITHOUT_FAULTS_AT_END:
                    self._chaos.close()  # no faults shortly before the end
            self._poll_agents(codes)
            self._kill_lost_groups(codes)
            if CONFIG_ERROR_CODE in codes.values():
                # All groups read the same config, so none can train. The others would only wait.
                mistake = self._config_mistake
                if not mistake:
                    mistake = f"the configuration is wrong; see {self.plan.paths.root / 'logs'}"
                self.view.refuse(mistake)
                return _RunEnd(CONFIG_ERROR_CODE, mistake)
            if self._hopeless_reason:
                self.view.error(
                    f"{self._hopeless_reason}; starting again does not help: all groups are stopped"
                )
                return _RunEnd(1, self._hopeless_reason)
            self._start_spares(codes)
            if None not in codes.values():
                return self._conclude_end_of_all_groups()
            if self._lighthouse.failure:
                return self._conclude_lighthouse_failure()
            if self._seconds_left() <= 0:
                return self._conclude_end_of_time()
            time.sleep(TICK_SECONDS)

    def _seconds_left(self) -> float:
        """Return the time until --minutes are over, which count from the first step.

        Infinite without --minutes, and before the first step.
        """
        if not self.plan.options.minutes or self._first_step_time is None:
            return float("inf")
        return self._first_step_time + 60 * self.plan.options.minutes - time.monotonic()

    def _end_processes(self) -> None:
        """End the running processes.

        After a request to stop, and after --minutes, the groups get time to leave in order.
        """
        num_requests_before = self.stop.count
        leaves_in_order = bool(self.stop) or self._time_is_up
        grace_seconds = GRACE_SECONDS + 2.0
        if leaves_in_order:
            grace_seconds += self.plan.drain_seconds

        def poll_and_check_hurry() -> bool:
            """Show what happens during the wait; return True once the wait must be cut short."""
            if leaves_in_order:
                self._refresh()
                # Reported during the wait. After it, `Children` kills the agents that did not leave
                # in time, and such an end must not be reported as an unexpected death.
                for agent in self._agents.values():
                    agent.report_death()
            # At least two requests in all, and one of them since the wait began.
            return self.stop.count > max(num_requests_before, 1)

        try:
            if self._chaos is not None:
                # Continues stopped workers, which otherwise could not leave in order.
                self._chaos.close()
        finally:
            self._children.stop(grace_seconds, hurry=poll_and_check_hurry)

    def _refresh(self) -> None:
        """Read the events since the last call, and show the state of the run."""
        retry_waiting()  # writes events that wait because the disk was full
        for event in self._tail.poll():
            was_announced_here = event.replica is not None and event.pid == os.getpid()
            if not was_announced_here:  # otherwise `_announce` has observed it already
                self._observe(event)
        line = self.status.observe_cut(self._tail.cut, time.monotonic())
        if line is not None:
            self.view.line(line)
        if self._metrics:
            self._metrics.update(self.status.groups)
        self.view.update(self.status)

    def _announce(self, event: Event) -> None:
        """Write an event of this process about a group, and observe it at once.

        On a full disk `_refresh` would read the event late, or never.
        """
        self._events.emit(event)
        self._observe(event)

    def _observe(self, event: Event) -> None:
        """Update the state of the run by an event, and print the event's line."""
        if self._chaos is not None:
            self._chaos.observe(event)
        line = self.status.observe(event)
        if self.status.step is not None and self._first_step_time is None:
            self._first_step_time = time.monotonic()
        config_mistake = ""
        group = None
        if event.replica is not None:
            group = self.status.fold.groups.get(event.replica)
        if group is not None:
            if not self._hopeless_reason:
                self._hopeless_reason = self._find_hopeless_reason(group, event)
            if group.give_up is event:
                config_mistake = group.give_up.mistake
        if self._metrics:
            self._metrics.observe(event)
        if self._job_curve:
            self._job_curve.observe(event)
        if config_mistake:
            # All groups report the same mistake. The launcher prints one line, at the end.
            if not self._config_mistake:
                self._config_mistake = config_mistake
            return
        is_stopping = self.stop or self._time_is_up
        if line is not None and (not is_stopping or status.is_shown_while_stopping(event)):
            self.view.line(line)

    def _find_hopeless_reason(self, group: GroupFold, event: Event) -> str:
        """Return why restarts of groups cannot help the run; empty for nearly all events.

        Args:
            group: the state of the event's group after the event.
        """
        has_ended_attempt = group.failed_by is event
        if has_ended_attempt and isinstance(event, WorkerExited):
            over = (status.FAILED, status.FINISHED, status.DRAINED)
            remaining = [slot for slot, state in self.status.states.items() if state not in over]
            return self._run_stop_policy.observe_exit(event, group.held_step or 0, remaining)
        if group.give_up is event:
            may_have_committed = self._first_step_time is not None
            if not may_have_committed:
                # A file of events that is cut because the disk is full may lack commits.
                paths = self.plan.paths
                may_have_committed = any_is_cut(paths.events, paths.workers_pattern())
            return self._run_stop_policy.observe_give_up(
                group.give_up, may_have_committed=may_have_committed
            )
        return ""

    def _poll_agents(self, codes: dict[int, int | None]) -> None:
        """Restart agents that died, and report ends that no event explains."""
        for slot, agent in self._agents.items():
            agent.poll()
            has_failed = codes[slot] not in (None, 0)
            if has_failed and self.status.states[slot] != status.FAILED:
                agent.report_end()

    def _kill_lost_groups(self, codes: dict[int, int | None]) -> None:
        """Kill lost groups some time after all others have ended, of which one finished.

        Otherwise the launch would wait for a frozen group forever.
        """
        states = self.status.states
        running = [slot for slot, code in codes.items() if code is None]
        has_finished = status.FINISHED in states.values()
        are_all_lost = all(states[slot] == status.LOST for slot in running)
        if not (running and has_finished and are_all_lost):
            self._only_lost_since = None
            return
        now = time.monotonic()
        if self._only_lost_since is None:
            self._only_lost_since = now
            self.view.line(
                f"all others have ended; waiting for {name_groups(running)} (lost) for "
                f"{LOST_SECONDS:g} s at most"
            )
        elif now - self._only_lost_since >= LOST_SECONDS:
            for slot in running:
                self._agents[slot].give_up_lost(
                    "it was silent, and was killed when all others had ended"
                )

    def _start_spares(self, codes: dict[int, int | None]) -> None:
        """Start a spare for each failed group, while spares are left.

        Args:
            codes: exit statuses of the groups' agents. This method sets that of a group with a new
                spare to None: the group runs again.
        """
        # Once one group has finished, the others do, too. A spare would find no group to fetch the
        # state from.
        states = self.status.states
        if status.FINISHED in states.values():
            return
        for slot, code in codes.items():
            if code == 0 and states[slot] != status.DRAINED:
                # This group has finished as well. Its event is late or missing: the disk is full.
                return
        for slot, code in codes.items():
            gave_up = states[slot] == status.FAILED
            if self._num_spares and can_spare_help(code, gave_up):
                self._num_spares -= 1
                attempt = self._agents[slot].take_over("a spare takes its place")
                self._announce(SpareTookOver(replica=slot, attempt=attempt))
                codes[slot] = None

    def _conclude_end_of_all_groups(self) -> _RunEnd:
        failed = [slot for slot, agent in self._agents.items() if agent.code != 0]
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

    def _conclude_stop_request(self) -> _RunEnd:
        self._announce_drain(self.stop.asked_by, "stopping all groups", "again")
        return self._stopped_by_request()

    def _stopped_by_request(self) -> _RunEnd:
        return _RunEnd(self.stop.status, f"stopped by {self.stop.asked_by}")

    def _conclude_end_of_time(self) -> _RunEnd:
        """Announce that --minutes are over; the caller then lets the groups leave.

        The returned end is preliminary: `_conclude_leave_after_time` replaces it after the groups
        have left.
        """
        self._time_is_up = True
        self._announce_drain(
            "its time is up", f"--minutes ({self.plan.options.minutes:g}) are over", "Ctrl-C"
        )
        return _RunEnd(0, "its time is up")

    def _announce_drain(self, reason: str, text: str, how_to_hurry: str) -> None:
        limit_seconds = self.plan.drain_seconds
        self._events.emit(LaunchStopping(reason=reason, drain_seconds=limit_seconds))
        self.view.line(
            f"{text}: draining for {limit_seconds:g} s at most ({how_to_hurry} to kill them at "
            "once)"
        )

    def _conclude_leave_after_time(self) -> _RunEnd:
        """Return the end of a run whose --minutes are over, after all groups have ended.

        The exit statuses of the agents decide, because on a full disk a group's last event comes
        late, or never.
        """
        late = [slot for slot, agent in self._agents.items() if agent.code != 0]
        if not late:
            self.view.line(f"all groups left; see titan-ft report {self.plan.paths.root}")
            return _RunEnd(0, "all groups left when the time was up")
        if self.stop:
            # The user cut the wait for the groups short.
            return self._stopped_by_request()
        reason = (
            f"when the time was up, {len(late)} groups did not leave in order: "
            f"{', '.join(map(str, late))}"
        )
        self.view.error(f"{reason}; logs below {self.plan.paths.root / 'logs'}")
        return _RunEnd(1, reason)

    def _conclude_lighthouse_failure(self) -> _RunEnd:
        """Report that no lighthouse will be started again: the groups cannot meet without one."""
        reason = self._lighthouse.failure
        log = self._lighthouse.log
        self.view.error(f"{reason}, so all groups are stopped; {log}: {last_error_line(log)}")
        return _RunEnd(1, reason, own_failure=True)


def launch(plan: LaunchPlan) -> int:
    """Carry out a plan; Ctrl-C, SIGTERM and a closed terminal end everything that it started.

    Returns:
        The exit status, see `LocalRun.run`.

    Raises:
        ConfigError: there is a mistake in the config, or the run directory or a port cannot be
            used.
    """
    # A signal that is ignored, as SIGHUP under nohup, must not end the run.
    other_signals = [
        signum
        for signum in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(signum) != signal.SIG_IGN
    ]
    stop = StopRequests(signal.SIGINT, *other_signals)
    # The plan has checked this as well, but another launch may have begun since.
    plan.check_not_in_use()
    if plan.options.private_network:
        # Before any other thread starts: only a process of one thread can make a user namespace.
        _allow_private_network()
    run = LocalRun(plan, stop)
    try:
        run.check()
        if stop:
            print(f"stopped by {stop.asked_by} before anything was started", flush=True)
            return stop.status
        with plan.locked():
            plan.write()
            return run.run()
    finally:
        run.abandon()  # does nothing after `run`


def _allow_private_network() -> None:
    refusal = allow_namespaces()
    if refusal:
        raise ConfigError(
            f"--private-network needs a network namespace, got {refusal}; leave it out, or let "
            "this user make one"
        )
