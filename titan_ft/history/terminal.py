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


def grid(rows: Iterable[Sequence[str | Text]]) -> Table:
    """Return rows of text, plain or in colours, as aligned columns; only the last column may be
    wrapped.
    """
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    table = Table.grid(padding=(0, 2, 0, 0))
    width = max(map(len, rows), default=1)
    for place in range(width):
        table.add_column(no_wrap=place < width - 1, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    return table


_STYLES: dict[Colour, str] = {"green": "green", "amber": "yellow", "red": "red"}
_MARKS: dict[Colour, str] = {"green": "\u2713", "amber": "!", "red": "\u2717"}


def coloured(text: str, colour: Colour) -> Text:
    """Return a text in one of the colours of an outcome."""
    from rich.text import Text

    return Text(printable(text), style=_STYLES[colour])


def headline(outcome: Outcome, colour: Colour) -> list[Text]:
    """Return the first lines about a run: its outcome, then the logs of its last failures."""
    from rich.text import Text

    head = coloured(f"{_MARKS[colour]} {outcome.headline}", colour)
    head.stylize("bold")
    lines = [head]
    named = [
        reason
        for reason in (outcome.reason, *(group.reason for group in outcome.lost))
        if reason is not None
    ]
    for reason in outcome.reasons:
        said = "" if reason in named else f"not back: {reason.describe()}"
        log = f"see {reason.log}" if reason.log else ""
        if said or log:
            lines.append(Text(printable(f"  {'; '.join(part for part in (said, log) if part)}")))
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


def clock(seconds: float) -> str:
    """Return seconds as m:ss, or h:mm:ss."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
