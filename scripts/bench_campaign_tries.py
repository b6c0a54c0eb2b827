# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What torchtitan's own integration made of a campaign, from the events of its observed trainer.

A try is one forward and backward of all groups in a step; it is committed when some group applied the update. What was
computed for a try that was not is lost. This is the count of "Fault Tolerant Llama" (PyTorch blog, 2025): 30.2 % of the
tries were committed there with a failure each 15 s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from bench_events import StepTried
from bench_run import BenchError
from campaign_figures import LOSS_STEPS, Comparison, Digest, compare_digests, stalls

from titan_ft.run.events import Event, WorkerStarted


@dataclass(frozen=True)
class Kill:
    """A SIGKILL of all ranks of one attempt of a group."""

    time: float
    replica: int
    attempt: int


@dataclass(frozen=True)
class Damage:
    """What a campaign did to a job.

    Attributes:
        steps_committed: steps that some group committed; one that was made again after all state was lost counts again.
        steps_tried: with those that no group committed.
        passes: forward and backward passes of a whole group, with those that its death cut short.
        passes_lost: those whose gradient was in no update, also because the group was healing.
        effective_share: as `titan_ft.history.goodput` has it: of the time between first and last step, the share that
            committed steps took at their usual pace, each by the share of the groups that contributed.
        steps_undone: committed steps that were lost because no group was left to heal from.
        stall_seconds: of each kill, the job's longest gap between two commits less a usual step.
        crashes: attempts of groups that ended although nobody killed them.
        loss: the mean over the last steps and their groups.
        digests: of the weights.
    """

    steps_committed: int
    steps_tried: int
    passes: int
    passes_lost: int
    effective_share: float | None
    steps_undone: int
    stall_seconds: list[float]
    crashes: int
    loss: float | None
    digests: Comparison


def measure(events: Sequence[Event], kills: Sequence[Kill], began: float) -> Damage:
    """Return what became of a campaign's events.

    Args:
        began: Unix time of the campaign's begin; steps before it count only for the digests.

    Raises:
        BenchError: nothing was committed.
    """
    lives = number_lives(events)
    tried = [(life, event) for life, event in lives if event.rank == 0 and event.time >= began]
    commits = [(life, event) for life, event in tried if event.committed]
    if not commits:
        raise BenchError("nothing was committed in the campaign")
    # Each group has a try for each that it took part in; the job's number is that of the group with most of them.
    per_group: dict[tuple[int, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for life, event in tried:
        per_group[life, event.step][event.replica] += 1
    first: dict[tuple[int, int], float] = {}
    for life, event in commits:
        first.setdefault((life, event.step), event.time)
    digests = [Digest(e.time, life, e.step, e.rank, e.replica, e.digest) for life, e in lives if e.digest]
    ended = {(replica, attempt) for replica, last in latest_attempts(events).items() for attempt in range(last)}
    cut = ended & {(event.replica, event.attempt) for _, event in tried}
    return Damage(
        steps_committed=len(first),
        steps_tried=sum(max(groups.values()) for groups in per_group.values()),
        passes=len(tried) + len(cut),
        passes_lost=sum(not event.contributed for _, event in tried) + len(cut),
        effective_share=_effective_share(commits, len(latest_attempts(events))),
        steps_undone=_undone(commits),
        stall_seconds=stalls(list(first.values()), (kill.time for kill in kills)),
        crashes=len(ended - {(kill.replica, kill.attempt) for kill in kills}),
        loss=_last_loss(lives, max(first)),
        digests=compare_digests(digests),
    )


def tries_of(events: Sequence[Event], rank: int = 0) -> list[StepTried]:
    """Return what one rank of each group tried."""
    return [event for event in events if isinstance(event, StepTried) and event.rank == rank]


def latest_attempts(events: Sequence[Event]) -> dict[int, int]:
    """Return the number of each group's latest attempt."""
    latest: dict[int, int] = {}
    for event in events:
        if isinstance(event, WorkerStarted):
            latest[event.replica] = max(event.attempt, latest.get(event.replica, 0))
    return latest


def number_lives(events: Sequence[Event]) -> list[tuple[int, StepTried]]:
    """Return all tries, each with the number of times that the job's state had been lost before.

    A group that returns heals to the others' step before it commits. So a commit far below what was committed means
    that nobody was left to heal from.
    """
    life, top, found = 0, 0, []
    for event in events:
        if not isinstance(event, StepTried):
            continue
        if event.committed:
            if event.step < top - 2:
                life, top = life + 1, 0
            top = max(top, event.step)
        found.append((life, event))
    return found


def _undone(commits: Sequence[tuple[int, StepTried]]) -> int:
    """Return the steps that were committed in lives of the job before its last."""
    tops: dict[int, int] = defaultdict(int)
    for life, event in commits:
        tops[life] = max(tops[life], event.step)
    return sum(top for life, top in tops.items() if life < max(tops))


def _effective_share(commits: Sequence[tuple[int, StepTried]], num_groups: int) -> float | None:
    """Return the effective training time as a share of the time between first and last step."""
    times: dict[tuple[int, int], float] = {}
    given: dict[tuple[int, int], int] = defaultdict(int)
    for life, event in commits:
        times.setdefault((life, event.step), event.time)
        given[life, event.step] += event.contributed
    gaps = [(after - before, step) for (_, before), (step, after) in pairwise(sorted(times.items()))]
    calm = [gap for gap, step in gaps if given[step] == num_groups]
    if not gaps or not num_groups:
        return None
    usual = median(calm or [gap for gap, _ in gaps])
    last_life = max(life for life, _ in times)
    # Steps of a life whose state was lost are in nothing that is left.
    useful = sum(min(gap, usual) * given[step] / num_groups for gap, step in gaps if step[0] == last_life)
    return useful / sum(gap for gap, _ in gaps)


def _last_loss(lives: Sequence[tuple[int, StepTried]], end: tuple[int, int]) -> float | None:
    """Return the mean loss of the last steps, over the groups whose ranks have all said theirs."""
    life, top = end
    parts: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for number, event in lives:
        last = number == life and top - LOSS_STEPS < event.step <= top
        if last and event.contributed and event.own_loss is not None:
            parts[event.step, event.replica][event.rank] = event.own_loss
    ranks = max((len(shares) for shares in parts.values()), default=0)
    losses = [sum(shares.values()) for shares in parts.values() if len(shares) == ranks]
    return fmean(losses) if losses else None
