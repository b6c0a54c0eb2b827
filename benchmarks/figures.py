# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Print the figures of campaigns of failures as a Markdown table: python -m benchmarks.figures
RUN_DIR [RUN_DIR ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, median

from benchmarks.published import part_of, side_by_side
from benchmarks.record import compare_digests, injected, read_run
from benchmarks.table import markdown
from benchmarks.tries import StepTried
from titan_ft.history.batches.audit import audit
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.timing.goodput import measure_goodput
from titan_ft.history.timing.incidents import find_failures

LOSS_STEPS = 10
"""Steps of which the loss at the end is the mean."""


def figures(record: RunRecord, until: int | None = None) -> dict[str, str]:
    """Return the text of each row for a run.

    Args:
        until: the last step that counts for the loss; None counts all.
    """
    good, batches, faults = measure_goodput(record), audit(record), injected(record)
    # A try of the peer that was not committed was computed for nothing; ours repeat the exchange
    # alone.
    lost = sum(not event.committed and event.rank == 0 for event in record.of(StepTried))
    losses = {event.step: event.loss for event in record.commits if event.loss is not None}
    last = [losses[step] for step in sorted(losses) if until is None or step <= until][-LOSS_STEPS:]
    stalls = [
        failure.stall_seconds
        for failure in find_failures(record)
        if failure.stall_seconds is not None
    ]
    share = good.effective_training_time_in_training
    counts = f"{batches.num_lost}, {batches.num_repeated}"
    return {
        "length (min)": f"{good.wall_us / 60e6:.1f}",
        "faults injected": f"{len(faults)} of {len({fault.fault for fault in faults})} kinds",
        "exchanges committed of attempted": part_of(
            good.exchanges_committed, good.exchanges_attempted
        ),
        "forward passes for nothing": part_of(good.num_wasted + lost, good.forward_passes + lost),
        "effective training time": "-" if share is None else f"{100 * share:.1f} %",
        "batches lost, repeated": counts
        if batches.verdict == "holds"
        else f"{counts} ({batches.verdict})",
        "stall per failure (s), median (max)": f"{median(stalls):.2f} ({max(stalls):.2f})"
        if stalls
        else "-",
        "weights after the last step that all have": compare_digests(record),
        "loss of the last steps that all runs have": f"{fmean(last):.3f}" if last else "-",
    }


def table(columns: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a Markdown table with a column for each run, named by its key."""
    names = dict.fromkeys(name for column in columns.values() for name in column)
    return markdown(
        [
            ["", *columns],
            *([name, *(column.get(name, "-") for column in columns.values())] for name in names),
        ]
    )


def main() -> int:
    """Return 0, or 1 for a folder without events, or without the faults that are expected."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument(
        "--expect-faults", action="store_true", help="fail if the first run had no fault"
    )
    options = parser.parse_args()
    runs = {}
    for run_dir in options.run_dirs:
        record = read_run(run_dir)
        if not record.events:
            print(f"benchmarks.figures: {run_dir} has no events (events/*.jsonl)", file=sys.stderr)
            return 1
        runs[str(run_dir)] = record
    until = min(
        max((event.step for event in record.commits), default=0) for record in runs.values()
    )
    print("\n".join(table({name: figures(record, until) for name, record in runs.items()})))
    if lines := side_by_side(next(iter(runs.values()))):
        print("\n" + "\n".join(lines))
    if options.expect_faults and not injected(next(iter(runs.values()))):
        text = "no fault was injected, so that this proves nothing; give it more --minutes"
        print(f"benchmarks.figures: {text}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
