# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Start the chaos agent of one worker on the worker's parts."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

import torch
from torch import nn
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from titan_ft.chaos.inside.agent import ChaosAgent
from titan_ft.chaos.inside.victim import Victim
from titan_ft.chaos.inside.whereabouts import Whereabouts
from titan_ft.run.log import EventLog
from titan_ft.run.paths import RunPaths
from titan_ft.training.links import Links
from titan_ft.training.worker import Launch


def start_agent(
    job_config: JobConfig,
    launch: Launch,
    links: Links,
    events: EventLog,
    *,
    group_pids: Collection[int],
    model_parts: list[nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
) -> ChaosAgent:
    """Start the chaos agent of a worker that has joined the others; `group_pids` are the processes of its group."""
    config = job_config.fault_tolerance
    orders = RunPaths(job_config.job.dump_folder).chaos_orders
    victim = Victim(
        model_parts=model_parts,
        optimizers=optimizers,
        process_group=links.membership.process_group,
        server=links.server,
        friends={os.getppid(), *group_pids},
        store=launch.store,
        hang_timeout_seconds=config.hang_timeout_seconds,
        folder=orders.parent,
    )
    Whereabouts.own(config.replica_id, launch.rank, links.host).publish(orders.parent)
    logger.warning(f"fault_tolerance.chaos is true: this worker breaks as {orders} orders")
    return ChaosAgent(orders, victim, events, replica=config.replica_id, rank=launch.rank, attempt=launch.attempt)
