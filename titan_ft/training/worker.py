# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One worker: what its environment says of it, and the log of events that it opens."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from torchtitan.config import JobConfig

from titan_ft.run.events import WorkerConfig, WorkerStarted
from titan_ft.run.log import EventLog
from titan_ft.run.paths import RunPaths


@dataclass(frozen=True)
class Launch:
    """What the environment says of this worker.

    Attributes:
        rank: in the replica group.
        store: host and port of the group's TCPStore.
        lighthouse: its address, http://host:port.
        token: the run's shared secret.
        attempt: how often this group was started before.
        config_digest: hex hash of what must be equal in all groups.
        slurm: Slurm's ids of the job and the step that this worker belongs to; None = not under Slurm.
    """

    rank: int
    store: tuple[str, int]
    lighthouse: str
    token: str
    attempt: int
    config_digest: str
    slurm: dict[str, str] | None = None


def begin_events(job_config: JobConfig, launch: Launch) -> EventLog:
    """Open this worker's log of events, with its first one: who runs with which settings."""
    config = job_config.fault_tolerance
    path = None
    if config.events_folder:
        paths = RunPaths(job_config.job.dump_folder, events=config.events_folder)
        path = paths.worker_events(config.replica_id, launch.rank, launch.attempt, os.getpid())
    events = EventLog(path, replica=config.replica_id, rank=launch.rank, attempt=launch.attempt)
    settings = WorkerConfig(
        group_size=config.group_size,
        min_replica_size=config.min_replica_size,
        digest_every=config.digest_every,
        batch_policy=config.batch_policy,
        lr_policy=config.lr_policy,
        catch_up=config.catch_up,
        hang_timeout_seconds=config.hang_timeout_seconds,
        chaos=config.chaos,
        steps=job_config.training.steps,
        checkpoint=job_config.checkpoint.enable,
    )
    host = socket.gethostname()
    events.emit(WorkerStarted(config_digest=launch.config_digest, host=host, slurm=launch.slurm, config=settings))
    return events
