# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Incidents of a run, and what each cost: the one definition of a stall and of its price.

An *incident* is a fault that was injected (one shot that hits several groups is one), a failure that no fault
explains, or a group's leaving because it was asked to. What a *failure* is says `titan_ft.history.fold.run`, for every
view of a run; an incident has none, one or several: a fault that only slows a rank down has none, one shot that kills
two groups has two. An incident *begins* with the fault; without one, with the last event of
the worker that fell silent first, or with the event in which the group says that it leaves. It *reaches* until it is
over for the others: until the end of its groups is noticed, until the last step that still has their gradients, until
the fault is undone, or until a lighthouse listens again.

A *stall* is the time by which a commit of a group came later than one usual step (`RunRecord.usual_step_us`) after the
commit before it, of the same attempt. Each stall counts once: for the last incident that had begun when the commit was
due and whose reach had not ended at the commit before it, else for the first that began while the commit was late. It
never counts for an incident that hit the group itself. The *stall of an incident* is the longest one that counts for
it: what the survivor hit hardest waited. It is 0 where nobody waited, and unknown where no other group committed
before and after its begin. A round of several steps is the work of many, and its length varies by more than a failure
costs: where the group's own computing for it took longer than usual, that much later is no stall. What happens later,
while its group starts and heals, is no stall of the incident; `titan_ft.history.timing.goodput` counts it all the same.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from titan_ft.history.fold.attempt import Attempt
from titan_ft.history.fold.faults import RecordedFault
from titan_ft.history.fold.group import FailureSpan
from titan_ft.history.record.run_record import RunRecord, view
from titan_ft.history.record.usual_steps import UsualSteps
from titan_ft.run.events import DigestMismatch, Event, HealFinished, LinkDead, PeerSilent, StepCommitted

Commits = Mapping[int, Sequence[StepCommitted]]
"""Those of each group, in order of time."""
EFFECT_SECONDS = 60.0
"""So long after a fault is over, its group may drop out because of it: a corrupt state shows at the next digest."""
BREAK_SECONDS = 15.0
"""So long after a fault is over, an exchange may break because of it."""
CLOCK_SECONDS = 1.0
"""What the clocks of two hosts may differ by."""


@dataclass(frozen=True)
class Heal:
    """One transfer of state to a group; all its ranks together."""

    replica: int
    attempt: int
    time: float
    """Unix seconds at which the last rank was done."""
    donor: int
    from_step: int
    num_bytes: int
    """Bytes of all ranks."""
    seconds: float
    """Seconds of the slowest rank."""
    fetch_seconds: float
    """Seconds of the slowest fetch: the rest is loading and replay."""
    replayed: int
    """Queued updates applied."""


@dataclass(frozen=True)
class Failure:
    """A failure, see `titan_ft.history.fold.run`, and what it cost."""

    replica: int | None
    """None where an exchange broke and all groups were in its repetition."""
    attempt: int
    time: float
    """Unix seconds of the injected fault that caused it, or else at which it was noted."""
    cause: str
    """What ended the group: the exception, the signal or the exit code; of one that lived, the name of its incident."""
    stall_seconds: float | None
    """The stall of its incident."""
    rejoin_seconds: float | None
    """Seconds until the group contributed to a step again; None if it did not, or was never away."""
    heal: Heal | None
    """The last transfer of state before that step; None if the group did not contribute again, or healed nothing."""
    away: bool = True
    """Whether the group was away; else an exchange broke and was repeated."""
    died: bool = False
    """Whether a worker of the group, or its agent, ended by itself."""


@dataclass(frozen=True)
class Drain:
    """One group's attempt that left because it was asked to."""

    replica: int
    attempt: int
    time: float
    """Unix seconds at which its first rank reported it."""
    in_order: bool
    """Whether it finished its step first."""
    stall_seconds: float | None
    """The stall of its incident."""


