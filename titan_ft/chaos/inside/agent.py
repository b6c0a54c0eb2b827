# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The agent in a worker that carries out the faults which only a process can inflict on itself.

It exists only with `[fault_tolerance] chaos = true`. A thread follows the run's file of orders; as long as none is for
this worker, nothing of training is touched.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from titan_ft.chaos.inside.faults import AT_ONCE, DONOR, IN_WAITING, WHOLE_GROUP
from titan_ft.chaos.inside.shot import Order, Shot
from titan_ft.chaos.inside.victim import Victim
from titan_ft.chaos.orders import LIFETIME_SECONDS
from titan_ft.run.log import EventLog
from titan_ft.run.tail import FileTail

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05


class ChaosAgent:
    """Takes the orders for one worker. Each is told of as `fault_injected` before it is carried out.

    Args:
        orders: the file of orders, which may not exist yet.
        victim: what the faults act on.
        replica, rank, attempt: which worker this is.
    """

    def __init__(
        self, orders: Path, victim: Victim, events: EventLog, *, replica: int, rank: int, attempt: int
    ) -> None:
        self._victim, self._events = victim, events
        self._replica, self._rank, self._attempt = replica, rank, attempt
        self._tail = FileTail(orders)
        self._born = time.time()
        self._waiting: list[Shot] = []
        self._thread = threading.Thread(target=self._follow, name="titan_ft_chaos", daemon=True)
        self._thread.start()

    def at_step(self, step: int) -> None:
        """Carry out what is to happen before `step`; training thread only."""
        self._victim.step = step
        while self._victim.between_steps:
            self._victim.between_steps.popleft()()

    def close(self) -> None:
        """Give up what still waits for its occasion, and end an outage; a second call does nothing."""
        self._victim.closing.set()
        self._thread.join()
        for shot in self._waiting:
            shot.skip("training ended before there was an occasion for it")

    def _follow(self) -> None:
        while not self._victim.closing.wait(_POLL_SECONDS):
            for line in self._tail.poll().splitlines():
                try:
                    self._take(Order.parse(line))
                except Exception:  # a thread's edge; whatever a fault's set-up does, training goes on
                    logger.exception("this order could not be carried out: %r", line)
            for shot in self._waiting:
                shot.expire()
            self._waiting = [shot for shot in self._waiting if shot.waits]

    def _take(self, order: Order) -> None:
        if not self._is_for_me(order):
            return
        one_of_many = order.replica is None or (order.rank is None and order.fault not in WHOLE_GROUP)
        claim = self._victim.folder / f"{order.id}.taken" if one_of_many or order.fault in DONOR else None
        shot = Shot(order, self._events, (self._replica, self._rank), claim)
        if order.fault in AT_ONCE:
            threading.Thread(
                target=AT_ONCE[order.fault], args=(shot, self._victim), name=f"titan_ft_{order.fault}", daemon=True
            ).start()
        elif order.fault in IN_WAITING:
            self._waiting.append(shot)
            IN_WAITING[order.fault](shot, self._victim)
        else:
            shot.skip("this worker's agent does not know it")

    def _is_for_me(self, order: Order) -> bool:
        # One that an earlier attempt of this worker has died of is not for this one.
        if order.time < max(self._born, time.time() - LIFETIME_SECONDS):
            return False
        return all(
            wanted in (None, own)
            for wanted, own in (
                (order.replica, self._replica),
                (order.rank, self._rank),
                (order.attempt, self._attempt),
            )
        )
