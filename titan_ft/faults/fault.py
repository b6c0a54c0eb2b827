# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The base class of all faults: name, parameters, targets, needs, and the outcome to expect."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, Literal

import msgspec
from msgspec import Struct

from titan_ft.config import ConfigError

Scope = Literal["rank", "group", "groups", "link", "lighthouse", "donor"]
"""The target: a rank, a group, several groups, the link between two groups, the lighthouse, or the
donor of the next heal.

To provoke that heal, the group that the plan names is killed.
"""

Outcome = Literal["", "killed", "left", "frozen", "hung", "relaunched"]
"""The outcome to expect:

- "": the processes of the target live on.
- "killed": the processes of the target end at once.
- "left": the target finishes its step and leaves.
- "frozen": the processes of the target stand still until the fault is undone.
- "hung": the training thread stands still until the watchdog ends the process.
- "relaunched": the launcher starts another lighthouse.
"""

Ending = Literal["restart", "settle", "undone", "healed", "excluded", "at once"]
"""The event that ends the fault. A new start of the group ends every fault. The other events are:

- "restart": no other event.
- "settle": some seconds without a new start.
- "undone": the fault was undone.
- "healed": the group healed, or showed a digest equal to another group's.
- "excluded": the group's gradient was left out of an update.
- "at once": the fault ends at the moment of its injection.
"""

Category = Literal[
    "process killed",
    "error raised",
    "stopped or slow",
    "network",
    "wrong numbers",
    "lighthouse killed",
]
"""The kind of a fault in the figures of a report."""


class Need(Enum):
    """A property of a job that some faults need.

    Attributes:
        label: name of the property in the docs.
        missing: reason and remedy if a job lacks the property.
    """

    AGENT = "`chaos = true`", "the job has no agents: start it with fault_tolerance.chaos = true"
    CHECKPOINT = (
        "checkpoints",
        "the job saves no checkpoints: start it with checkpoint.enable = true",
    )
    LIGHTHOUSE = (
        "`titan-ft launch`",
        "the job's launcher keeps no lighthouse: start the job with titan-ft launch",
    )
    KEEPER = (
        "`titan-ft launch` or Slurm",
        "nobody starts a group's agent again: start the job with titan-ft launch, or under Slurm",
    )

    def __init__(self, label: str, missing: str) -> None:
        self.label = label
        self.missing = missing


class Fault(Struct, frozen=True):
    """A way to break a job. An instance is a fault with its parameters, and never changes.

    Durations are in seconds. If a parameter is None, the seed draws the value.

    A subclass with a `name` is in the catalogue. The first line of its docstring is the fault's
    description in help and docs. The two subclasses `outside.Signal` and `inside.InWorker` define
    `start`. The chaos runner calls `Signal.start`. The chaos agent in the target's worker calls
    `InWorker.start`, on the agent's thread.
    """

    name: ClassVar[str]
    scope: ClassVar[Scope]
    outcome: ClassVar[Outcome] = ""
    category: ClassVar[Category]
    ends: ClassVar[Ending]
    """The event after which the target works as before the fault."""
    takes_down: ClassVar[bool] = True
    """True if the target contributes nothing for longer than a step."""
    extra_down: ClassVar[int] = 0
    """Number of groups other than the targets that the fault takes down."""
    min_up: ClassVar[int] = 2
    """Least number of groups that must contribute before the fault, see `required_up`.

    With 2, another group trains on.
    """
    needs: ClassVar[frozenset[Need]] = frozenset()

    @classmethod
    def summary(cls) -> str:
        """Return the description of the fault: a line without a period."""
        assert cls.__doc__ is not None, "every fault has a description"
        return cls.__doc__.splitlines()[0].removesuffix(".")

    @property
    def params(self) -> dict[str, float]:
        """Parameters by name, without the parameters that the seed has not drawn yet."""
        params = msgspec.structs.asdict(self)
        return {name: value for name, value in params.items() if value is not None}

    @property
    def duration_seconds(self) -> float:
        """Seconds after which the fault is undone; 0 if there is nothing to undo."""
        return self.params.get("seconds", 0.0)

    @property
    def num_targets(self) -> int:
        return {"lighthouse": 0, "link": 2}.get(self.scope, 1)

    @property
    def num_affected(self) -> int:
        """Number of groups that the fault affects, targets included."""
        return self.num_targets + self.extra_down

    @property
    def required_up(self) -> int:
        """Number of groups that must contribute before the fault."""
        if not self.takes_down:
            return self.min_up
        return max(self.min_up, self.num_affected + 1)  # one group must train on

    def groups_given(self, replica: int | None) -> list[int]:
        """Return the slots that a plan names for this fault, first the target `replica`."""
        return [] if replica is None else [replica]

    def check_target(self, replica: int | None, rank: int | None, at: str) -> None:
        """Check that the fault can have this target. None leaves the choice to the seed.

        Args:
            replica: slot of the target.
            rank: rank in that group.
            at: name of the table of the parameters, for errors.

        Raises:
            ConfigError: the fault's scope has no such target.
        """
        for name, value in (("replica", replica), ("rank", rank)):
            if value is not None and self.scope in ("lighthouse", "groups"):
                rule = f"{name} must be left out with {self.name}"
                raise ConfigError(f"{rule}, got {value}; remove it")
        if rank is not None and self.scope != "rank":
            rule = f"rank must be left out with {self.name}"
            raise ConfigError(f"{rule}, got {rank}; it hits a whole group")
