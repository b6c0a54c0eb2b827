# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Draw the figures of a run's report. matplotlib is imported where a figure is made, and without any global state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from titan_ft.history import goodput as goodputs
from titan_ft.history import timeline as timelines
from titan_ft.history.record import RunRecord
from titan_ft.history.report.canvas import LEFT, Canvas, Drawing, add_axes, new_canvas, render
from titan_ft.history.report.facts import Recovery, duration, find_recoveries
from titan_ft.history.report.style import (
    ACCENT,
    FAULT,
    INK,
    PAPER,
    STATES,
    categories,
    category,
    state_order,
)
from titan_ft.history.summary import summarize
from titan_ft.history.terminal import clock

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HALF = 9.4, 4.56  # inches; a unit of the drawing becomes about 1.6 px on a laptop and 1 px in print
MAX_POINTS = 1200  # of a curve: more than the page has pixels for
MAX_SPANS = 3000  # of all rows: above it, each of their columns shows what took most of it
MAX_BOXES = 12_000
MAX_TOOLTIPS = 600
LEGEND_COLUMNS = 8
MARK_SCALE = {"*": 1.6, "D": 0.85, "s": 0.95, "P": 1.15, "X": 1.15}  # marks of one size in points differ in weight


@dataclass(frozen=True)
class Span:
    """A stretch of time of one group in one state; seconds since the beginning."""

    start: float
    end: float
    state: str


def draw(record: RunRecord) -> list[Drawing]:
    """Draw all figures of a run's report."""
    recoveries, spent, line = find_recoveries(record), goodputs.goodput(record), timelines.timeline(record)
    begin = record.begin
    stalls_of = defaultdict(list)
    for each in recoveries:
        if each.incident.stall_seconds is not None:
            stalls_of[each.incident.fault].append(each.incident.stall_seconds)
    counts = [(point.event.time - begin, len(point.event.participants)) for point in record.curve]
    spans = {
        replica: [Span(each.start_us / 1e6 - begin, each.end_us / 1e6 - begin, each.state) for each in intervals]
        for replica, intervals in line.groups.items()
    }
    rows = {"job": spent.job_us} | {f"group {group}": us for group, us in spent.groups_us.items()}
    return [
        loss([(point.step, point.loss) for point in record.curve], recoveries),
        participants(counts, summarize(record).num_groups, line.wall_us / 1e6),
        timeline(spans, recoveries, line.wall_us / 1e6),
        step_times([event.seconds for event in record.commits]),
        stalls(stalls_of),
        goodput({name: {state: us / 1e6 for state, us in states.items()} for name, states in rows.items()}),
    ]


def _clock_axis(axes: Axes, seconds: float) -> None:
    """Label a time axis in minutes and seconds since the beginning."""
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    choices = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400)
    step = next((choice for choice in choices if seconds / choice <= 12), choices[-1] * 7)
    axes.set_xlim(0, max(seconds, 1e-3))
    axes.xaxis.set_major_locator(MultipleLocator(step))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: clock(value)))
    axes.set_xlabel("time since the start" + (" (h:mm:ss)" if seconds >= 3600 else " (m:ss)"))


