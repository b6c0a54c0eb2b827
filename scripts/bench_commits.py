# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the groups committed: read from this project's events, and from torchft's log lines.

torchft's manager logs each vote (`should_commit=...`) and each heal (`healing required`). In the step in which a group
heals it contributes zeros; so it contributes to a committed step if it did not heal since the vote before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from bench_steps import STAMP, parse_stamp
from bench_systems import OURS, rank_logs

from titan_ft.run.events import Event, HealStarted, RolledBack, StepCommitted
from titan_ft.run.log import read_events
from titan_ft.run.paths import RunPaths

_VOTE = re.compile(
    STAMP + r"torchft\.manager - INFO - \[\S+/0 - step \d+\] (?P<what>should_commit=True|should_commit=False|healing)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Commit:
    """One step that a group committed."""

    time: float
    attempt: int
    contributed: bool


@dataclass
class GroupHistory:
    """What one group did, all its attempts together, in order of time.

    Attributes:
        thrown_away: times at which a step was computed and not committed.
    """

    commits: list[Commit] = field(default_factory=list)
    thrown_away: list[float] = field(default_factory=list)


def from_events(events: Iterable[Event], replica: int) -> GroupHistory:
    """Read this project's events, of rank 0.

    A group that has a step's gradients throws them away when it must heal or roll back, and computes twice what it
    reports more forward passes than batches for.
    """
    history = GroupHistory()
    for event in events:
        if event.replica != replica or event.rank != 0:
            continue
        if isinstance(event, StepCommitted):
            history.commits.append(Commit(event.time, event.attempt, event.contributed))
            if event.data is not None and event.forward_passes > event.data.num_batches:
                history.thrown_away.append(event.time)
        elif isinstance(event, HealStarted | RolledBack):
            history.thrown_away.append(event.time)
    return history


def from_torchft_logs(logs: Iterable[tuple[int, str]]) -> GroupHistory:
    """Read the logs of rank 0, each with its attempt."""
    history = GroupHistory()
    for attempt, log in logs:
        healing = False
        for match in _VOTE.finditer(log):
            time, what = parse_stamp(match["stamp"]), match["what"]
            if what == "healing":
                healing = True
                continue
            if what == "should_commit=True":
                history.commits.append(Commit(time, attempt, not healing))
            else:
                history.thrown_away.append(time)
            healing = False
    return history


def read_group(system: str, run_dir: Path, replica: int) -> GroupHistory:
    """Read what a group of a run has done so far."""
    if system == OURS:
        return from_events(read_events(RunPaths(run_dir).events), replica)
    logs = rank_logs(system, run_dir, replica)
    return from_torchft_logs((attempt, path.read_text(errors="replace")) for attempt, path in logs)
