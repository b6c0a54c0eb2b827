# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Parse the command line of `titan-ft`, and run the module of its command."""

from __future__ import annotations

import importlib
import os
import signal
import sys

from titan_ft.cli.command_line import describe_commands, describe_version, is_command_group, parse
from titan_ft.cli.module_job import replace_module_by_toml
from titan_ft.config import ConfigError
from titan_ft.options import COMMANDS, TAKES_FLAGS
from titan_ft.run.appender import DISK_ERRNOS
from titan_ft.run.output import replace_unprintable
from titan_ft.system.ownership import write_for_owner_only


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    Returns:
        0 for success, 1 for a failure, 2 for bad usage or a wrong config, and 128 + the signal's
        number after a signal: 130 for Ctrl-C.
    """
    if argv is None:
        argv = sys.argv[1:]
    replace_unprintable()
    write_for_owner_only()
    try:
        try:
            return _run(argv)
        finally:
            # Not left to the end of the interpreter, where a closed pipe would print a traceback.
            sys.stdout.flush()
    except ConfigError as error:
        print(f"titan-ft: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # The command does not handle Ctrl-C itself.
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of the output, such as head, has ended.
        _discard_output()
        return 1
    except OSError as error:
        # An error with a file name is about a file of the command, not about stdout.
        if error.errno not in DISK_ERRNOS or error.filename is not None:
            raise
        _discard_output()
        got = f"got an error of its disk ({error.strerror})"
        print(
            f"titan-ft: the output must go where it can be written, {got}; send it elsewhere",
            file=sys.stderr,
        )
        return 2


def _discard_output() -> None:
    """Discard the rest of the output, which the interpreter would write at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    end = argv.index("--") if "--" in argv else len(argv)
    titan_ft_args = argv[:end]
    worker_args = argv[end + 1 :]
    match titan_ft_args:
        case []:
            print(describe_commands(), file=sys.stderr)
            return 2
        case ["-V" | "--version", *_]:
            print(describe_version())
            return 0
        case ["-h" | "--help"] | ["help"]:
            print(describe_commands())
            return 0
        case [*named] if is_command_group(named):
            print(describe_commands(" ".join(named)), file=sys.stderr)
            return 2
        case ["help", *named] | [*named, "-h" | "--help" | "help"] if is_command_group(named):
            print(describe_commands(" ".join(named)))
            return 0
        case ["help", *named]:
            titan_ft_args = [*named, "--help"]
    command = parse(replace_module_by_toml(titan_ft_args))
    if argv[end:] and not isinstance(command, TAKES_FLAGS):
        got = " ".join(argv[end:])
        raise ConfigError(
            f"titan-ft {titan_ft_args[0]} must be without torchtitan's flags, got {got!r}; it "
            "starts no workers"
        )
    module = importlib.import_module(f"titan_ft.cli.{_module_name(command)}")
    status: int = module.run(command, worker_args)
    return status


def _module_name(command: object) -> str:
    for name, kind in COMMANDS.items():
        if type(command) is kind:
            return name.replace(" ", "_")
    raise AssertionError(f"{type(command)} is no command")
