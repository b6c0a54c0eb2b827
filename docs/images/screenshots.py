# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Take the README's pictures of a run: a failure as failure.png, `titan-ft top` as top.svg, its page as page.png.

python docs/images/screenshots.py RUN_DIR [SECONDS]

The charts are the page's own, drawn by Plotly in chromium. SECONDS after its start are the moment at which `top` shows
the run; left out, its end.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from plotly.offline import get_plotlyjs
from rich.console import Console
from rich.terminal_theme import MONOKAI

from titan_ft.history.record.run_record import RunRecord
from titan_ft.history.report.charts import draw_groups
from titan_ft.history.report.interactive import make_figure
from titan_ft.history.report.layers import Boxes, Chart, Layer, Marks, Rules
from titan_ft.history.report.page import make_legend, write_report
from titan_ft.history.report.style import MIDDLE
from titan_ft.history.timing.incidents import find_incidents
from titan_ft.live.run_status import RunStatus
from titan_ft.live.top_view import Screen, frame
from titan_ft.run.paths import RunPaths

FOLDER = Path(__file__).parent
COLUMNS = 100
PAGE_SIZE = (1366, 2000)  # pixels
FAILURE_WIDTH = 900  # pixels
BEFORE_SECONDS, SHOWN_SECONDS = 2.5, 7.5  # shown of the run, from so long before the failure on

FAILURE_PAGE = """<!DOCTYPE html><meta charset="utf-8"><style>
body {{ font: 13px system-ui, sans-serif; margin: 10px; color: #1f2328; background: #fff }}
p {{ margin: 0 10px 0 46px }} span {{ margin-right: 14px }} i {{ font-style: normal; margin-right: 5px }}
</style><p>{legend}</p><div id="plot"></div><script>{plotly}</script><script>
const figure = {figure};
Plotly.newPlot("plot", figure.data, figure.layout, {{displayModeBar: false}});
</script>"""


def draw_top(record: RunRecord, name: str, seconds: float) -> str:
    """Return what `titan-ft top` showed `seconds` after the start of a run, as SVG."""
    run, now = RunStatus(), record.begin + seconds
    for event in record.events:
        if event.time <= now:
            run.observe(event)
    console = Console(
        width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True, highlight=False
    )
    console.print(frame(run, name, now, Screen(COLUMNS)), "")
    svg = console.export_svg(title="titan-ft top", theme=MONOKAI, unique_id="top")
    # Its fonts would be fetched from elsewhere; a reader's own will do.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def chart_failure(record: RunRecord) -> Chart:
    """Return the page's chart of what each group did, around the first failure of a group; each commit is a line."""
    failure = next(
        (incident for incident in find_incidents(record) if incident.ended and incident.replicas),
        None,
    )
    chart = draw_groups(record)
    if failure is None or chart is None:
        raise SystemExit("screenshots.py: no group of this run failed")
    begin = failure.time - record.begin - BEFORE_SECONDS
    end = begin + SHOWN_SECONDS
    times = {event.step: event.time - record.begin for event in record.commits}
    commits = Rules([time for time in times.values() if begin <= time <= end], MIDDLE)
    seen = [layer for layer in chart.layers if _is_seen(layer, begin, end)]
    return replace(
        chart, x=replace(chart.x, label="", bounds=(begin, end)), layers=[commits, *seen]
    )


def _is_seen(layer: Layer, begin: float, end: float) -> bool:
    if isinstance(layer, Boxes):
        return any(
            start < end and start + width > begin
            for start, width in zip(layer.starts, layer.widths, strict=True)
        )
    return isinstance(layer, Marks) and any(begin <= x <= end for x in layer.x)


def photograph_failure(record: RunRecord, image: Path) -> None:
    """Write the chart of a failure as PNG."""
    chart = chart_failure(record)
    keys = [("commit", MIDDLE, "│")]
    for line in make_legend(chart):
        keys += line
    spans = "".join(
        f'<span><i style="color: {colour}">{glyph}</i>{text}</span>' for text, colour, glyph in keys
    )
    page = FAILURE_PAGE.format(
        legend=spans, plotly=get_plotlyjs(), figure=json.dumps(make_figure(chart))
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "failure.html"
        path.write_text(page)
        photograph(path, image, (FAILURE_WIDTH, round(96 * chart.height) + 20))


def photograph_page(record: RunRecord, run_dir: Path, image: Path) -> None:
    """Write the upper part of a run's page as PNG."""
    with tempfile.TemporaryDirectory() as folder:
        # In a window that is as tall, all of it is drawn.
        photograph(write_report(record, Path(folder) / "report", run_dir=run_dir), image, PAGE_SIZE)


def photograph(page: Path, image: Path, size: tuple[int, int]) -> None:
    """Write a page as PNG, as a browser shows it in a window of that width and height."""
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if chromium is None:
        raise SystemExit(
            "screenshots.py: chromium is not installed, and the pictures of pages need it"
        )
    with tempfile.TemporaryDirectory() as profile:
        quiet = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        )
        shot = (
            f"--window-size={size[0]},{size[1]}",
            "--virtual-time-budget=8000",
            f"--screenshot={image}",
        )
        subprocess.run(
            [chromium, *quiet, *shot, page.as_uri()], capture_output=True, timeout=120, check=True
        )


def main() -> None:
    """Write the pictures beside this file."""
    if len(sys.argv) not in (2, 3):
        raise SystemExit("usage: python docs/images/screenshots.py RUN_DIR [SECONDS]")
    run_dir = Path(sys.argv[1])
    record = RunRecord.read(RunPaths(run_dir).events)
    end = record.events[-1].time - record.begin
    photograph_failure(record, FOLDER / "failure.png")
    (FOLDER / "top.svg").write_text(
        draw_top(record, f"runs/{run_dir.name}", float((sys.argv[2:] or [end])[0]))
    )
    photograph_page(record, run_dir, FOLDER / "page.png")


if __name__ == "__main__":
    main()
