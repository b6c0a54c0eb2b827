# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Parse the command line of `titan-ft` and hand over to what carries it out."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from titan_ft.config import ConfigError


@dataclass(frozen=True)
class Launch:
    """Start a lighthouse and supervised replica groups on this host, and show how they do.

    What follows a -- goes to the workers as torchtitan's own flags. The exit status is 0 when all groups finished, 1
    when training failed or was stopped, 2 when the usage or the config is wrong.
    """

    config: tyro.conf.Positional[Path]
    """TOML of the run, as for torchtitan."""
    replicas: int
    """Number of replica groups; each trains on its own share of the data."""
    ranks_per_replica: int
    """Number of processes of each group; with GPUs, one GPU each."""
    run_dir: Path
    """Folder for logs, events and everything else of the run; it must not hold another run, except with --resume."""
    max_restarts: int = 100
    """How often each group is started again before it counts as failed."""
    lighthouse_port: int = 0
    """Port of the lighthouse; 0 lets the system choose one."""
    spares: int = 0
    """Groups in reserve: each takes the place of a group that is out of restarts."""
    drain_timeout: float | None = None
    """Seconds that groups get to finish their step and leave after Ctrl-C or SIGTERM; when left out, what
    fault_tolerance.drain_timeout_seconds says."""
    no_standby: bool = False
    """Keep no processes ready that have imported everything; a restarted group then takes as long as its imports."""
    resume: bool = False
    """Let --run-dir hold an earlier run, and go on from its last checkpoint."""
    minutes: float = 0.0
    """End the run in order so long after its first step, which is a success if every group could leave; 0 trains to the
    last step."""
    chaos: Path | None = None
    """TOML of the faults to inject into the run, such as configs/chaos/every_15s.toml; those inside the workers need
    fault_tolerance.chaos = true."""
    chaos_seed: int | None = None
    """Seed of the faults, in place of the one in their TOML: the same seed brings the same faults."""
    metrics_port: str = ""
    """PORT or HOST:PORT where Prometheus finds the run's figures; a PORT alone is open to this host only."""


@dataclass(frozen=True)
class Lighthouse:
    """Run a lighthouse, where the groups of a run meet, until SIGTERM or Ctrl-C."""

    bind: str = "[::]:29510"
    """HOST:PORT to listen at, with a numeric host; port 0 lets the system choose one."""
    min_replicas: int = 1
    """Fewest groups of a quorum. Leave it at 1: fault_tolerance.min_replica_size is what commits wait for, and a group
    that is left alone at the end of a run would wait here for ever."""
    heartbeat_timeout_ms: int = 500
    """Milliseconds without a heartbeat after which a group counts as gone."""
    quorum_tick_ms: int = 20
    """Milliseconds between two looks at who is there."""
    join_timeout_ms: int = 60_000
    """Milliseconds, from the first request, to wait for groups that heartbeat but have not asked for the quorum yet."""


@dataclass(frozen=True)
class Chaos:
    """Break a running job on purpose: one FAULT now, or a whole --plan, until that or the job ends, or Ctrl-C.

    The exit status is 0 when the fault was injected or the plan carried out, 1 when the fault could not be injected, 2
    when the usage is wrong or no such job runs. Processes that were stopped go on in any case.
    """

    run_dir: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="RUN_DIR")] = None
    """The --run-dir of a running job."""
    fault: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="FAULT")] = None
    """A fault to inject now; see --list."""
    replica: int | None = None
    """Group that FAULT hits; left to chance when left out."""
    rank: int | None = None
    """Rank of it that FAULT hits; left to chance when left out."""
    settings: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="NAME=VALUE ...")] = ()
    """Parameters of FAULT, such as seconds=5."""
    plan: Path | None = None
    """TOML of a plan to carry out, such as those in configs/chaos."""
    seed: int | None = None
    """Replays the choices of an earlier plan or fault; a new one is drawn and told when left out."""
    for_seconds: float | None = None
    """End after this time."""
    list_faults: Annotated[bool, tyro.conf.arg(name="list")] = False
    """Print the faults and do nothing."""


@dataclass(frozen=True)
class Check:
    """Verify the promises of a run from its events: each holds, does not hold, or cannot be told.

    The exit status is 0 when everything asked holds, else 1.
    """

    run_dir: tyro.conf.Positional[Path]
    """The --run-dir of a launch, or any folder with events/*.jsonl."""
    against: Path | None = None
    """The --run-dir of a run without failures, of the same config: its loss curve must be followed."""
    json: bool = False
    """Print all findings as JSON."""


@dataclass(frozen=True)
class Top:
    """Show a run live in the terminal: its groups, its loss and what happens to it.

    Without a terminal it is shown once. q or Ctrl-C leaves; a run that is over is shown as it ended.
    """

    run_dir: tyro.conf.Positional[Path]
    """The --run-dir of a launch, or any folder with events/*.jsonl."""
    once: bool = False
    """Show it once, as it is now."""


