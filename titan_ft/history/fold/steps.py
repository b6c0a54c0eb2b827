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
        self.num_tokens = 0
        """Tokens with a label that the committed steps trained on."""
        self.newest: StepCommitted | None = None
        """The first event of the step that was counted last."""
        self._exchanges: dict[tuple[int, str], int] = {}
        """By step and lineage, oldest first."""

    def observe(self, event: StepCommitted) -> bool:
        """Take a commit of a rank 0; return True if the step is new.

        The same step number comes again when groups go on from an earlier state; then its lineage
        differs.
        """
        key = (event.step, event.lineage)
        is_known = key in self._exchanges
        known = self._exchanges.get(key, 0)
        exchanges = max(1, event.exchanges, known)
        self.num_attempted += exchanges - known
        self._exchanges[key] = exchanges
        if len(self._exchanges) > MAX_REMEMBERED:
            oldest = next(iter(self._exchanges))
            del self._exchanges[oldest]
        if is_known:
            return False
        self.num_committed += 1
        self.num_tokens += event.tokens
        self.newest = event
        return True
