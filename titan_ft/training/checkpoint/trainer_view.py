# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The part of the trainer that its checkpoints need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from titan_ft.engine.strategy import StepStrategy
from titan_ft.protocol.ledger import Ledger
from titan_ft.protocol.position import Position
from titan_ft.run.log import EventLog


@dataclass
class TrainerView:
    """The view of the trainer that `ReplicaCheckpoints` gets.

    Attributes:
        config: torchtitan's JobConfig with our table.
        position: this group's place in the job. Checkpoints write only its fields about the group's
            saves.
        gather: gathers an integer of every rank of this group.
        join_before_load: joins the job as a group that can load a checkpoint of the given step, 0 =
            none. Returns True if other groups are further, so that this group must heal instead.
        on_load: to be called after each load of a checkpoint, on all ranks of a group.
        strategy: maps torchtitan's steps, which name the checkpoints, to updates, which the groups
            count. Holds the state of the outer optimizer, and lends the model the weights to save.
        participants: slots that contributed to the last step; the trainer sets them.
    """

    config: Any
    ledger: Ledger
    position: Position
    events: EventLog
    gather: Callable[[int], list[int]]
    join_before_load: Callable[[int], bool]
    on_load: Callable[[], None]
    strategy: StepStrategy
    participants: list[int] = field(default_factory=list)

    @property
    def is_writer(self) -> bool:
        """True if this group has the lowest slot of the groups that made the last step."""
        return (
            bool(self.participants)
            and min(self.participants) == self.config.fault_tolerance.replica_id
        )
