# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Parse the command line of `titan-ft` and hand over to what carries it out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tyro

from titan_ft.config import ConfigError
from titan_ft.options import Audit, Chaos, Check, Curves, Launch, Lighthouse, Report, Top


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status: 0 success, 1 failure, 2 bad usage or config."""
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    command = tyro.cli(
        Launch | Lighthouse | Chaos | Check | Top | Curves | Report | Audit,
        prog="titan-ft",
        description="Fault-tolerant data parallelism for torchtitan.",
        args=argv[:end],
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        match command:
            case Launch():
                return _launch(command, argv[end + 1 :])
            case Lighthouse():
                from titan_ft.launch.lighthouse import serve

                return serve(command.bind, command)
            case Chaos():
                return _chaos(command)
            case Check():
                return _check(command)
            case Top():
                from titan_ft.live.top import top

                return top(command.run_dir, once=command.once)
            case Curves():
                from titan_ft.live.curves import write_curves

                return write_curves(command.run_dir, command.out)
            case Report():
                return _report(command)
            case Audit():
                return _audit(command)
    except ConfigError as error:
        print(f"titan-ft: {error}", file=sys.stderr)
        return 2


def _launch(command: Launch, worker_args: list[str]) -> int:
    from titan_ft.launch.launch_plan import LaunchPlan
    from titan_ft.launch.local import launch

    if command.chaos is None and command.chaos_seed is not None:
        raise ConfigError(
            f"--chaos-seed must come with --chaos FILE, got {command.chaos_seed} alone; give the plan too"
        )
    chaos = None
    if command.chaos is not None:
        from titan_ft.chaos.plan_file import load_plan  # what breaks a run is loaded where it is asked for

        chaos = load_plan(command.chaos, command.chaos_seed)
    return launch(LaunchPlan(command, worker_args, chaos=chaos))


def _chaos(command: Chaos) -> int:
    from titan_ft.chaos.command import catalogue, run_chaos

    if command.list_faults:
        print(catalogue())
        return 0
    return run_chaos(command)


def _check(command: Check) -> int:
    from titan_ft.history.check import check_folders, check_table
    from titan_ft.history.terminal import show
    from titan_ft.run.paths import RunPaths

    _require_folders(command.run_dir, command.against)
    against = None if command.against is None else RunPaths(command.against).events
    verdicts = check_folders(RunPaths(command.run_dir).events, against)
    if command.json:
        print(json.dumps(verdicts.to_dict(), indent=2))
    else:
        show(check_table(verdicts))
    return 0 if verdicts.verdict == "holds" else 1


def _report(command: Report) -> int:
    from titan_ft.history.record import RunRecord
    from titan_ft.history.report.facts import report_figures
    from titan_ft.history.report.page import write_report
    from titan_ft.history.summary import summarize, summary_table
    from titan_ft.history.terminal import show
    from titan_ft.run.paths import RunPaths

    _require_folders(command.run_dir, command.against)
    try:
        record = RunRecord.read(RunPaths(command.run_dir).events)
        against = None if command.against is None else RunRecord.read(RunPaths(command.against).events)
    except ValueError as error:
        print(f"titan-ft report: {error}", file=sys.stderr)
        return 1
    if not record.events:
        print(f"titan-ft report: {command.run_dir} has no events (events/*.jsonl)", file=sys.stderr)
        return 1
    if command.json:
        print(json.dumps(report_figures(record, against), indent=2))
        return 0
    show(summary_table(summarize(record)))
    page = write_report(record, command.out or RunPaths(command.run_dir).report, against)
    print(f"page: {page}")
    return 0


def _require_folders(run_dir: Path, against: Path | None = None) -> None:
    """Raise ConfigError unless these are folders."""
    for name, folder in (("RUN_DIR", run_dir), ("--against", against)):
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"{name} must be the folder of a run, got {folder}; there is no such folder")


def _audit(command: Audit) -> int:
    from titan_ft.history import audit
    from titan_ft.history.record import RunRecord
    from titan_ft.history.terminal import show
    from titan_ft.run.paths import RunPaths

    _require_folders(command.run_dir)
    try:
        found = audit.audit(RunRecord.read(RunPaths(command.run_dir).events))
    except ValueError as error:  # a file that is damaged tells nothing for sure
        found = audit.Audit(unknown=[str(error)])
    if command.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        show(audit.audit_table(found))
    return 0 if found.verdict == "holds" else 1
