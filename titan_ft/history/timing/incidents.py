# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Incidents of a run, and the price of each: the one definition of a stall.

An *incident* is an injected fault, a failure that no fault explains, or a group that left because
somebody asked. One shot that hits several groups is one fault. `titan_ft.history.fold.run` defines
a *failure* for every view of a run. An incident has any number of failures: a fault that only slows
a rank has none, and one shot that kills two groups has two.

An incident *begins* with the fault. Without a fault it begins with the last event of the worker
that fell silent first, or with the event in which the group announces that it leaves. It *reaches*
until the latest of these moments: its groups' workers have exited, the last step that still has the
gradients of these groups is committed, the fault is undone, a lighthouse listens again.

A *stall* belongs to one commit of a group. The commit is *due* one usual step
(`RunRecord.usual_step_us`) after the commit before it in the same attempt. The stall is the time by
which the commit came late. Each stall counts for one incident:

1. the latest incident that began before the commit was due and reached the commit before it;
2. if there is none, the first incident that began while the commit was late;
3. if there is none, no incident.

If that incident hit the group itself, the stall counts for none. The *stall of an incident* is its
longest one: the wait of the survivor that it hit hardest. It is 0 if no group waited. It is unknown
if no other group has two commits in a row, in one attempt, of which the first comes before the end
of the incident's reach and the second after the incident's start.

A round of several steps varies in length by more than a failure costs. If the group itself computed
longer than usual for a round, the round is due later by that much.

The time in which a group starts and heals again is no stall; `titan_ft.history.timing.goodput`
counts it. The report, the forecast and the benchmarks read this module. See docs/observing.md, "The
history"."""

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
from titan_ft.run.events import (
    DigestMismatch,
    Event,
    HealFinished,
    LinkDead,
    PeerSilent,
    StepCommitted,
)

Commits = Mapping[int, Sequence[StepCommitted]]
"""The commits of each group, in order of time."""
EFFECT_SECONDS = 60.0
"""For this long after the end of a fault, a dropout of its group counts as its consequence.

A corrupt state, for example, shows only at the next digest.
"""
BREAK_SECONDS = 15.0
"""For this long after the end of a fault, a broken exchange counts as its consequence."""
CLOCK_SECONDS = 1.0
"""The clocks of two hosts may differ by this much."""


@dataclass(frozen=True)
class RecordedHeal:
    """One transfer of state to a group; the figures of all its ranks together."""

    replica: int
    attempt: int
    time: float
    """Unix seconds at which the last rank finished."""
    donor: int
    from_step: int
    num_bytes: int
    """Bytes of all ranks."""
    seconds: float
    """Seconds of the slowest rank."""
    fetch_seconds: float
    """Seconds of the slowest fetch; the rest of `seconds` is loading and replay."""
    replayed: int
    """Number of queued updates that were applied."""


@dataclass(frozen=True)
class RecordedFailure:
    """A failure (see `titan_ft.history.fold.run`) and its price."""

    replica: int | None
    """None if an exchange broke and all groups took part in its repetition."""
    attempt: int
    time: float
    """Unix seconds of the injected fault that caused it; without a fault, of its first notice."""
    cause: str
    """The exception, the signal or the exit code; for a group that lived, the name of the
    incident.
    """
    stall_seconds: float | None
    """The stall of the incident."""
    rejoin_seconds: float | None
    """Seconds until the group contributed again; None if it never did, or was never away."""
    back: float | None
    """Unix seconds at which the group contributed again; None likewise."""
    heal: RecordedHeal | None
    """The last transfer of state before that contribution; None if there was none."""
    away: bool = True
    """False if an exchange broke and was repeated without any group missing."""
    died: bool = False
    """True if a worker of the group, or its agent, ended without being asked to."""


@dataclass(frozen=True)
class RecordedDrain:
    """One attempt of a group that left because somebody asked."""

    replica: int
    attempt: int
    time: float
    """Unix seconds at which its first rank announced it."""
    in_order: bool
    """True if it finished its step first."""
    stall_seconds: float | None
    """The stall of the incident."""


