# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Inject faults into a job that runs, from beside it: `titan-ft chaos`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from titan_ft.chaos.job import Job
from titan_ft.chaos.plan import Plan, single
from titan_ft.chaos.plan_file import load_plan, number
from titan_ft.chaos.processes import Processes, Worker
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
    """Return the plan to carry out.

    Raises:
        ConfigError: bad usage, or the plan's file, the fault or a parameter is wrong.
    """
    if (asked.fault is None) == (asked.plan is None):
        got = "neither" if asked.fault is None else "both"
        raise ConfigError(f"titan-ft chaos must get a FAULT or --plan FILE, got {got}; --list names the faults")
    if asked.for_seconds is not None and not 0 < asked.for_seconds < float("inf"):
        raise ConfigError(f"--for-seconds must be > 0, got {asked.for_seconds}; leave it out to go on to the end")
    if asked.fault is not None:
        return single(asked.fault, asked.replica, asked.rank, _params(asked.settings), asked.seed)
    assert asked.plan is not None, "one of the two is there"
    for flag, value in (("--replica", asked.replica), ("--rank", asked.rank), ("--set", asked.settings or None)):
        if value is not None:
            raise ConfigError(f"{flag} must come with a FAULT, got it with --plan; the plan says it by itself")
    return load_plan(asked.plan, asked.seed)


def run_chaos(asked: Chaos) -> int:
    """Carry out a plan, or one fault, on a running job; whatever ends this, workers that were stopped go on.

    Returns:
        0 when the plan was carried out until its end, the job's or Ctrl-C; of one fault, 1 if it was not injected.

    Raises:
        ConfigError: bad usage, or there is no job to break.
    """
    if asked.run_dir is None:
        raise ConfigError("RUN_DIR must be the folder of a running job, got none; give the --run-dir of its launch")
    plan = asked_plan(asked)
    follower = Follower(asked.run_dir)
    follower.check()
    paths, started = follower.paths, time.monotonic()
    log = EventLog(paths.events_file(f"chaos-{os.getpid()}"))
    runner = ChaosRunner(
        plan,
        processes=follower.processes,
        orders=paths.chaos_orders,
        events=log,
        lighthouse_pid=lambda: follower.lighthouse_pid(runner.job),
        wait_for_all=asked.fault is None,
        show=lambda line: print(f"[{time.monotonic() - started:7.1f} s] {line}", flush=True),
    )
    stop = StopRequests(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # to die now would leave workers stopped
    try:
        follower.follow(runner, stop, asked.for_seconds)
    finally:
        runner.close()
        log.close()
        stop.close()
    outcomes = runner.outcomes
    if asked.fault is None:
        print(f"chaos ends: {outcomes.num_injected} injected, {outcomes.num_skipped} skipped", flush=True)
        return stop.status
    if not outcomes.num_hit and not outcomes.last_reason:
        print(f"chaos: {asked.fault} was not injected: this ended first", flush=True)
    return stop.status or (0 if outcomes.num_hit else 1)


class Follower:
    """Follow the events of a job from their beginning.

    Raises:
        ConfigError: there is no such folder.
    """

    def __init__(self, run_dir: Path) -> None:
        check_folder("RUN_DIR", run_dir, "a running job")
        self.paths = RunPaths(run_dir.absolute())
        self.processes = Processes()
        self._tail = EventTail(self.paths.events, from_start=True)
        self._seen = self._tail.poll()

    def check(self) -> None:
        """Check that there is a job that runs.

        Raises:
            ConfigError: there is none, or none that can be reached from here.
        """
        rule = f"RUN_DIR must be the folder of a running job, got {self.paths.root}"
        if not self._seen:
            raise ConfigError(f"{rule}; it has no events (events/*.jsonl)")
        job = Job()
        for event in self._seen:
            job.fold(event)
        if job.ended:
            raise ConfigError(f"{rule}; its training has ended")
        workers = job.everyone()
        remote = [worker for worker in workers if not self.processes.has(worker)]
        if any(worker.slurm is not None for worker in remote):
            return
        if not any(self.processes.is_alive(worker) for worker in workers if self.processes.has(worker)):
            hosts = ", ".join(sorted({worker.host for worker in remote}))
            where = f"; its workers run on {hosts}: run titan-ft chaos there" if hosts else "; no worker of it is alive"
            raise ConfigError(rule + where)

    def lighthouse_pid(self, job: Job) -> int | None:
        """Return the process of the lighthouse that `launch` keeps; None where it does not run, or not on this host."""
        # Its event does not say where it runs; that is with the workers.
        if job.newest_lighthouse is None or not any(self.processes.has(worker) for worker in job.everyone()):
            return None
        lighthouse = Worker(
            "the lighthouse", job.newest_lighthouse.lighthouse_pid, self.processes.host, job.newest_lighthouse.mono
        )
        return lighthouse.pid if self.processes.is_alive(lighthouse) else None

    def follow(self, runner: ChaosRunner, stop: StopRequests, for_seconds: float | None) -> None:
        """Let the runner see the events and act, until it is done, the job has ended, or someone ends it."""
        deadline = float("inf") if for_seconds is None else time.monotonic() + for_seconds
        while not stop and time.monotonic() < deadline:
            for event in self._seen:
                runner.observe(event)
            runner.poll()
            if runner.done or runner.job.ended:
                return
            retry_waiting()
            time.sleep(TICK_SECONDS)
            self._seen = self._tail.poll()


def _params(settings: Sequence[str]) -> dict[str, float]:
    """Parse NAME=VALUE."""
    params = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        read = number(value)
        if not name or not equals or isinstance(read, str):
            raise ConfigError(f"--set must be NAME=NUMBER, such as seconds=5, got {setting!r}")
        params[name] = read
    return params
