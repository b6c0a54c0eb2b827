# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""Whose turn it is: a thread that works for another one, and that may be left in an operation which does not end."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

_LOOK_SECONDS = 0.1  # between two looks whether the operation was aborted
_LEAVE_SECONDS = 0.5  # that the thread may need to come back from an operation that was aborted


class Turn:
    """The thread has its turn, except in an operation. Only then it can be left, and it has no other turn afterwards.

    Args:
        is_broken: says whether operations are aborted; without it the thread is never left.

    Attributes:
        left: the thread was left.
    """

    def __init__(self, is_broken: Callable[[], bool] | None) -> None:
        self._is_broken = is_broken
        self._lock = threading.Lock()
        self.left = False

    def held(self) -> contextlib.AbstractContextManager[bool]:
        """Do what the thread does, on the thread."""
        return self._lock

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        """Do what may take as long as other members like, on the thread.

        Raises:
            RuntimeError: the thread was left in it.
        """
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            if self.left:
                raise RuntimeError("left in an operation")

    def wait(self, event: threading.Event) -> None:
        """Wait for an event of the thread, or leave the thread in an operation that was aborted and does not end."""
        if self._is_broken is None:
            event.wait(None)
            return
        broken = math.inf  # when the operation was seen to be aborted
        while not (self.left or event.wait(_LOOK_SECONDS)):
            if self._lock.locked() or not self._is_broken():
                broken = math.inf
                continue
            broken = min(broken, time.monotonic())
            if time.monotonic() - broken >= _LEAVE_SECONDS and self._lock.acquire(blocking=False):
                self.left = True
                self._lock.release()
