# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure what recovery costs: a group that returns, one that leaves, and a lighthouse that dies.

All on `titan-ft launch` with two groups, each on cores of its own, so that a group which is gone leaves none to the
survivors. Without standbys except where these are what is measured: their imports take time from the steps.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_commits import from_events
from bench_kills import RETURN_SECONDS, SETTLE_STEPS, SURVIVOR, VICTIM, Kill, first_return, kill_repeatedly, kill_victim
from bench_kills import measure as measure_kills
from bench_pauses import USUAL_STEPS, commit_times, measure_drain, measure_outage, measure_rejoin, usual_seconds
from bench_processes import lighthouse, pin_groups, supervisors, wait_for_standby
from bench_run import MAX_RESTARTS, BenchError, Run
from bench_systems import NUM_GROUPS, OURS, derive_config
from kill_group import latest_workers

from titan_ft.launch.lighthouse_keeper import HEALTHY_SECONDS
from titan_ft.run.events import Drained, Event, HealFinished, LighthouseRestarted, ReplicaRestarted, StepCommitted
from titan_ft.run.log import read_events
from titan_ft.run.paths import RunPaths

STEPS = 100_000
"""More than any of it takes."""
LOG_FREQ = 10
LOOK_SECONDS = 0.5
"""Each look reads all events, on the cores that train."""
TRANSFER_STEPS = 20
"""Usual steps that the throttled transfer takes."""
STANDBY_SECONDS = 300.0
"""Standbys import at idle priority, and there may be little left on cores that train."""

Tell = Callable[[str], None]


def measure_recovery(number: int, base: Mapping[str, Any], work_dir: Path, tell: Tell) -> Iterator[tuple[str, Any]]:
    """Measure each kind of recovery `number` times; yields name and figures of each, as they are known.

    Args:
        base: the config that all runs derive theirs from.
    """
    returns = []
    for num_ranks, standby in ((1, False), (1, True), (2, False), (2, True)):
        returns.append(measure_returns(number, base, work_dir, num_ranks, standby, tell))
        yield "returns", returns
    # The transfer's rate follows from what the first of these runs has shown.
    mbps = throttle(read_events(RunPaths(_folder(work_dir, _returns_name(1, False))).events))
    tell(f"throttled to {mbps:.1f} Mbit/s, for transfers of {TRANSFER_STEPS} steps")
    rejoins = {}
    for catch_up in ("replay", "wait"):
        rejoins[catch_up] = measure_rejoins(number, base, work_dir, catch_up, mbps, tell)
        yield "rejoins", {"transfer_max_mbps": mbps, **rejoins}
    yield "drains", [measure_one_drain(index, number, base, work_dir, tell) for index in range(number)]
    yield "outages", measure_outages(number, base, work_dir, tell)


def throttle(events: list[Event]) -> float:
    """Return the Mbit/s at which the state that these events tell of takes `TRANSFER_STEPS` of their steps.

    Raises:
        BenchError: no group fetched a state.
    """
    heals = [event for event in events if isinstance(event, HealFinished) and event.rank == 0]
    if not heals:
        raise BenchError("no group fetched a state, so that its size is not known")
    failed = next(event.time for event in events if isinstance(event, ReplicaRestarted))
    seconds = TRANSFER_STEPS * usual_seconds(commit_times(events, SURVIVOR), failed)
    return heals[0].bytes * 8 / 1e6 / seconds


def measure_returns(
    number: int, base: Mapping[str, Any], work_dir: Path, num_ranks: int, standby: bool, tell: Tell
) -> dict[str, Any]:
    """Kill a group again and again; return how long it took to contribute again."""
    ready: list[float | None] = []
    with _launched(_returns_name(num_ranks, standby), base, work_dir, num_ranks, standby) as run:

        def wait_until_ready() -> None:
            if standby:
                supervisor, workers = supervisors(run.pid)[VICTIM], set(latest_workers(_events(run), VICTIM))
                ready.append(wait_for_standby(supervisor, lambda: workers, num_ranks, STANDBY_SECONDS))

        kills = kill_repeatedly(run, number, wait_until_ready)
        events = _events(run)
    costs = measure_kills(kills, from_events(events, SURVIVOR), from_events(events, VICTIM))
    for cost in costs:
        tell(f"{num_ranks} ranks, {'standby' if standby else 'no standby'}: {cost}")
    return {
        "num_ranks": num_ranks,
        "standby": standby,
        "standby_ready_seconds": ready,
        "kills": [asdict(cost) for cost in costs],
    }


def measure_rejoins(
    number: int, base: Mapping[str, Any], work_dir: Path, catch_up: str, mbps: float, tell: Tell
) -> list[dict[str, Any]]:
    """Kill a group again and again; return what its return, with a slow transfer, cost the survivor."""
    kills: list[Kill] = []
    fields: dict[str, Any] = {"catch_up": catch_up, "transfer_max_mbps": mbps}
    with _launched(f"rejoins-{catch_up}", base, work_dir, **fields) as run:
        since = 0.0
        for index in range(number):
            events = _wait_training(run, since, USUAL_STEPS + 1)
            _wait_phase(events, (index + 0.5) / number)
            kills.append(kill_victim(run.run_dir, from_events(events, VICTIM).commits[-1].attempt))
            since = _wait(run, lambda events: _returned(events, kills[-1]), "return of the group that was killed")
        events = _wait_training(run, since, SETTLE_STEPS)
    rejoins = [measure_rejoin(events, kill) for kill in kills]
    for rejoin in rejoins:
        tell(f"{catch_up}: {rejoin}")
    return [asdict(rejoin) for rejoin in rejoins]