@dataclass(frozen=True)
class Incident:
    """A fault, or a failure or a group's leaving that no fault explains, and what it cost."""

    time: float
    """Unix seconds of the fault; of the agent's event, or of the group's own, where no fault is known."""
    fault: str
    """The fault's name; where none was injected what ended the group (SIGKILL, an exception, drained), or what was seen
    of one that lived (silent, out of reach)."""
    injected: bool
    replicas: tuple[int, ...]
    """The groups it hit; empty for the lighthouse and for a fault that hit none."""
    rank: int | None
    shot: int | None
    ended: bool
    """Whether a group's attempt ended of it."""
    stall_seconds: float | None
    """Its stall; see this module."""
    rejoin_seconds: float | None
    """Until all the groups that were away contributed to a step again; None if one never did, or none was away."""
    heal: Heal | None
    """The last transfer of state to one of the groups before that; None without."""
    failures: tuple[Failure, ...] = ()
    drains: tuple[Drain, ...] = ()
    lighthouse: bool = False
    """Whether the fault hit the lighthouse."""
    category: str | None = None
    """That of the fault, or of what was seen (`titan_ft.faults.fault.Category`); None if it has none."""

    @property
    def is_listed(self) -> bool:
        """Whether it is a fault or a failure, and not only a group that left because it was asked to."""
        return self.injected or bool(self.failures)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values for JSON, without its failures and drains: these have lists of their own."""
        return {name: value for name, value in asdict(self).items() if name not in ("failures", "drains")}


@dataclass
class Cause:
    """What may stall the groups that it did not hit; times in one unit, whichever it is.

    Attributes:
        begin: when it began.
        reach: until when a stall may begin that it caused.
        groups: those that it hit.
    """

    begin: float
    reach: float
    groups: set[int]


class Made(NamedTuple):
    """A commit of a group.

    Attributes:
        longer: by how much its own computing made it longer than the usual step; only of rounds of several steps.
    """

    time: float
    attempt: int
    longer: float = 0.0


def survivors_stalls(
    causes: Sequence[Cause], commits: Mapping[int, Sequence[Made]], usual: float
) -> list[float | None]:
    """Return the stall of each cause, as this module defines it.

    Args:
        causes: in the order of their begins.
        commits: those of each group, in order of time.
        usual: the usual step; all in the same unit of time.
    """
    begins = [cause.begin for cause in causes]
    stalls: list[float | None] = [None] * len(causes)
    for group, made in commits.items():
        times = [commit.time for commit in made]
        for place, cause in enumerate(causes):
            if group not in cause.groups and _witnessed(made, times, cause):
                stalls[place] = stalls[place] or 0.0
        for (before, attempt, _), (after, same, longer) in pairwise(made):
            due = before + usual + longer
            if after <= due or attempt != same:
                continue
            begun = bisect_right(begins, due)
            earlier = (place for place in range(begun - 1, -1, -1) if causes[place].reach >= before)
            place = next(earlier, begun if begun < bisect_left(begins, after) else -1)
            if place >= 0 and group not in causes[place].groups:
                stalls[place] = max(stalls[place] or 0.0, after - due)
    return stalls


def _witnessed(made: Sequence[Made], times: Sequence[float], cause: Cause) -> bool:
    """Tell whether an attempt of a group committed before the cause's end and again after its begin."""
    around = made[max(0, bisect_right(times, cause.begin) - 1) : bisect_right(times, cause.reach) + 1]
    return any(before.attempt == after.attempt for before, after in pairwise(around))


@dataclass
class _Open(Cause):
    """An incident of which it is still to be found out what it cost; times in Unix microseconds."""

    time_us: int
    name: str
    category: str | None
    fault: RecordedFault | None = None
    ended: list[Attempt] = field(default_factory=list)
    """The attempts that ended of it."""
    dropped: list[FailureSpan] = field(default_factory=list)
    """The failures of it in which no attempt ended."""