@dataclass(frozen=True)
class Incident:
    """A fault, a failure or a group that left, and its price. See the head of this module."""

    time: float
    """Unix seconds of the fault; without a fault, of the event that announced the end."""
    fault: str
    """The name of the fault.

    Without a fault: the end of the group (SIGKILL, an exception, drained), or the observation about
    a group that lived (silent, out of reach).
    """
    injected: bool
    replicas: tuple[int, ...]
    """The groups that it hit; empty for the lighthouse and for a fault that hit no group."""
    rank: int | None
    shot: int | None
    ended: bool
    """True if it ended an attempt of a group."""
    stall_seconds: float | None
    rejoin_seconds: float | None
    """Seconds until the last of the groups that were away contributed again.

    None if one of them never did, or if no group was away.
    """
    heal: RecordedHeal | None
    """The last transfer of state to one of the groups within that time; None if there was none."""
    failures: tuple[RecordedFailure, ...] = ()
    drains: tuple[RecordedDrain, ...] = ()
    lighthouse: bool = False
    """True if the fault hit the lighthouse."""
    category: str | None = None
    """The category (`titan_ft.faults.fault.Category`) of the fault or of the observation, if
    any.
    """

    @property
    def is_listed(self) -> bool:
        """True for faults and failures; False if groups only left because somebody asked."""
        return self.injected or bool(self.failures)

    def to_dict(self) -> dict[str, Any]:
        """Return the incident as plain values for JSON.

        Its failures and drains are left out: the report has lists of their own for them.
        """
        values = asdict(self)
        del values["failures"]
        del values["drains"]
        return values


@dataclass
class StallCause:
    """A possible cause of stalls in other groups.

    Attributes:
        begin: its begin.
        reach: stalls that begin later are not its consequence.
        groups: the groups that it hit.
    """

    begin: float
    reach: float
    groups: set[int]


class TimedCommit(NamedTuple):
    """The time of a commit of a group.

    Attributes:
        excess: the time by which the group itself computed longer than a usual step takes; 0 unless
            a commit is a round of several steps. Infinite for an entry that stands for several
            usual steps: such an entry is never late.
    """

    time: float
    attempt: int
    excess: float = 0.0


def attribute_stalls(
    causes: Sequence[StallCause],
    commits: Mapping[int, Sequence[TimedCommit]],
    usual: float,
) -> list[float | None]:
    """Return the stall of each cause by the rules at the head of this module.

    Args:
        causes: in the order of their begins.
        commits: the commits of each group, in order of time.
        usual: the length of a usual step. All times must have the same unit.
    """
    begins = [cause.begin for cause in causes]
    stalls: list[float | None] = [None] * len(causes)
    for group, made in commits.items():
        times = [commit.time for commit in made]
        for place, cause in enumerate(causes):
            if group not in cause.groups and _is_witness(made, times, cause):
                stalls[place] = stalls[place] or 0.0
        for before, after in pairwise(made):
            if before.attempt != after.attempt:
                continue
            due = before.time + usual + after.excess
            if after.time <= due:
                continue
            responsible = _find_responsible(causes, begins, before.time, due, after.time)
            if responsible is None or group in causes[responsible].groups:
                continue
            longest = stalls[responsible] or 0.0
            stalls[responsible] = max(longest, after.time - due)
    return stalls


def _find_responsible(
    causes: Sequence[StallCause],
    begins: Sequence[float],
    before: float,
    due: float,
    after: float,
) -> int | None:
    """Return the index of the cause of one stall; None if no cause explains it.

    Args:
        begins: the begin of each cause, in order.
        before: time of the commit before the late one.
        due: time at which the late commit was due.
        after: time of the late commit.
    """
    num_begun = bisect_right(begins, due)
    for place in range(num_begun - 1, -1, -1):
        if causes[place].reach >= before:
            return place
    num_begun_at_commit = bisect_left(begins, after)
    if num_begun < num_begun_at_commit:
        return num_begun
    return None


def _is_witness(made: Sequence[TimedCommit], times: Sequence[float], cause: StallCause) -> bool:
    """Return whether one attempt of a group committed before the cause's end and after its begin.

    Args:
        times: the times of `made`.
    """
    first = max(0, bisect_right(times, cause.begin) - 1)
    end = bisect_right(times, cause.reach) + 1
    pairs = pairwise(made[first:end])
    return any(before.attempt == after.attempt for before, after in pairs)


