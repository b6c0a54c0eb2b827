# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Write the page of a forecast, from the parts of a run's report; its template is plan.html."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_ft.config import unwritable_folder_error
from titan_ft.forecast.candidate import Candidate
from titan_ft.forecast.choice import Case, Forecast, scaled, sensitivity
from titan_ft.forecast.closed_forms import estimate, standbys
from titan_ft.forecast.inputs import describe_inputs
from titan_ft.forecast.measured import Measured
from titan_ft.forecast.table import NOTES, TEXTS, case_notes, case_rows
from titan_ft.history.report.layers import Axis, Band, Chart, Curve, Layer
from titan_ft.history.report.page import fill_template
from titan_ft.history.report.style import STATES
from titan_ft.system.ownership import make_folder
from titan_ft.system.whole_file import write_whole

COLOURS = [STATES[state].colour for state in ("training", "recovering", "lost", "waiting")]
FACTORS = [2.0 ** (eighth / 4) for eighth in range(-16, 17)]


def write_page(folder: Path, cases: Sequence[Case], measured: Measured | None, source: str) -> Path:
    """Write index.html into a folder; return the page.

    Args:
        source: what the scenario is called.

    Raises:
        ConfigError: the folder cannot be written.
    """
    first = cases[0]
    page = fill_template(
        "plan.html",
        draw_charts(first),
        folder=Path(__file__).parent,
        title=f"Forecast of {source}",
        cases=[_case_parts(case) for case in cases],
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


def _case_parts(case: Case) -> dict[str, Any]:
    """Return a case for the template, which aligns a column to the right if its head has a #."""
    rows = case_rows(case)
    columns = list(rows[0]) if rows else []
    return {
        "title": case.title,
        "advice": case.advice,
        "notes": case_notes(case),
        "head": [name if name in TEXTS else f"#{name}" for name in columns],
        "rows": [list(row.values()) for row in rows],
    }


def _sensitivity_rows(case: Case) -> list[tuple[str, ...]]:
    if not case.forecasts:
        return []
    rows = sensitivity(case.forecasts[0].candidate)
    return [(name, *(f"{100 * value:.2f} %" for value in values)) for name, *values in rows]


# Charts


def draw_charts(case: Case) -> dict[str, Chart]:
    """Return the charts of a case that have something to show, by name."""
    if not case.forecasts:
        return {}
    charts = [
        _over_group_size(case.forecasts),
        _over_mtbf(case.forecasts),
        _over_spares(case.forecasts[0].candidate),
    ]
    return {chart.name: chart for chart in charts if chart is not None}


def _over_group_size(forecasts: Sequence[Forecast]) -> Chart | None:
    layers: list[Layer] = []
    sizes: set[int] = set()
    for colour, strategy in zip(COLOURS, ("groups", "rounds"), strict=False):
        best: dict[int, Forecast] = {}
        for each in sorted(forecasts, key=lambda each: -each.worth):
            if each.candidate.strategy == strategy:
                best.setdefault(each.candidate.gpus, each)
        if len(best) < 2:
            continue
        sizes |= best.keys()
        x, low, high, means = [], [], [], []
        for size, each in sorted(best.items()):
            span = each.spread() if each.accounts else (each.estimate, each.estimate)
            x.append(float(size))
            low.append(100 * span[0])
            high.append(100 * span[1])
            means.append(each.effective)
        layers.append(Band(x, low, high, colour=colour))
        layers.append(_line(x, means, strategy, colour, "GPUs a group"))
    if not layers:
        return None
    ticks = {float(size): f"{size:,}" for size in sorted(sizes)}
    axis = Axis("GPUs of a group", kind="log", ticks=ticks)
    caption = "Effective training time in %; the band holds 90 % of runs."
    return Chart("group-size", "Size of a group", caption, axis, Axis(), layers, height=3.3)


def _over_mtbf(forecasts: Sequence[Forecast]) -> Chart:
    best: dict[str, Candidate] = {}
    for forecast in forecasts:
        best.setdefault(forecast.candidate.strategy, forecast.candidate)
    layers: list[Layer] = []
    for colour, each in zip(COLOURS, best.values(), strict=False):
        values = [estimate(scaled(each, "time between failures", factor)) for factor in FACTORS]
        unit = "times the time between failures"
        layers.append(_line(FACTORS, values, each.shape, colour, unit))
    ticks = {2.0**power: f"{2.0**power:g}" for power in range(-4, 5)}
    axis = Axis("times the scenario's time between failures", kind="log", ticks=ticks)
    title = "If failures were rarer, or more frequent"
    caption = "Effective training time in %, by closed forms: the best shape of each strategy."
    return Chart("mtbf", title, caption, axis, Axis(), layers, height=3.3)


def _over_spares(candidate: Candidate) -> Chart | None:
    expected = candidate.rates.broken_nodes
    if candidate.spares is None or not expected:
        return None
    knee = standbys(expected)
    numbers = sorted({round(knee * eighth / 8) for eighth in range(17)})
    values = [estimate(replace(candidate, spares=number)) for number in numbers]
    layers = [_line([float(number) for number in numbers], values, "", COLOURS[0], "spare nodes")]
    mended = f"99 % of the time {knee} nodes at most are being mended."
    caption = f"Effective training time in %, by closed forms. {mended}"
    return Chart("spares", "Spare nodes", caption, Axis("spare nodes"), Axis(), layers)


def _line(x: Sequence[float], y: Sequence[float], name: str, colour: str, unit: str) -> Curve:
    shares = [100 * value for value in y]
    places = zip(x, shares, strict=True)
    texts = [f"{value:.2f} % at {place:,.4g} {unit}" for place, value in places]
    return Curve(x, shares, texts, name=name, colour=colour)
