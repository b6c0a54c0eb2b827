# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A campaign of failures against torchtitan's own integration: a SIGKILL of a random group every 15 seconds.

It runs as it is meant to, with two ranks and more in a group (with one, no gradient ever crosses groups). It is treated
mildly: only a group that has contributed since its last start is killed, never the last such group, and at the end all
groups get the time to come back.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench_campaign_tries import Damage, Kill, latest_attempts, measure, tries_of
from bench_run import MAX_RESTARTS, POLL_SECONDS, BenchError, Run
from bench_systems import PEER, Command, commands, derive_config
from campaign_figures import ROWS, describe_part, describe_share, describe_stalls, figures, table
from kill_group import latest_workers

from titan_ft.run.events import Event
from titan_ft.run.log import read_events
from titan_ft.run.paths import RunPaths
from titan_ft.run.process import is_running_worker

KILL_EVERY_SECONDS = 15.0
START_SECONDS = 240.0
RETURN_SECONDS = 60.0
"""At the end of the campaign, without kills, for all groups to come back."""
DIGEST_EVERY = 5
STEPS = 100_000
"""More than any campaign makes."""
WORKER = "bench_peer.py"
is_worker = partial(is_running_worker, mark=WORKER)

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Campaign:
    """One campaign.

    Attributes:
        seconds: how long it took, without the start.
        kills_skipped: because they would have hit the last group that could train.
        ended: why the job ended before its time, or None.
    """

    groups: int
    ranks: int
    seed: int
    seconds: float
    kills: list[Kill]
    kills_skipped: int
    ended: str | None
    damage: Damage


