# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A campaign of failures against torchtitan's own integration: a SIGKILL of a random group every 15
seconds.

The integration runs as intended, with two or more ranks in a group. (With one, no gradient ever
crosses groups.) The campaign is mild: only a group that has contributed since its last start is
killed, never the last such group, and at the end all groups get the time to come back.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures import figures, table
from benchmarks.kills import MAX_RESTARTS, OBSERVE_FLAGS
from benchmarks.record import injected, num_crashes, read_run
from benchmarks.run import BenchError, Run, progress
from benchmarks.systems import PEER, Job, derive_config
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.timing.goodput import measure_goodput
from titan_ft.run.events import StepCommitted, WorkerStarted
from titan_ft.run.workers import latest_attempts, latest_workers

KILL_EVERY_SECONDS = 15.0
START_SECONDS = 240.0
RETURN_SECONDS = 60.0
"""At the end of the campaign, without kills, for all groups to come back."""
STEPS = 100_000
"""More than any campaign makes."""


def run_campaign(
    base: Mapping[str, Any],
    work_dir: Path,
    minutes: float,
    seed: int,
    num_groups: int,
    num_ranks: int,
) -> dict[str, Any]:
    """Run one campaign and return its figures.

    Args:
        base: the config from which the run's config is derived.

    Raises:
        BenchError: the groups did not start to train together, or no step was committed.
    """
    job = Job(PEER, work_dir / "campaign-peer", num_groups, num_ranks, MAX_RESTARTS, OBSERVE_FLAGS)
    skipped, ended = 0, None
    with Run(job, derive_config(base, job, STEPS, log_freq=1)) as run:
        run.wait_for(lambda record: _all_up(run, record), "start of all groups", START_SECONDS)
        began = time.time()
        try:
            skipped = sum(not killed for killed in _kill_on(run, seed, minutes))
            progress("no more kills; waiting for all groups")
            with contextlib.suppress(BenchError):
                run.wait_for(
                    lambda record: _all_up(run, record), "return of all groups", RETURN_SECONDS
                )
            run.sleep(began + 60.0 * minutes - time.time())
        except BenchError as error:
            ended = str(error)
            progress(ended)
        until = time.time()
    return describe(job, read_run(job.run_dir), (began, until), skipped) | {
        "seed": seed,
        "ended": ended,
    }


def describe(job: Job, whole: RunRecord, span: tuple[float, float], skipped: int) -> dict[str, Any]:
    """Return the figures of a campaign from `span[0]` to `span[1]`, in Unix seconds.

    `crashes` are ends of groups without a kill. `stall_seconds` are of the kills that a group
    survived to see. `figures` has the figures of the table.

    Raises:
        BenchError: no step was committed in that time.
    """
    began, until = span
    # The starts before it say which attempts there were.
    record = RunRecord(
        e
        for e in whole.events
        if e.time <= until and (e.time >= began or isinstance(e, WorkerStarted))
    )
    if not record.of(StepCommitted):
        raise BenchError("nothing was committed in the campaign")
    good, kills, crashes = measure_goodput(record), injected(record), num_crashes(record)
    faults = f"{len(kills)} SIGKILLs of a group{f' ({skipped} skipped)' if skipped else ''}, {crashes} crashes of its own"
    length = {"length (min)": f"{(until - began) / 60:.1f}", "faults injected": faults}
    return {
        "groups": job.num_groups,
        "ranks": job.num_ranks,
        "seconds": until - began,
        "kills": len(kills),
        "kills_skipped": skipped,
        "crashes": crashes,
        "steps_committed": good.exchanges_committed,
        "steps_tried": good.exchanges_attempted,
        "effective_share": good.effective_training_time_in_training,
        "stall_seconds": [kill.stall_seconds for kill in kills if kill.stall_seconds is not None],
        "figures": {**figures(record), **length, "batches lost, repeated": "not told"},
    }


def _kill_on(run: Run, seed: int, minutes: float) -> Iterator[bool]:
    """Kill a random group every 15 s until shortly before the end; yields False for a kill that was
    skipped.
    """
    choice, began = random.Random(seed), time.time()
    # The last kill comes early enough that its group can be back.
    quiet = min(RETURN_SECONDS, 60.0 * minutes / 2)
    for number in range(1, int((60.0 * minutes - quiet) / KILL_EVERY_SECONDS) + 1):
        after = number * KILL_EVERY_SECONDS
        run.sleep(began + after - time.time())
        # A skipped kill takes a number as well. Otherwise one skip would change all later kills of
        # the seed.
        draw = choice.random()
        up = sorted(groups_up(run, run.record()))
        if len(up) < 2:
            progress(f"{after:g} s: skipped, up is only {up}")
            yield False
            continue
        replica = up[int(draw * len(up))]
        run.kill(replica)
        progress(f"{after:g} s: killed group {replica}")
        yield True


def groups_up(run: Run, record: RunRecord) -> dict[int, int]:
    """Return the latest attempt of each group that lives and has contributed in it."""
    contributed = {
        (event.replica, event.attempt) for event in record.of(StepCommitted) if event.contributed
    }
    return {
        replica: attempt
        for replica, attempt in latest_attempts(record.events).items()
        if (replica, attempt) in contributed
        and run.workers(replica) == latest_workers(record.events, replica)
    }


def _all_up(run: Run, record: RunRecord) -> bool | None:
    """Tell whether all groups have digests of one step, made since they last were started; None if
    not.
    """
    up, with_digest = groups_up(run, record), dict[int, set[int]]()
    for event in record.of(StepCommitted):
        if event.digest and up.get(event.replica) == event.attempt:
            with_digest.setdefault(event.step, set()).add(event.replica)
    return any(len(groups) == run.job.num_groups for groups in with_digest.values()) or None


def format_campaign(campaign: Mapping[str, Any], against: Path | None) -> list[str]:
    """Return the figures as a Markdown table, beside those of a campaign of titan_ft where one is
    given.
    """
    columns = {
        "torchtitan.experiments.ft, {groups} groups x {ranks} ranks".format(**campaign): campaign[
            "figures"
        ]
    }
    if against is not None:
        columns[f"titan_ft ({against})"] = figures(read_run(against))
    lines = table(columns)
    return [*lines, "", f"the job ended early: {campaign['ended']}"] if campaign["ended"] else lines
