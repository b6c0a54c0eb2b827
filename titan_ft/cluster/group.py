# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Run one replica group on this node: `titan-ft group`.

`run_group` determines the command and the environment of the group's agent (`plan_group`), and then
becomes that agent by an exec. Options that are missing come from Slurm's variables. A group on
several nodes is started by the same command on each of its nodes.

The other commands for clusters, `titan-ft slurm submit` and `titan-ft kubernetes`, use the checks
of this module.
"""

from __future__ import annotations

import math
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_ft.cluster import slurm_env
from titan_ft.config import (
    LIGHTHOUSE_VARIABLE,
    TABLE,
    ConfigError,
    FaultTolerance,
    check_lighthouse,
    load_toml,
    read_flags,
)
from titan_ft.data.assets import find_config
from titan_ft.launch.shared_settings import table_overrides
from titan_ft.live.group_metrics import PORT_ENV
from titan_ft.live.metrics import split_address as split_metrics_address
from titan_ft.options import Group
from titan_ft.run.held import is_held
from titan_ft.run.output import choose_native_log
from titan_ft.run.paths import RunPaths
from titan_ft.system.address import ALL_HOSTS, is_loopback, split_address
from titan_ft.system.run_folder import check_run_folder
from titan_ft.system.token import check_token, read_token

AGENT_MODULE = "titan_ft.launch.group.agent"
"""The agent's module. It may import torch, so this package must not import it."""
_OWN_FLAGS = {
    "job.config_file": "CONFIG",
    "job.dump_folder": "--run-dir",
    f"{TABLE}.group_size": "--replicas",
    f"{TABLE}.replica_id": "--replica",
    f"{TABLE}.lighthouse": "--lighthouse",
}
"""Flags that `titan-ft group` gives to the workers, with the option or argument for each."""


@dataclass(frozen=True)
class GroupPlan:
    """The agent of a group on this node.

    Attributes:
        environment: variables of the agent and its workers, in addition to those of this process.
        command: the agent's command line.
    """

    environment: dict[str, str]
    command: list[str]

    def __str__(self) -> str:
        assignments = [f"{name}={value}" for name, value in self.environment.items()]
        return shlex.join([*assignments, *self.command])


@dataclass(frozen=True)
class _Shape:
    """The processes of a group: ranks on each of its nodes."""

    num_nodes: int
    ranks_per_node: int


def plan_group(options: Group, flags: Sequence[str], environ: Mapping[str, str]) -> GroupPlan:
    """Plan the agent of a group on this node.

    Args:
        options: options of `titan-ft group`.
        flags: torchtitan's flags for the workers.
        environ: environment of this process; Slurm's variables replace missing options.

    Raises:
        ConfigError: an option is missing or wrong.
    """
    check_worker_flags(flags)
    config = find_toml(options.config)
    _check_not_in_use(options.run_dir)
    check_run_folder(options.run_dir)
    slot, num_groups = _find_slot(options, environ)
    lighthouse = _find_lighthouse(options, environ, config)
    shape = _find_shape(options, environ)
    rendezvous = _find_rendezvous(options, environ, shape.num_nodes)
    check_restarts(options.max_restarts, options.host_deaths, options.host_window)
    if options.metrics_port:
        split_metrics_address(options.metrics_port)
    # Whether all connections of the group stay on this host. Only then the token may be missing.
    is_local = is_loopback(lighthouse)
    if shape.num_nodes > 1:
        is_local = is_local and is_loopback(rendezvous)
    check_token(read_token(environ), is_local=is_local)
    table = {**load_toml(config).get(TABLE, {}), **table_overrides(flags)}
    # First the agent's own options, then the flags of the workers.
    command = [sys.executable, "-m", AGENT_MODULE, "--cluster"]
    command.append(f"--run-dir={options.run_dir.absolute()}")
    command.append(f"--replica={slot}")
    command.append(f"--ranks={shape.ranks_per_node}")
    if not is_local:
        # Ranks of other groups connect to the store of this group, to exchange gradients.
        command.append(f"--bind={ALL_HOSTS[socket.AF_INET6]}")
    if rendezvous:
        command.append(f"--hosts={shape.num_nodes}")
        command.append(f"--rendezvous={rendezvous}")
    command.append(f"--max-restarts={options.max_restarts}")
    command.append(f"--drain-timeout={find_drain_seconds(table):g}")
    if options.no_zygote:
        command.append("--no-zygote")
    command.append("--")
    command.append(f"--job.config_file={config.absolute()}")
    command.append(f"--job.dump_folder={options.run_dir.absolute()}")
    command.append("--metrics.save_tb_folder=tb")
    command.append(f"--{TABLE}.enable")
    command.append(f"--{TABLE}.replica_id={slot}")
    if num_groups is not None:
        command.append(f"--{TABLE}.group_size={num_groups}")
    if _configured_lighthouse(config) not in ("", lighthouse):
        # A worker prefers the address in the config to `LIGHTHOUSE_VARIABLE`, and a flag to both.
        command.append(f"--{TABLE}.lighthouse={lighthouse}")
    command += flags
    return GroupPlan(_environment(options, lighthouse, environ), command)


