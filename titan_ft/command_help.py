# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Read the command line of `titan-ft` into one of the classes in `options`; describe and complete its commands."""

from __future__ import annotations

import contextlib
import inspect
import io
import textwrap
from collections.abc import Sequence
from functools import reduce
from typing import Annotated, Any

import tyro

from titan_ft import versions
from titan_ft.config import ConfigError, closest
from titan_ft.options import COMMANDS, OPTIONS_OF_OPTIONS, TAKES_FLAGS
from titan_ft.usage import example_of, find_contradiction, find_mistake, read_options, refusing

_WIDTH = 80
_PARSER = (tyro.conf.FlagCreatePairsOff,)


def parse(argv: Sequence[str]) -> Any:
    """Return what is asked for, an object of one of the classes in `options`.

    Raises:
        ConfigError: the arguments are wrong.
    """
    name, args = _split_name(argv)
    command = COMMANDS[name]
    args = _join_values(_place_config(command, args))

    def unknown(option: str, known: list[str]) -> str:
        if "." in option and issubclass(command, TAKES_FLAGS):
            return f"{option} must come after a --, as all of torchtitan's flags: titan-ft {name} ... -- {option}=..."
        return f"{option} is no option of titan-ft {name}; {closest(option, known)}see titan-ft {name} --help"

    if mistake := find_contradiction(args, read_options(command)):
        raise ConfigError(mistake)
    description = describe_command(command)
    return refusing(
        lambda: tyro.cli(command, prog=f"titan-ft {name}", args=args, description=description, config=_PARSER),
        lambda: find_mistake(args, read_options(command), unknown, example_of(command)),
    )


def _split_name(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Split a command line into the name of the command, of one word or two, and its arguments.

    Raises:
        ConfigError: there is no such command.
    """
    for length in (2, 1):
        name = " ".join(argv[:length])
        if name in COMMANDS:
            return name, list(argv[length:])
    first = argv[0]
    if is_command_group(argv[:1]):
        known, got = _names(first), " ".join(argv[:2])
        hint = closest(got, known)
        raise ConfigError(f"titan-ft {first} must be one of {', '.join(known)}, got {got!r}; {hint}see titan-ft --help")
    known = [*dict.fromkeys(name.partition(" ")[0] for name in COMMANDS)]
    hint = closest(first, known)
    raise ConfigError(f"the command must be one of {', '.join(known)}, got {first!r}; {hint}see titan-ft --help")


def is_command_group(words: Sequence[str]) -> bool:
    """True if words are what several commands begin with, such as "slurm"."""
    return bool(words) and bool(_names(" ".join(words)))


def _names(group: str) -> list[str]:
    return [name for name in COMMANDS if name.startswith(f"{group} ")]


def _place_config(command: type, args: list[str]) -> list[str]:
    """Put the value of --config in its place, for scripts that give CONFIG as an option."""
    if not any(option.name == "CONFIG" for option in read_options(command)):
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
    """Write an option whose value begins with --, as that of sbatch does, as --option=value."""
    joined: list[str] = []
    for word in args:
        if joined and joined[-1] in OPTIONS_OF_OPTIONS:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def describe_commands(group: str = "") -> str:
    """Return the help of `titan-ft`, or of a group of its commands."""
    names = _names(group) if group else list(COMMANDS)
    column = max(map(len, names)) + 4
    shown = f"titan-ft {group}" if group else "titan-ft"
    lines = [f"usage: {shown} COMMAND [OPTIONS]", "", "Fault-tolerant data parallelism for torchtitan.", ""]
    for name in names:
        text = f"  {name}".ljust(column) + _paragraphs(COMMANDS[name])[0]
        lines.append(_wrap(text, " " * column))
    more = "titan-ft COMMAND --help tells more of each; titan-ft --version (-V) prints the versions."
    return "\n".join([*lines, "", _wrap(more)])


def describe_command(command: type) -> str:
    """Return what a command does, in lines that no terminal breaks inside a word.

    tyro joins lines that begin with a letter; the indent keeps them apart.
    """
    return "\n\n".join(_wrap(paragraph, "  ") for paragraph in _paragraphs(command))


def describe_version() -> str:
    """Return the versions of titan-ft and of what it builds on."""
    own, *others = (f"{name} {version}" for name, version in versions().items())
    return f"{own.replace('_', '-')} ({', '.join(others)})"


def complete(shell: str) -> str:
    """Return the script that lets a shell complete commands and their options."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        tyro.cli(_union("", list(COMMANDS)), prog="titan-ft", args=["--tyro-print-completion", shell], config=_PARSER)
    return printed.getvalue()


def _union(group: str, names: Sequence[str]) -> Any:
    """Return the commands as tyro knows subcommands: a union of types, in which a group is a union again."""
    # tyro makes no subcommand of a single type; and a group has a help, too.
    parts: dict[str, Any] = {"help": Annotated[None, tyro.conf.subcommand("help")]} if group else {}
    for name in names:
        first = name.removeprefix(group).lstrip().partition(" ")[0]
        inner = [other for other in names if other.startswith(f"{group}{first} ")]
        kind = _union(f"{group}{first} ", inner) if inner else COMMANDS[name]
        parts[first] = Annotated[kind, tyro.conf.subcommand(first)]
    return reduce(lambda one, other: one | other, parts.values())


def _paragraphs(command: type) -> list[str]:
    text = inspect.cleandoc(command.__doc__ or "")
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
