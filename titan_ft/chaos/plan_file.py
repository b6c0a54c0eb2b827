# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read a plan from a TOML file, and the traces that the file names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from titan_ft.chaos.plan import (
    Every,
    Limits,
    Listed,
    ListedFault,
    Plan,
    Poisson,
    Rule,
    UniformGaps,
    new_seed,
)
from titan_ft.config import ConfigError, load_toml, suggest_name
from titan_ft.data.assets import find_config
from titan_ft.faults.catalogue import find_fault
from titan_ft.faults.schema import NonNegativeInt, NonNegativeNumber, convert


class _PlanFile(Struct):
    """The top level of the TOML."""

    rule: Annotated[
        list[Any],
        Meta(min_length=1, title="an array of tables", description="write [[rule]] above each"),
    ]
    seed: Annotated[NonNegativeInt, Meta(description="leave it out to have one drawn")] | None = (
        None
    )
    start_seconds: Annotated[NonNegativeNumber, Meta(description="0 starts at once")] = 0.0
    stop_after_seconds: Annotated[NonNegativeNumber, Meta(description="0 never stops")] = 0.0
    limits: Any = {}


class _Script(Struct, tag_field="when", tag="script"):
    shots: Annotated[
        list[Any],
        Meta(
            min_length=1,
            title="a list of tables",
            description='for example [{at = 10, fault = "kill_group"}]',
        ),
    ]


class _Trace(Struct, tag_field="when", tag="trace"):
    file: Annotated[
        str,
        Meta(
            min_length=1,
            title="a path",
            description="that of a CSV file, relative to this file",
        ),
    ]


def load_plan(path: Path, seed: int | None = None) -> Plan:
    """Read a plan from TOML.

    Args:
        path: the file, or the name of a packaged plan. Paths in the file are relative to its
            folder.
        seed: replaces the file's seed. Without either, a new seed is drawn.

    Raises:
        ConfigError: the file cannot be read, or it has a mistake; one line.
    """
    path = find_config(path, "chaos")
    values = load_toml(path)
    try:
        file = convert(_PlanFile, values)
        limits = convert(Limits, file.limits, "limits")
        rules = []
        for index, table in enumerate(file.rule):
            rules.append(_read_rule(f"rule[{index}]", table, path.parent))
        _check_limits(rules, limits)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if seed is None:
        seed = new_seed() if file.seed is None else file.seed
    return Plan(path.name, seed, file.start_seconds, file.stop_after_seconds, limits, tuple(rules))


def _check_limits(rules: Sequence[Rule | Listed], limits: Limits) -> None:
    """Check that each fault of the rules is possible within the limits.

    Raises:
        ConfigError: a fault can never be injected.
    """
    for index, rule in enumerate(rules):
        for fault, replica in rule.possible_faults():
            reason = limits.refusal(fault, replica)
            if reason is not None:
                raise ConfigError(
                    f"rule[{index}] must keep the limits, got {fault.name}: {reason}; remove it, or change the limits"
                )


_KINDS: Mapping[str, Any] = {
    "every": Every,
    "poisson": Poisson,
    "uniform": UniformGaps,
    "trace": _Trace,
    "script": _Script,
}


def _read_rule(name: str, values: Any, folder: Path) -> Rule | Listed:
    """Return the rule of one table `[[rule]]`."""
    when = values.get("when") if isinstance(values, Mapping) else None
    if not isinstance(when, str) or when not in _KINDS:
        rule = f"must be one of {', '.join(_KINDS)}, got {when!r}"
        raise ConfigError(f"{name}.when {rule}; {suggest_name(when, _KINDS)}set it")
    table = convert(_KINDS[when], values, name, f' with when = "{when}"')
    if isinstance(table, _Script):
        shots = []
        for index, shot in enumerate(table.shots):
            shots.append(convert(ListedFault, shot, f"{name}.shots[{index}]"))
        return _in_order(shots)
    if isinstance(table, _Trace):
        return _in_order(read_trace(folder / table.file))
    assert isinstance(table, Rule), "the other kinds are rules"
    return table


def _in_order(entries: Sequence[ListedFault]) -> Listed:
    return Listed(tuple(sorted(entries, key=lambda entry: entry.at)))


# Traces

COLUMNS = ("time", "fault", "target", "params")


def read_trace(path: Path) -> list[ListedFault]:
    """Read a trace: a CSV file with the columns time, fault, target and optionally params.

    The time is in seconds since the start of the schedule. The target is a group (`2`), a rank
    (`2/0`), `lighthouse`, or empty, in which case the seed chooses. The params are NAME=VALUE,
    separated by spaces. Empty lines and lines that begin with # are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(
            f"trace must be a readable CSV file, got {path} ({reason}); correct the path"
        ) from error
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            # No cell holds a comma, so no cell is quoted.
            lines.append((number, [cell.strip() for cell in stripped.split(",")]))
    if not lines or (len(lines) == 1 and lines[0][1][0] == COLUMNS[0]):
        raise ConfigError(
            f"{path.name} must hold at least one fault, got none; add a line such as 30,kill_group,0"
        )
    (head_number, head), *rest = lines
    if tuple(head) not in (COLUMNS, COLUMNS[:-1]):
        rule = f"must name the columns {','.join(COLUMNS)} (the last may be missing)"
        raise ConfigError(
            f"{path.name}:{head_number} {rule}, got {','.join(head)!r}; put them in the first line"
        )
    entries = []
    for number, cells in rest:
        name = f"{path.name}:{number}"
        if len(cells) != len(head):
            raise ConfigError(
                f"{name} must have {len(head)} columns, got {len(cells)}; an empty cell needs its comma"
            )
        entries.append(_trace_entry(name, *cells))
    return entries


def _trace_entry(name: str, time: str, fault: str, target: str, params: str = "") -> ListedFault:
    """Return the entry of one line's cells."""
    values: dict[str, Any] = {"at": number(time), "fault": fault, "params": {}}
    match target.split("/"):
        case [replica] if replica.isdecimal():
            values["replica"] = int(replica)
        case [replica, rank] if replica.isdecimal() and rank.isdecimal():
            values["replica"] = int(replica)
            values["rank"] = int(rank)
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
            raise ConfigError(
                f"{name}.params must be NAME=VALUE, got {part!r}; write for example seconds=10"
            )
        values["params"][key] = number(value)
    return convert(ListedFault, values, name)


def number(text: str) -> float | str:
    """Return the number in a text, an int for whole numbers; else the text.

    The check of the field that gets the value refuses the text. Its message names the field.
    """
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() else value
