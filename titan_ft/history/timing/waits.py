# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The job's waits for joiners, and the reasons of all waits, by `StepCommitted.waits`.

`find_waits_for_joiners` returns a `StepWait` for each commit, awaited joiner and reason. `REASONS`
has a phrase for each reason of `titan_ft.run.events.Waited.why`.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan_ft.history.record.run_record import RunRecord, once_per_record
from titan_ft.run.events import StepCommitted, Waited

REASONS = {
    "computing": "computing",
    "loading": "loading its batches",
    "between_steps": "saving, validating or busy between two steps",
    "connecting": "connecting to the other groups",
    "catching_up": "catching up with the state",
    "asked": "catching up, and it asked the others to wait",
    "lost": "lost",
    "left": "leaving in order",
    "too_few": "needed for min_replica_size",
}
"""By reason, the words for it in reports: the activity or the absence of the awaited group."""
_OF_JOINERS = ("catching_up", "asked")


@dataclass(frozen=True)
class StepWait:
    """The job's wait for one group, for one reason, in one commit."""

    step: int
    """Number of the commit: a step, or a round of several."""
    slot: int
    """The awaited group."""
    why: str
    """A key of `REASONS`."""
    seconds: float
    """The wait of the group that waited longest."""
    by: int
    """Slot of the group that waited longest."""
    time: float
    """Unix seconds at which the group that waited longest committed."""


@once_per_record
def find_waits_for_joiners(record: RunRecord) -> list[StepWait]:
    """Return the longest wait of each commit for each joiner and reason, in order of time.

    Waits of commits whose state was thrown away later are included: the time is lost as well. No
    usual step has waited for a joiner.
    """
    longest: dict[tuple[str, int, str], tuple[Waited, StepCommitted]] = {}
    for commit in record.of(StepCommitted):
        for wait in commit.waits or ():
            if wait.why not in _OF_JOINERS:
                continue
            key = (commit.lineage, wait.slot, wait.why)
            known = longest.get(key)
            if known is None or wait.seconds > known[0].seconds:
                longest[key] = (wait, commit)
    found = [
        StepWait(
            step=commit.step,
            slot=wait.slot,
            why=wait.why,
            seconds=wait.seconds,
            by=commit.replica,
            time=commit.time,
        )
        for wait, commit in longest.values()
    ]
    return sorted(found, key=lambda wait: wait.time)


def count_unknown(record: RunRecord) -> int:
    """Return how many commits have no waits, because an earlier version wrote their events."""
    return sum(commit.waits is None for commit in record.commits)
