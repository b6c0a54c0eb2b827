# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Report in one line why tyro refuses the arguments of a command.

tyro prints a box of ten lines, its help among them. Its hook for refusals gets the reason as an
object before that. The hook is private to tyro, so tyro is pinned exactly. `tests/test_contract.py`
names every part of the hook that is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

from tyro._errors import (
    BadValue,
    InstantiationFailure,
    InvalidChoice,
    MissingArgs,
    ParseErrorEvent,
    UnrecognizedArgs,
    on_parse_error,
)

from titan_ft.config import ConfigError, suggest_name

if TYPE_CHECKING:
    from tyro._arguments import ArgumentDefinition

T = TypeVar("T")
_KINDS = {int: "a whole number", float: "a number", Path: "a path"}


def refusing(
    run: Callable[[], T],
    args: Sequence[str],
    unknown: Callable[[str], str],
    places: Sequence[str] = (),
    example: str = "",
) -> T:
    """Return the result of `run`, which parses `args` with tyro.

    Args:
        unknown: returns the line for an option that does not exist.
        places: names of the positional arguments.
        example: a whole command, for the line about a missing argument.

    Raises:
        ConfigError: tyro refuses the arguments. The error names the argument, the rule, the value
            and the remedy.
    """

    def refuse(event: ParseErrorEvent) -> None:
        raise ConfigError(_explain(event, args, unknown, places, example))

    with on_parse_error(refuse):
        return run()


def find_values(args: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each written form of an option and its value, for any of the option's names."""
    for position, word in enumerate(args):
        written, equals, value = word.partition("=")
        if written.replace("_", "-") not in names:
            continue
        follows = args[position + 1] if position + 1 < len(args) else ""
        yield written, value if equals else follows


def _explain(
    event: ParseErrorEvent,
    args: Sequence[str],
    unknown: Callable[[str], str],
    places: Sequence[str],
    example: str,
) -> str:
    match event:
        case UnrecognizedArgs(tokens=[token, *_]) | MissingArgs(unrecognized_tokens=[token, *_]):
            return _unrecognized(token, args, unknown, places)
        case MissingArgs():
            names = [_name(missing.arg) for missing in event.missing_arguments]
            text = names[-1]
            if len(names) > 1:
                text = f"{', '.join(names[:-1])} and {text}"
            hint = f"; for example: {example}" if example else ""
            return f"{text} must be given, got nothing{hint}"
        case BadValue(reason="too_few_values"):
            written, _ = _last_value(event.argument, args)
            kind = _kind(event.argument)
            return (
                f"{written} must be followed by {kind}, got nothing; give it, or leave {written} "
                "out"
            )
        case InvalidChoice():
            written, _ = _last_value(event.argument, args)
            rule = f"must be one of {', '.join(event.choices)}"
            hint = suggest_name(event.value, event.choices)
            return f"{written} {rule}, got {event.value!r}; {hint}set it"
        case InstantiationFailure(argument=argument) if argument is not None:
            written, value = _last_value(argument, args)
            return f"{written} must be {_kind(argument)}, got {value!r}; correct it"
        case InstantiationFailure():
            return " ".join(event.message.split())
    return f"the arguments are wrong ({type(event).__name__}); see --help"


def _unrecognized(
    token: str, args: Sequence[str], unknown: Callable[[str], str], places: Sequence[str]
) -> str:
    if token.startswith("-") and not re.match(r"-[\d.]", token):
        return unknown(token.partition("=")[0].replace("_", "-"))
    # The option --resume has no value. Of --resume=yes, tyro takes the option and refuses "yes".
    for word in args:
        if word.startswith("--") and word.endswith(f"={token}") and token not in args:
            option = word.partition("=")[0]
            return f"{option} must be without a value, got {token!r}; leave the value out"
    if places:
        remedy = f"what has no -- before it is {' '.join(places)}"
    else:
        remedy = "every option begins with --"
    return f"{token!r} is one argument too many; {remedy}"


def _last_value(argument: ArgumentDefinition, args: Sequence[str]) -> tuple[str, str]:
    """Return the written form of an argument and its last value, which tyro's events lack."""
    found = _name(argument), ""
    for written, value in find_values(args, argument.lowered.name_or_flags):
        found = written, value
    return found


def _name(argument: ArgumentDefinition) -> str:
    name = argument.lowered.name_or_flags[-1]  # The aliases come first.
    return name if name.startswith("-") else name.replace("-", "_").upper()


def _kind(argument: ArgumentDefinition) -> str:
    annotation = argument.field.type_stripped
    kinds = [_KINDS[kind] for kind in (annotation, *get_args(annotation)) if kind in _KINDS]
    return kinds[0] if kinds else "a value"
