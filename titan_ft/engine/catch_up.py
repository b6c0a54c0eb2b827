# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A joiner's way back: the state of step s from a donor, and the reduced gradients of the updates since.

The donor's copy is of step s; while it travels the others commit s+1, s+2, ... The joiner takes part in those
exchanges with zeros and keeps their sums. When the state is there, the same updates applied to it give the same bytes.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from titan_ft import device
from titan_ft.protocol.decision import Update
from titan_ft.transfer.snapshot import Snapshot
from titan_ft.transfer.wire import TransferError


class Fetched(enum.IntEnum):
    """How far a rank's fetch is; the smallest value of its group counts."""

    FAILED = 0
    PENDING = 1
    DONE = 2


class CatchUp:
    """One attempt to heal from one donor.

    Args:
        donor: the donor's slot.
        from_step: committed updates of the state that is fetched.
        lineage, digest: of that state, as a round or an offer had them; a digest of None is yet to be
            learnt from the next round.
        fetch: fetches this rank's part until the event it gets is set, and calls the function it gets with the share
            of it that is there; runs on a thread of its own.
        most: updates that may be queued while it travels.
    """

    def __init__(
        self,
        donor: int,
        from_step: int,
        lineage: int,
        digest: int | None,
        fetch: Callable[[threading.Event, Callable[[float], None]], Snapshot],
        most: int,
    ) -> None:
        self.donor = donor
        self.from_step, self.lineage, self.digest = from_step, lineage, digest
        self.most = most
        self.updates: list[Update] = []
        self.share = 0.0  # of this rank's part, that is there
        self._share_at_half = 0.0  # when the queue was half full
        self.whole = False  # all ranks of the group have their part of the state, as all of them know
        self.loaded = False  # this rank's state is the one fetched, and what was replayed on it
        self.replayed = 0  # updates that are in the loaded state
        self._started = time.monotonic()
        self.fetch_seconds = 0.0  # that the fetch took
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
        self.share = share

    @property
    def target_step(self) -> int:
        """Return the committed updates that the state will have after the replay."""
        return self.from_step + len(self.updates)

    @property
    def seconds(self) -> float:
        """Return the time since the fetch began."""
        return time.monotonic() - self._started

    def fetched(self) -> Fetched:
        """Say how far this rank's fetch is."""
        if not self._fetch.done():
            return Fetched.PENDING
        return Fetched.FAILED if self.error else Fetched.DONE

    def wait(self, seconds: float) -> None:
        """Wait for the end of this rank's fetch, no longer than so."""
        with contextlib.suppress(TimeoutError):
            self._fetch.exception(max(0.0, seconds))

    @property
    def error(self) -> str | None:
        """Tell why the fetch failed; None while it runs or when it worked."""
        failure = self._fetch.exception() if self._fetch.done() else None
        if failure is not None and not isinstance(failure, TransferError):
            raise failure
        return None if failure is None else str(failure)

    def cancel(self) -> None:
        """Let the fetch end: its result is not wanted any more, nor is what is queued.

        An error that it ends with refers to this attempt, and memory of a GPU is not to wait for a garbage collection.
        """
        self._cancelled.set()
        self.updates.clear()

    def snapshot(self) -> Snapshot:
        """Return the fetched state."""
        return self._fetch.result(timeout=0)

    @property
    def fits(self) -> bool:
        """Say whether what this rank has fetched is the state of that round."""
        snapshot = self.snapshot()
        return (snapshot.step, snapshot.lineage) == (self.from_step, self.lineage)

    @property
    def remaining(self) -> int:
        """Return how many queued updates are not replayed yet."""
        return len(self.updates) - self.replayed

    def take(self) -> Update:
        """Return the next update to replay; the queue drops its sums."""
        update = self.updates[self.replayed]
        self.updates[self.replayed] = update.applied()
        self.replayed += 1
        return update

    def queue(self, update: Update, base: int) -> bool:
        """Keep an update that was made on the state of lineage `base`; False if this attempt is void.

        It is void when an update was missed, or when the others did not commit one that is queued. An update that
        nobody committed comes again under the same number and replaces the first, unless that is replayed already.
        """
        place = update.step - self.from_step - 1
        if not self.replayed <= place <= len(self.updates):
            return False
        if base != (self.updates[place - 1].lineage if place else self.lineage):
            return False
        self.updates[place:] = [update]
        if len(self.updates) == self.most // 2:
            self._share_at_half = self.share
        return True

    @property
    def full(self) -> bool:
        """Say whether no more updates may be queued."""
        return len(self.updates) >= self.most

    @property
    def newer_would_be_in_time(self) -> bool:
        """Say, with the queue full, whether this rank's part of a newer state would be there before it is full again.

        At the pace of the queue's second half: what kept the first one up may be over, as a donor's death is.
        """
        half = self.most - self.most // 2
        return self._fetch.done() or self.most * (self.share - self._share_at_half) >= half
