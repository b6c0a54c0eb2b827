# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Make a figure without any global state, and render it for a page and as an image. matplotlib comes in on use."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from titan_ft.history.report.style import GRID, INK, MUTED, PAPER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEFT, BOTTOM = 0.82, 0.4  # inches beside and below the axes, so that figures of one width and one quantity line up
SETTINGS: dict[Any, Any] = {
    "font.size": 8.2,
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
    "svg.fonttype": "none",
    "path.simplify": True,
}


@dataclass
class Drawing:
    """A figure in both of its forms."""

    name: str
    svg: str
    """An <svg> element for the page: texts are texts, ids are unique to the figure, inks are CSS variables."""
    png: bytes


@dataclass
class Canvas:
    """A figure in the making."""

    figure: Figure
    tooltips: dict[str, str] = field(default_factory=dict)  # id of an artist -> what it says under the pointer


@contextmanager
def new_canvas(width: float, height: float) -> Iterator[Canvas]:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(SETTINGS):
        yield Canvas(Figure(figsize=(width, height)))


def add_axes(canvas: Canvas, left: float = LEFT, right: float = 0.2, top: float = 0.08) -> Axes:
    """Return axes with margins in inches."""
    width, height = canvas.figure.get_size_inches()
    return canvas.figure.add_axes(
        (left / width, BOTTOM / height, 1 - (left + right) / width, 1 - (BOTTOM + top) / height)
    )


def render(canvas: Canvas, name: str, label: str) -> Drawing:
    """Write a figure as an element of a page and as PNG."""
    from matplotlib import rc_context

    text, image = io.StringIO(), io.BytesIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context({**SETTINGS, "svg.hashsalt": name}):
        canvas.figure.savefig(text, format="svg", transparent=True, metadata=nothing)
        canvas.figure.savefig(image, format="png", dpi=150, facecolor="white")
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r"\brotate\(-0 [^)]*\)", "", svg).replace(' transform=""', "")
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg)  # a hundredth of a point is finer than any screen
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", svg)
    for ink, variable in ((INK, "ink"), (MUTED, "muted"), (GRID, "grid"), (PAPER, "paper")):
        svg = svg.replace(ink, f"var(--{variable})")
    svg = re.sub(r"\b(fill|stroke): #000000", r"\1: var(--ink)", svg)
    for artist, tooltip in canvas.tooltips.items():
        mark = f'<g id="{name}-{artist}">'
        svg = svg.replace(mark, f"{mark}<title>{escape(tooltip)}</title>", 1)
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
    return Drawing(name, re.sub(r"\n\s*", "\n", svg).strip(), image.getvalue())
