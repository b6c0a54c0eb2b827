# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read one rule of a plan from its table of the TOML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_ft.chaos.faults import check_link, check_number, check_target, closest, complete_params, find_fault
from titan_ft.chaos.rules import Entry, Every, Listed, Poisson, Rule, Uniform, make_entry
from titan_ft.chaos.toml_table import Table
from titan_ft.chaos.trace import read_trace
from titan_ft.config import ConfigError

_POISSON_PER_GPU = ("mtbf_hours_per_gpu", "gpus")
_TIMING_KEYS = {
    "every": ("seconds",),
    "poisson": ("mtbf_seconds", *_POISSON_PER_GPU),
    "uniform": ("min_seconds", "max_seconds"),
    "trace": ("file",),
    "script": ("shots",),
}
_CHOICE_KEYS = ("faults", "params", "replica", "rank")


def read_rule(name: str, values: Any, folder: Path) -> Rule:
    """Return the rule of one table `[[rule]]`."""
    when = values.get("when") if isinstance(values, Mapping) else None
    if not isinstance(when, str) or when not in _TIMING_KEYS:
        choices = ", ".join(_TIMING_KEYS)
        raise ConfigError(f"{name}.when must be one of {choices}, got {when!r}; {closest(when, _TIMING_KEYS)}set it")
    keys = _TIMING_KEYS[when] if when in ("trace", "script") else (*_TIMING_KEYS[when], *_CHOICE_KEYS)
    table = Table(name, values, ("when", *keys), f' with when = "{when}"')
    if when == "trace":
        return Rule(Listed(_read_trace(table, folder)))
    if when == "script":
        return Rule(Listed(_read_script(table)))
    return _read_choice(table, _read_timing(table, when))


def _read_timing(table: Table, when: str) -> Every | Poisson | Uniform:
    """Return when the faults of a rule come that is no list."""
    if when == "every":
        return Every(table.number("seconds", "> 0", "give the seconds from one fault to the next"))
    if when == "uniform":
        low = table.number("min_seconds", ">= 0", "give the shortest gap")
        high = table.number("max_seconds", "> 0", "give the longest gap")
        if high < low:
            rule = f"must be >= min_seconds ({low:g})"
            raise ConfigError(f"{table.prefix}max_seconds {rule}, got {high:g}; exchange the two")
        return Uniform(low, high)
    if "mtbf_seconds" in table.values and table.values.keys() & set(_POISSON_PER_GPU):
        other = ", ".join(key for key in _POISSON_PER_GPU if key in table.values)
        rule = f"must be alone, or left out for {' and '.join(_POISSON_PER_GPU)}"
        raise ConfigError(f"{table.prefix}mtbf_seconds {rule}, got it with {other}; remove one of them")
    if table.values.keys() & set(_POISSON_PER_GPU):
        hours = table.number("mtbf_hours_per_gpu", "> 0", "give the hours from one failure of a GPU to its next")
        return Poisson(hours * 3600 / table.integer("gpus", 1, "give the number of GPUs of the job"))
    return Poisson(table.number("mtbf_seconds", "> 0", "give the mean time from one failure of the job to the next"))


def _read_choice(table: Table, when: Every | Poisson | Uniform) -> Rule:
    """Return the rule, with the faults that it chooses from."""
    field_name, faults = f"{table.prefix}faults", table.take("faults", 'for example ["kill_group"]')
    if not faults or not isinstance(faults, list | Mapping):
        rule = "must be a list of names, or a table of names and weights"
        raise ConfigError(f'{field_name} {rule}, got {faults!r}; for example ["kill_group"]')
    kinds = [find_fault(field_name, fault) for fault in faults]
    names = [kind.name for kind in kinds]
    weights = dict(faults) if isinstance(faults, Mapping) else dict.fromkeys(names, 1.0)
    if len(weights) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{field_name} must name each fault once, got {twice} twice; use a table of weights")
    for fault, weight in weights.items():
        check_number(f"{field_name}.{fault}", weight, "must be a number > 0", lambda w: w > 0, "remove it to have none")
    given = Table(f"{table.prefix}params", table.values.get("params", {}), names, " (a fault of this rule)")
    params = {
        kind.name: complete_params(f"{given.prefix}{kind.name}", kind, given.values.get(kind.name, {}))
        for kind in kinds
    }
    replica, rank = table.values.get("replica"), table.values.get("rank")
    for kind in kinds:
        check_target(table.prefix[:-1], kind, replica, rank)
        check_link(f"{given.prefix}{kind.name}", replica, params[kind.name])
    return Rule(when, weights, params, replica, rank)


def _read_trace(table: Table, folder: Path) -> tuple[Entry, ...]:
    """Return the faults of a trace rule."""
    file = table.take("file", "give the path of a CSV file, relative to this file")
    if not isinstance(file, str) or not file:
        raise ConfigError(f"{table.prefix}file must be a path, got {file!r}; it is relative to this file")
    return read_trace(folder / file)


def _read_script(table: Table) -> tuple[Entry, ...]:
    """Return the faults of a script rule, in order of time."""
    shots = table.take("shots", 'for example [{at = 10, fault = "kill_group"}]')
    if not isinstance(shots, list) or not shots:
        example = '[{at = 10, fault = "kill_group"}]'
        raise ConfigError(f"{table.prefix}shots must be a list of tables, got {shots!r}; for example {example}")
    entries = [_read_shot(f"{table.prefix}shots[{index}]", shot) for index, shot in enumerate(shots)]
    return tuple(sorted(entries, key=lambda entry: entry.at))


def _read_shot(name: str, values: Any) -> Entry:
    """Return one fault of a script."""
    table = Table(name, values, ("at", "fault", "replica", "rank", "params"))
    at, fault = table.take("at", "give the seconds since the schedule's start"), table.take("fault", "name one")
    return make_entry(name, at, fault, *(table.values.get(key) for key in ("replica", "rank", "params")))
