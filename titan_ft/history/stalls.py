# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What each fault, or failure without one, cost the survivors, and how long its group was away."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import msgspec

from titan_ft.history.failures import Heal, contributed, find_heals
from titan_ft.history.job_facts import JobFacts
from titan_ft.history.lives import Fault, Life
from titan_ft.run.events import Event, HealFinished, StepCommitted

Commits = Mapping[int, Sequence[tuple[int, StepCommitted]]]
"""Those of each group's rank 0, with their Unix microseconds."""
_SAME_SHOT_US = 2_000_000  # faults of one shot within this time are one failure


@dataclass(frozen=True)
class Stall:
    """One fault that was injected, or one group's end that no fault explains."""

    time: float
    """Unix seconds of the fault; of the supervisor's note where no fault is known."""
    fault: str
    """The fault's name; what ended the group (SIGKILL, exit code 1) where none was injected."""
    injected: bool
    replicas: tuple[int, ...]
    """The groups it hit; empty for the lighthouse and for a fault that hit none."""
    rank: int | None
    shot: int | None
    ended: bool
    """Whether a group's attempt ended of it."""
    stall_seconds: float | None
    """The longest stall of a group that it did not hit: from when its next commit was due, by the usual step, to that
    commit. 0 where nobody stalled; None where no such group committed before and after."""
    rejoin_seconds: float | None
    """Until all the groups it hit contributed to a step again, healed if they had to; None if one never did."""
    heal: Heal | None
    """The last transfer of state to one of the groups before that."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Blow:
    """A fault, or an end without one, with what is found out about it."""

    time_us: int
    name: str
    fault: Fault | None
    replicas: set[int]
    reach_us: int
    """Until when a stall may begin that it caused."""
    lives: list[Life]
    """Those that it ended."""
    stall_us: int | None = None


def stalls(events: Iterable[Event]) -> list[Stall]:
    """Return the faults and failures of a run in order of time, each with what it cost.

    A stall counts once: for the last fault before it began that still reached it (its end was not noticed yet, or it
    was not undone), else for the first that came while it lasted. What happens later, while the group starts and heals,
    is no stall of the failure; `titan_ft.history.goodput` counts it all the same.
    """
    return find_stalls(JobFacts(events))


def find_stalls(job: JobFacts) -> list[Stall]:
    """Return the stalls of a run of which the facts are read."""
    commits: dict[int, list[tuple[int, StepCommitted]]] = defaultdict(list)
    for time, event in job.commits:
        commits[event.replica].append((time, event))
    blows = _find_blows(job.faults, job.lives)
    _attribute(blows, commits, job.usual_step_us())
    heals = find_heals(msgspec.structs.replace(event, time=time / 1e6) for time, event in job.of(HealFinished))
    return [_describe(blow, blows, commits, heals) for blow in blows]


def _find_blows(faults: Sequence[Fault], lives: Mapping[int, Sequence[Life]]) -> list[_Blow]:
    """Return the faults, those of one shot as one, and the ends without one."""
    blows: list[_Blow] = []
    for fault in faults:
        hit = set() if fault.replica is None else {fault.replica}
        reach = fault.undone_us or fault.time_us
        same = next((b for b in blows[::-1] if b.fault is not None and _one_shot(b.fault, fault)), None)
        if same is None:
            blows.append(_Blow(fault.time_us, fault.name, fault, hit, reach, []))
        else:
            same.replicas |= hit
            same.reach_us = max(same.reach_us, reach)
    for group in lives.values():
        for life in group:
            if not life.failed or life.exit_us is None:
                continue
            blow: _Blow | None = None
            if life.fault is not None:
                cause = life.fault
                blow = next((b for b in blows if b.fault == cause or (b.fault and _one_shot(b.fault, cause))), None)
            if blow is None:
                blow = _Blow(life.exit_us, life.cause, None, {life.replica}, life.exit_us, [])
                blows.append(blow)
            blow.lives.append(life)
            blow.reach_us = max(blow.reach_us, life.exit_us)
    return sorted(blows, key=lambda blow: blow.time_us)


def _one_shot(one: Fault, other: Fault) -> bool:
    """Say whether two faults are one shot that hit several groups."""
    alike = one.shot is not None and (one.shot, one.name) == (other.shot, other.name)
    return alike and abs(one.time_us - other.time_us) <= _SAME_SHOT_US


def _attribute(blows: Sequence[_Blow], commits: Commits, usual: int) -> None:
    """Count the survivors' stalls for the blows that caused them."""
    times = [blow.time_us for blow in blows]
    for replica, made in commits.items():
        for blow in blows:
            witnessed = made[0][0] <= blow.time_us and made[-1][0] > blow.time_us
            if replica not in blow.replicas and witnessed:
                blow.stall_us = blow.stall_us or 0
        for (before, first), (after, second) in pairwise(made):
            due = before + usual
            if after <= due or first.attempt != second.attempt:
                continue
            earlier = [b for b in blows[: bisect_right(times, due)] if b.reach_us >= before]
            meanwhile = blows[bisect_right(times, due) : bisect_left(times, after)]
            cause = earlier[-1] if earlier else meanwhile[0] if meanwhile else None
            if cause is not None and replica not in cause.replicas:
                cause.stall_us = max(cause.stall_us or 0, after - due)


def _describe(blow: _Blow, blows: Sequence[_Blow], commits: Commits, heals: Sequence[Heal]) -> Stall:
    """Find out when the groups were back, and put it all together."""
    backs: list[int | None] = []
    last: Heal | None = None
    for replica in sorted(blow.replicas):
        after = next((b.time_us for b in blows if b.time_us > blow.time_us and replica in b.replicas), None)
        healed = [heal for heal in heals if heal.replica == replica and _time_us(heal) >= blow.time_us]
        attempts = [life.attempt for life in blow.lives if life.replica == replica]
        due = blow.time_us
        if not attempts and healed and (after is None or _time_us(healed[0]) < after):
            due = _time_us(healed[0])
        back = next(
            (
                time
                for time, event in commits.get(replica, ())
                if time > due and contributed(event) and (not attempts or event.attempt > max(attempts))
            ),
            None,
        )
        backs.append(back)
        last = next((heal for heal in healed[::-1] if back is not None and _time_us(heal) <= back), last)
    known = [back for back in backs if back is not None]
    whole = bool(backs) and len(known) == len(backs)
    return Stall(
        time=blow.time_us / 1e6,
        fault=blow.name,
        injected=blow.fault is not None,
        replicas=tuple(sorted(blow.replicas)),
        rank=None if blow.fault is None else blow.fault.rank,
        shot=None if blow.fault is None else blow.fault.shot,
        ended=bool(blow.lives),
        stall_seconds=None if blow.stall_us is None else blow.stall_us / 1e6,
        rejoin_seconds=(max(known) - blow.time_us) / 1e6 if whole else None,
        heal=last,
    )


def _time_us(heal: Heal) -> int:
    return round(heal.time * 1e6)
