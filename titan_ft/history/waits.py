# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the groups of a run waited for each other, summed from `StepCommitted.waits`; nothing is inferred.

`find_waits` returns one `StepWait` for each step, awaited group and reason. `sum_by_slot` sums these by group and
reason, for a table or a chart: {2: {"lost": 1.4, "catching_up": 0.03}} says that the job waited 1.4 s in all for group
2 because it was gone. The reasons are those of `titan_ft.run.events.Waited.why`; `REASONS` has a phrase for each.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from titan_ft.history.record import RunRecord, view

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
"""What an awaited group did, or why it did not come, for people."""


@dataclass(frozen=True)
class StepWait:
    """How long the job waited for a group in one step: as long as the rank that waited longest."""

    step: int
    slot: int
    """The awaited group."""
    why: str
    seconds: float
    by: int
    """The group of the rank that waited longest."""
    time: float
    """Unix seconds of that rank's commit."""


@view
def find_waits(record: RunRecord) -> list[StepWait]:
    """Return the waits of all steps in order of time; void steps are included, for the time is lost as well."""
    found: list[StepWait] = []
    for commits in record.commits_of.values():
        longest: dict[tuple[int, str], StepWait] = {}
        for commit in commits:
            for wait in commit.waits or ():
                known = longest.get((wait.slot, wait.why))
                if known is None or wait.seconds > known.seconds:
                    one = StepWait(commit.step, wait.slot, wait.why, wait.seconds, commit.replica, commit.time)
                    longest[wait.slot, wait.why] = one
        found += longest.values()
    return sorted(found, key=lambda wait: wait.time)


def sum_by_slot(record: RunRecord) -> dict[int, dict[str, float]]:
    """Return the seconds that the job waited for each group, by reason."""
    found: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for wait in find_waits(record):
        found[wait.slot][wait.why] += wait.seconds
    return {slot: dict(reasons) for slot, reasons in sorted(found.items())}


def count_unknown(record: RunRecord) -> int:
    """Return how many commits do not say what they waited: those of an older history."""
    return sum(commit.waits is None for commit in record.commits)
