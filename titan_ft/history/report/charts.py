# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The charts of a run's report, as data of bounded size; `interactive` describes them for Plotly.

A chart has a bounded number of points for a run of any length, and its caption says if it is
thinned. A thinned curve keeps the range of its values, a row of states keeps every trouble, and
overlapping marks of faults become one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from statistics import fmean, median
from typing import Literal, NamedTuple

from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.record.usual_steps import UsualSteps
from titan_ft.history.report.facts import Recovery, find_recoveries
from titan_ft.history.report.layers import (
    CROSS,
    MEDIAN,
    Axis,
    Band,
    Bars,
    Boxes,
    Chart,
    Curve,
    Layer,
    Marks,
    Rules,
)
from titan_ft.history.report.phases import (
    TimeInState,
    add_up_groups,
    add_up_job,
    find_state_spans,
)
from titan_ft.history.report.style import ACCENT, MIDDLE, STATES, mark_of, sorted_marks, state_order
from titan_ft.history.report.thinning import thin_rows
from titan_ft.history.report.words import format_duration
from titan_ft.history.terminal import format_clock
from titan_ft.history.timing.goodput import measure_goodput
from titan_ft.history.timing.timeline import build_timeline
from titan_ft.run.events import StepCommitted

MAX_POINTS = 2000
"""Points of a curve: more than the page has pixels for."""
MAX_MARKS = 1000
"""Faults that have a mark each; beyond, the faults of a column are one mark."""
MARK_COLUMNS = 200
MAX_DOTS = MAX_MARKS // 5
"""Dots of one kind of fault in the chart of stalls."""
MAX_NAME = 30
"""Letters of a fault's name beside its row: a script may call its faults as it likes."""
LEAST_STALL_SECONDS = 0.01
"""A shorter stall is drawn like this one, because the axis is logarithmic."""


class Hit(NamedTuple):
    """A fault, and the place of its mark in a chart."""

    fault: Recovery
    x: float
    y: float


BoxesByState = dict[str, list[tuple[float, float, float, str]]]
"""Row, start, width and text of each box, by state."""


def draw_charts(record: RunRecord) -> dict[str, Chart]:
    """Return the charts for which the history of a run has something to show, by name."""
    noun = record.unit.noun
    grad_norms: list[_Value] = []
    rates: list[_Value] = []
    for point in record.curve:
        grad_norms.append((point.step, point.event.grad_norm))
        rates.append((point.step, point.event.lr))
    charts = (
        draw_loss(record),
        draw_groups(record),
        draw_participants(record),
        draw_stalls(find_recoveries(record), noun),
        draw_step_times([event.seconds for event in record.commits], noun),
        draw_time_spent(record),
        _draw_values(record, grad_norms, "grad-norm", "Gradient norm", "Before clipping."),
        _draw_values(record, rates, "lr", "Learning rate", f"Of the update of each {noun}."),
        draw_memory(record),
    )
    return {chart.name: chart for chart in charts if chart is not None}


# Curves over steps

_Value = tuple[int, float | None]
"""A step, or a round, and the value there; None if the value is unknown or not finite."""


def draw_loss(record: RunRecord) -> Chart | None:
    """Draw the loss over steps, and where faults hit."""
    values = [(point.step, point.loss) for point in record.curve]
    known = [(step, value) for step, value in values if value is not None]
    if not known:
        return None
    noun = record.unit.noun
    first_step, first_loss = known[0]
    last_step, last_loss = known[-1]
    begin = f"{first_loss:.3f} at {record.unit.name(first_step, ',')}"
    end = f"{last_loss:.3f} at {record.unit.name(last_step, ',')}"
    caption = f"Mean over the tokens of each committed {noun}: {begin}, {end}."
    num_unknown = len(values) - len(known)
    if num_unknown:
        caption += f" {num_unknown:,} not finite, or not told (crosses)."
    layers, thinned = make_curve(values, "loss", noun=noun)
    faults = find_recoveries(record)
    hits = [Hit(fault, float(fault.step), 1.0) for fault in faults if fault.step is not None]
    if hits:
        caption += f" A red line is a fault, at the first {noun} that was committed after it."
        marks = make_fault_marks(hits, is_share_of_height=True)
        places: set[float] = set()
        for layer in marks:
            places.update(layer.x)
        layers = [Rules(sorted(places)), *layers, *marks]
    return _make_chart_over_steps(
        record, "loss", "Loss", caption + thinned, layers, values[-1][0], height=3.3
    )


