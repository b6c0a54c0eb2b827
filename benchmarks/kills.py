# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""SIGKILL a whole group again and again, and measure the cost of each kill.

The survivor is group 0, the victim group 1. Each kill is at another moment of the step. The
victim's own launcher restarts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.record import (
    injected,
    longest_delay,
    read_run,
    steps_lost,
    survivor_gaps,
    usual_step,
)
from benchmarks.run import SURVIVOR, VICTIM, BenchError, Run, TooLateError, progress
from benchmarks.systems import PEER, Job, derive_config
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.events import WorkerStarted

SETTLE_STEPS = 5
"""Steps of both groups before the next kill."""
STEPS_PER_KILL = 1000
"""More than a kill takes, and still an end, should nobody be left to end the run."""
MAX_RESTARTS = 100
OBSERVE_FLAGS = ("--observe-every=5",)
"""Of the peer's workers, which write no events by themselves: a digest at each fifth step."""


def costs(record: RunRecord) -> list[dict[str, Any]]:
    """Return the cost of each kill.

    - `stall_seconds`: the survivor's stall, as in the history.
    - `steps_lost`: steps that the survivor computed and did not commit, up to the next kill.
    - `rejoin_seconds`: from the kill to the first committed step with the victim's contribution;
      None if there was none.
    - `rejoin_stall_seconds`: the largest delay of the survivor's commits between the start of the
      victim's next process and that step.
    - `num_starts`: attempts until the return.

    Raises:
        BenchError: the survivor did not continue after a kill.
    """
    kills, usual = injected(record), usual_step(record)
    ends = [*(kill.time for kill in kills[1:]), float("inf")]
    starts = [
        event for event in record.of(WorkerStarted) if (event.replica, event.rank) == (VICTIM, 0)
    ]
    found = []
    for kill, end in zip(kills, ends, strict=True):
        if kill.stall_seconds is None:
            raise BenchError("the survivor committed nothing after a kill")
        back = kill.time + (kill.rejoin_seconds or 0.0)
        since = [event.time for event in starts if kill.time < event.time <= back]
        # Not the gap of the kill itself, in which a fork may have been there already.
        gaps = (
            [gap for gap in survivor_gaps(record, min(since), back) if gap[0] >= min(since)]
            if since
            else []
        )
        found.append(
            {
                "stall_seconds": kill.stall_seconds,
                "steps_lost": steps_lost(record, SURVIVOR, kill.time, end),
                "rejoin_seconds": kill.rejoin_seconds,
                "rejoin_stall_seconds": longest_delay(gaps, usual) if since else None,
                "num_starts": len(since) or None,
            }
        )
    return found


def kill_repeatedly(
    run: Run,
    num_kills: int,
    before_kill: Callable[[], None] = lambda: None,
    settle_steps: int = SETTLE_STEPS,
) -> None:
    """Kill the victim `num_kills` times, and wait for its return after each; stop if it does not
    return.

    Args:
        before_kill: called before each kill.
        settle_steps: steps of both groups before each kill.

    Raises:
        BenchError: the victim did not start, or the run ended.
    """
    run.wait_trained(settle_steps)
    for index in range(num_kills):
        before_kill()
        wait_phase(run, (index + 0.5) / num_kills)
        kill = run.kill(VICTIM)
        try:
            run.wait_trained(settle_steps, since=kill.time)
        except TooLateError:
            return


def wait_phase(run: Run, share: float) -> None:
    """Sleep until about this share of a step has passed since the survivor's last commit."""
    record = run.record()
    step = usual_step(record)
    last = max(event.time for event in record.commits if event.replica == SURVIVOR)
    time.sleep((last + share * step - time.time()) % step)


def measure_kills(
    num_kills: int, base: Mapping[str, Any], system: str, work_dir: Path
) -> list[dict[str, Any]]:
    """Kill a group of one run again and again; return what each kill cost."""
    flags = OBSERVE_FLAGS if system == PEER else ()
    job = Job(system, work_dir / f"kills-{system}", max_restarts=MAX_RESTARTS, flags=flags)
    with Run(job, derive_config(base, job, num_kills * STEPS_PER_KILL, log_freq=1)) as run:
        kill_repeatedly(run, num_kills)
    found = costs(read_run(job.run_dir))
    for cost in found:
        progress(f"{system}: {cost}")
    return found
