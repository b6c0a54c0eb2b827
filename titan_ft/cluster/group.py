# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Run one replica group: determine the command and the environment of its agent, then become that
agent.
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
_OWN_FLAGS = {
    "job.config_file": "CONFIG",
    "job.dump_folder": "--run-dir",
    f"{TABLE}.group_size": "--replicas",
    f"{TABLE}.replica_id": "--replica",
    f"{TABLE}.lighthouse": "--lighthouse",
}
"""Flags of the workers that `titan-ft group` sets, with the options that say the same."""


@dataclass(frozen=True)
class GroupPlan:
    """The agent of a group on this node.

    Attributes:
        environment: variables of the agent and its workers, in addition to this process's.
        command: the agent's command line.
    """

    environment: dict[str, str]
    command: list[str]

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.environment.items()]
        return shlex.join([*words, *self.command])


def plan_group(options: Group, flags: Sequence[str], environ: Mapping[str, str]) -> GroupPlan:
    """Plan the agent of a group on this node.

    Args:
        flags: torchtitan's flags for the workers.
        environ: environment of this process; Slurm's variables replace missing options.

    Raises:
        ConfigError: an option is missing or wrong.
    """
    check_flags(flags)
    config = find_toml(options.config)
    _check_not_in_use(options.run_dir)
    check_run_folder(options.run_dir)
    replica, replicas = _find_number(options, environ)
    lighthouse = _find_lighthouse(options, environ, config)
    nodes, ranks_per_node = _find_shape(options, environ)
    rendezvous = _find_rendezvous(options, environ, nodes)
    check_restarts(options.max_restarts, options.host_deaths, options.host_window)
    if options.metrics_port:
        split_metrics_address(options.metrics_port)
    is_local = is_loopback(lighthouse) and (nodes == 1 or is_loopback(rendezvous))
    check_token(read_token(environ), is_local=is_local)
    table = {**load_toml(config).get(TABLE, {}), **table_overrides(flags)}
    command = [
        *(sys.executable, "-m", AGENT_MODULE, "--cluster"),
        *(
            f"--run-dir={options.run_dir.absolute()}",
            f"--replica={replica}",
            f"--ranks={ranks_per_node}",
        ),
        *(
            [] if is_local else [f"--bind={ALL_HOSTS[socket.AF_INET6]}"]
        ),  # the other groups' ranks meet at its store, too
        *([f"--hosts={nodes}", f"--rendezvous={rendezvous}"] if rendezvous else []),
        f"--max-restarts={options.max_restarts}",
        f"--drain-timeout={find_drain_seconds(table):g}",
        *(["--no-zygote"] if options.no_zygote else []),
        "--",
        f"--job.config_file={config.absolute()}",
        f"--job.dump_folder={options.run_dir.absolute()}",
        "--metrics.save_tb_folder=tb",
        f"--{TABLE}.enable",
        f"--{TABLE}.replica_id={replica}",
        *([] if replicas is None else [f"--{TABLE}.group_size={replicas}"]),
        # A worker prefers the address in the config to that in its environment.
        *(
            [f"--{TABLE}.lighthouse={lighthouse}"]
            if _configured_lighthouse(config) not in ("", lighthouse)
            else []
        ),
        *flags,
    ]
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
    # This process becomes the agent: signals of Slurm or of a shell reach it directly.
    os.execve(plan.command[0], plan.command, {**os.environ, **plan.environment})
    raise AssertionError("execve does not return")


def find_toml(given: Path) -> Path:
    """Return the config that a path or a bundled name stands for.

    Raises:
        ConfigError: there is no such TOML file.
    """
    found = find_config(given)
    load_toml(found)
    return found


def check_at_least(flag: str, value: int, least: int) -> None:
    """Raise ConfigError for an option below its least value."""
    if value < least:
        raise ConfigError(f"{flag} must be >= {least}, got {value}; correct it")


def check_restarts(max_restarts: int, host_deaths: int, host_window: int) -> None:
    """Raise ConfigError for a number that no restart policy can work with."""
    check_at_least("--max-restarts", max_restarts, 0)
    check_at_least("--host-deaths", host_deaths, 0)
    check_at_least("--host-window", host_window, 1)


def check_flags(flags: Sequence[str]) -> None:
    """Raise ConfigError for torchtitan's flags that do not begin with --, or that contradict an
    option.
    """
    if flags and not flags[0].startswith("-"):
        raise ConfigError(
            f"torchtitan's flags must begin with --, got {flags[0]!r}; for example "
            "--training.steps=60"
        )
    for name, value in read_flags(flags):
        # Given last, they would win: two groups with one number, or events outside of --run-dir.
        if name in _OWN_FLAGS:
            raise ConfigError(
                f"--{name} must not come after the --, got {value!r}; {_OWN_FLAGS[name]} says it"
            )


