# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Incidents of a run, and the stall that each one caused: the one definition of a stall.

A run has several replica groups that commit each optimizer step together. When one group is hit,
the other groups wait for a while. This module finds what hit the groups, and charges each wait to
it. Terms:

- An *incident* is an injected fault, a failure without a known fault, or a group that left because
  somebody asked. `titan_ft.history.fold.run` defines a *failure* for every view of a run. A fault
  that only slows a rank causes no failure. A fault that kills two groups causes two failures, and
  is one incident.
- An incident *begins* with the fault. Without a fault it begins with the last event of the worker
  that fell silent first, or with the event in which the group announces that it leaves.
- A commit of a group is *due* one usual step (`RunRecord.usual_step_us`) after the commit before it
  in the same attempt. An attempt is one start of a group's processes.
- A *stall* is the time by which one commit of one group came late.

An incident may delay a commit long after its begin: a fault may last, and a new lighthouse may take
a while. So each incident has a *reach*, after which it can delay no commit. The reach is the latest
of these moments: the workers of its groups have exited; the last step that still has the gradients
of these groups is committed; the fault is undone; a lighthouse listens again.

`find_incidents` works in this order:

1. Draft an incident for each fault, each end of an attempt, and each failure of a living group.
2. Charge each stall to one incident (`attribute_stalls`). This is the latest incident that began
   before the commit was due and whose reach is not before the previous commit. If there is none, it
   is the first incident that began while the commit was late. If there is none either, the stall is
   charged to nobody. A stall of a group that the incident itself hit is not charged: the group did
   not wait for others.
3. Take the longest stall of each incident: the wait of the survivor that it hit hardest. It is 0 if
   no group waited, and None (unknown) if no other group committed before and after the incident.
4. Add for how long the groups of the incident were away.

With a semi-synchronous method a commit is a round of several local steps, and the length of rounds
varies by more than a failure costs. If the group itself computed longer than usual for a round, the
commit is due later by the same time.

The time in which a group starts and heals again is no stall; `titan_ft.history.timing.goodput`
counts it. The report, the forecast and the benchmarks call this module, after the run or while it
goes on. See docs/observing.md, "The history".
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
from titan_ft.history.record.run_record import RunRecord, once_per_record
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
LATE_DROPOUT_SECONDS = 60.0
"""A group that drops out alive this soon after the end of a fault does so because of the fault.

A corrupt state, for example, shows only at the next digest.
"""
LATE_BREAK_SECONDS = 15.0
"""An exchange that breaks this soon after the end of a fault breaks because of the fault."""
MAX_CLOCK_DIFFERENCE_SECONDS = 1.0
"""The clocks of two hosts may differ by this much."""


@dataclass(frozen=True)
class RecordedHeal:
    """One transfer of state to a group; the figures of all its ranks together."""

    replica: int
    """Slot of the group that received the state."""
    attempt: int
    time: float
    """Unix seconds at which the last rank finished."""
    donor: int
    """Slot of the group that sent the state."""
    from_step: int
    """The step after which the donor copied the state."""
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
    """A failure (see `titan_ft.history.fold.run`) and its cost."""

    replica: int | None
    """Slot of the group that failed; None if an exchange broke and all groups took part in its
    repetition.
    """
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
    """Unix seconds at which the group contributed again; None if `rejoin_seconds` is None."""
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
    """A fault, a failure or a group that left, and its cost. See the head of this module."""

    time: float
    """Unix seconds of the fault; without a fault, of the event that reports the failure or the
    request to leave.
    """
    fault: str
    """The name of the fault.

    Without a fault: the end of the group (SIGKILL, an exception, drained), or the observation about
    a group that lived (silent, out of reach).
    """
    injected: bool
    replicas: tuple[int, ...]
    """The groups that it hit; empty for the lighthouse and for a fault that hit no group."""
    rank: int | None
    """The rank that the fault hit; None if it hit a whole group, or without a fault."""
    shot: int | None
    """Number of the injection in the chaos plan; None without a plan, or without a fault."""
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
    """A possible cause of stalls in other groups. All times are in one unit, such as microseconds.

    Attributes:
        begin: a commit that came before cannot be late because of this cause.
        reach: a commit whose previous commit came later cannot be late because of this cause.
        groups: slots of the groups that the cause hit.
    """

    begin: float
    reach: float
    groups: set[int]


