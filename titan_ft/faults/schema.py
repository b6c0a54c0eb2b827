# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Convert tables that people write to msgspec objects, or report the first mistake in one line.

The `Meta` of a field has the bounds of the value. The title of the `Meta` is the rule in words, and
its description is the remedy.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from msgspec import Meta

from titan_ft.config import ConfigError, suggest_name

T = TypeVar("T", bound=msgspec.Struct)

FINITE = sys.float_info.max
"""Bound of all numbers. TOML allows inf and nan, and a schedule with such a number never ends."""

PositiveNumber = Annotated[float, Meta(gt=0, le=FINITE, title="a number > 0")]
NonNegativeNumber = Annotated[float, Meta(ge=0, le=FINITE, title="a number >= 0")]
PositiveInt = Annotated[int, Meta(ge=1, title="a whole number >= 1")]
NonNegativeInt = Annotated[int, Meta(ge=0, title="a whole number >= 0")]
TargetIndex = Annotated[NonNegativeInt, Meta(description="leave it out for a random one")] | None
"""A slot, or a rank in a group; None leaves the choice to the seed."""


def convert(kind: type[T], values: Any, name: str = "", note: str = "") -> T:
    """Return the object that a table describes.

    Args:
        kind: class of the object.
        values: the table, as a user wrote it.
        name: name of the table, which errors put before the keys; empty for the file itself.
        note: end of the error about an unknown key, such as " of kill_rank".

    Raises:
        ConfigError: field, rule, value and remedy of the first mistake. The class itself may raise
            a ConfigError whose text begins with the name of a field. Then the text gets the
            table's name as a prefix.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} must be a table, got {values!r}; write its keys below it")
    prefix = f"{name}." if name else ""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    tag = kind.__struct_config__.tag_field
    valid_keys = list(fields)
    if tag:
        valid_keys.insert(0, tag)
    check_keys(prefix, values, valid_keys, note)
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise ConfigError(f"{prefix}{error.__cause__}") from error
        # Only the text of msgspec's error names the field (src/msgspec/_core.c).
        found = re.search(r"required field `(\w+)`| at `\$\.(\w+)", str(error))
        if found is None:
            # Another version of msgspec may have another text.
            where = prefix or "the file "
            raise ConfigError(f"{where}must have the right fields: {error}") from error
        key = found[1] or found[2]
        raise ConfigError(f"{prefix}{key} {_describe_mistake(fields[key], values)}") from error


def check_keys(prefix: str, given: Iterable[str], valid: Iterable[str], note: str = "") -> None:
    """Check that a table has valid keys only.

    Raises:
        ConfigError: a key is not valid. The text names the first such key.
    """
    valid = list(valid)
    for key in given:
        if key not in valid:
            hint = f"{suggest_name(key, valid)}valid keys: {', '.join(valid) or 'none'}"
            raise ConfigError(f"{prefix}{key} is not a valid key{note}; {hint}")


def _describe_mistake(field: msgspec.structs.FieldInfo, values: Mapping[str, Any]) -> str:
    """Return rule, value and remedy of a field whose value is wrong or missing."""
    remedy = "correct it"
    if isinstance(field.default, int | float):
        remedy = f"the default is {field.default:g}"
    rule = "of another type"
    # The outermost `Meta` comes last, and wins.
    for meta in reversed(list(_find_metas(field.type))):
        rule = meta.title or rule
        remedy = meta.description or remedy
    key = field.encode_name
    if key not in values:
        return f"must be set, got nothing; {remedy}"
    return f"must be {rule}, got {values[key]!r}; {remedy}"


def _find_metas(kind: Any) -> Iterator[Meta]:
    """Yield the `Meta` objects of an annotated type, the outermost first."""
    yield from reversed(getattr(kind, "__metadata__", ()))
    for part in get_args(kind):
        yield from _find_metas(part)