@dataclass
class _IncidentDraft(StallCause):
    """An incident whose price is not known yet; times in Unix microseconds."""

    time_us: int
    name: str
    category: str | None
    fault: RecordedFault | None = None
    ended: list[Attempt] = field(default_factory=list)
    """The attempts that it ended."""
    dropouts: list[FailureSpan] = field(default_factory=list)
    """Its failures in which no attempt ended."""

    @property
    def seconds(self) -> float:
        """Its time in Unix seconds."""
        return self.time_us / 1e6


@view
def find_incidents(record: RunRecord) -> list[Incident]:
    """Return the incidents of a run in order of time."""
    drafts = _draft_incidents(record)
    drafts.sort(key=lambda draft: draft.begin)
    commits = record.commits_by_group
    for draft in drafts:
        draft.reach = max(draft.reach, _find_last_shared_commit(draft, record, commits))
    stalls_us = attribute_stalls(drafts, _time_commits(record), record.usual_step_us)
    heals = find_heals(record)
    incidents = []
    for draft, stall_us in zip(drafts, stalls_us, strict=True):
        stall_seconds = None if stall_us is None else stall_us / 1e6
        incidents.append(_price(draft, commits, heals, stall_seconds, record.fold.failures))
    return sorted(incidents, key=lambda incident: incident.time)


def _time_commits(record: RunRecord) -> dict[int, list[TimedCommit]]:
    """Return the times of each group's commits, in order of time.

    Usual steps in a row have one entry, the time of the last.
    """
    found: dict[int, list[TimedCommit]] = defaultdict(list)
    for slot, commits in record.commits_by_group.items():
        for commit in commits:
            timed = TimedCommit(commit.time_us, commit.attempt, _excess_us(commit, record))
            found[slot].append(timed)
    for usual in record.of(UsualSteps):
        if usual.rank == 0:
            # No usual step was late. Without the infinite excess, the many steps since the last
            # entry would look like one long stall.
            timed = TimedCommit(usual.time_us, usual.attempt, excess=float("inf"))
            found[usual.replica].append(timed)
    return {slot: sorted(commits) for slot, commits in found.items()}


def _excess_us(commit: StepCommitted, record: RunRecord) -> float:
    """Return the microseconds by which a group computed longer than usual for a round."""
    if record.unit.steps == 1:
        return 0.0
    own_seconds = commit.compute_seconds + commit.apply_seconds + record.usual_rest_seconds
    return max(0.0, 1e6 * own_seconds - record.usual_step_us)


def count_faults(record: RunRecord) -> dict[str, int]:
    """Return the number of injected faults of each kind, the most frequent first."""
    kinds = [incident.fault for incident in find_incidents(record) if incident.injected]
    return dict(Counter(sorted(kinds)).most_common())


def find_failures(record: RunRecord) -> list[RecordedFailure]:
    """Return the failures of a run in order of time; all figures about failures use this list."""
    failures: list[RecordedFailure] = []
    for incident in find_incidents(record):
        failures += incident.failures
    return sorted(failures, key=lambda failure: failure.time)


def find_drains(record: RunRecord) -> list[RecordedDrain]:
    """Return the attempts that left because somebody asked, in order of time."""
    drains: list[RecordedDrain] = []
    for incident in find_incidents(record):
        drains += incident.drains
    return sorted(drains, key=lambda drain: drain.time)


@view
def find_heals(record: RunRecord) -> list[RecordedHeal]:
    """Return the transfers of state to groups in order of time, one for all ranks of a group."""
    events_of: dict[tuple[int, int, int], list[HealFinished]] = defaultdict(list)
    for event in record.of(HealFinished):
        events_of[event.replica, event.attempt, event.from_step].append(event)
    heals = []
    for (slot, attempt, step), events in events_of.items():
        heal = RecordedHeal(
            slot,
            attempt,
            time=max(event.time for event in events),
            donor=events[0].donor,
            from_step=step,
            num_bytes=sum(event.bytes for event in events),
            seconds=max(event.seconds for event in events),
            fetch_seconds=max(event.fetch_seconds for event in events),
            replayed=max(event.replayed for event in events),
        )
        heals.append(heal)
    return sorted(heals, key=lambda heal: heal.time)


