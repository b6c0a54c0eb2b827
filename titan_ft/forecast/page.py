# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Write the page of a forecast, from the parts of a run's report; its template is plan.html."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec

from titan_ft.config import unwritable
from titan_ft.forecast.candidate import Candidate
from titan_ft.forecast.choice import Case, Forecast, scaled, sensitivity
from titan_ft.forecast.closed_forms import estimate, standbys
from titan_ft.forecast.lengths import fit_weibull
from titan_ft.forecast.logs import LoggedFailure
from titan_ft.forecast.measured import Measured
from titan_ft.forecast.table import NOTES, case_cells, case_columns, case_notes
from titan_ft.history.report.layers import Axis, Band, Chart, Curve, Layer
from titan_ft.history.report.page import fill
from titan_ft.history.report.style import STATES
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
    page = fill(
        "plan.html",
        draw_charts(first),
        folder=Path(__file__).parent,
        title=f"Forecast of {source}",
        cases=[
            {
                "title": case.title,
                "advice": case.advice,
                "notes": case_notes(case),
                "head": [
                    name if name in ("candidate", "notes") else f"#{name}"
                    for name in case_columns(case)
                ],
                "rows": case_cells(case),
            }
            for case in cases
        ],
        sensitivities=[
            (name, *(f"{100 * value:.2f} %" for value in values))
            for name, *values in (
                sensitivity(first.forecasts[0].candidate) if first.forecasts else []
            )
        ],
        observations=[] if measured is None else measured.observations(),
        inputs=_inputs(first),
        notes=NOTES,
    ).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "index.html", page)
    except OSError as error:
        raise unwritable("--out", folder, error) from error
    return folder / "index.html"


def _inputs(case: Case) -> list[tuple[str, str]]:
    """Return the inputs of the best candidate as the scenario has them."""
    if not case.forecasts:
        return []
    candidate = case.forecasts[0].candidate
    scenario, costs = candidate.scenario, candidate.costs
    cluster = scenario.cluster
    rows = [
        ("GPUs", f"{cluster.gpus:,} on {cluster.nodes:,} nodes"),
        (
            "clock of failures",
            "goes on while the job waits"
            if scenario.clock == "wall"
            else "only while the job trains",
        ),
        (
            "stall, away, late at a return",
            ", ".join(f"{each.mean:.3g} s" for each in (costs.stall, costs.away, costs.rejoin)),
        ),
    ]
    for kind in scenario.failures:
        given = []
        for name, value in msgspec.structs.asdict(kind).items():
            if name != "name" and value not in (None, 0.0):
                given.append(f"{name} {value}")
        rows.append((f"failures: {kind.name}", ", ".join(given)))
        if kind.name in scenario.listed:
            rows.append(
                (
                    f"gaps between the failures of {kind.name}",
                    _describe_fit(scenario.listed[kind.name]),
                )
            )
    return rows


def _describe_fit(listed: Sequence[LoggedFailure]) -> str:
    """Return the Weibull distribution that fits the gaps of a file's failures."""
    fit = fit_weibull([after.time - before.time for before, after in pairwise(listed)])
    if fit is None:
        return f"{len(listed)} failures, too few to fit"
    shape = f"shape {fit.shape:.2f} ({fit.low:.2f} to {fit.high:.2f})"
    return f"{fit.number} gaps, mean {fit.mean:.3g} s, {shape}"


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
        by_size: dict[int, Forecast] = {}
        for each in sorted(forecasts, key=lambda each: -each.worth):
            if each.candidate.strategy == strategy:
                by_size.setdefault(each.candidate.gpus, each)
        known = sorted(by_size.items())
        if len(known) < 2:
            continue
        sizes |= by_size.keys()
        spans = [
            each.spread() if each.accounts else (each.estimate, each.estimate) for _, each in known
        ]
        x = [float(size) for size, _ in known]
        layers.append(
            Band(
                x, [100 * low for low, _ in spans], [100 * high for _, high in spans], colour=colour
            )
        )
        layers.append(
            _line(x, [each.effective for _, each in known], strategy, colour, "GPUs a group")
        )
    if not layers:
        return None
    axis = Axis(
        "GPUs of a group", kind="log", ticks={float(size): f"{size:,}" for size in sorted(sizes)}
    )
    caption = "Effective training time in %; the band holds 90 % of runs."
    return Chart("group-size", "Size of a group", caption, axis, Axis(), layers, height=3.3)


def _over_mtbf(forecasts: Sequence[Forecast]) -> Chart:
    best: dict[str, Forecast] = {}
    for each in forecasts:
        best.setdefault(each.candidate.strategy, each)
    layers: list[Layer] = []
    for colour, each in zip(COLOURS, best.values(), strict=False):
        values = [
            estimate(scaled(each.candidate, "time between failures", factor)) for factor in FACTORS
        ]
        layers.append(
            _line(FACTORS, values, each.candidate.shape, colour, "times the time between failures")
        )
    ticks = {2.0**power: f"{2.0**power:g}" for power in range(-4, 5)}
    axis = Axis("times the scenario's time between failures", kind="log", ticks=ticks)
    caption = "Effective training time in %, by closed forms: the best shape of each strategy."
    return Chart(
        "mtbf",
        "If failures were rarer, or more frequent",
        caption,
        axis,
        Axis(),
        layers,
        height=3.3,
    )


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


def _line(x: Sequence[float], y: Iterable[float], name: str, colour: str, unit: str) -> Curve:
    shares = [100 * value for value in y]
    texts = [
        f"{value:.2f} % at {place:,.4g} {unit}" for place, value in zip(x, shares, strict=True)
    ]
    return Curve(x, shares, texts, name=name, colour=colour)
