# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The table of scripts/check_gpu.sh: one row per check, with its figure and its verdict."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks.gpu_plan import Gpus, Plan
from benchmarks.run import progress
from benchmarks.table import markdown

FAILED, NEEDS, LEFT_OUT = "failed", "needs", "left out"
_NO_PROBLEM = ("holds", NEEDS, LEFT_OUT)

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        what: the check.
        verdict: empty for a figure without a promise.
        why: the reason of a bad verdict.
    """

    what: str
    figure: str = ""
    verdict: str = ""
    why: str = ""

    @property
    def problem(self) -> str:
        """Return the row as a line if it makes the exit status nonzero; empty otherwise."""
        if not self.verdict or self.verdict.startswith(_NO_PROBLEM):
            return ""
        return f"{self.what}: {self.verdict}; {self.why or self.figure}"


@dataclass
class Report:
    """The rows so far.

    Attributes:
        kept_in: the file that gets all rows after each part, even if the next part crashes.
        about: the machine and the versions, for that file.
    """

    kept_in: Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Return a line for each row that keeps the exit status from 0."""
        return [row.problem for row in self.rows if row.problem]

    def enter(self, what: str, figure: str) -> None:
        """Enter a figure that nothing is promised of."""
        self._add(Row(what, figure))

    def judge(self, what: str, verdict: str, figure: str = "", why: str = "") -> None:
        """Add a verdict: "holds", "does not hold", "cannot be told", or why the row was not
        measured.
        """
        self._add(Row(what, figure, verdict, why))

    def attempt(self, what: str, measure: Callable[[], T]) -> T | None:
        """Measure something; an error becomes the row's verdict, and the next part starts."""
        progress(what)
        began = time.monotonic()
        try:
            return measure()
        except Exception as error:  # noqa: BLE001  # a part that crashes must not cost the figures of the others
            if not isinstance(error, OSError | RuntimeError):
                traceback.print_exc()
            self.judge(
                what, FAILED, why=(str(error).strip() or type(error).__name__).splitlines()[0]
            )
            progress(self.problems[-1])
            return None
        finally:
            progress(f"{what}: {time.monotonic() - began:.0f} s")

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        if self.kept_in is not None:
            self.kept_in.parent.mkdir(parents=True, exist_ok=True)
            kept = {
                "rows": [asdict(each) for each in self.rows],
                "problems": self.problems,
                "machine": self.about,
            }
            self.kept_in.write_text(json.dumps(kept, indent=2), encoding="utf-8")


def format_report(report: Report, plan: Plan, machine: Mapping[str, Any], gpus: Gpus) -> str:
    """Return the text to paste: machine, table, and the rows that are problems."""
    rows = [
        ["", "figure", "verdict"],
        *([row.what, row.figure or "-", row.verdict or "-"] for row in report.rows),
    ]
    used = f"{plan.num_gpus} x {gpus.names[0]}" if gpus.names else "no GPU"
    driver = f"driver {gpus.driver}, " if gpus.driver else ""
    lines = [
        "{cpu}, {cores} cores, {memory_gib} GiB, load {load}; {platform}".format(**machine),
        f"{used}; {driver}CUDA {gpus.cuda or '-'}, NCCL {gpus.nccl or '-'}; {plan.describe()}",
        "Python {python}, torch {torch}, torchtitan {torchtitan}, torchft {torchft}; {interpreter}".format(
            **machine
        )
        + time.strftime("; %Y-%m-%d"),
        "",
        *markdown(rows),
        "",
        plan.describe_stock(),
        *(report.problems or ["every promise holds"]),
    ]
    return "\n".join(lines)


def text_of(values: Sequence[float]) -> str:
    """Return the median, and the range that it comes from."""
    figures = median(values), min(values), max(values)
    middle, low, high = (f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in figures)
    return middle if low == high else f"{middle} ({low} to {high})"
