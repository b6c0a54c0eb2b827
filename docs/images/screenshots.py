# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Take the README's pictures of a run: `titan-ft top` as top.svg, its page as page.png (with chromium).

python docs/images/screenshots.py RUN_DIR [SECONDS]

SECONDS after its start are the moment at which `top` shows the run; left out, its end.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from titan_ft.history.record import RunRecord
from titan_ft.history.report.page import write_report
from titan_ft.live.run_status import RunStatus
from titan_ft.live.top_view import Screen, frame
from titan_ft.run.paths import RunPaths

FOLDER = Path(__file__).parent
COLUMNS = 100
WIDTH, HEIGHT = 1366, 2000  # pixels


def draw_top(record: RunRecord, name: str, seconds: float) -> str:
    """Return what `titan-ft top` showed `seconds` after the start of a run, as SVG."""
    run, now = RunStatus(), record.begin + seconds
    for event in record.events:
        if event.time <= now:
            run.observe(event)
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(frame(run, name, now, Screen(COLUMNS)), "")
    svg = console.export_svg(title="titan-ft top", theme=MONOKAI, unique_id="top")
    # Its fonts would be fetched from elsewhere; a reader's own will do.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def photograph_page(record: RunRecord, run_dir: Path, image: Path) -> None:
    """Write the upper part of a run's page as PNG, as a browser shows it."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("screenshots.py: chromium is not installed, and the page's picture needs it")
    with tempfile.TemporaryDirectory() as folder:
        page = write_report(record, Path(folder) / "report", run_dir=run_dir)
        quiet = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile")
        # In a window that is as tall, all of it is drawn.
        size = (
            f"--window-size={WIDTH},{HEIGHT}",
            "--hide-scrollbars",
            "--virtual-time-budget=8000",
            f"--screenshot={image}",
        )
        command = [chromium, *quiet, *size, page.as_uri()]
        subprocess.run(command, capture_output=True, timeout=120, check=True)


def main() -> None:
    """Write both pictures beside this file."""
    if len(sys.argv) not in (2, 3):
        raise SystemExit("usage: python docs/images/screenshots.py RUN_DIR [SECONDS]")
    run_dir = Path(sys.argv[1])
    record = RunRecord.read(RunPaths(run_dir).events)
    end = record.events[-1].time - record.begin
    (FOLDER / "top.svg").write_text(draw_top(record, f"runs/{run_dir.name}", float((sys.argv[2:] or [end])[0])))
    photograph_page(record, run_dir, FOLDER / "page.png")


if __name__ == "__main__":
    main()
