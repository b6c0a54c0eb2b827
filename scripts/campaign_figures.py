# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Print the figures of campaigns of failures as a Markdown table: campaign_figures.py RUN_DIR [RUN_DIR ...]"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from bench_table import markdown

from titan_ft.history.audit import audit
from titan_ft.history.goodput import goodput
from titan_ft.history.incidents import find_incidents
from titan_ft.history.record import RunRecord
from titan_ft.run.events import Drained, Event, FaultInjected, StepCommitted, TrainingFinished
from titan_ft.run.log import read_events
from titan_ft.run.paths import RunPaths

ROWS = (
    "length (min)",
    "failures injected",
    "exchanges committed of attempted",
    "forward passes for nothing",
    "effective training time",
    "batches lost, repeated",
    "stall per failure (s), median (max)",
    "weights after the last step that all have",
    "loss of the last steps that all runs have",
)
NUM_GAPS = 3
"""Gaps between commits in which a failure shows: the first is the one that it falls into, but the step under way may
still pass, and only the next find the group gone."""
LOSS_STEPS = 10
"""Steps of which the loss at the end is the mean."""


@dataclass(frozen=True)
class Digest:
    """A hash over what one rank of a group holds after a step.

    Attributes:
        life: which of several histories of the job the step belongs to, where it went back.
    """

    time: float
    life: int | str
    step: int
    rank: int
    replica: int
    value: str


@dataclass(frozen=True)
class Comparison:
    """Digests of ranks of the same index after the same step, compared across the groups.

    Attributes:
        num_differing: of `num_compared`.
        last: "equal", "differ" or "unknown", at the last step of which all groups have a digest.
        last_step: that step.
    """

    num_compared: int
    num_differing: int
    last: str
    last_step: int | None

    def __str__(self) -> str:
        where = "" if self.last_step is None else f" (step {self.last_step})"
        before = f"; differ in {self.num_differing} of {self.num_compared} comparisons" if self.num_differing else ""
        return self.last + where + before


def compare_digests(digests: Iterable[Digest]) -> Comparison:
    """Compare the groups' digests, step by step and rank by rank."""
    found: dict[tuple[int | str, int, int], dict[int, str]] = defaultdict(dict)
    times: dict[tuple[int | str, int], float] = {}
    for digest in digests:
        found[digest.life, digest.step, digest.rank][digest.replica] = digest.value
        times[digest.life, digest.step] = digest.time
    groups = {replica for values in found.values() for replica in values}
    differs = {key: len(set(values.values())) > 1 for key, values in found.items() if len(values) > 1}
    everybodys = {key[:2] for key, values in found.items() if len(values) == len(groups) > 1}
    last = max(everybodys, key=lambda key: times[key], default=None)
    verdict = "unknown"
    if last is not None:
        verdict = "differ" if any(differs.get((*last, key[2])) for key in found if key[:2] == last) else "equal"
    return Comparison(len(differs), sum(differs.values()), verdict, None if last is None else last[1])


def stalls(commits: Sequence[float], failures: Iterable[float]) -> list[float]:
    """Return by how much the longest gap between a job's commits at each failure exceeds a usual one, in seconds.

    Args:
        commits: when some group first committed each step.
        failures: when each failure was injected.
    """
    gaps = list(pairwise(sorted(commits)))
    if not gaps:
        return []
    usual = median(after - before for before, after in gaps)
    found = []
    for failure in failures:
        at_failure = [after - before for before, after in gaps if after >= failure][:NUM_GAPS]
        if at_failure:
            found.append(max(at_failure) - usual)
    return found


def describe_stalls(seconds: Sequence[float]) -> str:
    """Return median and maximum."""
    return f"{median(seconds):.2f} ({max(seconds):.2f})" if seconds else "-"


def describe_part(part: int, whole: int) -> str:
    """Return so many of so many, and the share."""
    return f"{part} of {whole} ({100 * part / whole:.1f} %)" if whole else "-"


def describe_share(share: float | None) -> str:
    """Return a share in percent."""
    return "-" if share is None else f"{100 * share:.1f} %"


def injected(events: Iterable[Event]) -> list[FaultInjected]:
    """Return the faults of a run; one that hit several groups at once is one."""
    faults: dict[int | str, FaultInjected] = {}
    for number, event in enumerate(events):
        if isinstance(event, FaultInjected):
            faults.setdefault(f"without a shot {number}" if event.shot is None else event.shot, event)
    return list(faults.values())


def last_step(events: Iterable[Event]) -> int:
    """Return the highest step that a group committed, or 0."""
    return max((event.step for event in RunRecord(events).commits), default=0)


def figures(events: Sequence[Event], until: int | None = None) -> dict[str, str]:
    """Return the text of each row for a run of titan_ft.

    Args:
        events: all of the run, in order of time.
        until: the last step that counts for the loss; None counts all.
    """
    record = RunRecord(events)
    good, batches, commits = goodput(record), audit(record), record.commits
    costs = [incident.stall_seconds for incident in find_incidents(record) if incident.injected]
    faults = injected(events)
    digests = [
        Digest(e.time, e.lineage or "", e.step, e.rank, e.replica, e.digest)
        for e in events
        if isinstance(e, StepCommitted | Drained | TrainingFinished) and e.digest
    ]
    losses = {event.step: event.loss for event in commits if event.loss is not None}
    last = [losses[step] for step in sorted(losses) if until is None or step <= until][-LOSS_STEPS:]
    kinds = Counter(event.fault for event in faults)
    counts = f"{batches.num_lost}, {batches.num_repeated}"
    values = (
        f"{good.wall_us / 60e6:.1f}",
        f"{len(faults)} of {len(kinds)} kinds",
        describe_part(good.exchanges_committed, good.exchanges_attempted),
        describe_part(good.num_wasted, good.forward_passes),
        describe_share(good.effective_training_time_in_training),
        counts if batches.verdict == "holds" else f"{counts} ({batches.verdict})",
        describe_stalls([cost for cost in costs if cost is not None]),
        str(compare_digests(digests)),
        f"{fmean(last):.3f}" if last else "-",
    )
    return dict(zip(ROWS, values, strict=True))


def table(columns: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a Markdown table with a column for each run, named by its key."""
    names = [row for row in ROWS if any(row in column for column in columns.values())]
    return markdown(
        [["", *columns], *([name, *(column.get(name, "-") for column in columns.values())] for name in names)]
    )


def main() -> int:
    """Return 0, or 1 for a folder without events, or without the faults that are expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--expect-faults", action="store_true", help="fail if the first run had no fault")
    options = parser.parse_args()
    runs = {}
    for run_dir in options.run_dirs:
        events = read_events(RunPaths(run_dir).events)
        if not events:
            print(f"campaign_figures.py: {run_dir} has no events (events/*.jsonl)", file=sys.stderr)
            return 1
        runs[str(run_dir)] = events
    until = min(map(last_step, runs.values()))
    print("\n".join(table({name: figures(events, until) for name, events in runs.items()})))
    if options.expect_faults and not injected(next(iter(runs.values()))):
        text = "no fault was injected, so that this proves nothing; give it more --minutes"
        print(f"campaign_figures.py: {text}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
