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
from typing import Any

from titan_ft.history.report.layers import (
    MEDIAN,
    Axis,
    Band,
    Bars,
    Boxes,
    Chart,
    Curve,
    Marks,
    Rules,
    rule_opacity,
)
from titan_ft.history.report.style import STATES

EPOCH_MS = 946_684_800_000  # the year 2000; a number of two or four digits would be read as a year
FEW = 100  # points of a curve that are dots as well, and marks that are large


def figure(chart: Chart) -> dict[str, Any]:
    """Return the traces and the layout of a chart."""
    curve = any(isinstance(layer, Curve) for layer in chart.layers)
    rows = any(isinstance(layer, Boxes) for layer in chart.layers)
    layout = {
        "height": round(96 * chart.height),
        "margin": {"l": 62 if chart.shared else 40, "r": 14, "t": 28, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12},
        "hovermode": "x" if curve else "closest",
        "hoverlabel": {"align": "left", "namelength": 0},
        "barmode": "overlay",
        "bargap": 0,
        "showlegend": False,  # the page has one, which wraps where there is little room
        "xaxis": _axis(chart.x) | {"showgrid": chart.x.kind == "log" and chart.y.ticks is not None},
        "yaxis": _axis(chart.y) | {"showgrid": not rows, "fixedrange": not curve},
        # Marks and rules that stand beside the values have an axis of their own, from 0 to 1.
        "yaxis2": {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
    }
    few = sum(len(layer.x) for layer in chart.layers if isinstance(layer, Marks)) <= FEW
    traces = [_trace(chart.x, layer, few=few) for layer in chart.layers]
    return {"data": traces, "layout": layout, "shared": chart.shared}


def _axis(axis: Axis) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "automargin": True,
        "exponentformat": "power",
        "minexponent": 5,
        "zeroline": False,
        "separatethousands": True,
        "ticklabelstandoff": 4,
    }
    shown |= {"title": {"text": axis.label, "standoff": 10}} if axis.label else {}
    if axis.kind == "clock":
        # Plotly's only axis that names hours and minutes at every zoom is one of dates: the run
        # begins with a year.
        short = axis.bounds is not None and axis.bounds[1] < 3600
        shown |= {"type": "date", "tickformat": "%-M:%S" if short else "%-H:%M:%S"}
        shown["tickformatstops"] = [
            {"dtickrange": [None, 999], "value": "%-M:%S.%L" if short else "%-H:%M:%S.%L"},
            {"dtickrange": [86_400_000, None], "value": "day %-j"},
        ]
    elif axis.kind == "log" and axis.ticks is None:
        shown |= {"type": "log", "dtick": 1, "tickformat": ","}
    else:
        shown |= {"type": "linear"}
    if axis.bounds is not None:
        shown["range"] = (
            [log10(edge) for edge in axis.bounds] if axis.kind == "log" else _at(axis, axis.bounds)
        )
    if axis.ticks is not None:
        shown |= {"tickvals": _at(axis, axis.ticks), "ticktext": [*map(_text, axis.ticks.values())]}
    return shown


def _at(axis: Axis, values: Iterable[float]) -> list[float]:
    """Return values in an axis's own unit: milliseconds of a clock, or exponents of a logarithm
    with our ticks.
    """
    if axis.kind == "clock":
        return [EPOCH_MS + round(1000 * value, 1) for value in values]
    if axis.kind == "log" and axis.ticks is not None:
        return [round(log10(value), 5) for value in values]
    return [float(f"{value:.7g}") for value in values]


def _lengths(axis: Axis, widths: Iterable[float]) -> list[float]:
    """Return lengths as an axis counts them; on a clock never a whole number, see `EPOCH_MS`."""
    return [int(1000 * width) + 0.5 if axis.kind == "clock" else width for width in widths]


def _trace(x: Axis, layer: object, *, few: bool) -> dict[str, Any]:
    """Return what draws a layer; where there are not few marks, they are small."""
    match layer:
        case Curve():
            return _line(x, layer)
        case Band():
            return _band(x, layer)
        case Boxes():
            return _boxes(x, layer)
        case Bars():
            return _bars(x, layer)
        case Marks():
            return _marks(x, layer, few=few)
        case Rules():
            return _rules(x, layer)
    raise AssertionError(layer)


