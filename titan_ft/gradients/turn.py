# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A helper thread that the waiting thread can leave inside a hung operation."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_POLL_SECONDS = 0.1
_LEAVE_SECONDS = 0.5  # that an aborted operation has to return before its thread is left


class Turn:
    """A lock that the helper thread holds, except inside an `operation`. Only there `wait` can leave it.

    A thread that was left may not continue: its operation raises when it returns.

    Args:
        is_broken: returns whether operations are aborted. None: the helper is never left.

    Attributes:
        left: the helper was left.
    """

    def __init__(self, is_broken: Callable[[], bool] | None) -> None:
        self._is_broken = is_broken
        self._lock = threading.Lock()
        self.left = False

    def held(self) -> contextlib.AbstractContextManager[bool]:
        """Hold the lock for the helper's whole run; called on the helper."""
        return self._lock

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        """Release the lock during a call that may block on other members; called on the helper.

        Raises:
            RuntimeError: the helper was left in this operation.
        """
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            if self.left:
                raise RuntimeError("this thread was left in an aborted operation: its results are void")

    def wait(self, event: threading.Event) -> None:
        """Return when `event` is set, or the helper was left; called on the thread that waits for the helper."""
        if self._is_broken is None:
            event.wait(None)
            return
        aborted_since: float | None = None
        while not (self.left or event.wait(_POLL_SECONDS)):
            helper_works = self._lock.locked()
            if helper_works or not self._is_broken():
                aborted_since = None
                continue
            if aborted_since is None:
                aborted_since = time.monotonic()
            if time.monotonic() - aborted_since < _LEAVE_SECONDS:
                continue
            if self._lock.acquire(blocking=False):  # False: the helper has just returned
                self.left = True
                self._lock.release()
