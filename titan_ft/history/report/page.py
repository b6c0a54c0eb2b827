# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Write a run's report: one page of HTML (its template is page.html), and its figures as PNG beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from titan_ft.history.check import check
from titan_ft.history.goodput import goodput
from titan_ft.history.incidents import count_faults
from titan_ft.history.record import RunRecord
from titan_ft.history.report.canvas import Drawing
from titan_ft.history.report.facts import duration, find_notes, find_recoveries, plan_of
from titan_ft.history.report.plots import draw
from titan_ft.history.summary import summarize
from titan_ft.history.terminal import clock

LLAMA = ("https://pytorch.org/blog/fault-tolerant-llama-training-with-2000-synthetic-failures-every-15-seconds-and-no-checkpoints-on-crusoe-l40s/", "torchft")  # fmt: skip  # noqa: E501
FT_HSDP = ("https://arxiv.org/abs/2602.00277", "FT-HSDP")
DASH, TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
MARKS = {"holds": ("holds", "✓"), "does not hold": ("fails", "✗"), "not asked": ("quiet", DASH)}  # else it is open
MAX_DETAILS = 4
MAX_ROWS = 200


def write_report(record: RunRecord, folder: Path, against: RunRecord | None = None) -> Path:
    """Write index.html and its figures (PNG) into a folder; return the page. `against` is `check`'s."""
    drawings = draw(record)
    folder.mkdir(parents=True, exist_ok=True)
    for drawing in drawings:
        (folder / f"{drawing.name}.png").write_bytes(drawing.png)
    page = folder / "index.html"
    page.write_text(render(record, drawings, against), encoding="utf-8")
    return page


def render(record: RunRecord, drawings: Iterable[Drawing], against: RunRecord | None) -> str:
    """Return the page of a run. Whatever an event says is text on it, never markup."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    environment.filters |= {
        "clock": clock,
        "duration": duration,
        "median": median,
        "number": lambda value: f"{value:,}",
        "percent": lambda share: f"{100 * share:.1f} %" if isinstance(share, float) else "unknown",
        "thousands": lambda text: re.sub(r"\d{4,}", lambda digits: f"{int(digits[0]):,}", text),
        "two_digits": lambda value: DASH if value is None else f"{value:.2f}",
    }
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    constants = {"LLAMA": LLAMA, "FT_HSDP": FT_HSDP, "MAX_DETAILS": MAX_DETAILS, "MAX_ROWS": MAX_ROWS, "marks": MARKS}
    return template.render(
        begin=record.begin,
        s=summarize(record),
        g=goodput(record),
        check=check(record, against),
        recoveries=find_recoveries(record),
        notes=find_notes(record),
        drawings={drawing.name: drawing for drawing in drawings},
        **constants,
        **_words(record),
    )


def _words(record: RunRecord) -> dict[str, Any]:
    """Return what the template shows of the run as a whole."""
    s, g, plan, recoveries = summarize(record), goodput(record), plan_of(record), find_recoveries(record)
    seconds = g.wall_us / 1e6
    injected = [each for each in recoveries if each.incident.injected]
    lead = "No faults were injected."
    if injected:
        plans = ": ".join(str(plan[name]) for name in ("plan", "schedule") if plan.get(name))
        lead = f"A fault each {duration(seconds / len(injected))} on average{plans and f' ({plans})'}."
    lead += f" Ended: {plan['reason']}." if plan.get("reason") else " The history does not tell how it ended."
    return {
        "title": f"Run {plan['job_id']}" if plan.get("job_id") else "Report of a run",
        "lead": lead,
        "facts": [
            (f"groups {TIMES} ranks", f"{s.num_groups} {TIMES} {s.ranks_per_group}"),
            ("steps committed", f"{s.steps_committed:,}"),
            ("tokens", f"{max([s.tokens, *(point.tokens for point in record.curve[-1:])]):,}"),
            ("wall time", duration(seconds)),
            ("faults injected", f"{len(injected):,}"),
            ("seed", str(plan.get("seed", "none"))),
        ],
        "kinds": list(count_faults(record).items()),
        "counted": g.forward_passes - g.num_wasted,
        "rate": f"a failure each {duration(seconds / len(recoveries))}" if recoveries else "no failures",
        "stalls": [each.incident.stall_seconds for each in recoveries if each.incident.stall_seconds is not None],
        "loss_caption": _loss_caption(record),
    }


def _loss_caption(record: RunRecord) -> str:
    losses = [(point.step, point.loss) for point in record.curve if point.loss is not None]
    if not losses:
        return "The history tells of no loss."
    (first, begin), (last, end) = losses[0], losses[-1]
    text = f"Mean loss over the tokens of each committed step: {begin:.3f} at step {first}, {end:.3f} at step {last:,}."
    broken = len(record.curve) - len(losses)
    text += f" {broken} were not finite (crosses)." if broken else ""
    return text + (" A red line is a fault, at the step that it hit." if find_recoveries(record) else "")
