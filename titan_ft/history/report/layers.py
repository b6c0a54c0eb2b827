# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The parts of a chart, before Plotly draws it: layers over two axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from titan_ft.history.report.style import ACCENT, FAULT

CROSS, MEDIAN = "x-thin-open", "line-ns-open"
"""Plotly's symbols of a missing value and of a median."""


@dataclass(frozen=True)
class Curve:
    """A curve, with a gap where y is None."""

    x: Sequence[float]
    y: Sequence[float | None]
    texts: Sequence[str]
    """The text of each point under the pointer."""
    stairs: bool = False
    """Whether a value holds until the next one; the area below it is filled then."""
    name: str = ""
    """In the legend; empty for a curve that is alone."""
    colour: str = ACCENT


@dataclass(frozen=True)
class Band:
    """The range that the points of a curve stand for."""

    x: Sequence[float]
    low: Sequence[float | None]
    high: Sequence[float | None]
    colour: str = ACCENT


@dataclass(frozen=True)
class Boxes:
    """Stretches of one state in rows, one above the other."""

    state: str
    rows: Sequence[float]
    starts: Sequence[float]
    widths: Sequence[float]
    texts: Sequence[str]


@dataclass(frozen=True)
class Bars:
    """How many values lie between edges; there is one more edge than counts."""

    edges: Sequence[float]
    counts: Sequence[float]
    texts: Sequence[str]
    name: str = ""
    colour: str = ACCENT


@dataclass(frozen=True)
class Marks:
    """Points of one kind."""

    name: str
    symbol: str
    """Plotly's name of the symbol."""
    x: Sequence[float]
    y: Sequence[float]
    texts: Sequence[str]
    colour: str = FAULT
    is_share_of_height: bool = False
    """True if y is a share of the chart's height and no value."""


@dataclass(frozen=True)
class Rules:
    """Lines from the bottom of a chart to its top."""

    x: Sequence[float]
    colour: str = FAULT


def rule_opacity(rules: Rules) -> float:
    """Return the opacity of rules: lower for more rules, so that the curve behind them stays
    visible.
    """
    return max(0.08, min(0.4, 16 / (len(rules.x) or 1)))


Layer = Curve | Band | Boxes | Bars | Marks | Rules


@dataclass(frozen=True)
class Axis:
    label: str = ""
    kind: Literal["linear", "log", "clock"] = "linear"
    """A clock counts seconds since the beginning."""
    bounds: tuple[float, float] | None = None
    """First the left or lower end; rows count downwards."""
    ticks: Mapping[float, str] | None = None
    """Place and text of each tick; with None, Plotly chooses them."""


@dataclass(frozen=True)
class Chart:
    """One figure of the report."""

    name: str
    title: str
    caption: str
    x: Axis
    y: Axis
    layers: Sequence[Layer] = field(repr=False)
    height: float = 2.8
    """In units of 96 pixels, of the plot with its axes."""
    wide: bool = True
    shared: Literal["", "steps", "time"] = ""
    """Charts that share their x are zoomed together."""