def _draw_values(
    record: RunRecord, values: Sequence[_Value], name: str, title: str, caption: str
) -> Chart | None:
    """Draw one value over steps; None if no value is known."""
    known = [value for _, value in values if value is not None]
    if not known:
        return None
    layers, thinned = make_curve(values, title.lower(), noun=record.unit.noun)
    kind: Literal["linear", "log"] = "linear"
    if min(known) > 0 and max(known) > 30 * median(known):
        # On a linear axis, one spike would press the rest of the curve to the bottom.
        kind = "log"
    return _make_chart_over_steps(
        record, name, title, caption + thinned, layers, values[-1][0], kind=kind
    )


def draw_memory(record: RunRecord) -> Chart | None:
    """Draw the memory of the rank that held most."""
    most_gib: dict[int, float] = {}
    commits: list[StepCommitted | UsualSteps] = [*record.of(StepCommitted), *record.of(UsualSteps)]
    for event in commits:
        if event.memory_bytes is not None:
            known = most_gib.get(event.step, 0.0)
            most_gib[event.step] = max(known, event.memory_bytes / 2**30)
    if not most_gib:
        return None
    peak = "peak of the accelerator's allocator; on a CPU, the whole process"
    caption = f"In GiB, of the rank that held most: {peak}."
    values = sorted(most_gib.items())
    layers, thinned = make_curve(values, "memory", unit=" GiB", noun=record.unit.noun)
    bounds = (0.0, 1.1 * max(most_gib.values()))
    caption += thinned
    return _make_chart_over_steps(
        record, "memory", "Memory", caption, layers, values[-1][0], bounds=bounds
    )


def _make_chart_over_steps(
    record: RunRecord,
    name: str,
    title: str,
    caption: str,
    layers: Sequence[Layer],
    last: int,
    height: float = 2.3,
    kind: Literal["linear", "log"] = "linear",
    bounds: tuple[float, float] | None = None,
) -> Chart:
    across = Axis(record.unit.noun, bounds=(0.0, last * 1.005 + 0.5))
    return Chart(
        name, title, caption, across, Axis(kind=kind, bounds=bounds), layers, height, shared="steps"
    )


