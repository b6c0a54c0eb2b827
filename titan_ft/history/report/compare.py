# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Two runs on one page: outcomes, figures with their differences, and overlaid curves
(compare.html).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from titan_ft.config import unwritable_folder_error
from titan_ft.history.check import check
from titan_ft.history.outcomes.outcome import find_outcome
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.report.cards import Card, find_cards
from titan_ft.history.report.charts import (
    count_step_times,
    make_curve,
    make_state_bars,
    make_step_columns,
)
from titan_ft.history.report.facts import describe_run
from titan_ft.history.report.layers import Axis, Band, Bars, Chart, Curve, Layer, Marks
from titan_ft.history.report.page import fill_template, make_title
from titan_ft.history.report.phases import add_up_job
from titan_ft.history.report.style import ACCENT
from titan_ft.history.report.words import DASH
from titan_ft.history.terminal import make_grid
from titan_ft.system.ownership import make_folder
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
    """The change from the first run to the second."""


def compare_figures(runs: Sequence[RunRecord]) -> list[ComparedFigure]:
    """Return the figures of two runs side by side, with a dash for a missing figure."""
    cards = [{card.name: card for card in find_cards(record)} for record in runs]
    rows = []
    for name in dict.fromkeys([*cards[0], *cards[1]]):
        missing = Card(name, None, DASH)
        first = cards[0].get(name, missing)
        second = cards[1].get(name, missing)
        figure = ComparedFigure(
            name,
            (first.text, second.text),
            (first.detail, second.detail),
            _describe_difference(first.number, second.number, in_percent=name == "goodput"),
        )
        rows.append(figure)
    return rows


def _describe_difference(first: float | None, second: float | None, *, in_percent: bool) -> str:
    """Return by how much a figure of the second run is more or less than of the first.

    Args:
        in_percent: whether the figure is in per cent: the difference is in percentage points then.
    """
    if first is None or second is None:
        return DASH
    if first == second:
        return "equal"
    if in_percent:
        return f"{second - first:+.1f} points"
    if not first:
        return DASH
    percent = 100 * (second - first) / abs(first)
    if abs(percent) >= 9.5:
        return f"{percent:+.0f} %"
    return f"{percent:+.1f} %"


def compare_facts(
    runs: Sequence[RunRecord],
) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """Return the facts that differ, with both values, and the equal facts."""
    first, second = (dict(describe_run(record)) for record in runs)
    different = []
    same = []
    for name in dict.fromkeys([*first, *second]):
        if first.get(name) == second.get(name):
            same.append((name, first[name]))
        else:
            different.append((name, first.get(name, DASH), second.get(name, DASH)))
    return different, same


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


def make_comparison_table(runs: Sequence[RunRecord], names: Sequence[str]) -> Table:
    """Return outcomes and figures of two runs for the terminal."""
    headlines = [find_outcome(record).headline for record in runs]
    rows: list[tuple[str, ...]] = [("", *names, "difference"), ("outcome", *headlines, "")]
    rows += [(figure.name, *figure.values, figure.difference) for figure in compare_figures(runs)]
    return make_grid(rows)


def write_comparison(runs: Sequence[RunRecord], names: Sequence[str], folder: Path) -> Path:
    """Write compare.html into a folder; return the page.

    Raises:
        ConfigError: the folder cannot be written; a page that was there stays whole.
    """
    different, same = compare_facts(runs)
    arithmetic = check(runs[0], runs[1])["same arithmetic"]
    heads = []
    for name, record in zip(names, runs, strict=True):
        head = {
            "name": name,
            "title": make_title(record),
            "outcome": find_outcome(record),
            "check": check(record),
        }
        heads.append(head)
    page = fill_template(
        "compare.html",
        compare_charts(runs, names),
        title=" and ".join(names),
        runs=heads,
        rows=compare_figures(runs),
        arithmetic=arithmetic,
        details=arithmetic.details(runs[0].begin, runs[0].unit.noun),
        different=different,
        same=same,
        swatches=COLOURS,
    )
    try:
        make_folder(folder)
        write_whole(folder / "compare.html", page.encode())
    except OSError as error:
        raise unwritable_folder_error("--out", folder, error) from error
    return folder / "compare.html"


def compare_charts(runs: Sequence[RunRecord], names: Sequence[str]) -> dict[str, Chart]:
    """Return the charts that both runs share, by name; a run without a chart's figures is left out
    of it.
    """
    charts = (_draw_losses(runs, names), _draw_step_times(runs, names), _draw_states(runs, names))
    return {chart.name: chart for chart in charts if chart is not None}


def _draw_losses(runs: Sequence[RunRecord], names: Sequence[str]) -> Chart | None:
    layers: list[Layer] = []
    captions = []
    furthest = 0
    for record, name, colour in zip(runs, names, COLOURS, strict=True):
        values = [(point.step, point.loss) for point in record.curve]
        known = [(step, value) for step, value in values if value is not None]
        if not known:
            continue
        drawn, thinned = make_curve(values, f"{name}: loss", noun=record.unit.noun)
        for layer in drawn:
            if isinstance(layer, Curve):
                layers.append(replace(layer, name=name, colour=colour))
            elif isinstance(layer, Band | Marks):
                layers.append(replace(layer, colour=colour))
        last_step, last_loss = known[-1]
        end = f"{last_loss:.3f} at {record.unit.name(last_step, ',')}"
        captions.append(f"{name}: {end}.{thinned}")
        furthest = max(furthest, values[-1][0])
    if not layers:
        return None
    across = Axis(runs[0].unit.noun, bounds=(0.0, furthest * 1.005 + 0.5))
    return Chart("loss", "Loss", " ".join(captions), across, Axis(), layers, 3.3, shared="steps")


def _draw_step_times(runs: Sequence[RunRecord], names: Sequence[str]) -> Chart | None:
    seconds_of_runs: list[list[float]] = []
    all_seconds: list[float] = []
    for record in runs:
        seconds = [event.seconds for event in record.commits if event.seconds > 0]
        seconds_of_runs.append(seconds)
        all_seconds += seconds
    if not all_seconds:
        return None
    noun = runs[0].unit.noun
    edges, across = make_step_columns(all_seconds, noun)
    layers = []
    for seconds, name, colour in zip(seconds_of_runs, names, COLOURS, strict=True):
        counts, texts = count_step_times(seconds, edges, noun)
        percents = [100 * number / (len(seconds) or 1) for number in counts]
        layers.append(Bars(edges, percents, [f"{name}: {text}" for text in texts], name, colour))
    caption = f"Share of each run's {noun}s by how long they took, of all groups."
    return Chart(
        "step-times", f"Time of a {noun}", caption, across, Axis(f"{noun}s (%)"), layers, 2.6
    )


def _draw_states(runs: Sequence[RunRecord], names: Sequence[str]) -> Chart | None:
    rows = {name: add_up_job(record) for name, record in zip(names, runs, strict=True)}
    if not any(rows.values()):
        return None
    layers, labels = make_state_bars(rows)
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
