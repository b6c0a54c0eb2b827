# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Decide what a launch on this host starts, and check the options and the config before anything
starts.
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
    unwritable,
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

KNOWN_MODULES = ("", "titan_ft.config", "torchtitan.components.ft.config")
"""Config modules whose [fault_tolerance] table is known here.

Another module may add fields to the table. The workers check these fields.
"""

OWN_FLAGS = {
    "job.config_file": "CONFIG",
    "job.dump_folder": "--run-dir",
    f"{TABLE}.group_size": "--replicas",
    f"{TABLE}.replica_id": "--replicas",
}
"""Flags that the launcher gives to the workers, with the option of the launch for each."""

LOAD_STEP = "checkpoint.load_step"

LASTING_OPTIONS = (
    "max_restarts",
    "lighthouse_port",
    "spares",
    "drain_timeout",
    "no_zygote",
    "metrics_port",
    "private_network",
)
"""Options that the command to continue a run repeats. Others, as --chaos and --minutes, are for one
launch.
"""


class LaunchPlan:
    """The plan of one launch: the processes and the folder of a run.

    The constructor checks everything, and changes nothing. `local.launch` calls `occupied` and
    `write` before it starts the run.

    Args:
        options: options of `titan-ft launch`.
        worker_args: torchtitan's flags, added last to the workers' command line, so that they win.
        chaos: the faults to inject; None injects none.
        module: Python module that the workers run.
        resolve: resolves the values of two launches, for a resume.

    Attributes:
        notes: ignored settings of the config and unmet expectations, a line each.
        changes: fields that differ from the launch that is resumed; empty without --resume.
        saves: whether checkpoints are on.

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
        values = load_toml(self.config)
        job = values.get("job")
        if not isinstance(job, Mapping) or job.get("custom_config_module", "") in KNOWN_MODULES:
            check_toml(values)
        table = {**values.get(TABLE, {}), **table_overrides(self.worker_args)}
        self._check_worker_args(values.get(TABLE, {}))
        self._check_table(table)
        self._check_gpus(table.get("process_group", FaultTolerance.process_group))
        _check_ranks(values, self.worker_args, self.num_replicas, self.num_ranks)
        self.lighthouse = lighthouse_settings(table)
        self.drain_seconds = self._resolve_drain_timeout(table)
        self._sets_load_step = "load_step" in values.get("checkpoint", {})
        self.saves = _is_enabled("checkpoint.enable", values, self.worker_args)
        # New for each launch: the id distinguishes its groups from those of an earlier run in this
        # folder, and from those of another run at this lighthouse.
        self.job_id: str = table.get("job_id", "")
        if not self.job_id:
            self.job_id = f"{_plain_name(self.paths.root.name)}-{secrets.token_hex(3)}"
        self.job_curve = self._find_job_curve(values)
        wants_wandb = _is_enabled("metrics.enable_wandb", values, self.worker_args)
        if wants_wandb and find_spec("wandb") is None:
            # torchtitan trains without W&B then, and only the log of a rank contains a warning.
            self.notes.append(
                "metrics.enable_wandb is true and wandb is not installed: nothing is written for "
                "W&B; pip install wandb, or set it to false"
            )
        self.check_not_in_use()
        check_run_folder(self.paths.root)
        self._replaces_failed_start = not options.resume and is_failed_start(self.paths)
        if options.resume:
            self._check_resume(values)
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

    def _find_job_curve(self, values: Mapping[str, Any]) -> Path | None:
        """Return the folder for the job's curves; None if TensorBoard is off.

        The folder is beside the groups' folders of curves.
        """
        flags = self.worker_flags([])
        if not _is_enabled("metrics.enable_tensorboard", values, flags):
            return None
        curves = ""
        for name, value in read_flags(flags):
            if name == "metrics.save_tb_folder":
                curves = value  # the last flag wins
        return self.paths.root / curves / JOB_CURVE

    def _check_worker_args(self, table: Mapping[str, Any]) -> None:
        """Check that no flag of the user contradicts the launcher's own flags for the workers.

        Args:
            table: the [fault_tolerance] table of the TOML.
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
            if name in OWN_FLAGS:
                raise ConfigError(
                    f"--{name} must be left to titan-ft launch, got {value!r}; {OWN_FLAGS[name]} "
                    "says it"
                )
        if not _is_enabled(f"{TABLE}.enable", {TABLE: {"enable": True, **table}}, self.worker_args):
            raise ConfigError(
                f"{TABLE}.enable must be true for titan-ft launch, got false; set it, or start "
                "plain training with torchrun -m titan_ft.train"
            )
        size = table.get("group_size", 0)
        if size not in (0, self.num_replicas):
            given = f"{TABLE}.group_size = {size} of {self.options.config}"
            self.notes.append(f"{given} does not count here, --replicas {self.num_replicas} does")

    def _check_gpus(self, process_group: str) -> None:
        """Check that there are enough GPUs; do nothing without GPUs, or with an unknown number."""
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
        """Check values that are wrong for this launch only. The workers check all other values."""
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

    def _check_resume(self, values: Mapping[str, Any]) -> None:
        """Check that the folder has a run that can continue from a checkpoint."""
        if not self.paths.has_events():
            raise ConfigError(
                f"--resume needs an earlier run in --run-dir, got {self.options.run_dir}, which "
                "holds none; correct the folder, or leave --resume out to begin a run there"
            )
        if not self.saves:
            raise ConfigError(
                "--resume needs checkpoint.enable = true, got false; without checkpoints "
                f"training would start anew in {self.paths.root}: give another --run-dir"
            )
        folder = self.paths.root / self._checkpoint_folder(values)
        if not any(folder.glob("step-*")):
            raise ConfigError(
                f"--resume needs a checkpoint in {folder}, got none; training would start anew in "
                "this folder: give another --run-dir, or remove this one"
            )
        now = Command(
            self.config,
            self.num_replicas,
            self.num_ranks,
            tuple(self.worker_args),
            self._working_folder,
        )
        self.changes, note = find_changes(read_command(self.paths.config), now, self._resolve)
        check_allowed(self.changes, self._resume_with)
        if note:
            self.notes.append(note)

    def _checkpoint_folder(self, values: Mapping[str, Any]) -> str:
        """Return the folder, below the run's, in which the workers look for a checkpoint."""
        folder = str(values.get("checkpoint", {}).get("folder", self.paths.checkpoint.name))
        for name, value in read_flags(self.worker_args):
            if name == "checkpoint.folder":
                folder = value  # the last flag wins
        return folder

    @property
    def _resume_with(self) -> list[str]:
        """Names of the fields that may differ from the earlier launch."""
        names = [name.strip() for name in self.options.resume_with.split(",")]
        return [name for name in names if name]

    def write(self) -> None:
        """Make the run directory with the config of the run.

        The head of the config lists the commands of all launches, this one first. The files of a
        launch that ended before any step are moved aside, with a line. A resume removes the mark
        that the job has finished: the user has a reason to continue, for example a failed last
        save.

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
            toml_lines = without_headers(self.config)
            former_text = ""
            if self.paths.config.exists():
                former_text = self.paths.config.read_text(encoding="utf-8")
            former_headers = takewhile(is_header, former_text.splitlines(keepends=True))
            command = self._arguments(
                self.worker_args, resume=self.options.resume, resume_with=self.options.resume_with
            )
            headers = header_lines(command, self._working_folder)
            self._write_config("".join([*headers, *former_headers, *toml_lines]), former_text)
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
    def occupied(self) -> Iterator[None]:
        """Lock the run directory against other launches; an end by SIGKILL unlocks it too.

        Of two launches in one directory, each would take the other's checkpoints and events for its
        own.

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
        """Refuse a folder that another launch uses. Later checks advise to remove the folder.

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
        return unwritable("--run-dir", self.options.run_dir, error)

    @property
    def resume_command(self) -> str:
        """Command that continues from the run's last checkpoint, for a shell in this directory."""
        flags = _without_flag(LOAD_STEP, self.worker_args)
        if self._sets_load_step or flags != self.worker_args:
            # Otherwise the command would go back to the step of the setting once more.
            flags.append(f"--{LOAD_STEP}=-1")
        return shlex.join(["titan-ft", "launch", *self._arguments(flags, resume=True)])

    def _arguments(
        self, worker_args: Sequence[str], *, resume: bool, resume_with: str = ""
    ) -> list[str]:
        """Return the arguments of a launch like this one."""
        options = self.options
        config = options.config
        if config.parent.name.startswith(MODULE_TOML_PREFIX):
            # A temporary file of this process. The copy in the run's folder stays.
            config = self.paths.config
        words = [str(config)]
        words += ["--replicas", str(self.num_replicas)]
        words += ["--ranks-per-replica", str(self.num_ranks)]
        words += ["--run-dir", str(options.run_dir)]
        for field in fields(options):
            value = getattr(options, field.name)
            if field.name not in LASTING_OPTIONS or value == field.default:
                continue
            words.append(f"--{field.name.replace('_', '-')}")
            if value is not True:
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
        """Return a worker's flags with the user's config file, before the run has a folder."""
        flags = self.worker_flags([f"--{TABLE}.replica_id=0"])
        return [f"--job.config_file={self.config}", *flags[1:]]

    def worker_flags(self, group_flags: list[str]) -> list[str]:
        """Return the flags of a group's workers.

        Flags of the user come last and win.

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
            is_complete = name.isupper() or name.startswith("--")
            flag = name if is_complete else f"--{name}"
            raise ConfigError(
                f"{flag} must be UTF-8, got {str(value)!a}; rename it, or correct it"
            ) from None


def _check_ranks(
    values: Mapping[str, Any], worker_args: Sequence[str], num_replicas: int, num_ranks: int
) -> None:
    """Check that the parallel degrees divide a group's ranks.

    A value that is no whole number ends the check: the workers refuse such a value.

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
    # Flags come after the TOML, and win.
    for name, value in [*flat_values(values), *read_flags(worker_args)]:
        section, _, key = name.partition(".")
        table = tables.get(section)
        if table is None or key not in table:
            continue
        try:
            table[key] = int(value)
        except (TypeError, ValueError):
            return
    config = SimpleNamespace(
        parallelism=SimpleNamespace(**parallelism),
        training=SimpleNamespace(**training),
        fault_tolerance=SimpleNamespace(group_size=num_replicas),
    )
    check_ranks(config, num_ranks)


def _is_enabled(switch: str, values: Mapping[str, Any], worker_args: Sequence[str]) -> bool:
    """True if a switch such as checkpoint.enable is on.

    The last of the workers' flags wins, and any flag wins over the TOML.
    """
    section, _, key = switch.partition(".")
    is_on = bool(values.get(section, {}).get(key, False))
    for name, value in read_flags(worker_args):
        if name == switch:
            is_on = value.lower() != "false"
        elif name == f"{section}.no_{key}":
            is_on = False
    return is_on


def _without_flag(name: str, worker_args: Sequence[str]) -> list[str]:
    """Return the workers' flags without the flag `name`, which takes a value.

    The value may follow after a = or as the next word, and the name may have - for _.
    """
    kept: list[str] = []
    is_value = False
    for arg in worker_args:
        if is_value:
            is_value = False
            continue
        flag, equals, _ = arg.partition("=")
        if flag.replace("-", "_") == f"__{name}":
            is_value = not equals
        else:
            kept.append(arg)
    return kept


def _plain_name(name: str) -> str:
    """Return a folder's name with only those characters that torchft and file systems accept."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-") or "run"
