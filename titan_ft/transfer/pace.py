# Copyright (c) the titan_ft authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause
"""The pace of a donor: a limit on the rate at which it sends to all joiners together.

A *donor* serves its state to groups that lack it, the *joiners*. The limit (`transfer_max_mbps`)
leaves the rest of the network to the training. Each connection sends small slices, and books the
time of each slice in one schedule that all connections share.
"""

from __future__ import annotations

import math
import socket
import sys
import threading
import time
from collections.abc import Callable

_SLICE_SECONDS = 0.02
"""A slice has the bytes that the rate allows in this time. Slices are short, so that many
connections can take turns, and none is silent for so long that its joiner takes it for broken."""
_MAX_SLICE_BYTES = 256 << 10
_CREDIT_SECONDS = 0.05
"""If the schedule has been idle, the bytes of this time may be sent at once. Without this credit,
each late wake-up of a thread would lower the rate."""


class Pace:
    """Limits the rate of all connections of a donor together.

    `StateServer` owns it. Threads: the threads of its connections call `send`, and any thread may
    call `close`.

    Args:
        max_mbps: limit in 10**6 bits per second; 0 = no limit.
        clock: returns monotonic seconds.

    Attributes:
        slice_bytes: size of the slices in which connections send.
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
        """Book the next free time for a slice, and return the seconds until then."""
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
        """Make `send` raise, on all connections, now and from now on."""
        self._closed.set()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()
