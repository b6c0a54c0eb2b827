# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One attempt of a heal: the transfer of a state, and the queue of the updates after it.

While a joiner fetches the state after update s, the other groups make the updates s+1, s+2, ... The
joiner takes part in these rounds without gradients, and keeps the sums of their gradients. Later it
applies the same updates to the fetched state, and gets the same bytes as the others.

`protocol/healing.py` decides whether an update fits into the queue, and when the attempt ends. This
module has the thread and the memory.

See docs/heal.md.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from titan_ft import device
from titan_ft.protocol.errors import RefusedError
from titan_ft.protocol.round import Update
from titan_ft.transfer.snapshot import Snapshot
from titan_ft.transfer.wire import TransferError

Fetch: TypeAlias = Callable[[threading.Event, Callable[[float], None]], Snapshot]


class FetchStatus(enum.IntEnum):
    """How far a rank's fetch is. The smallest value of the group's ranks counts."""

    FAILED = 0
    PENDING = 1
    DONE = 2


class CatchUp:
    """The transfer of one attempt, and its queue.

    `Heal` creates one for each attempt, and calls all methods on the training thread. The fetch
    runs on a thread of its own. If it fails, `fetch_status` returns FAILED, and `Heal` drops this
    object.

    Args:
        fetch: function(cancelled, report_share), which fetches this rank's part of the state. It
            ends early if the event `cancelled` is set. It calls `report_share` with the share of
            the part that has arrived.
        max_queued: number of updates that may be queued.

    Attributes:
        fetch_seconds: duration of the fetch; 0 while it runs.
    """

    def __init__(self, fetch: Fetch, max_queued: int) -> None:
        self._max_queued = max_queued
        self._updates: list[Update] = []
        self._arrived_share = 0.0  # of this rank's part
        self._share_at_half = 0.0  # `_arrived_share` when the queue was half full
        self._started = time.monotonic()
        self.fetch_seconds = 0.0
        self._cancelled = threading.Event()
        thread = ThreadPoolExecutor(1, "titan_ft_catch_up", initializer=device.thread_initializer())
        self._fetch: Future[Snapshot] = thread.submit(self._run_fetch, fetch)
        thread.shutdown(wait=False)

    def _run_fetch(self, fetch: Fetch) -> Snapshot:
        """Fetch the state, on the fetch's thread."""
        try:
            return fetch(self._cancelled, self._set_arrived_share)
        finally:
            self.fetch_seconds = self.elapsed_seconds

    def _set_arrived_share(self, share: float) -> None:
        self._arrived_share = share

    # The transfer

    @property
    def elapsed_seconds(self) -> float:
        """Time since the start of the attempt."""
        return time.monotonic() - self._started

    @property
    def fetch_status(self) -> FetchStatus:
        """How far this rank's fetch is."""
        if not self._fetch.done():
            return FetchStatus.PENDING
        if self.error:
            return FetchStatus.FAILED
        return FetchStatus.DONE

    def wait_for_fetch(self, seconds: float) -> None:
        """Wait for the end of this rank's fetch, at most for this time."""
        with contextlib.suppress(TimeoutError):
            self._fetch.exception(max(0.0, seconds))

    @property
    def error(self) -> str | None:
        """Why the fetch failed; None while it runs, and if it worked."""
        if not self._fetch.done():
            return None
        failure = self._fetch.exception()
        if failure is None:
            return None
        # A donor that refuses this group's token must not end the group. It may be a process of
        # another run, which answers at the address of a dead donor. Groups of this run have the
        # same token.
        if not isinstance(failure, TransferError | RefusedError):
            raise failure
        return str(failure)

    def cancel(self) -> None:
        """End the fetch, and drop the queue.

        The traceback of the fetch's error refers to this object. So the queue must be dropped here:
        otherwise its memory of the GPU would be free only after a garbage collection.
        """
        self._cancelled.set()
        self._updates.clear()

    def get_snapshot(self) -> Snapshot:
        """Return the fetched state. The fetch must be DONE."""
        return self._fetch.result(timeout=0)

    # The queue

    def queue_update(self, update: Update, index: int) -> None:
        """Put an update at `index` of the queue. Drops the updates at this index and after it.

        An update that no group committed is replaced by the one that is made instead.
        """
        self._updates[index:] = [update]
        if len(self._updates) == self._max_queued // 2:
            self._share_at_half = self._arrived_share

    def get_for_replay(self, index: int) -> Update:
        """Return a queued update. The queue drops the update's sums, to free their memory."""
        update = self._updates[index]
        self._updates[index] = update.without_sums()
        return update

    @property
    def newer_would_be_in_time(self) -> bool:
        """True if this rank's part of a newer state would arrive before a new queue is full.

        The rate of the transfer during the second half of the queue is the forecast. The first half
        may have been slow for a reason that is over, such as the death of a donor.
        """
        if self._fetch.done():
            return True
        num_updates = self._max_queued - self._max_queued // 2
        share = self._arrived_share - self._share_at_half  # arrived during `num_updates` updates
        # The whole part arrives within `max_queued` updates if
        #     share / num_updates >= 1 / max_queued.
        return self._max_queued * share >= num_updates
