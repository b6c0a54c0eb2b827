# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The pace of a donor: what it sends to all joiners together keeps to a rate."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable

_SLICE_SECONDS = 0.02  # of the rate in one slice: many connections take turns well within a stall
_MAX_SLICE = 256 << 10  # bytes
_CREDIT_SECONDS = 0.05  # of the rate that a thread which woke up late may make up for


class Pace:
    """Keeps what all connections send together to a rate.

    Args:
        max_mbps: 10**6 bits per second; 0 = as fast as it goes.
        clock: seconds that only grow.
    """

    def __init__(self, max_mbps: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = max_mbps * 1e6 / 8  # bytes per second
        self._clock = clock
        self._next = float("-inf")  # when the next slice may go
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.slice = max(1, min(int(self._rate * _SLICE_SECONDS), _MAX_SLICE)) if self._rate else sys.maxsize

    def book(self, num_bytes: int) -> float:
        """Return the seconds until `num_bytes` more may be sent; they count as sent from now on."""
        if not self._rate:
            return 0.0
        with self._lock:
            now = self._clock()
            start = max(self._next, now - _CREDIT_SECONDS)
            self._next = start + num_bytes / self._rate
            return max(0.0, start - now)

    def send(self, connection: socket.socket, data: memoryview) -> None:
        """Send `data` no faster than allowed; ends with an OSError when the peer goes away or the pace is closed."""
        for start in range(0, data.nbytes, self.slice):
            part = data[start : start + self.slice]
            if self._closed.wait(self.book(part.nbytes)):
                raise ConnectionAbortedError("the server is closed")
            connection.sendall(part)

    def close(self) -> None:
        """End all sending."""
        self._closed.set()

    @property
    def closed(self) -> bool:
        """Say whether sending has ended."""
        return self._closed.is_set()