class TimedCommit(NamedTuple):
    """The time of one commit of a group, or of the last one of several usual steps.

    Attributes:
        allowance: the commit is due later by this time. For a round of several steps it is the time
            by which the group itself computed longer than usual. Infinite for an entry that stands
            for several usual steps: such an entry is never late.
    """

    time: float
    attempt: int
    allowance: float = 0.0


def attribute_stalls(
    causes: Sequence[StallCause],
    commits: Mapping[int, Sequence[TimedCommit]],
    usual_step: float,
) -> list[float | None]:
    """Return the longest stall of each cause; see steps 2 and 3 at the head of this module.

    Args:
        causes: in the order of their begins.
        commits: the commits of each group, in order of time.
        usual_step: the length of a usual step, in the unit of all times.
    """
    begins = [cause.begin for cause in causes]
    stalls: list[float | None] = [None] * len(causes)
    for slot, commits_of_group in commits.items():
        for index, cause in enumerate(causes):
            if slot in cause.groups:
                continue
            if _has_commits_around(cause, commits_of_group):
                _raise_to(stalls, index, 0.0)
        for before, commit in pairwise(commits_of_group):
            if before.attempt != commit.attempt:
                continue
            due = before.time + usual_step + commit.allowance
            if commit.time <= due:
                continue
            charged = _find_charged_cause(causes, begins, before.time, due, commit.time)
            if charged is None or slot in causes[charged].groups:
                continue
            _raise_to(stalls, charged, commit.time - due)
    return stalls


def _raise_to(stalls: list[float | None], index: int, stall: float) -> None:
    """Replace the longest stall of a cause by `stall` if that is longer, or the first one known."""
    known = stalls[index]
    if known is None or stall > known:
        stalls[index] = stall


def _find_charged_cause(
    causes: Sequence[StallCause],
    begins: Sequence[float],
    before: float,
    due: float,
    late: float,
) -> int | None:
    """Return the index of the cause of one stall; None if no cause explains it.

    Args:
        begins: the begin of each cause, in order.
        before: time of the commit before the late one.
        due: time at which the late commit was due.
        late: time of the late commit.
    """
    # The causes 0 to num_begun - 1 began before the commit was due.
    num_begun = bisect_right(begins, due)
    for index in reversed(range(num_begun)):
        if causes[index].reach >= before:
            return index
    first_begun_after_due = num_begun
    num_begun_before_commit = bisect_left(begins, late)
    if first_begun_after_due < num_begun_before_commit:
        return first_begun_after_due
    return None


def _has_commits_around(cause: StallCause, commits: Sequence[TimedCommit]) -> bool:
    """Return whether two commits in a row show if a group waited because of a cause.

    The first comes before the cause's reach and the second after its begin, both in one attempt.
    """
    num_before_begin = bisect_right(commits, cause.begin, key=lambda commit: commit.time)
    num_before_reach = bisect_right(commits, cause.reach, key=lambda commit: commit.time)
    last_before_begin = max(0, num_before_begin - 1)
    first_after_reach = num_before_reach
    for before, after in pairwise(commits[last_before_begin : first_after_reach + 1]):
        if before.attempt == after.attempt:
            return True
    return False


@dataclass
class _IncidentDraft(StallCause):
    """An incident whose cost is not known yet. All times are Unix microseconds."""

    time_us: int
    name: str
    category: str | None
    fault: RecordedFault | None = None
    """The first event of the injected fault; None without a fault."""
    ended_attempts: list[Attempt] = field(default_factory=list)
    """The attempts that the incident ended."""
    dropouts: list[FailureSpan] = field(default_factory=list)
    """The failures that ended no attempt: a group lived, and the others went on without it."""

    @property
    def seconds(self) -> float:
        """Its time in Unix seconds."""
        return self.time_us / 1e6