@view
def find_incidents(record: RunRecord) -> list[Incident]:
    """Return the incidents of a run in order of time."""
    found = sorted(_open_incidents(record), key=lambda one: one.begin)
    commits = record.commits_by_group
    for one in found:
        one.reach = max(one.reach, _last_with_their_gradients(one, record, commits))
    stalls = survivors_stalls(found, _all_made(record), record.usual_step_us)
    heals = find_heals(record)
    described = [
        _describe(one, commits, heals, None if stall is None else stall / 1e6, record.fold.failures)
        for one, stall in zip(found, stalls, strict=True)
    ]
    return sorted(described, key=lambda incident: incident.time)


def _all_made(record: RunRecord) -> dict[int, list[Made]]:
    """Return the commits of each group in order of time; the last one of usual steps in a row stands for all."""
    found: dict[int, list[Made]] = defaultdict(list)
    for replica, commits in record.commits_by_group.items():
        found[replica] = [_made(event, record) for event in commits]
    for usual in record.of(UsualSteps):
        if usual.rank == 0:
            # None of the steps was late, so neither is the last one after the commit before the first one.
            found[usual.replica].append(Made(usual.time_us, usual.attempt, float("inf")))
    return {replica: sorted(made) for replica, made in found.items()}


def _made(event: StepCommitted, record: RunRecord) -> Made:
    longer = 0.0
    if record.unit.steps > 1:
        own = event.compute_seconds + event.apply_seconds + record.usual_rest_seconds
        longer = max(0.0, 1e6 * own - record.usual_step_us)
    return Made(event.time_us, event.attempt, longer)


def count_faults(record: RunRecord) -> dict[str, int]:
    """Return how many faults of each kind were injected, as `InjectedFaults` counts them, the most frequent first."""
    kinds = Counter(sorted(one.fault for one in find_incidents(record) if one.injected))
    return dict(kinds.most_common())


def find_failures(record: RunRecord) -> list[Failure]:
    """Return the failures of a run in order of time: the one list that every figure about failures is taken from."""
    return sorted((f for one in find_incidents(record) for f in one.failures), key=lambda failure: failure.time)


def find_drains(record: RunRecord) -> list[Drain]:
    """Return the attempts that left because they were asked to, in order of time."""
    return sorted((drain for one in find_incidents(record) for drain in one.drains), key=lambda drain: drain.time)


@view
def find_heals(record: RunRecord) -> list[Heal]:
    """Return the transfers of state to groups, the ranks of a group together, in order of time."""
    ranks: dict[tuple[int, int, int], list[HealFinished]] = defaultdict(list)
    for event in record.of(HealFinished):
        ranks[event.replica, event.attempt, event.from_step].append(event)
    heals = [
        Heal(
            replica,
            attempt,
            time=max(event.time for event in events),
            donor=events[0].donor,
            from_step=step,
            num_bytes=sum(event.bytes for event in events),
            seconds=max(event.seconds for event in events),
            fetch_seconds=max(event.fetch_seconds for event in events),
            replayed=max(event.replayed for event in events),
        )
        for (replica, attempt, step), events in ranks.items()
    ]
    return sorted(heals, key=lambda heal: heal.time)


def _open_incidents(record: RunRecord) -> list[_Open]:
    """Return the faults, those of one shot as one, and the ends of groups without one."""
    found: list[_Open] = []
    for fault in record.faults:
        same = next((one for one in found if _is_of(one.fault, fault)), None)
        if same is None:
            time = fault.time_us
            same = _Open(time, time, set(), time, fault.name, fault.category, fault)
            found.append(same)
        same.groups |= set() if fault.replica is None else {fault.replica}
        same.reach = max(same.reach, fault.undone_us or fault.time_us)
    for attempt in (attempt for group in record.attempts.values() for attempt in group):
        one = None
        if attempt.failed and attempt.exit_us is not None:
            one = next((o for o in found if _is_of(o.fault, attempt.fault)), None)
            if one is None:
                end = attempt.exit_us
                begin = end if attempt.silent_us is None else min(end, attempt.silent_us)
                one = _Open(begin, end, {attempt.replica}, end, attempt.cause, attempt.category)
                found.append(one)
        elif attempt.drained_us is not None:
            one = next((o for o in found[::-1] if _asked_to_leave(o, attempt)), None)
            if one is None:
                left = attempt.drained_us
                one = _Open(left, left, {attempt.replica}, left, "drained", None)
                found.append(one)
        if one is not None:
            one.ended.append(attempt)
            one.reach = max(one.reach, attempt.exit_us or 0)
    for dropout in record.fold.failures:
        if not dropout.died:
            _open_of(dropout, found, record).dropped.append(dropout)
    return found


