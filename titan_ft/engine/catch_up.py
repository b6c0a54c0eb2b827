# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""One attempt of a heal: the transfer of a state of step s, and the reduced gradients of the updates since.

While the state travels the other groups commit s+1, s+2, ... The joiner takes part in those exchanges with zeros and
keeps their sums. The same updates, applied to the fetched state, give the same bytes. Whether an update fits, and when
the attempt is void, says `protocol/healing.py`; here are the thread and the memory.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from titan_ft import device
from titan_ft.protocol.errors import RefusedError
from titan_ft.protocol.round import Update
from titan_ft.transfer.snapshot import Snapshot
from titan_ft.transfer.wire import TransferError


class Fetched(enum.IntEnum):
    """How far a rank's fetch is; the smallest value of its group counts."""

    FAILED = 0
    PENDING = 1
    DONE = 2


class CatchUp:
    """The transfer of one attempt, and its queue.

    Args:
        fetch: fetches this rank's part until the event it gets is set, and calls the function it gets with the share
            of the part that has arrived; runs on a thread of its own.
        max_queued: updates that may be queued.
    """

    def __init__(self, fetch: Callable[[threading.Event, Callable[[float], None]], Snapshot], max_queued: int) -> None:
        self._max_queued = max_queued
        self._updates: list[Update] = []
        self._share = 0.0  # of this rank's part, that has arrived
        self._share_at_half = 0.0  # when the queue was half full
        self._started = time.monotonic()
        self.fetch_seconds = 0.0  # duration of the fetch
        self._cancelled = threading.Event()
        thread = ThreadPoolExecutor(1, "titan_ft_catch_up", initializer=device.for_thread())
        self._fetch: Future[Snapshot] = thread.submit(self._time, fetch)
        thread.shutdown(wait=False)

    def _time(self, fetch: Callable[[threading.Event, Callable[[float], None]], Snapshot]) -> Snapshot:
        try:
            return fetch(self._cancelled, self._note_share)
        finally:
            self.fetch_seconds = self.seconds

    def _note_share(self, share: float) -> None:
        self._share = share

    # The transfer

    @property
    def seconds(self) -> float:
        """Return the time since the fetch began."""
        return time.monotonic() - self._started

    def fetched(self) -> Fetched:
        """Return how far this rank's fetch is."""
        if not self._fetch.done():
            return Fetched.PENDING
        return Fetched.FAILED if self.error else Fetched.DONE

    def wait(self, seconds: float) -> None:
        """Wait for the end of this rank's fetch, no longer than that."""
        with contextlib.suppress(TimeoutError):
            self._fetch.exception(max(0.0, seconds))

    @property
    def error(self) -> str | None:
        """Return why the fetch failed; None while it runs or when it worked."""
        failure = self._fetch.exception() if self._fetch.done() else None
        # A refusal is no end of this group: the process that answers at the address of a donor that died may be a
        # stranger's. The groups of another token never meet this one.
        if failure is not None and not isinstance(failure, TransferError | RefusedError):
            raise failure
        return None if failure is None else str(failure)

    def cancel(self) -> None:
        """End the fetch, and drop the queue.

        The fetch's error refers to this attempt: memory of a GPU must not wait for a garbage collection.
        """
        self._cancelled.set()
        self._updates.clear()

    def snapshot(self) -> Snapshot:
        """Return the fetched state."""
        return self._fetch.result(timeout=0)

    # The queue

    def keep(self, update: Update, place: int) -> None:
        """Keep an update at a place of the queue, instead of what is there."""
        self._updates[place:] = [update]
        if len(self._updates) == self._max_queued // 2:
            self._share_at_half = self._share

    def take(self, place: int) -> Update:
        """Return an update for its replay; the queue drops its sums."""
        update = self._updates[place]
        self._updates[place] = update.applied()
        return update

    @property
    def newer_would_be_in_time(self) -> bool:
        """True if this rank's part of a newer state would arrive before the queue, full now, is full again.

        At the pace of the queue's second half: the reason for a slow first half may be over, as a donor's death is.
        """
        half = self._max_queued - self._max_queued // 2
        return self._fetch.done() or self._max_queued * (self._share - self._share_at_half) >= half
