# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Hold what a chaos campaign is to do, and read it from TOML."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_ft.chaos.faults import FAULTS, Fault, check_link, check_target, complete_params, find_fault
from titan_ft.chaos.rule_table import read_rule
from titan_ft.chaos.rules import Entry, Listed, Rule
from titan_ft.chaos.toml_table import Table
from titan_ft.config import ConfigError, load_toml


@dataclass(frozen=True)
class Limits:
    """What no shot may exceed. Whatever they say, one group that contributes is left untouched."""

    max_down: int = 1
    """Groups that may be down or under a fault at once, with those that are down by themselves; >= 1."""
    exempt: tuple[int, ...] = ()
    """Groups that are never targets."""
    patience_seconds: float = 30.0
    """Seconds that a shot may be postponed until it is allowed; then it is skipped. 0 skips it at once."""

    def refusal(self, fault: Fault, params: Mapping[str, float], replica: int | None) -> str | None:
        """Return why this fault can never be injected within these limits, or None."""
        num_hit = fault.num_hit(params)
        if num_hit > self.max_down:
            return f"it hits {num_hit} groups at once, limits.max_down is {self.max_down}"
        if fault.extra_down and self.exempt:
            return "the job itself chooses the donor, which could be a group in limits.exempt"
        exempt = next((group for group in (replica, params.get("peer")) if group in self.exempt), None)
        return None if exempt is None else f"replica {exempt:g} is in limits.exempt"


@dataclass(frozen=True)
class Plan:
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
    rules: tuple[Rule, ...] = ()

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
    kind = find_fault("fault", fault)
    check_target("target", kind, replica, rank)
    complete = complete_params("params", kind, params or {})
    check_link("params", replica, complete)
    entry = Entry(0.0, kind.name, complete, replica, rank)
    limits = Limits(max_down=sys.maxsize)
    return Plan(kind.name, _new_seed() if seed is None else seed, limits=limits, rules=(Rule(Listed((entry,))),))


def load_plan(path: Path, seed: int | None = None) -> Plan:
    """Read a plan from TOML.

    Args:
        path: the file; what it names is relative to its folder.
        seed: goes before the file's. With neither a new one is drawn, which the plan then tells.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong; one line.
    """
    values = load_toml(path)
    try:
        return _read_plan(path, values, seed)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _new_seed() -> int:
    return secrets.randbits(32)


def _read_plan(path: Path, values: Mapping[str, Any], seed: int | None) -> Plan:
    """Return the plan of a loaded TOML."""
    table = Table("", values, ("seed", "start_seconds", "stop_after_seconds", "limits", "rule"))
    own_seed = table.integer("seed", 0, "leave it out to have one drawn") if "seed" in values else None
    if seed is None:
        seed = _new_seed() if own_seed is None else own_seed
    limits = _read_limits(values.get("limits", {}))
    rules = table.take("rule", 'add a table [[rule]] with when = "every"')
    if not isinstance(rules, list) or not rules:
        raise ConfigError(f"rule must be an array of tables, got {rules!r}; write [[rule]] above each rule")
    read = tuple(read_rule(f"rule[{index}]", rule, path.parent) for index, rule in enumerate(rules))
    for index, rule in enumerate(read):
        _check_limits(f"rule[{index}]", rule, limits)
    return Plan(
        path.name,
        seed,
        table.number("start_seconds", ">= 0", "0 starts at once", 0.0),
        table.number("stop_after_seconds", ">= 0", "0 never stops", 0.0),
        limits,
        read,
    )


def _read_limits(values: Any) -> Limits:
    """Return the limits of the table `[limits]`."""
    table = Table("limits", values, ("max_down", "exempt", "patience_seconds"))
    exempt = values.get("exempt", [])
    if not isinstance(exempt, list) or any(type(replica) is not int or replica < 0 for replica in exempt):
        raise ConfigError(f"limits.exempt must be a list of whole numbers >= 0, got {exempt!r}; for example [0]")
    return Limits(
        table.integer("max_down", 1, "1 hits one group at a time", Limits.max_down),
        tuple(exempt),
        table.number("patience_seconds", ">= 0", "0 postpones nothing", Limits.patience_seconds),
    )


def _check_limits(name: str, rule: Rule, limits: Limits) -> None:
    """Raise ConfigError for a fault of the rule that the plan's own limits rule out."""
    if isinstance(rule.when, Listed):
        wanted = [(entry.fault, entry.params, entry.replica) for entry in rule.when.entries]
    else:
        wanted = [(fault, rule.params[fault], rule.replica) for fault in rule.faults]
    for fault, params, replica in wanted:
        reason = limits.refusal(FAULTS[fault], params, replica)
        if reason is not None:
            raise ConfigError(f"{name} must keep the limits, got {fault}: {reason}; remove it, or change the limits")
