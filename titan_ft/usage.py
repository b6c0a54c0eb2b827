# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Say in one line what is wrong with a command line that was refused.

tyro decides what is refused; its own text is a box of ten lines with the help in it. Here the same arguments are
looked at again, for the first mistake in them.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from titan_ft.config import ConfigError, closest

T = TypeVar("T")
_KINDS = {int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class Option:
    """One argument of a command.

    Attributes:
        name: as it is written: "--run-dir", or "RUN_DIR" for one that is told by its place.
        kind: type of its value; bool takes none.
        several: whether it takes all values up to the next option.
        aliases: other names of the same option.
    """

    name: str
    kind: Any = str
    required: bool = False
    several: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def is_flag(self) -> bool:
        return self.name.startswith("--")


def refusing(run: Callable[[], T], explain: Callable[[], str | None]) -> T:
    """Return what a parser returns; what it prints when it refuses its arguments becomes one line.

    Args:
        explain: says what is wrong; None where it cannot tell, which leaves the parser's own words.

    Raises:
        ConfigError: the arguments are refused.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            parsed = run()
    except SystemExit as error:
        if not error.code:  # it was asked for its help
            raise
        raise ConfigError(explain() or _without_box(printed.getvalue())) from None
    if warning := printed.getvalue():  # of what was accepted
        sys.stderr.write(warning)
    return parsed


def read_options(command: type) -> list[Option]:
    """List the arguments of a command's dataclass."""
    hints = get_type_hints(command, include_extras=True)
    return [
        _option(field.name, hints[field.name], required=field.default is MISSING and field.default_factory is MISSING)
        for field in fields(command)
    ]


def find_mistake(
    args: Sequence[str], options: Sequence[Option], unknown: Callable[[str, list[str]], str], example: str = ""
) -> str | None:
    """Return the first mistake in the arguments as a line, or None.

    Args:
        unknown: says what is wrong with an option that is none of those whose names it gets.
        example: a whole command, for who left something out.
    """
    by_name = {name: option for option in options if option.is_flag for name in option.names}
    places = [option for option in options if not option.is_flag]
    missing = {option.name for option in options if option.required}
    left = list(args)
    while left:
        word = left.pop(0)
        if _is_value(word):
            if not places:
                return f"{word!r} is one argument too many; {_place_remedy(options)}"
            option, values = places.pop(0), [word]
            written = option.name
        else:
            written, equals, value = word.partition("=")
            name = written.replace("_", "-")
            if name not in by_name:
                return unknown(name, list(by_name))
            option, values = by_name[name], [value] if equals else []
            if option.kind is not bool and not equals:
                while left and _is_value(left[0]) and (option.several or not values):
                    values.append(left.pop(0))
        missing.discard(option.name)
        wrong = _wrong_value(written, option, values)
        if wrong:
            return wrong
    if missing:
        names = [option.name for option in options if option.name in missing]
        text = " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
        return f"{text} must be given, got nothing{f'; for example: {example}' if example else ''}"
    return None


def find_contradiction(args: Sequence[str], options: Sequence[Option]) -> str | None:
    """Return a line about an option that is given under two names with different values, or None.

    The parser would take the last one without a word: `--replicas 2 --groups 3` trained with 3 groups.
    """
    by_name = {name: option for option in options if option.is_flag for name in option.names}
    given: dict[str, tuple[str, str]] = {}
    for position, word in enumerate(args):
        written, equals, value = word.partition("=")
        option = by_name.get(written.replace("_", "-"))
        if option is None or option.kind is bool:
            continue
        if not equals:
            value = args[position + 1] if position + 1 < len(args) else ""
        name, earlier = given.setdefault(option.name, (written, value))
        if name != written and earlier != value:
            return f"{written} must be the same as {name} ({earlier}), got {value}; give one of the two"
    return None


def example_of(command: type) -> str:
    """Return the example that ends a command's docstring."""
    return " ".join(inspect.cleandoc(command.__doc__ or "").rpartition("Example: ")[2].split())


def _option(name: str, hint: Any, *, required: bool) -> Option:
    kind, marks = hint, []
    while get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        marks += more
    several = get_origin(kind) in (tuple, list)
    kinds = [part for part in get_args(kind) if part not in (NoneType, ...)] or [kind]
    if get_origin(kind) is Literal:
        kinds = [kind]
    name = next((mark.name for mark in marks if getattr(mark, "name", None)), name)
    shown = f"--{name.replace('_', '-')}" if tyro.conf.Positional not in marks else name.upper()
    aliases = tuple(alias for mark in marks for alias in getattr(mark, "aliases", None) or ())
    return Option(shown, kinds[0], required, several, aliases)


def _is_value(word: str) -> bool:
    return not word.startswith("-") or re.fullmatch(r"-(\d.*|\.\d.*|inf|)", word) is not None


def _wrong_value(name: str, option: Option, values: list[str]) -> str | None:
    if option.kind is bool:
        return f"{name} must be without a value, got {values[0]!r}; leave the value out" if values else None
    if not values and not option.several:
        kind = _KINDS.get(option.kind, "a path" if option.kind is Path else "a value")
        return f"{name} must be followed by {kind}, got nothing; give it, or leave {name} out"
    if get_origin(option.kind) is Literal:
        choices = list(map(str, get_args(option.kind)))
        for value in values:
            if value not in choices:
                return f"{name} must be one of {', '.join(choices)}, got {value!r}; {closest(value, choices)}set it"
    if option.kind in _KINDS:
        for value in values:
            try:
                option.kind(value)
            except ValueError:
                return f"{name} must be {_KINDS[option.kind]}, got {value!r}; correct it"
    return None


def _place_remedy(options: Sequence[Option]) -> str:
    places = [option.name for option in options if not option.is_flag]
    return f"what has no -- before it is {' '.join(places)}" if places else "every option begins with --"


def _without_box(text: str) -> str:
    """Return the words in a box that tyro printed, without where to find help."""
    text = text.partition("For full helptext")[0]
    return " ".join(re.sub(r"[\u2500-\u257f]", " ", text).split()) or "the arguments are wrong; see --help"


def flatten(config: type, prefix: str = "--") -> Iterator[Option]:
    """List the flags of nested dataclasses, torchtitan's JobConfig: --training.steps, --checkpoint.no-enable."""
    hints = get_type_hints(config)
    for field in fields(config):
        kind, name = hints[field.name], field.name.replace("_", "-")
        if hasattr(kind, "__dataclass_fields__"):
            yield from flatten(kind, f"{prefix}{name}.")
            continue
        option = _option(field.name, kind, required=False)
        yield replace(option, name=f"{prefix}{name}")
        if option.kind is bool:
            yield Option(f"{prefix}no-{name}", bool)
