# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Parse the command line of `titan-ft` and hand over to what carries it out."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from titan_ft.command_help import complete, describe_commands, describe_version, is_command_group, parse
from titan_ft.config import ConfigError, check_folder
from titan_ft.options import (
    TAKES_FLAGS,
    Chaos,
    Check,
    Completion,
    Curves,
    Dashboard,
    Group,
    Kubernetes,
    Launch,
    Lighthouse,
    Logs,
    Report,
    ShowConfig,
    SlurmSubmit,
    Top,
)
from titan_ft.run.appender import DISK_ERRNOS
from titan_ft.run.output import protect_output, replace_unprintable

if TYPE_CHECKING:
    from titan_ft.history.record import RunRecord
    from titan_ft.history.reread import Reread


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status: 0 success, 1 failure, 2 bad usage or config, 130 Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    replace_unprintable()
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
        print(f"titan-ft: the output must go where it can be written, {why}; send it elsewhere", file=sys.stderr)
        return 2


def _print_no_more() -> None:
    """Let the interpreter, which flushes again at its end, write what is left nowhere."""
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
    command = parse(own)
    if argv[end:] and not isinstance(command, TAKES_FLAGS):
        got = " ".join(argv[end:])
        raise ConfigError(f"titan-ft {own[0]} must be without torchtitan's flags, got {got!r}; it starts no workers")
    match command:
        case Launch():
            return _launch(command, worker_args)
        case ShowConfig():
            from titan_ft.resolved_config import show_config

            return show_config(command, worker_args)
        case Lighthouse():
            from titan_ft.launch.lighthouse import serve

            protect_output()  # its work goes on if nothing can be printed; that of others is what they print
            return serve(command)
        case Chaos():
            return _chaos(command)
        case Check():
            return _check(command)
        case Top():
            from titan_ft.live.top import top

            return top(command.run_dir, once=command.once)
        case Logs():
            return _logs(command)
        case Curves():
            from titan_ft.live.curves import write_curves

            protect_output()
            return write_curves(command.run_dir, command.out)
        case Report():
            return _report(command)
        case Group():
            from titan_ft.cluster.group import run_group

            return run_group(command, worker_args)
        case SlurmSubmit():
            from titan_ft.cluster.slurm import submit

            return submit(command, worker_args)
        case Kubernetes():
            from titan_ft.cluster.kubernetes import render

            print(render(command, worker_args))
            return 0
        case Dashboard():
            from titan_ft.live import ALERTS, DASHBOARD

            print((ALERTS if command.alerts else DASHBOARD).read_text(encoding="utf-8"), end="")
            return 0
        case Completion():
            print(complete(command.shell))
            return 0
    raise AssertionError(f"no such command: {command}")


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
    plan = LaunchPlan(command, worker_args, chaos=chaos)
    for note in plan.notes:
        print(f"titan-ft: {note}", file=sys.stderr)
    if command.dry_run:
        from titan_ft.launch.dry_run import describe

        print(describe(plan))
        return 0
    protect_output()
    return launch(plan)


def _chaos(command: Chaos) -> int:
    from titan_ft.chaos.command import catalogue, run_chaos

    if command.list_faults:
        print(catalogue())
        return 0
    protect_output()
    return run_chaos(command)


def _logs(command: Logs) -> int:
    from titan_ft.history.logs import show_logs

    check_folder("RUN_DIR", command.run_dir)
    if command.lines < 1:
        raise ConfigError(f"--lines must be >= 1, got {command.lines}; leave it out for 30")
    try:
        record = _read(command.run_dir)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if command.group is not None and command.group not in record.groups:
        there = ", ".join(map(str, record.groups))
        raise ConfigError(f"--group must be a group of the run ({there}), got {command.group}")
    print("\n".join(show_logs(record, command.run_dir, command.group, command.lines)))
    return 0


def _check(command: Check) -> int:
    from titan_ft.history.audit import Audit as Audited
    from titan_ft.history.audit import audit
    from titan_ft.history.check import check, check_table, nothing_known
    from titan_ft.history.terminal import show

    check_folder("RUN_DIR", command.run_dir)
    if command.against is not None:
        check_folder("--against", command.against)
    try:
        record = _read(command.run_dir)
        against = None if command.against is None else _read(command.against)
    except ConfigError:
        raise
    except ValueError as error:  # a history that is damaged tells nothing for sure
        if not command.json:
            print(f"verdict: unknown: {error}")
            return 1
        verdicts, audited = nothing_known(str(error)), Audited(unknown=[str(error)])
    else:
        again = _reread(record, command.run_dir) if command.reread else None
        verdicts, audited = check(record, against, again), audit(record)
        if again is not None:
            audited = again.apply(audited)
    if command.json:
        print(json.dumps(verdicts.to_dict() | {"audit": audited.to_dict()}, indent=2))
    else:
        show(check_table(verdicts))
    return verdicts.exit_status


def _reread(record: RunRecord, run_dir: Path) -> Reread:
    """Read the data of a run again. Data or a config that cannot be read any more make it unknown."""
    from titan_ft.history.reread import Reread
    from titan_ft.training.reread import reread

    try:
        return reread(record, run_dir)
    except Exception as error:  # noqa: BLE001  # of the user's own loader, a file server, a missing module
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Reread(unknown=[f"the data cannot be read again: {text}"])


def _report(command: Report) -> int:
    from titan_ft.history.report.facts import report_figures
    from titan_ft.history.report.page import write_report
    from titan_ft.history.summary import summarize, summary_table
    from titan_ft.history.terminal import show
    from titan_ft.run.paths import RunPaths

    if command.other is not None and command.against is not None:
        raise ConfigError(f"--against must not come with a second run, got {command.against}; it is the same")
    other = command.other or command.against
    check_folder("RUN_DIR", command.run_dir)
    if other is not None:
        check_folder("RUN_DIR2", other)
    try:
        record = _read(command.run_dir)
        second = None if other is None else _read(other)
    except ConfigError:
        raise
    except ValueError as error:
        print(f"titan-ft report: {error}", file=sys.stderr)
        return 1
    if command.json:
        figures = report_figures(record, second)
        print(json.dumps(figures if second is None else figures | {"other": report_figures(second)}, indent=2))
        return 0
    folder = command.out or RunPaths(command.run_dir).report
    if second is not None and other is not None:
        from titan_ft.history.report.compare import compare_table, name_runs, write_comparison

        names = name_runs([command.run_dir, other])
        show(compare_table([record, second], names))
        page = write_comparison([record, second], names, folder)
    else:
        show(summary_table(summarize(record)))
        page = write_report(record, folder, run_dir=command.run_dir)
    print(f"page: {page}")
    return 0


def _read(run_dir: Path) -> RunRecord:
    """Read the events of a run.

    Raises:
        ConfigError: there are none.
        ValueError: one of the files is damaged; says which line, and what to do.
    """
    from titan_ft.history.record import RunRecord
    from titan_ft.run.paths import RunPaths

    try:
        record = RunRecord.read(RunPaths(run_dir).events)
    except OSError as error:
        what = "a file of events" if str(error.filename).endswith(".jsonl") else "a folder with events"
        raise ValueError(f"{error.filename} must be {what}, got {error.strerror}; mend or remove it") from error
    if not record.events:
        below = (
            f"the folder above, {run_dir.absolute().parent}"
            if any(run_dir.glob("*.jsonl"))
            else "the --run-dir of a run"
        )
        raise ConfigError(
            f"RUN_DIR must be the folder of a run, got {run_dir}; it has no events (events/*.jsonl): give {below}"
        )
    return record