def make_curve(
    values: Sequence[_Value], what: str, unit: str = "", noun: str = "step"
) -> tuple[list[Layer], str]:
    """Return the layers of a curve over steps, or rounds, and a sentence for the caption if it is
    thinned.

    Beyond `MAX_POINTS` steps each point is the mean of several consecutive steps, in a band from
    their minimum to their maximum. A point without any value is a gap. A missing value has a cross
    at the bottom.
    """
    size = -(-len(values) // MAX_POINTS) or 1
    x: list[float] = []
    means: list[float | None] = []
    lows: list[float | None] = []
    highs: list[float | None] = []
    texts: list[str] = []
    crosses: list[float] = []
    cross_texts: list[str] = []
    for start in range(0, len(values), size):
        part = values[start : start + size]
        known = [value for _, value in part if value is not None]
        middle = fmean(step for step, _ in part)
        steps = f"{noun} {part[0][0]:,}"
        if len(part) > 1:
            steps = f"{noun}s {part[0][0]:,} to {part[-1][0]:,}"
        mean: float | None = None
        text = f"{steps}: {what} none"
        if known:
            mean = fmean(known)
            text = f"{steps}: {what} {mean:.4g}{unit}"
        if len(known) > 1:
            text += f", {min(known):.4g} to {max(known):.4g}"
        x.append(middle)
        means.append(mean)
        lows.append(min(known, default=None))
        highs.append(max(known, default=None))
        texts.append(text)
        num_unknown = len(part) - len(known)
        if num_unknown:
            times = f"{num_unknown:,} times " if len(part) > 1 else ""
            crosses.append(middle)
            cross_texts.append(f"{steps}: {what} {times}not finite, or not told")
    layers: list[Layer] = []
    thinned = ""
    if size > 1:
        layers.append(Band(x, lows, highs))
        thinned = f" Thinned: a point is the mean of {size} {noun}s, in a band from least to most."
    layers.append(Curve(x, means, texts))
    if crosses:
        y = [0.04] * len(crosses)
        layers.append(Marks("not finite", CROSS, crosses, y, cross_texts, is_share_of_height=True))
    return layers, thinned


# What groups did over time


def draw_groups(record: RunRecord) -> Chart | None:
    """Draw a row per group: its states over time, and its faults; above the rows, the faults
    without a group.
    """
    timeline = build_timeline(record)
    if not timeline.groups:
        return None
    faults = find_recoveries(record)
    without_group = [fault for fault in faults if not fault.incident.replicas]
    names = []
    if without_group:
        targets = {fault.target for fault in without_group}
        names.append("lighthouse" if targets == {"lighthouse"} else "no group")
    places: dict[int, float] = {}
    for slot in sorted(timeline.groups):
        places[slot] = float(len(names))
        names.append(f"group {slot}")
    spans, thinned = thin_rows(find_state_spans(record))
    boxes: BoxesByState = defaultdict(list)
    for slot, row in spans.items():
        for span in row:
            start = span.start_us / 1e6 - record.begin
            width = span.num_us / 1e6
            state = f"{STATES[span.state].label}, {format_duration(width)}"
            text = f"group {slot} at {format_clock(start)}: {state}"
            if span.detail:
                text += f" ({span.detail})"
            boxes[span.state].append((places[slot] + 0.06, start, width, text))
    hits = []
    for fault in faults:
        rows_hit = [places[slot] for slot in fault.incident.replicas if slot in places]
        hits += [Hit(fault, fault.time, place - 0.36) for place in rows_hit]
    hits += [Hit(fault, fault.time, 0.05) for fault in without_group]
    caption = "A row for each group."
    if faults:
        caption += " A mark is a fault, above the group that it hit."
    row_height = 0.2
    if len(names) <= 8:
        row_height = 0.34
    elif len(names) <= 16:
        row_height = 0.25
    return Chart(
        "timeline",
        "What each group did",
        caption + thinned,
        _make_time_axis(timeline.wall_us / 1e6),
        _make_row_axis(names),
        [*make_boxes(boxes), *make_fault_marks(hits)],
        height=0.6 + row_height * max(len(names), 2),
        shared="time",
    )


def make_boxes(boxes: BoxesByState) -> list[Boxes]:
    """Return the boxes as layers, in the order of the states."""
    layers = []
    for state in state_order(set(boxes)):
        rows, starts, widths, texts = zip(*boxes[state], strict=True)
        layers.append(Boxes(state, rows, starts, widths, texts))
    return layers


def make_fault_marks(hits: Iterable[Hit], *, is_share_of_height: bool = False) -> list[Marks]:
    """Return the marks of faults at their places, one layer per category; overlapping marks become
    one.
    """
    hits = sorted(hits, key=lambda hit: hit.x)
    column_width = 0.0
    if len(hits) > MAX_MARKS:
        column_width = hits[-1].x / MARK_COLUMNS
    overlapping: dict[tuple[str, float, int], list[Hit]] = defaultdict(list)
    for number, hit in enumerate(hits):
        # Without columns, each hit has a mark of its own.
        column = int(hit.x / column_width) if column_width else number
        name, _ = mark_of(hit.fault.incident.category)
        overlapping[name, hit.y, column].append(hit)
    found: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for (name, y, _), here in overlapping.items():
        first = here[0].fault
        text = f"{first.incident.fault} of {first.target} at {format_clock(first.time)}"
        if len(here) > 1:
            text += f", and {len(here) - 1:,} more"
        found[name].append((here[0].x, y, text))
    marks = []
    for name, symbol in sorted_marks(hit.fault.incident.category for hit in hits):
        xs, ys, texts = zip(*found[name], strict=True)
        marks.append(Marks(name, symbol, xs, ys, texts, is_share_of_height=is_share_of_height))
    return marks


class _Contributors(NamedTuple):
    """The number of groups that gave weight to a step."""

    seconds: float
    number: int
    step: int


def draw_participants(record: RunRecord) -> Chart | None:
    """Draw over time how many groups gave weight to the step."""
    points = []
    for state in record.curve:
        seconds = state.event.time - record.begin
        points.append(_Contributors(seconds, len(state.event.participants), state.step))
    numbers = {point.number for point in points}
    if len(numbers) < 2:
        return None  # nothing that the row of each group does not show
    noun = record.unit.noun
    seconds_of_run = build_timeline(record).wall_us / 1e6
    changes = [points[0]]
    for before, point in pairwise(points):
        if point.number != before.number:
            changes.append(point)
    caption = f"Groups whose gradients are in the {noun} that was committed last."
    caption += " One that catches up does not count yet."
    if len(changes) > MAX_POINTS:
        changes = _keep_fewest(points, seconds_of_run / MAX_POINTS)
        caption += " Thinned: a column shows the fewest of its time."
    # The number of the last step holds until the end.
    changes.append(_Contributors(seconds_of_run, points[-1].number, points[-1].step))
    texts = []
    for change in changes:
        since = f"from {format_clock(change.seconds)}, {noun} {change.step:,}"
        texts.append(f"{since}: {change.number} groups")
    line = Curve(
        [change.seconds for change in changes],
        [change.number for change in changes],
        texts,
        stairs=True,
    )
    most = max(record.group_size, *numbers)
    stride = -(-most // 5)
    ticks = {float(number): str(number) for number in range(0, most + 1, stride)}
    up = Axis(bounds=(0.0, most * 1.08), ticks=ticks)
    title = "Contributing groups"
    across = _make_time_axis(seconds_of_run)
    return Chart("participants", title, caption, across, up, [line], 1.7, shared="time")


def _keep_fewest(points: Iterable[_Contributors], column_seconds: float) -> list[_Contributors]:
    """Return the first point with the fewest groups of each column of time."""
    kept = []
    for _, here in groupby(points, lambda point: int(point.seconds / column_seconds)):
        kept.append(min(here, key=lambda point: point.number))
    return kept


def _make_time_axis(seconds: float) -> Axis:
    return Axis("time since the start", kind="clock", bounds=(0.0, max(seconds, 1e-3)))


def _make_row_axis(names: Sequence[str]) -> Axis:
    ticks = {float(place): name for place, name in enumerate(names)}
    return Axis(bounds=(max(len(names), 1) - 0.45, -0.6), ticks=ticks)


# What faults cost


def draw_stalls(recoveries: Sequence[Recovery], noun: str = "step") -> Chart | None:
    """Draw a row per kind of fault: a dot per failure, and a bar at the median."""
    found: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for recovery in recoveries:
        stall = recovery.incident.stall_seconds
        if stall is None:
            continue
        kind = recovery.incident.fault
        hit = f"{kind} of {recovery.target} at {format_clock(recovery.time)}"
        text = f"{hit}: {format_duration(stall)}"
        found[kind].append((max(LEAST_STALL_SECONDS, stall), text))
    if not found:
        return None
    medians = {kind: median(stall for stall, _ in values) for kind, values in found.items()}
    kinds = sorted(found, key=lambda kind: medians[kind], reverse=True)
    x: list[float] = []
    y: list[float] = []
    texts: list[str] = []
    names = []
    for row, kind in enumerate(kinds):
        for stall, text in _spread_evenly(found[kind]):
            x.append(stall)
            y.append(float(row))
            texts.append(text)
        name = kind if len(kind) <= MAX_NAME else f"{kind[:MAX_NAME]}…"
        names.append(f"{name} ({len(found[kind])})")
    layers = [
        Marks("a failure", "circle", x, y, texts, colour=ACCENT),
        Marks(
            "median",
            MEDIAN,
            [medians[kind] for kind in kinds],
            [float(row) for row in range(len(kinds))],
            [f"median of {kind}: {format_duration(medians[kind])}" for kind in kinds],
            colour=MIDDLE,
        ),
    ]
    bounds = (LEAST_STALL_SECONDS * 0.8, max(2.0, 1.4 * max(x)))
    ticks = make_log_ticks(*bounds, least="≤ 10 ms")
    across = Axis("stall of the survivor hit hardest", "log", bounds, ticks)
    dots = "A dot for each failure, a bar at the median; in brackets how many."
    caption = f"Time beyond a usual {noun}. {dots}"
    num_found = sum(len(values) for values in found.values())
    if len(x) < num_found:
        caption += f" Thinned: {MAX_DOTS} of each kind, the least and the most among them."
    height = 0.6 + max(0.26 * len(kinds), 1.0)
    title = "Stall per failure"
    return Chart(
        "stalls", title, caption, across, _make_row_axis(names), layers, height, wide=False
    )


def _spread_evenly(values: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return at most `MAX_DOTS` of some values, spread evenly from the least to the most."""
    ranked = sorted(values)
    if len(ranked) <= MAX_DOTS:
        return ranked
    last = len(ranked) - 1
    return [ranked[round(number * last / (MAX_DOTS - 1))] for number in range(MAX_DOTS)]


def draw_step_times(seconds: Iterable[float], noun: str = "step") -> Chart | None:
    """Draw a histogram of the times of steps, or rounds. With many, both axes are logarithmic: the
    tail shows.
    """
    values = sorted(value for value in seconds if value > 0)
    if not values:
        return None
    edges, across = make_step_columns(values, noun)
    counts, texts = count_step_times(values, edges, noun)
    middle = values[int(0.5 * len(values))]
    most = values[min(len(values) - 1, int(0.99 * len(values)))]
    shares = f"median {format_duration(middle)}, 99 % within {format_duration(most)}"
    caption = f"{noun.capitalize()}s of all groups by duration: {shares}."
    up = Axis(f"{noun}s")
    if len(values) > 500:
        up = Axis(f"{noun}s", "log", bounds=(0.7, 1.6 * max(counts)))
    title = f"Time of a {noun}"
    bars = Bars(edges, counts, texts)
    return Chart("step-times", title, caption, across, up, [bars], wide=False)


def make_step_columns(seconds: Sequence[float], noun: str) -> tuple[list[float], Axis]:
    """Return the edges of the columns that times of steps are counted in, and the axis below
    them.
    """
    low, high = min(seconds) * 0.9, max(seconds) * 1.1
    num_columns = min(44, 6 + int(2 * len(seconds) ** 0.5))
    edges = [low * (high / low) ** (edge / num_columns) for edge in range(num_columns + 1)]
    return edges, Axis(f"time of a {noun}", "log", (low, high), make_log_ticks(low, high))


def count_step_times(
    seconds: Iterable[float], edges: Sequence[float], noun: str
) -> tuple[list[int], list[str]]:
    """Return how many times lie between edges, and what each column says under the pointer."""
    counts = [0] * (len(edges) - 1)
    place = 0
    for value in sorted(seconds):
        while place < len(counts) - 1 and value >= edges[place + 1]:
            place += 1
        counts[place] += 1
    texts = []
    for (left, right), number in zip(pairwise(edges), counts, strict=True):
        texts.append(f"{format_duration(left)} to {format_duration(right)}: {number:,} {noun}s")
    return counts, texts


def make_log_ticks(low: float, high: float, least: str | None = None) -> dict[float, str]:
    """Return round times on a logarithmic axis, with their units; `least` replaces the text of the
    first.
    """
    digits: tuple[int, ...] = (1,)
    if high / low < 40:
        digits = (1, 2, 5)
    elif high / low < 2000:
        digits = (1, 3)
    labels: dict[float, str] = {}
    for exponent in range(-5, 6):
        for digit in digits:
            tick = digit * 10.0**exponent
            if not low <= tick <= high:
                continue
            label = f"{tick:g} s"
            if tick < 0.1:
                label = f"{1000 * tick:g} ms"
            if least is not None and not labels:
                label = least
            labels[tick] = label
    return labels


def draw_time_spent(record: RunRecord) -> Chart | None:
    """Draw a bar per group, and one of the job, of the share of time in each state."""
    if not measure_goodput(record).group_us:
        return None
    rows = {"job": add_up_job(record)}
    for group, states in add_up_groups(record).items():
        rows[f"group {group}"] = states
    layers, labels = make_state_bars(rows)
    across = Axis("share of the whole time (%)", bounds=(0.0, 100.0))
    row_height = 0.3 if len(rows) <= 12 else 0.19
    height = 0.6 + row_height * max(len(rows), 2)
    caption = "Where the whole time of each group went; the job is their sum."
    caption += " In brackets the share of training."
    return Chart(
        "goodput", "Time in each state", caption, across, _make_row_axis(labels), layers, height
    )


def make_state_bars(rows: Mapping[str, Mapping[str, TimeInState]]) -> tuple[list[Boxes], list[str]]:
    """Return a bar of states for each row, and each row's label, with its share of training."""
    boxes: BoxesByState = defaultdict(list)
    labels = []
    for place, (name, states) in enumerate(rows.items()):
        total_us = sum(time.num_us for time in states.values()) or 1
        start = 0.0
        for state in state_order(set(states)):
            num_us = states[state].num_us
            share = 100 * num_us / total_us
            text = f"{name}: {STATES[state].label} {format_duration(num_us / 1e6)}, {share:.1f} %"
            boxes[state].append((float(place), start, share, text))
            start += share
        trained_us = 0
        if "training" in states:
            trained_us = states["training"].num_us
        labels.append(f"{name} ({100 * trained_us / total_us:.0f} %)")
    return make_boxes(boxes), labels
