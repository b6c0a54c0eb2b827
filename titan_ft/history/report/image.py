# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Draw a chart as PNG with matplotlib, which is imported where one is drawn, and without any global state."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from titan_ft.history.report.layers import Axis, Band, Bars, Boxes, Chart, Line, Marks, Rules, rule_opacity
from titan_ft.history.report.style import ACCENT, GRID, INK, MUTED, PAPER, STATES
from titan_ft.history.terminal import clock

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HALF = 9.4, 4.56  # inches
LEFT, BOTTOM = 0.82, 0.4  # inches beside and below the axes, so that figures over one quantity line up
LEGEND_COLUMNS = 8
MARK_SCALE = {"*": 1.6, "D": 0.85, "s": 0.95, "P": 1.15, "X": 1.15, "|": 2.0, "o": 0.8}  # by their weight to the eye
SETTINGS: dict[Any, Any] = {
    "font.size": 8.2,
    "text.parse_math": False,  # a name from an event is no formula
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.width": 0.6,
    "ytick.major.size": 0,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 7.8,
}


def png(chart: Chart) -> bytes:
    """Return the image of a chart."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    states = [layer.state for layer in chart.layers if isinstance(layer, Boxes)]
    marks = [layer for layer in chart.layers if isinstance(layer, Marks) and states]
    top = 0.14 + (0.19 * -(-len(states) // LEGEND_COLUMNS) + (0.21 if marks else 0.0) if states else 0.06)
    left = max(LEFT, 0.075 * max((len(name) for name in (chart.y.ticks or {}).values()), default=0))
    with rc_context(SETTINGS):
        width, height = WIDTH if chart.wide else HALF, chart.height + top
        figure = Figure(figsize=(width, height))
        inside = (left / width, BOTTOM / height, 1 - (left + 0.2) / width, 1 - (BOTTOM + top) / height)
        axes = figure.add_axes(inside)
        _set_axes(axes, chart)
        for layer in chart.layers:
            _draw(axes, layer)
        _legends(figure, states, marks, left)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=160, facecolor="white")
    return image.getvalue()


def _set_axes(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MultipleLocator, NullLocator

    for spec, axis, name in ((chart.x, axes.xaxis, "x"), (chart.y, axes.yaxis, "y")):
        axes.set(**{f"{name}label": spec.label})
        if spec.kind == "log":
            axes.set(**{f"{name}scale": "log"})
            axis.set_minor_locator(NullLocator())
        if spec.bounds is not None:
            axes.set(**{f"{name}lim": spec.bounds})
        if spec.ticks is not None:
            axis.set_major_locator(FixedLocator(list(spec.ticks)))
            axis.set_major_formatter(FixedFormatter(list(spec.ticks.values())))
        elif spec.kind == "clock":
            axis.set_major_locator(MultipleLocator(_stride(spec)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: clock(value)))
        elif name == "x" and spec.kind == "linear":
            axis.set_major_formatter("{x:,.0f}")
    rows = any(isinstance(layer, Boxes) for layer in chart.layers)
    axes.spines["left"].set_visible(not rows)
    if not rows:
        axes.grid(axis="x" if chart.x.kind == "log" and chart.y.ticks else "y")


def _stride(spec: Axis) -> float:
    """Return the seconds between two ticks of a clock."""
    choices = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400)
    seconds = spec.bounds[1] if spec.bounds else 0.0
    return next((choice for choice in choices if seconds / choice <= 12), seconds / 12)


def _draw(axes: Axes, layer: object) -> None:
    match layer:
        case Band():
            low, high = ([float("nan") if y is None else y for y in edge] for edge in (layer.low, layer.high))
            axes.fill_between(layer.x, low, high, color=ACCENT, alpha=0.25, linewidth=0.4, zorder=2)
        case Line():
            y = [float("nan") if value is None else value for value in layer.y]
            if layer.stairs:
                axes.fill_between(layer.x, y, step="post", color=ACCENT, alpha=0.18, linewidth=0)
            style = "steps-post" if layer.stairs else "default"
            axes.plot(layer.x, y, color=ACCENT, linewidth=1.1, drawstyle=style, zorder=3)
        case Boxes():
            spans: dict[float, list[tuple[float, float]]] = defaultdict(list)
            for row, start, width in zip(layer.rows, layer.starts, layer.widths, strict=True):
                spans[row].append((start, width))
            for row, pieces in spans.items():
                axes.broken_barh(pieces, (row - 0.28, 0.56), facecolors=STATES[layer.state].colour, linewidth=0)
        case Bars():
            widths = [right - left for left, right in zip(layer.edges, layer.edges[1:], strict=False)]
            axes.bar(layer.edges[:-1], layer.counts, widths, align="edge", color=ACCENT, edgecolor=PAPER, linewidth=0.3)
        case Marks():
            where: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False} if layer.beside else {}
            size = (3.2 if layer.beside else 4.8) * MARK_SCALE.get(layer.symbol, 1.0)
            look: dict[str, Any] = {
                "color": layer.colour,
                "linestyle": "none",
                "marker": layer.symbol,
                "markersize": size,
            }
            look |= {"markeredgewidth": 1.5} if layer.symbol in "x|" else {"markeredgewidth": 0.4, "mec": PAPER}
            axes.plot(layer.x, layer.y, zorder=6, alpha=0.6 if layer.symbol == "o" else 1.0, **look, **where)
        case Rules():
            line_style: dict[str, Any] = {
                "color": layer.colour,
                "alpha": rule_opacity(layer),
                "linewidth": 0.6,
                "zorder": 1,
            }
            axes.vlines(layer.x, 0, 1, transform=axes.get_xaxis_transform(), **line_style)


def _legends(figure: Figure, states: Sequence[str], marks: Sequence[Marks], left: float) -> None:
    """Name the colours of states, and below them the marks of faults."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    width, height = figure.get_size_inches()
    common: dict[str, Any] = {"loc": "upper left", "borderaxespad": 0.0, "borderpad": 0.0, "handletextpad": 0.5}
    common |= {"columnspacing": 1.2, "handlelength": 1.0, "labelspacing": 0.45}
    patches = [Patch(color=STATES[state].colour, label=STATES[state].label) for state in states]
    # A legend fills its columns one after the other; a reader goes along the rows.
    patches = [patch for column in range(LEGEND_COLUMNS) for patch in patches[column::LEGEND_COLUMNS]]
    if patches:
        place = ((left + 0.02) / width, 1 - 0.03 / height)
        figure.legend(handles=patches, bbox_to_anchor=place, ncols=LEGEND_COLUMNS, handleheight=0.8, **common)
    handles = [
        Line2D([], [], marker=mark.symbol, markersize=5 * MARK_SCALE.get(mark.symbol, 1.0), label=mark.name)
        for mark in marks
    ]
    for handle in handles:
        handle.set(color=marks[0].colour, markeredgecolor=PAPER, markeredgewidth=0.4, linestyle="none")
    if handles:
        place = ((left + 0.02) / width, 1 - (0.06 + 0.19 * -(-len(states) // LEGEND_COLUMNS)) / height)
        figure.legend(handles=handles, bbox_to_anchor=place, ncols=len(handles), **common)
