# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Hold the rules of a plan: which faults come, at a fixed pace, at random, or from a list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from titan_ft.chaos.faults import check_link, check_number, check_target, complete_params, find_fault


@dataclass(frozen=True)
class Every:
    """At 0, `seconds`, 2 x `seconds` and so on."""

    seconds: float

    def __str__(self) -> str:
        return f"every {self.seconds:g} s"


@dataclass(frozen=True)
class Poisson:
    """At random, independent of each other: exponential gaps whose mean is the job's mean time between failures."""

    mtbf_seconds: float

    def __str__(self) -> str:
        return f"on average every {self.mtbf_seconds:g} s"


@dataclass(frozen=True)
class Uniform:
    """At random, with gaps uniformly distributed between two lengths."""

    min_seconds: float
    max_seconds: float

    def __str__(self) -> str:
        return f"every {self.min_seconds:g} to {self.max_seconds:g} s"


@dataclass(frozen=True)
class Entry:
    """A fault at a given time."""

    at: float
    """Seconds since the schedule's start."""
    fault: str
    params: Mapping[str, float]
    """All of the fault's parameters."""
    replica: int | None = None
    """The group to hit; None lets the seed choose."""
    rank: int | None = None
    """The rank to hit; None lets the seed choose."""


@dataclass(frozen=True)
class Listed:
    """At the times of a list, which is in order of time."""

    entries: tuple[Entry, ...]

    def __str__(self) -> str:
        first, last = self.entries[0].at, self.entries[-1].at
        return f"at {first:g} s" if first == last else f"{len(self.entries)} times from {first:g} to {last:g} s"


@dataclass(frozen=True)
class Rule:
    """One stream of faults."""

    when: Every | Poisson | Uniform | Listed
    faults: Mapping[str, float] = field(default_factory=dict)
    """Faults to choose from and their weights; empty with `Listed`, whose entries name their own."""
    params: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """All parameters of each of these faults."""
    replica: int | None = None
    """The group to hit; None lets the seed choose each time."""
    rank: int | None = None
    """The rank to hit; None lets the seed choose each time."""

    def __str__(self) -> str:
        names = [entry.fault for entry in self.when.entries] if isinstance(self.when, Listed) else list(self.faults)
        return f"{self.when}: {', '.join(dict.fromkeys(names))}"


def make_entry(
    field_name: str, at: Any, fault: Any, replica: Any = None, rank: Any = None, params: Any = None
) -> Entry:
    """Return a checked entry, its parameters completed.

    Raises:
        ConfigError: a value that is wrong; names the field below `field_name`.
    """
    check_number(f"{field_name}.at", at, "must be a number >= 0", lambda value: value >= 0, "it counts from the start")
    kind = find_fault(f"{field_name}.fault", fault)
    check_target(field_name, kind, replica, rank)
    complete = complete_params(f"{field_name}.params", kind, {} if params is None else params)
    check_link(f"{field_name}.params", replica, complete)
    return Entry(float(at), kind.name, complete, replica, rank)
