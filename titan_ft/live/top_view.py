# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Lay a run's status out for a terminal of any size; pure, but for rich's text."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from titan_ft.history.fold.hosts import HostFigures
from titan_ft.history.judgement import count
from titan_ft.history.outcomes.hosts import name_range, worth_a_table
from titan_ft.history.terminal import clock
from titan_ft.live.group_table import EXPLAINED, GAP, group_table, number, shown_state
from titan_ft.live.rank_table import rank_lines
from titan_ft.live.run_status import RunStatus, shape
from titan_ft.live.status import TRAINING, GroupStatus
from titan_ft.run.events import Severity

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

_STYLE_OF: dict[Severity, str] = {"notice": "", "chaos": "magenta", "failure": "red"}
_STYLES = {"green": "green", "amber": "yellow", "red": "red"}
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", ".:-=+*#@"
MAX_HOSTS = 4
"""Lines about hosts, where the height is limited."""
NUM_LINES = 10
"""Of what happened, where the height is not limited."""
MIN_LINES = 4
"""Of what happened, below a table of ranks."""
MAX_SHOWN = 100
"""Happenings that are laid out: more than a terminal has lines."""
CONTINUED = 10 * " "
"""Begins a line that goes on with the happening above it."""
MAX_WRAPPED = 6
"""Lines of one happening."""


@dataclass(frozen=True)
class Screen:
    """What there is to draw on."""

    width: int
    height: int | None = None
    """None: as many lines as it takes."""
    ascii_only: bool = False
    hint: str = ""
    """Stands at the right end of the first line."""
    ranks: bool = False
    """Whether the ranks have a table."""
    help: bool = False
    """Whether the columns are explained, in place of what happened and of groups that have no room beside it."""


