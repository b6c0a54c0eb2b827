# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Plan scripts/check_gpu.sh: the GPUs that torch finds, the GPUs of each group, the config of each
run.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.systems import NUM_GROUPS, OURS, STOCK, Config, Job, derive_config
from titan_ft.config import ConfigError
from titan_ft.launch.group.worker_group import choose_devices
from titan_ft.training.divisions import DEGREES

BACKENDS = ("gloo", "nccl")
CPU_RANKS = 2
"""In place of GPUs with --cpu."""
DEADLY_ATTEMPT = 2
"""Of a group that is killed twice: the first one after the second kill dies in set-up
(`benchmarks.death`).
"""
_PROBE = """
import json, torch
indices = range(torch.cuda.device_count())
names = [torch.cuda.get_device_name(index) for index in indices]
memory_gb = [torch.cuda.get_device_properties(index).total_memory / 1e9 for index in indices]
nccl = torch.cuda.nccl.version() if names and torch.distributed.is_nccl_available() else ()
cuda = torch.version.cuda or torch.version.hip
print(json.dumps({"names": names, "cuda": cuda, "nccl": ".".join(map(str, nccl)), "memory_gb": memory_gb}))
"""


@dataclass(frozen=True)
class Gpus:
    """The GPUs that torch can use here.

    Attributes:
        names: names of the GPUs.
        cuda: the version that torch was built for; None for a CPU.
        nccl: the version; empty without NCCL.
        memory_gb: memory of each GPU.
        driver: the version; empty if nvidia-smi does not report it.
    """

    names: list[str]
    cuda: str | None
    nccl: str
    memory_gb: list[float] = field(default_factory=list)
    driver: str = ""


@dataclass(frozen=True)
class Plan:
    """The GPUs of each group, and the possible connections between two groups.

    Attributes:
        num_gpus: GPUs in use; on a CPU the ranks that stand for them.
        small: fewer steps, less memory, and no run at size.
    """

    num_gpus: int
    on_cpu: bool = False
    has_nccl: bool = True
    small: bool = False

    @property
    def num_ranks(self) -> int:
        """Return the ranks of a group."""
        return max(1, self.num_gpus // NUM_GROUPS)

    def gpus(self, replica: int) -> list[str]:
        """Return the GPUs of a group, among those in use, as the launcher assigns them."""
        devices = [str(index) for index in range(self.num_gpus)]
        return choose_devices(replica, self.num_ranks, devices) or []

    def why_not(self, backend: str) -> str:
        """Say why a process group cannot be between the groups; empty if it can."""
        if backend == "gloo":
            return ""
        if self.on_cpu:
            return f"needs {NUM_GROUPS} GPUs"
        if not self.has_nccl:
            return "left out: this torch has no NCCL"
        return "" if self.num_gpus >= NUM_GROUPS else f"needs {NUM_GROUPS} GPUs"

    @property
    def backends(self) -> list[str]:
        """Return what can be between the groups."""
        return [backend for backend in BACKENDS if not self.why_not(backend)]

    def describe(self) -> str:
        """Return the plan in one line."""
        if self.on_cpu:
            return f"{NUM_GROUPS} groups x {self.num_ranks} ranks on the CPU: nothing of this says anything about a GPU"
        return "; ".join(
            f"group {replica} on GPU {', '.join(self.gpus(replica))}"
            for replica in range(NUM_GROUPS)
        )

    def stock(self, run_dir: Path, same_steps: bool) -> Job:
        """Return the job of stock torchtitan for the comparison: one job with as many ranks.

        In two cases it has one rank that does the work of both groups in turn: if they share a GPU,
        and, if each has one rank, if the job must make the `same_steps` (torchtitan's DDP averages
        gradients twice).
        """
        alone = self._alone(same_steps)
        return Job(STOCK, run_dir, *((1, 1) if alone else (NUM_GROUPS, self.num_ranks)))

    def _alone(self, same_steps: bool) -> bool:
        return self.num_gpus == 1 or (self.num_ranks == 1 and same_steps)

    def describe_stock(self) -> str:
        """Return what the groups are compared with, in a line."""
        alone, ranks = (
            "one rank that does the work of both groups",
            f"{NUM_GROUPS} x {self.num_ranks} ranks",
        )
        if self._alone(same_steps=False):
            return f"stock torchtitan: {alone}"
        if self._alone(same_steps=True):
            return f"stock torchtitan: {alone}; for step times DDP of {ranks}"
        return f"stock torchtitan: HSDP of {ranks}"

    def groups(self, run_dir: Path, max_restarts: int = 0) -> Job:
        """Return the job of the two groups."""
        return Job(OURS, run_dir, NUM_GROUPS, self.num_ranks, max_restarts)


def probe() -> Gpus:
    """Ask torch for its GPUs, in a process of its own that leaves them free.

    Raises:
        ConfigError: torch cannot be loaded.
    """
    asked = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True)
    if asked.returncode != 0:
        raise ConfigError(
            f"torch of {sys.executable} fails: {(asked.stderr.strip() or 'no word').splitlines()[-1]}"
        )
    return replace(Gpus(**json.loads(asked.stdout.splitlines()[-1])), driver=_driver())


