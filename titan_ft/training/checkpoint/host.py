# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The trainer as the host of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from titan_ft.engine.outer import OuterModel
from titan_ft.protocol.ledger import Ledger
from titan_ft.protocol.position import Position
from titan_ft.run.log import EventLog


@dataclass
class CheckpointHost:
    """What `ReplicaCheckpoints` knows of the trainer.

    Attributes:
        config: torchtitan's JobConfig with our table.
        position: this group's place in the job; checkpoints write only what it says of them.
        gather: gathers an integer of every rank of this group.
        heals_instead: joins the job as a group that can load so many steps, if that was not done yet; says whether
            other groups are further.
        on_load: to be called after each load of a checkpoint, on all ranks of a group.
        updates: says how many updates are committed when torchtitan's step of that number is: what checkpoints are
            named after, and what the groups count, differ with a semi-synchronous method.
        steps: says what torchtitan's step is behind so many updates.
        outer: with such a method, the outer optimizer's state.
        participants: slots that contributed to the last step; the trainer sets them.
        lent: makes the job's weights the model's while it is saved, if they are others; the trainer sets it.
    """

    config: Any
    ledger: Ledger
    position: Position
    events: EventLog
    gather: Callable[[int], list[int]]
    heals_instead: Callable[[int], bool]
    on_load: Callable[[], None]
    updates: Callable[[int], int]
    steps: Callable[[int], int]
    outer: OuterModel | None = None
    participants: list[int] = field(default_factory=list)
    lent: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def is_writer(self) -> bool:
        """Say whether this group is the first of those that made the last step."""
        return bool(self.participants) and min(self.participants) == self.config.fault_tolerance.replica_id
