# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Check by a run's events that a group was lost and came back, and that all groups ended with the
same state.

Exit status: 0 all of it holds, 1 something does not (one line names it), 2 bad usage.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.summary import RunSummary, summarize


def shortfalls(summary: RunSummary) -> list[str]:
    """Return what does not hold, in words; empty if all is well."""
    found = []
    if summary.final_digests != "equal":
        found.append(f"final digests: {summary.final_digests}")
    if summary.step_digests != "equal":
        where = f" (first at step {summary.differing_steps[0]})" if summary.differing_steps else ""
        found.append(f"digests of the steps: {summary.step_digests}{where}")
    if len(summary.finished_replicas) < summary.num_groups:
        found.append(f"only groups {summary.finished_replicas} of {summary.num_groups} finished")
    if not any(failure.died and failure.rejoin_seconds is not None for failure in summary.failures):
        found.append("no group died and contributed again")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, help="the folder of the finished job")
    found = shortfalls(summarize(RunRecord.read(parser.parse_args().run_dir / "events")))
    if found:
        print(f"expect_rejoin.py: {'; '.join(found)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
