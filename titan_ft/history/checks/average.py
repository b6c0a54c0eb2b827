# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Promise 3: each update is the token-weighted mean of exactly the groups that took part.

See docs/guarantees.md.
"""

from __future__ import annotations

import math

from titan_ft.history.judgement import Judgement, count
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.events import EventsDropped, GradientExcluded, StepCommitted

RELATIVE_TOLERANCE = 1e-6
"""Tolerance for the loss: the history has the groups' own means rounded once more."""


def check_average(record: RunRecord, found: Judgement) -> None:
    """Check participants, tokens and loss of each state against the reports of its groups."""
    num_checked = 0
    for lineage, events in record.commits_by_lineage.items():
        if lineage in record.usual_lineages:
            num_checked += 1  # the reduction of the events has made the same comparison
            continue
        participants = events[0].participants
        for event in events:
            if event.participants != participants:
                own = f"participants {event.participants} of the state {lineage}"
                found.object_to(f"{own}, others report {participants}", event)
        for event in events:
            if not event.contributed and event.own_tokens:
                text = f"had {event.own_tokens} tokens of weight and is no participant"
                found.object_to(text, event)
        if _check_sums(events, found):
            num_checked += 1
    num_excluded = _check_excluded(record, found)
    excluded = ""
    if num_excluded:
        excluded = f"; left out as not finite: {count(num_excluded, 'gradient')}"
    states = count(len(record.commits_by_lineage), "state")
    checked = f"tokens and loss of {num_checked} of {states}"
    found.statement = f"{checked} are those of their participants{excluded}"
    if not num_checked:
        found.unknown.append("no state of which all participants are in the history")


def _check_sums(events: list[StepCommitted], found: Judgement) -> bool:
    """Check tokens and loss of one state.

    Returns:
        False if the report of a participant is missing, for example because it died.
    """
    first = events[0]
    participants = set(first.participants)
    own_tokens: dict[int, int] = {}
    own_losses: dict[int, float] = {}
    losses: set[float] = set()
    for event in events:
        if event.loss is not None:
            losses.add(event.loss)
        if event.contributed:
            own_tokens.setdefault(event.replica, event.own_tokens)
            if event.own_loss is not None:
                own_losses.setdefault(event.replica, event.own_loss)
    if not participants or own_tokens.keys() != participants:
        return False
    total = sum(own_tokens.values())
    if first.tokens != total:
        own = f"the participants' own are {total} ({own_tokens})"
        found.object_to(f"{first.tokens} tokens, {own}", first)
        return True
    # Without exactly one loss there is nothing to compare; promise 1 judges several losses.
    if len(losses) != 1 or own_losses.keys() != participants or total <= 0:
        return True
    loss = losses.pop()
    weighted = sum(own_losses[group] * own_tokens[group] for group in participants)
    mean = weighted / total
    tolerance = RELATIVE_TOLERANCE
    if not math.isclose(loss, mean, rel_tol=tolerance, abs_tol=tolerance):
        own = f"the token-weighted mean of the participants' own is {mean!r}"
        found.object_to(f"loss {loss!r}, {own}", first)
    return True


def _check_excluded(record: RunRecord, found: Judgement) -> int:
    """Check that no excluded gradient is in an update.

    Returns:
        The number of excluded gradients; each counts once, however many ranks report it.
    """
    exclusions: set[tuple[str, int]] = set()
    for process in record.processes:
        pending: GradientExcluded | None = None
        for event in process.events:
            if isinstance(event, EventsDropped):
                pending = None  # the commit that belongs to it may be among the dropped events
            elif isinstance(event, GradientExcluded):
                pending = event
            elif isinstance(event, StepCommitted):
                if pending is not None and pending.step == event.step:
                    slots = set(pending.slots)
                    exclusions.update((event.lineage, slot) for slot in slots)
                    if slots & set(event.participants):
                        what = f"gradients of groups {sorted(slots)} were excluded"
                        found.object_to(f"{what}, and they count", event)
                pending = None
    return len(exclusions)
