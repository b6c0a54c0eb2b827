# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Decide what a launch on this host starts, check it before anything starts, and write its folder.

`titan-ft launch` makes a `LaunchPlan`. Its constructor checks the options, the config and the run's
folder, and changes nothing. So a mistake is one line, and leaves nothing behind. `--dry-run` only
describes the plan (`dry_run`). Otherwise `local.launch`

1. locks the run's folder (`locked`),
2. writes a copy of the config into the folder, below the command of this launch (`write`),
3. starts processes with the command lines of the plan (`lighthouse_command`, `agent_args`).

A setting of the workers comes from the TOML, from the launcher's own flags (`worker_flags`), or
from the user's flags after the --. Each later source wins over the earlier ones.

The launcher does not import torchtitan, so it cannot read the config as the workers do. It checks
the settings that must fit this launch. The zygote checks all others (`LocalRun.check`).

All functions are called on the launcher's main thread.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from titan_ft.config import (
    MODULE_TOML_PREFIX,
    TABLE,
    ConfigError,
    FaultTolerance,
    check_toml,
    flat_values,
    load_toml,
    read_flags,
    unwritable_folder_error,
)
from titan_ft.data.assets import find_config
from titan_ft.launch.failed_start import is_failed_start, set_aside
from titan_ft.launch.gpus import num_gpus
from titan_ft.launch.group.agent import DEFAULT_MODULE
from titan_ft.launch.lighthouse_keeper import HOST
from titan_ft.launch.resume import (
    Changes,
    Command,
    Resolve,
    check_allowed,
    find_changes,
    header_lines,
    is_header,
    read_command,
    resolve_in_child,
    without_headers,
)
from titan_ft.launch.shared_settings import lighthouse_settings, table_overrides
from titan_ft.live.metrics import split_address
from titan_ft.options import Launch
from titan_ft.run.events import LaunchStarted
from titan_ft.run.held import hold, is_held
from titan_ft.run.paths import JOB_CURVE, RunPaths
from titan_ft.run.tail import EventTail
from titan_ft.system.ownership import make_folder, no_follow
from titan_ft.system.run_folder import check_run_folder
from titan_ft.training.divisions import DEGREES, check_ranks

if TYPE_CHECKING:
    from titan_ft.chaos.plan import Plan

KNOWN_CONFIG_MODULES = ("", "titan_ft.config", "torchtitan.components.ft.config")
"""Values of `job.custom_config_module` with which the fields of [fault_tolerance] are known here.

Another module may add fields to the table. Only the workers can check those.
"""

LAUNCHER_FLAGS = {
    "job.config_file": "CONFIG",
    "job.dump_folder": "--run-dir",
    f"{TABLE}.group_size": "--replicas",
    f"{TABLE}.replica_id": "--replicas",
}
"""Flags that the launcher gives to the workers, with the option of titan-ft launch that sets each.

The user must not give these flags.
"""

LOAD_STEP = "checkpoint.load_step"
"""The setting that chooses the checkpoint from which training starts; -1 is the latest."""

REPEATED_OPTIONS = (
    "max_restarts",
    "lighthouse_port",
    "spares",
    "drain_timeout",
    "no_zygote",
    "metrics_port",
    "private_network",
)
"""Options that the command to continue a run repeats. Others, such as --chaos and --minutes, are
for one launch only.
"""


