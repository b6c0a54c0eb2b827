# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The trainer as the host of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titan_ft.replica.group import Group
from titan_ft.replica.ledger import Ledger
from titan_ft.replica.position import Position
from titan_ft.run.log import EventLog


class CheckpointHost:
    """What `ReplicaCheckpoints` asks of the trainer.

    Args:
        config: torchtitan's JobConfig with our table.
        heals_instead: joins the job as a group that can load so many steps, if that was not done yet; says whether
            other groups are further.

    Attributes:
        position: this group's place in the job; checkpoints write only what it says of them.
        participants: slots that contributed to the last step; the trainer sets them.
    """

    def __init__(
        self,
        config: Any,
        ledger: Ledger,
        position: Position,
        events: EventLog,
        group: Group,
        *,
        heals_instead: Callable[[int], bool],
    ) -> None:
        self.config, self.ledger, self.position, self.events = config, ledger, position, events
        self._group, self.heals_instead = group, heals_instead
        self.participants: list[int] = []

    def gather(self, value: int) -> list[int]:
        """Gather an integer of every rank of this group."""
        return self._group.gather(value)

    @property
    def is_writer(self) -> bool:
        """Say whether this group is the first of those that made the last step."""
        return bool(self.participants) and min(self.participants) == self.config.fault_tolerance.replica_id