def measure_one_drain(index: int, number: int, base: Mapping[str, Any], work_dir: Path, tell: Tell) -> dict[str, Any]:
    """Ask a group to leave, each time at another moment of the step; return what it cost. It does not come back."""
    with _launched(f"drain-{index}", base, work_dir) as run:
        events = _wait_training(run, 0.0, USUAL_STEPS + 1)
        _wait_phase(events, (index + 0.5) / number)
        signalled = time.time()
        for pid in latest_workers(events, VICTIM):
            os.kill(pid, signal.SIGTERM)
        events = _wait(run, _left, "end of a drain")
    drain = measure_drain(events, signalled)
    tell(f"drain: {drain}")
    return asdict(drain)


def measure_outages(number: int, base: Mapping[str, Any], work_dir: Path, tell: Tell) -> list[dict[str, Any]]:
    """SIGKILL the lighthouse again and again; return what each time cost the groups."""
    killed: list[float] = []
    with _launched("outages", base, work_dir) as run:
        since = 0.0
        for index in range(number):
            events = _wait_training(run, since, USUAL_STEPS + 1)
            # Or its launcher takes the deaths for a crash loop, and waits before it starts another.
            time.sleep(max(0.0, since + HEALTHY_SECONDS + 1.0 - time.time()))
            _wait_phase(_events(run), (index + 0.5) / number)
            pid = lighthouse(run.pid)
            if pid is None:
                raise BenchError(f"there is no lighthouse; logs in {run.run_dir}")
            killed.append(time.time())
            os.kill(pid, signal.SIGKILL)
            since = _wait(run, lambda events: _lighthouse_back(events, killed[-1]), "new lighthouse")
        events = _wait_training(run, since, SETTLE_STEPS)
    outages = [measure_outage(events, moment) for moment in killed]
    for outage in outages:
        tell(f"lighthouse killed: {outage}")
    return [asdict(outage) for outage in outages]


@contextlib.contextmanager
def _launched(
    name: str, base: Mapping[str, Any], work_dir: Path, num_ranks: int = 1, standby: bool = False, **fields: Any
) -> Iterator[Run]:
    """Run a launch with pinned groups; `fields` are of the [fault_tolerance] table."""
    run_dir = _folder(work_dir, name)
    config = derive_config(base, OURS, run_dir, STEPS, LOG_FREQ)
    config["fault_tolerance"] |= fields
    flags = () if standby else ("--no-standby",)
    with Run(OURS, run_dir, config, MAX_RESTARTS, num_ranks, flags) as run:
        shares = pin_groups(run, NUM_GROUPS)
        events = _wait_training(run, 0.0, 1)
        for replica, share in enumerate(shares):
            if any(os.sched_getaffinity(pid) != share for pid in latest_workers(events, replica)):
                raise BenchError(f"group {replica} does not run on the cores {share}; logs in {run_dir}")
        yield run


def _folder(work_dir: Path, name: str) -> Path:
    return work_dir / f"recovery-{name}"


def _returns_name(num_ranks: int, standby: bool) -> str:
    return f"returns-{num_ranks}-{'standby' if standby else 'cold'}"


def _events(run: Run) -> list[Event]:
    return read_events(RunPaths(run.run_dir).events)


def _wait(run: Run, look: Callable[[list[Event]], Any], what: str) -> Any:
    """Look at the events until they show something, and return it.

    Raises:
        BenchError: the run ended, or it takes too long.
    """
    deadline = time.monotonic() + RETURN_SECONDS
    while time.monotonic() < deadline and run.is_running():
        if found := look(_events(run)):
            return found
        time.sleep(LOOK_SECONDS)
    raise BenchError(f"no {what} within {RETURN_SECONDS:g} s, or the run ended; logs in {run.run_dir}")


def _wait_training(run: Run, since: float, num_steps: int) -> list[Event]:
    """Wait until all groups together have made some steps since a moment; return the events."""

    def look(events: list[Event]) -> list[Event]:
        made = [
            event
            for event in events
            if isinstance(event, StepCommitted)
            and event.rank == 0
            and event.replica == SURVIVOR
            and event.time > since
            and len(event.participants) == NUM_GROUPS
        ]
        return events if len(made) >= num_steps else []

    events: list[Event] = _wait(run, look, f"{num_steps} steps of all groups")
    return events


def _wait_phase(events: list[Event], share: float) -> None:
    """Sleep until about this share of a step has passed."""
    times = commit_times(events, SURVIVOR)
    step = usual_seconds(times, time.time())
    time.sleep((times[-1] + share * step - time.time()) % step)


def _returned(events: list[Event], kill: Kill) -> float | None:
    back = first_return(from_events(events, VICTIM).commits, kill)
    return None if back is None else back.time


def _left(events: list[Event]) -> list[Event]:
    """Return the events once the victim has left and the survivor has made some steps since."""
    drained = [event.time for event in events if isinstance(event, Drained)]
    since = [time for time in commit_times(events, SURVIVOR) if drained and time > drained[0]]
    return events if len(since) >= SETTLE_STEPS else []


def _lighthouse_back(events: list[Event], killed: float) -> float | None:
    times = [event.time for event in events if isinstance(event, LighthouseRestarted) and event.time > killed]
    return times[0] if times else None
