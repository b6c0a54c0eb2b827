# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan's own DiLoCo (torchft's) beside ours: two groups of two ranks, without failures and
under the same kills.

Both have torchtitan's fixed outer optimizer. A group is killed at the same points: half a round
after the survivor's commits of some rounds. A crash, a hang or a run without an end is a result,
reported as `ended`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.kills import MAX_RESTARTS
from benchmarks.record import compare_digests, num_crashes, read_run, usual_step
from benchmarks.rounds import Case, configure, final_losses
from benchmarks.run import SURVIVOR, VICTIM, BenchError, Run, progress
from benchmarks.systems import NUM_GROUPS, OURS, PEER, RANKS_PER_GROUP, Job
from benchmarks.tries import InnerStepMade, StepTried
from titan_ft.history.batches.audit import audit
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.events import StepCommitted, TrainingFinished

CASE = Case(NUM_GROUPS, sync_steps=10, outer_lr=0.7)
STEPS = 200
KILLED_BEHIND = (5, 12)
"""Rounds."""
TIMEOUT_SECONDS = 900.0
"""Of a run; several times what it takes without trouble."""


def measure_diloco(
    base: Mapping[str, Any], work_dir: Path, done: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Run each system with and without kills, except what is `done`; yields name and figures."""
    for kills in ((), KILLED_BEHIND):
        for system in (OURS, PEER):
            name = f"{system}-kills{len(kills)}"
            if name in done:
                continue
            flags = ("--observe-every=1",) if system == PEER else ()
            job = Job(system, work_dir / f"diloco-{name}", max_restarts=MAX_RESTARTS, flags=flags)
            config = configure(base, job, CASE, STEPS)
            config["fault_tolerance"]["min_replica_size"] = 1  # a survivor goes on alone
            began, ended = time.monotonic(), None
            try:
                with Run(job, config) as run:
                    _kill_behind(run, kills, began + TIMEOUT_SECONDS)
                    run.wait(began + TIMEOUT_SECONDS - time.monotonic())
            except BenchError as error:
                ended = str(error)
            figures = describe(read_run(job.run_dir), final_losses(job.run_dir, STEPS))
            figures |= {"kills": len(kills), "seconds": time.monotonic() - began, "ended": ended}
            progress(f"{name}: {figures}")
            yield name, figures


def _kill_behind(run: Run, rounds: tuple[int, ...], until: float) -> None:
    """Kill the victim in the middle of the round after each of these."""
    for number in rounds:

        def made(record: RunRecord, number: int = number) -> RunRecord | None:
            steps = [event.step for event in record.commits if event.replica == SURVIVOR]
            return record if max(steps, default=0) >= number else None

        record = run.wait_for(made, f"round {number}", until - time.monotonic())
        run.sleep(usual_step(record) / 2)
        run.kill(VICTIM)


def describe(record: RunRecord, losses: Mapping[int, float]) -> dict[str, Any]:
    """Return the figures of a run, however it ended.

    `loss` is the survivor's at the end, `losses` has all groups'. `steps_made` counts the steps of
    all groups, `steps_thrown_away` those of them that are in no model. `rounds_mixed` counts the
    rounds in which the ranks of a group had different states.
    """
    tries = [event for event in record.events if isinstance(event, StepTried)]
    made, kept = (_steps_of_peer if tries else _steps_of_ours)(record)
    failed = [
        event
        for event in tries
        if not event.committed and (event.replica, event.rank) == (SURVIVOR, 0)
    ]
    return {
        "loss": losses.get(SURVIVOR),
        "losses": {str(group): loss for group, loss in losses.items()},
        "rounds_committed": len(
            {event.step for event in record.commits if event.replica == SURVIVOR}
        ),
        "rounds_failed": len(failed),
        "steps_made": made,
        "steps_thrown_away": made - kept,
        "rounds_mixed": num_mixed(tries),
        "digests": compare_digests(record),
        "crashes": num_crashes(record),
        "groups_finished": len({event.replica for event in record.of(TrainingFinished)})
        if not tries
        else len(losses),
    }


def _steps_of_peer(record: RunRecord) -> tuple[float, float]:
    """Return the steps that groups made, and the steps in the model; a rank counts as its part of
    the group.
    """
    kept = sum(event.inner_steps for event in record.of(StepTried) if event.contributed)
    return len(record.of(InnerStepMade)) / RANKS_PER_GROUP, kept / RANKS_PER_GROUP


def _steps_of_ours(record: RunRecord) -> tuple[float, float]:
    """Return the same of a run of ours. For a group that died in its steps, they are estimated from
    its time.
    """
    told = [event for event in record.of(StepCommitted) if event.rank == 0]
    kept = sum(event.inner_steps or 0 for event in told if event.contributed)
    per_step = next(
        (e.data.num_batches / e.inner_steps for e in told if e.data is not None and e.inner_steps),
        1.0,
    )
    batches = audit(record)
    return kept + (batches.num_void + batches.num_cut_short) / per_step, kept


def num_mixed(tries: list[StepTried]) -> int:
    """Count the rounds in which some ranks of a group got another group's state, and others did
    not.
    """
    ranks: dict[tuple[int, int, int], set[bool]] = {}
    for event in tries:
        if event.committed:
            ranks.setdefault((event.replica, event.attempt, event.step), set()).add(
                event.contributed
            )
    return sum(len(contributed) > 1 for contributed in ranks.values())
