# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Promise 3: each update is the token-weighted mean of exactly the groups that took part."""

from __future__ import annotations

import math

from titan_ft.history.judgement import Judgement, count
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.events import EventsDropped, GradientExcluded, StepCommitted

RELATIVE_TOLERANCE = 1e-6
"""Of the loss: the groups' means are rounded once more on their way into the history."""


def check_average(record: RunRecord, found: Judgement) -> None:
    """Check participants, tokens and loss of each state against what its groups report of themselves."""
    checked = 0
    for lineage, events in record.commits_of.items():
        if lineage in record.usual:
            checked += 1
            continue
        first = events[0]
        for event in events[1:]:
            if event.participants != first.participants:
                text = f"participants {event.participants} of the state {lineage}, others report {first.participants}"
                found.object_to(text, event)
        for event in events:
            if not event.contributed and event.own_tokens:
                found.object_to(f"had {event.own_tokens} tokens of weight and is no participant", event)
        checked += _check_sums(events, found)
    excluded = _check_excluded(record, found)
    total = len(record.commits_of)
    found.statement = (
        f"tokens and loss of {checked} of {count(total, 'state')} are those of their participants{excluded}"
    )
    if not checked:
        found.unknown.append("no state of which all participants are in the history")


def _check_sums(events: list[StepCommitted], found: Judgement) -> bool:
    """Check tokens and loss of one state; False if a participant's own are missing: it may have died."""
    participants = set(events[0].participants)
    tokens: dict[int, int] = {}
    losses: dict[int, float] = {}
    for event in events:
        if event.contributed:
            tokens.setdefault(event.replica, event.own_tokens)
            if event.own_loss is not None:
                losses.setdefault(event.replica, event.own_loss)
    if not participants or tokens.keys() != participants:
        return False
    reported, total = events[0].tokens, sum(tokens.values())
    if reported != total:
        found.object_to(f"{reported} tokens, the participants' own are {total} ({tokens})", events[0])
        return True
    losses_reported = {event.loss for event in events} - {None}
    loss = next((event.loss for event in events if event.loss is not None), None)
    if loss is None or len(losses_reported) > 1 or losses.keys() != participants or total <= 0:
        return True
    mean = sum(losses[replica] * tokens[replica] for replica in participants) / total
    if not math.isclose(loss, mean, rel_tol=RELATIVE_TOLERANCE, abs_tol=RELATIVE_TOLERANCE):
        found.object_to(f"loss {loss!r}, the token-weighted mean of the participants' own is {mean!r}", events[0])
    return True


def _check_excluded(record: RunRecord, found: Judgement) -> str:
    """Check that gradients which were left out are not in the update; return a clause about them."""
    exclusions: set[tuple[object, int]] = set()
    for process in record.processes:
        pending: GradientExcluded | None = None
        for event in process.events:
            if isinstance(event, EventsDropped):
                pending = None
            elif isinstance(event, GradientExcluded):
                pending = event
            elif isinstance(event, StepCommitted):
                if pending is not None and pending.step == event.step:
                    slots = set(pending.slots)
                    exclusions.update((event.lineage, slot) for slot in slots)
                    if slots & set(event.participants):
                        found.object_to(f"gradients of groups {sorted(slots)} were excluded, and they count", event)
                pending = None
    return f"; left out as not finite: {count(len(exclusions), 'gradient')}" if exclusions else ""
