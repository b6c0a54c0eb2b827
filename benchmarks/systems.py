# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The compared systems: the config and the commands of each.

All train the same model on the same data, as two groups of two ranks by default.
"""

from __future__ import annotations

import copy
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_ft.data.assets import resolve
from titan_ft.run.paths import RunPaths

NUM_GROUPS = 2
RANKS_PER_GROUP = 2
STOCK, OURS, PEER = "stock", "ours", "peer"
TITLES = {
    STOCK: "torchtitan HSDP 2x2, one job of 4 ranks",
    OURS: "titan_ft, 2 groups x 2 ranks",
    PEER: "torchtitan.experiments.ft, 2 groups x 2 ranks",
}
PEER_MODULE = "benchmarks.peer"
PEER_FIELDS = (
    "enable",
    "process_group",
    "process_group_timeout_ms",
    "group_size",
    "min_replica_size",
)
"""What torchtitan's own [fault_tolerance] table knows of ours."""
DIGEST_EVERY = 10
"""Five times as often as by default, so that each measured interval pays for one."""
# Without it torchrun's restarts fail more often than not: the new ranks read the addresses of the
# dead ones in the agent's store (https://github.com/pytorch/pytorch/issues/135712).
TORCHRUN_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

Config = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What is to be started, in a folder of its own.

    Attributes:
        max_restarts: of each group; 0 where a restart would spoil the figures.
        flags: further ones, for `titan-ft launch` or for the peer's workers.
    """

    system: str
    run_dir: Path
    num_groups: int = NUM_GROUPS
    num_ranks: int = RANKS_PER_GROUP
    max_restarts: int = 0
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """One process to start; a service (the lighthouse) runs until it is stopped."""

    name: str
    args: list[str]
    env: dict[str, str] = field(default_factory=dict)
    service: bool = False


def derive_config(base: Mapping[str, Any], job: Job, steps: int, log_freq: int) -> Config:
    """Return what a system reads: the base config with nothing changed but the form of its
    parallelism.
    """
    tables = ("job", "model", "training", "metrics", "fault_tolerance", "parallelism")
    config = {**{table: {} for table in tables}, **copy.deepcopy(dict(base))}
    config["job"] |= {"dump_folder": str(job.run_dir), "custom_config_module": "titan_ft.config"}
    config["model"]["hf_assets_path"] = resolve(config["model"].get("hf_assets_path", ""))
    config["training"]["steps"] = steps
    config["metrics"]["log_freq"] = log_freq
    config["fault_tolerance"] |= {
        "enable": True,
        "group_size": job.num_groups,
        "digest_every": DIGEST_EVERY,
    }
    if job.system == STOCK:
        del config["fault_tolerance"]
        degrees = {
            "data_parallel_replicate_degree": job.num_groups,
            "data_parallel_shard_degree": job.num_ranks,
        }
        config["parallelism"] |= degrees
    elif job.system == PEER:
        config["job"]["custom_config_module"] = "torchtitan.components.ft.config"
        table = config["fault_tolerance"]
        config["fault_tolerance"] = {key: table[key] for key in PEER_FIELDS if key in table}
    return config


def commands(job: Job) -> list[Command]:
    """Return the commands of a job whose config is in its folder."""
    config = RunPaths(job.run_dir).config
    if job.system == STOCK:
        torchrun = _torchrun(job, 0, job.num_groups * job.num_ranks)
        return [
            Command(
                STOCK, [*torchrun, "titan_ft.train", f"--job.config_file={config}"], TORCHRUN_ENV
            )
        ]
    if job.system == OURS:
        launch = ["-m", "titan_ft", "launch", str(config), f"--replicas={job.num_groups}"]
        launch += [f"--ranks-per-replica={job.num_ranks}", f"--max-restarts={job.max_restarts}"]
        return [Command(OURS, [sys.executable, *launch, f"--run-dir={job.run_dir}", *job.flags])]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        bind = f"127.0.0.1:{probe.getsockname()[1]}"
    # torchft's own program with its own defaults; a group may go on alone, as in ours.
    lighthouse = [
        str(Path(sys.executable).with_name("torchft_lighthouse")),
        "--bind",
        bind,
        "--min_replicas",
        "1",
    ]
    started = [Command("lighthouse", lighthouse, service=True)]
    for replica in range(job.num_groups):
        worker = [
            PEER_MODULE,
            *job.flags,
            f"--job.config_file={config}",
            f"--fault_tolerance.replica_id={replica}",
        ]
        env = {**TORCHRUN_ENV, "TORCHFT_LIGHTHOUSE": f"http://{bind}"}
        started.append(
            Command(f"group-{replica}", [*_torchrun(job, replica, job.num_ranks), *worker], env)
        )
    return started


def _torchrun(job: Job, replica: int, num_ranks: int) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
    ]
    command += ["--redirects=3", f"--log-dir={job.run_dir / 'logs' / f'replica-{replica}'}"]
    return [*command, f"--max-restarts={job.max_restarts}", "-m"]


def first_log(job: Job) -> Path:
    """Return the log of rank 0 of the first attempt of group 0, in a job that was started.

    Raises:
        FileNotFoundError: it has not been written.
    """
    own = RunPaths(job.run_dir).logs(0, 0, 0)
    found = (
        [own] if job.system == OURS else job.run_dir.glob("logs/replica-0/*/attempt_0/0/stdout.log")
    )
    for path in found:
        if path.is_file():
            return path
    raise FileNotFoundError(f"no log of rank 0 below {job.run_dir}")
