# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Check tables that people write against msgspec classes, and say what is wrong in one line.

The `Meta` of a field holds more than bounds: its title is the rule in words, its description the remedy.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from msgspec import Meta

from titan_ft.config import ConfigError, closest

T = TypeVar("T", bound=msgspec.Struct)

# All are finite: TOML has inf and nan, and a schedule that computes with them never ends.
FINITE = sys.float_info.max
PositiveNumber = Annotated[float, Meta(gt=0, le=FINITE, title="a number > 0")]
Number = Annotated[float, Meta(ge=0, le=FINITE, title="a number >= 0")]
Count = Annotated[int, Meta(ge=1, title="a whole number >= 1")]
Whole = Annotated[int, Meta(ge=0, title="a whole number >= 0")]
Place = Annotated[Whole, Meta(description="leave it out for a random one")] | None
"""A group, or a rank of one; None leaves the choice to the seed."""


def convert(kind: type[T], values: Any, name: str = "", note: str = "") -> T:
    """Return the object that a table describes.

    Args:
        name: of the table, which stands before its keys in errors; empty for the file itself.
        note: what its keys depend on.

    Raises:
        ConfigError: field, rule, value and remedy of the first mistake. One that the class itself raises, whose text
            begins with the name of a field, gets the table's name in front.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} must be a table, got {values!r}; write its keys below it")
    prefix = f"{name}." if name else ""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    tag = kind.__struct_config__.tag_field
    check_keys(prefix, values, [*([tag] if tag else []), *fields], note)
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise ConfigError(f"{prefix}{error.__cause__}") from error
        # msgspec tells the field in its text only: src/msgspec/_core.c.
        found = re.search(r"required field `(\w+)`| at `\$\.(\w+)", str(error))
        if found is None:  # a message of a version of msgspec that words it in another way
            raise ConfigError(f"{prefix or 'the file '}must have the right fields: {error}") from error
        key = found[1] or found[2]
        default = fields[key].default
        usual = f"the default is {default:g}" if isinstance(default, int | float) else "correct it"
        metas = list(_metas(fields[key].type))
        rule = next((meta.title for meta in metas if meta.title), "of another type")
        remedy = next((meta.description for meta in metas if meta.description), usual)
        what = f"must be {rule}, got {values[key]!r}" if key in values else "must be set, got nothing"
        raise ConfigError(f"{prefix}{key} {what}; {remedy}") from error


def check_keys(prefix: str, given: Iterable[str], valid: Iterable[str], note: str = "") -> None:
    """Raise ConfigError for a key that a table does not have."""
    valid = list(valid)
    for key in given:
        if key not in valid:
            hint = f"{closest(key, valid)}valid keys: {', '.join(valid) or 'none'}"
            raise ConfigError(f"{prefix}{key} is not a valid key{note}; {hint}")


def _metas(kind: Any) -> Iterator[Meta]:
    """Yield what is said of a type, the outermost first."""
    yield from reversed(getattr(kind, "__metadata__", ()))
    for part in get_args(kind):
        yield from _metas(part)
