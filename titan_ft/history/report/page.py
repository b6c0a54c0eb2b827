# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Write a run's report: one page of HTML that needs nothing else; its template is page.html."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from titan_ft.config import unwritable
from titan_ft.history.check import check
from titan_ft.history.hosts import find_hosts, name_range, worth_a_table
from titan_ft.history.notes import find_notes
from titan_ft.history.record import RunRecord
from titan_ft.history.report.charts import draw_charts
from titan_ft.history.report.facts import (
    DASH,
    describe_run,
    duration,
    find_recoveries,
    goodput_terms,
    headline,
    overall,
    plan_of,
    states_spent,
)
from titan_ft.history.report.interactive import figure
from titan_ft.history.report.layers import Boxes, Chart, Marks
from titan_ft.history.report.style import GLYPHS, STATES
from titan_ft.history.rounds import find_rounds
from titan_ft.history.summary import summarize
from titan_ft.history.terminal import clock
from titan_ft.run.whole_file import write_whole

MARKS = {"holds": ("holds", "✓"), "does not hold": ("fails", "✗"), "not asked": ("quiet", DASH)}  # else it is open
MAX_DETAILS = 4
MAX_ROWS = 200


def write_report(record: RunRecord, folder: Path, against: RunRecord | None = None) -> Path:
    """Write index.html into a folder; return the page. `against` is `check`'s.

    Raises:
        ConfigError: the folder cannot be written; a page that was there stays whole.
    """
    page = render(record, draw_charts(record), against).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "index.html", page)
    except OSError as error:
        raise unwritable("--out", folder, error) from error
    return folder / "index.html"


def render(record: RunRecord, charts: Mapping[str, Chart], against: RunRecord | None) -> str:
    """Return the page of a run. Whatever an event says is text on it, never markup."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters |= {
        "clock": clock,
        "duration": duration,
        "name_range": name_range,
        "two_digits": lambda value: DASH if value is None else f"{value:.2f}",
    }
    template = environment.get_template("page.html")
    plan, verdicts, hosts = plan_of(record), check(record, against), find_hosts(record)
    return template.render(
        title=f"Run {plan['job_id']}" if plan.get("job_id") else "Report of a run",
        begin=record.begin,
        nonce=secrets.token_urlsafe(12),
        plotly=Markup(get_plotlyjs()),
        charts=charts,
        figures={name: figure(chart) for name, chart in charts.items()},
        legends={name: legend(chart) for name, chart in charts.items()},
        overall=overall(verdicts),
        check=verdicts,
        facts=describe_run(record),
        headline=headline(record),
        recoveries=find_recoveries(record),
        transfers=summarize(record).transfers,
        hosts=hosts if worth_a_table(hosts) else [],
        rounds=find_rounds(record),
        unit=record.unit,
        terms=goodput_terms(record),
        states=states_spent(record),
        notes=find_notes(record),
        marks=MARKS,
        MAX_DETAILS=MAX_DETAILS,
        MAX_ROWS=MAX_ROWS,
    )


def legend(chart: Chart) -> list[list[tuple[str, str, str]]]:
    """Return what the colours and the marks of a chart mean, a line each: the text, its colour and its glyph."""
    states = [STATES[layer.state] for layer in chart.layers if isinstance(layer, Boxes)]
    marks = [layer for layer in chart.layers if isinstance(layer, Marks) and layer.symbol in GLYPHS]
    lines = [
        [(look.label, look.colour, GLYPHS["square"]) for look in states],
        [(mark.name, mark.colour, GLYPHS[mark.symbol]) for mark in marks],
    ]
    return [line for line in lines if line]
