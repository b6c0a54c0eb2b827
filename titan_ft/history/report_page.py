# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Write a run's report as one page of HTML that needs nothing else: no script, no network, no other file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from statistics import median

from titan_ft.history.report_canvas import Drawing
from titan_ft.history.report_facts import Fault, Promise, RunReport, clock, count_kinds, duration, read_promises, size
from titan_ft.history.report_style import CSS

LLAMA = ("https://pytorch.org/blog/fault-tolerant-llama-training-with-2000-synthetic-failures-every-15-seconds-and-no-checkpoints-on-crusoe-l40s/", "torchft")  # fmt: skip  # noqa: E501
FT_HSDP = ("https://arxiv.org/abs/2602.00277", "FT-HSDP")
DASH, TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"
MARKS = {"holds": ("holds", "✓"), "does not hold": ("fails", "✗"), "not asked": ("quiet", DASH)}  # else it is open
MAX_DETAILS = 4
MAX_NOTES = 200


def render(report: RunReport, drawings: Mapping[str, Drawing]) -> str:
    """Return the page of a run."""
    sections = [
        _header(report),
        _promises(read_promises(report.check)),
        _headline(report),
        _figure(drawings["loss"], "Loss", _loss_caption(report)),
        _figure(
            drawings["participants"],
            "Contributing groups",
            "Groups that gave weight to the step that was committed last. A group that catches up does not count yet.",
        ),
        _figure(
            drawings["timeline"],
            "What each group did",
            "One row a group; what is too fine to draw shows the state that took most of the time. A mark is a fault, "
            "above the group that it hit; the pointer on it tells which.",
        ),
        '<div class="pair">',
        _figure(
            drawings["step-times"],
            "Time of a step",
            "Steps of all groups by duration. The tail is what failures cost.",
        ),
        _figure(
            drawings["stalls"],
            "Stall per failure",
            "Time beyond a usual step. A dot per failure, a bar at the median; in brackets how many.",
        ),
        "</div>",
        _figure(
            drawings["goodput"],
            "Goodput",
            "Where the wall time of each group went; the job is the sum of its groups. The pointer tells the figures.",
        ),
        _recoveries(report.faults),
        _notes(report),
    ]
    body = "\n".join(sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(_title(report))}</title>\n<style>{CSS}</style>\n</head>\n<body>\n{body}\n"
        "<footer>Made by titan_ft from the events of the run alone; the figures lie beside this page as PNG.</footer>\n"
        "</body>\n</html>\n"
    )


def _title(report: RunReport) -> str:
    return f"Run {report.plan['job_id']}" if report.plan.get("job_id") else "Report of a run"


def _header(report: RunReport) -> str:
    """Return title, facts of the run and faults by kind."""
    s, plan = report.summary, report.plan
    injected = [fault for fault in report.faults if fault.cost.injected]
    facts = [
        (f"groups {TIMES} ranks", f"{s.num_groups} {TIMES} {s.ranks_per_group}"),
        ("steps committed", f"{s.steps_committed:,}"),
        ("tokens", f"{max(s.tokens, report.commits.tokens):,}"),
        ("wall time", duration(report.seconds)),
        ("faults injected", f"{len(injected):,}"),
        ("seed", str(plan.get("seed", "none"))),
    ]
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    lead = "No faults were injected."
    if injected:
        plans = ": ".join(str(plan[name]) for name in ("plan", "schedule") if plan.get(name))
        lead = f"A fault each {duration(report.seconds / len(injected))} on average{plans and f' ({plans})'}."
    lead += f" Ended: {plan['reason']}." if plan.get("reason") else " The history does not tell how it ended."
    kinds = " · ".join(
        f"{escape(kind)} <b>{number}</b>" for kind, number in count_kinds(fault.kind for fault in injected)
    )
    return (
        f'<header>\n<h1>{escape(_title(report))}</h1>\n<p class="lead">{escape(lead)}</p>\n'
        f'<dl class="facts">{cells}</dl>\n{f"""<p class="kinds">{kinds}</p>""" if kinds else ""}\n</header>'
    )


def _promises(promises: Sequence[Promise]) -> str:
    rows = []
    for promise in promises:
        style, mark = MARKS.get(promise.verdict, ("open", "?"))
        items = [f"<li>{escape(text)}</li>" for text in promise.details[:MAX_DETAILS]]
        if len(promise.details) > MAX_DETAILS:
            items.append(f"<li>… {len(promise.details) - MAX_DETAILS} more (titan-ft check tells)</li>")
        details = f'<ul class="details">{"".join(items)}</ul>' if items else ""
        number = "" if promise.number is None else str(promise.number)
        name = escape(promise.name[:1].upper() + promise.name[1:])
        rows.append(
            f'<tr><td class="number">{number}</td><td class="name">{name}</td>'
            f'<td><span class="verdict {style}">{mark} {escape(promise.verdict)}</span></td>'
            f"<td>{escape(promise.statement)}{details}</td></tr>"
        )
    head = '<th class="number"></th><th>Promise</th><th>Verdict</th><th>What was verified</th>'
    return f"<h2>Promises</h2>\n{_table(head, rows)}"


