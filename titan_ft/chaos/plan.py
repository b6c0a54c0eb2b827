# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The plan of a chaos campaign. `Limits`, `Rule` and `ListedFault` are also tables of its TOML."""

from __future__ import annotations

import itertools
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from titan_ft.config import ConfigError
from titan_ft.faults.catalogue import find_fault, make_fault
from titan_ft.faults.fault import Fault
from titan_ft.faults.schema import (
    NonNegativeInt,
    NonNegativeNumber,
    PositiveInt,
    PositiveNumber,
    TargetIndex,
    check_keys,
    convert,
)


class Limits(Struct, frozen=True):
    """Limits for all shots. Beyond them, one contributing group is always left untouched."""

    max_down: Annotated[PositiveInt, Meta(description="1 hits one group at a time")] = 1
    """Largest number of groups that are down or under a fault at once, whatever the cause."""
    exempt: Annotated[
        tuple[NonNegativeInt, ...],
        Meta(title="a list of whole numbers >= 0", description="for example [0]"),
    ] = ()
    """Groups that are never targets."""
    patience_seconds: Annotated[NonNegativeNumber, Meta(description="0 postpones nothing")] = 30.0
    """Seconds that a shot waits until it is allowed. After that it is skipped."""

    def refusal(self, fault: Fault, replica: int | None) -> str | None:
        """Return why this fault can never be injected within these limits; None if it can."""
        if fault.num_affected > self.max_down:
            return (
                f"it hits {fault.num_affected} groups at once, limits.max_down is {self.max_down}"
            )
        if fault.extra_down and self.exempt:
            return "the job itself chooses the donor, which could be a group in limits.exempt"
        for group in fault.groups_given(replica):
            if group in self.exempt:
                return f"group {group} is in limits.exempt"
        return None


_ParamsTable = Annotated[
    dict[str, Any], Meta(title="a table", description="write its keys below it")
]


class ListedFault(Struct, frozen=True):
    """A fault at a given time in the list of a plan."""

    at: Annotated[
        NonNegativeNumber, Meta(description="give the seconds since the schedule's start")
    ]
    fault: Annotated[Any, Meta(description="titan-ft chaos --list has them")]
    """The name in the file. `__post_init__` replaces it by the `Fault`."""
    params: _ParamsTable = {}
    """The parameters in the file. `__post_init__` moves them into the fault."""
    replica: TargetIndex = None
    rank: TargetIndex = None

    def __post_init__(self) -> None:
        if not isinstance(self.fault, Fault):
            msgspec.structs.force_setattr(self, "fault", make_fault(self.fault, self.params))
            msgspec.structs.force_setattr(self, "params", {})
        self.fault.check_target(self.replica, self.rank, "params")


_Names = Annotated[list[str], Meta(min_length=1)]
_Weights = Annotated[dict[str, Annotated[float, Meta(gt=0)]], Meta(min_length=1)]
_FAULTS = "a list of names, or a table of names and weights > 0"


class Rule(Struct, frozen=True, kw_only=True, tag_field="when", tag=str.lower):
    """An endless stream of faults. The subclasses define the times."""

    faults: Annotated[
        _Names | _Weights, Meta(title=_FAULTS, description='for example ["kill_group"]')
    ]
    """Faults to choose from."""
    params: _ParamsTable = {}
    """Parameters by name of the fault. `__post_init__` replaces the values by the `Fault`s."""
    replica: TargetIndex = None
    rank: TargetIndex = None

    def __post_init__(self) -> None:
        names = [find_fault(name, "faults").name for name in self.faults]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"faults must name each fault once, got {name} twice; use a table of weights"
                )
        check_keys("params.", self.params, names, " (a fault of this rule)")
        faults = {}
        for name in names:
            params_name = f"params.{name}"
            fault = make_fault(name, self.params.get(name, {}), params_name=params_name)
            fault.check_target(self.replica, self.rank, params_name)
            faults[name] = fault
        msgspec.structs.force_setattr(self, "params", faults)

    @property
    def weights(self) -> Mapping[str, float]:
        """Relative probability of each fault."""
        if isinstance(self.faults, dict):
            return self.faults
        return dict.fromkeys(self.faults, 1.0)

    def entries(self, source_of: Callable[[int], Random]) -> Iterator[ListedFault]:
        """Yield times and faults, without end.

        Args:
            source_of: returns the source of random numbers for the fault with a number, from 0.
        """
        names = list(self.weights)
        weights = list(self.weights.values())
        time = 0.0
        for number in itertools.count():
            source = source_of(number)
            time = self.next_time(number, time, source)
            (name,) = source.choices(names, weights)
            yield ListedFault(time, self.params[name], {}, self.replica, self.rank)

    def next_time(self, number: int, before: float, source: Random) -> float:
        """Return the time of fault `number` in seconds.

        Args:
            before: time of the fault before, in seconds; 0 for the first fault.
        """
        raise NotImplementedError

    def possible_faults(self) -> Iterator[tuple[Fault, int | None]]:
        """Yield each fault that may come, with its target group."""
        for fault in self.params.values():
            yield fault, self.replica


