# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Decide what a launch on this host starts, and check that it can."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from titan_ft.config import TABLE, ConfigError, FaultTolerance, check_toml, load_toml
from titan_ft.launch.lighthouse import LighthouseSettings
from titan_ft.launch.run_paths import RunPaths
from titan_ft.launch.supervisor import DEFAULT_MODULE

# Config modules whose [fault_tolerance] table is known here; any other may add fields, which its workers check.
KNOWN_MODULES = ("", "titan_ft.config", "torchtitan.components.ft.config")

TEXT_FIELDS = ("lighthouse", "events_folder")


@dataclass
class LaunchPlan:
    """One run: what to start, and where. Validated when it is made (raises ConfigError)."""

    config: Path
    num_replicas: int
    num_ranks: int
    run_dir: Path
    max_restarts: int = 100
    lighthouse_port: int = 0
    """0 lets the system choose."""
    worker_args: list[str] = field(default_factory=list)
    """torchtitan's flags, added to the workers' command line last, so that they win."""
    module: str = DEFAULT_MODULE
    """Python module that the workers run."""

    def __post_init__(self) -> None:
        self.paths = RunPaths(self.run_dir.absolute())
        for flag, value, least in (
            ("--replicas", self.num_replicas, 1),
            ("--ranks-per-replica", self.num_ranks, 1),
            ("--max-restarts", self.max_restarts, 0),
            ("--lighthouse-port", self.lighthouse_port, 0),
        ):
            if value < least:
                raise ConfigError(f"{flag} must be >= {least}, got {value}")
        if self.lighthouse_port > 65535:
            raise ConfigError(
                f"--lighthouse-port must be <= 65535, got {self.lighthouse_port}; 0 lets the system choose"
            )
        values = load_toml(self.config)
        if values.get("job", {}).get("custom_config_module", "") in KNOWN_MODULES:
            check_toml(values)
        table = {**values.get(TABLE, {}), **_overrides(self.worker_args)}
        self._check_table(table)
        self.lighthouse = _lighthouse_settings(table)
        if self.paths.has_events():
            raise ConfigError(
                f"--run-dir must hold no events of an earlier run, got {self.run_dir}; give another folder or remove it"
            )

    def _check_table(self, table: Mapping[str, Any]) -> None:
        """Check what only the launcher knows to be wrong; the workers check the rest."""
        if table.get("lighthouse"):
            raise ConfigError(
                f"{TABLE}.lighthouse must be empty for titan-ft launch, which starts its own lighthouse, "
                f"got {table['lighthouse']!r}; remove it, or start the groups with torchrun"
            )
        folder = table.get("events_folder", self.paths.events.name)
        if folder != self.paths.events.name:
            raise ConfigError(
                f'{TABLE}.events_folder must be "{self.paths.events.name}" for titan-ft launch, whose status '
                f"and report are read there, got {folder!r}; leave it out"
            )
        smallest = table.get("min_replica_size", FaultTolerance.min_replica_size)
        if smallest > self.num_replicas:
            raise ConfigError(
                f"{TABLE}.min_replica_size must be <= --replicas ({self.num_replicas}), got {smallest}; lower it"
            )

    def write(self) -> None:
        """Make the run directory and put the config there, headed by the command that made it.

        Raises:
            ConfigError: the directory cannot be written.
        """
        try:
            self.paths.events.mkdir(parents=True, exist_ok=True)
            header = f"# titan-ft launch {shlex.join(self._arguments())}\n"
            self.paths.config.write_text(header + self.config.read_text(encoding="utf-8"), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--run-dir must be a folder that can be written, got {self.run_dir} ({error.strerror}); give another"
            ) from error

    def _arguments(self) -> list[str]:
        shown = [str(self.config), "--replicas", str(self.num_replicas), "--ranks-per-replica", str(self.num_ranks)]
        shown += ["--run-dir", str(self.run_dir)]
        return shown + (["--", *self.worker_args] if self.worker_args else [])

    def lighthouse_command(self) -> list[str]:
        command = [sys.executable, "-m", "titan_ft", "lighthouse", "--bind", f"127.0.0.1:{self.lighthouse_port}"]
        for setting in fields(self.lighthouse):
            command += [f"--{setting.name.replace('_', '-')}", str(getattr(self.lighthouse, setting.name))]
        return command

    def supervisor_command(self, replica: int) -> list[str]:
        command = [sys.executable, "-m", "titan_ft.launch.supervisor"]
        command += [f"--run-dir={self.paths.root}", f"--replica={replica}", f"--ranks={self.num_ranks}"]
        command += [f"--max-restarts={self.max_restarts}", f"--module={self.module}"]
        return [*command, "--", *self.worker_command_line(replica)]

    def worker_command_line(self, replica: int) -> list[str]:
        """Return the flags of the workers of one group."""
        return [
            f"--job.config_file={self.paths.config}",
            f"--job.dump_folder={self.paths.root}",
            "--metrics.save_tb_folder=tb",
            f"--{TABLE}.enable",
            f"--{TABLE}.replica_id={replica}",
            f"--{TABLE}.group_size={self.num_replicas}",
            *self.worker_args,
        ]


def _overrides(worker_args: list[str]) -> dict[str, Any]:
    """Return the [fault_tolerance] fields that the workers' flags set, of those that concern the launcher too."""
    known = {setting.name for setting in fields(LighthouseSettings)} | {"min_replica_size", *TEXT_FIELDS}
    found: dict[str, Any] = {}
    for position, arg in enumerate(worker_args):
        name, equals, value = arg.partition("=")
        section, _, key = name.removeprefix("--").replace("-", "_").partition(".")
        if not arg.startswith("--") or section != TABLE or key not in known:
            continue
        if not equals:
            value = worker_args[position + 1] if position + 1 < len(worker_args) else ""
        found[key] = value if key in TEXT_FIELDS else _whole_number(f"--{TABLE}.{key}", value)
    return found


def _whole_number(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise ConfigError(f"{name} must be a whole number, got {value!r}") from error


def _lighthouse_settings(table: Mapping[str, Any]) -> LighthouseSettings:
    """Take the lighthouse's settings from the [fault_tolerance] table, where its own defaults stand too."""
    defaults = FaultTolerance()
    settings = LighthouseSettings(
        min_replicas=table.get("min_replica_size", defaults.min_replica_size),
        heartbeat_timeout_ms=table.get("heartbeat_timeout_ms", defaults.heartbeat_timeout_ms),
        quorum_tick_ms=table.get("quorum_tick_ms", defaults.quorum_tick_ms),
        join_timeout_ms=table.get("join_timeout_ms", defaults.join_timeout_ms),
    )
    settings.validate()
    return settings
