# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Write the page of a forecast: its cases as tables, and three charts of the first case.

`titan-ft plan` calls `write_page`. The template is plan.html. The charts and the style are those of a
run's report (`titan_ft.history.report`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from titan_ft.config import unwritable_folder_error
from titan_ft.forecast.candidate import Candidate
from titan_ft.forecast.choice import Case, Forecast, find_sensitivities, scale_input
from titan_ft.forecast.closed_forms import enough_spares, estimate
from titan_ft.forecast.inputs import describe_inputs
from titan_ft.forecast.measured import Measured
from titan_ft.forecast.table import NOTES, TEXT_COLUMNS, case_notes, case_rows
from titan_ft.history.report.layers import Axis, Band, Chart, Curve, Layer
from titan_ft.history.report.page import fill_template
from titan_ft.history.report.style import STATES
from titan_ft.system.ownership import make_folder
from titan_ft.system.whole_file import write_whole

COLOURS = [STATES[state].colour for state in ("training", "recovering", "lost", "waiting")]
MTBF_FACTORS = [2.0 ** (quarters / 4) for quarters in range(-16, 17)]
"""From 1/16 to 16 times the time between failures, four points for each doubling."""


def write_page(folder: Path, cases: Sequence[Case], measured: Measured | None, source: str) -> Path:
    """Write index.html into a folder; return its path.

    Args:
        cases: all are shown as tables. Charts, sensitivities and inputs are those of the first one.
        measured: the record from which costs were taken.
        source: the scenario file or the run, for the title.

    Raises:
        ConfigError: the folder cannot be written.
    """
    first = cases[0]
    page = fill_template(
        "plan.html",
        draw_charts(first),
        folder=Path(__file__).parent,
        title=f"Forecast of {source}",
        cases=[_case_values(case) for case in cases],
        sensitivities=_sensitivity_rows(first),
        observations=[] if measured is None else measured.observations(),
        inputs=describe_inputs(first.forecasts[0].candidate) if first.forecasts else [],
        notes=NOTES,
    ).encode()
    try:
        make_folder(folder)
        write_whole(folder / "index.html", page)
    except OSError as error:
        raise unwritable_folder_error("--out", folder, error) from error
    return folder / "index.html"


def _case_values(case: Case) -> dict[str, Any]:
    """Return the values of a case for the template.

    The template aligns a column to the right if its heading begins with "#".
    """
    rows = case_rows(case)
    columns = list(rows[0]) if rows else []
    return {
        "title": case.title,
        "advice": case.advice,
        "notes": case_notes(case),
        "head": [name if name in TEXT_COLUMNS else f"#{name}" for name in columns],
        "rows": [list(row.values()) for row in rows],
    }


def _sensitivity_rows(case: Case) -> list[tuple[str, ...]]:
    if not case.forecasts:
        return []
    rows = []
    for row in find_sensitivities(case.forecasts[0].candidate):
        cells = [f"{100 * value:.2f} %" for value in (row.half, row.usual, row.twice)]
        rows.append((row.input_name, *cells))
    return rows


# Charts


def draw_charts(case: Case) -> dict[str, Chart]:
    """Return the charts of a case by name. A chart with nothing to show is left out."""
    if not case.forecasts:
        return {}
    charts = [
        _draw_group_sizes(case.forecasts),
        _draw_mtbf(case.forecasts),
        _draw_spares(case.forecasts[0].candidate),
    ]
    return {chart.name: chart for chart in charts if chart is not None}


def _draw_group_sizes(forecasts: Sequence[Forecast]) -> Chart | None:
    """Draw the effective time over the GPUs of a group, a curve for each strategy with groups.

    None if no strategy has two sizes.
    """
    layers: list[Layer] = []
    all_sizes: set[int] = set()
    by_worth = sorted(forecasts, key=attrgetter("worth"), reverse=True)
    for colour, strategy in zip(COLOURS, ("groups", "rounds"), strict=False):
        best_of_size: dict[int, Forecast] = {}
        for forecast in by_worth:
            if forecast.candidate.strategy == strategy:
                best_of_size.setdefault(forecast.candidate.gpus, forecast)
        if len(best_of_size) < 2:
            continue
        all_sizes |= best_of_size.keys()
        sizes = []
        lows = []
        highs = []
        means = []
        for size, forecast in sorted(best_of_size.items()):
            low = high = forecast.estimate
            if forecast.accounts:
                low, high = forecast.spread()
            sizes.append(float(size))
            lows.append(100 * low)
            highs.append(100 * high)
            means.append(forecast.effective)
        layers.append(Band(sizes, lows, highs, colour=colour))
        layers.append(_draw_line(sizes, means, strategy, colour, "GPUs a group"))
    if not layers:
        return None
    ticks = {float(size): f"{size:,}" for size in sorted(all_sizes)}
    axis = Axis("GPUs of a group", kind="log", ticks=ticks)
    caption = "Effective training time in %; the band holds 90 % of runs."
    return Chart("group-size", "Size of a group", caption, axis, Axis(), layers, height=3.3)


def _draw_mtbf(forecasts: Sequence[Forecast]) -> Chart:
    """Draw the effective time over the time between failures, for the best of each strategy."""
    best_of_strategy: dict[str, Candidate] = {}
    for forecast in forecasts:  # the best first
        best_of_strategy.setdefault(forecast.candidate.strategy, forecast.candidate)
    layers: list[Layer] = []
    for colour, candidate in zip(COLOURS, best_of_strategy.values(), strict=False):
        estimates = []
        for factor in MTBF_FACTORS:
            changed = scale_input(candidate, "time between failures", factor)
            estimates.append(estimate(changed))
        unit = "times the time between failures"
        layers.append(_draw_line(MTBF_FACTORS, estimates, candidate.shape, colour, unit))
    ticks = {2.0**power: f"{2.0**power:g}" for power in range(-4, 5)}
    axis = Axis("times the scenario's time between failures", kind="log", ticks=ticks)
    title = "If failures were rarer, or more frequent"
    caption = "Effective training time in %, by closed forms: the best shape of each strategy."
    return Chart("mtbf", title, caption, axis, Axis(), layers, height=3.3)


def _draw_spares(candidate: Candidate) -> Chart | None:
    """Draw the effective time over the spare nodes, up to twice as many as are enough.

    None if nodes never run out.
    """
    mean_broken_nodes = candidate.rates.broken_nodes
    if candidate.spares is None or not mean_broken_nodes:
        return None
    enough = enough_spares(mean_broken_nodes)
    numbers = sorted({round(enough * eighths / 8) for eighths in range(2 * 8 + 1)})
    estimates = [estimate(replace(candidate, spares=number)) for number in numbers]
    x = [float(number) for number in numbers]
    layers = [_draw_line(x, estimates, "", COLOURS[0], "spare nodes")]
    mended = f"99 % of the time {enough} nodes at most are being mended."
    caption = f"Effective training time in %, by closed forms. {mended}"
    return Chart("spares", "Spare nodes", caption, Axis("spare nodes"), Axis(), layers)


def _draw_line(
    x: Sequence[float], shares: Sequence[float], name: str, colour: str, unit: str
) -> Curve:
    """Return a curve of shares in per cent.

    Args:
        unit: unit of `x`, for the text of each point.
    """
    percentages = [100 * share for share in shares]
    texts = []
    for x_value, percentage in zip(x, percentages, strict=True):
        texts.append(f"{percentage:.2f} % at {x_value:,.4g} {unit}")
    return Curve(x, percentages, texts, name=name, colour=colour)
