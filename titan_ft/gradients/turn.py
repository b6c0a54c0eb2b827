# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""A lock by which a thread can abandon its helper thread inside a hung operation.

An exchange has a helper thread that makes its collectives. If the communicator is aborted, a
collective of NCCL may hang (`operations.py`). The training thread must then go on without the
helper, but only if the helper can do no more harm: it must neither write to a bucket nor make a
collective of a later exchange.

1. The helper holds the lock, and releases it only inside an operation.
2. The training thread waits for the helper's end. If the operations are aborted, and the helper is
   inside an operation for longer than `_ABANDON_SECONDS`, the training thread abandons it.
3. When the operation returns, the helper raises an error, and ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

_POLL_SECONDS = 0.1
_ABANDON_SECONDS = 0.5
"""Time that the helper has to come back from an aborted operation. After it, it is abandoned."""


class Turn:
    """A lock that the helper thread holds, except inside an `operation`.

    `Operations` has one for each exchange.

    Args:
        is_broken: returns True if the operations were aborted; None = never abandon the helper.

    Attributes:
        abandoned: the helper was abandoned.
    """

    def __init__(self, is_broken: Callable[[], bool] | None) -> None:
        self._is_broken = is_broken
        self._lock = threading.Lock()
        self.abandoned = False

    def held(self) -> contextlib.AbstractContextManager[bool]:
        """Return a context that holds the lock. The helper runs in this context."""
        return self._lock

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        """Release the lock during an operation, which may hang; called by the helper.

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
        """Wait until `event` is set, or abandon the helper; called by the training thread."""
        if self._is_broken is None:
            event.wait(None)
            return
        aborted_since: float | None = None
        while not (self.abandoned or event.wait(_POLL_SECONDS)):
            is_in_operation = not self._lock.locked()
            if not is_in_operation or not self._is_broken():
                aborted_since = None
                continue
            if aborted_since is None:
                aborted_since = time.monotonic()
            if time.monotonic() - aborted_since < _ABANDON_SECONDS:
                continue
            # If the lock is held, the operation has just returned, and the helper goes on.
            if self._lock.acquire(blocking=False):
                self.abandoned = True
                self._lock.release()
