# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""All faults by name: the registry that plans, commands, agents, histories and docs read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from titan_ft.config import ConfigError, closest
from titan_ft.faults import inside, outside
from titan_ft.faults.fault import Category, Fault, Outcome
from titan_ft.faults.schema import convert


def _named(kind: type[Fault]) -> Iterator[type[Fault]]:
    for below in kind.__subclasses__():
        if "name" in vars(below):
            yield below
        yield from _named(below)


FAULTS: Mapping[str, type[Fault]] = {
    kind.name: kind for base in (outside.Signal, inside.InWorker) for kind in _named(base)
}


def find_fault(name: object, field_name: str = "fault") -> type[Fault]:
    """Return the fault of that name.

    Raises:
        ConfigError: there is none; names the closest one and all.
    """
    if isinstance(name, str) and name in FAULTS:
        return FAULTS[name]
    raise ConfigError(
        f"{field_name} must name a fault, got {name!r}; {closest(name, FAULTS)}faults: {', '.join(FAULTS)}"
    )


def make_fault(name: object, params: Any, field_name: str = "fault", params_name: str = "params") -> Fault:
    """Return the fault of that name with these parameters over its defaults.

    Raises:
        ConfigError: no such fault; or `params` is no table, has an unknown key, or a value out of its range.
    """
    kind = find_fault(name, field_name)
    return convert(kind, params, params_name, f" of {kind.name}")


def read_outcome(name: str) -> Outcome:
    """Return the outcome to expect after a fault with this name in a history; "" for an unknown name."""
    kind = _of_history(name)
    return "" if kind is None else kind.outcome


def read_category(name: str) -> Category | None:
    """Return the category of a fault with this name in a history; None for an unknown name."""
    kind = _of_history(name)
    return None if kind is None else kind.category


def describe() -> str:
    """Return the list of faults, one a line, with descriptions and parameters."""
    width = max(len(name) for name in FAULTS)
    lines = []
    for name, kind in FAULTS.items():
        params = ", ".join(f"{param}={default}" for param, default in list_params(kind))
        lines.append(f"{name:{width}}  {kind.summary()}{f' ({params})' if params else ''}")
    return "\n".join(lines)


def list_params(kind: type[Fault]) -> list[tuple[str, str]]:
    """Return the parameters of a fault with their defaults; "random" where the seed draws one."""
    fields = msgspec.structs.fields(kind)
    return [(field.name, "random" if field.default is None else f"{field.default:g}") for field in fields]


def _of_history(name: str) -> type[Fault] | None:
    # Scripts and tests kill groups by themselves, and give names such as "sigkill_group" to it.
    return outside.KillGroup if name.startswith("sigkill") else FAULTS.get(name)
