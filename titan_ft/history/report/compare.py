# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Two runs on one page: outcomes, figures with their differences, and overlaid curves
(compare.html).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from titan_ft.config import unwritable
from titan_ft.history.check import check
from titan_ft.history.outcomes.outcome import find_outcome
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.report.cards import find_cards
from titan_ft.history.report.charts import curve, states_bar, step_axes, step_counts
from titan_ft.history.report.facts import describe_run
from titan_ft.history.report.layers import Axis, Band, Bars, Boxes, Chart, Curve, Layer, Marks
from titan_ft.history.report.page import fill, title_of
from titan_ft.history.report.phases import add_up, find_phases
from titan_ft.history.report.style import ACCENT, state_order
from titan_ft.history.report.words import DASH
from titan_ft.history.terminal import grid
from titan_ft.system.whole_file import write_whole

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = (ACCENT, "#c2571a")  # blue and orange, far apart for the colour-blind too


@dataclass(frozen=True)
class ComparedFigure:
    """One figure of both runs."""

    name: str
    values: tuple[str, str]
    details: tuple[str, str]
    difference: str
    """Of the second run from the first."""


def compare_figures(runs: Sequence[RunRecord]) -> list[ComparedFigure]:
    """Return the figures of two runs side by side, with a dash for a missing figure."""
    cards = [{card.name: card for card in find_cards(record)} for record in runs]
    rows = []
    for name in dict.fromkeys([*cards[0], *cards[1]]):
        first, second = (found.get(name) for found in cards)
        numbers = [None if card is None else card.number for card in (first, second)]
        rows.append(
            ComparedFigure(
                name,
                (DASH if first is None else first.text, DASH if second is None else second.text),
                ("" if first is None else first.detail, "" if second is None else second.detail),
                _difference(*numbers, points=name == "goodput"),
            )
        )
    return rows


def _difference(first: float | None, second: float | None, *, points: bool) -> str:
    """Return by how much a figure of the second run is more or less than of the first.

    Args:
        points: whether the figure is a share in per cent: the difference is in percentage points.
    """
    if first is None or second is None:
        return DASH
    if first == second:
        return "equal"
    if points:
        return f"{second - first:+.1f} points"
    if not first:
        return DASH
    share = 100 * (second - first) / abs(first)
    return f"{share:+.0f} %" if abs(share) >= 9.5 else f"{share:+.1f} %"


def compare_facts(
    runs: Sequence[RunRecord],
) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """Return what was run differently, with both values, and what was the same."""
    first, second = (dict(describe_run(record)) for record in runs)
    names = list(dict.fromkeys([*first, *second]))
    different = [
        (name, first.get(name, DASH), second.get(name, DASH))
        for name in names
        if first.get(name) != second.get(name)
    ]
    return different, [(name, first[name]) for name in names if first.get(name) == second.get(name)]