@once_per_record
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
        stall_seconds = None
        if stall_us is not None:
            stall_seconds = stall_us / 1e6
        incident = _finish_incident(draft, commits, heals, stall_seconds, record.fold.failures)
        incidents.append(incident)
    # The drafts are in the order of their begins; a failure may begin before the time of its
    # report.
    return sorted(incidents, key=lambda incident: incident.time)


def _time_commits(record: RunRecord) -> dict[int, list[TimedCommit]]:
    """Return the times of each group's commits in Unix microseconds, in order.

    For a long run the record has no commits of usual steps, but one `UsualSteps` event for many of
    them. Such an event becomes one entry with the time of the last commit.
    """
    found: dict[int, list[TimedCommit]] = defaultdict(list)
    for slot, commits in record.commits_by_group.items():
        for commit in commits:
            timed = TimedCommit(commit.time_us, commit.attempt, _find_allowance_us(commit, record))
            found[slot].append(timed)
    for usual in record.of(UsualSteps):
        if usual.rank == 0:
            # No usual step was late. Without the infinite allowance, the many steps since the last
            # entry would look like one long stall.
            timed = TimedCommit(usual.time_us, usual.attempt, allowance=float("inf"))
            found[usual.replica].append(timed)
    return {slot: sorted(commits) for slot, commits in found.items()}


def _find_allowance_us(commit: StepCommitted, record: RunRecord) -> float:
    """Return the microseconds by which a group computed longer than usual for a round; 0 for a
    step.

    A round in which nobody waited takes its computing and a usual exchange.
    """
    if record.unit.steps == 1:
        return 0.0
    computing_seconds = commit.compute_seconds + commit.apply_seconds
    sound_round_us = 1e6 * (computing_seconds + record.usual_non_compute_seconds)
    return max(0.0, sound_round_us - record.usual_step_us)


def count_faults(record: RunRecord) -> dict[str, int]:
    """Return the number of injected faults of each kind, the most frequent first, then by name."""
    kinds = [incident.fault for incident in find_incidents(record) if incident.injected]
    # `most_common` keeps kinds with equal numbers in the order in which it counted them.
    kinds.sort()
    return dict(Counter(kinds).most_common())


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


@once_per_record
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
    """Return all incidents without their costs: faults first, then ends, then dropouts.

    A later one is added to the draft of a fault if the fault explains it.
    """
    draft_of_fault = _draft_faults(record.faults)
    drafts = list(draft_of_fault.values())
    for attempts in record.attempts.values():
        for attempt in attempts:
            _draft_end(attempt, drafts, draft_of_fault)
    for failure in record.fold.failures:
        # The loop before has drafted the failures in which an attempt died.
        if not failure.died:
            _draft_dropout(failure, drafts, record)
    return drafts


def _draft_faults(faults: Sequence[RecordedFault]) -> dict[int, _IncidentDraft]:
    """Return one draft for each injected fault, by the fault's number.

    One injection of a chaos plan may hit several groups. It has an event for each of them, and all
    these events have the same number.
    """
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
    """Add an attempt that failed or left to the draft of its fault, or else to a new draft."""
    draft: _IncidentDraft | None = None
    if attempt.failed and attempt.exit_us is not None:
        if attempt.fault is not None:
            draft = draft_of_fault.get(attempt.fault.number)
        if draft is None:
            draft = _draft_unexplained_failure(attempt, attempt.exit_us)
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
    if draft is None:
        return  # the attempt goes on, finished, or was stopped with the run
    draft.ended_attempts.append(attempt)
    if attempt.exit_us is not None:
        draft.reach = max(draft.reach, attempt.exit_us)


