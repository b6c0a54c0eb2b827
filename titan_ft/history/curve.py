# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The loss curve of a run: a point for each step of its trajectory, as far back as the history goes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from titan_ft.history.record import RunRecord, view
from titan_ft.run.events import StepCommitted


@dataclass(frozen=True)
class Point:
    """One step of the trajectory.

    Attributes:
        tokens: of this step and all before.
        loss: mean over the tokens of the step; None where it was not finite, or is not in the history.
        whole: whether all groups took part.
        event: the first commit of it.
    """

    step: int
    tokens: int
    loss: float | None
    whole: bool
    event: StepCommitted


@view
def curve(record: RunRecord) -> list[Point]:
    """Return the points of a run. With pipeline parallelism only the ranks of the last stage know the loss."""
    commits = [record.commits_of[state.lineage] for state in record.chain]
    losses = [next((event.loss for event in events if event.loss is not None), None) for events in commits]
    totals = accumulate(events[0].tokens for events in commits)
    return [
        Point(state.step, total, loss, len(record.participants(state.lineage)) >= record.group_size, events[0])
        for state, events, loss, total in zip(record.chain, commits, losses, totals, strict=True)
    ]
