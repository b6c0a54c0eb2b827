# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The chaos agent in a worker injects the faults that only a process can inflict on itself.

It exists only with `[fault_tolerance] chaos = true`. A thread follows the run's file of orders.
Without an order for this worker, the agent touches nothing of training.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from titan_ft.chaos.inside.link import Location
from titan_ft.chaos.inside.target_worker import TargetWorker
from titan_ft.chaos.inside.task import Task
from titan_ft.chaos.orders import LIFETIME_SECONDS, Order
from titan_ft.faults.catalogue import FAULTS, make_fault
from titan_ft.faults.inside import InWorker
from titan_ft.run.log import EventLog
from titan_ft.run.paths import RunPaths
from titan_ft.run.tail import FileTail

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from titan_ft.host.titan import JobConfig
    from titan_ft.training.links import Links
    from titan_ft.training.worker import WorkerSetup

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05


class ChaosAgent:
    """Takes the orders for one worker. `fault_injected` is written before each fault.

    The trainer calls `at_step` on the training thread, and `close` at the end. Orders are read on
    the agent's own thread. After `close` no fault is waiting and no packet is lost. See
    docs/chaos.md.

    Args:
        orders: the file of orders, which may not exist yet.
        worker: the worker that the faults act on.
        replica, rank, attempt: slot, rank and attempt of the worker.
    """

    def __init__(
        self,
        orders: Path,
        worker: TargetWorker,
        events: EventLog,
        *,
        replica: int,
        rank: int,
        attempt: int,
    ) -> None:
        self._worker = worker
        self._events = events
        self._replica = replica
        self._rank = rank
        self._attempt = attempt
        self._tail = FileTail(orders)
        self._started = time.time()
        self._waiting: list[Task] = []
        self._thread = threading.Thread(target=self._follow, name="titan_ft_chaos", daemon=True)
        self._thread.start()

    def at_step(self, step: int) -> None:
        """Run the actions that faults have queued until now; training thread only."""
        self._worker.step = step
        while self._worker.between_steps:
            self._worker.between_steps.popleft()()

    def close(self) -> None:
        """Skip all waiting faults, and end an outage of the network. A second call does nothing."""
        self._worker.closing.set()
        self._thread.join()
        for task in self._waiting:
            task.skip("training ended before there was an occasion for it")
        self._worker.wait_for_network()

    def _follow(self) -> None:
        while not self._worker.closing.wait(_POLL_SECONDS):
            # Each call returns a block of lines, until it returns none.
            for lines in iter(self._tail.poll, b""):
                for line in lines.splitlines():
                    self._carry_out(line)
            for task in self._waiting:
                task.expire()
            self._waiting = [task for task in self._waiting if task.waits]

    def _carry_out(self, line: bytes) -> None:
        try:
            self._take(msgspec.json.decode(line, type=Order))
        # This is the end of a thread: whatever a fault raises, training goes on.
        except Exception:
            logger.exception("this order could not be carried out: %r", line)

    def _take(self, order: Order) -> None:
        if not self._is_for_me(order):
            return
        fault = make_fault(order.fault, order.params) if order.fault in FAULTS else None
        each_rank = isinstance(fault, InWorker) and fault.each_rank
        several_may_act = order.replica is None or (order.rank is None and not each_rank)
        claim = self._worker.folder / f"{order.id}.taken" if several_may_act else None
        task = Task(order, self._events, (self._replica, self._rank), claim)
        if isinstance(fault, InWorker):
            self._waiting.append(task)
            fault.start(task, self._worker)
        else:
            task.skip("this worker's agent does not know it")

    def _is_for_me(self, order: Order) -> bool:
        # An older order was for an earlier attempt of this worker, which may have died of it.
        oldest = max(self._started, time.time() - LIFETIME_SECONDS)
        if order.time < oldest:
            return False
        if order.replica not in (None, self._replica):
            return False
        if order.rank not in (None, self._rank):
            return False
        return order.attempt in (None, self._attempt)


def start_agent(
    job_config: JobConfig,
    launch: WorkerSetup,
    links: Links,
    events: EventLog,
    *,
    group_pids: Collection[int],
    model_parts: list[nn.Module],
    parameters: Mapping[str, torch.Tensor],
    optimizers: Iterable[Optimizer],
) -> ChaosAgent:
    """Start the chaos agent of a worker that has joined the other groups.

    Args:
        group_pids: processes of the worker's own group.
    """
    config = job_config.fault_tolerance
    orders = RunPaths(job_config.job.dump_folder).chaos_orders
    worker = TargetWorker(
        model_parts=model_parts,
        parameters=parameters,
        optimizers=optimizers,
        process_group=links.membership.process_group,
        server=links.server,
        group_pids={launch.store_pid, os.getppid(), *group_pids},
        store=launch.store,
        hang_timeout_seconds=config.hang_timeout_seconds,
        folder=orders.parent,
    )
    try:
        Location.own(config.replica_id, launch.rank, links.host, launch.store_pid).publish(
            orders.parent
        )
    # A full disk must not end training. Without the file, only faults of links are impossible.
    except OSError as error:
        logger.warning(
            "this worker's links cannot be broken: it cannot say where it is (%s)", error
        )
    logger.warning("fault_tolerance.chaos is true: this worker breaks as %s orders", orders)
    return ChaosAgent(
        orders, worker, events, replica=config.replica_id, rank=launch.rank, attempt=launch.attempt
    )