def _draft_incidents(record: RunRecord) -> list[_IncidentDraft]:
    """Return all incidents without their prices: faults first, then ends, then dropouts."""
    draft_of_fault = _draft_faults(record.faults)
    drafts = list(draft_of_fault.values())
    for attempts in record.attempts.values():
        for attempt in attempts:
            _draft_end(attempt, drafts, draft_of_fault)
    for failure in record.fold.failures:
        if not failure.died:
            _draft_dropout(failure, drafts, record)
    return drafts


def _draft_faults(faults: Sequence[RecordedFault]) -> dict[int, _IncidentDraft]:
    """Return the drafts of the injected faults by the fault's number; one shot is one fault."""
    drafts: dict[int, _IncidentDraft] = {}
    for fault in faults:
        draft = drafts.get(fault.number)
        if draft is None:
            draft = _IncidentDraft(
                begin=fault.time_us,
                reach=fault.time_us,
                groups=set(),
                time_us=fault.time_us,
                name=fault.name,
                category=fault.category,
                fault=fault,
            )
            drafts[fault.number] = draft
        if fault.slot is not None:
            draft.groups.add(fault.slot)
        fault_end_us = fault.undone_us or fault.time_us
        draft.reach = max(draft.reach, fault_end_us)
    return drafts


def _draft_end(
    attempt: Attempt,
    drafts: list[_IncidentDraft],
    draft_of_fault: Mapping[int, _IncidentDraft],
) -> None:
    """Add the end of an attempt to the draft of its fault, or else to a new draft."""
    draft: _IncidentDraft | None = None
    if attempt.failed and attempt.exit_us is not None:
        if attempt.fault is not None:
            draft = draft_of_fault.get(attempt.fault.number)
        if draft is None:
            begin_us = attempt.exit_us
            if attempt.silent_us is not None:
                begin_us = min(begin_us, attempt.silent_us)
            draft = _IncidentDraft(
                begin=begin_us,
                reach=attempt.exit_us,
                groups={attempt.slot},
                time_us=attempt.exit_us,
                name=attempt.why_ended,
                category=attempt.category,
            )
            drafts.append(draft)
    elif attempt.drained_us is not None:
        draft = _find_request_to_leave(attempt, attempt.drained_us, draft_of_fault)
        if draft is None:
            draft = _IncidentDraft(
                begin=attempt.drained_us,
                reach=attempt.drained_us,
                groups={attempt.slot},
                time_us=attempt.drained_us,
                name="drained",
                category=None,
            )
            drafts.append(draft)
    if draft is not None:
        draft.ended.append(attempt)
        draft.reach = max(draft.reach, attempt.exit_us or 0)


def _find_request_to_leave(
    attempt: Attempt, left_us: int, draft_of_fault: Mapping[int, _IncidentDraft]
) -> _IncidentDraft | None:
    """Return the latest fault that asked an attempt to leave; None if no fault did."""
    for draft in reversed(list(draft_of_fault.values())):
        if draft.fault is None or draft.fault.outcome != "left":
            continue
        if attempt.slot not in draft.groups:
            continue
        if attempt.begin_us <= draft.time_us <= left_us:
            return draft
    return None


def _draft_dropout(failure: FailureSpan, drafts: list[_IncidentDraft], record: RunRecord) -> None:
    """Add a failure in which no attempt ended to the draft of its fault, or else to a new draft."""
    draft = _find_fault_before(failure, drafts)
    if draft is None:
        time_us = round(failure.time * 1e6)
        name, category = _name_dropout(failure, record)
        draft = _IncidentDraft(
            begin=round(min(failure.since, failure.time) * 1e6),
            reach=time_us,
            groups=set(),
            time_us=time_us,
            name=name,
            category=category,
        )
        if failure.slot is not None:
            draft.groups.add(failure.slot)
        drafts.append(draft)
    draft.dropouts.append(failure)


