# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The log of a committed step: an event, and torchtitan's metrics."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from titan_ft import device
from titan_ft.engine.step import Committed
from titan_ft.engine.work import Work
from titan_ft.host.titan import MetricsProcessor
from titan_ft.run.events import StepCommitted
from titan_ft.run.log import EventLog, stamp


class StepLog:
    """Logs one rank's committed steps.

    The trainer calls it, on the training thread. A thread of its own writes each event, because the
    device may still compute the update.

    Args:
        slot: slot of this rank's group.
    """

    def __init__(self, events: EventLog, metrics: MetricsProcessor, slot: int) -> None:
        self._events = events
        self._metrics = metrics
        self._slot = slot
        # Done when the last event is written; None if no event is on its way.
        self._written: Future[None] | None = None

    def flush(self) -> None:
        """Wait until the events of all steps are emitted.

        Raises:
            RuntimeError: the last step's gradient norm could not be read from the device.
        """
        if self._written is not None:
            written, self._written = self._written, None
            written.result()

    def emit(self, committed: Committed, work: Work, step: int, digest: str | None) -> None:
        """Emit the event of a committed step. Does not wait for the device: a thread does.

        Args:
            step: torchtitan's step after the update.
            digest: digest of the state after the update, if it was taken.

        Raises:
            RuntimeError: see `flush`.
        """
        update = committed.update
        read = {reading.entry.slot: reading.describe() for reading in work.readings}
        event = StepCommitted(
            step=update.step,
            inner_step=step,
            inner_steps=work.inner_steps,
            lineage=f"{update.lineage:012x}",
            parent=f"{committed.parent:012x}",
            participants=committed.participants,
            tokens=committed.valid_tokens,
            loss=committed.loss,
            own_tokens=committed.own_tokens,
            own_loss=committed.own_loss,
            grad_norm=None,
            lr=work.lr,
            seconds=work.seconds,
            exchanges=committed.num_exchanges,
            exchange_seconds=work.exchange_seconds,
            waits=list(committed.waits),
            wire_bytes=work.wire_bytes,
            compute_seconds=work.compute_seconds,
            apply_seconds=work.seconds - work.exchange_seconds - work.compute_seconds,
            forward_passes=sum(reading.entry.num_batches for reading in work.readings),
            data=read.pop(self._slot, None),
            extra_data=list(read.values()),
            batches={
                entry.slot: (entry.first_batch, entry.num_batches) for entry in update.entries
            },
            digest=digest,
            memory_bytes=device.memory_bytes(),
        )
        stamp(event)
        # Events are written in the order of the steps. The previous one is written by now.
        self.flush()
        self._written = device.in_background(
            partial(self._write, event, work.grad_norm), "titan_ft_step_log"
        )

    def _write(self, event: StepCommitted, grad_norm: Callable[[], float]) -> None:
        event.grad_norm = grad_norm()
        self._events.emit(event, is_stamped=True)

    def log(
        self, committed: Committed, work: Work, step: int, ntokens_seen: int, heal_seconds: float
    ) -> None:
        """Log torchtitan's metrics, if a step of this update is due to be logged.

        Args:
            step: torchtitan's step after the update; the metrics are logged under it.
            ntokens_seen: tokens of all committed updates.
            heal_seconds: duration of the last heal.
        """
        metrics = self._metrics
        steps = range(work.first_step, step + 1)
        if not any(metrics.should_log(each) for each in steps):
            return
        # torchtitan takes the mean of the loading times. There is none if another group has read
        # this group's slot.
        if not metrics.data_loading_times:
            metrics.data_loading_times.append(0.0)
        metrics.log(
            step,
            committed.loss,
            committed.max_loss,
            work.grad_norm(),
            extra_metrics={
                "n_tokens_seen": ntokens_seen,
                "lr": work.lr,
                "ft/participants": len(committed.participants),
                "ft/exchange(s)": work.exchange_seconds,
                "ft/retries": committed.num_exchanges - 1,
                "ft/heal(s)": heal_seconds,
                "ft/slowest": committed.slowest_ratio,
            },
        )