def frame(run: RunStatus, name: str, now: float, screen: Screen, *, history: bool = True) -> Group:
    """Return what shows a run: head, loss, a table of the groups, one of the hosts, what happened last.

    Args:
        name: what the run is called, such as its folder.
        now: Unix seconds.
        history: whether to show what happened; the launcher prints that above.
    """
    from rich.console import Group

    head = [*([_title(name, screen)] if history else []), *_state(run, now, screen), *_figures(run, now, screen.width)]
    head += [*_losses(run, screen), _text("")]
    figures = run.fold.hosts.figures
    hosts = _hosts(figures, screen.width, len(figures)) if worth_a_table(figures) else []
    happened = _happened(run, screen) if history else []
    num_groups = len(run.fold.groups)
    if screen.height is None:
        num_ranks = sum(len(group.ranks) for group in run.fold.groups.values())
        rows, num_lines, room_of_ranks = num_groups, NUM_LINES, 10 * num_ranks + 2
    else:
        room = max(0, screen.height - len(head) - 2)  # the table's head, and an empty line
        if screen.help:
            hosts = []  # no room: of two columns in three nothing was said on a terminal of 24 lines
        if hosts:
            hosts = _hosts(figures, screen.width, min(MAX_HOSTS, room // 4 - 2))
        room -= len(hosts)
        rows = min(num_groups, max(room - NUM_LINES, room - room // 3) if history else room)
        if screen.help:
            rows = max(min(rows, 1), min(rows, room - len(_explained(screen.width))))
        room_of_ranks = max(0, room - rows - MIN_LINES)
        num_lines = room - rows
    shown, hidden = _shown(run, rows)
    until = run.fold.last_event if run.end else now
    table = group_table(run.groups, until, screen.width, shown, ascii_only=screen.ascii_only)
    ranks = []
    if screen.ranks:
        groups = [run.fold.groups[group.replica] for group in shown]
        ranks = rank_lines(groups, run.fold.unit, until, room_of_ranks - 1)
    ranks = [_text(""), *ranks] if ranks else []
    tail = [*([_text(hidden, "dim")] if hidden else []), *ranks, *hosts]
    if screen.help:
        happened = _explained(screen.width)[: max(0, num_lines - len(ranks))]
    elif history:
        num_lines -= len(ranks)
        happened = happened[-num_lines:] if num_lines > 0 else []
        while happened and happened[0].plain.startswith(CONTINUED):
            happened.pop(0)  # its beginning has no room
    if history:
        tail += [_text(""), *happened]
    for line in [*head, *tail]:
        line.overflow = "crop" if screen.ascii_only else "ellipsis"
    return Group(*head, table, *tail)


def _happened(run: RunStatus, screen: Screen) -> list[Text]:
    """Return what happened, each line wrapped to the width: the reason of a failure is never cut off."""
    lines: list[Text] = []
    for line in list(run.lines)[-MAX_SHOWN:]:
        lines += _line(line.time - (run.fold.started or 0.0), line.text, line.severity, screen.width)
    return lines


def _explained(width: int) -> list[Text]:
    """Return what the columns of the groups mean, a paragraph each."""
    name_width = max(map(len, EXPLAINED)) + GAP
    lines = []
    for name, meaning in EXPLAINED.items():
        for place, part in enumerate(textwrap.wrap(meaning, max(16, width - name_width))):
            lines.append(_text("").append((name if place == 0 else "").ljust(name_width), "bold").append(part))
    return lines


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


def _state(run: RunStatus, now: float, screen: Screen) -> list[Text]:
    """Return how the run is, and once it is over what became of it."""
    if run.fold.started is None:
        return [_text("nothing has started yet", "yellow")]
    what, elapsed = shape(len(run.groups), run.fold.num_ranks), clock(run.elapsed(now))
    if run.end or run.launcher_gone:
        outcome = run.outcome
        when = f"over after {elapsed}" if run.end else f"no event for {clock(now - run.fold.last_event)}"
        text = f"{outcome.headline}; {when}; {what}"
        return [_text(line, _STYLES[outcome.colour]) for line in textwrap.wrap(text, max(16, screen.width))]
    line = _text(f"running for {elapsed}; {what}")
    if run.is_silent(now):
        line.append(f"; no event for {clock(now - run.fold.last_event)}", "bold yellow")
    if run.num_cut:
        line.append(f"; events of {count(run.num_cut, 'process', 'processes')} are not written", "bold yellow")
    lost = [part for group in run.outcome.lost for part in textwrap.wrap(f"without {group.describe()}", screen.width)]
    return [line, *(_text(part, "bold yellow") for part in lost)]


def _figures(run: RunStatus, now: float, width: int) -> list[Text]:
    """Return the figures of the whole run, in as many lines as the width asks for."""
    rate, left, steps = run.tokens_per_second(now), run.seconds_left(now), run.fold.steps
    share = f" ({100 * steps.num_committed / steps.num_attempted:.1f} %)" if steps.num_attempted else ""
    step = None if run.step is None else run.fold.unit.step_after(run.step)
    figures = [
        *([("round", number(run.step))] if run.fold.unit.method else []),
        ("step", number(step) + ("" if run.fold.target is None else f"/{run.fold.target}")),
        ("loss", number(run.loss, ".5f")),
        ("tokens/s", number(rate, ",.0f")),
        *([] if left is None else [("ETA", clock(left))]),
        ("contributing", f"{len(run.participants)}/{len(run.groups)}"),
        ("committed", f"{steps.num_committed}/{steps.num_attempted}{share}"),
        ("faults", str(run.fold.faults.num_injected)),
        ("restarts", str(run.restarts)),
        ("lighthouse restarts", str(run.fold.num_lighthouse_restarts)),
    ]
    lines = [_text("")]
    for label, value in figures:
        if lines[-1].plain and len(lines[-1].plain) + GAP + len(label) + 1 + len(value) > width:
            lines.append(_text(""))
        lines[-1].append("  " if lines[-1].plain else "").append(f"{label} ", "dim").append(value, "bold")
    return lines


def _losses(run: RunStatus, screen: Screen) -> list[Text]:
    """Return the course of the loss, with its first and last value, on one line or three."""
    known = run.losses.points
    if len(known) < 2:
        return []
    first, last = f"loss {run.losses.first:.3f} ", f" {run.losses.last:.3f}"
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


def _hosts(hosts: Sequence[HostFigures], width: int, max_rows: int) -> list[Text]:
    """Return a table of the hosts, below an empty line; nothing where one of several would not have a row."""
    if max_rows < min(2, len(hosts)):
        return []
    shown = hosts if len(hosts) <= max_rows else hosts[: max_rows - 1]
    cells = [("host", "starts", "deaths", "left", "groups")]
    cells += [(h.host, f"{h.starts}", f"{h.deaths}", f"{h.left}", name_range(h.groups)) for h in shown]
    longest = max(len(row[0]) for row in cells)
    name = min(longest, max(8, width // 3))  # of a long name a part; the figures behind it are never cut off before it
    space = " " * GAP
    lines = [
        f"{host[:name]:{name}}{space}{starts:>6}{space}{deaths:>6}{space}{left:>4}{space}{groups}"
        for host, starts, deaths, left, groups in cells
    ]
    hidden = len(hosts) - len(shown)
    rest = [_text(f"and {hidden} more hosts, with no more deaths", "dim")] if hidden else []
    return [_text(""), _text(lines[0], "bold"), *(_text(line) for line in lines[1:]), *rest]


def _shown(run: RunStatus, max_rows: int) -> tuple[list[GroupStatus], str]:
    """Return the groups that have a row, and a line about the others; of too many, those that train are left out."""
    groups = list(run.groups.values())
    if max_rows >= len(groups):
        return groups, ""
    urgent = sorted(groups, key=lambda group: (group.state == TRAINING, group.replica))
    shown = sorted(urgent[: max(0, max_rows - 1)], key=lambda group: group.replica)
    hidden = Counter(shown_state(group) for group in groups if group not in shown)
    states = ", ".join(f"{count} {state}" for state, count in hidden.most_common())
    return shown, f"and {sum(hidden.values())} more: {states}" if max_rows > 0 else ""


def _line(seconds: float, text: str, severity: Severity, width: int) -> list[Text]:
    style = _STYLE_OF[severity]
    first, *more = textwrap.wrap(text, max(16, width - 10), break_on_hyphens=False)[:MAX_WRAPPED] or [""]
    lines = [_text(f"{clock(seconds):>8}  ", "dim").append(first, f"not dim {style}")]
    return lines + [_text(CONTINUED).append(part, style) for part in more]