def _find_fault_before(
    failure: FailureSpan, drafts: Sequence[_IncidentDraft]
) -> _IncidentDraft | None:
    """Return the latest fault that explains a failure in which no attempt ended."""
    time_us = round(failure.time * 1e6)
    effect_seconds = BREAK_SECONDS if failure.slot is None else EFFECT_SECONDS
    effect_us = round(effect_seconds * 1e6)
    latest: _IncidentDraft | None = None
    for draft in drafts:
        if draft.fault is None:
            continue
        is_in_reach = draft.begin <= time_us <= draft.reach + effect_us
        has_hit = failure.slot is None or failure.slot in draft.groups
        if not (is_in_reach and has_hit):
            continue
        if latest is None or draft.begin > latest.begin:
            latest = draft
    return latest


def _name_dropout(failure: FailureSpan, record: RunRecord) -> tuple[str, str | None]:
    """Return the name and the category of a failure in which no attempt ended and no fault is
    known.

    The name is the observation that made the other groups go on without this one.
    """
    if failure.slot is None:
        return "exchange broke", None
    slot = failure.slot
    begin = failure.since - CLOCK_SECONDS
    end = failure.time + CLOCK_SECONDS

    def names_group(slots: Collection[int], event: Event) -> bool:
        return slot in slots and begin <= event.time <= end

    for mismatch in record.of(DigestMismatch):
        if names_group(mismatch.minority, mismatch):
            return "other digest", "wrong numbers"
    for dead_link in record.of(LinkDead):
        if names_group(dead_link.slots, dead_link):
            return "out of reach", "network"
    for silence in record.of(PeerSilent):
        if names_group(silence.slots, silence):
            return "silent", "network"
    return "dropped out", None


def _find_last_shared_commit(draft: _IncidentDraft, record: RunRecord, commits: Commits) -> int:
    """Return when another group last committed a step with gradients of a group that had ended.

    The ended group's part of the step under way may have been complete. Then the others commit that
    step in time, and notice the end only in the next one.

    Returns:
        Unix microseconds; 0 if there is no such commit.
    """
    last_us = 0
    start = bisect_left(record.commits, draft.begin / 1e6, key=lambda event: event.time)
    for attempt in draft.ended:
        return_step = _find_first_step_after(attempt, commits)
        for event in record.commits[start:]:
            if return_step is not None and event.step >= return_step:
                break
            if event.replica in draft.groups:
                continue
            if attempt.slot not in event.participants:
                break
            last_us = max(last_us, event.time_us)
    return last_us


def _find_first_step_after(attempt: Attempt, commits: Commits) -> int | None:
    """Return the first step that the group committed in a later attempt."""
    for commit in commits.get(attempt.slot, ()):
        if commit.attempt > attempt.number:
            return commit.step
    return None


@dataclass(frozen=True)
class _Absence:
    """The time for which a group was away after an incident had ended its attempt.

    Attributes:
        since: Unix seconds.
        back: Unix seconds of its next contribution; None if there was none.
        heal: the last transfer of state to the group before that contribution.
    """

    since: float
    back: float | None = None
    heal: RecordedHeal | None = None

    @property
    def seconds(self) -> float | None:
        if self.back is None:
            return None
        return self.back - self.since


def _price(
    draft: _IncidentDraft,
    commits: Commits,
    heals: Sequence[RecordedHeal],
    stall_seconds: float | None,
    failures: Sequence[FailureSpan],
) -> Incident:
    """Return the incident with the times for which its groups were away.

    Args:
        failures: all failures of the run.
    """
    absences: dict[int, _Absence] = {}
    for attempt in draft.ended:
        since = _find_absent_since(attempt, draft.seconds, failures)
        absences[attempt.slot] = _find_absence(draft, attempt.slot, since, commits, heals)
    deaths = []
    drains = []
    away_seconds: list[float | None] = []
    last_heals: list[RecordedHeal | None] = []
    for attempt in draft.ended:
        absence = absences[attempt.slot]
        away_seconds.append(absence.seconds)
        last_heals.append(absence.heal)
        if attempt.failed:
            death = RecordedFailure(
                replica=attempt.slot,
                attempt=attempt.number,
                time=draft.seconds,
                cause=attempt.cause,
                stall_seconds=stall_seconds,
                rejoin_seconds=absence.seconds,
                back=absence.back,
                heal=absence.heal,
                died=True,
            )
            deaths.append(death)
        if attempt.drained_us is not None:
            drain = RecordedDrain(
                replica=attempt.slot,
                attempt=attempt.number,
                time=attempt.drained_us / 1e6,
                in_order=attempt.in_order,
                stall_seconds=stall_seconds,
            )
            drains.append(drain)
    dropouts = [_price_dropout(failure, draft, stall_seconds, heals) for failure in draft.dropouts]
    for dropout in dropouts:
        last_heals.append(dropout.heal)
        if dropout.away:
            away_seconds.append(dropout.rejoin_seconds)
    fault = draft.fault
    return Incident(
        time=draft.seconds,
        fault=draft.name,
        injected=fault is not None,
        replicas=tuple(sorted(draft.groups)),
        rank=None if fault is None else fault.rank,
        shot=None if fault is None else fault.shot,
        lighthouse=fault is not None and fault.lighthouse,
        ended=bool(draft.ended),
        stall_seconds=stall_seconds,
        rejoin_seconds=_longest_if_all_known(away_seconds),
        heal=_latest(last_heals),
        failures=(*deaths, *dropouts),
        drains=tuple(drains),
        category=draft.category,
    )


