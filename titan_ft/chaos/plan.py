# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Hold what a chaos campaign is to do. The limits, rules and entries are tables of its TOML as well."""

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
    """What no shot may exceed. Whatever they say, one group that contributes is left untouched."""

    max_down: Annotated[PositiveInt, Meta(description="1 hits one group at a time")] = 1
    """Groups that may be down or under a fault at once, with those that are down by themselves."""
    exempt: Annotated[
        tuple[NonNegativeInt, ...], Meta(title="a list of whole numbers >= 0", description="for example [0]")
    ] = ()
    """Groups that are never targets."""
    patience_seconds: Annotated[NonNegativeNumber, Meta(description="0 postpones nothing")] = 30.0
    """Seconds that a shot may be postponed until it is allowed; then it is skipped. 0 skips it at once."""

    def refusal(self, fault: Fault, replica: int | None) -> str | None:
        """Return the reason why this fault can never be injected within these limits, or None."""
        if fault.num_affected > self.max_down:
            return f"it hits {fault.num_affected} groups at once, limits.max_down is {self.max_down}"
        if fault.extra_down and self.exempt:
            return "the job itself chooses the donor, which could be a group in limits.exempt"
        exempt = next((group for group in fault.groups_given(replica) if group in self.exempt), None)
        return None if exempt is None else f"group {exempt} is in limits.exempt"


class ListedFault(Struct, frozen=True):
    """A fault that a plan lists, at a given time."""

    at: Annotated[NonNegativeNumber, Meta(description="give the seconds since the schedule's start")]
    fault: Annotated[Any, Meta(description="titan-ft chaos --list has them")]
    """Its name; the `Fault` itself once this is made."""
    params: Annotated[dict[str, Any], Meta(title="a table", description="write its keys below it")] = {}
    """The parameters in the table; empty once this is made, because the fault has them."""
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
    """A stream of faults without end; the classes below it define their times."""

    faults: Annotated[_Names | _Weights, Meta(title=_FAULTS, description='for example ["kill_group"]')]
    """Faults to choose from."""
    params: Annotated[dict[str, Any], Meta(title="a table", description="write its keys below it")] = {}
    """The parameters of each of these faults; each `Fault` by its name once the rule is made."""
    replica: TargetIndex = None
    rank: TargetIndex = None

    def __post_init__(self) -> None:
        names = [find_fault(name, "faults").name for name in self.faults]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"faults must name each fault once, got {twice} twice; use a table of weights")
        check_keys("params.", self.params, names, " (a fault of this rule)")
        faults = {}
        for name in names:
            faults[name] = make_fault(name, self.params.get(name, {}), params_name=f"params.{name}")
            faults[name].check_target(self.replica, self.rank, f"params.{name}")
        msgspec.structs.force_setattr(self, "params", faults)

    @property
    def weights(self) -> Mapping[str, float]:
        """Return how likely each fault is, to be divided by their sum."""
        return self.faults if isinstance(self.faults, dict) else dict.fromkeys(self.faults, 1.0)

    def entries(self, source_of: Callable[[int], Random]) -> Iterator[ListedFault]:
        """Yield times and faults, without end.

        Args:
            source_of: returns the source of all that is random about the fault with this number, from 0.
        """
        names, weights = list(self.weights), list(self.weights.values())
        time = 0.0
        for number in itertools.count():
            source = source_of(number)
            time = self.next_time(number, time, source)
            (name,) = source.choices(names, weights)
            yield ListedFault(time, self.params[name], {}, self.replica, self.rank)

    def next_time(self, number: int, before: float, source: Random) -> float:
        """Return the seconds of the fault with this number, which comes after the one at `before`."""
        raise NotImplementedError

    def wanted(self) -> Iterator[tuple[Fault, int | None]]:
        """Yield each fault that may come, with its group."""
        return ((fault, self.replica) for fault in self.params.values())


class Every(Rule, frozen=True):
    """At 0, `seconds`, 2 x `seconds` and so on."""

    seconds: Annotated[PositiveNumber, Meta(description="give the seconds from one fault to the next")]

    def next_time(self, number: int, before: float, source: Random) -> float:
        return number * self.seconds  # no sum, whose rounding errors add up

    def __str__(self) -> str:
        return f"every {self.seconds:g} s: {', '.join(self.faults)}"


