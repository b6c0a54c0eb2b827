# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark's figures from the record of a run.

A stall, a usual step and the time until a return are defined by the history, as in reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from benchmarks.run import SURVIVOR, BenchError
from benchmarks.tries import StepTried, translate
from titan_ft.history import digests
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.timing.incidents import Incident, find_incidents
from titan_ft.run.events import Drained, HealStarted, RolledBack, StepCommitted, TrainingFinished
from titan_ft.run.log import read_events
from titan_ft.run.paths import RunPaths

Gap = tuple[float, float]


def read_run(run_dir: Path) -> RunRecord:
    """Return the record of a run; of a peer, translated."""
    return RunRecord(translate(read_events(RunPaths(run_dir).events)))


def injected(record: RunRecord) -> list[Incident]:
    """Return what each injected fault cost."""
    return [incident for incident in find_incidents(record) if incident.injected]


def num_crashes(record: RunRecord) -> int:
    """Return the number of attempts of groups that ended without an injected fault."""
    incidents = [
        incident for incident in find_incidents(record) if incident.ended and not incident.injected
    ]
    return sum(bool(incident.failures) for incident in incidents)


def usual_step(record: RunRecord) -> float:
    """Return the seconds of a usual step.

    Raises:
        BenchError: no two steps were committed.
    """
    usual = record.usual_step_seconds
    if usual is None:
        raise BenchError("no steps were committed before what was to be measured")
    return usual


def survivor_gaps(record: RunRecord, begin: float, end: float) -> list[Gap]:
    """Return the times between commits of the survivor that touch a time."""
    times = [event.time for event in record.commits if event.replica == SURVIVOR]
    return [gap for gap in pairwise(times) if gap[1] >= begin and gap[0] <= end]


def longest_delay(gaps: Iterable[Gap], usual: float) -> float:
    """Return the largest delay of the commits in seconds; 0 if none was late."""
    return max(
        (after - before - usual for before, after in gaps if after - before > usual), default=0.0
    )


def steps_lost(record: RunRecord, replica: int, begin: float, end: float) -> int:
    """Return the number of steps that a group computed and threw away in a time, instead of
    committing them.

    A step is lost if the group must heal or roll back, or computed more forward passes than the
    step has batches, or, for the peer, if a try was not committed.
    """
    lost = 0
    for event in record.events:
        if (event.replica, event.rank) == (replica, 0) and begin <= event.time < end:
            match event:
                case HealStarted() | RolledBack() | StepTried(committed=False):
                    lost += 1
                case StepCommitted() if event.data is not None:
                    lost += event.forward_passes > event.data.num_batches
    return lost


def compare_digests(record: RunRecord) -> str:
    """Compare the groups' digests, state by state and rank by rank.

    Returns:
        "equal", "differ" or "unknown", for the last state of which all groups have a digest; and
        what differs in all.
    """
    hashed = [
        e
        for e in record.events
        if isinstance(e, StepCommitted | Drained | TrainingFinished) and e.digest
    ]
    found = digests.compare_digests(
        ((e.lineage or "", e.rank), e.replica, e.digest) for e in hashed
    )
    num_groups = len({event.replica for event in hashed})
    whole = {state for (state, _), groups in found.groups.items() if len(groups) == num_groups > 1}
    verdict = "unknown"
    if last := next((event for event in reversed(hashed) if (event.lineage or "") in whole), None):
        differ = any(state == (last.lineage or "") for state, _ in found.differing)
        verdict = f"{'differ' if differ else 'equal'} (step {last.step})"
    num = len(found.differing)
    return verdict + (f"; differ in {num} of {len(found.compared)} comparisons" if num else "")