@dataclass(frozen=True)
class Report:
    """Sum up a run: figures on the terminal, a page with plots in RUN_DIR/report (--json: figures only)."""

    run_dir: tyro.conf.Positional[Path]
    """The --run-dir of a launch, or any folder with events/*.jsonl."""
    json: bool = False
    """Print the figures as JSON, and write no page."""
    out: Path | None = None
    """Folder of the page (index.html) and its plots; when left out, RUN_DIR/report."""
    against: Path | None = None
    """The --run-dir of a run without failures, to compare the loss curve with."""


@dataclass(frozen=True)
class Audit:
    """Find lost and repeated batches of a run in its events.

    The exit status is 0 when every batch was trained once, 1 when some were lost or repeated or it cannot be told.
    """

    run_dir: tyro.conf.Positional[Path]
    """The --run-dir of a launch, or any folder with events/*.jsonl."""
    json: bool = False
    """Print all findings as JSON."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status: 0 success, 1 failure, 2 bad usage or config."""
    argv = sys.argv[1:] if argv is None else argv
    own, worker_args = _split(argv)
    command = tyro.cli(
        Annotated[Launch, tyro.conf.subcommand("launch")]
        | Annotated[Lighthouse, tyro.conf.subcommand("lighthouse")]
        | Annotated[Chaos, tyro.conf.subcommand("chaos")]
        | Annotated[Check, tyro.conf.subcommand("check")]
        | Annotated[Top, tyro.conf.subcommand("top")]
        | Annotated[Report, tyro.conf.subcommand("report")]
        | Annotated[Audit, tyro.conf.subcommand("audit")],
        prog="titan-ft",
        description="Fault-tolerant data parallelism for torchtitan.",
        args=own,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        match command:
            case Launch():
                return _launch(command, worker_args)
            case Lighthouse():
                return _lighthouse(command)
            case Chaos():
                return _chaos(command)
            case Check():
                return _check(command)
            case Top():
                return _top(command)
            case Report():
                return _report(command)
            case Audit():
                return _audit(command)
    except ConfigError as error:
        print(f"titan-ft: {error}", file=sys.stderr)
        return 2


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line at its first --."""
    if "--" not in argv:
        return argv, []
    position = argv.index("--")
    return argv[:position], argv[position + 1 :]


def _launch(command: Launch, worker_args: list[str]) -> int:
    from titan_ft.chaos.plan import load_plan
    from titan_ft.launch.launch_plan import LaunchPlan
    from titan_ft.launch.local import launch

    if command.chaos is None and command.chaos_seed is not None:
        raise ConfigError(
            f"--chaos-seed must come with --chaos FILE, got {command.chaos_seed} alone; give the plan too"
        )
    plan = LaunchPlan(
        config=command.config,
        num_replicas=command.replicas,
        num_ranks=command.ranks_per_replica,
        run_dir=command.run_dir,
        max_restarts=command.max_restarts,
        lighthouse_port=command.lighthouse_port,
        spares=command.spares,
        drain_timeout=command.drain_timeout,
        standby=not command.no_standby,
        resume=command.resume,
        minutes=command.minutes,
        chaos=None if command.chaos is None else load_plan(command.chaos, command.chaos_seed),
        metrics=command.metrics_port,
        worker_args=worker_args,
    )
    return launch(plan)


def _lighthouse(command: Lighthouse) -> int:
    from titan_ft.launch.lighthouse import LighthouseSettings, serve

    settings = {name: value for name, value in vars(command).items() if name != "bind"}
    return serve(command.bind, LighthouseSettings(**settings))


def _chaos(command: Chaos) -> int:
    from titan_ft.chaos.command import ChaosCommand, catalogue, run_chaos

    if command.list_faults:
        print(catalogue())
        return 0
    if command.run_dir is None:
        raise ConfigError("RUN_DIR must be the folder of a running job, got none; give the --run-dir of its launch")
    chaos = ChaosCommand(
        run_dir=command.run_dir,
        fault=command.fault,
        replica=command.replica,
        rank=command.rank,
        settings=command.settings,
        plan_file=command.plan,
        seed=command.seed,
        for_seconds=command.for_seconds,
    )
    return run_chaos(chaos)


def _check(command: Check) -> int:
    from titan_ft.history.check import check_folders, check_table
    from titan_ft.history.terminal import show
    from titan_ft.run.paths import RunPaths

    _require_folders(command.run_dir, command.against)
    against = None if command.against is None else RunPaths(command.against).events
    report = check_folders(RunPaths(command.run_dir).events, against)
    if command.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        show(check_table(report))
    return 0 if report.verdict == "holds" else 1


def _top(command: Top) -> int:
    from titan_ft.live.top import top

    return top(command.run_dir, once=command.once)


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
