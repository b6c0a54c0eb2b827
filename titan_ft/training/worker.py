# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One worker: its settings from the environment, and its log of events."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import asdict, dataclass

from titan_ft import device, versions
from titan_ft.host.titan import JobConfig
from titan_ft.round_settings import steps_per_round
from titan_ft.run.events import Setup, WorkerConfig, WorkerStarted
from titan_ft.run.log import EventLog
from titan_ft.run.orphan import PARENT_PID_ENV
from titan_ft.run.paths import RunPaths

DEGREES = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "pipeline_parallel_degree",
    "expert_parallel_degree",
)
"""Fields of torchtitan's `[parallelism]` that shape a group."""


@dataclass(frozen=True)
class WorkerSetup:
    """The settings of this worker, from its environment.

    Attributes:
        rank: rank in the replica group.
        store: host and port of the group's TCPStore.
        lighthouse: its address, http://host:port, or file:PATH.
        token: the run's shared secret.
        attempt: earlier starts of this group.
        config_digest: hex hash of the settings that must be equal in all groups.
        slurm: Slurm's ids of this worker's job and step; None without Slurm.
        store_pid: process that serves the group's store; 0 if unknown.
        ranks_on_host: ranks, of this group and of others, that share this host's memory.
        arguments: this worker's command line, without the program.
    """

    rank: int
    store: tuple[str, int]
    lighthouse: str
    token: str
    attempt: int
    config_digest: str
    slurm: dict[str, str] | None = None
    store_pid: int = 0
    ranks_on_host: int = 1
    arguments: tuple[str, ...] = ()


def open_events(job_config: JobConfig, setup: WorkerSetup) -> EventLog:
    """Open this worker's log of events, and write the first event: the worker and its settings."""
    config = job_config.fault_tolerance
    paths = RunPaths(job_config.job.dump_folder)
    path = paths.worker_events(config.replica_id, setup.rank, setup.attempt, os.getpid())
    events = EventLog(path, replica=config.replica_id, rank=setup.rank, attempt=setup.attempt)
    settings = WorkerConfig(
        group_size=config.group_size,
        min_replica_size=config.min_replica_size,
        digest_every=config.digest_every,
        batch_policy=config.batch_policy,
        lr_policy=config.lr_policy,
        hang_timeout_seconds=config.hang_timeout_seconds,
        chaos=config.chaos,
        steps=job_config.training.steps,
        checkpoint=job_config.checkpoint.enable,
        semi_sync_method=config.semi_sync_method,
        sync_steps=None if config.semi_sync_method is None else config.sync_steps,
        round_steps=None if config.semi_sync_method is None else steps_per_round(config),
    )
    events.emit(
        WorkerStarted(
            config_digest=setup.config_digest,
            host=socket.gethostname(),
            slurm=setup.slurm,
            agent_pid=int(os.environ.get(PARENT_PID_ENV, "0")) or None,
            config=settings,
            setup=describe(job_config),
            arguments=list(setup.arguments),
        )
    )
    return events


def describe(job_config: JobConfig) -> Setup:
    """Return the model, the data and the software of this worker."""
    training = job_config.training
    model = job_config.model
    degrees = asdict(job_config.parallelism)
    # 1 splits nothing, and -1 stands for all ranks that are left.
    parallelism = {name: degrees[name] for name in DEGREES if degrees[name] not in (1, -1)}
    return Setup(
        model=f"{model.name} {model.flavor}",
        dataset=training.dataset,
        seq_len=training.seq_len,
        local_batch_size=training.local_batch_size,
        global_batch_size=training.global_batch_size,
        parallelism=parallelism,
        device=device.name(),
        accelerator=not device.on_cpu(),
        num_cpus=len(os.sched_getaffinity(0)),
        versions={**versions(), "python": platform.python_version()},
    )
