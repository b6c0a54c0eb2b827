# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""`titan-ft report`: sum up a run, or compare two."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from titan_ft.cli.read_record import read_record
from titan_ft.config import ConfigError, check_folder
from titan_ft.history.terminal import show
from titan_ft.options import Report
from titan_ft.run.paths import RunPaths


def run(command: Report, worker_args: Sequence[str]) -> int:
    """Print the figures as tables and write the page, or print the figures as JSON."""
    if command.other is not None and command.against is not None:
        raise ConfigError(
            f"--against must not come with a second run, got {command.against}; it is the same"
        )
    other = command.other or command.against
    check_folder("RUN_DIR", command.run_dir)
    if other is not None:
        check_folder("RUN_DIR2", other)
    try:
        record = read_record(command.run_dir)
        second = None if other is None else read_record(other)
    except ConfigError:
        raise
    except ValueError as error:
        print(f"titan-ft report: {error}", file=sys.stderr)
        return 1
    if command.json:
        from titan_ft.history.report.facts import report_figures

        figures = report_figures(record, second)
        if second is not None:
            figures = figures | {"other": report_figures(second)}
        print(json.dumps(figures, indent=2))
        return 0
    folder = command.out or RunPaths(command.run_dir).report
    if second is not None and other is not None:
        from titan_ft.history.report.compare import (
            make_comparison_table,
            name_runs,
            write_comparison,
        )

        names = name_runs([command.run_dir, other])
        show(make_comparison_table([record, second], names))
        page = write_comparison([record, second], names, folder)
    else:
        from titan_ft.history.report.page import write_report
        from titan_ft.history.summary import make_summary_table, summarize

        show(make_summary_table(summarize(record)))
        page = write_report(record, folder, run_dir=command.run_dir)
    print(f"page: {page}")
    return 0