def _open_of(dropout: FailureSpan, found: list[_Open], record: RunRecord) -> _Open:
    """Return the fault that a failure follows from in which no attempt ended, or else a new incident of its own."""
    time, slot = round(dropout.time * 1e6), dropout.slot
    patience = round((EFFECT_SECONDS if slot is not None else BREAK_SECONDS) * 1e6)
    causes = [one for one in found if one.fault is not None and one.begin <= time <= one.reach + patience]
    if slot is not None:
        causes = [one for one in causes if slot in one.groups]
    if causes:
        return max(causes, key=lambda one: one.begin)
    groups = set() if slot is None else {slot}
    begin = round(min(dropout.since, dropout.time) * 1e6)
    new = _Open(begin, time, groups, time, *_name_dropout(dropout, record))
    found.append(new)
    return new


def _name_dropout(dropout: FailureSpan, record: RunRecord) -> tuple[str, str | None]:
    """Return what was seen of a group that the others went on without although it lived, and its category."""
    if dropout.slot is None:
        return "exchange broke", None
    slot, begin, end = dropout.slot, dropout.since - CLOCK_SECONDS, dropout.time + CLOCK_SECONDS

    def seen(slots: Collection[int], event: Event) -> bool:
        return slot in slots and begin <= event.time <= end

    if any(seen(event.minority, event) for event in record.of(DigestMismatch)):
        return "other digest", "wrong numbers"
    if any(seen(event.slots, event) for event in record.of(LinkDead)):
        return "out of reach", "network"
    if any(seen(event.slots, event) for event in record.of(PeerSilent)):
        return "silent", "network"
    return "dropped out", None


def _is_of(incident: RecordedFault | None, fault: RecordedFault | None) -> bool:
    return incident is not None and fault is not None and incident.number == fault.number


def _asked_to_leave(one: _Open, attempt: Attempt) -> bool:
    """Tell whether an incident is the fault that asked an attempt to leave."""
    left = attempt.drained_us or 0
    asks = one.fault is not None and one.fault.outcome == "left"
    return asks and attempt.replica in one.groups and attempt.begin_us <= one.time_us <= left


def _last_with_their_gradients(one: _Open, record: RunRecord, commits: Commits) -> int:
    """Return when the others last committed a step with the gradients of a group that had ended; 0 if they did not.

    Its part of the step under way may have been complete. They notice its end in the step after that one.
    """
    last = 0
    for attempt in one.ended:
        made = commits.get(attempt.replica, ())
        back = next((event.step for event in made if event.attempt > attempt.number), None)
        start = bisect_left(record.commits, one.begin / 1e6, key=lambda event: event.time)
        for event in record.commits[start:]:
            if back is not None and event.step >= back:
                break
            if event.replica not in one.groups:
                if attempt.replica not in event.participants:
                    break
                last = max(last, event.time_us)
    return last


