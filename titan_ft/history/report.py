# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Make the report of a run: one page of HTML with its figures, and the same as numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from titan_ft.history import report_page, report_plots
from titan_ft.history.check import check
from titan_ft.history.goodput import Goodput, goodput
from titan_ft.history.lives import read_moments
from titan_ft.history.report_canvas import Drawing
from titan_ft.history.report_facts import (
    RunReport,
    Span,
    count_kinds,
    find_faults,
    find_notes,
    fold_commits,
    plan_of,
)
from titan_ft.history.summary import summarize
from titan_ft.history.timeline import timeline
from titan_ft.run.events import Event


def write_report(events: Iterable[Event], folder: Path, against: Sequence[Event] | None = None) -> Path:
    """Write index.html and its figures (PNG) into a folder, made if missing; return the page.

    Args:
        against: the events of a run without failures, for the checker.
    """
    report = gather(events, against)
    drawings = draw(report)
    folder.mkdir(parents=True, exist_ok=True)
    for drawing in drawings:
        (folder / f"{drawing.name}.png").write_bytes(drawing.png)
    page = folder / "index.html"
    page.write_text(report_page.render(report, {drawing.name: drawing for drawing in drawings}), encoding="utf-8")
    return page


def report_figures(events: Iterable[Event], against: Sequence[Event] | None = None) -> dict[str, Any]:
    """Return the figures of a run as plain dictionaries, lists and numbers: those of its summary, and more."""
    report = gather(events, against)
    return report.summary.to_dict() | {
        "chaos": report.plan,
        "faults_by_kind": dict(count_kinds(fault.kind for fault in report.faults if fault.cost.injected)),
        "goodput": report.goodput.to_dict(),
        "stalls": [fault.cost.to_dict() for fault in report.faults],
        "check": report.check.to_dict(),
        "notes": [asdict(note) for note in report.notes],
    }


def gather(events: Iterable[Event], against: Sequence[Event] | None = None) -> RunReport:
    """Fold events, in any order, into all that the report shows."""
    events = list(events)
    line = timeline(events)
    begin = line.begin_us / 1e6
    # As the timeline has them, whatever was done to the wall clocks.
    history: list[Event] = [msgspec.structs.replace(event, time=moment / 1e6) for moment, event in read_moments(events)]
    return RunReport(
        summary=summarize(events),
        goodput=goodput(events),
        plan=plan_of(history),
        seconds=line.wall_us / 1e6,
        commits=fold_commits(history, begin),
        faults=find_faults(history, begin),
        notes=find_notes(history, begin),
        check=check(events, against),
        groups={
            replica: [Span(each.start_us / 1e6 - begin, each.end_us / 1e6 - begin, each.state) for each in intervals]
            for replica, intervals in line.groups.items()
        },
    )


def draw(report: RunReport) -> list[Drawing]:
    """Draw all figures of a report."""
    stalls = defaultdict(list)
    for fault in report.faults:
        if fault.cost.stall_seconds is not None:
            stalls[fault.kind].append(fault.cost.stall_seconds)
    return [
        report_plots.loss(report.commits.losses, report.faults),
        report_plots.participants(report.commits.participants, report.summary.num_groups, report.seconds),
        report_plots.timeline(report.groups, report.faults, report.seconds),
        report_plots.step_times(report.commits.step_seconds),
        report_plots.stalls(stalls),
        report_plots.goodput(_seconds(report.goodput)),
    ]


def _seconds(goodput: Goodput) -> dict[str, dict[str, float]]:
    """Return the seconds in each state, of the job and of each group."""
    rows = {"job": goodput.job_us} | {f"group {replica}": states for replica, states in goodput.groups_us.items()}
    return {name: {state: us / 1e6 for state, us in states.items()} for name, states in rows.items()}
