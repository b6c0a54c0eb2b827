# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The systems that the benchmark compares: what each reads as config, and what it starts.

All train the same model on the same data with two times two ranks. Each works in a folder of its own.
"""

from __future__ import annotations

import copy
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_ft.data.assets import resolve

NUM_GROUPS = 2
RANKS_PER_GROUP = 2
STOCK, OURS, PEER = "stock", "ours", "peer"
TITLES = {
    STOCK: "torchtitan HSDP 2x2, one job of 4 ranks",
    OURS: "titan_ft, 2 groups x 2 ranks",
    PEER: "torchtitan.experiments.ft, 2 groups x 2 ranks",
}
# What torchtitan's own [fault_tolerance] table knows of ours.
PEER_FIELDS = ("enable", "process_group", "process_group_timeout_ms", "group_size", "min_replica_size")
DIGEST_EVERY = 10
"""Five times as often as by default, so that each measured interval pays for one."""
# Without it torchrun's restarts fail more often than not: the new ranks read the addresses of the dead ones in the
# agent's store (https://github.com/pytorch/pytorch/issues/135712).
TORCHRUN_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

Config = dict[str, Any]


@dataclass(frozen=True)
class Command:
    """One process to start; a service (the lighthouse) runs until it is stopped."""

    name: str
    args: list[str]
    env: dict[str, str] = field(default_factory=dict)
    service: bool = False


def derive_config(base: Mapping[str, Any], system: str, run_dir: Path, steps: int, log_freq: int) -> Config:
    """Return what `system` reads: the base config with nothing changed but the form of its parallelism."""
    tables = ("job", "model", "training", "metrics", "fault_tolerance", "parallelism")
    config = {**{table: {} for table in tables}, **copy.deepcopy(dict(base))}
    config["job"] |= {"dump_folder": str(run_dir), "custom_config_module": "titan_ft.config"}
    config["model"]["hf_assets_path"] = resolve(config["model"].get("hf_assets_path", ""))
    config["training"]["steps"] = steps
    config["metrics"]["log_freq"] = log_freq
    config["fault_tolerance"] |= {"enable": True, "group_size": NUM_GROUPS, "digest_every": DIGEST_EVERY}
    if system == STOCK:
        del config["fault_tolerance"]
        degrees = {"data_parallel_replicate_degree": NUM_GROUPS, "data_parallel_shard_degree": RANKS_PER_GROUP}
        config["parallelism"] |= degrees
    elif system == PEER:
        config["job"]["custom_config_module"] = "torchtitan.components.ft.config"
        table = config["fault_tolerance"]
        config["fault_tolerance"] = {key: table[key] for key in PEER_FIELDS if key in table}
    return config


def commands(
    system: str, run_dir: Path, max_restarts: int, num_ranks: int = RANKS_PER_GROUP, flags: Sequence[str] = ()
) -> list[Command]:
    """Return what to start for a system whose config is in `run_dir`.

    Args:
        max_restarts: of each group.
        num_ranks: of each group.
        flags: further ones for `titan-ft launch`.
    """
    config = run_dir / "config.toml"
    restarts = f"--max-restarts={max_restarts}"
    if system == STOCK:
        worker = ["-m", "titan_ft.train", f"--job.config_file={config}"]
        return [Command(STOCK, [*_torchrun(run_dir, 0, NUM_GROUPS * num_ranks), restarts, *worker], TORCHRUN_ENV)]
    if system == OURS:
        launch = ["-m", "titan_ft", "launch", str(config), f"--replicas={NUM_GROUPS}"]
        launch += [f"--ranks-per-replica={num_ranks}", restarts, f"--run-dir={run_dir}", *flags]
        return [Command(OURS, [sys.executable, *launch])]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        bind = f"127.0.0.1:{probe.getsockname()[1]}"
    # torchft's own program with its own defaults; a group may go on alone, as in ours.
    lighthouse = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", bind, "--min_replicas", "1"]
    started = [Command("lighthouse", lighthouse, service=True)]
    for replica in range(NUM_GROUPS):
        worker = [str(Path(__file__).with_name("bench_peer.py")), f"--job.config_file={config}"]
        worker += [f"--fault_tolerance.replica_id={replica}"]
        env = {**TORCHRUN_ENV, "TORCHFT_LIGHTHOUSE": f"http://{bind}"}
        torchrun = [*_torchrun(run_dir, replica, num_ranks), restarts]
        started.append(Command(f"group-{replica}", [*torchrun, *worker], env))
    return started


def _torchrun(run_dir: Path, replica: int, num_ranks: int) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return [*command, "--redirects=3", f"--log-dir={run_dir / 'logs' / f'replica-{replica}'}"]


def rank_logs(system: str, run_dir: Path, replica: int) -> list[tuple[int, Path]]:
    """List attempt and log file of rank 0 of a group, in order of attempts."""
    logs = run_dir / "logs" / f"replica-{replica}"
    if system == OURS:
        found = [(int(path.parent.name.removeprefix("attempt-")), path) for path in logs.glob("attempt-*/rank-0.log")]
    else:
        paths = logs.glob("*/attempt_*/0/stdout.log")
        found = [(int(path.parents[1].name.removeprefix("attempt_")), path) for path in paths]
    return sorted(found)
