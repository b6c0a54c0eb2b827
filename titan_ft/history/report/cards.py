# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The figures that stand first on a run's page, and beside those of another run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from titan_ft.history.judgement import count
from titan_ft.history.outcomes.outcome import find_outcome
from titan_ft.history.record.run_record import RunRecord, once_per_record
from titan_ft.history.report.phases import find_state_spans
from titan_ft.history.report.words import DASH, format_duration, format_percent
from titan_ft.history.summary import summarize
from titan_ft.history.timing.goodput import measure_goodput
from titan_ft.run import events as ev


@dataclass(frozen=True)
class Card:
    """One figure.

    Attributes:
        number: the value for comparison with another run's; None if there is none.
        text: the value as shown.
        detail: a few words beside the value.
    """

    name: str
    number: float | None
    text: str
    detail: str = ""


@dataclass(frozen=True)
class Hours:
    """Hours of a run's ranks; GPU hours if the run trained on GPUs.

    Attributes:
        spent: hours while the groups existed.
        start: the part of `spent` for the first start of each group, up to the job's first step.
        lost: the part of `spent` for waiting, recovery, death, restarts and wasted computation.
    """

    unit: str
    spent: float
    start: float
    lost: float


@once_per_record
def find_hours(record: RunRecord) -> Hours:
    """Return the hours of a run's ranks, and the cost of failures and waits."""
    first_step_us = record.span_us[1]
    if record.commits:
        first_step_us = min(round(1e6 * event.time) for event in record.commits)
    spent_us = 0
    start_us = 0
    lost_us = 0
    for row in find_state_spans(record).values():
        for span in row:
            if span.state in ("ended", "unknown"):
                continue
            spent_us += span.num_us
            waits_to_start = span.state == "waiting" and span.end_us <= first_step_us
            if span.fine_state == "start" or waits_to_start:
                start_us += span.num_us
            elif span.state != "training" or span.fine_state == "wasted":
                lost_us += span.num_us
    unit = "rank-hours"
    for event in record.of(ev.WorkerStarted):
        if event.setup is not None and event.setup.accelerator:
            unit = "GPU-hours"
    hours_per_us = summarize(record).ranks_per_group / 3600e6
    return Hours(unit, hours_per_us * spent_us, hours_per_us * start_us, hours_per_us * lost_us)


def find_cards(record: RunRecord) -> list[Card]:
    """Return the figures of a run; none for a run without a step."""
    if not record.commits:
        return []
    return [
        _make_steps_card(record),
        _make_tokens_card(record),
        _make_goodput_card(record),
        _make_hours_card(record),
        *_make_failure_cards(record),
    ]


def _make_steps_card(record: RunRecord) -> Card:
    summary = summarize(record)
    text = f"{summary.steps_committed:,}"
    last_step = find_outcome(record).steps
    if last_step:
        text += f" of {record.unit.commits_after(last_step):,}"
    noun = record.unit.noun
    detail = f"{format_duration(summary.step_seconds)} a {noun}"
    return Card(f"{noun}s", summary.steps_committed, text, detail)


def _make_tokens_card(record: RunRecord) -> Card:
    rate = measure_goodput(record).tokens_per_second
    text = f"{rate:,.0f}" if rate else "unknown"
    return Card("tokens per second", rate, text, f"{summarize(record).tokens:,} tokens")


def _make_goodput_card(record: RunRecord) -> Card:
    share = measure_goodput(record).effective_training_time
    number = None if share is None else 100 * share
    detail = f"effective training time, of {format_duration(measure_goodput(record).wall_us / 1e6)}"
    return Card("goodput", number, format_percent(share), detail)


def _make_hours_card(record: RunRecord) -> Card:
    hours = find_hours(record)
    detail = f"{_format_hours(hours.lost)} lost, {_format_hours(hours.start)} for the start"
    return Card(hours.unit, hours.spent, _format_hours(hours.spent), detail)


def _make_failure_cards(record: RunRecord) -> list[Card]:
    summary = summarize(record)
    failures = summary.failures
    if not failures:
        return [Card("failures", 0, "0", "nothing failed")]
    injected = count(len(failures), "failure")
    if summary.num_faults:
        injected += f", {count(summary.num_faults, 'fault')} injected"
    num_away = 0
    rejoins = []
    stalls = []
    for failure in failures:
        if failure.away:
            num_away += 1
            if failure.rejoin_seconds is not None:
                rejoins.append(failure.rejoin_seconds)
        if failure.stall_seconds is not None:
            stalls.append(failure.stall_seconds)
    num_lost = len(find_outcome(record).lost)
    if num_lost:
        came_back = f"{count(num_lost, 'group')} lost for good"
    elif len(rejoins) == num_away:
        came_back = "groups that were away came back"
    else:
        came_back = "the others not before the end"
    between = measure_goodput(record).wall_us / 1e6 / len(failures)
    return [
        Card("time between failures", between, format_duration(between), injected),
        Card("recoveries", len(rejoins), f"{len(rejoins)} of {num_away}", came_back),
        _make_spread_card("time to rejoin", rejoins, "of a group"),
        _make_spread_card("stall per failure", stalls, "of the survivors"),
    ]


def _make_spread_card(name: str, seconds: Sequence[float], whose: str) -> Card:
    """Return the median and the maximum of some times."""
    if not seconds:
        return Card(name, None, DASH, "unknown")
    detail = whose
    if len(seconds) > 1:
        detail = f"median {whose}; {format_duration(max(seconds))} at most"
    return Card(name, median(seconds), format_duration(median(seconds)), detail)


def _format_hours(hours: float) -> str:
    """Return hours with three significant digits."""
    if hours < 0.0005:
        return "0"
    if hours < 0.095:
        return f"{hours:.3f}"
    if hours < 9.95:
        return f"{hours:.2f}"
    if hours < 99.5:
        return f"{hours:.1f}"
    return f"{hours:,.0f}"
