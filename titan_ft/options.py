# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""What each command of `titan-ft` takes: its arguments, with the text of its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


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
class LighthouseSettings:
    """How a lighthouse judges who is there."""

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
class Lighthouse(LighthouseSettings):
    """Run a lighthouse, where the groups of a run meet, until SIGTERM or Ctrl-C."""

    bind: str = "[::]:29510"
    """HOST:PORT to listen at, with a numeric host; port 0 lets the system choose one."""


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
class _OfRun:
    run_dir: tyro.conf.Positional[Path]
    """The --run-dir of a launch, or any folder with events/*.jsonl."""


@dataclass(frozen=True)
class Check(_OfRun):
    """Verify the promises of a run from its events: each holds, does not hold, or cannot be told.

    The exit status is 0 when everything asked holds, else 1.
    """

    against: Path | None = None
    """The --run-dir of a run without failures, of the same config: its loss curve must be followed."""
    json: bool = False
    """Print all findings as JSON."""


@dataclass(frozen=True)
class Top(_OfRun):
    """Show a run live in the terminal: its groups, its loss and what happens to it.

    Without a terminal it is shown once. q or Ctrl-C leaves; a run that is over is shown as it ended.
    """

    once: bool = False
    """Show it once, as it is now."""


@dataclass(frozen=True)
class Curves(_OfRun):
    """Write the job's curves for TensorBoard, of a run whose groups were started one by one, and follow it to its end.

    `titan-ft launch` does so by itself. A run that is over is written anew as a whole. Ctrl-C leaves.
    """

    out: Path | None = None
    """Folder of the curves, which is theirs alone; when left out, RUN_DIR/tb/job."""


@dataclass(frozen=True)
class Report(_OfRun):
    """Sum up a run: figures on the terminal, a page with plots in RUN_DIR/report (--json: figures only)."""

    json: bool = False
    """Print the figures as JSON, and write no page."""
    out: Path | None = None
    """Folder of the page (index.html) and its plots; when left out, RUN_DIR/report."""
    against: Path | None = None
    """The --run-dir of a run without failures, to compare the loss curve with."""


@dataclass(frozen=True)
class Audit(_OfRun):
    """Find lost and repeated batches of a run in its events.

    The exit status is 0 when every batch was trained once, 1 when some were lost or repeated or it cannot be told.
    """

    json: bool = False
    """Print all findings as JSON."""
