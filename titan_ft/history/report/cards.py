# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The figures that stand first on a run's page, and beside those of another run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from titan_ft.history.judgement import count
from titan_ft.history.outcomes.outcome import find_outcome
from titan_ft.history.record.run_record import RunRecord, view
from titan_ft.history.report.phases import find_phases
from titan_ft.history.report.words import DASH, duration, percent
from titan_ft.history.summary import summarize
from titan_ft.history.timing.goodput import goodput
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


@view
def find_hours(record: RunRecord) -> Hours:
    """Return the hours of a run's ranks, and the cost of failures and waits."""
    first_step_us = min(
        (round(1e6 * event.time) for event in record.commits), default=record.span_us[1]
    )
    spent = start = lost = 0
    for row in find_phases(record).values():
        for phase in row:
            if phase.state in ("ended", "unknown"):
                continue
            spent += phase.num_us
            begins = phase.fine == "start" or (
                phase.state == "waiting" and phase.end_us <= first_step_us
            )
            if begins:
                start += phase.num_us
            elif phase.state != "training" or phase.fine == "wasted":
                lost += phase.num_us
    hours = summarize(record).ranks_per_group / 3600e6
    setups = [event.setup for event in record.of(ev.WorkerStarted) if event.setup is not None]
    unit = "GPU-hours" if any(setup.accelerator for setup in setups) else "rank-hours"
    return Hours(unit, hours * spent, hours * start, hours * lost)


def find_cards(record: RunRecord) -> list[Card]:
    """Return the figures of a run; none for a run without a step."""
    if not record.commits:
        return []
    s, spent, hours, outcome = (
        summarize(record),
        goodput(record),
        find_hours(record),
        find_outcome(record),
    )
    seconds = spent.wall_us / 1e6
    noun, rate = s.unit.noun, spent.tokens_per_second
    target = None if outcome.steps is None else s.unit.commits_after(outcome.steps)
    cards = [
        Card(
            f"{noun}s",
            s.steps_committed,
            f"{s.steps_committed:,}" + (f" of {target:,}" if target else ""),
            f"{duration(s.step_seconds)} a {noun}",
        ),
        Card(
            "tokens per second",
            rate,
            "unknown" if not rate else f"{rate:,.0f}",
            f"{s.tokens:,} tokens",
        ),
        Card(
            "goodput",
            None if spent.effective_training_time is None else 100 * spent.effective_training_time,
            percent(spent.effective_training_time),
            f"effective training time, of {duration(seconds)}",
        ),
        Card(
            hours.unit,
            hours.spent,
            _hours(hours.spent),
            f"{_hours(hours.lost)} lost, {_hours(hours.start)} for the start",
        ),
    ]
    return [*cards, *_of_failures(record, seconds)]


def _of_failures(record: RunRecord, seconds: float) -> list[Card]:
    failures = summarize(record).failures
    if not failures:
        return [Card("failures", 0, "0", "nothing failed")]
    away = [failure for failure in failures if failure.away]
    back = [failure.rejoin_seconds for failure in away if failure.rejoin_seconds is not None]
    lost = len(find_outcome(record).lost)
    if lost:
        came = f"{count(lost, 'group')} lost for good"
    else:
        came = (
            "groups that were away came back"
            if len(back) == len(away)
            else "the others not before the end"
        )
    return [
        Card(
            "time between failures",
            seconds / len(failures),
            duration(seconds / len(failures)),
            _failures(record),
        ),
        Card("recoveries", len(back), f"{len(back)} of {len(away)}", came),
        _spread("time to rejoin", back, "of a group"),
        _spread(
            "stall per failure",
            [failure.stall_seconds for failure in failures if failure.stall_seconds is not None],
            "of the survivors",
        ),
    ]


def _failures(record: RunRecord) -> str:
    failures, faults = summarize(record).failures, summarize(record).num_faults
    return count(len(failures), "failure") + (
        f", {count(faults, 'fault')} injected" if faults else ""
    )


def _spread(name: str, values: Sequence[float], whose: str) -> Card:
    if not values:
        return Card(name, None, DASH, "unknown")
    detail = f"median {whose}; {duration(max(values))} at most" if len(values) > 1 else whose
    return Card(name, median(values), duration(median(values)), detail)


def _hours(hours: float) -> str:
    """Return hours with three digits that mean something."""
    if hours < 0.0005:
        return "0"
    if hours >= 99.5:
        return f"{hours:,.0f}"
    return f"{hours:.1f}" if hours >= 9.95 else f"{hours:.2f}" if hours >= 0.095 else f"{hours:.3f}"
