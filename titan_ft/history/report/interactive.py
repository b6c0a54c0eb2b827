# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Describe a chart for Plotly, which draws it in the reader's browser. CSS sets the page's inks by
theme.

The descriptions are plain dictionaries, like Plotly's own JSON. A test lets Plotly's classes check
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby, pairwise
from math import log10
from typing import Any, NamedTuple, assert_never

from titan_ft.history.report.layers import (
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
    rule_opacity,
)
from titan_ft.history.report.style import STATES

EPOCH_MS = 946_684_800_000  # the year 2000; a number of two or four digits would be read as a year
FEW = 100  # points of a curve that are dots as well, and marks that are large


def make_figure(chart: Chart) -> dict[str, Any]:
    """Return the traces and the layout of a chart."""
    has_curve = False
    has_rows = False
    num_marks = 0
    for layer in chart.layers:
        if isinstance(layer, Curve):
            has_curve = True
        elif isinstance(layer, Boxes):
            has_rows = True
        elif isinstance(layer, Marks):
            num_marks += len(layer.x)
    # Rows with a logarithmic x, as of stalls, have no other help to read a value.
    has_x_grid = chart.x.kind == "log" and chart.y.ticks is not None
    layout = {
        "height": round(96 * chart.height),
        "margin": {"l": 62 if chart.shared else 40, "r": 14, "t": 28, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12},
        "hovermode": "x" if has_curve else "closest",
        "hoverlabel": {"align": "left", "namelength": 0},
        "barmode": "overlay",
        "bargap": 0,
        "showlegend": False,  # the page has one, which wraps where there is little room
        "xaxis": _make_axis(chart.x) | {"showgrid": has_x_grid},
        "yaxis": _make_axis(chart.y) | {"showgrid": not has_rows, "fixedrange": not has_curve},
        # Marks and rules that stand beside the values have an axis of their own, from 0 to 1.
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
    }
    few_marks = num_marks <= FEW
    traces = [_make_trace(chart.x, layer, few_marks=few_marks) for layer in chart.layers]
    return {"data": traces, "layout": layout, "shared": chart.shared}


def _make_axis(axis: Axis) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "automargin": True,
        "exponentformat": "power",
        "minexponent": 5,
        "zeroline": False,
        "separatethousands": True,
        "ticklabelstandoff": 4,
    }
    if axis.label:
        shown["title"] = {"text": axis.label, "standoff": 10}
    if axis.kind == "clock":
        # Plotly's only axis that names hours and minutes at every zoom is one of dates: the run
        # begins with a year.
        shown["type"] = "date"
        is_short = axis.bounds is not None and axis.bounds[1] < 3600
        form = "%-M:%S" if is_short else "%-H:%M:%S"
        shown["tickformat"] = form
        shown["tickformatstops"] = [
            {"dtickrange": [None, 999], "value": f"{form}.%L"},
            {"dtickrange": [86_400_000, None], "value": "day %-j"},
        ]
    elif axis.kind == "log" and axis.ticks is None:
        shown |= {"type": "log", "dtick": 1, "tickformat": ","}
    else:
        shown["type"] = "linear"
    if axis.bounds is not None:
        if axis.kind == "log":
            shown["range"] = [log10(edge) for edge in axis.bounds]
        else:
            shown["range"] = _convert(axis, axis.bounds)
    if axis.ticks is not None:
        shown["tickvals"] = _convert(axis, axis.ticks)
        shown["ticktext"] = [_escape(text) for text in axis.ticks.values()]
    return shown


def _convert(axis: Axis, values: Iterable[float]) -> list[float]:
    """Return values in an axis's own unit: milliseconds of a clock, or exponents of a logarithm
    with our ticks.
    """
    if axis.kind == "clock":
        return [EPOCH_MS + round(1000 * value, 1) for value in values]
    if axis.kind == "log" and axis.ticks is not None:
        return [round(log10(value), 5) for value in values]
    return [float(f"{value:.7g}") for value in values]


def _convert_lengths(axis: Axis, widths: Iterable[float]) -> list[float]:
    """Return lengths as an axis counts them; on a clock never a whole number, see `EPOCH_MS`."""
    if axis.kind == "clock":
        return [int(1000 * width) + 0.5 for width in widths]
    return list(widths)


def _make_trace(x: Axis, layer: Layer, *, few_marks: bool) -> dict[str, Any]:
    """Return Plotly's trace of a layer; if there are not few marks, they are small."""
    match layer:
        case Curve():
            return _make_line_trace(x, layer)
        case Band():
            return _make_band_trace(x, layer)
        case Boxes():
            return _make_boxes_trace(x, layer)
        case Bars():
            return _make_bars_trace(x, layer)
        case Marks():
            return _make_marks_trace(x, layer, few_marks=few_marks)
        case Rules():
            return _make_rules_trace(x, layer)
    assert_never(layer)