class LaunchPlan:
    """The plan of one launch: the processes and the folder of a run.

    Args:
        options: options of `titan-ft launch`.
        worker_args: the user's flags for torchtitan, after the --.
        chaos: the faults to inject; None injects none.
        module: Python module that the workers run.
        resolve: returns the values of two launches by their flags; called for a resume only.

    Attributes:
        notes: lines for the user: settings that do not count here, and wishes that cannot be met.
        changes: fields that differ from the launch that is resumed; empty without --resume.
        saves_checkpoints: whether checkpoints are on.

    Raises:
        ConfigError: an option or the TOML is wrong.
    """

    def __init__(
        self,
        options: Launch,
        worker_args: Sequence[str] = (),
        *,
        chaos: Plan | None = None,
        module: str = DEFAULT_MODULE,
        resolve: Resolve = resolve_in_child,
    ) -> None:
        self.options = options
        self.worker_args = list(worker_args)
        self.chaos = chaos
        self.module = module
        self.notes: list[str] = []
        self.changes: Changes = {}
        self._resolve = resolve
        self.num_replicas = options.replicas
        self.num_ranks = options.ranks_per_replica
        self.paths = RunPaths(options.run_dir.absolute())
        self._working_folder = Path.cwd()
        _check_options(options)
        _check_text(options, self.worker_args)
        self.config = find_config(options.config)
        toml_values = load_toml(self.config)
        if _has_known_fields(toml_values):
            check_toml(toml_values)
        toml_table = toml_values.get(TABLE, {})
        # The [fault_tolerance] table with the user's flags for it, which win.
        table = {**toml_table, **table_overrides(self.worker_args)}
        self._check_worker_args(toml_table)
        self._check_table(table)
        self._check_gpus(table.get("process_group", FaultTolerance.process_group))
        _check_ranks(toml_values, self.worker_args, self.num_replicas, self.num_ranks)
        self.lighthouse = lighthouse_settings(table)
        self.drain_seconds = self._resolve_drain_timeout(table)
        self._sets_load_step = "load_step" in toml_values.get("checkpoint", {})
        self.saves_checkpoints = _is_enabled("checkpoint.enable", toml_values, self.worker_args)
        # Unless the config has one, each launch makes a new id. It distinguishes the groups of this
        # launch from groups of an earlier launch in this folder that still run, and from groups of
        # another run that reach this lighthouse.
        self.job_id: str = table.get("job_id", "")
        if not self.job_id:
            self.job_id = f"{_plain_name(self.paths.root.name)}-{secrets.token_hex(3)}"
        self.job_curve = self._find_job_curve(toml_values)
        wants_wandb = _is_enabled("metrics.enable_wandb", toml_values, self.worker_args)
        if wants_wandb and find_spec("wandb") is None:
            # torchtitan would train without W&B, and warn in the log of a rank only.
            self.notes.append(
                "metrics.enable_wandb is true and wandb is not installed: nothing is written for "
                "W&B; pip install wandb, or set it to false"
            )
        self._check_folder(toml_values)

    def _check_folder(self, toml_values: Mapping[str, Any]) -> None:
        """Check that this run may use its folder: a new or empty one, or with --resume a run's."""
        options = self.options
        self.check_not_in_use()
        check_run_folder(self.paths.root)
        # The files of launches that ended before any step must not block this one. `write` moves
        # them aside.
        self._replaces_failed_start = not options.resume and is_failed_start(self.paths)
        if options.resume:
            self._check_resume(toml_values)
        elif options.resume_with:
            raise ConfigError(
                f"--resume-with must come with --resume, got {options.resume_with} alone; add it, "
                "or leave this out"
            )
        elif self.paths.has_events() and not self._replaces_failed_start:
            raise ConfigError(
                f"--run-dir must hold no events of an earlier run, got {options.run_dir}; give "
                "another folder, remove it, or go on from its last checkpoint with --resume"
            )

    def _resolve_drain_timeout(self, table: Mapping[str, Any]) -> float:
        """Return the seconds that groups get to leave in order."""
        given = self.options.drain_timeout
        default = FaultTolerance.drain_timeout_seconds
        if given is None:
            return float(table.get("drain_timeout_seconds", default))
        if not 0 < given < float("inf"):
            raise ConfigError(f"--drain-timeout must be > 0, got {given}; the usual is {default:g}")
        return given

    @property
    def labels(self) -> dict[str, str]:
        """Labels that distinguish this run's metrics from other runs'."""
        return {
            "job_id": self.job_id,
            "run_dir": str(self.paths.root),
            "config": self.options.config.name,
            "replicas": str(self.num_replicas),
            "ranks_per_replica": str(self.num_ranks),
        }

    @property
    def first_job_id(self) -> str:
        """Job id of the first launch in the folder. All launches of the run share it at W&B."""
        if self._replaces_failed_start:
            return self.job_id
        events = EventTail(
            self.paths.events, LaunchStarted, pattern="launcher-*.jsonl", from_start=True
        ).poll()
        for event in events:
            if isinstance(event, LaunchStarted):
                return event.job_id
        return self.job_id

    def _find_job_curve(self, toml_values: Mapping[str, Any]) -> Path | None:
        """Return the folder for the job's curves in TensorBoard; None if TensorBoard is off.

        The folder is beside the folders in which the groups write their curves.
        """
        flags = self.worker_flags([])
        if not _is_enabled("metrics.enable_tensorboard", toml_values, flags):
            return None
        curves_folder = ""
        for name, value in read_flags(flags):
            if name == "metrics.save_tb_folder":
                curves_folder = value  # the last flag wins
        return self.paths.root / curves_folder / JOB_CURVE

    def _check_worker_args(self, toml_table: Mapping[str, Any]) -> None:
        """Check that the user's flags and the TOML fit the launcher's own flags for the workers.

        Args:
            toml_table: the [fault_tolerance] table of the TOML.
        """
        if {"-h", "--help"} & set(self.worker_args):
            raise ConfigError(
                "--help must come without a launch, got it after the --; titan-ft config CONFIG "
                "-- --help shows torchtitan's flags"
            )
        if self.worker_args and not self.worker_args[0].startswith("-"):
            raise ConfigError(
                f"torchtitan's flags must begin with --, got {self.worker_args[0]!r}; for example "
                "--training.steps=60"
            )
        for name, value in read_flags(self.worker_args):
            if name in LAUNCHER_FLAGS:
                option = LAUNCHER_FLAGS[name]
                raise ConfigError(
                    f"--{name} must be left to titan-ft launch, got {value!r}; {option} says it"
                )
        # Without a value in the TOML it is true, because `worker_flags` sets it.
        with_default = {TABLE: {"enable": True, **toml_table}}
        if not _is_enabled(f"{TABLE}.enable", with_default, self.worker_args):
            raise ConfigError(
                f"{TABLE}.enable must be true for titan-ft launch, got false; set it, or start "
                "plain training with torchrun -m titan_ft.train"
            )
        toml_size = toml_table.get("group_size", 0)
        if toml_size not in (0, self.num_replicas):
            self.notes.append(
                f"{TABLE}.group_size = {toml_size} of {self.options.config} does not count here, "
                f"--replicas {self.num_replicas} does"
            )

    def _check_gpus(self, process_group: str) -> None:
        """Check that this host has enough GPUs for all groups.

        Without GPUs the workers train on the CPU. If the number is unknown, nothing is checked.

        Args:
            process_group: what connects the groups, "gloo" or "nccl". With NCCL each rank needs a
                GPU of its own. With Gloo, ranks of several groups may share a GPU.
        """
        gpus = num_gpus()
        ranks = self.num_ranks
        replicas = self.num_replicas
        if not gpus or replicas * ranks <= gpus:
            return
        # Only a note in a dry run: the job may be meant for other hosts.
        if self.options.dry_run and (ranks > gpus or process_group == "nccl"):
            self.notes.append(
                f"{replicas} groups x {ranks} ranks need more than the {gpus} GPUs of this host"
            )
            return
        if ranks > gpus:
            raise ConfigError(
                f"--ranks-per-replica must be <= the GPUs of this host ({gpus}), got {ranks}; "
                "lower it, or set CUDA_VISIBLE_DEVICES to nothing to train on the CPU"
            )
        if process_group == "nccl":
            raise ConfigError(
                f"--replicas x --ranks-per-replica must be <= the GPUs of this host ({gpus}) with "
                f'{TABLE}.process_group = "nccl", got {replicas} x {ranks}; lower one, or set '
                '"gloo", with which groups share GPUs'
            )
        self.notes.append(
            f"{replicas} groups x {ranks} ranks share the {gpus} GPUs of this host, and their "
            "memory"
        )

    def _check_table(self, table: Mapping[str, Any]) -> None:
        """Check values of [fault_tolerance] that may be right, but are wrong for this launch."""
        if table.get("lighthouse"):
            raise ConfigError(
                f"{TABLE}.lighthouse must be empty for titan-ft launch, which starts its own "
                f"lighthouse, got {table['lighthouse']!r}; remove it, or start the groups with "
                "torchrun"
            )
        smallest = table.get("min_replica_size", FaultTolerance.min_replica_size)
        if smallest > self.num_replicas:
            raise ConfigError(
                f"{TABLE}.min_replica_size must be <= --replicas ({self.num_replicas}), got "
                f"{smallest}; lower it"
            )

    def _check_resume(self, toml_values: Mapping[str, Any]) -> None:
        """Check that the folder has a run that can continue from a checkpoint."""
        if not self.paths.has_events():
            raise ConfigError(
                f"--resume needs an earlier run in --run-dir, got {self.options.run_dir}, which "
                "holds none; correct the folder, or leave --resume out to begin a run there"
            )
        if not self.saves_checkpoints:
            raise ConfigError(
                "--resume needs checkpoint.enable = true, got false; without checkpoints "
                f"training would start anew in {self.paths.root}: give another --run-dir"
            )
        folder = self.paths.root / self._checkpoint_folder(toml_values)
        if not any(folder.glob("step-*")):
            raise ConfigError(
                f"--resume needs a checkpoint in {folder}, got none; training would start anew in "
                "this folder: give another --run-dir, or remove this one"
            )
        earlier = read_command(self.paths.config)
        now = Command(
            toml=self.config,
            replicas=self.num_replicas,
            ranks=self.num_ranks,
            flags=tuple(self.worker_args),
            folder=self._working_folder,
        )
        self.changes, lr_note = find_changes(earlier, now, self._resolve)
        check_allowed(self.changes, self._fields_allowed_to_change)
        if lr_note:
            self.notes.append(lr_note)

    def _checkpoint_folder(self, toml_values: Mapping[str, Any]) -> str:
        """Return the folder with the checkpoints, as a path from the run's folder."""
        folder = str(toml_values.get("checkpoint", {}).get("folder", self.paths.checkpoint.name))
        for name, value in read_flags(self.worker_args):
            if name == "checkpoint.folder":
                folder = value  # the last flag wins
        return folder

    @property
    def _fields_allowed_to_change(self) -> list[str]:
        """Names of the fields that may differ from the earlier launch, from --resume-with."""
        names = [name.strip() for name in self.options.resume_with.split(",")]
        return [name for name in names if name]

    def write(self) -> None:
        """Make the run directory, and write the config of the run into it.

        The head of the config lists the commands of all launches, this one first. The files of a
        launch that ended before any step are moved aside, and a line says so.

        Raises:
            ConfigError: the directory cannot be written.
        """
        try:
            if self._replaces_failed_start:
                folder = set_aside(self.paths)
                print(
                    f"a launch that ended before any step was in {self.paths.root}; it is in "
                    f"{folder.name} now"
                )
            make_folder(self.paths.events)
            former_text = ""
            if self.paths.config.exists():
                former_text = self.paths.config.read_text(encoding="utf-8")
            former_headers = takewhile(is_header, former_text.splitlines(keepends=True))
            arguments = self._arguments(
                self.worker_args, resume=self.options.resume, resume_with=self.options.resume_with
            )
            headers = header_lines(arguments, self._working_folder)
            toml_lines = without_headers(self.config)
            self._write_config("".join([*headers, *former_headers, *toml_lines]), former_text)
            # The mark that the job has finished, by which groups would not be restarted. The user
            # has a reason to continue a finished job, for example a failed last save.
            self.paths.finished.unlink(missing_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def _write_config(self, text: str, former_text: str) -> None:
        """Write the config in place, because the launch holds a lock on the file.

        After a failure the file has its former text again.

        Raises:
            OSError: the config cannot be written, for example because the disk is full.
        """
        try:
            self._replace_config(text)
        except OSError:
            # The former text needs no more room than the file had.
            with contextlib.suppress(OSError):
                self._replace_config(former_text)
            raise

    def _replace_config(self, text: str) -> None:
        with open(self.paths.config, "w", encoding="utf-8", opener=no_follow) as config:
            config.write(text)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run directory against other launches as long as the context lasts.

        Of two launches in one directory, each would take the other's checkpoints and events for its
        own. The kernel removes the lock when this process ends, also by SIGKILL.

        Raises:
            ConfigError: another launch uses the directory, or the directory cannot be written.
        """
        try:
            make_folder(self.paths.root)
            # The lock is on the config, which `write` writes in place.
            locked = open(  # noqa: SIM115  # closed below
                self.paths.config, "a", encoding="utf-8", opener=no_follow
            )
        except OSError as error:
            raise self._unwritable(error) from error
        with locked:
            if not hold(locked):
                raise self._in_use()
            yield

    def check_not_in_use(self) -> None:
        """Refuse a folder that another launch uses.

        This check comes before those that advise to remove the folder.

        Raises:
            ConfigError: another launch uses the folder.
        """
        if is_held(self.paths):
            raise self._in_use()

    def _in_use(self) -> ConfigError:
        return ConfigError(
            f"--run-dir must not be in use by another launch, got {self.options.run_dir}, where "
            "one is going on; wait for its end, or give another folder"
        )

    def _unwritable(self, error: OSError) -> ConfigError:
        return unwritable_folder_error("--run-dir", self.options.run_dir, error)

    @property
    def resume_command(self) -> str:
        """Command that continues from the run's last checkpoint, for a shell in this directory."""
        flags = _without_flag(LOAD_STEP, self.worker_args)
        if self._sets_load_step or flags != self.worker_args:
            # This launch started at a step that the user chose. The next launch must start at the
            # latest checkpoint, and not at that step again.
            flags.append(f"--{LOAD_STEP}=-1")
        return shlex.join(["titan-ft", "launch", *self._arguments(flags, resume=True)])

    def _arguments(
        self, worker_args: Sequence[str], *, resume: bool, resume_with: str = ""
    ) -> list[str]:
        """Return the command line of a launch like this one, after "titan-ft launch".

        Args:
            worker_args: flags for torchtitan.
            resume: whether --resume is among the options.
            resume_with: value of --resume-with; empty: the option is left out.
        """
        options = self.options
        config = options.config
        if config.parent.name.startswith(MODULE_TOML_PREFIX):
            # The TOML is a temporary file, which this process made of torchtitan's --module and
            # --config. The copy in the run's folder stays.
            config = self.paths.config
        words = [str(config)]
        words += ["--replicas", str(self.num_replicas)]
        words += ["--ranks-per-replica", str(self.num_ranks)]
        words += ["--run-dir", str(options.run_dir)]
        for field in fields(options):
            value = getattr(options, field.name)
            if field.name not in REPEATED_OPTIONS or value == field.default:
                continue
            words.append(f"--{field.name.replace('_', '-')}")
            is_switch = value is True
            if not is_switch:
                words.append(str(value))
        if resume:
            words.append("--resume")
        if resume_with:
            words += ["--resume-with", resume_with]
        if worker_args:
            words += ["--", *worker_args]
        return words

    def lighthouse_command(self, port: int) -> list[str]:
        command = [sys.executable, "-m", "titan_ft", "lighthouse", "--bind", f"{HOST}:{port}"]
        command += ["--run-dir", str(self.paths.root)]
        for setting in fields(self.lighthouse):
            value = getattr(self.lighthouse, setting.name)
            command += [f"--{setting.name.replace('_', '-')}", str(value)]
        return command

    def agent_args(
        self, slot: int, attempt: int, lighthouse: str, restart_reason: str = ""
    ) -> list[str]:
        """Return the command line of one group's agent.

        Args:
            slot: slot of the group.
            attempt: number of the agent's first attempt.
            lighthouse: address of the lighthouse.
            restart_reason: why that attempt is a restart; empty for the group's first attempt.
        """
        args = [
            f"--run-dir={self.paths.root}",
            f"--replica={slot}",
            f"--attempt={attempt}",
            f"--ranks={self.num_ranks}",
            f"--lighthouse={lighthouse}",
            f"--max-restarts={self.options.max_restarts}",
            f"--module={self.module}",
            f"--drain-timeout={self.drain_seconds:g}",
        ]
        if restart_reason:
            args.append(f"--restart-reason={restart_reason}")
        if self.options.no_zygote:
            args.append("--no-zygote")
        return [*args, "--", *self.worker_flags([f"--{TABLE}.replica_id={slot}"])]

    def flags_for_check(self) -> list[str]:
        """Return the flags with which the zygote checks the config, before the run has a folder.

        They are a worker's flags, but with the user's config file instead of its copy.
        """
        _copy, *other_flags = self.worker_flags([f"--{TABLE}.replica_id=0"])
        return [f"--job.config_file={self.config}", *other_flags]

    def worker_flags(self, group_flags: list[str]) -> list[str]:
        """Return the flags of a group's workers, the config file first.

        The user's flags come last, because the last flag wins.

        Args:
            group_flags: flags of this group alone.
        """
        return [
            f"--job.config_file={self.paths.config}",
            f"--job.dump_folder={self.paths.root}",
            "--metrics.save_tb_folder=tb",
            f"--{TABLE}.enable",
            *group_flags,
            f"--{TABLE}.group_size={self.num_replicas}",
            f"--{TABLE}.job_id={self.job_id}",
            f"--{TABLE}.drain_timeout_seconds={self.drain_seconds:g}",
            *self.worker_args,
        ]


def _has_known_fields(toml_values: Mapping[str, Any]) -> bool:
    """True if no module of the user's adds fields to the config; see `KNOWN_CONFIG_MODULES`."""
    job = toml_values.get("job")
    if not isinstance(job, Mapping):
        return True
    return job.get("custom_config_module", "") in KNOWN_CONFIG_MODULES


def _check_options(options: Launch) -> None:
    """Check each option by itself.

    Raises:
        ConfigError: a value is out of range, or an option needs --dry-run.
    """
    for flag, value, least in (
        ("--replicas", options.replicas, 1),
        ("--ranks-per-replica", options.ranks_per_replica, 1),
        ("--max-restarts", options.max_restarts, 0),
        ("--lighthouse-port", options.lighthouse_port, 0),
        ("--spares", options.spares, 0),
    ):
        if value < least:
            raise ConfigError(f"{flag} must be >= {least}, got {value}; correct it")
    for flag, speed in (
        ("--link-gbps", options.link_gbps),
        ("--host-link-gbps", options.host_link_gbps),
    ):
        if speed is not None and not options.dry_run:
            raise ConfigError(
                f"{flag} must come with --dry-run, got {speed:g} alone; a launch measures itself"
            )
        if speed is not None and not 0 < speed < float("inf"):
            raise ConfigError(
                f"{flag} must be > 0, got {speed:g}; give what one rank has of the link"
            )
    if not 0 <= options.minutes < float("inf"):
        raise ConfigError(
            f"--minutes must be >= 0, got {options.minutes}; 0 trains to the last step"
        )
    if options.metrics_port:
        split_address(options.metrics_port)
    if options.lighthouse_port > 65535:
        raise ConfigError(
            f"--lighthouse-port must be <= 65535, got {options.lighthouse_port}; 0 lets the "
            "system choose"
        )


def _check_text(options: Launch, worker_args: Sequence[str]) -> None:
    """Check that paths and flags are UTF-8, because the run's config and events contain them.

    Raises:
        ConfigError: one of them is not.
    """
    for name, value in (
        ("CONFIG", options.config),
        ("--run-dir", options.run_dir),
        *read_flags(worker_args),
    ):
        try:
            str(value).encode()
        except UnicodeEncodeError:
            # `read_flags` returns names without --. CONFIG is an argument, and has none.
            has_prefix = name == "CONFIG" or name.startswith("--")
            flag = name if has_prefix else f"--{name}"
            raise ConfigError(
                f"{flag} must be UTF-8, got {str(value)!a}; rename it, or correct it"
            ) from None


def _check_ranks(
    toml_values: Mapping[str, Any], worker_args: Sequence[str], num_replicas: int, num_ranks: int
) -> None:
    """Check that the parallel degrees divide a group's ranks, and the groups the global batch.

    Does nothing if a value is no whole number: the workers refuse such a value.

    Raises:
        ConfigError: a degree or a batch size does not fit.
    """
    parallelism: dict[str, int | None] = {f"{name}_degree": 1 for name in DEGREES}
    parallelism["data_parallel_shard_degree"] = -1
    parallelism["expert_tensor_parallel_degree"] = 1
    parallelism["pipeline_parallel_microbatch_size"] = 1
    training: dict[str, int | None] = {
        "seq_len": None,
        "local_batch_size": None,
        "global_batch_size": None,
    }
    tables = {"parallelism": parallelism, "training": training}
    # The tables hold torchtitan's defaults. The TOML replaces them, and then the flags do.
    for name, value in [*flat_values(toml_values), *read_flags(worker_args)]:
        section, _, key = name.partition(".")
        table = tables.get(section)
        if table is None or key not in table:
            continue
        try:
            table[key] = int(value)
        except (TypeError, ValueError):
            return
    # `check_ranks` takes a config of torchtitan, which this process must not import.
    config = SimpleNamespace(
        parallelism=SimpleNamespace(**parallelism),
        training=SimpleNamespace(**training),
        fault_tolerance=SimpleNamespace(group_size=num_replicas),
    )
    check_ranks(config, num_ranks)


def _is_enabled(switch: str, toml_values: Mapping[str, Any], worker_args: Sequence[str]) -> bool:
    """True if a switch such as checkpoint.enable is on.

    A flag wins over the TOML, and a later flag over an earlier one. --checkpoint.no-enable is a
    flag as well.
    """
    section, _, key = switch.partition(".")
    is_on = bool(toml_values.get(section, {}).get(key, False))
    for name, value in read_flags(worker_args):
        if name == switch:
            is_on = value.lower() != "false"
        elif name == f"{section}.no_{key}":
            is_on = False
    return is_on


def _without_flag(name: str, worker_args: Sequence[str]) -> list[str]:
    """Return the workers' flags without the flag `name`, which takes a value.

    The flag is "--name=value" or the two words "--name value", and may have - in the place of _.
    """
    kept: list[str] = []
    is_value_of_flag = False
    for word in worker_args:
        if is_value_of_flag:
            is_value_of_flag = False
            continue
        flag, equals, _ = word.partition("=")
        if flag.replace("-", "_") == f"__{name}":
            is_value_of_flag = not equals
        else:
            kept.append(word)
    return kept


def _plain_name(name: str) -> str:
    """Return a folder's name with only those characters that torchft and file systems accept."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-") or "run"
