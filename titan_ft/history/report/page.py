# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Write a run's report: one page of HTML without any other file; its template is page.html."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from titan_ft.config import unwritable_folder_error
from titan_ft.history.check import check
from titan_ft.history.outcomes.hosts import find_hosts, name_range, worth_a_table
from titan_ft.history.outcomes.logs import find_log
from titan_ft.history.outcomes.notes import find_notes
from titan_ft.history.outcomes.outcome import find_outcome
from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.report.cards import find_cards
from titan_ft.history.report.charts import draw_charts
from titan_ft.history.report.facts import (
    describe_run,
    find_recoveries,
    list_goodput_terms,
    list_state_shares,
    plan_of,
)
from titan_ft.history.report.failed import Failed, excerpt, find_failed
from titan_ft.history.report.interactive import make_figure
from titan_ft.history.report.layers import Bars, Boxes, Chart, Curve, Marks
from titan_ft.history.report.links import PageLinks
from titan_ft.history.report.ranks import find_odd_ranks
from titan_ft.history.report.style import GLYPHS, STATES
from titan_ft.history.report.words import DASH, format_duration
from titan_ft.history.rounds import find_rounds
from titan_ft.history.summary import summarize
from titan_ft.history.terminal import format_clock
from titan_ft.system.ownership import make_folder
from titan_ft.system.whole_file import write_whole

MARKS = {"holds": ("holds", "✓"), "does not hold": ("fails", "✗"), "not asked": ("quiet", DASH)}
"""Style and mark of each verdict; the template has those of an unknown one."""
FOLDER = Path(__file__).parent
MAX_DETAILS = 4
MAX_ROWS = 200
MAX_FAILED = 8


def write_report(
    record: RunRecord, folder: Path, against: RunRecord | None = None, run_dir: Path | None = None
) -> Path:
    """Write index.html into a folder; return the page.

    Args:
        against: see `check`.
        run_dir: folder of the run; the page quotes and links to its logs and files. None leaves
            them out.

    Raises:
        ConfigError: the folder cannot be written; an existing page stays whole.
    """
    page = render(record, PageLinks(run_dir, folder), against).encode()
    try:
        make_folder(folder)
        write_whole(folder / "index.html", page)
    except OSError as error:
        raise unwritable_folder_error("--out", folder, error) from error
    return folder / "index.html"


def render(record: RunRecord, links: PageLinks, against: RunRecord | None = None) -> str:
    """Return the page of a run. Whatever an event or a log says is text on it, never markup."""
    charts = draw_charts(record) if record.attempts else {}
    hosts = find_hosts(record)
    failed = find_failed(record)
    parts: dict[str, Any] = {
        "recoveries": find_recoveries(record),
        "transfers": summarize(record).transfers,
        "hosts": hosts if worth_a_table(hosts) else [],
        "ranks": find_odd_ranks(record),
        "rounds": find_rounds(record),
        "notes": find_notes(record),
    }
    return fill_template(
        "page.html",
        charts,
        title=make_title(record),
        begin=record.begin,
        outcome=find_outcome(record),
        check=check(record, against),
        cards=find_cards(record),
        failed=[describe_failed(each, links) for each in failed[:MAX_FAILED]],
        num_failed=len(failed),
        facts=describe_run(record),
        files=links.files(),
        terms=list_goodput_terms(record),
        states=list_state_shares(record),
        contents=find_contents(charts, parts),
        began=bool(record.attempts),
        unit=record.unit,
        **parts,
    )


def fill_template(
    template: str, charts: Mapping[str, Chart], folder: Path = FOLDER, **values: Any
) -> str:
    """Return a page from its template, which is in `folder` and may use the parts of a report's
    page.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FileSystemLoader([folder, FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters |= {
        "clock": format_clock,
        "duration": format_duration,
        "name_range": name_range,
        "two_digits": _format_two_digits,
    }
    return environment.get_template(template).render(
        nonce=secrets.token_urlsafe(12),
        plotly=Markup(get_plotlyjs()),
        charts=charts,
        figures={name: make_figure(chart) for name, chart in charts.items()},
        legends={name: make_legend(chart) for name, chart in charts.items()},
        marks=MARKS,
        MAX_DETAILS=MAX_DETAILS,
        MAX_ROWS=MAX_ROWS,
        **values,
    )


def _format_two_digits(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def make_title(record: RunRecord) -> str:
    """Return what a run is called."""
    name = plan_of(record).get("job_id")
    return f"Run {name}" if name else "Report of a run"


def describe_failed(failed: Failed, links: PageLinks) -> dict[str, Any]:
    """Return the page's entry for a reason of failed groups: the reason, the link to its log, the
    log's end.
    """
    if links.run_dir is None:
        return {"it": failed, "href": "", "lines": []}
    log = find_log(failed.reason, links.run_dir)
    lines = excerpt(failed.reason, links.run_dir)
    return {"it": failed, "href": links.to(log), "lines": lines}


def find_contents(charts: Mapping[str, Chart], parts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the sections of a page, in order: the id and the text of each heading."""
    curves = {"grad-norm", "lr", "memory", "step-times"} & charts.keys()
    sections = [
        ("run", "The run", True),
        ("loss", "Loss", "loss" in charts),
        ("timeline", "What each group did", "timeline" in charts),
        ("failures", "Failures and recoveries", parts["recoveries"]),
        ("transfers", "State served", parts["transfers"]),
        ("hosts", "Hosts", parts["hosts"]),
        ("ranks", "Ranks that differ", parts["ranks"]),
        ("rounds", "Rounds", parts["rounds"]),
        ("goodput", "Goodput", True),
        ("promises", "Promises", True),
        ("notes", "Notes", parts["notes"]),
        ("curves", "Curves of training", curves),
    ]
    return [(name, title) for name, title, content in sections if content]


class LegendEntry(NamedTuple):
    text: str
    colour: str
    glyph: str


def make_legend(chart: Chart) -> list[list[LegendEntry]]:
    """Return the legend of a chart, a line each for states, curves and marks."""
    states = []
    curves = []
    marks = []
    for layer in chart.layers:
        if isinstance(layer, Boxes):
            look = STATES[layer.state]
            states.append(LegendEntry(look.label, look.colour, GLYPHS["square"]))
        elif isinstance(layer, Curve | Bars) and layer.name:
            curves.append(LegendEntry(layer.name, layer.colour, GLYPHS["square"]))
        elif isinstance(layer, Marks) and layer.symbol in GLYPHS:
            marks.append(LegendEntry(layer.name, layer.colour, GLYPHS[layer.symbol]))
    return [line for line in (states, curves, marks) if line]
