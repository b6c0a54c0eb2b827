# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft logs`: print why groups of a run ended."""

from __future__ import annotations

from collections.abc import Sequence

from titan_ft.cli.read_record import read_record
from titan_ft.config import ConfigError, check_folder
from titan_ft.history.outcomes.logs import show_logs
from titan_ft.options import Logs


def run(command: Logs, worker_args: Sequence[str]) -> int:
    """Print the reasons, each with the end of its log."""
    check_folder("RUN_DIR", command.run_dir)
    if command.lines < 1:
        raise ConfigError(f"--lines must be >= 1, got {command.lines}; leave it out for 30")
    try:
        record = read_record(command.run_dir)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if command.group is not None and command.group not in record.groups:
        there = ", ".join(map(str, record.groups))
        raise ConfigError(f"--group must be a group of the run ({there}), got {command.group}")
    print("\n".join(show_logs(record, command.run_dir, command.group, command.lines)))
    return 0
