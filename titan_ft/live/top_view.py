# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Lay a run's status out as lines of a terminal of any size; pure, but for rich's text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

from titan_ft.config import FaultTolerance
from titan_ft.live.run_status import RunStatus
from titan_ft.live.status import DRAINING, TRAINING, Groups, GroupStatus
from titan_ft.live.status_view import COLORS

if TYPE_CHECKING:
    from rich.text import Text

BLOCKS, ASCII = "▁▂▃▄▅▆▇█", ".:-=+*#@"
SILENT_SECONDS = 10.0
"""Without an event for so long, a run that is not over may be stuck, or its launcher killed."""
NUM_LINES = 10
"""Of what happened, where the height is not limited."""
GAP = 2
MIN_FLEXIBLE = 16
"""Least width of the last column, which takes what is left."""


@dataclass(frozen=True)
class Screen:
    """What there is to draw on."""

    width: int
    height: int | None = None
    """None: as many lines as it takes."""
    ascii_only: bool = False
    hint: str = ""
    """Stands at the right end of the first line."""


def frame(run: RunStatus, name: str, now: float, screen: Screen) -> list[Text]:
    """Return the lines that show a run: head, loss, a table of the groups, what happened last.

    Args:
        name: what the run is called, such as its folder.
        now: Unix seconds.
    """
    lines = [_title(name, screen), _state(run, now), *_figures(run, now, screen.width), *_losses(run, screen)]
    if screen.height is None:
        rows, num_lines = len(run.groups), NUM_LINES
    else:
        room = max(0, screen.height - len(lines) - 3)  # two empty lines and the table's head
        rows = min(len(run.groups), max(room - NUM_LINES, room - room // 3))
        num_lines = room - rows
    lines += [_text(""), *_table(run, now, rows, screen.width), _text("")]
    told = list(run.lines)[-num_lines:] if num_lines > 0 else []
    lines += [_told(moment - (run.started or 0.0), text) for moment, text in told]
    for line in lines:
        line.truncate(screen.width, overflow="ellipsis" if not screen.ascii_only else "crop")
    return lines[: screen.height]


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style=style, no_wrap=True)


def _title(name: str, screen: Screen) -> Text:
    line = _text("titan-ft top  ", "bold")
    space = screen.width - len(line.plain) - len(screen.hint) - (GAP if screen.hint else 0)
    line.append(name if len(name) <= space else f"...{name[len(name) - max(0, space - 3) :]}", "not bold")
    if screen.hint:
        line.append(screen.hint.rjust(screen.width - len(line.plain)), "not bold dim")
    return line


def _state(run: RunStatus, now: float) -> Text:
    if run.started is None:
        return _text("no event yet", "yellow")
    shape = f"{len(run.groups)} groups" + (f" x {run.num_ranks} ranks" if run.num_ranks else "")
    elapsed = duration(run.elapsed(now))
    if run.end:
        code = "" if run.code is None else f" (exit status {run.code})"
        return _text(f"over after {elapsed}: {run.end}{code}; {shape}", "red" if run.code else "green")
    line = _text(f"running for {elapsed}; {shape}")
    if now - run.last > SILENT_SECONDS:
        line.append(f"; no event for {duration(now - run.last)}", "bold yellow")
    return line


def _figures(run: RunStatus, now: float, width: int) -> list[Text]:
    """Return the figures of the whole run, in as many lines as the width asks for."""
    rate, steps = run.tokens_per_second(now), run.steps
    share = f" ({100 * steps.num_committed / steps.num_attempted:.1f} %)" if steps.num_attempted else ""
    figures = [
        ("step", _number(run.step)),
        ("loss", _number(run.loss, ".5f")),
        ("tokens/s", _number(rate, ",.0f")),
        ("contributing", f"{len(run.participants)}/{len(run.groups)}"),
        ("committed", f"{steps.num_committed}/{steps.num_attempted}{share}"),
        ("faults", str(run.faults.num_injected)),
        ("restarts", str(run.restarts)),
        ("lighthouse restarts", str(run.num_lighthouse_restarts)),
    ]
    lines = [_text("")]
    for label, value in figures:
        if lines[-1].plain and len(lines[-1].plain) + GAP + len(label) + 1 + len(value) > width:
            lines.append(_text(""))
        lines[-1].append("  " if lines[-1].plain else "").append(f"{label} ", "dim").append(value, "bold")
    return lines


def _losses(run: RunStatus, screen: Screen) -> list[Text]:
    """Return the course of the loss, with its first and last value, on one line or three."""
    known = [loss for loss in run.losses if loss is not None]
    if len(known) < 2:
        return []
    first, last = f"loss {known[0]:.3f} ", f" {known[-1]:.3f}"
    tall = not screen.ascii_only and screen.height is not None and screen.height >= 32
    rows = sparkline(known, screen.width - len(first) - len(last), 3 if tall else 1, ascii_only=screen.ascii_only)
    lines = [_text(" " * len(first)).append(row, "cyan") for row in rows]
    lines[0] = _text("").append(first, "dim").append(rows[0], "cyan")
    lines[-1].append(last, "dim")
    return lines


def sparkline(values: Sequence[float], width: int, rows: int = 1, *, ascii_only: bool = False) -> list[str]:
    """Return a bar chart of values, each column the mean of its share of them, as `rows` lines of `width` at most."""
    num = min(len(values), max(1, width))
    cuts = [index * len(values) // num for index in range(num + 1)]
    means = [fmean(values[start:end]) for start, end in pairwise(cuts)]
    low, span = min(means), max(means) - min(means)
    marks = ASCII if ascii_only else BLOCKS
    top = rows * len(marks)
    levels = [1 + round((mean - low) / span * (top - 1)) if span > 0 else 1 for mean in means]
    lines = []
    for row in reversed(range(rows)):
        filled = [min(max(level - row * len(marks), 0), len(marks)) for level in levels]
        lines.append("".join(marks[count - 1] if count else " " for count in filled))
    return lines


def _table(run: RunStatus, now: float, max_rows: int, width: int) -> list[Text]:
    """Return the head and one line per group; of too many, those first that do not train, and what is left out."""
    groups = list(run.groups.values())
    shown = groups
    if max_rows < len(groups):
        urgent = sorted(groups, key=lambda group: (group.state == TRAINING, group.replica))
        shown = sorted(urgent[: max(0, max_rows - 1)], key=lambda group: group.replica)
    ratios, until = _ratios(run.groups), run.last if run.end else now
    cells = [_cells(group, ratios.get(group.replica), until) for group in shown]
    names = [name for name, _ in _COLUMNS]
    widths = {name: max(len(name), *(len(row[name]) for row in cells)) if cells else len(name) for name in names}
    kept = _fitting(widths, width)
    widths[_FLEXIBLE] = 0  # the last one needs no filling
    head = _text("  ".join(_aligned(name, name, widths) for name in kept), "bold underline")
    lines = [head]
    for group, row in zip(shown, cells, strict=True):
        line = _text("")
        for name in kept:
            line.append("  " if line.plain else "")
            line.append(_aligned(name, row[name], widths), _style(name, group, ratios) or None)
        lines.append(line)
    hidden = Counter(group.state for group in groups if group not in shown)
    if hidden and max_rows > 0:
        states = ", ".join(f"{count} {state}" for state, count in hidden.most_common())
        lines.append(_text(f"and {sum(hidden.values())} more: {states}", "dim"))
    return lines


# Heading, and how much it matters: the least important columns go first where the width does not do for all.
_COLUMNS = (
    ("replica", 11),
    ("state", 10),
    ("step", 9),
    ("own loss", 4),
    ("own s", 6),
    ("x others", 5),
    ("restarts", 8),
    ("donor", 3),
    ("attempt", 2),
    ("host", 1),
    ("last fault", 7),
)
_LEFT = ("state", "host", "last fault")
_FLEXIBLE = "last fault"


def _cells(group: GroupStatus, ratio: float | None, now: float) -> dict[str, str]:
    own_loss = group.own_loss if group.own_loss is not None else group.loss
    fault = f"-{duration(now - group.fault_time)} {group.fault}" if group.fault else "-"  # the age is never cut off
    return {
        "replica": str(group.replica),
        "state": group.state,
        "step": _number(group.step),
        "own loss": _number(own_loss, ".4f"),
        "own s": _number(group.own_seconds, ".3f"),
        "x others": _number(ratio, ".2f"),
        "restarts": str(group.restarts),
        "donor": _number(group.donor),
        "attempt": str(group.attempt),
        "host": group.host or "-",
        "last fault": fault,
    }


def _fitting(widths: dict[str, int], width: int) -> list[str]:
    """Return the columns that fit, in order; the flexible one needs no more than its least width."""
    needed = {**widths, _FLEXIBLE: min(widths[_FLEXIBLE], MIN_FLEXIBLE)}
    kept = sorted(_COLUMNS, key=lambda column: -column[1])
    while len(kept) > 1 and sum(needed[name] + GAP for name, _ in kept) - GAP > width:
        kept.pop()
    names = {name for name, _ in kept}
    return [name for name, _ in _COLUMNS if name in names]


def _aligned(column: str, text: str, widths: dict[str, int]) -> str:
    return text.ljust(widths[column]) if column in _LEFT else text.rjust(widths[column])


def _style(column: str, group: GroupStatus, ratios: dict[int, float]) -> str:
    if column == "state":
        return COLORS.get(group.state, "")
    if column == "x others" and ratios.get(group.replica, 0.0) > FaultTolerance.straggler_factor > 0:
        return "yellow"
    return ""


def _ratios(groups: Groups) -> dict[int, float]:
    """Return each training group's own seconds of its last step / median of the others', as the straggler's are."""
    own = {r: g.own_seconds for r, g in groups.items() if g.own_seconds and g.state in (TRAINING, DRAINING)}
    others = {replica: [own[other] for other in own if other != replica] for replica in own}
    return {replica: own[replica] / median(values) for replica, values in others.items() if values}


def _told(seconds: float, text: str) -> Text:
    style = ""
    if text.startswith(("fault: ", "chaos ")):
        style = "magenta"
    elif any(word in text for word in (" died", " failed", " hangs", "different digests", "not finite")):
        style = "red"
    return _text(f"{duration(seconds):>8}  ", "dim").append(text, f"not dim {style}")


def _number(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def duration(seconds: float) -> str:
    """Return seconds as m:ss, or h:mm:ss."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
