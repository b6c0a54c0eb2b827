# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One attempt of a heal: the transfer of a state, and the queue of the updates since.

While the state of step s travels, the other groups commit s+1, s+2, ... The joiner takes part in
these exchanges without gradients, and keeps their sums. The same updates, applied to the fetched
state, give the same bytes. `protocol/healing.py` decides whether an update fits, and when the
attempt is void. This module has the thread and the memory.

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


class Fetched(enum.IntEnum):
    """How far a rank's fetch is. The smallest value of the group's ranks counts."""

    FAILED = 0
    PENDING = 1
    DONE = 2


class CatchUp:
    """The transfer of one attempt, and its queue.

    `Heal` calls it on the training thread. The fetch runs on a thread of its own. After a failure,
    `fetched` returns FAILED, and `Heal` drops the attempt.

    Args:
        fetch: fetches this rank's part until its first argument is set. Calls its second argument
            with the share of the part that has arrived.
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
        thread = ThreadPoolExecutor(1, "titan_ft_catch_up", initializer=device.for_thread())
        self._fetch: Future[Snapshot] = thread.submit(self._time, fetch)
        thread.shutdown(wait=False)

    def _time(self, fetch: Fetch) -> Snapshot:
        try:
            return fetch(self._cancelled, self._note_share)
        finally:
            self.fetch_seconds = self.seconds

    def _note_share(self, share: float) -> None:
        self._arrived_share = share

    # The transfer

    @property
    def seconds(self) -> float:
        """Time since the start of the attempt."""
        return time.monotonic() - self._started

    def fetched(self) -> Fetched:
        """Return how far this rank's fetch is."""
        if not self._fetch.done():
            return Fetched.PENDING
        return Fetched.FAILED if self.error else Fetched.DONE

    def wait(self, seconds: float) -> None:
        """Wait for the end of this rank's fetch, at most for this time."""
        with contextlib.suppress(TimeoutError):
            self._fetch.exception(max(0.0, seconds))

    @property
    def error(self) -> str | None:
        """Why the fetch failed; None while it runs, and if it worked."""
        failure = self._fetch.exception() if self._fetch.done() else None
        if failure is None:
            return None
        # A refusal must not end this group. After a donor died, a stranger's process may answer at
        # its address. Groups with another token never meet this one.
        if not isinstance(failure, TransferError | RefusedError):
            raise failure
        return str(failure)

    def cancel(self) -> None:
        """End the fetch, and drop the queue.

        The fetch's error refers to this attempt. Without an explicit drop, memory of a GPU would
        wait for a garbage collection.
        """
        self._cancelled.set()
        self._updates.clear()

    def snapshot(self) -> Snapshot:
        """Return the fetched state."""
        return self._fetch.result(timeout=0)

    # The queue

    def keep(self, update: Update, place: int) -> None:
        """Put an update at a place of the queue. Updates from there on are dropped."""
        self._updates[place:] = [update]
        if len(self._updates) == self._max_queued // 2:
            self._share_at_half = self._arrived_share

    def take(self, place: int) -> Update:
        """Return an update for its replay. The queue drops its sums."""
        update = self._updates[place]
        self._updates[place] = update.without_sums()
        return update

    @property
    def newer_would_be_in_time(self) -> bool:
        """True if this rank's part of a newer state would arrive before a new queue is full.

        The pace of the queue's second half counts. The reason for a slow first half may be over,
        such as the death of a donor.
        """
        if self._fetch.done():
            return True
        num_updates = self._max_queued - self._max_queued // 2
        share = self._arrived_share - self._share_at_half  # of the part, in these updates
        # The whole part must arrive within `max_queued` updates: share / num_updates >= 1 /
        # max_queued.
        return self._max_queued * share >= num_updates