def _line(x: Axis, layer: Curve) -> dict[str, Any]:
    mode = "lines+markers" if len(layer.x) <= FEW and not layer.stairs else "lines"
    trace: dict[str, Any] = {"type": "scatter", "mode": mode, "y": _values(layer.y)}
    trace["line"] = {"color": layer.colour, "width": 1.6} | (
        {"shape": "hv"} if layer.stairs else {}
    )
    trace |= {"marker": {"size": 4}} if mode != "lines" else {}
    trace |= {"fill": "tozeroy", "fillcolor": _faint(layer.colour)} if layer.stairs else {}
    return trace | {"x": _at(x, layer.x)} | _hover(layer.texts)


def _band(x: Axis, layer: Band) -> dict[str, Any]:
    outline: list[tuple[float | None, float | None]] = []  # once around each stretch without a gap
    whole = zip(_at(x, layer.x), _values(layer.low), _values(layer.high), strict=True)
    for known, stretch in groupby(whole, lambda point: point[1] is not None):
        points = list(stretch) if known else []
        outline += [(at, low) for at, low, _ in points] + [
            (at, high) for at, _, high in reversed(points)
        ]
        outline.append((None, None))
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [at for at, _ in outline],
        "y": [value for _, value in outline],
        "fill": "toself",
        "fillcolor": _faint(layer.colour),
        "line": {"width": 0.8, "color": _faint(layer.colour)},
        "hoverinfo": "skip",
    }


def _boxes(x: Axis, layer: Boxes) -> dict[str, Any]:
    state = STATES[layer.state]
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": list(layer.rows),
        "width": 0.56,
        "name": state.label,
    }
    trace |= {"base": _at(x, layer.starts), "x": _lengths(x, layer.widths)}
    trace |= {"marker": {"color": state.colour, "line": {"width": 0}}}
    return trace | _hover(layer.texts)


def _bars(x: Axis, layer: Bars) -> dict[str, Any]:
    edges = _at(x, layer.edges)
    middles = [(left + right) / 2 for left, right in pairwise(edges)]
    widths = [right - left for left, right in pairwise(edges)]
    trace = {"type": "bar", "x": middles, "width": widths, "y": list(layer.counts)}
    marker = {"color": layer.colour, "line": {"width": 0}} | (
        {"opacity": 0.6} if layer.name else {}
    )
    return trace | {"marker": marker} | _hover(layer.texts)


def _marks(x: Axis, layer: Marks, *, few: bool) -> dict[str, Any]:
    marker: dict[str, Any] = {
        "symbol": layer.symbol,
        "size": 9 if few else 5,
        "color": layer.colour,
    }
    if layer.symbol.endswith("-open"):
        marker |= {
            "size": 14 if layer.symbol == MEDIAN else 7,
            "line": {"width": 2.2, "color": layer.colour},
        }
    marker |= {"opacity": 0.65} if layer.symbol == "circle" else {}
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "x": _at(x, layer.x),
        "y": list(layer.y),
        "marker": marker,
    }
    trace["name"], trace["cliponaxis"] = _text(layer.name), False
    trace |= {"yaxis": "y2"} if layer.beside else {}
    return trace | _hover(layer.texts)


def _rules(x: Axis, layer: Rules) -> dict[str, Any]:
    places = [place for at in _at(x, layer.x) for place in (at, at, None)]
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


def _hover(texts: Sequence[str]) -> dict[str, Any]:
    return {"hoverinfo": "text", "hovertext": [*map(_text, texts)]}


def _text(text: str) -> str:
    """Return a text as Plotly shows it: it reads markup, and a name from an event must never be
    any.
    """
    return escape(text, quote=False)


def _values(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.7g}") for value in values]


def _faint(colour: str) -> str:
    """Return a colour of an area below a line."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.22)"