_MTBF = "give the mean time from one failure of the job to the next"


class Poisson(Rule, frozen=True):
    """At random, independent of each other: exponential gaps whose mean is the job's mean time between failures."""

    mtbf_seconds: Annotated[PositiveNumber, Meta(description=_MTBF)] | None = None
    """Of the job; what follows from the other two once the rule is made."""
    mtbf_hours_per_gpu: Annotated[PositiveNumber, Meta(description="of one GPU, with gpus")] | None = None
    gpus: Annotated[PositiveInt, Meta(description="give the number of GPUs of the job")] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        hours, gpus = self.mtbf_hours_per_gpu, self.gpus
        if hours is not None and gpus is not None and self.mtbf_seconds is None:
            msgspec.structs.force_setattr(self, "mtbf_seconds", hours * 3600 / gpus)
        elif self.mtbf_seconds is None and hours is None and gpus is None:
            raise ConfigError(f"mtbf_seconds must be set, got nothing; {_MTBF}")
        elif self.mtbf_seconds is None or hours is not None or gpus is not None:
            given = [name for name in ("mtbf_seconds", "mtbf_hours_per_gpu", "gpus") if getattr(self, name) is not None]
            rule = "must be alone, or left out for both mtbf_hours_per_gpu and gpus"
            raise ConfigError(f"mtbf_seconds {rule}, got {' and '.join(given)}; give one or the other")

    def next_time(self, number: int, before: float, source: Random) -> float:
        assert self.mtbf_seconds is not None, "given, or computed when the rule was made"
        return before + source.expovariate(1 / self.mtbf_seconds)

    def __str__(self) -> str:
        return f"on average every {self.mtbf_seconds:g} s: {', '.join(self.faults)}"


class Uniform(Rule, frozen=True):
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
    """Faults at the times of a list, which is in order of time."""

    listed: tuple[ListedFault, ...]

    def entries(self, source_of: Callable[[int], Random]) -> Iterator[ListedFault]:
        """Yield times and faults; nothing about them is random."""
        return iter(self.listed)

    def __str__(self) -> str:
        first, last = self.listed[0].at, self.listed[-1].at
        when = f"at {first:g} s" if first == last else f"{len(self.listed)} times from {first:g} to {last:g} s"
        return f"{when}: {', '.join(dict.fromkeys(entry.fault.name for entry in self.listed))}"

    def wanted(self) -> Iterator[tuple[Fault, int | None]]:
        """Yield each fault that may come, with its group."""
        return ((entry.fault, entry.replica) for entry in self.listed)


class Plan(Struct, frozen=True):
    """All that a campaign is to do."""

    name: str
    """Name of its file, or the command."""
    seed: int
    """What all that is random follows from."""
    start_seconds: float = 0.0
    """Seconds of training together before the schedule starts."""
    stop_after_seconds: float = 0.0
    """Seconds after the schedule's start after which no shot comes. 0 means never."""
    limits: Limits = Limits()
    rules: tuple[Rule | Listed, ...] = ()

    def __str__(self) -> str:
        """Say in a line what comes when."""
        exempt = f", never of {', '.join(map(str, self.limits.exempt))}" if self.limits.exempt else ""
        down = "" if self.limits.max_down == sys.maxsize else f"; at most {self.limits.max_down} down{exempt}"
        return "; ".join(map(str, self.rules)) + down


def single(
    fault: str,
    replica: int | None = None,
    rank: int | None = None,
    params: Mapping[str, float] | None = None,
    seed: int | None = None,
) -> Plan:
    """Return the plan of one shot at once, whose only limit is that a contributing group is left untouched.

    Raises:
        ConfigError: no such fault, or a parameter or a target that it has not.
    """
    values = {"at": 0, "fault": fault, "params": dict(params or {}), "replica": replica, "rank": rank}
    entry = convert(ListedFault, values)
    limits = Limits(max_down=sys.maxsize)
    return Plan(fault, new_seed() if seed is None else seed, limits=limits, rules=(Listed((entry,)),))


def new_seed() -> int:
    """Return a seed that nobody has asked for."""
    return secrets.randbits(32)
