# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Submit a run to Slurm: a lighthouse, and an array with one element for each replica group."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from titan_ft.cluster.group import (
    check_at_least,
    check_flags,
    check_restarts,
    find_ranks_per_node,
    find_toml,
    split_options,
)
from titan_ft.config import TABLE, ConfigError, load_toml, unwritable
from titan_ft.launch.lighthouse import changed_settings
from titan_ft.launch.shared_settings import lighthouse_settings, table_overrides
from titan_ft.options import SlurmSubmit
from titan_ft.run.held import is_held
from titan_ft.run.paths import RunPaths
from titan_ft.system.ownership import make_folder
from titan_ft.system.run_folder import check_run_folder
from titan_ft.system.token import check_token, read_token_file
from titan_ft.system.whole_file import write_whole

BATCH = Path(__file__).parent / "batch"
"""Folder of the batch scripts. Jobs read it when they start, so that it must be on storage that all
nodes share.
"""

_FORGOTTEN = "Invalid job id"
"""What squeue says of a job that is over for some minutes."""


@dataclass(frozen=True)
class Submission:
    """Arguments of sbatch.

    Attributes:
        lighthouse: arguments of the lighthouse's job, and of its standby's.
        groups: arguments of the groups' array, without its dependency.
    """

    lighthouse: list[str]
    groups: list[str]

    def groups_after(self, job: str) -> list[str]:
        """Return the arguments of the groups' array, which begins when a job has."""
        return [f"--dependency=after:{job}", *self.groups]


def plan_submission(options: SlurmSubmit, flags: Sequence[str]) -> Submission:
    """Plan the submission.

    Args:
        flags: torchtitan's flags for the workers.

    Raises:
        ConfigError: an option is wrong.
    """
    config = find_toml(options.config)
    check_at_least("--replicas", options.replicas, 1)
    check_at_least("--nodes", options.nodes, 1)
    check_restarts(options.max_restarts, options.host_deaths, options.host_window)
    check_flags(flags)
    ranks = find_ranks_per_node(options.ranks_per_node, options.ranks_per_replica, options.nodes)
    if ranks is None:
        raise ConfigError(
            "--ranks-per-node must be given, got nothing; give as many as a node has GPUs, for "
            "example 8"
        )
    root = options.run_dir.resolve()
    logs = root / "logs"
    table = {**load_toml(config).get(TABLE, {}), **table_overrides(flags)}
    lighthouse = [
        *split_options("--lighthouse-options", options.lighthouse_options),
        f"--output={logs / 'lighthouse-%j.log'}",
        *(str(BATCH / "lighthouse.sbatch"), str(BATCH), sys.executable, str(root)),
        *changed_settings(lighthouse_settings(table)),
    ]
    groups = [
        f"--array=0-{options.replicas - 1}",
        f"--nodes={options.nodes}",
        *split_options("--group-options", options.group_options),
        *([f"--time={options.time}"] if options.time else []),
        f"--output={logs / 'replica-%a.log'}",
        *(str(BATCH / "replicas.sbatch"), str(BATCH), sys.executable, str(root)),
        *("--config", str(config.resolve()), "--ranks-per-node", str(ranks)),
        *("--max-restarts", str(options.max_restarts)),
        *("--host-deaths", str(options.host_deaths), "--host-window", str(options.host_window)),
        *(["--on-host-suspected", options.on_host_suspected] if options.on_host_suspected else []),
        *(["--no-zygote"] if options.no_zygote else []),
        *(["--", *flags] if flags else []),
    ]
    return Submission(lighthouse, groups)


def submit(options: SlurmSubmit, flags: Sequence[str]) -> int:
    """Submit a run, as a whole or not at all; return 0 on success, else 1.

    Raises:
        ConfigError: an option is wrong, or there is no Slurm.
    """
    plan = plan_submission(options, flags)
    if options.dry_run:
        for arguments in (*[plan.lighthouse] * (1 + options.standby), plan.groups_after("JOB")):
            print(shlex.join(["sbatch", *arguments]))
        return 0
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "sbatch must be on the PATH, got no such command; run this where jobs are submitted"
        )
    root = options.run_dir.resolve()
    _check_not_in_use(root)
    check_run_folder(root)
    try:
        _prepare(root, options.token_file)
    except OSError as error:
        raise unwritable("--run-dir", options.run_dir, error) from error
    with ExitStack() as undo:
        lighthouses: list[str] = []
        # Lighthouses without groups would wait for them without end.
        undo.callback(_cancel, lighthouses)
        for _ in range(1 + options.standby):
            job = _sbatch(plan.lighthouse)
            if job is None:
                return 1
            lighthouses.append(job)
        groups = _sbatch(plan.groups_after(lighthouses[0]))
        if groups is None:
            return 1
        undo.pop_all()
    _announce(root, groups, lighthouses)
    return 0