def split_options(name: str, text: str) -> list[str]:
    """Split an option's value, which is options of another program, as a shell does.

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


def _find_number(options: Group, environ: Mapping[str, str]) -> tuple[int, int | None]:
    """Return the number of this group, and the number of groups; None leaves the latter to the
    config.
    """
    replica = options.replica
    if replica is None:
        replica = slurm_env.find_number(environ, "SLURM_ARRAY_TASK_ID")
    if replica is None:
        remedy = "give the number of this group, from 0"
        raise ConfigError(
            f"--replica must be given, got nothing, and SLURM_ARRAY_TASK_ID is not set; {remedy}"
        )
    check_at_least("--replica", replica, 0)
    replicas = options.replicas
    if replicas is None:
        replicas = slurm_env.find_number(environ, "SLURM_ARRAY_TASK_COUNT")
    if replicas is None:
        return replica, None
    check_at_least("--replicas", replicas, 1)
    if replica >= replicas:
        raise ConfigError(
            f"--replica must be below --replicas ({replicas}), got {replica}; groups count from "
            f"0, and so does an array of Slurm: --array=0-{replicas - 1}"
        )
    return replica, replicas


def _find_lighthouse(options: Group, environ: Mapping[str, str], config: Path) -> str:
    """Return the lighthouse's address, from the same source as the workers take it."""
    name, address = "--lighthouse", options.lighthouse
    if not address:
        name, address = f"{TABLE}.lighthouse", _configured_lighthouse(config)
    if not address:
        name, address = LIGHTHOUSE_VARIABLE, environ.get(LIGHTHOUSE_VARIABLE, "")
    if not address:
        raise ConfigError(
            f"--lighthouse must be given, got nothing, and {LIGHTHOUSE_VARIABLE} is not set; give "
            "the address that titan-ft lighthouse prints"
        )
    check_lighthouse(name, address)
    return address


def _configured_lighthouse(config: Path) -> str:
    return str(load_toml(config).get(TABLE, {}).get("lighthouse", ""))


def _find_shape(options: Group, environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the number of nodes of the group, and of processes on each."""
    nodes = options.nodes
    if nodes is None:
        nodes = slurm_env.find_number(environ, "SLURM_NNODES") or 1
    check_at_least("--nodes", nodes, 1)
    ranks = find_ranks_per_node(options.ranks_per_node, options.ranks_per_replica, nodes)
    if ranks is None:
        ranks = slurm_env.find_ranks_per_node(environ)
    if ranks is None:
        raise ConfigError(
            "--ranks-per-node must be given, got nothing, and Slurm names no GPUs or tasks of a "
            "node; for example 8"
        )
    return nodes, ranks


def find_ranks_per_node(
    ranks_per_node: int | None, ranks_per_replica: int | None, nodes: int
) -> int | None:
    """Return the processes on each node from either of two options; None if neither is given.

    Raises:
        ConfigError: one is too small, both are given and differ, or the ranks do not divide among
            the nodes.
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
    rendezvous = options.rendezvous or slurm_env.find_rendezvous(environ)
    if not rendezvous:
        raise ConfigError(
            f"--rendezvous must be given for {nodes} nodes, got nothing, and SLURM_JOB_NODELIST "
            "is not set; give HOST:PORT, a free port of one of them"
        )
    try:
        host, port = split_address(rendezvous)
    except ValueError:
        host, port = "", 0
    # At port 0 each host would be given a port of its own.
    if not host or not port or "/" in rendezvous:
        raise ConfigError(
            f"--rendezvous must be HOST:PORT, got {rendezvous!r}; give a free port of one of the "
            "nodes"
        )
    return rendezvous


def find_drain_seconds(table: Mapping[str, Any]) -> float:
    """Return the drain timeout of the workers from the [fault_tolerance] table.

    A value that is no number is left to the workers, which refuse it.
    """
    seconds = table.get("drain_timeout_seconds", FaultTolerance.drain_timeout_seconds)
    if not isinstance(seconds, int | float) or not math.isfinite(seconds) or seconds < 0:
        return FaultTolerance.drain_timeout_seconds
    return float(seconds)


def _environment(options: Group, lighthouse: str, environ: Mapping[str, str]) -> dict[str, str]:
    found = {
        LIGHTHOUSE_VARIABLE: lighthouse,
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONUNBUFFERED": environ.get("PYTHONUNBUFFERED", "1"),
        "RUST_LOG": choose_native_log(environ),
        # See `default_env` of the agent, whose module takes torch.
        "TORCH_DIST_USE_NCCL2": environ.get("TORCH_DIST_USE_NCCL2", "0"),
    }
    if options.metrics_port:
        found[PORT_ENV] = options.metrics_port
    if options.host_deaths:
        found["TITAN_FT_HOST_DEATHS"] = str(options.host_deaths)
        found["TITAN_FT_HOST_WINDOW"] = str(options.host_window)
        found["TITAN_FT_ON_HOST_SUSPECTED"] = options.on_host_suspected
    return found
