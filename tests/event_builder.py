# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Build events for tests from the schema. A field that a test does not set is zero, empty or
absent.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from titan_ft.run.events import Event, kinds
from titan_ft.run.log import encode

E = TypeVar("E", bound=Event)
# A run of a test has hundreds of events, and each look at a class evaluates its annotations anew.
_fields_of: Callable[[Any], tuple[Any, ...]] = functools.cache(msgspec.structs.fields)


def named(name: str) -> type[Event]:
    """Return the class of the events of a name.

    Raises:
        ValueError: there is no such event.
    """
    for kind in kinds():
        if kind.__struct_config__.tag == name:
            return kind
    raise ValueError(f"{name!r} must be the name of an event, see docs/events.md")


def event(name: str, /, **fields: Any) -> Any:
    """Return the event of a name; see `build`."""
    return build(named(name), **fields)


def build(kind: type[E], /, **fields: Any) -> E:
    """Build an event of class `kind`. A nested part may be given as a dict, in its JSON form.

    Fields that are not given are zero, except: `mono` equals `time`; `rank` and `attempt` of a
    group are 0; a step took one exchange, and its `lineage` and `parent` follow from its number; a
    group that left did so in order.

    Raises:
        ValueError: the class has no such field, or a value does not have the field's type.
    """
    usual: dict[str, Any] = {
        "time": 0.0,
        "mono": fields.get("time", 0.0),
        "pid": 1,
        "exchanges": 1,
        "in_order": True,
    }
    header = {field.name: field.default for field in _fields_of(kind)}
    usual |= {name: 0 for name in ("replica", "rank", "attempt") if header[name] is not None}
    if "step" in kind.__struct_fields__ and "lineage" in kind.__struct_fields__:
        step = fields.get("step", 0)
        usual |= {"lineage": f"{step:012x}", "parent": f"{max(0, step - 1):012x}"}
    known = {name: value for name, value in usual.items() if name in kind.__struct_fields__}
    return _fill(kind, {**known, **fields})


def typed(fields: Mapping[str, Any]) -> Any:
    """Build an event from a dict whose key `event` is the event's name; see `build`."""
    return build(
        named(fields["event"]), **{name: value for name, value in fields.items() if name != "event"}
    )


def change(told: Event, **fields: Any) -> None:
    """Change fields of an event."""
    for name, value in fields.items():
        form = next(field.type for field in _fields_of(type(told)) if field.name == name)
        setattr(told, name, _convert(form, value, name))


def like(told: Event, name: str, /, **fields: Any) -> Any:
    """Build an event of another name with the writer and the time of `told`."""
    return event(
        name, **{**{each: getattr(told, each) for each in Event.__struct_fields__}, **fields}
    )


def untyped(told: Event) -> dict[str, Any]:
    """Return an event as the dict of its JSON line, for tests that check names and values there."""
    return json.loads(encode(told))


def _fill(kind: type[Any], fields: Mapping[str, Any]) -> Any:
    unknown = fields.keys() - set(kind.__struct_fields__)
    if unknown:
        raise ValueError(
            f"{kind.__name__} must have the field {min(unknown)}, and has not; see docs/events.md"
        )
    values = {}
    for field in _fields_of(kind):
        if field.name in fields:
            values[field.name] = _convert(
                field.type, fields[field.name], f"{kind.__name__}.{field.name}"
            )
        elif field.required:
            values[field.name] = _zero(field.type)
    return kind(**values)


def _convert(form: Any, value: Any, where: str) -> Any:
    options = typing.get_args(form) if isinstance(form, types.UnionType) else (form,)
    part = next(
        (each for each in options if isinstance(each, type) and issubclass(each, msgspec.Struct)),
        None,
    )
    if part is not None and isinstance(value, Mapping):
        return _fill(part, value)
    if typing.get_origin(form) is list and isinstance(value, list | tuple):
        return [_convert(typing.get_args(form)[0], item, where) for item in value]
    if isinstance(value, Mapping):
        value = {str(key): item for key, item in value.items()}
    try:
        return msgspec.convert(value, form, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(f"{where} must be of type {form}, got {value!r} ({error})") from error


def _zero(form: Any) -> Any:
    if isinstance(form, types.UnionType):
        options = typing.get_args(form)
        return None if type(None) in options else _zero(options[0])
    if isinstance(form, type) and issubclass(form, msgspec.Struct):
        return _fill(form, {})
    return (typing.get_origin(form) or form)()