class Every(Rule, frozen=True):
    """At 0, `seconds`, 2 x `seconds` and so on."""

    seconds: Annotated[
        PositiveNumber, Meta(description="give the seconds from one fault to the next")
    ]

    def next_time(self, number: int, before: float, source: Random) -> float:
        # A product: the rounding errors of a sum would add up.
        return number * self.seconds

    def __str__(self) -> str:
        return f"every {self.seconds:g} s: {', '.join(self.faults)}"


_MTBF = "give the mean time from one failure of the job to the next"


class Poisson(Rule, frozen=True):
    """At random and independently, with exponential gaps around a mean time between failures."""

    mtbf_seconds: Annotated[PositiveNumber, Meta(description=_MTBF)] | None = None
    """Mean of the job. `__post_init__` computes it if the other two are given."""
    mtbf_hours_per_gpu: (
        Annotated[PositiveNumber, Meta(description="of one GPU, with gpus")] | None
    ) = None
    gpus: Annotated[PositiveInt, Meta(description="give the number of GPUs of the job")] | None = (
        None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        fields = ("mtbf_seconds", "mtbf_hours_per_gpu", "gpus")
        given = [name for name in fields if getattr(self, name) is not None]
        if given == ["mtbf_seconds"]:
            return
        if not given:
            raise ConfigError(f"mtbf_seconds must be set, got nothing; {_MTBF}")
        hours = self.mtbf_hours_per_gpu
        if self.mtbf_seconds is not None or hours is None or self.gpus is None:
            raise ConfigError(
                "mtbf_seconds must be alone, or left out for both mtbf_hours_per_gpu and gpus, "
                f"got {' and '.join(given)}; give one or the other"
            )
        msgspec.structs.force_setattr(self, "mtbf_seconds", hours * 3600 / self.gpus)

    def next_time(self, number: int, before: float, source: Random) -> float:
        assert self.mtbf_seconds is not None, "given, or computed by __post_init__"
        return before + source.expovariate(1 / self.mtbf_seconds)

    def __str__(self) -> str:
        return f"on average every {self.mtbf_seconds:g} s: {', '.join(self.faults)}"


class UniformGaps(Rule, frozen=True, tag="uniform"):
    """At random, with gaps uniformly distributed between two lengths."""

    min_seconds: Annotated[NonNegativeNumber, Meta(description="give the shortest gap")]
    max_seconds: Annotated[PositiveNumber, Meta(description="give the longest gap")]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_seconds < self.min_seconds:
            rule = f"must be >= min_seconds ({self.min_seconds:g})"
            raise ConfigError(f"max_seconds {rule}, got {self.max_seconds:g}; exchange the two")

    def next_time(self, number: int, before: float, source: Random) -> float:
        return before + source.uniform(self.min_seconds, self.max_seconds)

    def __str__(self) -> str:
        return f"every {self.min_seconds:g} to {self.max_seconds:g} s: {', '.join(self.faults)}"


@dataclass(frozen=True)
class Listed:
    """Faults at the times of a list, which is in the order of time."""

    listed: tuple[ListedFault, ...]

    def entries(self, source_of: Callable[[int], Random]) -> Iterator[ListedFault]:
        """Yield times and faults. No random numbers are drawn."""
        return iter(self.listed)

    def __str__(self) -> str:
        first, last = self.listed[0].at, self.listed[-1].at
        times = f"at {first:g} s"
        if first != last:
            times = f"{len(self.listed)} times from {first:g} to {last:g} s"
        names = dict.fromkeys(entry.fault.name for entry in self.listed)
        return f"{times}: {', '.join(names)}"

    def possible_faults(self) -> Iterator[tuple[Fault, int | None]]:
        """Yield each fault of the list, with its target group."""
        for entry in self.listed:
            yield entry.fault, entry.replica


class Plan(Struct, frozen=True):
    """The faults of a campaign: when, which, and within which limits."""

    name: str
    """Name of the plan's file, or of the only fault."""
    seed: int
    """Seed of all random choices."""
    start_seconds: float = 0.0
    """Seconds from the first step of all groups to the start of the schedule."""
    stop_after_seconds: float = 0.0
    """Length of the schedule in seconds; 0 = no end."""
    limits: Limits = Limits()
    rules: tuple[Rule | Listed, ...] = ()

    def __str__(self) -> str:
        """Describe the rules and limits in a line."""
        text = "; ".join(map(str, self.rules))
        if self.limits.max_down == sys.maxsize:
            return text
        text += f"; at most {self.limits.max_down} down"
        if self.limits.exempt:
            text += f", never of {', '.join(map(str, self.limits.exempt))}"
        return text


def single(
    fault: str,
    replica: int | None = None,
    rank: int | None = None,
    params: Mapping[str, float] | None = None,
    seed: int | None = None,
) -> Plan:
    """Return a plan of one shot at once. Its only limit: one contributing group is left untouched.

    Raises:
        ConfigError: no such fault, or the fault has no such parameter or target.
    """
    values = {
        "at": 0,
        "fault": fault,
        "params": dict(params or {}),
        "replica": replica,
        "rank": rank,
    }
    entry = convert(ListedFault, values)
    limits = Limits(max_down=sys.maxsize)
    return Plan(
        fault, new_seed() if seed is None else seed, limits=limits, rules=(Listed((entry,)),)
    )


def new_seed() -> int:
    """Return a random seed."""
    return secrets.randbits(32)
