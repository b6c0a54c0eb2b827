# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The trainer as the host of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titan_ft.history.events import EventLog
from titan_ft.replica.dimension import ReplicaDimension
from titan_ft.replica.group import Group
from titan_ft.replica.ledger import Ledger


class CheckpointHost:
    """What `ReplicaCheckpoints` asks of the trainer.

    Args:
        config: torchtitan's JobConfig with our table.
        join: joins the job as a group that can load so many steps, if that was not done yet.
        behind: says whether other groups were further then.

    Attributes:
        participants: slots that contributed to the last step; the trainer sets them.
    """

    def __init__(
        self,
        config: Any,
        ledger: Ledger,
        events: EventLog,
        group: Group,
        *,
        join: Callable[[int], ReplicaDimension],
        behind: Callable[[], bool],
    ) -> None:
        self.config, self.ledger, self.events = config, ledger, events
        self._group, self._join, self._behind = group, join, behind
        self.participants: list[int] = []

    def heals_instead(self, step: int) -> bool:
        """Join the job as a group that can load `step`; says whether other groups are further."""
        self._join(step)
        return self._behind()

    def gather(self, value: int) -> list[int]:
        """Gather an integer of every rank of this group."""
        return self._group.gather(value)

    @property
    def is_writer(self) -> bool:
        """Say whether this group is the first of those that made the last step."""
        return bool(self.participants) and min(self.participants) == self.config.fault_tolerance.replica_id

    @property
    def saved(self) -> int:
        """Return the step of the latest complete checkpoint that any group told of."""
        return self._join(0).position.saved

    @saved.setter
    def saved(self, step: int) -> None:
        self._join(0).position.saved = step

    @property
    def agreed(self) -> int:
        """Return the step of the latest digest that all groups had alike."""
        return self._join(0).position.agreed

    @property
    def corrupt(self) -> bool:
        """Say whether this group's bytes have turned out not to be the others', and nobody has seen to it yet."""
        return self._join(0).position.corrupt

    @corrupt.setter
    def corrupt(self, corrupt: bool) -> None:
        self._join(0).position.corrupt = corrupt

    @property
    def lineage(self) -> int:
        """Return the lineage of the state."""
        return self._join(0).position.lineage

    @lineage.setter
    def lineage(self, lineage: int) -> None:
        self._join(0).position.lineage = lineage
