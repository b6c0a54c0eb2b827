# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""All faults by name. Plans, commands, agents, the history and the docs read this registry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from titan_ft.config import ConfigError, suggest_name
from titan_ft.faults import inside, outside
from titan_ft.faults.fault import Category, Fault, Outcome
from titan_ft.faults.schema import convert


def _find_named(kind: type[Fault]) -> Iterator[type[Fault]]:
    """Yield the direct and indirect subclasses that define a `name`."""
    for subclass in kind.__subclasses__():
        if "name" in vars(subclass):
            yield subclass
        yield from _find_named(subclass)


def _collect() -> dict[str, type[Fault]]:
    faults: dict[str, type[Fault]] = {}
    for base in (outside.Signal, inside.InWorker):
        for kind in _find_named(base):
            faults[kind.name] = kind
    return faults


FAULTS: Mapping[str, type[Fault]] = _collect()
"""All faults by name, in the order of their definition."""


def find_fault(name: object, field_name: str = "fault") -> type[Fault]:
    """Return the class of the fault with a name.

    Args:
        name: value of a user's setting, of any type.
        field_name: name of the setting, for the error.

    Raises:
        ConfigError: no fault has this name. The text names the closest fault and all faults.
    """
    if isinstance(name, str) and name in FAULTS:
        return FAULTS[name]
    hint = f"{suggest_name(name, FAULTS)}faults: {', '.join(FAULTS)}"
    raise ConfigError(f"{field_name} must name a fault, got {name!r}; {hint}")


def make_fault(
    name: object,
    params: Any,
    field_name: str = "fault",
    params_name: str = "params",
) -> Fault:
    """Return a fault with parameters.

    Args:
        name: value of a user's setting, of any type.
        params: table of the parameters. A missing parameter has its default.
        field_name: name of the setting with the fault, for errors.
        params_name: name of the table, for errors.

    Raises:
        ConfigError: no fault has this name; or `params` is no table, has an unknown key, or has a
            value out of range.
    """
    kind = find_fault(name, field_name)
    return convert(kind, params, params_name, f" of {kind.name}")


def read_outcome(name: str) -> Outcome:
    """Return the outcome to expect of a fault in a history; "" for an unknown name."""
    kind = _find_in_history(name)
    return "" if kind is None else kind.outcome


def read_category(name: str) -> Category | None:
    """Return the category of a fault in a history; None for an unknown name."""
    kind = _find_in_history(name)
    return None if kind is None else kind.category


def describe() -> str:
    """Return the list of all faults as text, with descriptions and parameters, a line each."""
    width = max(len(name) for name in FAULTS)
    lines = []
    for name, kind in FAULTS.items():
        line = f"{name:{width}}  {kind.summary()}"
        params = ", ".join(f"{param}={default}" for param, default in list_params(kind))
        if params:
            line += f" ({params})"
        lines.append(line)
    return "\n".join(lines)


def list_params(kind: type[Fault]) -> list[tuple[str, str]]:
    """Return name and default of each parameter of a fault.

    The default is "random" for a parameter that the seed draws.
    """
    params = []
    for field in msgspec.structs.fields(kind):
        default = "random" if field.default is None else f"{field.default:g}"
        params.append((field.name, default))
    return params


def _find_in_history(name: str) -> type[Fault] | None:
    # Scripts and tests that kill a group without chaos write names such as "sigkill_group".
    if name.startswith("sigkill"):
        return outside.KillGroup
    return FAULTS.get(name)
