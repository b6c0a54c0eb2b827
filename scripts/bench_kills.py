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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench_commits import Commit, GroupHistory, read_group
from bench_run import POLL_SECONDS, BenchError, Run
from kill_group import latest_workers

from titan_ft.run.log import read_events
from titan_ft.run.paths import RunPaths

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
        rejoin_seconds: from the kill to the first committed step to which the victim contributes; None if it never did.
        rejoin_stall_seconds: the survivor's longest gap after the stall and until then, less its median gap.
        num_starts: attempts that the return took.
    """

    stall_seconds: float
    steps_lost: int
    rejoin_seconds: float | None
    rejoin_stall_seconds: float | None
    num_starts: int | None


def measure(kills: Sequence[Kill], survivor: GroupHistory, victim: GroupHistory) -> list[Cost]:
    """Return the cost of each kill."""
    times = [commit.time for commit in survivor.commits]
    gaps = list(pairwise(times))
    usual = median(after - before for before, after in gaps)
    ends = [*(kill.time for kill in kills[1:]), float("inf")]
    costs = []
    for kill, end in zip(kills, ends, strict=True):
        at_kill = [gap for gap in gaps if gap[1] >= kill.time][:NUM_GAPS]
        if not at_kill:
            raise BenchError("the survivor committed nothing after a kill")
        back = first_return(victim.commits, kill)
        later = [gap for gap in gaps if gap[0] >= at_kill[-1][1] and back is not None and gap[0] <= back.time]
        costs.append(
            Cost(
                stall_seconds=_longest(at_kill) - usual,
                steps_lost=sum(kill.time <= moment < end for moment in survivor.thrown_away),
                rejoin_seconds=None if back is None else back.time - kill.time,
                rejoin_stall_seconds=_longest(later) - usual if later else None,
                num_starts=None if back is None else back.attempt - kill.attempt,
            )
        )
    return costs


def first_return(commits: Sequence[Commit], kill: Kill) -> Commit | None:
    """Return the victim's first contribution after a kill, or None while there is none."""
    return next((commit for commit in commits if commit.contributed and commit.attempt > kill.attempt), None)


def kill_repeatedly(run: Run, num_kills: int, before_kill: Callable[[], None] = lambda: None) -> list[Kill]:
    """Kill the victim `num_kills` times, and let it come back after each; no more once it does not.

    Args:
        before_kill: called before each.

    Raises:
        BenchError: it did not even start, or the run ended.
    """
    kills: list[Kill] = []
    recent = _wait_settled(run, 0)
    if not recent:
        raise BenchError(f"{run.system}: no step within {RETURN_SECONDS:g} s; logs in {run.run_dir}")
    while recent and len(kills) < num_kills:
        before_kill()
        step_seconds = (recent[-1].time - recent[0].time) / (len(recent) - 1)
        time.sleep(step_seconds * (len(kills) + 0.5) / num_kills)
        kills.append(kill_victim(run.run_dir, recent[-1].attempt))
        recent = _wait_settled(run, kills[-1].attempt + 1)
    return kills


def _wait_settled(run: Run, attempt: int) -> list[Commit]:
    """Wait until an attempt of the victim, this one or a later, has contributed to some steps; return these.

    Returns nothing if that takes too long.
    """
    deadline = time.monotonic() + RETURN_SECONDS
    while time.monotonic() < deadline:
        if not run.is_running():
            raise BenchError(f"{run.system}: the run ended before the last kill; logs in {run.run_dir}")
        commits = read_group(run.system, run.run_dir, VICTIM).commits
        given = [commit for commit in commits if commit.contributed and commit.attempt >= attempt]
        if len(given) >= SETTLE_STEPS:
            return given[-SETTLE_STEPS:]
        time.sleep(2 * POLL_SECONDS)
    return []


def kill_victim(run_dir: Path, attempt: int) -> Kill:
    """SIGKILL all workers of the victim's latest attempt, which is `attempt`."""
    pids = latest_workers(read_events(RunPaths(run_dir).events), VICTIM)
    kill = Kill(time.time(), attempt)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return kill


def _longest(gaps: Sequence[tuple[float, float]]) -> float:
    return max(after - before for before, after in gaps)