def _draft_unexplained_failure(attempt: Attempt, exit_us: int) -> _IncidentDraft:
    """Return the draft of an attempt that failed without a known fault."""
    begin_us = exit_us
    if attempt.silent_us is not None:
        begin_us = min(begin_us, attempt.silent_us)
    return _IncidentDraft(
        begin=begin_us,
        reach=exit_us,
        groups={attempt.slot},
        time_us=exit_us,
        name=attempt.why_ended,
        category=attempt.category,
    )


def _find_request_to_leave(
    attempt: Attempt, left_us: int, draft_of_fault: Mapping[int, _IncidentDraft]
) -> _IncidentDraft | None:
    """Return the latest fault that asked an attempt to leave; None if no fault did."""
    for draft in reversed(list(draft_of_fault.values())):
        asks_to_leave = draft.fault is not None and draft.fault.outcome == "left"
        if not asks_to_leave or attempt.slot not in draft.groups:
            continue
        if attempt.begin_us <= draft.time_us <= left_us:
            return draft
    return None


def _draft_dropout(failure: FailureSpan, drafts: list[_IncidentDraft], record: RunRecord) -> None:
    """Add a failure that ended no attempt to the draft of its fault, or else to a new draft."""
    draft = _find_fault_that_explains(failure, drafts)
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


def _find_fault_that_explains(
    failure: FailureSpan, drafts: Sequence[_IncidentDraft]
) -> _IncidentDraft | None:
    """Return the draft of the latest fault that may have caused a failure; None if none may."""
    time_us = round(failure.time * 1e6)
    is_broken_exchange = failure.slot is None
    late_seconds = LATE_DROPOUT_SECONDS
    if is_broken_exchange:
        late_seconds = LATE_BREAK_SECONDS
    late_us = round(late_seconds * 1e6)
    latest: _IncidentDraft | None = None
    for draft in drafts:
        if draft.fault is None:
            continue
        if not draft.begin <= time_us <= draft.reach + late_us:
            continue
        # An exchange has all groups in it, so a fault of any of them may have broken it.
        if not is_broken_exchange and failure.slot not in draft.groups:
            continue
        if latest is None or draft.begin > latest.begin:
            latest = draft
    return latest


def _name_dropout(failure: FailureSpan, record: RunRecord) -> tuple[str, str | None]:
    """Return the name and the category of a failure that ended no attempt and has no known fault.

    The name is the observation for which the other groups went on without this one.
    """
    if failure.slot is None:
        return "exchange broke", None
    slot = failure.slot
    begin = failure.since - MAX_CLOCK_DIFFERENCE_SECONDS
    end = failure.time + MAX_CLOCK_DIFFERENCE_SECONDS

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

    The ended group may have sent all of its gradients for the step under way. Then the others
    commit this step in time, and notice the end only in the next one.

    Returns:
        Unix microseconds; 0 if there is no such commit.
    """
    last_us = 0
    start = bisect_left(record.commits, draft.begin / 1e6, key=lambda event: event.time)
    for attempt in draft.ended_attempts:
        return_step = _find_step_of_return(attempt, commits)
        for event in record.commits[start:]:
            if return_step is not None and event.step >= return_step:
                break  # from here on the gradients are those of the group's next attempt
            if event.replica in draft.groups:
                continue
            if attempt.slot not in event.participants:
                break  # the others have gone on without the group
            last_us = max(last_us, event.time_us)
    return last_us


def _find_step_of_return(attempt: Attempt, commits: Commits) -> int | None:
    """Return the first step that the group of an ended attempt committed in a later attempt."""
    for commit in commits.get(attempt.slot, ()):
        if commit.attempt > attempt.number:
            return commit.step
    return None


@dataclass(frozen=True)
class _Absence:
    """The time for which a group was away after an incident had ended its attempt.

    Attributes:
        since: Unix seconds.
        back: Unix seconds of the group's next contribution; None if there was none.
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


