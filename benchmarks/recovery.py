# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Measure the cost of recovery: a returning group, a leaving group, and a killed lighthouse.

All on `titan-ft launch` with two groups, each on cores of its own, so that an absent group leaves
its cores idle.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks.cores import pin_groups
from benchmarks.kills import MAX_RESTARTS, SETTLE_STEPS, costs, kill_repeatedly, wait_phase
from benchmarks.record import Gap, injected, longest_delay, survivor_gaps, usual_step
from benchmarks.run import SURVIVOR, VICTIM, BenchError, Run, progress
from benchmarks.systems import NUM_GROUPS, OURS, Job, derive_config
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.timing.incidents import Incident
from titan_ft.launch.lighthouse_keeper import HEALTHY_SECONDS
from titan_ft.run.events import (
    Drained,
    Event,
    FaultInjected,
    HealFinished,
    LighthouseRestarted,
    LighthouseStarted,
    ReplicaRestarted,
    Target,
)

STEPS = 100_000
"""More than any of it takes."""
LOG_FREQ = 10
USUAL_STEPS = 20
"""Steps of all groups before what is measured, so that a usual step is known."""
MIN_STEPS = 5
"""Fewest whole steps within a transfer, and replayed updates, of which a figure says something."""
TRANSFER_STEPS = 20
"""Usual steps that the throttled transfer takes."""
TINY_QUEUE_GB = 1e-6
"""`catch_up_max_gb` with which the others wait for a joiner, as torchft's do: less than one
update.
"""

PLAIN = "--no-zygote"

Figures = dict[str, Any]
E = TypeVar("E", bound=Event)


def measure_recovery(
    number: int, base: Mapping[str, Any], work_dir: Path
) -> Iterator[tuple[str, Any]]:
    """Measure each kind of recovery `number` times; yields name and figures of each, as they are
    known.

    Args:
        base: the config that all runs derive theirs from.
    """
    launched = partial(_launched, base, work_dir)
    returns, mbps = [], 0.0
    for num_ranks, forked in ((1, False), (1, True), (2, False), (2, True)):
        with launched(
            f"returns-{num_ranks}-{'forked' if forked else 'cold'}", num_ranks, forked
        ) as run:
            returns.append(measure_returns(run, number))
            # The transfer's rate follows from what the first of these runs has shown.
            mbps = mbps or throttle(run.record())
        yield "returns", returns
    progress(f"throttled to {mbps:.1f} Mbit/s, for transfers of {TRANSFER_STEPS} steps")
    rejoins: Figures = {"transfer_max_mbps": mbps}
    for name, queue_gb in (("replay", 0.0), ("wait", TINY_QUEUE_GB)):
        with launched(f"rejoins-{name}", catch_up_max_gb=queue_gb, transfer_max_mbps=mbps) as run:
            kill_repeatedly(run, number, settle_steps=USUAL_STEPS + 1)
            rejoins[name] = _describe(name, rejoin_after, run.record())
        yield "rejoins", rejoins
    drains: list[Figures] = []
    for index in range(number):  # each in a run of its own, because the group does not come back
        with launched(f"drain-{index}") as run:
            run.wait_trained(USUAL_STEPS + 1)
            wait_phase(run, (index + 0.5) / number)
            fault = run.inject("term_group", Target(VICTIM), run.workers(VICTIM), signal.SIGTERM)
            drains += _describe("drain", drain_after, _wait_over(run, fault, Drained))
    yield "drains", drains
    with launched("outages") as run:
        yield "outages", measure_outages(run, number)


@contextlib.contextmanager
def _launched(
    base: Mapping[str, Any],
    work_dir: Path,
    name: str,
    num_ranks: int = 1,
    forked: bool = True,
    **fields: Any,
) -> Iterator[Run]:
    """Run a launch with pinned groups; `fields` are of the [fault_tolerance] table."""
    flags = () if forked else (PLAIN,)
    job = Job(OURS, work_dir / f"recovery-{name}", NUM_GROUPS, num_ranks, MAX_RESTARTS, flags)
    config = derive_config(base, job, STEPS, LOG_FREQ)
    config["fault_tolerance"] |= fields
    with Run(job, config) as run:
        pin_groups(run, run.wait_trained(1).events)
        yield run


def throttle(record: RunRecord) -> float:
    """Return the Mbit/s at which this record's state takes `TRANSFER_STEPS` of its steps.

    Raises:
        BenchError: no group fetched a state.
    """
    sizes = [event.bytes for event in record.of(HealFinished) if event.rank == 0]
    if not sizes:
        raise BenchError("no group fetched a state, so that its size is not known")
    return sizes[0] * 8 / 1e6 / (TRANSFER_STEPS * usual_step(record))


def measure_returns(run: Run, number: int) -> Figures:
    """Kill a group again and again; return how long it took to contribute again."""
    kill_repeatedly(run, number)
    kills = costs(run.record())
    progress(f"{run.job.run_dir.name}: {kills}")
    return {"num_ranks": run.job.num_ranks, "forked": PLAIN not in run.job.flags, "kills": kills}


