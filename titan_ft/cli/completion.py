# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft completion`: print a script for a shell."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from titan_ft.cli.command_line import TYRO_CONFIG
from titan_ft.options import COMMANDS, Completion


def run(command: Completion, worker_args: Sequence[str]) -> int:
    """Print the script that lets a shell complete commands and their options."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        tyro.cli(
            _union("", list(COMMANDS)),
            prog="titan-ft",
            args=["--tyro-print-completion", command.shell],
            config=TYRO_CONFIG,
        )
    print(printed.getvalue())
    return 0


def _union(group: str, names: Sequence[str]) -> Any:
    """Return commands as tyro's subcommands: a union of types. A group of commands is a union, too.

    Args:
        group: prefix of the names, such as "slurm "; empty for all commands.
    """
    subcommands: dict[str, Any] = {}
    if group:
        # tyro makes a subcommand only of two types or more, and a group has a help besides.
        subcommands["help"] = Annotated[None, tyro.conf.subcommand("help")]
    for name in names:
        first = name.removeprefix(group).lstrip().partition(" ")[0]
        inner = [other for other in names if other.startswith(f"{group}{first} ")]
        kind = _union(f"{group}{first} ", inner) if inner else COMMANDS[name]
        subcommands[first] = Annotated[kind, tyro.conf.subcommand(first)]
    union, *others = subcommands.values()
    for other in others:
        union = union | other
    return union
