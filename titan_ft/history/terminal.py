# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Print tables: on a terminal with wrapped columns, elsewhere as whole lines."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from titan_ft.system.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from titan_ft.history.outcomes.outcome import Colour, Outcome

_UNLIMITED = 100_000


def make_grid(rows: Iterable[Sequence[str | Text]]) -> Table:
    """Return rows of text, plain or in colours, as aligned columns; only the last column may be
    wrapped.
    """
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    table = Table.grid(padding=(0, 2, 0, 0))
    num_columns = max((len(row) for row in rows), default=1)
    for column in range(num_columns):
        is_last = column == num_columns - 1
        table.add_column(no_wrap=not is_last, overflow="fold")
    for row in rows:
        # Rich would read brackets in a plain text as markup.
        cells = [Text(printable(cell)) if isinstance(cell, str) else cell for cell in row]
        table.add_row(*cells)
    return table


_STYLES: dict[Colour, str] = {"green": "green", "amber": "yellow", "red": "red"}
_MARKS: dict[Colour, str] = {"green": "\u2713", "amber": "!", "red": "\u2717"}


def colour_text(text: str, colour: Colour) -> Text:
    """Return a text in one of the colours of an outcome."""
    from rich.text import Text

    return Text(printable(text), style=_STYLES[colour])


def make_headline(outcome: Outcome, colour: Colour) -> list[Text]:
    """Return the first lines about a run: its outcome, then the logs of its last failures."""
    from rich.text import Text

    head = colour_text(f"{_MARKS[colour]} {outcome.headline}", colour)
    head.stylize("bold")
    lines = [head]
    in_headline = [outcome.reason, *(group.reason for group in outcome.lost)]
    for reason in outcome.reasons:
        parts = []
        if reason not in in_headline:
            parts.append(f"not back: {reason.describe()}")
        if reason.log:
            parts.append(f"see {reason.log}")
        if parts:
            lines.append(Text(printable(f"  {'; '.join(parts)}")))
    return lines


def text_of(shown: RenderableType) -> str:
    """Return the text without a terminal: lines of any length, without trailing blanks."""
    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=_UNLIMITED, color_system=None, highlight=False, emoji=False
    )
    with console.capture() as captured:
        console.print(shown)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def show(shown: RenderableType) -> None:
    """Print on stdout, whatever it is."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False, emoji=False).print(shown)
    else:
        print(text_of(shown))


def format_clock(seconds: float) -> str:
    """Return seconds as m:ss, or h:mm:ss."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"
