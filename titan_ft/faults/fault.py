# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The base of all faults: name, parameters, targets, needs, start, stop, and the outcome to expect."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, Literal

import msgspec
from msgspec import Struct

from titan_ft.config import ConfigError

Scope = Literal["rank", "group", "groups", "link", "lighthouse", "donor"]
"""The targets: one rank, one group, several groups, the link between two groups, the lighthouse, or the group that is
the donor of the next heal. For a donor, the group in the plan is killed to provoke that heal."""

Outcome = Literal["", "killed", "left", "frozen", "hung", "relaunched"]
"""The event to expect of the target. "killed": its processes end at once. "left": it finishes its step and leaves.
"frozen": its processes stand still until the fault is undone. "hung": the training thread stands
still until the watchdog ends the process. "relaunched": the launcher starts another lighthouse. "":
the target lives on."""

Ending = Literal["restart", "settle", "undone", "healed", "excluded", "at once"]
"""The event that ends a fault; a new start of the group ends every fault. "restart": nothing else does. "settle": some
seconds without a new start. "undone": the fault was undone. "healed": a heal, or a digest equal to
another group's. "excluded": the gradient was left out. "at once": the fault is over when it has
happened."""

Category = Literal[
    "process killed",
    "error raised",
    "stopped or slow",
    "network",
    "wrong numbers",
    "lighthouse killed",
]
"""The mark of a fault in the figures of a report."""


class Need(Enum):
    """A property that a job must have for some faults: its name in the docs, and the reason where a job lacks it."""

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
    """One way to break a job. An instance is a fault with its parameters.

    Durations are in seconds. The seed draws a parameter that is None.


    A subclass with a `name` is in the catalogue. The first line of its docstring is its description
    in help and docs. `outside.Signal` and `inside.InWorker` define `start`, for the processes or in
    the worker that the fault hits.
    """

    name: ClassVar[str]
    scope: ClassVar[Scope]
    outcome: ClassVar[Outcome] = ""
    category: ClassVar[Category]
    ends: ClassVar[Ending]
    """The event after which the target is as good as before."""
    takes_down: ClassVar[bool] = True
    """The target contributes nothing for longer than a step."""
    extra_down: ClassVar[int] = 0
    """Number of groups beside the targets that the fault takes down."""
    min_up: ClassVar[int] = 2
    """Fewest groups that must contribute before the fault. With 2, the target is not the only one."""
    needs: ClassVar[frozenset[Need]] = frozenset()

    @classmethod
    def summary(cls) -> str:
        """Return the description in one line, without a period."""
        assert cls.__doc__ is not None, "a fault without a description"
        return cls.__doc__.splitlines()[0].removesuffix(".")

    @property
    def params(self) -> dict[str, float]:
        """Return the parameters by name, without those that the seed draws."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    @property
    def seconds_it_lasts(self) -> float:
        """Return the seconds after which it is undone; 0 if nothing of it is to be undone."""
        return self.params.get("seconds", 0.0)

    @property
    def num_targets(self) -> int:
        return {"lighthouse": 0, "link": 2}.get(self.scope, 1)

    @property
    def num_hit(self) -> int:
        """Return how many groups it affects: the targets and others."""
        return self.num_targets + self.extra_down

    @property
    def required_up(self) -> int:
        """Return how many groups must contribute before it: `min_up`, and one more than it takes down."""
        return max(self.min_up, self.num_hit + 1 if self.takes_down else 0)

    def groups_given(self, replica: int | None) -> list[int]:
        """Return the groups that a plan names for this fault, the target `replica` first."""
        return [] if replica is None else [replica]

    def check_target(self, replica: int | None, rank: int | None, at: str) -> None:
        """Check that the fault can have this target; None leaves the choice to the seed.

        Args:
            at: name of the table of the parameters, for errors.

        Raises:
            ConfigError: the fault's scope has no such target.
        """
        for name, value in (("replica", replica), ("rank", rank)):
            if value is not None and self.scope in ("lighthouse", "groups"):
                raise ConfigError(f"{name} must be left out with {self.name}, got {value}; remove it")
        if rank is not None and self.scope != "rank":
            raise ConfigError(f"rank must be left out with {self.name}, got {rank}; it hits a whole group")
