# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Count the committed steps of a run, and their exchanges, once each."""

from __future__ import annotations

from titan_ft.run.events import StepCommitted

MAX_REMEMBERED = 4096
"""Commits that are remembered. All groups announce a commit within seconds."""


class CommittedSteps:
    """Count each committed step once, whichever of its groups announces it first."""

    def __init__(self) -> None:
        self.num_committed = 0
        self.num_attempted = 0
        """Exchanges that the committed steps took, by the group with most of them."""
        self._exchanges: dict[tuple[int, str], int] = {}
        """By step and lineage, oldest first."""

    def observe(self, event: StepCommitted) -> tuple[bool, int]:
        """Take a commit of a rank 0; return whether the step is new, and how many exchanges it adds.

        The same step number comes again when groups went on from an earlier state; then its lineage differs.
        """
        key = (event.step, event.lineage)
        known = self._exchanges.get(key)
        exchanges = max(1, event.exchanges)
        added = max(0, exchanges - (known or 0))
        self._exchanges[key] = max(exchanges, known or 0)
        if len(self._exchanges) > MAX_REMEMBERED:
            oldest = next(iter(self._exchanges))
            del self._exchanges[oldest]
        self.num_committed += known is None
        self.num_attempted += added
        return known is None, added