class PeerRun(Run):
    """A run of torchtitan's own integration with any number of groups, whose workers tell what they try."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], num_groups: int, num_ranks: int) -> None:
        super().__init__(PEER, run_dir, config, MAX_RESTARTS, num_ranks)
        self._commands = partial(peer_commands, run_dir, num_groups, num_ranks)


def peer_commands(run_dir: Path, num_groups: int, num_ranks: int) -> list[Command]:
    """Return what to start: as in the benchmark, but with as many groups as asked for, and observed."""
    lighthouse, group, *_ = commands(PEER, run_dir, MAX_RESTARTS, num_ranks)
    worker = next(index for index, arg in enumerate(group.args) if arg.endswith(WORKER))
    started = [lighthouse]
    for replica in range(num_groups):
        own = {
            "--log-dir=": str(run_dir / "logs" / f"replica-{replica}"),
            "--fault_tolerance.replica_id=": str(replica),
        }
        args = [next((flag + own[flag] for flag in own if arg.startswith(flag)), arg) for arg in group.args]
        args.insert(worker + 1, f"--observe-every={DIGEST_EVERY}")
        started.append(Command(f"group-{replica}", args, group.env))
    return started


def run_campaign(
    base: Mapping[str, Any],
    work_dir: Path,
    minutes: float,
    seed: int,
    shape: tuple[int, int],
    tell: Tell,
) -> Campaign:
    """Run one campaign and return its figures.

    Args:
        base: the config that the run derives its own from.
        shape: groups, and ranks in each.

    Raises:
        BenchError: the groups did not even start to train together.
    """
    num_groups, num_ranks = shape
    run_dir = work_dir / "campaign-peer"
    config = derive_config(base, PEER, run_dir, STEPS, log_freq=1)
    config["fault_tolerance"]["group_size"] = num_groups
    kills: list[Kill] = []
    skipped, ended = 0, None
    with PeerRun(run_dir, config, num_groups, num_ranks) as run:
        _wait_all_up(run, num_groups, START_SECONDS, "start")
        began = time.time()
        try:
            for shot in _shots(run, seed, minutes, tell):
                kills += [shot] if shot else []
                skipped += shot is None
            tell("no more kills; waiting for all groups")
            with contextlib.suppress(BenchError):
                _wait_all_up(run, num_groups, RETURN_SECONDS, "return")
            _sleep_until(run, began + 60.0 * minutes)
        except BenchError as error:
            ended = str(error)
            tell(ended)
        until = time.time()
    events = [event for event in read_events(RunPaths(run_dir).events) if event.time <= until]
    return Campaign(
        groups=num_groups,
        ranks=num_ranks,
        seed=seed,
        seconds=until - began,
        kills=kills,
        kills_skipped=skipped,
        ended=ended,
        damage=measure(events, kills, began),
    )


def _shots(run: Run, seed: int, minutes: float, tell: Tell) -> Iterator[Kill | None]:
    """Kill a random group every 15 s until shortly before the end; yields None for a kill that was skipped."""
    choice, began = random.Random(seed), time.time()
    # The last kill comes early enough that its group can be back.
    quiet = min(RETURN_SECONDS, 60.0 * minutes / 2)
    for shot in range(1, int((60.0 * minutes - quiet) / KILL_EVERY_SECONDS) + 1):
        _sleep_until(run, began + shot * KILL_EVERY_SECONDS)
        draw = choice.random()  # also for a kill that is skipped, so that a seed says what comes next
        up = groups_up(read_events(RunPaths(run.run_dir).events))
        if len(up) < 2:
            tell(f"{shot * KILL_EVERY_SECONDS:g} s: skipped, up is only {sorted(up)}")
            yield None
            continue
        replica = sorted(up)[int(draw * len(up))]
        yield _kill(run.run_dir, replica, up[replica])
        tell(f"{shot * KILL_EVERY_SECONDS:g} s: killed group {replica}")


def _kill(run_dir: Path, replica: int, attempt: int) -> Kill:
    pids = latest_workers(read_events(RunPaths(run_dir).events), replica)
    kill = Kill(time.time(), replica, attempt)
    for pid in filter(is_worker, pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return kill


def groups_up(events: Sequence[Event], is_worker: Callable[[int], bool] = is_worker) -> dict[int, int]:
    """Return the latest attempt of each group that lives and has contributed in it."""
    contributed = {(event.replica, event.attempt) for event in tries_of(events) if event.contributed}
    return {
        replica: attempt
        for replica, attempt in latest_attempts(events).items()
        if (replica, attempt) in contributed and all(map(is_worker, latest_workers(events, replica)))
    }


def _sleep_until(run: Run, moment: float) -> None:
    """Sleep, but end with a BenchError when the job does."""
    while (left := moment - time.time()) > 0:
        if not run.is_running():
            raise BenchError(f"all groups ended by themselves; logs in {run.run_dir}")
        time.sleep(min(POLL_SECONDS, left))


def _wait_all_up(run: Run, num_groups: int, seconds: float, what: str) -> None:
    """Wait until all groups have digests of one step, made since they last were started."""
    deadline = time.time() + seconds
    while time.time() < deadline:
        events = read_events(RunPaths(run.run_dir).events)
        up = groups_up(events)
        digests = {(e.replica, e.step) for e in tries_of(events) if up.get(e.replica) == e.attempt and e.digest}
        steps = {step for _, step in digests}
        if any(all((replica, step) in digests for replica in range(num_groups)) for step in steps):
            return
        _sleep_until(run, time.time() + 1.0)
    raise BenchError(f"no {what} of all {num_groups} groups within {seconds:g} s; logs in {run.run_dir}")


def format_campaign(campaign: Campaign, against: Path | None) -> list[str]:
    """Return the figures as a Markdown table, beside those of a campaign of titan_ft where one is given."""
    damage = campaign.damage
    skipped = f" ({campaign.kills_skipped} skipped)" if campaign.kills_skipped else ""
    undone = f"; {damage.steps_undone} of them lost with all state" if damage.steps_undone else ""
    values = (
        f"{campaign.seconds / 60:.1f}",
        f"{len(campaign.kills)} SIGKILLs of a group{skipped}, {damage.crashes} crashes of its own",
        describe_part(damage.steps_committed, damage.steps_tried) + undone,
        describe_part(damage.passes_lost, damage.passes),
        describe_share(damage.effective_share),
        "not told",
        describe_stalls(damage.stall_seconds),
        str(damage.digests),
        "-" if damage.loss is None else f"{damage.loss:.3f}",
    )
    title = f"torchtitan.experiments.ft, {campaign.groups} groups x {campaign.ranks} ranks"
    columns = {title: dict(zip(ROWS, values, strict=True))}
    if against is not None:
        columns[f"titan_ft ({against})"] = figures(read_events(RunPaths(against).events))
    lines = table(columns)
    return [*lines, "", f"the job ended early: {campaign.ended}"] if campaign.ended else lines
