# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Parse the command line of `titan-ft`, and run the module of its command."""

from __future__ import annotations

import importlib
import os
import signal
import sys

from titan_ft.cli.command_line import describe_commands, describe_version, is_command_group, parse
from titan_ft.cli.module_job import place_toml
from titan_ft.config import ConfigError
from titan_ft.options import COMMANDS, TAKES_FLAGS
from titan_ft.run.appender import DISK_ERRNOS
from titan_ft.run.output import replace_unprintable
from titan_ft.system.ownership import write_for_owner_only


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status: 0 success, 1 failure, 2 bad usage or config, 130
    Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    replace_unprintable()
    write_for_owner_only()
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # here, where a reader that is gone is no traceback
    except ConfigError as error:
        print(f"titan-ft: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # a command without an end of its own for it
        return 128 + signal.SIGINT
    except BrokenPipeError:  # who reads, such as head, has seen enough
        _print_no_more()
        return 1
    except OSError as error:
        if error.errno not in DISK_ERRNOS or error.filename is not None:
            raise
        _print_no_more()
        why = f"got an error of its disk ({error.strerror})"
        print(
            f"titan-ft: the output must go where it can be written, {why}; send it elsewhere",
            file=sys.stderr,
        )
        return 2


def _print_no_more() -> None:
    """Discard further output: the interpreter flushes stdout again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    end = argv.index("--") if "--" in argv else len(argv)
    own, worker_args = argv[:end], argv[end + 1 :]
    match own:
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
            own = [*named, "--help"]
    command = parse(place_toml(own))
    if argv[end:] and not isinstance(command, TAKES_FLAGS):
        got = " ".join(argv[end:])
        raise ConfigError(
            f"titan-ft {own[0]} must be without torchtitan's flags, got {got!r}; it starts no "
            "workers"
        )
    name = next(name for name, kind in COMMANDS.items() if type(command) is kind)
    module = importlib.import_module(f"titan_ft.cli.{name.replace(' ', '_')}")
    status: int = module.run(command, worker_args)
    return status