def run_group(options: Group, flags: Sequence[str]) -> int:
    """Become the agent of this group, or print its command.

    Raises:
        ConfigError: an option is missing or wrong.
    """
    plan = plan_group(options, flags, os.environ)
    if options.dry_run:
        print(plan)
        return 0
    sys.stdout.flush()
    # As a child of this process, the agent would not get the signals of Slurm or of a shell.
    os.execve(plan.command[0], plan.command, {**os.environ, **plan.environment})
    raise AssertionError("execve does not return")


def find_toml(given: Path) -> Path:
    """Return the file of a config, which is given by its path or by the name of a packaged one.

    Raises:
        ConfigError: the file does not exist, or is not TOML.
    """
    found = find_config(given)
    load_toml(found)
    return found


def check_at_least(flag: str, value: int, least: int) -> None:
    """Check a whole number.

    Raises:
        ConfigError: the number is below `least`.
    """
    if value < least:
        raise ConfigError(f"{flag} must be >= {least}, got {value}; correct it")


def check_restarts(max_restarts: int, host_deaths: int, host_window: int) -> None:
    """Check the numbers of the restart policy.

    Raises:
        ConfigError: a number is too small.
    """
    check_at_least("--max-restarts", max_restarts, 0)
    check_at_least("--host-deaths", host_deaths, 0)
    check_at_least("--host-window", host_window, 1)


def check_worker_flags(flags: Sequence[str]) -> None:
    """Check torchtitan's flags for the workers.

    Raises:
        ConfigError: the first flag does not begin with -, or a flag contradicts an option.
    """
    if flags and not flags[0].startswith("-"):
        raise ConfigError(
            f"torchtitan's flags must begin with --, got {flags[0]!r}; for example "
            "--training.steps=60"
        )
    for name, value in read_flags(flags):
        # The user's flags come last and would win. Two groups could get the same slot, or a group
        # could write its events outside of --run-dir.
        if name in _OWN_FLAGS:
            raise ConfigError(
                f"--{name} must not come after the --, got {value!r}; {_OWN_FLAGS[name]} says it"
            )


def split_options(name: str, text: str) -> list[str]:
    """Split the value of an option that holds options of another program, as a shell does.

    Raises:
        ConfigError: a quotation mark is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"{name} must be options as a shell reads them, got {text!r}; {error}"
        ) from error


def _check_not_in_use(run_dir: Path) -> None:
    if is_held(RunPaths(run_dir.absolute())):
        raise ConfigError(
            f"--run-dir must not be in use by titan-ft launch, got {run_dir}, where one is going "
            "on; wait for its end, or give another folder"
        )


def _find_slot(options: Group, environ: Mapping[str, str]) -> tuple[int, int | None]:
    """Return the slot of this group, and the number of groups; None leaves the number to the
    config.
    """
    slot = options.replica
    if slot is None:
        slot = slurm_env.read_number(environ, "SLURM_ARRAY_TASK_ID")
    if slot is None:
        remedy = "give the number of this group, from 0"
        raise ConfigError(
            f"--replica must be given, got nothing, and SLURM_ARRAY_TASK_ID is not set; {remedy}"
        )
    check_at_least("--replica", slot, 0)
    num_groups = options.replicas
    if num_groups is None:
        num_groups = slurm_env.read_number(environ, "SLURM_ARRAY_TASK_COUNT")
    if num_groups is None:
        return slot, None
    check_at_least("--replicas", num_groups, 1)
    if slot >= num_groups:
        raise ConfigError(
            f"--replica must be below --replicas ({num_groups}), got {slot}; groups count from "
            f"0, and so does an array of Slurm: --array=0-{num_groups - 1}"
        )
    return slot, num_groups


def _find_lighthouse(options: Group, environ: Mapping[str, str], config: Path) -> str:
    """Return the lighthouse's address, in the same order of precedence as the workers."""
    name = "--lighthouse"
    address = options.lighthouse
    if not address:
        name = f"{TABLE}.lighthouse"
        address = _configured_lighthouse(config)
    if not address:
        name = LIGHTHOUSE_VARIABLE
        address = environ.get(LIGHTHOUSE_VARIABLE, "")
    if not address:
        raise ConfigError(
            f"--lighthouse must be given, got nothing, and {LIGHTHOUSE_VARIABLE} is not set; give "
            "the address that titan-ft lighthouse prints"
        )
    check_lighthouse(name, address)
    return address


