# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A helper thread that the waiting thread can abandon inside a hung operation."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_POLL_SECONDS = 0.1
_ABANDON_SECONDS = 0.5
"""An aborted operation may return within this time. Then its thread is abandoned."""


class Turn:
    """A lock that the helper thread holds, except inside an `operation`.

    Only inside an operation can `wait` abandon the helper. An abandoned helper may not continue:
    its operation raises when it returns. `Operations` has one for each exchange.

    Args:
        is_broken: returns True if operations are aborted. None: the helper is never abandoned.

    Attributes:
        abandoned: the helper was abandoned.
    """

    def __init__(self, is_broken: Callable[[], bool] | None) -> None:
        self._is_broken = is_broken
        self._lock = threading.Lock()
        self.abandoned = False

    def held(self) -> contextlib.AbstractContextManager[bool]:
        """Return a context that holds the lock for the helper's whole run; on the helper."""
        return self._lock

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        """Release the lock during a call that may block on other members; on the helper.

        Raises:
            RuntimeError: the helper was abandoned in this operation.
        """
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            if self.abandoned:
                raise RuntimeError(
                    "this thread was abandoned in an operation: its results are void",
                )

    def wait(self, event: threading.Event) -> None:
        """Return when `event` is set, or the helper is abandoned; on the waiting thread."""
        if self._is_broken is None:
            event.wait(None)
            return
        aborted_since: float | None = None
        while not (self.abandoned or event.wait(_POLL_SECONDS)):
            helper_works = self._lock.locked()
            if helper_works or not self._is_broken():
                aborted_since = None
                continue
            if aborted_since is None:
                aborted_since = time.monotonic()
            if time.monotonic() - aborted_since < _ABANDON_SECONDS:
                continue
            # If the lock is held, the operation has just returned, and the helper works on.
            if self._lock.acquire(blocking=False):
                self.abandoned = True
                self._lock.release()
