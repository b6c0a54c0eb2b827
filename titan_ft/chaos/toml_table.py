# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Take values out of a table of a TOML, each with a check."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from titan_ft.chaos.faults import check_number, closest
from titan_ft.config import ConfigError


class Table:
    """A table of the TOML, whose values are checked as they are taken."""

    def __init__(self, name: str, values: Any, keys: Collection[str], note: str = "") -> None:
        """Check that it is a table with these keys only.

        Args:
            name: of the table, which stands before its keys in errors; empty for the file itself.
            keys: all that it may have.
            note: what these keys depend on.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"{name} must be a table, got {values!r}; write its keys below it")
        self.prefix = f"{name}." if name else ""
        self.values = values
        for key in values:
            if key not in keys:
                hint = f"{closest(key, keys)}valid keys: {', '.join(keys)}"
                raise ConfigError(f"{self.prefix}{key} is not a valid key{note}; {hint}")

    def take(self, key: str, remedy: str = "add it") -> Any:
        if key not in self.values:
            raise ConfigError(f"{self.prefix}{key} must be set, got nothing; {remedy}")
        return self.values[key]

    def number(self, key: str, rule: str, remedy: str, default: float | None = None) -> float:
        """Return a finite number. The rule is "> 0" or ">= 0"; without a default the key is required."""
        if default is not None and key not in self.values:
            return default
        value = self.take(key, remedy)
        holds: Callable[[float], bool] = (lambda v: v > 0) if rule == "> 0" else (lambda v: v >= 0)
        check_number(f"{self.prefix}{key}", value, f"must be a number {rule}", holds, remedy)
        return float(value)

    def integer(self, key: str, least: int, remedy: str, default: int | None = None) -> int:
        """Return a whole number; without a default the key is required."""
        if default is not None and key not in self.values:
            return default
        value = self.take(key, remedy)
        if type(value) is not int or value < least:
            raise ConfigError(f"{self.prefix}{key} must be a whole number >= {least}, got {value!r}; {remedy}")
        return value
