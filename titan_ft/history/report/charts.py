# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The charts of a run's report, as data of bounded size; `interactive` describes them for Plotly.

A chart has a bounded number of points for a run of any length, and its caption says if it is
thinned. A thinned curve keeps the range of its values, a row of states keeps every trouble, and
overlapping marks of faults become one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from statistics import fmean, median
from typing import Literal

from titan_ft.history.record.run_record import Point, RunRecord
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
from titan_ft.history.report.phases import TimeInState, add_up, find_phases, time_in_states
from titan_ft.history.report.style import ACCENT, MIDDLE, STATES, mark_of, sorted_marks, state_order
from titan_ft.history.report.thinning import thin_rows
from titan_ft.history.report.words import duration
from titan_ft.history.terminal import clock
from titan_ft.history.timing.goodput import goodput
from titan_ft.history.timing.timeline import timeline
from titan_ft.run.events import StepCommitted

MAX_POINTS = 2000  # of a curve: more than the page has pixels for
MAX_MARKS = 1000  # of faults in a chart
MARK_COLUMNS = 200  # of which faults are one mark, where there are more
MAX_NAME = 30  # letters of a fault's name beside its row: a script may call its faults as it likes
FLOOR = 0.01  # s; what is below it was no stall


def draw_charts(record: RunRecord) -> dict[str, Chart]:
    """Return the charts for which the history of a run has something to show, by name."""
    charts = (
        loss(record),
        groups_over_time(record),
        participants(record),
        stalls(find_recoveries(record), record.unit.noun),
        step_times([event.seconds for event in record.commits], record.unit.noun),
        time_spent(record),
        _of_steps(
            record,
            "grad-norm",
            "Gradient norm",
            "Before clipping.",
            lambda point: point.event.grad_norm,
        ),
        _of_steps(
            record,
            "lr",
            "Learning rate",
            f"Of the update of each {record.unit.noun}.",
            lambda point: point.event.lr,
        ),
        memory(record),
    )
    return {chart.name: chart for chart in charts if chart is not None}


# Curves over steps


def loss(record: RunRecord) -> Chart | None:
    """Draw the loss over steps, and where faults hit."""
    values = [(point.step, point.loss) for point in record.curve]
    known = [(step, value) for step, value in values if value is not None]
    if not known:
        return None
    (first, begin), (last, end) = known[0], known[-1]
    name = record.unit.name
    caption = f"Mean over the tokens of each committed {record.unit.noun}: "
    caption += f"{begin:.3f} at {name(first, ',')}, {end:.3f} at {name(last, ',')}."
    broken = len(values) - len(known)
    caption += f" {broken:,} not finite, or not told (crosses)." if broken else ""
    layers, thinned = curve(values, "loss", noun=record.unit.noun)
    hits = [
        (fault, float(fault.step), 1.0)
        for fault in find_recoveries(record)
        if fault.step is not None
    ]
    if hits:
        caption += (
            f" A red line is a fault, at the first {record.unit.noun} that was committed after it."
        )
        marks = fault_marks(hits, beside=True)
        layers = [Rules(sorted({x for each in marks for x in each.x})), *layers, *marks]
    return _over_steps(record, "loss", "Loss", caption + thinned, layers, values[-1][0], height=3.3)


def _of_steps(
    record: RunRecord,
    name: str,
    title: str,
    caption: str,
    value_of: Callable[[Point], float | None],
) -> Chart | None:
    values = [(point.step, value_of(point)) for point in record.curve]
    known = [value for _, value in values if value is not None]
    if not known:
        return None
    layers, thinned = curve(values, title.lower(), noun=record.unit.noun)
    middle = median(known)
    kind: Literal["linear", "log"] = (
        "log" if min(known) > 0 and max(known) > 30 * middle else "linear"
    )
    return _over_steps(record, name, title, caption + thinned, layers, values[-1][0], kind=kind)


def memory(record: RunRecord) -> Chart | None:
    """Draw the memory of the rank that held most."""
    most: dict[int, float] = {}
    told: list[StepCommitted | UsualSteps] = [*record.of(StepCommitted), *record.of(UsualSteps)]
    for event in told:
        if event.memory_bytes is not None:
            most[event.step] = max(most.get(event.step, 0.0), event.memory_bytes / 2**30)
    if not most:
        return None
    caption = "In GiB, of the rank that held most: peak of the accelerator's allocator; on a CPU, the whole process."
    values = sorted(most.items())
    layers, thinned = curve(values, "memory", unit=" GiB", noun=record.unit.noun)
    top = 1.1 * max(most.values())
    return _over_steps(
        record, "memory", "Memory", caption + thinned, layers, values[-1][0], bounds=(0.0, top)
    )


