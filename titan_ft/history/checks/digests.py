# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Promise 2: groups that made the same state hold the same bytes, or the difference was named and mended."""

from __future__ import annotations

from collections import defaultdict
from itertools import dropwhile

from titan_ft.history.checks.foundation import object_to_absence
from titan_ft.history.digests import compare_digests
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

Word = tuple[ProcessHistory, Event, str]
"""A process, the event in which it wrote a digest, and the digest."""


def check_digests(record: RunRecord, found: Judgement) -> None:
    """Compare the digests of each state, rank by rank.

    A group whose digest differs must be named by a `digest_mismatch`, and heal or end before it contributes again. One
    that died or left before the next exchange, in which it would have been named, harmed nobody, if others stayed.
    """
    table: dict[tuple[str, int], list[Word]] = defaultdict(list)
    for process in record.processes:
        for event in process.events:
            if isinstance(event, (StepCommitted, TrainingFinished, Drained)) and event.digest and event.lineage:
                table[event.lineage, process.rank].append((process, event, event.digest))
    told = ((key, process.replica, digest) for key, words in table.items() for process, _, digest in words)
    compared = compare_digests(told, record.num_usual_comparisons)
    for lineage, rank in sorted(compared.differing):
        step = record.commits_of[lineage][0].step if lineage in record.commits_of else 0
        _judge_difference(record, table[lineage, rank], step, found)
    final = _compare_ends(record, found)
    digests = sum(len(table[key]) for key in compared.compared)
    digests += sum(event.num_digests for event in record.of(UsualSteps))
    states = len({lineage for lineage, _ in compared.compared})
    states += sum(bool(first.digest) for first in record.firsts)
    found.statement = (
        f"{count(digests, 'digest')} of {count(states, 'state')} agree between groups, rank by rank{final}"
    )
    if compared.differing:
        found.statement = f"{len(compared.differing)} of {compared.num_compared} comparisons of digests differ{final}"
    if not compared.num_compared and record.goes_on:
        found.asked = False  # a sound run would be "unknown" until its first digest: 50 steps, as a rule
        found.statement = "no digest of two groups yet (fault_tolerance.digest_every)"
    elif not compared.num_compared:
        found.unknown.append("no two groups have a digest of the same state (fault_tolerance.digest_every)")


def _judge_difference(record: RunRecord, words: list[Word], step: int, found: Judgement) -> None:
    """Object to digests of one state that differ, unless the differing groups were named, healed, or gone at once."""
    named = {group for event in record.of(DigestMismatch) if event.step == step for group in event.minority}
    noun = record.unit.noun
    mended, left, kept = [], [], []
    for process, event, digest in words:
        after = _after(process, event)
        if process.replica in named:
            # Commits without its gradient spread no wrong bytes; from a heal on its state is the others'.
            again = next((each for each in after if not isinstance(each, StepCommitted) or each.contributed), None)
            if isinstance(again, StepCommitted | TrainingFinished):
                text = f"contributed again without a heal, though its digest at {noun} {step} was found to differ"
                object_to_absence(record, found, text, again)
            mended.append(process.replica)
        elif not after and not isinstance(event, TrainingFinished) and process.exit is not None:
            left.append((process, digest))
        else:
            kept.append((process, digest))
    if not kept:
        kept, left = left, []
    digests = {digest: process for process, digest in reversed(kept)}
    if len(digests) > 1:
        text = "; ".join(f"{process.name}: {digest}" for digest, process in digests.items())
        text = f"digests of one state differ and no digest_mismatch names the group ({text})"
        object_to_absence(record, found, text, words[0][1])
        return
    mended += [process.replica for process, digest in left if digest not in digests]
    if mended:
        who = ", ".join(map(str, sorted(set(mended))))
        found.notes.append(f"{noun} {step}: the digest of group {who} differed; it was named, and healed or ended")


def _after(process: ProcessHistory, event: Event) -> list[StepCommitted | HealFinished | TrainingFinished]:
    """Return what the process did after an event, other than with the differing state itself."""
    rest = list(dropwhile(lambda each: each is not event, process.events))[1:]
    return [each for each in rest if isinstance(each, StepCommitted | HealFinished | TrainingFinished)]


def _compare_ends(record: RunRecord, found: Judgement) -> str:
    """Check that the groups finished with one state; return a clause about it."""
    since = max((event.time for event in record.of(LaunchStarted)), default=0.0)
    last = {(event.replica, event.rank): event for event in record.of(TrainingFinished) if event.time >= since}
    ends = {event.lineage: event for event in last.values()}
    if len(ends) > 1:
        states = ", ".join(f"{record.unit.noun} {event.step} ({lineage})" for lineage, event in ends.items())
        found.object_to(f"groups finished with different states: {states}", next(reversed(last.values())))
    groups = len({replica for replica, _ in last})
    return f"; {count(groups, 'group')} finished, with one state" if len(ends) == 1 else ""
