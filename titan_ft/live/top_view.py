# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Lay out a run's status for a terminal of any size. Pure functions; the lines are rich's texts."""

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
from titan_ft.history.terminal import format_clock
from titan_ft.live.group_table import (
    EXPLAINED,
    GAP,
    describe_state,
    format_number,
    make_group_table,
)
from titan_ft.live.rank_table import make_rank_lines
from titan_ft.live.run_status import RunStatus, describe_shape
from titan_ft.live.status import TRAINING, GroupStatus
from titan_ft.run.events import Severity

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

_STYLE_OF: dict[Severity, str] = {"notice": "", "chaos": "magenta", "failure": "red"}
_STYLES = {"green": "green", "amber": "yellow", "red": "red"}
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", ".:-=+*#@"
MAX_HOSTS = 4
"""Rows of hosts, if the height is limited."""
NUM_LINES = 10
"""Lines of latest events, if the height is not limited."""
MIN_LINES = 4
"""Lines of latest events below a table of ranks."""
MAX_SHOWN = 100
"""Events that are laid out: more than the lines of a terminal."""
CONTINUED = 10 * " "
"""Indentation of a line that continues the event above."""
MAX_WRAPPED = 6
"""Largest number of lines of one event."""


@dataclass(frozen=True)
class Screen:
    """Size and abilities of the terminal, and the user's choices."""

    width: int
    height: int | None = None
    """Lines; None = as many as needed."""
    ascii_only: bool = False
    hint: str = ""
    """Text at the right end of the first line."""
    ranks: bool = False
    """True shows a table of the ranks."""
    help: bool = False
    """True explains the columns instead of showing the latest events."""