def _check_not_in_use(root: Path) -> None:
    """Refuse the folder of a running run, whose lighthouse and groups would be taken for this
    one's.

    Raises:
        ConfigError: a launch, or a job of an earlier submission, is running there.
    """
    given = f"--run-dir must not be in use by another job, got {root}, where"
    remedy = "or give another folder"
    if is_held(RunPaths(root)):
        raise ConfigError(f"{given} titan-ft launch is going on; wait for its end, {remedy}")
    try:
        jobs = _jobs(root).read_text().split()
    except OSError:  # nothing was submitted yet
        return
    if going_on := [job for job in jobs if _is_going_on(job)]:
        raise ConfigError(
            f"{given} job {' '.join(going_on)} is going on; scancel {' '.join(jobs)}, {remedy}"
        )


def _is_going_on(job: str) -> bool:
    """True if Slurm knows a job, or an element of an array, that has not ended.

    Raises:
        ConfigError: Slurm gives no answer. A running run would lose its token and its files.
    """
    try:
        listed = subprocess.run(
            ["squeue", "--noheader", f"--jobs={job}"], capture_output=True, text=True, check=False
        )
    except OSError:  # no squeue here
        return False
    # Slurm forgets jobs after some minutes, and then calls their ids invalid.
    if listed.returncode != 0 and _FORGOTTEN not in listed.stderr:
        why = " ".join(listed.stderr.split()) or f"status {listed.returncode}"
        raise ConfigError(
            f"squeue must say whether job {job} of --run-dir is over, got no answer ({why}); try "
            "again"
        )
    return bool(listed.stdout.strip())


def _sbatch(arguments: Sequence[str]) -> str | None:
    """Submit one job; return its id, or None after sbatch has printed its error."""
    done = subprocess.run(
        ["sbatch", "--parsable", *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        return None
    return done.stdout.strip().partition(";")[0]  # the name of the cluster may follow


def _cancel(jobs: Sequence[str]) -> None:
    if jobs:
        subprocess.run(["scancel", *jobs], check=False)


def _prepare(root: Path, token_file: Path | None) -> None:
    """Make the run's folder with its token, and remove an earlier submission's records of its jobs
    and its end.

    Raises:
        ConfigError: the token cannot be read, or others can read it.
        OSError: the folder cannot be written.
    """
    for folder in (root / "logs", root / "slurm"):
        make_folder(folder)
    _place_token(root / "token", token_file)
    stale = [
        _jobs(root),
        root / "lighthouse.json",
        RunPaths(root).finished,
        *(root / "slurm").glob("exclude-*"),
    ]
    for file in stale:
        file.unlink(missing_ok=True)


def _place_token(own: Path, given: Path | None) -> None:
    """Put the run's token into its folder: a copy of the given file, or a new token.

    Each submission draws a new one. With the former token, names of the earlier submission that
    were recorded from the network could be replayed: an older group with another config would end
    the groups of this one.
    """
    token = secrets.token_hex(32)
    if given is not None:
        token = read_token_file(given, "--token-file")
        check_token(token, is_local=False)
        if given.resolve() == own:
            return
    own.unlink(missing_ok=True)
    _write_private(own, token)


def _write_private(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as opened:
        opened.write(text)


def _jobs(root: Path) -> Path:
    """Return the file with the ids of the run's jobs: the groups' array, then the lighthouses."""
    return root / "slurm" / "jobs"


def _announce(root: Path, groups: str, lighthouses: Sequence[str]) -> None:
    ids = " ".join([groups, *lighthouses])
    write_whole(_jobs(root), f"{ids}\n".encode())
    print(
        f"groups: job {groups}, lighthouse: job {' '.join(lighthouses)}; output in {root / 'logs'}"
    )
    steps = {
        f"titan-ft top {root}": "watch it",
        f"titan-ft check {root}": "what holds, also while it runs",
        f"titan-ft report {root}": "figures and a page with plots",
        f"scancel {ids}": "end it",
    }
    width = max(map(len, steps))
    for command, meaning in steps.items():
        print(f"  {command:{width}}  {meaning}")
