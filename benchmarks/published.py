# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Figures that others have published about runs under failures, and a campaign of ours beside them.

Source: "Fault Tolerant Llama: training with 2000 synthetic failures every ~15 seconds and no
checkpoints on Crusoe L40S" (PyTorch blog, 2025): torchft and torchtitan, Llama 3 1B, 300 L40S in 30
groups of 10, one group killed at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from benchmarks.record import compare_digests, injected
from benchmarks.table import markdown
from titan_ft.history.batches.audit import audit
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.timing.goodput import Goodput, measure_goodput
from titan_ft.history.timing.incidents import find_failures
from titan_ft.history.timing.rework import find_rework
from titan_ft.run.events import ChaosStarted, StepCommitted

NOT_TOLD = "not told"
COMPARABLE = (
    "Comparable: the number of groups where it is the same, the pace of the failures and what fails (one whole group, "
    "SIGKILL), and the count of steps by their definition: a step counts as attempted each time that the groups voted "
    "on it, and as committed when they agreed."
)
NOT_COMPARABLE = (
    "Not comparable: the hardware, the model, the network, the length of a step and the time that a group takes to "
    "start, all of which decide how many votes fall into the moments after a failure. There a vote that fails costs "
    "the forward and backward passes of all groups and their batch; here it costs the exchange, which is repeated with "
    "the same gradients. The second row counts what that leaves: gradients that were computed, and those of them that "
    "are in the job's state; the rest are of groups that were killed in the midst of a step."
)


@dataclass(frozen=True)
class Published:
    """One published run."""

    seconds: int
    """From one failure to the next."""
    committed: int
    attempted: int
    shape: str = "30 x 10 (L40S), Llama 3 1B"
    recoveries: str = "over 1,200, in all their runs"


_HARDER = Published(15, 268, 888)
BLOG = {
    "blog_15s.toml": _HARDER,
    "blog_60s.toml": Published(60, 5145, 6249),
    "every_5s.toml": _HARDER,
}
"""By the file of the plan that does the same, or more of it."""


def part_of(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({100 * part / whole:.1f} %)" if whole else "-"


def side_by_side(record: RunRecord) -> list[str]:
    """Return a campaign beside the published run that its plan repeats, in Markdown; empty if it
    repeats none.
    """
    plans = {event.plan for event in record.of(ChaosStarted)}
    known = [BLOG[plan] for plan in sorted(plans) if plan in BLOG]
    if len(plans) != 1 or not known:
        return []
    rows = [
        ["", "published: torchft + torchtitan", "this campaign"],
        *_rows(known[0], record, measure_goodput(record)),
    ]
    again = find_rework(record).describe()
    counted = (
        [f"Counted as attempted, and not as committed, in both rows: {again}."] if again else []
    )
    return [*markdown(rows), "", *counted, COMPARABLE, NOT_COMPARABLE]


def _rows(published: Published, record: RunRecord, good: Goodput) -> list[list[str]]:
    faults, failures, batches = injected(record), find_failures(record), audit(record)
    # The median: between two launches of a campaign that was resumed there is a longer gap.
    gaps = [after.time - before.time for before, after in pairwise(faults)]
    pace = f"{median(gaps):.0f} s ({len(faults)} in all)" if gaps else "-"
    ranks = {event.rank for event in record.of(StepCommitted)}
    counts = f"{batches.num_lost}, {batches.num_repeated}"
    back = sum(failure.rejoin_seconds is not None for failure in failures)
    return [
        ["groups x ranks", published.shape, f"{good.num_groups} x {len(ranks)}"],
        ["a group is killed each", f"{published.seconds} s", pace],
        [
            "steps committed of attempted, by their definition: votes",
            part_of(published.committed, published.attempted),
            part_of(good.exchanges_committed, good.exchanges_attempted),
        ],
        [
            "by ours: gradients that were computed and are in the job's state",
            NOT_TOLD,
            part_of(good.steps_committed, good.steps_begun),
        ],
        ["recoveries", published.recoveries, f"{back} of {len(failures)} groups that died"],
        [
            "batches lost, repeated",
            NOT_TOLD,
            counts if batches.verdict == "holds" else f"{counts} ({batches.verdict})",
        ],
        ["weights after the last step that all have", NOT_TOLD, compare_digests(record)],
    ]
