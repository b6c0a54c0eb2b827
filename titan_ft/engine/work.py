# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One rank's work on an update: the batches that it read, and the time that each part took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from titan_ft.engine.feed import Reading
from titan_ft.protocol.row import Why


@dataclass
class Work:
    """This rank's work on one step.

    Attributes:
        first_step: torchtitan's number of it, or of the first one if it is a round of several.
        lr: of the update.
        readings: what this rank has read for the step.
        grad_norm: tells it, before clipping; waits for the update.
        seconds: of all of it; 0 until it is in an update.
        compute_seconds: of forward and backward.
        exchange_seconds: from there to the commit.
        overlapped_seconds: from there to the commit, of the next one's forward and backward.
        loading_seconds: of those, reading batches, on the group's slowest rank.
        between_seconds: from the end of the last step to the begin of this one.
        inner_steps: how many of them this group made itself.
        wire_bytes: of gradients that this rank has sent since the last commit.
    """

    first_step: int
    lr: float
    readings: list[Reading] = field(default_factory=list)
    grad_norm: Callable[[], float] = float
    seconds: float = 0.0
    compute_seconds: float = 0.0
    exchange_seconds: float = 0.0
    overlapped_seconds: float = 0.0
    loading_seconds: float = 0.0
    between_seconds: float = 0.0
    inner_steps: int = 0
    wire_bytes: int = 0

    @property
    def most(self) -> Why:
        """What most of the time until the exchange went into."""
        parts = {
            Why.COMPUTING: self.compute_seconds - self.loading_seconds,
            Why.LOADING: self.loading_seconds,
            Why.BETWEEN_STEPS: self.between_seconds,
        }
        return max(parts, key=lambda why: parts[why])

    def read(self, slot: int) -> int:
        """Return how many batches of `slot` this rank has read for it."""
        return sum(reading.entry.num_batches for reading in self.readings if reading.entry.slot == slot)
