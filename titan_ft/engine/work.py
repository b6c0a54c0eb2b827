# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One rank's work on an update: the batches that it has read, and the duration of each part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from titan_ft.engine.feed import Reading
from titan_ft.protocol.row import Why


@dataclass
class Work:
    """This rank's work on one update. Training thread only.

    Attributes:
        first_step: torchtitan's number of the update's first local step.
        lr: learning rate of the update.
        readings: the batches that this rank has read for the update.
        grad_norm: returns the gradient norm before clipping; waits for the device.
        seconds: duration of the whole work; 0 until the update is committed.
        compute_seconds: duration of forward and backward.
        exchange_seconds: from the end of backward to the commit.
        overlapped_seconds: duration of the next update's forward and backward in this time.
        loading_seconds: the part of `compute_seconds` in which the group's slowest rank read
            batches.
        between_seconds: from the end of the last update to the start of this one.
        inner_steps: number of local steps that this group has made for the update.
        wire_bytes: bytes of gradients that this rank has sent since the last commit.
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
    def main_activity(self) -> Why:
        """The activity that took most of the time until the exchange."""
        seconds = {
            Why.COMPUTING: self.compute_seconds - self.loading_seconds,
            Why.LOADING: self.loading_seconds,
            Why.BETWEEN_STEPS: self.between_seconds,
        }
        return max(seconds, key=lambda why: seconds[why])

    def count_batches(self, slot: int) -> int:
        """Return how many batches of `slot` this rank has read for the update."""
        number = 0
        for reading in self.readings:
            if reading.entry.slot == slot:
                number += reading.entry.num_batches
        return number