def _driver() -> str:
    """Return the version of NVIDIA's driver; empty where nvidia-smi does not report it."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip().partition("\n")[0] if asked.returncode == 0 else ""


def make_plan(wanted: int | None, on_cpu: bool, gpus: Gpus, small: bool = False) -> Plan:
    """Return the plan.

    Args:
        wanted: number of GPUs; None takes all.
        on_cpu: that many ranks in place of GPUs.
        gpus: the existing GPUs.
        small: see `Plan`.

    Raises:
        ConfigError: there is no GPU, or fewer than asked for.
    """
    if wanted is not None and wanted < 1:
        raise ConfigError(f"--gpus must be at least 1, got {wanted}")
    if on_cpu:
        return Plan(wanted or CPU_RANKS, on_cpu=True, small=True)
    if not gpus.names:
        built = f"was built for {gpus.cuda}" if gpus.cuda else "was built for CPUs"
        raise ConfigError(
            f"needs a GPU, and torch of {sys.executable} finds none ({built}); --cpu tries it without"
        )
    if (wanted or 1) > len(gpus.names):
        raise ConfigError(
            f"--gpus must be at most {len(gpus.names)}, which torch finds here, got {wanted}"
        )
    num_gpus = wanted or len(gpus.names)
    used = num_gpus if num_gpus == 1 else num_gpus // NUM_GROUPS * NUM_GROUPS
    return Plan(used, has_nccl=bool(gpus.nccl), small=small)


def base_config(given: Mapping[str, Any]) -> Config:
    """Return the config that all runs derive theirs from: data parallelism, one microbatch a rank
    and step.

    Raises:
        ConfigError: the config has another parallelism, which nothing here compares.
    """
    config = {
        table: {} for table in ("training", "parallelism", "fault_tolerance")
    } | copy.deepcopy(dict(given))
    for name in DEGREES:
        if (degree := config["parallelism"].get(f"{name}_degree", 1)) != 1:
            raise ConfigError(
                f"parallelism.{name}_degree must be 1 for this comparison, got {degree}; remove it"
            )
    for table, name in (("fault_tolerance", "semi_sync_method"), ("experimental", "custom_import")):
        if value := config.get(table, {}).get(name):
            raise ConfigError(
                f"{table}.{name} must be left out of this comparison, got {value!r}; remove it"
            )
    config["parallelism"]["data_parallel_shard_degree"] = -1
    config["training"].setdefault("local_batch_size", 8)  # torchtitan's default
    config["training"].pop("global_batch_size", None)
    for table in ("checkpoint", "validation"):
        config[table] = {**config.get(table, {}), "enable": False}
    return config


def recipe_config(given: Mapping[str, Any]) -> Config:
    """Return the config of a recipe's run, on the packaged text if the recipe's tokenizer is
    missing here.

    Raises:
        ConfigError: see `base_config`.
    """
    config = base_config(given)
    model = config.setdefault("model", {})
    if not Path(model.get("hf_assets_path", "")).is_dir():
        model["hf_assets_path"] = "titan_ft://tokenizer"
    config["training"]["dataset"] = "austen"
    table = config["fault_tolerance"]
    table["min_replica_size"] = min(table.get("min_replica_size", 1), NUM_GROUPS)
    return config


def job_config(
    base: Config, job: Job, backend: str, steps: int, log_freq: int, **tables: Config
) -> Config:
    """Return what a run reads.

    Args:
        backend: between the groups.
        tables: of further fields.
    """
    config = derive_config(base, job, steps, log_freq)
    if job.system == OURS:
        config["fault_tolerance"]["process_group"] = backend
    elif job.num_groups == 1:
        config["training"]["global_batch_size"] = (
            NUM_GROUPS * config["training"]["local_batch_size"]
        )
    for table, values in tables.items():
        config[table] = {**config.get(table, {}), **values}
    return config
