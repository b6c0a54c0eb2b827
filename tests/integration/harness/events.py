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
    """What the hooks of a worker counted in a step.

    Attributes:
        step: its number.
        forwards: forward passes.
        reductions: all-reduces inside of the group.
        samples: texts that were tokenized so far.
        rate: learning rate of the optimizer.
        held_seconds: for which the hooks held the step up.
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