def _table(head: str, rows: Sequence[str]) -> str:
    body = "\n".join(rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _headline(report: RunReport) -> str:
    """Return the headline figures, each beside what has been published."""
    s, g, faults = report.summary, report.goodput, report.faults
    stalls = [fault.cost.stall_seconds for fault in faults if fault.cost.stall_seconds is not None]
    counted = g.forward_passes - g.num_wasted
    rate = f"a failure each {duration(report.seconds / len(faults))}" if faults else "no failures"
    wall = f"of wall time {TIMES} groups; {_percent(g.effective_training_time_in_training)} from first to last step"
    spread = f"median of {len(stalls)}; {duration(max(stalls))} at most" if stalls else "no failure that others saw"
    batches = re.sub(r"\d{4,}", lambda digits: f"{int(digits[0]):,}", s.batches) or "the history does not tell"
    tiles = [
        (
            "Work that was committed",
            _percent(counted / g.forward_passes if g.forward_passes else None),
            f"{counted:,} of {g.forward_passes:,} forward passes; {rate}. Exchanges, which are repeated without "
            f"them: {g.exchanges_committed:,} of {g.exchanges_attempted:,}",
            f"{_link(LLAMA)} <b>82.3 %</b> of steps at a failure each 60 s, <b>30.2 %</b> each 15 s; the work of the "
            "others was thrown away",
        ),
        (
            "Effective training time",
            _percent(g.effective_training_time),
            wall,
            f"{_link(FT_HSDP)} <b>44 → 80 %</b> at a failure each 18 min",
        ),
        (
            "Stall of survivors per failure",
            duration(median(stalls)) if stalls else DASH,
            spread,
            f"{_link(FT_HSDP)} <b>10 → 3 min</b>",
        ),
        (
            "Every batch trained once",
            {"holds": "yes", "does not hold": "no"}.get(s.every_batch_once, "unknown"),
            f"{batches}; {s.recomputed_forward_passes} forward passes repeated",
            "torchft 0.2.0 calls its sampler <b>“inherently lossy”</b> (torchft/data.py)",
        ),
    ]
    cells = "".join(
        f'<div class="tile"><h3>{name}</h3><div class="figure">{escape(value)}</div>'
        f'<div class="detail">{escape(detail)}</div><div class="published">Published: {published}</div></div>\n'
        for name, value, detail, published in tiles
    )
    return (
        f'<h2>Headline figures, beside published ones</h2>\n<div class="tiles">{cells}</div>\n'
        '<p class="note">The published runs had other machines, models and scales, so the figures show how a system '
        "behaves, not which is faster. torchft with torchtitan: “Fault Tolerant Llama”, PyTorch blog, 2025; Llama 3 "
        "1B, 30 groups of 10 L40S; 5,145 of 6,249 and 268 of 888 steps. FT-HSDP: arXiv 2602.00277; 12 groups of "
        "8,192 GPUs, before → after.</p>"
    )


def _link(source: tuple[str, str]) -> str:
    return f'<a href="{escape(source[0])}">{source[1]}</a>'


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f} %"


def _figure(drawing: Drawing, title: str, caption: str) -> str:
    return f"<figure>\n<h2>{escape(title)}</h2>\n<figcaption>{escape(caption)}</figcaption>\n{drawing.svg}\n</figure>"


def _loss_caption(report: RunReport) -> str:
    losses = [(step, loss) for step, loss in report.commits.losses if loss is not None]
    if not losses:
        return "The history tells of no loss."
    (first, begin), (last, end) = losses[0], losses[-1]
    text = f"Mean loss over the tokens of each committed step: {begin:.3f} at step {first}, {end:.3f} at step {last:,}."
    broken = len(report.commits.losses) - len(losses)
    text += f" {broken} were not finite (crosses)." if broken else ""
    return text + (" A red line is a fault, at the step that it hit." if report.faults else "")


def _recoveries(faults: Sequence[Fault]) -> str:
    if not faults:
        return "<h2>Recoveries</h2>\n<p>Nothing failed.</p>"
    rows = []
    for number, fault in enumerate(faults, start=1):
        cost, heal = fault.cost, fault.cost.heal
        cells = [
            ("number", str(number)),
            ("number", clock(fault.time)),
            ("name", fault.kind if cost.injected else f"{fault.kind} (not injected)"),
            ("name", fault.target),
            ("number", _two_digits(cost.stall_seconds)),
            ("number", _two_digits(cost.rejoin_seconds)),
            ("number", DASH if heal is None else f"group {heal.donor}"),
            ("number", DASH if heal is None else size(heal.num_bytes)),
            ("number", DASH if heal is None else str(heal.replayed)),
        ]
        rows.append("<tr>" + "".join(f'<td class="{style}">{escape(text)}</td>' for style, text in cells) + "</tr>")
    head = '<th class="number"></th><th class="number">Time</th><th>Fault</th><th>Target</th>' + "".join(
        f'<th class="number">{name}</th>'
        for name in ("Survivors stalled (s)", "Contributing again after (s)", "Donor", "State", "Updates replayed")
    )
    note = "A dash: the group healed nothing or did not come back, or the history does not tell."
    return f'<h2>Recoveries</h2>\n{_table(head, rows)}\n<p class="note">{note}</p>'


def _two_digits(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def _notes(report: RunReport) -> str:
    if not report.notes:
        return "<h2>Notes</h2>\n<p>Nothing else to tell.</p>"
    rows = []
    for note in report.notes[:MAX_NOTES]:
        times = f" ({TIMES} {note.count})" if note.count > 1 else ""
        event = escape(note.event.replace("_", " "))
        rows.append(
            f'<tr><td class="number">{clock(note.time)}</td><td class="name">{event}</td>'
            f'<td class="name">{escape(note.where)}</td><td>{escape(note.text + times)}</td></tr>'
        )
    more = len(report.notes) - MAX_NOTES
    if more > 0:
        rows.append(f'<tr><td></td><td colspan="3">… {more} more</td></tr>')
    head = '<th class="number">Time</th><th>What</th><th>Where</th><th>Details</th>'
    return f"<h2>Notes and skipped faults</h2>\n{_table(head, rows)}"
