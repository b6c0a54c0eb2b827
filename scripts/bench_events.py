# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What the benchmark's peer tells beside the events of every worker."""

from __future__ import annotations

from titan_ft.run.events import RankEvent


class StepTried(RankEvent, kw_only=True):
    """The peer has tried a step.

    Attributes:
        step: its number, from 1.
        committed: whether it was committed.
        contributed: whether it was, and this group's gradient counted: it was not healing.
        own_loss: this rank's share of the mean loss of its group; torchtitan logs the sum over all groups.
        digest: hash of this rank's part of the weights, hex; only every so many steps.
    """

    step: int
    committed: bool
    contributed: bool
    own_loss: float | None
    digest: str | None = None