def measure_outages(run: Run, number: int) -> list[Figures]:
    """SIGKILL the lighthouse again and again; return what each time cost the groups."""
    since = 0.0
    for index in range(number):
        record = run.wait_trained(USUAL_STEPS + 1, since)
        # Or its launcher takes the deaths for a crash loop, and waits before it starts another.
        run.sleep(since + HEALTHY_SECONDS + 1.0 - time.time())
        wait_phase(run, (index + 0.5) / number)
        pid = record.of(LighthouseStarted)[-1].lighthouse_pid
        fault = run.inject("kill_lighthouse", Target(lighthouse=True), [pid], signal.SIGKILL)
        _wait_over(run, fault, LighthouseRestarted)
        since = time.time()
    return _describe("lighthouse killed", outage_after, run.record())


def _wait_over(run: Run, fault: FaultInjected, end: type[Event]) -> RunRecord:
    """Wait for the event that a fault is over, and for some steps of the survivor; return the
    record.

    The step under way may still succeed, so the cost of the fault may show in a later one.
    """

    def settled(record: RunRecord) -> RunRecord | None:
        over = first_after(record, end, fault.time)
        made = [
            e
            for e in record.commits
            if e.replica == SURVIVOR and over is not None and e.time > over.time
        ]
        return record if len(made) >= SETTLE_STEPS else None

    return run.wait_for(settled, f"end of {fault.fault}")


def _describe(
    what: str, describe: Callable[[RunRecord, Incident], Figures], record: RunRecord
) -> list[Figures]:
    """Return the figures of each fault that was injected."""
    found = [describe(record, fault) for fault in injected(record)]
    for figures in found:
        progress(f"{what}: {figures}")
    return found


def rejoin_after(record: RunRecord, kill: Incident) -> Figures:
    """Return the survivor's cost of the victim's return after a kill.

    - `transfer_seconds`, and `transfer_steps` in usual steps: from the begin of the heal until the
      joiner has the state, with the replay.
    - `steps_made`: the survivor's steps meanwhile. `step_ratio`: their median to a usual step; None
      with too few whole ones.
    - `stall`: from the begin of the heal until the joiner contributes. `return_stall`: the part of
      it around the moment at which the joiner has the state.
    - `replayed`: updates. `replay_rate`: updates per usual step from the end of the fetch on; None
      with too few.

    Raises:
        BenchError: the victim did not return.
    """
    if kill.rejoin_seconds is None or kill.heal is None:
        raise BenchError("the group that was killed did not contribute again")
    back, end, usual = kill.time + kill.rejoin_seconds, kill.heal.time, usual_step(record)
    begin = end - kill.heal.seconds
    replaying = kill.heal.seconds - kill.heal.fetch_seconds
    around = survivor_gaps(record, begin, back)
    whole = [after - before for before, after in around if before >= begin and after <= end]
    later = [gap for gap in around if gap[1] > end and not _waited_through(gap, begin, end)]
    return {
        "transfer_seconds": end - begin,
        "transfer_steps": (end - begin) / usual,
        "steps_made": sum(e.replica == SURVIVOR and begin <= e.time <= end for e in record.commits),
        "step_ratio": median(whole) / usual if len(whole) >= MIN_STEPS else None,
        "stall": _pause(longest_delay(around, usual), usual),
        "return_stall": _pause(longest_delay(later, usual), usual),
        "replayed": kill.heal.replayed,
        "replay_rate": kill.heal.replayed / replaying * usual
        if kill.heal.replayed >= MIN_STEPS
        else None,
    }


def _waited_through(gap: Gap, begin: float, end: float) -> bool:
    """Tell whether a gap is a wait for the transfer, though its commit may come a moment after the
    transfer's end.
    """
    return min(gap[1], end) - max(gap[0], begin) > (end - begin) / 2


def drain_after(record: RunRecord, request: Incident) -> Figures:
    """Return the survivor's stall after a leave request to the victim, and the seconds until the
    victim left.

    Raises:
        BenchError: no event says that the victim left.
    """
    drained = first_after(record, Drained, request.time)
    if drained is None:
        raise BenchError("the group that was asked to leave did not")
    left = {"leave_seconds": drained.time - request.time, "in_order": drained.in_order}
    return {"stall": _pause(request.stall_seconds, usual_step(record)), **left}


def outage_after(record: RunRecord, kill: Incident) -> Figures:
    """Return the stall of the group hit hardest, the seconds without a lighthouse, and the groups
    restarted meanwhile.

    Raises:
        BenchError: the lighthouse did not come back.
    """
    back = first_after(record, LighthouseRestarted, kill.time)
    if back is None:
        raise BenchError("the lighthouse did not come back")
    restarts = [e for e in record.of(ReplicaRestarted) if kill.time <= e.time <= back.time + 5.0]
    away = {"away_seconds": back.seconds, "num_restarts": len(restarts)}
    return {"stall": _pause(kill.stall_seconds, usual_step(record)), **away}


def first_after(record: RunRecord, kind: type[E], since: float) -> E | None:
    """Return the first event of a kind after a moment (Unix seconds)."""
    return next((event for event in record.of(kind) if event.time > since), None)


def _pause(seconds: float | None, usual: float) -> Figures:
    """Return a stall in seconds and in usual steps."""
    if seconds is None:
        raise BenchError("nobody committed a step after what was to be measured")
    return {"seconds": seconds, "steps": seconds / usual, "usual_seconds": usual}