def name_runs(folders: Sequence[Path]) -> tuple[str, str]:
    """Return short, different names of two runs: the ends of their folders' paths, as long as
    needed.
    """
    parts = [folder.absolute().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        first, second = ("/".join(part[-length:]) for part in parts)
        if first != second:
            return first, second
    return f"{first} (1)", f"{second} (2)"  # one run with itself


def compare_table(runs: Sequence[RunRecord], names: Sequence[str]) -> Table:
    """Return outcomes and figures of two runs for the terminal."""
    rows = [
        ("", *names, "difference"),
        ("outcome", *(find_outcome(record).headline for record in runs), ""),
    ]
    return grid(
        [*rows, *((row.name, *row.values, row.difference) for row in compare_figures(runs))]
    )


def write_comparison(runs: Sequence[RunRecord], names: Sequence[str], folder: Path) -> Path:
    """Write compare.html into a folder; return the page.

    Raises:
        ConfigError: the folder cannot be written; a page that was there stays whole.
    """
    different, same = compare_facts(runs)
    arithmetic = check(runs[0], runs[1])["same arithmetic"]
    page = fill(
        "compare.html",
        compare_charts(runs, names),
        title=" and ".join(names),
        runs=[
            {
                "name": name,
                "title": title_of(record),
                "outcome": find_outcome(record),
                "check": check(record),
            }
            for name, record in zip(names, runs, strict=True)
        ],
        rows=compare_figures(runs),
        arithmetic=arithmetic,
        details=arithmetic.details(runs[0].begin, runs[0].unit.noun),
        different=different,
        same=same,
        swatches=COLOURS,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "compare.html", page.encode())
    except OSError as error:
        raise unwritable("--out", folder, error) from error
    return folder / "compare.html"


def compare_charts(runs: Sequence[RunRecord], names: Sequence[str]) -> dict[str, Chart]:
    """Return the charts that both runs share, by name; a run without a chart's figures is left out
    of it.
    """
    charts = (_losses(runs, names), _step_times(runs, names), _states(runs, names))
    return {chart.name: chart for chart in charts if chart is not None}


def _losses(runs: Sequence[RunRecord], names: Sequence[str]) -> Chart | None:
    layers: list[Layer] = []
    captions, last = [], 0
    for record, name, colour in zip(runs, names, COLOURS, strict=True):
        values = [(point.step, point.loss) for point in record.curve]
        known = [(step, value) for step, value in values if value is not None]
        if not known:
            continue
        drawn, thinned = curve(values, f"{name}: loss", noun=record.unit.noun)
        for layer in drawn:
            if isinstance(layer, Curve):
                layers.append(replace(layer, name=name, colour=colour))
            elif isinstance(layer, Band | Marks):
                layers.append(replace(layer, colour=colour))
        captions.append(
            f"{name}: {known[-1][1]:.3f} at {record.unit.name(known[-1][0], ',')}{'.' + thinned}"
        )
        last = max(last, values[-1][0])
    if not layers:
        return None
    across = Axis(runs[0].unit.noun, bounds=(0.0, last * 1.005 + 0.5))
    return Chart("loss", "Loss", " ".join(captions), across, Axis(), layers, 3.3, shared="steps")


def _step_times(runs: Sequence[RunRecord], names: Sequence[str]) -> Chart | None:
    times = [[event.seconds for event in record.commits if event.seconds > 0] for record in runs]
    if not any(times):
        return None
    noun = runs[0].unit.noun
    edges, across = step_axes([value for values in times for value in values], noun)
    layers = []
    for values, name, colour in zip(times, names, COLOURS, strict=True):
        counts, texts = step_counts(values, edges, noun)
        shares = [100 * number / (len(values) or 1) for number in counts]
        layers.append(Bars(edges, shares, [f"{name}: {text}" for text in texts], name, colour))
    caption = f"Share of each run's {noun}s by how long they took, of all groups."
    return Chart(
        "step-times", f"Time of a {noun}", caption, across, Axis(f"{noun}s (%)"), layers, 2.6
    )


def _states(runs: Sequence[RunRecord], names: Sequence[str]) -> Chart | None:
    rows = {
        name: add_up(phase for row in find_phases(record).values() for phase in row)
        for name, record in zip(names, runs, strict=True)
    }
    if not any(rows.values()):
        return None
    boxes: dict[str, list[tuple[float, float, float, str]]] = defaultdict(list)
    labels = states_bar(rows, boxes)
    layers = [Boxes(state, *zip(*boxes[state], strict=True)) for state in state_order(set(boxes))]
    ticks = {float(place): label for place, label in enumerate(labels)}
    caption = "Where the whole time of all groups went; in brackets the share of training."
    across = Axis("share of the whole time (%)", bounds=(0.0, 100.0))
    return Chart(
        "states",
        "Time in each state",
        caption,
        across,
        Axis(bounds=(1.55, -0.6), ticks=ticks),
        layers,
        1.4,
    )
