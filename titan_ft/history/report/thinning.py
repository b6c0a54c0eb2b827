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
    found = {replica: list(row) for replica, row in rows.items()}
    if sum(map(len, found.values())) <= MAX_BOXES:
        return found, ""
    found = {replica: join_training(row) for replica, row in found.items()}
    if sum(map(len, found.values())) <= MAX_BOXES:
        return found, " Thinned: steps in a row without trouble are one stretch."
    columns = max(1, MAX_BOXES // len(found))
    thinned = {replica: thin_columns(row, columns) for replica, row in found.items()}
    return thinned, f" Thinned: each of {columns:,} columns shows the state that took most of it."


def join_training(row: Iterable[StateSpan]) -> list[StateSpan]:
    """Return a row in which the training between two troubles is one stretch that lists its
    components.
    """
    joined: list[StateSpan] = []
    for trains, group in groupby(row, lambda each: each.state == "training"):
        part = list(group)
        if not trains or len(part) == 1:
            joined += part
            continue
        shares = Counter[str]()
        for each in part:
            shares[each.fine] += each.num_us
        total = shares.total() or 1
        detail = ", ".join(
            f"{DETAILS[fine]} {100 * us / total:.0f} %" for fine, us in shares.most_common()
        )
        fine = shares.most_common(1)[0][0]
        joined.append(StateSpan(part[0].start_us, part[-1].end_us, "training", fine, detail))
    return joined


def thin_columns(row: Sequence[StateSpan], num_columns: int) -> list[StateSpan]:
    """Return a row of at most so many stretches, each in the state that took most of its time."""
    begin, end = row[0].start_us, row[-1].end_us
    width = -(-(end - begin) // num_columns) or 1
    columns: list[Counter[str]] = [Counter() for _ in range(num_columns)]
    fines: dict[str, str] = {}
    for each in row:
        fines.setdefault(each.state, each.fine)
        for column in range(
            (each.start_us - begin) // width, min((each.end_us - begin) // width + 1, num_columns)
        ):
            left = begin + column * width
            columns[column][each.state] += max(
                0, min(each.end_us, left + width) - max(each.start_us, left)
            )
    thinned: list[StateSpan] = []
    for column, shares in enumerate(columns):
        left = begin + column * width
        if not shares.total():
            continue
        state = max(shares, key=lambda state: shares[state])
        start = thinned.pop().start_us if thinned and thinned[-1].state == state else left
        thinned.append(StateSpan(start, min(left + width, end), state, fines[state]))
    return thinned
