# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Promise 2: groups that made the same state hold the same bytes, or the difference was healed."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from titan_ft.history.checks.foundation import object_to_absence
from titan_ft.history.digests import DigestComparison, compare_digests
from titan_ft.history.judgement import Judgement, count
from titan_ft.history.record.run_record import ProcessHistory, RunRecord
from titan_ft.history.record.usual_steps import UsualSteps
from titan_ft.run.events import (
    DigestMismatch,
    Drained,
    Event,
    HealFinished,
    LaunchStarted,
    StepCommitted,
    TrainingFinished,
)

_StateOfRank = tuple[str, int]
"""The lineage of a state and a rank: all groups must have the same digest of it."""


class _WrittenDigest(NamedTuple):
    """A digest, the process that wrote it, and the event that has it."""

    process: ProcessHistory
    event: Event
    digest: str


def check_digests(record: RunRecord, found: Judgement) -> None:
    """Compare the digests of each state, rank by rank.

    A `digest_mismatch` must name each group whose digest differs. This group must heal or end
    before it contributes again. A group that died or left before the next exchange was never named;
    it did no harm if other groups stayed.
    """
    written = _collect_digests(record)
    values = []
    for key, digests in written.items():
        values += [(key, each.process.slot, each.digest) for each in digests]
    compared = compare_digests(values, record.num_usual_comparisons)
    for lineage, rank in sorted(compared.differing):
        # A state that only the ends of processes name has no commit.
        step = 0
        if lineage in record.commits_by_lineage:
            step = record.commits_by_lineage[lineage][0].step
        _judge_difference(record, written[lineage, rank], step, found)
    finish = _compare_ends(record, found)
    if compared.differing:
        num_differing = f"{len(compared.differing)} of {compared.num_compared}"
        found.statement = f"{num_differing} comparisons of digests differ{finish}"
    else:
        digests_of_states = _count_equal(record, written, compared)
        found.statement = f"{digests_of_states} agree between groups, rank by rank{finish}"
    if compared.num_compared:
        return
    if record.is_live:
        # The first digest comes after 50 steps by default. A sound run must not be "unknown" until
        # then.
        found.asked = False
        found.statement = "no digest of two groups yet (fault_tolerance.digest_every)"
    else:
        text = "no two groups have a digest of the same state (fault_tolerance.digest_every)"
        found.unknown.append(text)


def _collect_digests(record: RunRecord) -> dict[_StateOfRank, list[_WrittenDigest]]:
    found: dict[_StateOfRank, list[_WrittenDigest]] = defaultdict(list)
    for process in record.processes:
        for event in process.events:
            if not isinstance(event, (StepCommitted, TrainingFinished, Drained)):
                continue
            if event.digest and event.lineage:
                written = _WrittenDigest(process, event, event.digest)
                found[event.lineage, process.rank].append(written)
    return found


def _count_equal(
    record: RunRecord,
    written: dict[_StateOfRank, list[_WrittenDigest]],
    compared: DigestComparison[_StateOfRank],
) -> str:
    """Return in words how many digests of how many states were compared, usual steps included."""
    num_digests = sum(len(written[key]) for key in compared.compared)
    num_digests += sum(event.num_digests for event in record.of(UsualSteps))
    num_states = len({lineage for lineage, _ in compared.compared})
    for commit in record.usual_commits:
        if commit.digest:
            num_states += 1
    return f"{count(num_digests, 'digest')} of {count(num_states, 'state')}"


def _judge_difference(
    record: RunRecord, written: list[_WrittenDigest], step: int, found: Judgement
) -> None:
    """Object to different digests of one state.

    The difference is no offence if the groups were named and healed, or were gone at once.

    Args:
        written: the digests of one rank, of all groups.
    """
    named: set[int] = set()
    for mismatch in record.of(DigestMismatch):
        if mismatch.step == step:
            named.update(mismatch.minority)
    healed_or_ended: set[int] = set()
    gone: list[_WrittenDigest] = []
    stayed: list[_WrittenDigest] = []
    for each in written:
        if each.process.slot in named:
            _object_to_contribution(record, each, step, found)
            healed_or_ended.add(each.process.slot)
        elif _was_gone(each):
            gone.append(each)
        else:
            stayed.append(each)
    if not stayed:
        # All groups are gone: compare the groups that are gone.
        stayed = gone
        gone = []
    first_with: dict[str, ProcessHistory] = {}
    for each in stayed:
        first_with.setdefault(each.digest, each.process)
    if len(first_with) > 1:
        values = "; ".join(f"{process.name}: {digest}" for digest, process in first_with.items())
        text = f"digests of one state differ and no digest_mismatch names the group ({values})"
        object_to_absence(record, found, text, written[0].event)
        return
    for each in gone:
        if each.digest not in first_with:
            healed_or_ended.add(each.process.slot)
    if healed_or_ended:
        groups = ", ".join(str(slot) for slot in sorted(healed_or_ended))
        note = f"the digest of group {groups} differed; it was named, and healed or ended"
        found.notes.append(f"{record.unit.noun} {step}: {note}")


def _object_to_contribution(
    record: RunRecord, written: _WrittenDigest, step: int, found: Judgement
) -> None:
    """Object to a named group that contributed again before it healed or ended."""
    for event in _events_after(written):
        if isinstance(event, HealFinished):
            return
        if isinstance(event, StepCommitted) and not event.contributed:
            continue  # a commit without this group's gradient spreads no wrong bytes
        reason = f"its digest at {record.unit.noun} {step} was found to differ"
        text = f"contributed again without a heal, though {reason}"
        object_to_absence(record, found, text, event)
        return


def _was_gone(written: _WrittenDigest) -> bool:
    """Return whether the process ended before it did anything else with its state."""
    if isinstance(written.event, TrainingFinished) or written.process.exit is None:
        return False
    return not _events_after(written)


def _events_after(
    written: _WrittenDigest,
) -> list[StepCommitted | HealFinished | TrainingFinished]:
    """Return the commits, the heals and the finish of the process after it wrote a digest."""
    found: list[StepCommitted | HealFinished | TrainingFinished] = []
    is_after = False
    for event in written.process.events:
        if is_after and isinstance(event, StepCommitted | HealFinished | TrainingFinished):
            found.append(event)
        if event is written.event:
            is_after = True
    return found


def _compare_ends(record: RunRecord, found: Judgement) -> str:
    """Check that the groups finished with one state; return a clause about this state."""
    # The ends of an earlier launch are of another state.
    since = max((event.time for event in record.of(LaunchStarted)), default=0.0)
    last_of: dict[tuple[int, int], TrainingFinished] = {}
    for event in record.of(TrainingFinished):
        if event.time >= since:
            last_of[event.replica, event.rank] = event
    end_of = {event.lineage: event for event in last_of.values()}
    if len(end_of) > 1:
        noun = record.unit.noun
        states = [f"{noun} {event.step} ({lineage})" for lineage, event in end_of.items()]
        text = f"groups finished with different states: {', '.join(states)}"
        found.object_to(text, list(last_of.values())[-1])
    if len(end_of) != 1:
        return ""
    num_groups = len({slot for slot, _ in last_of})
    return f"; {count(num_groups, 'group')} finished, with one state"