def _finish_incident(
    draft: _IncidentDraft,
    commits: Commits,
    heals: Sequence[RecordedHeal],
    stall_seconds: float | None,
    failures: Sequence[FailureSpan],
) -> Incident:
    """Return the incident with its stall and the times for which its groups were away.

    Args:
        failures: all failures of the run; they show since when a group was away that hung first.
    """
    recorded_failures: list[RecordedFailure] = []
    drains: list[RecordedDrain] = []
    away_seconds: list[float | None] = []
    last_heals: list[RecordedHeal | None] = []
    absences = _find_absences(draft, commits, heals, failures)
    for attempt in draft.ended_attempts:
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
            recorded_failures.append(death)
        if attempt.drained_us is not None:
            drain = RecordedDrain(
                replica=attempt.slot,
                attempt=attempt.number,
                time=attempt.drained_us / 1e6,
                in_order=attempt.in_order,
                stall_seconds=stall_seconds,
            )
            drains.append(drain)
    for dropout in draft.dropouts:
        failure = _finish_dropout(dropout, draft, stall_seconds, heals)
        recorded_failures.append(failure)
        last_heals.append(failure.heal)
        if failure.away:
            away_seconds.append(failure.rejoin_seconds)
    fault = draft.fault
    return Incident(
        time=draft.seconds,
        fault=draft.name,
        injected=fault is not None,
        replicas=tuple(sorted(draft.groups)),
        rank=None if fault is None else fault.rank,
        shot=None if fault is None else fault.shot,
        lighthouse=fault is not None and fault.lighthouse,
        ended=bool(draft.ended_attempts),
        stall_seconds=stall_seconds,
        rejoin_seconds=_longest_if_all_known(away_seconds),
        heal=_latest(last_heals),
        failures=tuple(recorded_failures),
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


def _find_absences(
    draft: _IncidentDraft,
    commits: Commits,
    heals: Sequence[RecordedHeal],
    failures: Sequence[FailureSpan],
) -> dict[int, _Absence]:
    """Return the absence of each group of which an incident ended attempts, by slot."""
    last_attempts: dict[int, Attempt] = {}
    for attempt in draft.ended_attempts:
        known = last_attempts.get(attempt.slot)
        if known is None or attempt.number > known.number:
            last_attempts[attempt.slot] = attempt
    absences: dict[int, _Absence] = {}
    for attempt in draft.ended_attempts:
        since = _find_absent_since(attempt, draft.seconds, failures)
        last_attempt = last_attempts[attempt.slot]
        absences[attempt.slot] = _find_absence(draft, last_attempt, since, commits, heals)
    return absences


def _find_absent_since(attempt: Attempt, time: float, failures: Sequence[FailureSpan]) -> float:
    """Return since when the group of an ended attempt was away, in Unix seconds.

    A group that hung or was frozen first is away since the others went on without it, and not only
    since its end.

    Args:
        time: Unix seconds of the incident.
    """
    since = time
    for failure in failures:
        is_of_attempt = failure.slot == attempt.slot and failure.attempt == attempt.number
        if failure.died and is_of_attempt:
            since = min(since, failure.time)
    return since


def _find_absence(
    draft: _IncidentDraft,
    last_attempt: Attempt,
    since: float,
    commits: Commits,
    heals: Sequence[RecordedHeal],
) -> _Absence:
    """Return the absence of a group, from `since` to its next contribution.

    Args:
        last_attempt: the last attempt of the group that the incident ended.
    """
    slot = last_attempt.slot
    own_commits = commits.get(slot, ())
    start = bisect_right(own_commits, draft.seconds, key=lambda event: event.time)
    for commit in own_commits[start:]:
        if commit.contributed and commit.attempt > last_attempt.number:
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


def _finish_dropout(
    failure: FailureSpan,
    draft: _IncidentDraft,
    stall_seconds: float | None,
    heals: Sequence[RecordedHeal],
) -> RecordedFailure:
    """Return a failure that ended no attempt.

    Its group is away since its last contribution, or since the fault if that was later.
    """
    begin = failure.since
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