def _over_steps(
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


def curve(
    values: Sequence[tuple[int, float | None]], what: str, unit: str = "", noun: str = "step"
) -> tuple[list[Layer], str]:
    """Return the layers of a curve over steps, or rounds, and a sentence for the caption if it is
    thinned.

    Beyond `MAX_POINTS` steps each point is the mean of several consecutive steps, in a band from
    their minimum to their maximum. A point without any value is a gap. A missing value has a cross
    at the bottom.
    """
    size = -(-len(values) // MAX_POINTS) or 1
    bins = [values[start : start + size] for start in range(0, len(values), size)]
    x, mean, low, high, texts = [], [], [], [], []
    lost: list[tuple[float, str]] = []
    for part in bins:
        known = [value for _, value in part if value is not None]
        steps = (
            f"{noun} {part[0][0]:,}"
            if len(part) == 1
            else f"{noun}s {part[0][0]:,} to {part[-1][0]:,}"
        )
        x.append(fmean(step for step, _ in part))
        mean.append(fmean(known) if known else None)
        low.append(min(known, default=None))
        high.append(max(known, default=None))
        text = "none" if not known else f"{mean[-1]:.4g}{unit}"
        spread = f", {low[-1]:.4g} to {high[-1]:.4g}" if len(known) > 1 else ""
        texts.append(f"{steps}: {what} {text}{spread}")
        if len(known) < len(part):
            number = f"{len(part) - len(known):,} times " if len(part) > 1 else ""
            lost.append((x[-1], f"{steps}: {what} {number}not finite, or not told"))
    layers: list[Layer] = [Band(x, low, high)] if size > 1 else []
    layers.append(Curve(x, mean, texts))
    if lost:
        marked, told = zip(*lost, strict=True)
        layers.append(Marks("not finite", CROSS, marked, [0.04] * len(lost), told, beside=True))
    thinned = f" Thinned: a point is the mean of {size} {noun}s, in a band from least to most."
    return layers, thinned if size > 1 else ""


# What groups did over time


def groups_over_time(record: RunRecord) -> Chart | None:
    """Draw a row per group: its states over time, and its faults; above the rows, the faults
    without a group.
    """
    line = timeline(record)
    if not line.groups:
        return None
    faults, seconds = find_recoveries(record), line.wall_us / 1e6
    others = [fault for fault in faults if not fault.incident.replicas]
    above = (
        ["lighthouse" if all(fault.target == "lighthouse" for fault in others) else "no group"]
        if others
        else []
    )
    places = {
        replica: float(place) for place, replica in enumerate(sorted(line.groups), start=len(above))
    }
    spans, thinned = thin_rows(find_phases(record))
    boxes: dict[str, list[tuple[float, float, float, str]]] = defaultdict(list)
    for replica, row in spans.items():
        for each in row:
            start, width = each.start_us / 1e6 - record.begin, each.num_us / 1e6
            detail = f" ({each.detail})" if each.detail else ""
            text = f"group {replica} at {clock(start)}: {STATES[each.state].label}, {duration(width)}{detail}"
            boxes[each.state].append((places[replica] + 0.06, start, width, text))
    layers: list[Layer] = [
        Boxes(state, *zip(*boxes[state], strict=True)) for state in state_order(set(boxes))
    ]
    hits = [
        (f, f.time, places[hit] - 0.36)
        for f in faults
        for hit in f.incident.replicas
        if hit in places
    ]
    layers += fault_marks(hits + [(fault, fault.time, 0.05) for fault in others])
    rows = [*above, *(f"group {replica}" for replica in places)]
    caption = "A row for each group." + (
        " A mark is a fault, above the group that it hit." if faults else ""
    )
    height = 0.6 + (0.34 if len(rows) <= 8 else 0.25 if len(rows) <= 16 else 0.2) * max(
        len(rows), 2
    )
    return Chart(
        "timeline",
        "What each group did",
        caption + thinned,
        _time(seconds),
        _rows(rows),
        layers,
        height,
        shared="time",
    )


def fault_marks(
    hits: Iterable[tuple[Recovery, float, float]], *, beside: bool = False
) -> list[Marks]:
    """Return the marks of faults at their places, one layer per category; overlapping marks become
    one.
    """
    hits = sorted(hits, key=lambda hit: hit[1])
    width = (
        (max((x for _, x, _ in hits), default=0.0) / MARK_COLUMNS) if len(hits) > MAX_MARKS else 0.0
    )
    places: dict[tuple[str, float, int | float], list[tuple[Recovery, float]]] = defaultdict(list)
    for number, (fault, x, y) in enumerate(hits):
        column = int(x / width) if width else number
        places[mark_of(fault.incident.category)[0], y, column].append((fault, x))
    found: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for (name, y, _), here in places.items():
        first, x = here[0]
        text = f"{first.incident.fault} of {first.target} at {clock(first.time)}"
        found[name].append(
            (x, y, text + (f", and {len(here) - 1:,} more" if len(here) > 1 else ""))
        )
    marks = []
    for name, symbol in sorted_marks(fault.incident.category for fault, _, _ in hits):
        xs, ys, texts = zip(*found[name], strict=True)
        marks.append(Marks(name, symbol, xs, ys, texts, beside=beside))
    return marks


def participants(record: RunRecord) -> Chart | None:
    """Draw over time how many groups gave weight to the step."""
    points = [
        (each.event.time - record.begin, len(each.event.participants), each.step)
        for each in record.curve
    ]
    changes = [
        point
        for place, point in enumerate(points)
        if place == 0 or point[1] != points[place - 1][1]
    ]
    seconds = timeline(record).wall_us / 1e6
    if len({number for _, number, _ in points}) < 2:
        return None  # nothing that the row of each group does not show
    thinned = ""
    if len(changes) > MAX_POINTS:
        width, thinned = seconds / MAX_POINTS, " Thinned: a column shows the fewest of its time."
        columns = [
            min(here, key=lambda point: point[1])
            for _, here in groupby(points, lambda p: int(p[0] / width))
        ]
        changes = columns
    changes.append((seconds, points[-1][1], points[-1][2]))
    texts = [
        f"from {clock(time)}, {record.unit.noun} {step:,}: {number} groups"
        for time, number, step in changes
    ]
    most = max(record.group_size, *(number for _, number, _ in points))
    stride = -(-most // 5)
    line = Curve(
        [time for time, _, _ in changes], [number for _, number, _ in changes], texts, stairs=True
    )
    up = Axis(
        bounds=(0.0, most * 1.08), ticks={float(n): str(n) for n in range(0, most + 1, stride)}
    )
    caption = f"Groups whose gradients are in the {record.unit.noun} that was committed last."
    caption += " One that catches up does not count yet."
    title = "Contributing groups"
    return Chart(
        "participants", title, caption + thinned, _time(seconds), up, [line], 1.7, shared="time"
    )


def _time(seconds: float) -> Axis:
    return Axis("time since the start", kind="clock", bounds=(0.0, max(seconds, 1e-3)))


def _rows(names: Sequence[str]) -> Axis:
    ticks = {float(place): name for place, name in enumerate(names)}
    return Axis(bounds=(max(len(names), 1) - 0.45, -0.6), ticks=ticks)


# What faults cost


def stalls(recoveries: Sequence[Recovery], noun: str = "step") -> Chart | None:
    """Draw a row per kind of fault: a dot per failure, and a bar at the median."""
    found: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for each in recoveries:
        stall = each.incident.stall_seconds
        if stall is not None:
            text = (
                f"{each.incident.fault} of {each.target} at {clock(each.time)}: {duration(stall)}"
            )
            found[each.incident.fault].append((max(FLOOR, stall), text))
    if not found:
        return None
    kinds = sorted(found, key=lambda kind: median(stall for stall, _ in found[kind]), reverse=True)
    dots = [
        (stall, float(row), text)
        for row, kind in enumerate(kinds)
        for stall, text in _few(found[kind])
    ]
    x, y, texts = zip(*dots, strict=True)
    middles = [median(stall for stall, _ in found[kind]) for kind in kinds]
    said = [
        f"median of {kind}: {duration(middle)}" for kind, middle in zip(kinds, middles, strict=True)
    ]
    layers = [
        Marks("a failure", "circle", x, y, texts, colour=ACCENT),
        Marks(
            "median",
            MEDIAN,
            middles,
            [float(row) for row in range(len(kinds))],
            said,
            colour=MIDDLE,
        ),
    ]
    bounds = (FLOOR * 0.8, max(2.0, 1.4 * max(x)))
    across = Axis(
        "stall of the survivor hit hardest", "log", bounds, log_ticks(*bounds, least="≤ 10 ms")
    )
    caption = f"Time beyond a usual {noun}. A dot for each failure, a bar at the median; in brackets how many."
    if len(dots) < sum(map(len, found.values())):
        caption += f" Thinned: {MAX_MARKS // 5} of each kind, the least and the most among them."
    names = [kind if len(kind) <= MAX_NAME else f"{kind[:MAX_NAME]}…" for kind in kinds]
    rows = _rows([f"{name} ({len(found[kind])})" for name, kind in zip(names, kinds, strict=True)])
    height = 0.6 + max(0.26 * len(kinds), 1.0)
    return Chart("stalls", "Stall per failure", caption, across, rows, layers, height, wide=False)


def _few(
    values: Sequence[tuple[float, str]], most: int = MAX_MARKS // 5
) -> list[tuple[float, str]]:
    """Return at most so many of some values, spread evenly from the least to the most."""
    ranked = sorted(values)
    return (
        ranked
        if len(ranked) <= most
        else [ranked[round(i * (len(ranked) - 1) / (most - 1))] for i in range(most)]
    )


def step_times(seconds: Iterable[float], noun: str = "step") -> Chart | None:
    """Draw a histogram of the times of steps, or rounds. With many, both axes are logarithmic: the
    tail shows.
    """
    values = sorted(value for value in seconds if value > 0)
    if not values:
        return None
    edges, across = step_axes(values, noun)
    counts, texts = step_counts(values, edges, noun)
    middle, most = (values[min(len(values) - 1, int(share * len(values)))] for share in (0.5, 0.99))
    caption = f"{noun.capitalize()}s of all groups by duration: median {duration(middle)}, 99 % within {duration(most)}."
    many = len(values) > 500
    up = Axis(
        f"{noun}s", "log" if many else "linear", bounds=(0.7, 1.6 * max(counts)) if many else None
    )
    return Chart(
        "step-times",
        f"Time of a {noun}",
        caption,
        across,
        up,
        [Bars(edges, counts, texts)],
        wide=False,
    )


def step_axes(seconds: Sequence[float], noun: str) -> tuple[list[float], Axis]:
    """Return the edges of the columns that times of steps are counted in, and the axis below
    them.
    """
    low, high = min(seconds) * 0.9, max(seconds) * 1.1
    bins = min(44, 6 + int(2 * len(seconds) ** 0.5))
    edges = [low * (high / low) ** (i / bins) for i in range(bins + 1)]
    return edges, Axis(f"time of a {noun}", "log", (low, high), log_ticks(low, high))


def step_counts(
    seconds: Iterable[float], edges: Sequence[float], noun: str
) -> tuple[list[int], list[str]]:
    """Return how many times lie between edges, and what each column says under the pointer."""
    counts, place = [0] * (len(edges) - 1), 0
    for value in sorted(seconds):
        while place < len(counts) - 1 and value >= edges[place + 1]:
            place += 1
        counts[place] += 1
    between = zip(pairwise(edges), counts, strict=True)
    return counts, [
        f"{duration(left)} to {duration(right)}: {number:,} {noun}s"
        for (left, right), number in between
    ]


def log_ticks(low: float, high: float, least: str | None = None) -> dict[float, str]:
    """Return round times on a logarithmic axis, with their units; `least` replaces the text of the
    first.
    """
    marks = (1, 2, 5) if high / low < 40 else (1, 3) if high / low < 2000 else (1,)
    ticks = [m * 10.0**e for e in range(-5, 6) for m in marks if low <= m * 10.0**e <= high]
    labels = {tick: f"{tick:g} s" if tick >= 0.1 else f"{1000 * tick:g} ms" for tick in ticks}
    return labels if least is None else labels | dict.fromkeys(ticks[:1], least)


def time_spent(record: RunRecord) -> Chart | None:
    """Draw a bar per group, and one of the job, of the share of time in each state."""
    groups = time_in_states(record)
    if not goodput(record).group_us:
        return None
    rows = {"job": add_up(phase for row in find_phases(record).values() for phase in row)}
    rows |= {f"group {group}": states for group, states in groups.items()}
    boxes: dict[str, list[tuple[float, float, float, str]]] = defaultdict(list)
    labels = states_bar(rows, boxes)
    layers = [Boxes(state, *zip(*boxes[state], strict=True)) for state in state_order(set(boxes))]
    across = Axis("share of the whole time (%)", bounds=(0.0, 100.0))
    height = 0.6 + (0.3 if len(rows) <= 12 else 0.19) * max(len(rows), 2)
    caption = "Where the whole time of each group went; the job is their sum. In brackets the share of training."
    return Chart("goodput", "Time in each state", caption, across, _rows(labels), layers, height)


def states_bar(
    rows: Mapping[str, Mapping[str, TimeInState]],
    boxes: dict[str, list[tuple[float, float, float, str]]],
) -> list[str]:
    """Add the boxes of some rows to those of each state; return each row's label, with its share of
    training.
    """
    labels = []
    for place, (name, states) in enumerate(rows.items()):
        start, total = 0.0, sum(each.num_us for each in states.values()) or 1
        for state in state_order(set(states)):
            share = 100 * states[state].num_us / total
            text = f"{name}: {STATES[state].label} {duration(states[state].num_us / 1e6)}, {share:.1f} %"
            boxes[state].append((float(place), start, share, text))
            start += share
        trained = states["training"].num_us if "training" in states else 0
        labels.append(f"{name} ({100 * trained / total:.0f} %)")
    return labels
