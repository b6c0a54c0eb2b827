# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What a job counts by commits."""

from __future__ import annotations

from typing import Any

from torchtitan.train import Trainer

from titan_ft.replica.ledger import Ledger


class Counters:
    """The trainer's count of committed tokens and the ledger, as part of the state that heals."""

    def __init__(self, trainer: Trainer, ledger: Ledger) -> None:
        self._trainer, self._ledger = trainer, ledger

    def state_dict(self) -> dict[str, Any]:
        """Return what is counted now."""
        return {"ntokens_seen": self._trainer.ntokens_seen, "ledger": self._ledger.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what another group, or this one before, has counted."""
        self._trainer.ntokens_seen = state_dict["ntokens_seen"]
        self._ledger.load_state_dict(state_dict["ledger"])