def _configured_lighthouse(config: Path) -> str:
    return str(load_toml(config).get(TABLE, {}).get("lighthouse", ""))


def _find_shape(options: Group, environ: Mapping[str, str]) -> _Shape:
    num_nodes = options.nodes
    if num_nodes is None:
        num_nodes = slurm_env.read_number(environ, "SLURM_NNODES") or 1
    check_at_least("--nodes", num_nodes, 1)
    ranks = find_ranks_per_node(options.ranks_per_node, options.ranks_per_replica, num_nodes)
    if ranks is None:
        ranks = slurm_env.read_ranks_per_node(environ)
    if ranks is None:
        raise ConfigError(
            "--ranks-per-node must be given, got nothing, and Slurm names no GPUs or tasks of a "
            "node; for example 8"
        )
    return _Shape(num_nodes, ranks)


def find_ranks_per_node(
    ranks_per_node: int | None, ranks_per_replica: int | None, nodes: int
) -> int | None:
    """Return the ranks on each node from either of two options; None if neither is given.

    Args:
        ranks_per_node: value of --ranks-per-node.
        ranks_per_replica: value of --ranks-per-replica: the ranks of the whole group.
        nodes: number of nodes of the group.

    Raises:
        ConfigError: a number is too small; both options are given and differ; or the group's ranks
            do not divide among the nodes.
    """
    if ranks_per_node is not None:
        check_at_least("--ranks-per-node", ranks_per_node, 1)
    if ranks_per_replica is None:
        return ranks_per_node
    check_at_least("--ranks-per-replica", ranks_per_replica, 1)
    if ranks_per_node is not None and ranks_per_node * nodes != ranks_per_replica:
        raise ConfigError(
            f"--ranks-per-replica must be --ranks-per-node ({ranks_per_node}) x --nodes "
            f"({nodes}), got {ranks_per_replica}; give one of the two"
        )
    if ranks_per_replica % nodes:
        raise ConfigError(
            f"--ranks-per-replica must be divisible by --nodes ({nodes}), got {ranks_per_replica}"
        )
    return ranks_per_replica // nodes


def _find_rendezvous(options: Group, environ: Mapping[str, str], nodes: int) -> str:
    """Return HOST:PORT where the nodes of the group meet; empty for one node."""
    if nodes == 1:
        return ""
    rendezvous = options.rendezvous or slurm_env.choose_rendezvous(environ)
    if not rendezvous:
        raise ConfigError(
            f"--rendezvous must be given for {nodes} nodes, got nothing, and SLURM_JOB_NODELIST "
            "is not set; give HOST:PORT, a free port of one of them"
        )
    try:
        host, port = split_address(rendezvous)
    except ValueError:
        host, port = "", 0
    # With port 0 the system would choose another port on each host.
    if not host or not port or "/" in rendezvous:
        raise ConfigError(
            f"--rendezvous must be HOST:PORT, got {rendezvous!r}; give a free port of one of the "
            "nodes"
        )
    return rendezvous


def find_drain_seconds(table: Mapping[str, Any]) -> float:
    """Return the drain timeout of the workers from the [fault_tolerance] table.

    The default stands in for a value that is no number >= 0: the workers refuse such a value.
    """
    default = FaultTolerance.drain_timeout_seconds
    seconds = table.get("drain_timeout_seconds", default)
    if not isinstance(seconds, int | float):
        return default
    if not math.isfinite(seconds) or seconds < 0:
        return default
    return float(seconds)


def _environment(options: Group, lighthouse: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the agent and its workers. Values that the user set stay."""
    variables = {
        LIGHTHOUSE_VARIABLE: lighthouse,
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONUNBUFFERED": environ.get("PYTHONUNBUFFERED", "1"),
        "RUST_LOG": choose_native_log(environ),
        # See `default_env` in `launch.group.worker_group`, which this package must not import.
        "TORCH_DIST_USE_NCCL2": environ.get("TORCH_DIST_USE_NCCL2", "0"),
    }
    if options.metrics_port:
        variables[PORT_ENV] = options.metrics_port
    if options.host_deaths:
        variables["TITAN_FT_HOST_DEATHS"] = str(options.host_deaths)
        variables["TITAN_FT_HOST_WINDOW"] = str(options.host_window)
        variables["TITAN_FT_ON_HOST_SUSPECTED"] = options.on_host_suspected
    return variables
