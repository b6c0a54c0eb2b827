# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Parse the command line of `titan-ft` into one of the classes in `options`, and write help texts.

Each command is a dataclass in `options`, and tyro parses its arguments. `parse` accepts more than
tyro does (`_place_config`, `_join_values`), and turns tyro's errors into one line with a remedy.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import tyro

from titan_ft import versions
from titan_ft.config import ConfigError, suggest_name
from titan_ft.options import COMMANDS, OPTIONS_OF_OPTIONS, TAKES_FLAGS
from titan_ft.usage import find_values, refusing

_WIDTH = 80
TYRO_CONFIG = (tyro.conf.FlagCreatePairsOff,)


def parse(argv: Sequence[str]) -> Any:
    """Return the requested command, an object of one of the classes in `options`.

    Raises:
        ConfigError: the arguments are wrong.
    """
    name, args = _split_name(argv)
    command = COMMANDS[name]
    options = read_options(command)
    positionals = [option.name for option in options if not option.name.startswith("--")]
    args = _place_config(positionals, args)
    args = _join_values(args)
    _check_aliases(options, args)

    def parse_arguments() -> Any:
        return tyro.cli(
            command,
            prog=f"titan-ft {name}",
            args=args,
            description=describe_command(command),
            config=TYRO_CONFIG,
        )

    def describe_unknown(written: str) -> str:
        if "." in written and issubclass(command, TAKES_FLAGS):
            return (
                f"{written} must come after a --, as all of torchtitan's flags: titan-ft {name} "
                f"... -- {written}=..."
            )
        known_names: list[str] = []
        for option in options:
            known_names += option.names
        hint = suggest_name(written, known_names)
        return f"{written} is no option of titan-ft {name}; {hint}see titan-ft {name} --help"

    return refusing(parse_arguments, args, describe_unknown, positionals, example_of(command))


@dataclass(frozen=True)
class Option:
    """One argument of a command.

    Attributes:
        name: "--run-dir", or "RUN_DIR" for a positional argument.
        aliases: other names of the same option.
        takes_value: False for a flag.
    """

    name: str
    aliases: tuple[str, ...]
    takes_value: bool

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def read_options(command: type) -> list[Option]:
    """List the arguments of a command's dataclass."""
    options = []
    for field, hint in get_type_hints(command, include_extras=True).items():
        # Of Annotated[TYPE, ...]: tyro's settings for the field.
        settings = getattr(hint, "__metadata__", ())
        name = _find_name(field, settings)
        if tyro.conf.Positional in settings:
            written_name = name.upper()
        else:
            written_name = f"--{name.replace('_', '-')}"
        aliases: list[str] = []
        for setting in settings:
            aliases += getattr(setting, "aliases", None) or ()
        is_flag = bool in (hint, *get_args(hint))
        options.append(Option(written_name, tuple(aliases), takes_value=not is_flag))
    return options


def _find_name(field: str, settings: Sequence[Any]) -> str:
    """Return the name that tyro gives to the argument of a field."""
    for setting in settings:
        name = getattr(setting, "name", None)
        if name:
            return str(name)
    return field


def example_of(command: type) -> str:
    """Return the example that ends a command's docstring."""
    _, _, example = inspect.cleandoc(command.__doc__ or "").rpartition("Example: ")
    return " ".join(example.split())


def _check_aliases(options: Sequence[Option], args: Sequence[str]) -> None:
    """Refuse an option that is given under two names with different values.

    tyro would silently take the last value.

    Raises:
        ConfigError: an option has two values.
    """
    for option in options:
        if not option.aliases or not option.takes_value:
            continue
        given = list(find_values(args, option.names))
        for written, value in given:
            first, first_value = given[0]
            if written != first and value != first_value:
                raise ConfigError(
                    f"{written} must be the same as {first} ({first_value}), got {value}; give one "
                    "of the two"
                )


def _split_name(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Split a command line into the name of the command, of one word or two, and its arguments.

    Raises:
        ConfigError: no command has that name.
    """
    for length in (2, 1):
        name = " ".join(argv[:length])
        if name in COMMANDS:
            return name, list(argv[length:])
    first = argv[0]
    if is_command_group(argv[:1]):
        known = _names_in_group(first)
        got = " ".join(argv[:2])
        hint = suggest_name(got, known)
        raise ConfigError(
            f"titan-ft {first} must be one of {', '.join(known)}, got {got!r}; {hint}see titan-ft "
            "--help"
        )
    first_words = [name.partition(" ")[0] for name in COMMANDS]
    known = list(dict.fromkeys(first_words))
    hint = suggest_name(first, known)
    raise ConfigError(
        f"the command must be one of {', '.join(known)}, got {first!r}; {hint}see titan-ft --help"
    )


def is_command_group(words: Sequence[str]) -> bool:
    """True if several commands begin with these words, such as "slurm"."""
    return bool(words) and bool(_names_in_group(" ".join(words)))


def _names_in_group(group: str) -> list[str]:
    return [name for name in COMMANDS if name.startswith(f"{group} ")]


def _place_config(positionals: Sequence[str], args: list[str]) -> list[str]:
    """Move the value of --config to the front, for scripts that give CONFIG as an option."""
    if "CONFIG" not in positionals:
        return args
    for position, word in enumerate(args):
        name, equals, value = word.partition("=")
        if name != "--config":
            continue
        if equals:
            return [value, *args[:position], *args[position + 1 :]]
        if position + 1 < len(args):
            return [args[position + 1], *args[:position], *args[position + 2 :]]
        raise ConfigError("--config must be followed by a path, got nothing; give it")
    return args


def _join_values(args: list[str]) -> list[str]:
    """Write "--option value" as "--option=value" if the value is options of another program.

    Such a value begins with --, and tyro would take it for a further option.
    """
    joined: list[str] = []
    for word in args:
        if joined and joined[-1] in OPTIONS_OF_OPTIONS:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def describe_commands(group: str = "") -> str:
    """Return the help of `titan-ft`, or of a group of its commands."""
    names = list(COMMANDS)
    program = "titan-ft"
    if group:
        names = _names_in_group(group)
        program = f"titan-ft {group}"
    column = max(map(len, names)) + 4
    lines = [
        f"usage: {program} COMMAND [OPTIONS]",
        "",
        "Fault-tolerant data parallelism for torchtitan.",
        "",
    ]
    for name in names:
        text = f"  {name}".ljust(column) + _paragraphs(COMMANDS[name])[0]
        lines.append(_wrap(text, " " * column))
    more = (
        "titan-ft COMMAND --help tells more of each; titan-ft --version (-V) prints the versions."
    )
    return "\n".join([*lines, "", _wrap(more)])


def describe_command(command: type) -> str:
    """Describe a command in lines that no terminal breaks inside a word.

    tyro joins lines that begin with a letter, so the lines are indented.
    """
    return "\n\n".join(_wrap(paragraph, "  ") for paragraph in _paragraphs(command))


def describe_version() -> str:
    """Return the versions of titan-ft and of its dependencies."""
    own, *others = [f"{name} {version}" for name, version in versions().items()]
    return f"{own.replace('_', '-')} ({', '.join(others)})"


def _paragraphs(command: type) -> list[str]:
    text = inspect.cleandoc(command.__doc__ or "")
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
