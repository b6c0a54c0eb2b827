# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A run's events as tools outside of the project see them: as JSON objects."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titan_ft.history.batches import audit as history
from titan_ft.history.record.run_record import RunRecord
from titan_ft.run.events import RankEvent
from titan_ft.run.log import decode, encode, read_events

Event = dict[str, Any]


class Computed(RankEvent, kw_only=True):
    """Counts of a step by the hooks of a worker.

    Attributes:
        step: number of the step.
        forwards: forward passes in the step.
        reductions: all-reduces inside the group.
        samples: texts tokenized since the start of the worker.
        rate: learning rate of the optimizer.
        held_seconds: time for which the hooks delayed the step.
    """

    step: int
    forwards: int
    reductions: int
    samples: int
    rate: float
    held_seconds: float


def read(folder: Path) -> list[Event]:
    """Return the events in a folder, in order of time."""
    return [json.loads(encode(event)) for event in read_events(folder)]


def audit(events: Iterable[Event]) -> history.Audit:
    """Audit the data of a run."""
    typed = (decode(json.dumps(event).encode()) for event in events)
    return history.audit(RunRecord(event for event in typed if event is not None))