def _describe(
    one: _Open,
    commits: Commits,
    heals: Sequence[Heal],
    stall: float | None,
    gone: Sequence[FailureSpan],
) -> Incident:
    """Find out when the groups were back, and put it all together."""
    time = one.time_us / 1e6
    returns = {
        replica: _find_return(one, replica, commits.get(replica, ()), heals)
        for replica in {attempt.replica for attempt in one.ended}
    }
    deaths, away = [], {attempt.replica: _away_since(attempt, time, gone) for attempt in one.ended}
    for attempt in one.ended:
        if attempt.failed:
            back, heal = returns[attempt.replica]
            rejoin = None if back is None else max(0.0, back.time - away[attempt.replica])
            cost = (stall, rejoin, heal)
            deaths.append(Failure(attempt.replica, attempt.number, time, attempt.reason, *cost, died=True))
    dropouts = [_describe_dropout(dropout, one, stall, heals) for dropout in one.dropped]
    # Who left because it was asked to was away as well.
    ended = [returns[attempt.replica] for attempt in one.ended]
    backs = [(attempt.replica, returns[attempt.replica][0]) for attempt in one.ended]
    rejoins = [None if back is None else back.time - away[replica] for replica, back in backs]
    rejoins += [dropout.rejoin_seconds for dropout in dropouts if dropout.away]
    known = [rejoin for rejoin in rejoins if rejoin is not None]
    healed = [heal for _, heal in ended] + [dropout.heal for dropout in dropouts]
    last = max((heal for heal in healed if heal is not None), key=lambda heal: heal.time, default=None)
    drains = [
        Drain(attempt.replica, attempt.number, (attempt.drained_us or 0) / 1e6, attempt.in_order, stall)
        for attempt in one.ended
        if attempt.drained_us is not None
    ]
    return Incident(
        time=time,
        fault=one.name,
        injected=one.fault is not None,
        replicas=tuple(sorted(one.groups)),
        rank=None if one.fault is None else one.fault.rank,
        shot=None if one.fault is None else one.fault.shot,
        lighthouse=one.fault is not None and one.fault.lighthouse,
        ended=bool(one.ended),
        stall_seconds=stall,
        rejoin_seconds=max(known) if known and len(known) == len(rejoins) else None,
        heal=last,
        failures=(*deaths, *dropouts),
        drains=tuple(drains),
        category=one.category,
    )


def _away_since(attempt: Attempt, time: float, gone: Sequence[FailureSpan]) -> float:
    """Return since when a group is away whose attempt ended, in Unix seconds.

    One that hung or was frozen first is missing since the others went on without it, and not since its end.
    """
    same = (each for each in gone if each.died and (each.slot, each.attempt) == (attempt.replica, attempt.number))
    return min([time, *(each.time for each in same)])


def _describe_dropout(dropout: FailureSpan, one: _Open, stall: float | None, heals: Sequence[Heal]) -> Failure:
    """Return a failure in which no attempt ended. Its group is away from its last contribution, or from the fault."""
    begin, back = max(dropout.since, one.time_us / 1e6 if one.fault else 0.0), dropout.back
    rejoin = None if back is None or not dropout.away else max(0.0, back - begin)
    until = float("inf") if back is None else back
    healed = [heal for heal in heals if heal.replica == dropout.slot and begin <= heal.time <= until]
    heal = healed[-1] if healed and back is not None else None
    time = one.time_us / 1e6
    return Failure(dropout.slot, dropout.attempt, time, one.name, stall, rejoin, heal, away=dropout.away)


def _find_return(
    one: _Open, replica: int, commits: Sequence[StepCommitted], heals: Sequence[Heal]
) -> tuple[StepCommitted | None, Heal | None]:
    """Return the commit with which a group was back whose attempt ended, and the last heal before it.

    Args:
        commits: of the group, in order of time.
    """
    time = one.time_us / 1e6
    ended = max(attempt.number for attempt in one.ended if attempt.replica == replica)
    later = commits[bisect_right(commits, time, key=lambda event: event.time) :]
    back = next((event for event in later if event.contributed and event.attempt > ended), None)
    if back is None:
        return None, None
    healed = [heal for heal in heals if heal.replica == replica and time <= heal.time <= back.time]
    return back, healed[-1] if healed else None
