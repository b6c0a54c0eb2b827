# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""List the faults that can be injected: who carries each out, whom it hits, what it needs, what it leaves standing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from titan_ft.chaos.schema import FINITE, Count, Place, PositiveNumber, convert
from titan_ft.config import ConfigError, closest

By = Literal["signal", "agent", "lighthouse"]
Scope = Literal["rank", "group", "groups", "link", "lighthouse", "donor"]

AGENT = "agent"
"""Workers that carry out orders: those of a job with `[fault_tolerance] chaos = true`."""
CHECKPOINT = "checkpoint"
"""Checkpoints that the job saves."""
LIGHTHOUSE = "lighthouse"
"""A lighthouse that the job's launcher starts again."""
KEEPER = "keeper"
"""Agents of groups that somebody starts again: the launcher, or Slurm's script, which requeues the group."""

MISSING = {
    AGENT: "the job has no agents: start it with fault_tolerance.chaos = true",
    CHECKPOINT: "the job saves no checkpoints: start it with checkpoint.enable = true",
    LIGHTHOUSE: "the job's launcher keeps no lighthouse: start the job with titan-ft launch",
    KEEPER: "nobody starts a group's agent again: start the job with titan-ft launch, or under Slurm",
}
"""What to say of a job that lacks what a fault needs."""

PARAMS: Mapping[str, Any] = {
    "seconds": PositiveNumber,
    "factor": Annotated[float, Meta(gt=1, le=FINITE, title="a number > 1")],
    "loss": Annotated[float, Meta(gt=0, lt=1, title="a number > 0 and < 1")],
    "count": Count,
    "peer": Place,
}
"""Type of each parameter that a fault may have."""


@dataclass(frozen=True)
class Fault:
    """One way to break a job."""

    name: str
    by: By
    """Who acts: the runner, by signals or on the launcher's lighthouse, or the agent in the worker."""
    scope: Scope
    """Whom it hits: a rank; a group (all its ranks); several groups; the link between two groups, the target and the
    parameter `peer`; the lighthouse; or whichever group is the donor of the next heal, with a group as the target that
    is killed to provoke that heal."""
    summary: str
    """One line that follows the name, for help texts."""
    params: Mapping[str, float] = field(default_factory=dict)
    """Parameters and their defaults; durations in seconds. A link's `peer` has none: the seed chooses it."""
    takes_down: bool = True
    """The target contributes nothing for longer than a step."""
    extra_down: int = 0
    """Groups beside the targets that it takes down."""
    min_up: int = 2
    """Fewest groups that contribute before it. With 2 the target is not the only one."""
    needs: frozenset[str] = frozenset()
    """What the job must have: `AGENT`, `CHECKPOINT`, `LIGHTHOUSE`, `KEEPER`."""

    def num_targets(self, params: Mapping[str, float]) -> int:
        """Return how many groups are targets."""
        if self.scope == "lighthouse":
            return 0
        if self.scope == "link":
            return 2
        return int(params["count"]) if self.scope == "groups" else 1

    @property
    def drawn(self) -> tuple[str, ...]:
        """Parameters without a default, which the seed chooses when they are not given."""
        return ("peer",) if self.scope == "link" else ()

    def num_hit(self, params: Mapping[str, float]) -> int:
        """Return how many groups are not as they were for a while, targets and others."""
        return self.num_targets(params) + self.extra_down

    def required_up(self, params: Mapping[str, float]) -> int:
        """Return how many groups must contribute before it: `min_up`, and one more than it takes down."""
        return max(self.min_up, self.num_hit(params) + 1 if self.takes_down else 0)


def _signal(name: str, scope: Scope, summary: str, **rest: Any) -> Fault:
    return Fault(name, "signal", scope, summary, **rest)


def _agent(name: str, scope: Scope, summary: str, *, needs: Iterable[str] = (), **rest: Any) -> Fault:
    return Fault(name, "agent", scope, summary, needs=frozenset({AGENT, *needs}), **rest)


# Bit flips need three groups: with two that differ nobody can say which of them is right.
_MAJORITY = 3

FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        _signal("kill_rank", "rank", "SIGKILL to one rank"),
        _signal("kill_group", "group", "SIGKILL to all ranks of a group"),
        _signal("kill_groups", "groups", "SIGKILL to `count` groups at once", params={"count": 2}),
        _signal(
            "kill_agent",
            "group",
            "SIGKILL to the process that keeps a group's workers, and to no other",
            needs=frozenset({KEEPER}),
        ),
        _signal("term_group", "group", "SIGTERM to a group, which finishes its step and leaves"),
        _signal("stop_rank", "rank", "SIGSTOP to one rank, SIGCONT `seconds` later", params={"seconds": 10.0}),
        _signal("stop_group", "group", "SIGSTOP to a group, SIGCONT `seconds` later", params={"seconds": 10.0}),
        Fault(
            "kill_lighthouse",
            "lighthouse",
            "lighthouse",
            "SIGKILL to the launcher's lighthouse",
            takes_down=False,
            min_up=1,
            needs=frozenset({LIGHTHOUSE}),
        ),
        _agent("segfault", "rank", "invalid memory access in one rank"),
        _agent("deadlock", "rank", "one rank's training thread waits forever, until its watchdog ends the rank"),
        _agent("abort_process_group", "rank", "one rank aborts its process group between the groups", takes_down=False),
        _agent("out_of_memory", "rank", "out of memory in one rank's forward pass"),
        _agent("exception", "rank", "exception in one rank's forward pass"),
        _agent(
            "slow_rank",
            "rank",
            "one rank computes `factor` times slower for `seconds`",
            params={"factor": 3.0, "seconds": 20.0},
            takes_down=False,
            min_up=1,
        ),
        _agent(
            "network_dead", "group", "nothing gets through between a group and the others", params={"seconds": 10.0}
        ),
        _agent(
            "network_slow",
            "group",
            "the network between a group and the others loses the share `loss`",
            params={"loss": 0.05, "seconds": 20.0},
            takes_down=False,
        ),
        _agent(
            "link_dead",
            "link",
            "nothing gets through between a group and the group `peer`; all else does",
            params={"seconds": 10.0},
        ),
        _agent("kill_donor", "donor", "a group is killed, and the donor of its heal in mid-transfer", extra_down=1),
        _agent("corrupt_chunk", "donor", "a group is killed, and a chunk of the state that it gets is corrupted"),
        _agent("nan_gradient", "rank", "one rank's gradient is NaN in one step", takes_down=False),
        _agent("flip_parameter", "rank", "one bit of one rank's parameters is flipped", min_up=_MAJORITY),
        _agent("flip_optimizer", "rank", "one bit of one rank's optimizer state is flipped", min_up=_MAJORITY),
        _agent(
            "disk_full",
            "rank",
            "one rank's next checkpoint finds the disk full",
            needs={CHECKPOINT},
            takes_down=False,
            min_up=1,
        ),
    )
}
"""All faults by name."""


def _params_of(fault: Fault) -> type[msgspec.Struct]:
    """Return the class of a fault's parameters, with its defaults; one that the seed draws is None unless given."""
    given = [(n, Annotated[PARAMS[n], Meta(description=f"the default is {v:g}")], v) for n, v in fault.params.items()]
    return msgspec.defstruct(fault.name, [*given, *((name, PARAMS[name], None) for name in fault.drawn)])


_PARAMS = {fault.name: _params_of(fault) for fault in FAULTS.values()}


def find_fault(name: object, field_name: str = "fault") -> Fault:
    """Return the fault of that name.

    Raises:
        ConfigError: there is none; names the closest one and all.
    """
    if isinstance(name, str) and name in FAULTS:
        return FAULTS[name]
    raise ConfigError(
        f"{field_name} must name a fault, got {name!r}; {closest(name, FAULTS)}faults: {', '.join(FAULTS)}"
    )


def complete_params(fault: Fault, given: Any, field_name: str = "params") -> dict[str, float]:
    """Return the fault's parameters, those given over the defaults.

    Raises:
        ConfigError: no table, a parameter that the fault has not, or a value out of its range.
    """
    found = msgspec.to_builtins(convert(_PARAMS[fault.name], given, field_name, f" of {fault.name}"))
    return {name: value for name, value in found.items() if value is not None}


def check_target(fault: Fault, replica: int | None, rank: int | None, params: Mapping[str, float], at: str) -> None:
    """Check that the fault can have this target; None leaves the choice to the seed.

    Args:
        at: name of the table of the parameters, for errors.

    Raises:
        ConfigError: a target that the fault's scope does not have, or a link whose two ends are one group.
    """
    for name, value in (("replica", replica), ("rank", rank)):
        if value is not None and fault.scope in ("lighthouse", "groups"):
            raise ConfigError(f"{name} must be left out with {fault.name}, got {value}; remove it")
    if rank is not None and fault.scope != "rank":
        raise ConfigError(f"rank must be left out with {fault.name}, got {rank}; it hits a whole group")
    if replica is not None and params.get("peer") == replica:
        rule = f"must be another group than the target, group {replica}"
        raise ConfigError(f"{at}.peer {rule}, got {replica}; leave it out for a random one")