def loss(curve: Sequence[tuple[int, float | None]], faults: Sequence[Recovery]) -> Drawing:
    """Draw the loss over steps; beyond `MAX_POINTS` of them as mean and range of a few steps each."""
    with new_canvas(WIDTH, 2.7) as canvas:
        axes = add_axes(canvas, top=0.2)
        known = [(step, value) for step, value in curve if value is not None]
        for fault in faults:
            if fault.step is not None:
                axes.axvline(fault.step, color=FAULT, alpha=0.28, linewidth=0.6, zorder=1)
        _mark_faults(canvas, axes, [(fault, fault.step, 1.03) for fault in faults], axes.get_xaxis_transform(), 3.0)
        size = -(-len(known) // MAX_POINTS) or 1
        bins = [known[start : start + size] for start in range(0, len(known), size)]
        middles = [fmean(step for step, _ in part) for part in bins]
        if size > 1:
            low, high = ([edge(value for _, value in part) for part in bins] for edge in (min, max))
            axes.fill_between(middles, low, high, color=ACCENT, alpha=0.25, linewidth=0, zorder=2)
        axes.plot(middles, [fmean(value for _, value in part) for part in bins], color=ACCENT, linewidth=1.1, zorder=3)
        broken = [step for step, value in curve if value is None]
        axes.plot(broken, [0.04] * len(broken), "x", color=FAULT, transform=axes.get_xaxis_transform(), markersize=4)
        if curve:
            axes.set_xlim(0, max(step for step, _ in curve) * 1.005 + 0.5)
        axes.grid(axis="y")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set(xlabel="step", ylabel="loss")
    return render(canvas, "loss", "Loss over steps, faults marked")


def _mark_faults(
    canvas: Canvas, axes: Axes, points: Sequence[tuple[Recovery, Any, Any]], transform: Any, size: float
) -> None:
    """Put one mark at each fault, with what it was under the pointer."""
    for number, (fault, x, y) in enumerate(points):
        if x is None:
            continue
        mark = category(fault.incident.fault)[1]
        (line,) = axes.plot(
            [x],
            [y],
            marker=mark,
            markersize=size * MARK_SCALE.get(mark, 1.0),
            color=FAULT,
            markeredgecolor=PAPER,
            markeredgewidth=0.4,
            linestyle="none",
            transform=transform,
            clip_on=False,
            zorder=6,
        )
        if number < MAX_TOOLTIPS:
            line.set_gid(f"fault{number}")
            canvas.tooltips[f"fault{number}"] = f"{fault.incident.fault} of {fault.target} at {clock(fault.time)}"


def participants(counts: Sequence[tuple[float, int]], num_groups: int, seconds: float) -> Drawing:
    """Draw over time how many groups gave weight to the step."""
    with new_canvas(WIDTH, 1.75) as canvas:
        axes = add_axes(canvas)
        steps = [point for i, point in enumerate(counts) if i == 0 or point[1] != counts[i - 1][1]]
        if steps:
            times, values = zip(*steps, (seconds, counts[-1][1]), strict=True)
            axes.fill_between(times, values, step="post", color=ACCENT, alpha=0.18, linewidth=0)
            axes.step(times, values, where="post", color=ACCENT, linewidth=1.0)
        axes.set_ylim(0, num_groups * 1.08 + 0.1)
        stride = -(-max(num_groups, 1) // 8)
        axes.set_yticks(range(0, num_groups + 1, stride))
        axes.grid(axis="y")
        axes.set_ylabel("groups")
        _clock_axis(axes, seconds)
    return render(canvas, "participants", "Number of contributing groups over time")


def timeline(groups: Mapping[int, Sequence[Span]], faults: Sequence[Recovery], seconds: float) -> Drawing:
    """Draw a row per group: its states over time, and the faults that hit it; above them those that hit none."""
    replicas = sorted(groups)
    others = [fault for fault in faults if not fault.incident.replicas]
    above = ["lighthouse" if all(fault.target == "lighthouse" for fault in others) else "no group"] if others else []
    row = 0.34 if len(replicas) <= 8 else 0.25 if len(replicas) <= 16 else 0.2
    num_rows = len(replicas) + len(above)
    states = {span.state for spans in groups.values() for span in spans}
    top = _legend_height(states, faults)
    with new_canvas(WIDTH, max(row * num_rows, 0.3) + 0.42 + top) as canvas:
        axes = add_axes(canvas, top=top)
        places = {replica: float(place) for place, replica in enumerate(replicas, start=len(above))}
        fine = sum(map(len, groups.values())) > MAX_SPANS
        columns = min(MAX_POINTS, MAX_BOXES // max(1, len(replicas)))
        for replica, spans in groups.items():
            _draw_row(axes, thin(spans, seconds, columns) if fine else spans, places[replica])
        points = [(f, f.time, places[hit] - 0.36) for f in faults for hit in f.incident.replicas if hit in places]
        points += [(fault, fault.time, 0.05) for fault in others]
        _mark_faults(canvas, axes, points, axes.transData, 5 if row > 0.3 else 4)
        axes.set_ylim(max(num_rows, 1) - 0.45, -0.6)
        axes.set_yticks(range(num_rows), [*above, *(f"group {replica}" for replica in replicas)], color=INK)
        axes.spines["left"].set_visible(False)
        _clock_axis(axes, seconds)
        _legends(canvas, states, faults)
    return render(canvas, "timeline", "States of each group over time, faults marked")


def _draw_row(axes: Axes, spans: Sequence[Span], place: float) -> None:
    """Draw a row; all boxes of a state are one shape, which costs a page a fraction of what a shape each does."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    low, high = place - 0.22, place + 0.34
    by_state: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        by_state[span.state] += [(span.start, low), (span.start, high), (span.end, high), (span.end, low), (0.0, 0.0)]
    for state, corners in by_state.items():
        codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * (len(corners) // 5)
        axes.add_patch(PathPatch(Path(corners, codes), facecolor=STATES[state][1], linewidth=0))


def thin(spans: Sequence[Span], seconds: float, num_columns: int) -> list[Span]:
    """Return the state that took most of each column of a row that is too fine for the page."""
    width = seconds / num_columns
    columns: list[dict[str, float]] = [defaultdict(float) for _ in range(num_columns)]
    for span in spans:
        for column in range(int(span.start / width), min(int(span.end / width) + 1, num_columns)):
            shared = min(span.end, (column + 1) * width) - max(span.start, column * width)
            columns[column][span.state] += max(0.0, shared)
    thinned: list[Span] = []
    for column, shares in enumerate(columns):
        state = max(shares, key=lambda state: shares[state], default=None)
        if state is None:
            continue
        goes_on = bool(thinned) and thinned[-1].state == state and thinned[-1].end > (column - 0.5) * width
        start = thinned.pop().start if goes_on else column * width
        thinned.append(Span(start, (column + 1) * width, state))
    return thinned


def _legend_height(states: set[str], faults: Sequence[Recovery]) -> float:
    """Return the inches that the legends take."""
    return 0.12 + 0.19 * -(-len(states) // LEGEND_COLUMNS) + (0.21 if faults else 0.0)


def _legends(canvas: Canvas, states: set[str], faults: Sequence[Recovery]) -> None:
    """Name the colours of states, and below them the marks of faults."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    common: dict[str, Any] = {
        "loc": "upper left",
        "borderaxespad": 0.0,
        "borderpad": 0.0,
        "handletextpad": 0.5,
        "columnspacing": 1.2,
        "handlelength": 1.0,
        "labelspacing": 0.45,
    }
    left, height = (LEFT + 0.02) / WIDTH, canvas.figure.get_size_inches()[1]
    patches = [Patch(color=STATES[state][1], label=STATES[state][0]) for state in state_order(states)]
    # A legend fills its columns one after the other; a reader goes along the rows.
    patches = [patch for column in range(LEGEND_COLUMNS) for patch in patches[column::LEGEND_COLUMNS]]
    place = (left, 1 - 0.03 / height)
    canvas.figure.legend(handles=patches, bbox_to_anchor=place, ncols=LEGEND_COLUMNS, handleheight=0.8, **common)
    style: dict[str, Any] = {"color": FAULT, "markeredgecolor": PAPER, "markeredgewidth": 0.4, "linestyle": "none"}
    marks = [
        Line2D([], [], marker=mark, markersize=5 * MARK_SCALE.get(mark, 1.0), label=name, **style)
        for name, mark in categories(fault.incident.fault for fault in faults)
    ]
    if marks:
        place = (left, 1 - (_legend_height(states, []) - 0.06) / height)
        canvas.figure.legend(handles=marks, bbox_to_anchor=place, ncols=len(marks), **common)


def step_times(seconds: Sequence[float]) -> Drawing:
    """Draw how many steps took how long. Both axes are logarithmic where there are many steps, to show the tail."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    with new_canvas(HALF, 2.9) as canvas:
        axes = add_axes(canvas, left=0.62, top=0.3)
        values = sorted(value for value in seconds if value > 0)
        if values:
            low, high = values[0] * 0.9, values[-1] * 1.1
            bins = min(44, 6 + int(2 * len(values) ** 0.5))
            edges = [low * (high / low) ** (i / bins) for i in range(bins + 1)]
            axes.hist(values, bins=edges, color=ACCENT, edgecolor=PAPER, linewidth=0.3)
            axes.set(xscale="log", xlim=(low, high))
            _log_ticks(axes, low, high)
            middle, most = (values[min(len(values) - 1, int(share * len(values)))] for share in (0.5, 0.99))
            for value in (middle, most):
                axes.axvline(value, color=INK, linewidth=0.8, linestyle=(0, (3, 2)))
            text = f"median {duration(middle)}, 99 % within {duration(most)}"
            axes.text(1, 1.04, text, transform=axes.transAxes, ha="right")
        if len(values) > 500:
            axes.set(yscale="log", ylim=(0.7, None))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.grid(axis="y")
        axes.set(xlabel="time of a step", ylabel="steps")
    return render(canvas, "step-times", "Distribution of the time of a step")


def _log_ticks(axes: Axes, low: float, high: float, least: str | None = None) -> None:
    """Put ticks with units at round times of a logarithmic axis; `least` is what the first one says instead."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    marks = (1, 2, 5) if high / low < 40 else (1, 3)
    ticks = [m * 10.0**e for e in range(-4, 6) for m in marks if low <= m * 10.0**e <= high]
    labels = [f"{tick:g} s" if tick >= 0.1 else f"{1000 * tick:g} ms" for tick in ticks]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FixedFormatter(labels if least is None else [least, *labels[1:]]))
    axes.xaxis.set_minor_locator(NullLocator())


def stalls(by_kind: Mapping[str, Sequence[float]]) -> Drawing:
    """Draw a row per kind of fault: a dot per failure, and a bar at the median."""
    kinds = sorted(by_kind, key=lambda kind: median(by_kind[kind]))
    with new_canvas(HALF, max(2.9, 0.21 * len(kinds) + 0.7)) as canvas:
        axes = add_axes(canvas, left=1.5)
        floor = 0.01  # s; what is below it was no stall
        for place, kind in enumerate(kinds):
            values = [max(floor, value) for value in by_kind[kind]]
            axes.plot(values, [place] * len(values), "o", color=ACCENT, alpha=0.55, markersize=4, markeredgewidth=0)
            axes.plot([median(values)], [place], "|", color=INK, markersize=10, markeredgewidth=1.6)
        if kinds:
            high = max(2.0, max(max(values) for values in by_kind.values()) * 1.4)
            axes.set(xscale="log", xlim=(floor * 0.8, high))
            _log_ticks(axes, floor, high, least="≤ 10 ms")
        axes.set_ylim(-0.7, max(len(kinds), 1) - 0.3)
        axes.set_yticks(range(len(kinds)), [f"{kind} ({len(by_kind[kind])})" for kind in kinds], color=INK)
        axes.grid(axis="x")
        axes.set_xlabel("stall of the survivor hit hardest")
    return render(canvas, "stalls", "Stall per failure, by kind of fault")


def goodput(rows: Mapping[str, Mapping[str, float]]) -> Drawing:
    """Draw a bar per group, and one of the job, of the share of time in each state."""
    names = list(rows)
    row = 0.3 if len(names) <= 12 else 0.19
    states = {state for shares in rows.values() for state, value in shares.items() if value > 0}
    top = _legend_height(states, [])
    with new_canvas(WIDTH, row * max(len(names), 1) + 0.42 + top) as canvas:
        axes = add_axes(canvas, right=0.95, top=top)
        for place, name in enumerate(names):
            start, total = 0.0, sum(rows[name].values()) or 1.0
            for number, state in enumerate(state_order(set(rows[name]))):
                share = 100 * rows[name][state] / total
                (bar,) = axes.barh(place, share, left=start, height=0.66, color=STATES[state][1], linewidth=0)
                bar.set_gid(f"bar{place}-{number}")
                tooltip = f"{name}: {STATES[state][0]} {duration(rows[name][state])}, {share:.1f} %"
                canvas.tooltips[f"bar{place}-{number}"] = tooltip
                start += share
            useful = 100 * rows[name].get("productive", 0.0) / total
            axes.text(101, place, f"{useful:.1f} % training", va="center", color=INK)
        axes.set(xlim=(0, 100), ylim=(max(len(names), 1) - 0.45, -0.55), xlabel="share of wall time (%)")
        axes.set_yticks(range(len(names)), names, color=INK)
        axes.spines["left"].set_visible(False)
        _legends(canvas, states, [])
    return render(canvas, "goodput", "Share of time in each state, per group")