def _longest_if_all_known(all_seconds: Sequence[float | None]) -> float | None:
    """Return the longest time; None if there is none, or if one of them is unknown."""
    longest: float | None = None
    for seconds in all_seconds:
        if seconds is None:
            return None
        if longest is None or seconds > longest:
            longest = seconds
    return longest


def _latest(heals: Sequence[RecordedHeal | None]) -> RecordedHeal | None:
    latest: RecordedHeal | None = None
    for heal in heals:
        if heal is None:
            continue
        if latest is None or heal.time > latest.time:
            latest = heal
    return latest


def _find_absent_since(attempt: Attempt, time: float, failures: Sequence[FailureSpan]) -> float:
    """Return since when the group of an ended attempt was away, in Unix seconds.

    A group that hung or was frozen first is away since the others went on without it, and not only
    since its end.

    Args:
        time: Unix seconds of the incident.
    """
    since = time
    for failure in failures:
        is_of_attempt = (failure.slot, failure.attempt) == (attempt.slot, attempt.number)
        if failure.died and is_of_attempt:
            since = min(since, failure.time)
    return since


def _find_absence(
    draft: _IncidentDraft,
    slot: int,
    since: float,
    commits: Commits,
    heals: Sequence[RecordedHeal],
) -> _Absence:
    """Return the absence of a group whose attempt ended."""
    ended_number = max(attempt.number for attempt in draft.ended if attempt.slot == slot)
    own_commits = commits.get(slot, ())
    start = bisect_right(own_commits, draft.seconds, key=lambda event: event.time)
    for commit in own_commits[start:]:
        if commit.contributed and commit.attempt > ended_number:
            heal = _find_last_heal(heals, slot, draft.seconds, commit.time)
            return _Absence(since, commit.time, heal)
    return _Absence(since)


def _find_last_heal(
    heals: Sequence[RecordedHeal], slot: int | None, begin: float, end: float
) -> RecordedHeal | None:
    """Return the last transfer of state to a group within a time; `heals` are in order of time."""
    for heal in reversed(heals):
        if heal.replica == slot and begin <= heal.time <= end:
            return heal
    return None


def _price_dropout(
    failure: FailureSpan,
    draft: _IncidentDraft,
    stall_seconds: float | None,
    heals: Sequence[RecordedHeal],
) -> RecordedFailure:
    """Return a failure in which no attempt ended.

    Its group is away since its last contribution, or since the fault if that was later.
    """
    begin = max(failure.since, 0.0)
    if draft.fault is not None:
        begin = max(begin, draft.seconds)
    rejoin_seconds = None
    back = None
    heal = None
    if failure.back is not None:
        heal = _find_last_heal(heals, failure.slot, begin, failure.back)
        if failure.away:
            rejoin_seconds = max(0.0, failure.back - begin)
            back = failure.back
    return RecordedFailure(
        replica=failure.slot,
        attempt=failure.attempt,
        time=draft.seconds,
        cause=draft.name,
        stall_seconds=stall_seconds,
        rejoin_seconds=rejoin_seconds,
        back=back,
        heal=heal,
        away=failure.away,
    )
