# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""SIGKILL a whole group again and again, and measure what each kill cost.

The survivor is group 0, the victim group 1. The victim is killed once it has contributed to a few steps, each time at
another moment of the step. Its own launcher starts it again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench_commits import Commit, GroupHistory, read_group
from bench_run import POLL_SECONDS, BenchError, Run
from kill_group import latest_workers

from titan_ft.history.events import read_events
from titan_ft.launch.run_paths import RunPaths

SURVIVOR, VICTIM = 0, 1
SETTLE_STEPS = 5
"""Steps to which the victim contributes before it is killed."""
NUM_GAPS = 3
"""Gaps between the survivor's commits in which a kill shows: the first is the one that it falls into, but the step
under way may still pass, and only the next find the group gone."""
RETURN_SECONDS = 240.0


@dataclass(frozen=True)
class Kill:
    """One SIGKILL of all workers of an attempt of the victim."""

    time: float
    attempt: int


@dataclass(frozen=True)
class Cost:
    """What one kill cost.

    Attributes:
        stall_seconds: the survivor's longest gap between two committed steps at the kill, less its median gap.
        steps_lost: steps that the survivor computed and did not commit, up to the next kill.
        rejoin_seconds: from the kill to the first committed step to which the victim contributes.
        rejoin_stall_seconds: the survivor's longest gap after the stall and until then, less its median gap.
        num_starts: attempts that the return took.
    """

    stall_seconds: float
    steps_lost: int
    rejoin_seconds: float
    rejoin_stall_seconds: float
    num_starts: int


def measure(kills: Sequence[Kill], survivor: GroupHistory, victim: GroupHistory) -> list[Cost]:
    """Return the cost of each kill."""
    times = [commit.time for commit in survivor.commits]
    gaps = list(pairwise(times))
    usual = median(after - before for before, after in gaps)
    ends = [*(kill.time for kill in kills[1:]), float("inf")]
    costs = []
    for kill, end in zip(kills, ends, strict=True):
        back = first_return(victim.commits, kill)
        if back is None:
            raise BenchError("the victim never contributed again")
        at_kill = [gap for gap in gaps if gap[1] >= kill.time][:NUM_GAPS]
        until_back = [gap for gap in gaps if gap[0] >= at_kill[-1][1] and gap[0] <= back.time] or at_kill[-1:]
        costs.append(
            Cost(
                stall_seconds=_longest(at_kill) - usual,
                steps_lost=sum(kill.time <= moment < end for moment in survivor.thrown_away),
                rejoin_seconds=back.time - kill.time,
                rejoin_stall_seconds=_longest(until_back) - usual,
                num_starts=back.attempt - kill.attempt,
            )
        )
    return costs


def first_return(commits: Sequence[Commit], kill: Kill) -> Commit | None:
    """Return the victim's first contribution after a kill, or None while there is none."""
    return next((commit for commit in commits if commit.contributed and commit.attempt > kill.attempt), None)


def kill_repeatedly(run: Run, num_kills: int) -> list[Kill]:
    """Kill the victim `num_kills` times, and let it come back after each.

    Raises:
        BenchError: it did not come back, or the run ended.
    """
    kills: list[Kill] = []
    for index in range(num_kills):
        attempt = kills[-1].attempt + 1 if kills else 0
        recent = _wait_settled(run, attempt)
        step_seconds = (recent[-1].time - recent[0].time) / (len(recent) - 1)
        time.sleep(step_seconds * (index + 0.5) / num_kills)
        kills.append(_kill(run.run_dir, recent[-1].attempt))
    _wait_settled(run, kills[-1].attempt + 1)
    return kills


def _wait_settled(run: Run, attempt: int) -> list[Commit]:
    """Wait until an attempt of the victim, this one or a later, has contributed to some steps; return these."""
    deadline = time.monotonic() + RETURN_SECONDS
    while run.is_running():
        commits = read_group(run.system, run.run_dir, VICTIM).commits
        given = [commit for commit in commits if commit.contributed and commit.attempt >= attempt]
        if len(given) >= SETTLE_STEPS:
            return given[-SETTLE_STEPS:]
        if time.monotonic() > deadline:
            raise BenchError(
                f"{run.system}: the victim did not contribute within {RETURN_SECONDS:g} s; logs in {run.run_dir}"
            )
        time.sleep(2 * POLL_SECONDS)
    raise BenchError(f"{run.system}: the run ended before the last kill; logs in {run.run_dir}")


def _kill(run_dir: Path, attempt: int) -> Kill:
    pids = latest_workers(read_events(RunPaths(run_dir).events), VICTIM)
    kill = Kill(time.time(), attempt)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return kill


def _longest(gaps: Sequence[tuple[float, float]]) -> float:
    return max(after - before for before, after in gaps)
