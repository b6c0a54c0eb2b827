# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Submit a run to Slurm: `titan-ft slurm submit`.

A run is a job for the lighthouse (two with a standby), and a job array with one element for each
replica group. `submit` proceeds in these steps:

1. Check the options, and refuse the folder of a run that still runs.
2. Make the run's folder with the token, and remove the files of an earlier submission.
3. Submit the lighthouse, and then the array, which begins after the start of the lighthouse. If a
   submission fails, cancel the lighthouses: a run is submitted as a whole or not at all.
4. Record the ids of the jobs in the folder. The batch scripts read them.

The batch script of a group runs `titan-ft group` on each of its nodes (`cluster.group`).
"""

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
    check_restarts,
    check_worker_flags,
    find_ranks_per_node,
    find_toml,
    split_options,
)
from titan_ft.config import TABLE, ConfigError, load_toml, unwritable_folder_error
from titan_ft.launch.lighthouse import changed_settings
from titan_ft.launch.shared_settings import lighthouse_settings, table_overrides
from titan_ft.options import SlurmSubmit
from titan_ft.run.held import is_held
from titan_ft.run.paths import RunPaths
from titan_ft.system.ownership import make_folder, read_note
from titan_ft.system.run_folder import check_run_folder
from titan_ft.system.token import check_token, read_token_file
from titan_ft.system.whole_file import write_whole

BATCH = Path(__file__).parent / "batch"
"""Folder of the batch scripts.

Jobs read the scripts when they start, so the folder must be on storage that all nodes share.
"""

_JOB_FORGOTTEN = "Invalid job id"
"""Part of squeue's error for a job that ended some minutes ago, which Slurm has forgotten."""


@dataclass(frozen=True)
class Submission:
    """Arguments of sbatch for the jobs of a run.

    Attributes:
        lighthouse: arguments for the job of the lighthouse, and for the job of a standby.
        groups: arguments for the groups' array, without its dependency.
    """

    lighthouse: list[str]
    groups: list[str]

    def groups_after(self, job: str) -> list[str]:
        """Return the arguments for the groups' array, which begins after the start of a job."""
        return [f"--dependency=after:{job}", *self.groups]


def plan_submission(options: SlurmSubmit, flags: Sequence[str]) -> Submission:
    """Plan the submission.

    Args:
        options: options of `titan-ft slurm submit`.
        flags: torchtitan's flags for the workers.

    Raises:
        ConfigError: an option is wrong.
    """
    config = find_toml(options.config)
    check_at_least("--replicas", options.replicas, 1)
    check_at_least("--nodes", options.nodes, 1)
    check_restarts(options.max_restarts, options.host_deaths, options.host_window)
    check_worker_flags(flags)
    ranks = find_ranks_per_node(options.ranks_per_node, options.ranks_per_replica, options.nodes)
    if ranks is None:
        raise ConfigError(
            "--ranks-per-node must be given, got nothing; give as many as a node has GPUs, for "
            "example 8"
        )
    root = options.run_dir.resolve()
    logs = root / "logs"
    table = {**load_toml(config).get(TABLE, {}), **table_overrides(flags)}
    # First the options of sbatch, then the script with its arguments.
    lighthouse = [
        *split_options("--lighthouse-options", options.lighthouse_options),
        f"--output={logs / 'lighthouse-%j.log'}",
        str(BATCH / "lighthouse.sbatch"),
        str(BATCH),
        sys.executable,
        str(root),
        *changed_settings(lighthouse_settings(table)),
    ]
    groups = [
        f"--array=0-{options.replicas - 1}",
        f"--nodes={options.nodes}",
        *split_options("--group-options", options.group_options),
    ]
    if options.time:
        groups.append(f"--time={options.time}")
    groups.append(f"--output={logs / 'replica-%a.log'}")
    groups += [str(BATCH / "replicas.sbatch"), str(BATCH), sys.executable, str(root)]
    groups += ["--config", str(config.resolve())]
    groups += ["--ranks-per-node", str(ranks)]
    groups += ["--max-restarts", str(options.max_restarts)]
    groups += ["--host-deaths", str(options.host_deaths)]
    groups += ["--host-window", str(options.host_window)]
    if options.on_host_suspected:
        groups += ["--on-host-suspected", options.on_host_suspected]
    if options.no_zygote:
        groups.append("--no-zygote")
    if flags:
        groups += ["--", *flags]
    return Submission(lighthouse, groups)


