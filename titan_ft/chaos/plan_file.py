# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read a plan from TOML, with the traces that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from titan_ft.chaos.plan import Every, Limits, Listed, ListedFault, Plan, Poisson, Rule, Uniform, new_seed
from titan_ft.config import ConfigError, closest, load_toml
from titan_ft.data.assets import find_config
from titan_ft.faults.catalogue import find_fault
from titan_ft.faults.schema import NonNegativeInt, NonNegativeNumber, convert


class _File(Struct):
    """The whole TOML."""

    rule: Annotated[list[Any], Meta(min_length=1, title="an array of tables", description="write [[rule]] above each")]
    seed: Annotated[NonNegativeInt, Meta(description="leave it out to have one drawn")] | None = None
    start_seconds: Annotated[NonNegativeNumber, Meta(description="0 starts at once")] = 0.0
    stop_after_seconds: Annotated[NonNegativeNumber, Meta(description="0 never stops")] = 0.0
    limits: Any = {}


class _Script(Struct, tag_field="when", tag="script"):
    shots: Annotated[
        list[Any],
        Meta(min_length=1, title="a list of tables", description='for example [{at = 10, fault = "kill_group"}]'),
    ]


class _Trace(Struct, tag_field="when", tag="trace"):
    file: Annotated[str, Meta(min_length=1, title="a path", description="that of a CSV file, relative to this file")]


def load_plan(path: Path, seed: int | None = None) -> Plan:
    """Read a plan from TOML.

    Args:
        path: the file, or the name of a packaged one; what it names is relative to its folder.
        seed: goes before the file's. With neither a new one is drawn, which the plan then tells.

    Raises:
        ConfigError: the file cannot be read, or something in it is wrong; one line.
    """
    path = find_config(path, "chaos")
    values = load_toml(path)
    try:
        file = convert(_File, values)
        limits = convert(Limits, file.limits, "limits")
        rules = tuple(_read_rule(f"rule[{index}]", rule, path.parent) for index, rule in enumerate(file.rule))
        for index, rule in enumerate(rules):
            for fault, replica in rule.wanted():
                reason = limits.refusal(fault, replica)
                if reason is not None:
                    what = f"rule[{index}] must keep the limits, got {fault.name}: {reason}"
                    raise ConfigError(f"{what}; remove it, or change the limits")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    own_seed = new_seed() if file.seed is None else file.seed
    times = file.start_seconds, file.stop_after_seconds
    return Plan(path.name, own_seed if seed is None else seed, *times, limits, rules)


_KINDS: Mapping[str, Any] = {
    "every": Every, "poisson": Poisson, "uniform": Uniform, "trace": _Trace, "script": _Script
}  # fmt: skip


def _read_rule(name: str, values: Any, folder: Path) -> Rule | Listed:
    """Return the rule of one table `[[rule]]`."""
    when = values.get("when") if isinstance(values, Mapping) else None
    if not isinstance(when, str) or when not in _KINDS:
        rule = f"must be one of {', '.join(_KINDS)}, got {when!r}"
        raise ConfigError(f"{name}.when {rule}; {closest(when, _KINDS)}set it")
    rule = convert(_KINDS[when], values, name, f' with when = "{when}"')
    if isinstance(rule, _Script):
        return _in_order(
            [convert(ListedFault, shot, f"{name}.shots[{index}]") for index, shot in enumerate(rule.shots)]
        )
    return _in_order(read_trace(folder / rule.file)) if isinstance(rule, _Trace) else rule


def _in_order(entries: Sequence[ListedFault]) -> Listed:
    return Listed(tuple(sorted(entries, key=lambda entry: entry.at)))


# Traces

COLUMNS = ("time", "fault", "target", "params")


def read_trace(path: Path) -> list[ListedFault]:
    """Read a trace: a CSV file with the columns time, fault, target and, if wanted, params.

    A line's time is in seconds since the schedule's start. Its target is a group (`2`), a rank of one (`2/0`),
    `lighthouse`, or empty, which lets the seed choose. Its params are NAME=VALUE, separated by spaces. Empty lines and
    those that begin with # are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line of it is wrong; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"trace must be a readable CSV file, got {path} ({reason}); correct the path") from error
    numbered = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    # No cell holds a comma, so nothing is quoted.
    lines = [
        (number, [cell.strip() for cell in line.split(",")]) for number, line in numbered if line and line[0] != "#"
    ]
    if len(lines) < 2 and (not lines or lines[0][1][0] == COLUMNS[0]):
        raise ConfigError(f"{path.name} must hold at least one fault, got none; add a line such as 30,kill_group,0")
    (number, head), *rest = lines
    if tuple(head) not in (COLUMNS, COLUMNS[:-1]):
        rule = f"must name the columns {','.join(COLUMNS)} (the last may be missing)"
        raise ConfigError(f"{path.name}:{number} {rule}, got {','.join(head)!r}; put them in the first line")
    for number, cells in rest:
        if len(cells) != len(head):
            what = f"must have {len(head)} columns, got {len(cells)}"
            raise ConfigError(f"{path.name}:{number} {what}; an empty cell needs its comma")
    return [_trace_entry(f"{path.name}:{number}", *cells) for number, cells in rest]


def _trace_entry(name: str, time: str, fault: str, target: str, params: str = "") -> ListedFault:
    """Return the entry of one line's cells."""
    values: dict[str, Any] = {"at": number(time), "fault": fault, "params": {}}
    match target.split("/"):
        case [replica] if replica.isdecimal():
            values["replica"] = int(replica)
        case [replica, rank] if replica.isdecimal() and rank.isdecimal():
            values |= {"replica": int(replica), "rank": int(rank)}
        case [""]:
            pass
        case ["lighthouse"] if find_fault(fault, f"{name}.fault").scope == "lighthouse":
            pass
        case _:
            rule = "must be a group (2), a rank of one (2/0), empty, or the lighthouse for a fault of it"
            raise ConfigError(f"{name}.target {rule}, got {target!r}; correct it")
    for part in params.split():
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"{name}.params must be NAME=VALUE, got {part!r}; write for example seconds=10")
        values["params"][key] = number(value)
    return convert(ListedFault, values, name)


def number(text: str) -> float | str:
    """Return the number that a text stands for, a whole one as an int; or the text, for its field's check to refuse."""
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() else value
