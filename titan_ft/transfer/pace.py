# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The pace of a donor: a limit on the rate at which it sends to all joiners together."""

from __future__ import annotations

import math
import socket
import sys
import threading
import time
from collections.abc import Callable

_SLICE_SECONDS = 0.02
"""A slice is what the rate allows in this time. So many connections take turns well before a joiner
would report a stall."""
_MAX_SLICE_BYTES = 256 << 10
_CREDIT_SECONDS = 0.05
"""A thread that wakes up late may send what the rate allows in this time at once."""


class Pace:
    """Limits the rate of all connections of a donor together.

    `StateServer` owns it. The threads of its connections call `send`; any thread may call `close`.

    Args:
        max_mbps: limit in 10**6 bits per second; 0 = no limit.
        clock: returns monotonic seconds.

    Attributes:
        slice_bytes: size of the pieces in which connections send.
    """

    def __init__(self, max_mbps: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_second = max_mbps * 1e6 / 8
        self._clock = clock
        self._next_slice_at = -math.inf
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.slice_bytes = sys.maxsize
        if self._bytes_per_second:
            num_bytes = int(self._bytes_per_second * _SLICE_SECONDS)
            self.slice_bytes = max(1, min(num_bytes, _MAX_SLICE_BYTES))

    def book(self, num_bytes: int) -> float:
        """Return the seconds until `num_bytes` may be sent, and count them as sent."""
        if not self._bytes_per_second:
            return 0.0
        with self._lock:
            now = self._clock()
            start = max(self._next_slice_at, now - _CREDIT_SECONDS)
            self._next_slice_at = start + num_bytes / self._bytes_per_second
            return max(0.0, start - now)

    def send(self, connection: socket.socket, data: memoryview) -> None:
        """Send `data` no faster than the limit.

        Raises:
            OSError: the peer has gone, or `close` was called.
        """
        for start in range(0, data.nbytes, self.slice_bytes):
            part = data[start : start + self.slice_bytes]
            if self._closed.wait(self.book(part.nbytes)):
                raise ConnectionAbortedError("the server is closed")
            connection.sendall(part)

    def close(self) -> None:
        """End all sending."""
        self._closed.set()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()
