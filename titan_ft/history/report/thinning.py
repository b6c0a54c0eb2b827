# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Thin rows of states that are too fine for a page. Trouble is kept as long as there is room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from titan_ft.history.report.phases import StateSpan
from titan_ft.history.report.style import DETAILS

MAX_BOXES = 3000  # of all rows: what a browser still zooms without a delay


def thin_rows(rows: Mapping[int, Sequence[StateSpan]]) -> tuple[dict[int, list[StateSpan]], str]:
    """Return rows with at most about `MAX_BOXES` stretches, and a sentence for the caption if
    thinned.

    First, consecutive steps without trouble become one stretch, so that every trouble stays. If
    there are still too many stretches, each column shows the state that took most of it.
    """
    whole = {slot: list(row) for slot, row in rows.items()}
    if _count_spans(whole) <= MAX_BOXES:
        return whole, ""
    joined = {slot: join_training(row) for slot, row in whole.items()}
    if _count_spans(joined) <= MAX_BOXES:
        return joined, " Thinned: steps in a row without trouble are one stretch."
    num_columns = max(1, MAX_BOXES // len(joined))
    thinned = {slot: thin_columns(row, num_columns) for slot, row in joined.items()}
    columns = f"each of {num_columns:,} columns shows the state that took most of it"
    return thinned, f" Thinned: {columns}."


def _count_spans(rows: Mapping[int, Sequence[StateSpan]]) -> int:
    return sum(len(row) for row in rows.values())


def join_training(row: Iterable[StateSpan]) -> list[StateSpan]:
    """Return a row in which the training between two troubles is one stretch that lists its
    components.
    """
    joined: list[StateSpan] = []
    for is_training, spans in groupby(row, lambda span: span.state == "training"):
        part = list(spans)
        if not is_training or len(part) == 1:
            joined += part
            continue
        us_of_fine = Counter[str]()
        for span in part:
            us_of_fine[span.fine_state] += span.num_us
        total_us = us_of_fine.total() or 1
        by_length = us_of_fine.most_common()
        shares = [f"{DETAILS[fine]} {100 * us / total_us:.0f} %" for fine, us in by_length]
        longest, _ = by_length[0]
        start_us = part[0].start_us
        end_us = part[-1].end_us
        joined.append(StateSpan(start_us, end_us, "training", longest, ", ".join(shares)))
    return joined


def thin_columns(row: Sequence[StateSpan], num_columns: int) -> list[StateSpan]:
    """Return a row of at most so many stretches, each in the state that took most of its time."""
    begin_us = row[0].start_us
    end_us = row[-1].end_us
    # Rounded up, so that the last column reaches the end; at least 1.
    width_us = -(-(end_us - begin_us) // num_columns) or 1
    us_of_columns: list[Counter[str]] = [Counter() for _ in range(num_columns)]
    first_fine: dict[str, str] = {}
    for span in row:
        first_fine.setdefault(span.state, span.fine_state)
        first_column = (span.start_us - begin_us) // width_us
        last_column = min((span.end_us - begin_us) // width_us, num_columns - 1)
        for column in range(first_column, last_column + 1):
            left_us = begin_us + column * width_us
            overlap_us = min(span.end_us, left_us + width_us) - max(span.start_us, left_us)
            us_of_columns[column][span.state] += max(0, overlap_us)
    thinned: list[StateSpan] = []
    for column, us_of_state in enumerate(us_of_columns):
        if not us_of_state.total():
            continue
        state, _ = us_of_state.most_common(1)[0]
        left_us = begin_us + column * width_us
        right_us = min(left_us + width_us, end_us)
        if thinned and thinned[-1].state == state:
            left_us = thinned.pop().start_us
        thinned.append(StateSpan(left_us, right_us, state, first_fine[state]))
    return thinned