def frame(run: RunStatus, name: str, now: float, screen: Screen, *, history: bool = True) -> Group:
    """Lay out a run: head, loss, table of the groups, table of the hosts, latest events.

    Args:
        name: name of the run, such as its folder.
        now: Unix seconds.
        history: True shows the latest events; the launcher prints them above the frame itself.
    """
    from rich.console import Group

    head = _make_head(run, name, now, screen, history=history)
    figures = run.fold.hosts.figures
    hosts = []
    if worth_a_table(figures):
        hosts = _make_hosts(figures, screen.width, len(figures))
    num_groups = len(run.fold.groups)
    if screen.height is None:
        num_ranks = sum(len(group.ranks) for group in run.fold.groups.values())
        num_rows = num_groups
        num_lines = NUM_LINES
        room_of_ranks = 10 * num_ranks + 2
    else:
        room = max(0, screen.height - len(head) - 2)  # without the table's head and an empty line
        if screen.help:
            # The help needs the room: on 24 lines, two of three columns had no explanation.
            hosts = []
        if hosts:
            hosts = _make_hosts(figures, screen.width, min(MAX_HOSTS, room // 4 - 2))
        room -= len(hosts)
        num_rows = _count_rows(num_groups, room, screen, history=history)
        num_lines = room - num_rows
        room_of_ranks = max(0, num_lines - MIN_LINES)
    shown, hidden = _choose_groups(run, num_rows)
    until = run.fold.last_event_time if run.end else now
    table = make_group_table(run.groups, until, screen.width, shown, ascii_only=screen.ascii_only)
    ranks = []
    if screen.ranks:
        groups = [run.fold.groups[group.slot] for group in shown]
        ranks = make_rank_lines(groups, run.fold.unit, until, room_of_ranks - 1)
    if ranks:
        ranks = [_make_text(""), *ranks]
    tail = [*ranks, *hosts]
    if hidden:
        tail.insert(0, _make_text(hidden, "dim"))
    if history:
        tail += [_make_text(""), *_make_bottom(run, screen, num_lines - len(ranks))]
    for line in [*head, *tail]:
        line.overflow = "crop" if screen.ascii_only else "ellipsis"
    return Group(*head, table, *tail)


def _make_head(
    run: RunStatus, name: str, now: float, screen: Screen, *, history: bool
) -> list[Text]:
    """Return the lines above the table of the groups."""
    lines = [_make_title(name, screen)] if history else []
    lines += _make_state(run, now, screen)
    lines += _make_figures(run, now, screen.width)
    lines += _make_losses(run, screen)
    lines.append(_make_text(""))
    return lines


def _count_rows(num_groups: int, room: int, screen: Screen, *, history: bool) -> int:
    """Return the number of rows of the table of the groups, where the height is limited."""
    most = room
    if history:
        # The latest events get NUM_LINES lines, but at most a third of the room.
        most = max(room - NUM_LINES, room - room // 3)
    num_rows = min(num_groups, most)
    if screen.help:
        room_beside_help = room - len(_make_help(screen.width))
        num_rows = max(min(num_rows, 1), min(num_rows, room_beside_help))
    return num_rows


def _make_bottom(run: RunStatus, screen: Screen, num_lines: int) -> list[Text]:
    """Return the explanation of the columns, or the latest events, in at most `num_lines` lines."""
    if screen.help:
        return _make_help(screen.width)[: max(0, num_lines)]
    if num_lines <= 0:
        return []
    lines = _make_latest_events(run, screen)[-num_lines:]
    # Without its first line an event cannot be understood.
    while lines and lines[0].plain.startswith(CONTINUED):
        lines.pop(0)
    return lines


def _make_latest_events(run: RunStatus, screen: Screen) -> list[Text]:
    """Return the latest events, wrapped to the width so that no reason of a failure is cut off."""
    lines: list[Text] = []
    for line in list(run.lines)[-MAX_SHOWN:]:
        seconds = line.time - (run.fold.first_event_time or 0.0)
        lines += _make_event(seconds, line.text, line.severity, screen.width)
    return lines


def _make_help(width: int) -> list[Text]:
    """Return the meaning of each column of the groups."""
    name_width = max(map(len, EXPLAINED)) + GAP
    lines = []
    for name, meaning in EXPLAINED.items():
        label = name
        for part in textwrap.wrap(meaning, max(16, width - name_width)):
            lines.append(_make_text("").append(label.ljust(name_width), "bold").append(part))
            label = ""
    return lines


def _make_text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style=style, no_wrap=True)


def _make_title(name: str, screen: Screen) -> Text:
    line = _make_text("titan-ft top  ", "bold")
    room = screen.width - len(line.plain)
    if screen.hint:
        room -= len(screen.hint) + GAP
    if len(name) > room:
        num_kept = max(0, room - 3)
        name = f"...{name[len(name) - num_kept :]}"
    line.append(name, "not bold")
    if screen.hint:
        line.append(screen.hint.rjust(screen.width - len(line.plain)), "not bold dim")
    return line


def _make_state(run: RunStatus, now: float, screen: Screen) -> list[Text]:
    """Return the state of the run, or its outcome once it is over."""
    if run.fold.first_event_time is None:
        return [_make_text("nothing has started yet", "yellow")]
    size = describe_shape(len(run.groups), run.fold.num_ranks)
    elapsed = format_clock(run.elapsed(now))
    silence = f"no event for {format_clock(now - run.fold.last_event_time)}"
    outcome = run.outcome
    if run.end or run.launcher_gone:
        when = f"over after {elapsed}" if run.end else silence
        text = f"{outcome.headline}; {when}; {size}"
        parts = textwrap.wrap(text, max(16, screen.width))
        return [_make_text(part, _STYLES[outcome.colour]) for part in parts]
    line = _make_text(f"running for {elapsed}; {size}")
    if run.is_silent(now):
        line.append(f"; {silence}", "bold yellow")
    if run.num_cut:
        processes = count(run.num_cut, "process", "processes")
        line.append(f"; events of {processes} are not written", "bold yellow")
    lines = [line]
    for group in outcome.lost:
        parts = textwrap.wrap(f"without {group.describe()}", screen.width)
        lines += [_make_text(part, "bold yellow") for part in parts]
    return lines


def _make_figures(run: RunStatus, now: float, width: int) -> list[Text]:
    """Return the figures of the whole run, in as many lines as the width requires."""
    steps = run.fold.steps
    committed = f"{steps.num_committed}/{steps.num_attempted}"
    if steps.num_attempted:
        committed += f" ({100 * steps.num_committed / steps.num_attempted:.1f} %)"
    step_text = format_number(None)
    if run.step is not None:
        step_text = format_number(run.fold.unit.step_after(run.step))
    if run.fold.target_step is not None:
        step_text += f"/{run.fold.target_step}"
    figures = []
    if run.fold.unit.method:
        figures.append(("round", format_number(run.step)))
    figures += [
        ("step", step_text),
        ("loss", format_number(run.loss, ".5f")),
        ("tokens/s", format_number(run.tokens_per_second(now), ",.0f")),
    ]
    left = run.seconds_left(now)
    if left is not None:
        figures.append(("ETA", format_clock(left)))
    figures += [
        ("contributing", f"{len(run.participants)}/{len(run.groups)}"),
        ("committed", committed),
        ("faults", str(run.fold.faults.num_injected)),
        ("restarts", str(run.restarts)),
        ("lighthouse restarts", str(run.fold.num_lighthouse_restarts)),
    ]
    lines = [_make_text("")]
    for label, value in figures:
        used = len(lines[-1].plain)
        if used and used + GAP + len(label) + 1 + len(value) > width:
            lines.append(_make_text(""))
            used = 0
        if used:
            lines[-1].append(GAP * " ")
        lines[-1].append(f"{label} ", "dim").append(value, "bold")
    return lines


def _make_losses(run: RunStatus, screen: Screen) -> list[Text]:
    """Return a chart of the loss with its first and last value, on one line or three."""
    known = run.losses.points
    if len(known) < 2:
        return []
    first = f"loss {run.losses.first:.3f} "
    last = f" {run.losses.last:.3f}"
    width = screen.width - len(first) - len(last)
    is_tall = screen.height is not None and screen.height >= 32
    num_rows = 3 if is_tall and not screen.ascii_only else 1
    rows = make_sparkline(known, width, num_rows, ascii_only=screen.ascii_only)
    lines = [_make_text(" " * len(first)).append(row, "cyan") for row in rows]
    lines[0] = _make_text("").append(first, "dim").append(rows[0], "cyan")
    lines[-1].append(last, "dim")
    return lines


def make_sparkline(
    values: Sequence[float], width: int, rows: int = 1, *, ascii_only: bool = False
) -> list[str]:
    """Return a bar chart of `rows` lines and at most `width` columns.

    A column is the mean of its values.
    """
    num_columns = min(len(values), max(1, width))
    cuts = [column * len(values) // num_columns for column in range(num_columns + 1)]
    means = [fmean(values[start:end]) for start, end in pairwise(cuts)]
    lowest = min(means)
    span = max(means) - lowest
    marks = ASCII if ascii_only else BLOCKS
    levels = []
    for mean in means:
        level = 1
        if span > 0:
            level += round((mean - lowest) / span * (rows * len(marks) - 1))
        levels.append(level)
    lines = []
    for row in reversed(range(rows)):
        line = ""
        for level in levels:
            # The part of the column that is in this row; the lowest row is row 0.
            filled = min(level - row * len(marks), len(marks))
            line += marks[filled - 1] if filled > 0 else " "
        lines.append(line)
    return lines


def _make_hosts(hosts: Sequence[HostFigures], width: int, max_rows: int) -> list[Text]:
    """Return an empty line and a table of the hosts; nothing if there is no room for two rows."""
    if max_rows < min(2, len(hosts)):
        return []
    shown = hosts
    if len(hosts) > max_rows:
        # The last line names the number of the others.
        shown = hosts[: max_rows - 1]
    names = ["host", *(figures.host for figures in shown)]
    # A long name is cut, so that the figures after it are not.
    name_width = min(max(map(len, names)), max(8, width // 3))
    space = " " * GAP
    head = f"{'host':{name_width}}{space}starts{space}deaths{space}left{space}groups"
    lines = [_make_text(""), _make_text(head, "bold")]
    for figures in shown:
        name = f"{figures.host[:name_width]:{name_width}}"
        numbers = f"{figures.starts:>6}{space}{figures.deaths:>6}{space}{figures.left:>4}"
        lines.append(_make_text(f"{name}{space}{numbers}{space}{name_range(figures.groups)}"))
    num_hidden = len(hosts) - len(shown)
    if num_hidden:
        lines.append(_make_text(f"and {num_hidden} more hosts, with no more deaths", "dim"))
    return lines


def _choose_groups(run: RunStatus, max_rows: int) -> tuple[list[GroupStatus], str]:
    """Return the groups with a row, and a line about the others.

    Training groups are left out first.
    """
    groups = list(run.groups.values())
    if max_rows >= len(groups):
        return groups, ""
    urgent_first = sorted(groups, key=lambda group: (group.state == TRAINING, group.slot))
    # The line about the others needs one of the rows.
    num_shown = max(0, max_rows - 1)
    shown = sorted(urgent_first[:num_shown], key=lambda group: group.slot)
    if max_rows <= 0:
        return shown, ""
    hidden = Counter(describe_state(group) for group in groups if group not in shown)
    states = ", ".join(f"{num_groups} {state}" for state, num_groups in hidden.most_common())
    return shown, f"and {hidden.total()} more: {states}"


def _make_event(seconds: float, text: str, severity: Severity, width: int) -> list[Text]:
    """Return the lines of an event: the time, and the text wrapped to the width."""
    style = _STYLE_OF[severity]
    parts = textwrap.wrap(text, max(16, width - len(CONTINUED)), break_on_hyphens=False) or [""]
    first = _make_text(f"{format_clock(seconds):>8}  ", "dim").append(parts[0], f"not dim {style}")
    continued = [_make_text(CONTINUED).append(part, style) for part in parts[1:MAX_WRAPPED]]
    return [first, *continued]