def _make_line_trace(x: Axis, layer: Curve) -> dict[str, Any]:
    line: dict[str, Any] = {"color": layer.colour, "width": 1.6}
    trace: dict[str, Any] = {"type": "scatter", "mode": "lines", "y": _round_values(layer.y)}
    trace["line"] = line
    if layer.stairs:
        line["shape"] = "hv"
        trace["fill"] = "tozeroy"
        trace["fillcolor"] = _make_faint(layer.colour)
    elif len(layer.x) <= FEW:
        trace["mode"] = "lines+markers"
        trace["marker"] = {"size": 4}
    trace["x"] = _convert(x, layer.x)
    return trace | _make_hover(layer.texts)


class _BandPoint(NamedTuple):
    """Where a band is at one x; low and high are None in a gap."""

    x: float
    low: float | None
    high: float | None


def _make_band_trace(x: Axis, layer: Band) -> dict[str, Any]:
    columns = zip(
        _convert(x, layer.x), _round_values(layer.low), _round_values(layer.high), strict=True
    )
    points = [_BandPoint(*column) for column in columns]
    # The outline goes around each stretch without a gap: along its lower edge, and back along its
    # upper edge. None lifts the pen.
    outline_x: list[float | None] = []
    outline_y: list[float | None] = []
    for is_gap, stretch in groupby(points, lambda point: point.low is None):
        if not is_gap:
            edge = list(stretch)
            outline_x += [point.x for point in edge]
            outline_y += [point.low for point in edge]
            edge.reverse()
            outline_x += [point.x for point in edge]
            outline_y += [point.high for point in edge]
        outline_x.append(None)
        outline_y.append(None)
    return {
        "type": "scatter",
        "mode": "lines",
        "x": outline_x,
        "y": outline_y,
        "fill": "toself",
        "fillcolor": _make_faint(layer.colour),
        "line": {"width": 0.8, "color": _make_faint(layer.colour)},
        "hoverinfo": "skip",
    }


def _make_boxes_trace(x: Axis, layer: Boxes) -> dict[str, Any]:
    state = STATES[layer.state]
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": list(layer.rows),
        "width": 0.56,
        "name": state.label,
    }
    trace |= {"base": _convert(x, layer.starts), "x": _convert_lengths(x, layer.widths)}
    trace |= {"marker": {"color": state.colour, "line": {"width": 0}}}
    return trace | _make_hover(layer.texts)


def _make_bars_trace(x: Axis, layer: Bars) -> dict[str, Any]:
    middles = []
    widths = []
    for left, right in pairwise(_convert(x, layer.edges)):
        middles.append((left + right) / 2)
        widths.append(right - left)
    trace = {"type": "bar", "x": middles, "width": widths, "y": list(layer.counts)}
    marker: dict[str, Any] = {"color": layer.colour, "line": {"width": 0}}
    if layer.name:
        # The bars of two runs overlap.
        marker["opacity"] = 0.6
    return trace | {"marker": marker} | _make_hover(layer.texts)


def _make_marks_trace(x: Axis, layer: Marks, *, few_marks: bool) -> dict[str, Any]:
    size = 9 if few_marks else 5
    marker: dict[str, Any] = {"symbol": layer.symbol, "size": size, "color": layer.colour}
    if layer.symbol.endswith("-open"):
        marker["size"] = 14 if layer.symbol == MEDIAN else 7
        marker["line"] = {"width": 2.2, "color": layer.colour}
    if layer.symbol == "circle":
        marker["opacity"] = 0.65
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "x": _convert(x, layer.x),
        "y": list(layer.y),
        "marker": marker,
        "name": _escape(layer.name),
        "cliponaxis": False,
    }
    if layer.is_share_of_height:
        trace["yaxis"] = "y2"
    return trace | _make_hover(layer.texts)


def _make_rules_trace(x: Axis, layer: Rules) -> dict[str, Any]:
    places: list[float | None] = []
    for at in _convert(x, layer.x):
        places += (at, at, None)
    trace = {
        "type": "scatter",
        "mode": "lines",
        "x": places,
        "y": [0, 1, None] * len(layer.x),
        "yaxis": "y2",
    }
    look = {
        "line": {"color": layer.colour, "width": 1},
        "opacity": rule_opacity(layer),
        "hoverinfo": "skip",
    }
    return trace | look


def _make_hover(texts: Sequence[str]) -> dict[str, Any]:
    return {"hoverinfo": "text", "hovertext": [_escape(text) for text in texts]}


def _escape(text: str) -> str:
    """Return a text that Plotly shows as it is: Plotly reads markup, and a name from an event must
    never be any.
    """
    return escape(text, quote=False)


def _round_values(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.7g}") for value in values]


def _make_faint(colour: str) -> str:
    """Return the colour of the area below a line."""
    red = int(colour[1:3], 16)
    green = int(colour[3:5], 16)
    blue = int(colour[5:7], 16)
    return f"rgba({red},{green},{blue},0.22)"
