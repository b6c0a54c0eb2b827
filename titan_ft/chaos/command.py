# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft chaos`: inject faults into a running job from a process of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from titan_ft.chaos.job import RunningJob
from titan_ft.chaos.plan import Plan, single
from titan_ft.chaos.plan_file import load_plan, number
from titan_ft.chaos.processes import Processes, RunProcess
from titan_ft.chaos.runner import ChaosRunner
from titan_ft.config import ConfigError, check_folder
from titan_ft.options import Chaos
from titan_ft.run.appender import retry_waiting
from titan_ft.run.log import EventLog
from titan_ft.run.paths import RunPaths
from titan_ft.run.tail import EventTail
from titan_ft.system.stop import StopRequests

TICK_SECONDS = 0.1


def asked_plan(asked: Chaos) -> Plan:
    """Return the plan that the command line asks for.

    Raises:
        ConfigError: bad usage, or a mistake in the plan's file, the fault or a parameter.
    """
    if (asked.fault is None) == (asked.plan is None):
        got = "neither" if asked.fault is None else "both"
        raise ConfigError(
            f"titan-ft chaos must get a FAULT or --plan FILE, got {got}; --list names the faults"
        )
    if asked.for_seconds is not None and not 0 < asked.for_seconds < float("inf"):
        raise ConfigError(
            f"--for-seconds must be > 0, got {asked.for_seconds}; leave it out to go on to the end"
        )
    if asked.fault is not None:
        params = _params(asked.settings)
        return single(asked.fault, asked.replica, asked.rank, params, asked.seed)
    assert asked.plan is not None, "the first check leaves one of the two"
    flags = {
        "--replica": asked.replica,
        "--rank": asked.rank,
        "--set": asked.settings or None,
    }
    for flag, value in flags.items():
        if value is not None:
            raise ConfigError(
                f"{flag} must come with a FAULT, got it with --plan; set it in the plan's file"
            )
    return load_plan(asked.plan, asked.seed)


def run_chaos(asked: Chaos) -> int:
    """Carry out a plan, or one fault, on a running job. However this ends, stopped workers go on.

    Returns:
        The exit status. For a plan 0 at its end, the job's end or Ctrl-C. For one fault 1 if it
        was not injected.

    Raises:
        ConfigError: bad usage, or no running job.
    """
    if asked.run_dir is None:
        raise ConfigError(
            "RUN_DIR must be the folder of a running job, got none; give the --run-dir of its launch"
        )
    plan = asked_plan(asked)
    follower = JobFollower(asked.run_dir)
    follower.check()
    paths = follower.paths
    started = time.monotonic()
    log = EventLog(paths.events_file(f"chaos-{os.getpid()}"))
    runner = ChaosRunner(
        plan,
        processes=follower.processes,
        orders=paths.chaos_orders,
        events=log,
        find_lighthouse_pid=lambda: follower.lighthouse_pid(runner.job),
        wait_for_all=asked.fault is None,
        show=lambda line: print(f"[{time.monotonic() - started:7.1f} s] {line}", flush=True),
    )
    # A signal that ended this process at once would leave workers stopped by SIGSTOP.
    stop = StopRequests(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        follower.follow(runner, stop, asked.for_seconds)
    finally:
        runner.close()
        log.close()
        stop.close()
    outcomes = runner.outcomes
    if asked.fault is None:
        print(
            f"chaos ends: {outcomes.num_injected} injected, {outcomes.num_skipped} skipped",
            flush=True,
        )
        return stop.status
    if outcomes.num_hit:
        return stop.status
    if not outcomes.last_reason:
        print(f"chaos: {asked.fault} was not injected: this ended first", flush=True)
    return stop.status or 1


class JobFollower:
    """Follows the events of a job from their beginning.

    Raises:
        ConfigError: there is no such folder.
    """

    def __init__(self, run_dir: Path) -> None:
        check_folder("RUN_DIR", run_dir, "a running job")
        self.paths = RunPaths(run_dir.absolute())
        self.processes = Processes()
        self._tail = EventTail(self.paths.events, from_start=True)
        self._new_events = self._tail.poll()

    def check(self) -> None:
        """Check that there is a running job.

        Raises:
            ConfigError: there is no running job, or none that can be reached from this host.
        """
        rule = f"RUN_DIR must be the folder of a running job, got {self.paths.root}"
        if not self._new_events:
            raise ConfigError(f"{rule}; it has no events (events/*.jsonl)")
        job = RunningJob()
        for event in self._new_events:
            job.observe(event)
        if job.ended:
            raise ConfigError(f"{rule}; its training has ended")
        workers = job.all_workers()
        local = [worker for worker in workers if self.processes.is_local(worker)]
        remote = [worker for worker in workers if not self.processes.is_local(worker)]
        # Slurm delivers signals to other hosts.
        if any(worker.slurm is not None for worker in remote):
            return
        if any(self.processes.is_alive(worker) for worker in local):
            return
        if remote:
            hosts = ", ".join(sorted({worker.host for worker in remote}))
            raise ConfigError(f"{rule}; its workers run on {hosts}: run titan-ft chaos there")
        raise ConfigError(f"{rule}; no worker of it is alive")

    def lighthouse_pid(self, job: RunningJob) -> int | None:
        """Return the process of the launcher's lighthouse; None if it does not run on this host."""
        started = job.newest_lighthouse
        if started is None:
            return None
        # The event does not name the lighthouse's host, which is a host of workers.
        if not any(self.processes.is_local(worker) for worker in job.all_workers()):
            return None
        lighthouse = RunProcess(
            "the lighthouse", started.lighthouse_pid, self.processes.host, started.mono
        )
        return lighthouse.pid if self.processes.is_alive(lighthouse) else None

    def follow(self, runner: ChaosRunner, stop: StopRequests, for_seconds: float | None) -> None:
        """Run the runner until the plan is done, the job has ended, or a stop is requested."""
        deadline = float("inf") if for_seconds is None else time.monotonic() + for_seconds
        while not stop and time.monotonic() < deadline:
            for event in self._new_events:
                runner.observe(event)
            runner.poll()
            if runner.done or runner.job.ended:
                return
            retry_waiting()
            time.sleep(TICK_SECONDS)
            self._new_events = self._tail.poll()


def _params(settings: Sequence[str]) -> dict[str, float]:
    """Parse settings of the form NAME=NUMBER."""
    params = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        value = number(text)
        if not name or not equals or isinstance(value, str):
            raise ConfigError(f"--set must be NAME=NUMBER, such as seconds=5, got {setting!r}")
        params[name] = value
    return params