def submit(options: SlurmSubmit, flags: Sequence[str]) -> int:
    """Submit a run, as a whole or not at all; return 0 on success, else 1.

    Raises:
        ConfigError: an option is wrong, or this host has no Slurm.
    """
    plan = plan_submission(options, flags)
    num_lighthouses = 2 if options.standby else 1
    if options.dry_run:
        for _ in range(num_lighthouses):
            print(shlex.join(["sbatch", *plan.lighthouse]))
        print(shlex.join(["sbatch", *plan.groups_after("JOB")]))
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
        raise unwritable_folder_error("--run-dir", options.run_dir, error) from error
    with ExitStack() as undo:
        lighthouses: list[str] = []
        # After a failed submission, the lighthouses would wait for groups without end.
        undo.callback(_cancel, lighthouses)
        for _ in range(num_lighthouses):
            job = _sbatch(plan.lighthouse)
            if job is None:
                return 1
            lighthouses.append(job)
        groups = _sbatch(plan.groups_after(lighthouses[0]))
        if groups is None:
            return 1
        undo.pop_all()
    _record_jobs(root, groups, lighthouses)
    return 0


def _check_not_in_use(root: Path) -> None:
    """Refuse the folder of a running run.

    Groups of two runs in one folder would meet at one lighthouse.

    Raises:
        ConfigError: a launch, or a job of an earlier submission, is running there.
    """
    given = f"--run-dir must not be in use by another job, got {root}, where"
    remedy = "or give another folder"
    if is_held(RunPaths(root)):
        raise ConfigError(f"{given} titan-ft launch is going on; wait for its end, {remedy}")
    try:
        jobs = read_note(_jobs_file(root)).split()
    except OSError:
        # No run was submitted with this folder.
        return
    unfinished = [job for job in jobs if _is_unfinished(job)]
    if unfinished:
        raise ConfigError(
            f"{given} job {' '.join(unfinished)} is going on; scancel {' '.join(jobs)}, {remedy}"
        )


def _is_unfinished(job: str) -> bool:
    """True if Slurm lists a job, or an element of an array, that has not ended.

    Raises:
        ConfigError: Slurm gives no answer. A new submission would take the token and the files of a
            run that may still be running.
    """
    try:
        listed = subprocess.run(
            ["squeue", "--noheader", f"--jobs={job}"], capture_output=True, text=True, check=False
        )
    except OSError:
        # This host has no squeue.
        return False
    # Slurm forgets a job some minutes after its end, and squeue then fails.
    if listed.returncode != 0 and _JOB_FORGOTTEN not in listed.stderr:
        reason = " ".join(listed.stderr.split()) or f"status {listed.returncode}"
        raise ConfigError(
            f"squeue must say whether job {job} of --run-dir is over, got no answer ({reason}); "
            "try again"
        )
    return bool(listed.stdout.strip())


def _sbatch(arguments: Sequence[str]) -> str | None:
    """Submit one job; return its id, or None after sbatch has printed its error."""
    done = subprocess.run(
        ["sbatch", "--parsable", *arguments], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        return None
    # The id, or the id and the name of the cluster after a semicolon.
    return done.stdout.strip().partition(";")[0]


def _cancel(jobs: Sequence[str]) -> None:
    if jobs:
        subprocess.run(["scancel", *jobs], check=False)


def _prepare(root: Path, token_file: Path | None) -> None:
    """Make the run's folder with its token, and remove the records of an earlier submission.

    Raises:
        ConfigError: the given token cannot be read, or other users can read it.
        OSError: the folder cannot be written.
    """
    for folder in (root / "logs", root / "slurm"):
        make_folder(folder)
    _write_token(root / "token", token_file)
    files_of_earlier_run = [
        _jobs_file(root),
        root / "lighthouse.json",
        RunPaths(root).finished,
        *(root / "slurm").glob("exclude-*"),
    ]
    for file in files_of_earlier_run:
        file.unlink(missing_ok=True)


def _write_token(own: Path, given: Path | None) -> None:
    """Write the run's token into its folder: a copy of the given file, or a new token.

    Each submission draws a new token. With the former token, a stranger could replay names of the
    earlier submission that he recorded from the network. An older group with another config would
    then end the groups of this submission.
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


def _jobs_file(root: Path) -> Path:
    """Return the file with the ids of the run's jobs: the groups' array, then the lighthouses."""
    return root / "slurm" / "jobs"


def _record_jobs(root: Path, groups: str, lighthouses: Sequence[str]) -> None:
    """Record the ids of the jobs for the batch scripts, and print the commands for the user."""
    ids = " ".join([groups, *lighthouses])
    write_whole(_jobs_file(root), f"{ids}\n".encode())
    print(
        f"groups: job {groups}, lighthouse: job {' '.join(lighthouses)}; output in {root / 'logs'}"
    )
    commands = {
        f"titan-ft top {root}": "watch it",
        f"titan-ft check {root}": "what holds, also while it runs",
        f"titan-ft report {root}": "figures and a page with plots",
        f"scancel {ids}": "end it",
    }
    width = max(map(len, commands))
    for command, meaning in commands.items():
        print(f"  {command:{width}}  {meaning}")
